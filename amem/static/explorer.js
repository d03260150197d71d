// The explorer: an index of notes, the graph in 3D, and the details and search path of the chosen note.
// model: "data" and "plotly" (gzip in base64), "selected" (a note's id or ""). Note text only ever enters as text nodes.

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const WIDTH_TO_HEIGHT = 1.6; // of the whole scene with its labels, as the camera of style.json sees it
const plain = (text) => text.normalize("NFKC").toLowerCase();
const when = (time) => (time ? time.slice(0, 16).replace("T", " ") : "");
const short = (text, most = 70) => ([...text].length > most ? [...text].slice(0, most).join("") + "…" : text);

// Events with their notes and dates, by the month in which they began. Notes without an event go by their session.
function eventIndex(nodes, titles) {
  const events = new Map();
  for (const node of nodes) {
    const key = node.event ?? node.session;
    if (!events.has(key)) events.set(key, { key, title: titles[key] ?? key, count: 0, days: [] });
    const event = events.get(key);
    event.count += 1;
    if (node.time) event.days.push(node.time.slice(0, 10));
  }
  const months = new Map();
  for (const event of events.values()) event.days.sort();
  for (const event of [...events.values()].sort((a, b) => ((a.days[0] ?? "9") < (b.days[0] ?? "9") ? -1 : 1))) {
    const month = event.days.length ? event.days[0].slice(0, 7) : "";
    months.set(month, [...(months.get(month) ?? []), event]);
  }
  return months;
}

// x, y, z of many lines in one plotly trace: null parts one line from the next.
function coordinates(lines) {
  const points = lines.flatMap((line, i) => (i ? [[null, null, null], ...line] : line));
  return { x: points.map((p) => p[0]), y: points.map((p) => p[1]), z: points.map((p) => p[2]) };
}

function explore(el, model, data, Plotly) {
  const { nav, words } = data;
  const nodes = nav.nodes;
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const scopes = new Map(data.scopes.map(([id, name, colour, glyph]) => [id, { name, colour, glyph }]));
  const texts = nodes.map((n) => plain([n.content, n.context, n.turn_id, ...n.keywords, ...n.tags].join("\n")));
  const filter = { words: [], event: null, scopes: new Set(scopes.keys()) };
  let visible = new Set(byId.keys());
  const chosen = () => byId.get(model.get("selected"));
  const place = (node, level) => [node.x, node.y, level];

  function select(id) {
    model.set("selected", id);
    model.save_changes();
  }

  function glyph(scope) {
    const { glyph: sign, colour } = scopes.get(scope);
    return h("span", { class: "glyph", style: `color: ${colour}`, "aria-hidden": "true" }, sign);
  }

  // ---- index ----
  const list = h("ul", { class: "notes", "aria-label": words.notes });
  const count = h("p", { class: "soft", role: "status" });
  const buttons = nodes.map((node) =>
    h("button", { type: "button", "data-note-id": node.id, onclick: () => select(node.id) },
      glyph(node.scope), h("span", { class: "text" }, node.content)));
  // Arrow keys walk the list, as in any list of choices.
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const next = step && document.activeElement.closest("li")?.[step];
    if (!next) return;
    event.preventDefault();
    next.firstChild.focus();
  });

  function applyFilter() {
    const fits = (node, i) =>
      filter.scopes.has(node.scope) &&
      (filter.event === null || (node.event ?? node.session) === filter.event) &&
      filter.words.every((word) => texts[i].includes(word));
    const shown = nodes.map((node, i) => i).filter((i) => fits(nodes[i], i));
    visible = new Set(shown.map((i) => nodes[i].id));
    list.replaceChildren(...shown.map((i) => h("li", {}, buttons[i])));
    count.textContent = fill(words.count, { shown: shown.length, n: nodes.length });
    if (!shown.length) list.append(h("li", { class: "soft" }, nodes.length ? words.nothing : words.empty));
    draw();
  }

  const eventButton = (key, title, number, dates) =>
    h("button", { type: "button", "aria-pressed": String(filter.event === key), "data-event": key ?? "", onclick: (e) => {
      filter.event = key;
      for (const other of e.currentTarget.closest("nav").querySelectorAll("button")) {
        other.setAttribute("aria-pressed", String(other === e.currentTarget));
      }
      applyFilter();
    } }, h("span", {}, title), h("span", { class: "dates" }, dates), h("span", { class: "count" }, String(number)));
  const index = h("nav", { class: "events", "data-testid": "event-index", "aria-label": words.events },
    h("h2", {}, words.events),
    h("ul", {}, h("li", {}, eventButton(null, words.all, nodes.length, ""))),
    ...[...eventIndex(nodes, data.events)].flatMap(([month, events]) => [
      h("h2", {}, month || words.undated),
      h("ul", {}, ...events.map(({ key, title, count: number, days }) => {
        const ends = new Set(days.length ? [days[0].slice(5), days[days.length - 1].slice(5)] : []);
        return h("li", {}, eventButton(key, title, number, [...ends].join(" – ")));
      })),
    ]));
  const search = h("input", { type: "search", "data-testid": "search", placeholder: words.search, "aria-label": words.search,
    oninput: () => {
      filter.words = plain(search.value).split(/\s+/).filter(Boolean);
      applyFilter();
    } });
  const scopeBoxes = h("fieldset", {}, h("legend", {}, words.scopes), ...[...scopes].map(([id, { name }]) => {
    const box = h("input", { type: "checkbox", checked: "", value: id, onchange: () => {
      filter.scopes[box.checked ? "add" : "delete"](id);
      applyFilter();
    } });
    const number = nodes.filter((node) => node.scope === id).length;
    return h("label", { class: "scope" }, box, glyph(id), name, h("span", { class: "count" }, String(number)));
  }));

  // ---- details ----
  const details = h("section", { class: "details", "data-testid": "details", "aria-label": words.details, hidden: "" });

  function noteButton(node, line) {
    return h("button", { type: "button", onclick: () => select(node.id) },
      h("span", { class: "soft" }, line), h("span", {}, short(node.content)));
  }

  function traceSection(trace) {
    const box = h("section", { "data-testid": "trace" }, h("h3", {}, words.trace));
    if (!trace) {
      box.append(h("p", { class: "soft" }, words.no_trace));
      return box;
    }
    const line = ([kind, level, , , distance]) => `L${level} · ${words[kind]} · ${(distance / 1e4).toFixed(4)}`;
    const numbered = ([, , source, target]) => [nodes[source], nodes[target]];
    box.append(h("p", { class: trace.hit ? "hit" : "miss" }, trace.said));
    if (!trace.steps.length) return box;
    if (!trace.hit) box.append(h("p", { class: "soft" }, words.path_to_best));
    box.append(
      h("ol", { class: "path" }, ...trace.path.map((at) => {
        const step = trace.steps[at];
        const button = noteButton(numbered(step)[1], line(step));
        button.dataset.pathId = numbered(step)[1].id;
        return h("li", {}, button);
      })),
      h("details", {}, h("summary", {}, fill(words.all_steps, { n: trace.steps.length })),
        h("ol", { class: "steps" }, ...trace.steps.map((step) =>
          h("li", {}, h("span", { class: "soft" }, line(step)), h("br", {}), short(numbered(step)[1].content, 40))))));
    return box;
  }

  function showDetails(node) {
    el.classList.toggle("open", Boolean(node));
    details.hidden = !node;
    if (!node) return;
    const turn = data.turns[node.turn_id];
    const rows = [
      [words.scope, h("span", {}, glyph(node.scope), " ", scopes.get(node.scope).name)],
      [words.top_level, `L${node.level}`],
      [words.event, node.event && (data.events[node.event] ?? node.event)],
      [words.said_by, node.speaker],
      [words.time, when(node.time)],
      [words.session, node.session],
      [words.superseded, when(node.valid_to)],
      [words.weights, fill(words.weights_value, node)],
      [words.keywords, node.keywords.join(", ")],
      [words.tags, node.tags.join(", ")],
      [words.context, node.context],
    ];
    const links = nav.edges
      .filter((edge) => edge.source === node.id || edge.target === node.id)
      .sort((a, b) => b.score - a.score)
      .map((edge) => {
        const other = byId.get(edge.source === node.id ? edge.target : edge.source);
        const levels = edge.levels.map((level) => `L${level}`).join(" ") + (edge.bridge ? ` ${words.bridge}` : "");
        return h("li", {}, noteButton(other, fill(words.link, { levels, score: edge.score.toFixed(2) })));
      });
    details.replaceChildren(
      h("button", { type: "button", class: "close", "aria-label": words.close, onclick: () => select("") }, "✕"),
      h("h2", {}, node.id),
      h("p", { class: "content" }, node.content),
      h("dl", {}, ...rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      h("h3", {}, fill(words.source, { id: node.turn_id })),
      h("p", { class: "soft" }, turn ? [turn[0], when(turn[1])].filter(Boolean).join(" · ") : words.no_source),
      h("blockquote", {}, turn?.[2] ?? ""),
      traceSection(data.traces[node.id]),
      h("h3", {}, words.links), h("ul", { class: "links" }, ...links));
    details.scrollTop = 0;
  }

  // ---- graph ----
  const said = h("p", { class: "said", role: "status" });
  const plot = h("div", { class: "plot", "data-testid": "plot", tabindex: "-1" });
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => {
    const jupyter = document.body.dataset.jpThemeLight;
    return jupyter === undefined ? wantsDark.matches : jupyter === "false";
  };

  function walked(trace) {
    const lines = { path: [], taken: [], rejected: [] };
    if (!trace) return lines;
    const onPath = new Set(trace.path);
    lines.path.push(trace.path.map((at) => place(nodes[trace.steps[at][3]], trace.steps[at][1])));
    trace.steps.forEach(([kind, level, source, target], at) => {
      if (source < 0 || onPath.has(at)) return;
      lines[kind === "reject" ? "rejected" : "taken"].push([place(nodes[source], level), place(nodes[target], level)]);
    });
    return lines;
  }

  // The figure as Python made it; what depends on choice and filter is put in by role.
  function traces(node, trace) {
    const lines = walked(trace);
    const marks = { entry: byId.get(trace?.steps.length ? nodes[trace.steps[0][3]].id : nav.params.entry), target: node };
    return data.figure.data.map((base) => {
      const role = base.meta;
      if (role in lines) return { ...base, ...coordinates(lines[role]), showlegend: lines[role].length > 0 };
      if (role in marks) return { ...base, ...coordinates(marks[role] ? [[place(marks[role], marks[role].level)]] : []) };
      if (trace && (role === "edge" || role === "bridge")) {
        return { ...base, line: { ...base.line, color: data.dim }, showlegend: false };
      }
      if (role === "shadow") {
        const height = (n) => n.level + (visible.has(n.id) ? 0 : 1);
        return { ...base, ...coordinates(nodes.map((n) => Array.from({ length: height(n) }, (_, level) => place(n, level)))) };
      }
      if (!scopes.has(role)) return base;
      const kept = base.customdata.map((id, i) => i).filter((i) => visible.has(base.customdata[i]));
      const pick = (values) => kept.map((i) => values[i]);
      return { ...base, x: pick(base.x), y: pick(base.y), z: pick(base.z), customdata: pick(base.customdata),
        hovertext: pick(base.hovertext), showlegend: false };
    });
  }

  function layout(node, trace) {
    const { scene, ...rest } = data.figure.layout;
    if (!scene) return rest;
    const start = trace?.steps.length ? nodes[trace.steps[0][3]] : byId.get(nav.params.entry);
    const annotations = scene.annotations.map((label) => {
      const at = label.name === "entry" ? start : node;
      return at ? { ...label, x: at.x, y: at.y, z: at.level, visible: true } : { ...label, visible: false };
    });
    // The camera is orthographic, which fits the height only: a narrow plot needs narrower planes.
    const fit = Math.min(1, plot.clientWidth / plot.clientHeight / WIDTH_TO_HEIGHT);
    const { x, y, z } = scene.aspectratio;
    return { ...rest, scene: { ...scene, annotations, aspectratio: { x: x * fit, y: y * Math.sqrt(fit), z } } };
  }

  const coloured = (part) => JSON.parse(JSON.stringify(part, (key, value) =>
    /color$/.test(key) && isDark() && typeof value === "string" ? (data.dark[value] ?? value) : value));

  function draw() {
    el.dataset.theme = isDark() ? "dark" : "light";
    const node = chosen();
    const trace = node && data.traces[node.id];
    said.textContent = trace ? trace.said : node ? words.no_trace : words.hint;
    said.classList.toggle("hit", trace?.hit === true);
    said.classList.toggle("miss", trace?.hit === false);
    return Plotly.react(plot, coloured(traces(node, trace)), coloured(layout(node, trace)), { displaylogo: false })
      .then(leaveToNodes)
      .catch((error) => { said.textContent = fill(words.no_graph, { error }); });
  }

  // plotly looks up what is under the pointer even in traces without hover: lines and rings cover the notes behind them,
  // and a line that has become shorter since the last look-up breaks the whole drawing (plotly.js 4.1.1).
  function leaveToNodes() {
    for (const trace of Object.values(plot._fullLayout.scene?._scene.traces ?? {})) {
      if (trace.data.hoverinfo !== "skip") continue;
      for (const drawn of [trace.linePlot, trace.scatterPlot, trace.textMarkers]) {
        if (drawn) Object.assign(drawn, { drawPick: () => {}, pick: () => null });
      }
    }
  }

  function listenToClicks() {
    // plotly samples clicks in 3D once a frame and loses them (plotly.js#6185): take the pointer's own event instead.
    // Its hover comes with the next frame; the note under the pointer is known after that.
    let over = null;
    let down = [0, 0];
    plot.on("plotly_hover", ({ points }) => { over = points[0].customdata; });
    plot.on("plotly_unhover", () => { over = null; });
    plot.addEventListener("pointerdown", (e) => {
      down = [e.clientX, e.clientY];
      plot.focus({ preventScroll: true }); // plotly keeps the browser from it; then Escape would go elsewhere
    }, true);
    plot.addEventListener("pointerup", (e) => {
      if (Math.hypot(e.clientX - down[0], e.clientY - down[1]) >= 5) return;
      requestAnimationFrame(() => requestAnimationFrame(() => { if (over !== null) select(over); }));
    }, true);
  }

  function update() {
    const node = chosen();
    buttons.forEach((button, i) => button.setAttribute("aria-current", String(nodes[i] === node)));
    showDetails(node);
    if (node) buttons[nodes.indexOf(node)].scrollIntoView({ block: "nearest" });
    if (node && matchMedia("(max-width: 860px)").matches) el.scrollIntoView(); // there the graph stands above the list
    draw();
  }

  el.classList.add("amem");
  el.replaceChildren(
    h("aside", {}, h("h1", {}, data.title || words.notes), search, scopeBoxes, index, count, list),
    h("main", {}, said, plot),
    details);
  el.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen()) select(""); });
  model.on("change:selected", update);
  wantsDark.addEventListener("change", draw);
  applyFilter();
  listenToClicks();
  new ResizeObserver(() => {
    Plotly.Plots.resize(plot).catch(() => {}); // plotly refuses while the plot is hidden
    draw();
  }).observe(plot);
}

async function render({ model, el }) {
  if (!("DecompressionStream" in window)) {
    el.textContent = "This page needs a browser of 2023 or later, which can unpack gzip. 此页面需要 2023 年及以后的浏览器。";
    return;
  }
  const data = JSON.parse(await unpack(model.get("data")));
  if (!window.Plotly) {
    const script = document.createElement("script");
    script.textContent = await unpack(model.get("plotly"));
    document.head.append(script);
  }
  explore(el, model, data, window.Plotly);
}

export default { render };
