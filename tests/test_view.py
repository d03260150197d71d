"""The figure and the page show what graph and trace hold, in a real Chromium, and nothing that a note says is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from amem import graph, view
from amem.notes import Scope
from amem.trace import Trace, search

N = 60
EVENTS = ["laptop", "deposit", "course"]
EVIL = """</script><img src=x onerror="window.ran=1"><b>bold</b> $a$ {said} & "quoted" <script>window.ran=1</script>"""
FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]  # fmt: skip

# Where a note stands on the screen: its place through plotly's own camera.
PIXEL = """(id) => {
  const scene = document.querySelector("[data-testid=plot]")._fullLayout.scene._scene;
  const { model, view, projection } = scene.glplot.cameraParams;
  const trace = Object.values(scene.traces).map((t) => t.data).find((t) => t.customdata?.includes(id));
  const at = trace.customdata.indexOf(id);
  let v = [trace.x[at], trace.y[at], trace.z[at]].map((c, axis) => c * scene.dataScale[axis]).concat(1);
  for (const m of [model, view, projection]) {
    v = [0, 1, 2, 3].map((row) => [0, 1, 2, 3].reduce((sum, column) => sum + m[column * 4 + row] * v[column], 0));
  }
  const box = scene.glplot.canvas.getBoundingClientRect();
  return [box.left + ((v[0] / v[3] + 1) / 2) * box.width, box.top + ((1 - v[1] / v[3]) / 2) * box.height];
}"""


def _built() -> graph.LayeredGraph:
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(len(EVENTS), 24))
    vectors = centres[np.arange(N) % len(EVENTS)] + 0.6 * rng.normal(size=(N, 24))
    return graph.article(vectors, [f"n{i:02d}" for i in range(N)])


BUILT = _built()


def _nav(built: graph.LayeredGraph) -> dict[str, Any]:
    """The graph as `Memory.nav_graph()` gives it, with invented notes."""
    scopes = list(Scope)
    nodes = [
        {
            "id": name, "level": int(built.levels[i]), "scope": scopes[i % 5].value, "x": x, "y": y,
            "content": EVIL if i == 3 else f"Fact number {i} about the {EVENTS[i % 3]} 押金", "context": "",
            "keywords": [f"word{i}"], "tags": [], "importance": 0.5, "confidence": 0.5, "speaker": "Ann",
            "session": f"s{i // 20}", "event": EVENTS[i % 3], "turn_id": f"t{i}", "valid_to": None,
            "time": f"2026-03-{1 + i // 2:02d}T08:00:00+08:00",
        }
        for i, (name, (x, y)) in enumerate(zip(built.ids, view.layout(built.vectors).tolist(), strict=True))
    ]  # fmt: skip
    pairs: dict[tuple[int, int], list[int]] = {}
    for level in range(built.max_level + 1):
        for pair in built.edges(level):
            pairs.setdefault(pair, []).append(level)
    edges = [
        {"source": built.ids[i], "target": built.ids[j], "levels": on, "score": 0.5, "bridge": (i, j) in built.bridges}
        for (i, j), on in pairs.items()
    ]
    layers = [
        {"level": level, "nodes": int(np.sum(built.levels >= level)), "edges": len(list(built.edges(level)))}
        for level in range(built.max_level + 1)
    ]
    params = {**built.params, "kind": built.kind, "entry": built.ids[built.entry] if len(built) else None}
    return {"nodes": nodes, "edges": edges, "layers": layers, "params": params}


NAV = _nav(BUILT)
EMPTY = _nav(graph.article(np.zeros((0, 4)), []))


def _trace(name: str, ef: int = 16) -> Trace:
    return search(BUILT, BUILT.vectors[BUILT.index_of[name]], k=1, ef=ef).expect(name)


TRACES = {name: _trace(name) for name in BUILT.ids}
TURNS = {f"t{i}": {"speaker": "Ann", "time": None, "text": f"What was said in turn {i}. {EVIL}"} for i in range(N)}


def _of(fig: go.Figure, role: str) -> list[Any]:
    return [trace for trace in fig.data if trace.meta == role]


def _lines(drawn: Any) -> list[list[tuple[float, float, float]]]:
    lines: list[list[tuple[float, float, float]]] = [[]]
    for point in zip(drawn.x, drawn.y, drawn.z, strict=True):
        if point[0] is None:
            lines.append([])
        else:
            lines[-1].append(point)
    return lines


def _place(name: str, level: int) -> tuple[float, float, float]:
    node = NAV["nodes"][BUILT.index_of[name]]
    return node["x"], node["y"], float(level)


# ---- layout ----


def test_layout_is_the_same_on_every_run_and_keeps_matters_together() -> None:
    flat = view.layout(BUILT.vectors)
    assert np.array_equal(flat, view.layout(BUILT.vectors.copy()))
    assert flat.shape == (N, 2)
    assert flat.min() >= 0
    assert flat.max() <= 1
    apart = np.hypot(*(flat[:, None] - flat[None]).transpose(2, 0, 1))
    same = (np.arange(N)[:, None] - np.arange(N)) % len(EVENTS) == 0
    np.fill_diagonal(apart, 1)
    nearest = apart.argsort(axis=1)[:, :5]
    assert np.mean(np.take_along_axis(same, nearest, axis=1)) > 0.8
    assert apart.min() > 0.02


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
def test_layout_of_few_or_equal_vectors(n: int) -> None:
    for vectors in (np.eye(8)[:n], np.ones((n, 8)) / np.sqrt(8)):
        flat = view.layout(vectors)
        assert flat.shape == (n, 2)
        assert np.isfinite(flat).all()
        assert len({tuple(p) for p in flat.tolist()}) == n


# ---- figure ----


@pytest.mark.parametrize("name", ["n00", "n17", "n59"])
def test_the_drawn_path_is_the_walked_path(name: str) -> None:
    trace = TRACES[name]
    for given in (trace, trace.to_dict()):
        fig = view.figure(NAV, given)
        (path,) = _of(fig, "path")
        assert _lines(path) == [[_place(step.target, step.level) for step in trace.path()]]
        assert str(trace.evaluations) in fig.layout.title.text
        walked = len(trace.path()) - 1
        compared = sum(len(_lines(drawn)) for role in ("taken", "rejected") for drawn in _of(fig, role) if drawn.x)
        assert walked + compared == len(trace.steps) - 1
        assert _of(fig, "entry")[0].x[0] == _place(trace.steps[0].target, 0)[0]


def test_the_title_says_hit_and_not_hit() -> None:
    assert view.figure(NAV, TRACES["n05"]).layout.title.text.startswith("Hit: reached after")
    misses = [t for t in (_trace(name, ef=1) for name in BUILT.ids) if not t.hit]
    assert misses
    assert "Not hit" in view.figure(NAV, misses[0]).layout.title.text
    assert "未命中" in view.figure(NAV, misses[0], "zh").layout.title.text
    filtered_out = Trace("article", 1, 16, "hnsw", target="elsewhere", hit=False)
    assert "not in the searched graph" in view.figure(NAV, filtered_out).layout.title.text


def test_every_edge_and_level_is_drawn_once_and_dimmed_under_a_trace() -> None:
    plain, traced = view.figure(NAV), view.figure(NAV, TRACES["n05"])
    per_level = [len(_lines(drawn)) for drawn in _of(plain, "edge")]
    bridges = sum(edge["bridge"] for edge in NAV["edges"])
    assert per_level == [layer["edges"] - (bridges if layer["level"] == 0 else 0) for layer in NAV["layers"]]
    assert [len(_lines(drawn)) for drawn in _of(plain, "bridge") if drawn.x] == [bridges] * bool(bridges)
    assert len(_of(plain, "shadow")[0].x) == sum(node["level"] for node in NAV["nodes"])
    assert {drawn.line.color for drawn in _of(traced, "edge")} == {view.DIM}
    assert view.DIM not in {drawn.line.color for drawn in _of(plain, "edge")}
    assert plain.layout.uirevision == traced.layout.uirevision == "amem"


def test_hover_text_is_text() -> None:
    fig = view.figure(NAV)
    drawn = [trace for scope in Scope for trace in _of(fig, scope.value)]
    texts = {i: text for trace in drawn for i, text in zip(trace.customdata, trace.hovertext, strict=True)}
    assert len(texts) == N
    evil = texts["n03"]
    assert "&lt;/script&gt;" in evil
    assert "&lt;b&gt;bold" in evil
    assert "$" not in evil, "two dollar signs are TeX to plotly where MathJax is loaded"
    assert set(evil.replace("<br>", "").replace("<b>", "").replace("</b>", "")).isdisjoint("<>")
    assert "Ann · t3 · s0 · 2026-03-02 08:00" in evil


def test_long_hover_text_is_broken_and_cut() -> None:
    node = {**NAV["nodes"][0], "content": "字" * 2000}
    (drawn,) = _of(view.figure({**NAV, "nodes": [node, *NAV["nodes"][1:]]}), node["scope"])
    rows = drawn.hovertext[0].split("<br>")
    assert max(map(len, rows)) <= 48
    assert "…" in rows
    assert len(rows) < 12


def test_an_empty_graph_says_so() -> None:
    fig = view.figure(EMPTY, language="zh")
    assert not fig.data
    assert "还没有记忆" in fig.layout.annotations[0].text


def test_a_trace_of_another_graph_is_an_error() -> None:
    other = Trace("article", 1, 1, "hnsw", steps=[TRACES["n00"].steps[0]._replace(target="stranger")])
    with pytest.raises(ValueError, match="stranger"):
        view.figure(NAV, other)


def test_plotly_is_not_loaded_with_the_module() -> None:
    code = "import sys; from amem import view; print('plotly' in sys.modules, 'IPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def _chromium() -> str:
    found = os.environ.get("AMEM_CHROMIUM") or shutil.which("chromium")
    if not found:
        reason = "no Chromium: set AMEM_CHROMIUM or install one (make chromium)"
        print(reason)
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return str(found)


def test_a_shown_figure_is_interactive_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _chromium()
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    view.show(view.figure(NAV, TRACES["n05"]), 500, 400)
    assert {"application/vnd.plotly.v1+json", "image/png"} <= set(shown[0])
    assert shown[0]["application/vnd.plotly.v1+json"]["layout"]["width"] == 500


def test_without_a_chromium_there_is_no_image_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr(go.Figure, "to_image", refuse)
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    view.show(view.figure(NAV))
    assert "image/png" not in shown[0]
    printed = capsys.readouterr()
    assert "apt-get install chromium" in printed.out
    assert printed.err == ""
    assert view.image(view.figure(NAV), tmp_path / "x.png") is False
    assert list(tmp_path.iterdir()) == []


# ---- page ----


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = _chromium()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    titles = {"laptop": "The laptop", "deposit": "The <b>deposit</b>"}
    return view.page(NAV, TRACES, TURNS, path, "March </title>", event_titles=titles)


def until(page: Page, condition: str, seconds: float = 30) -> None:
    """Wait for a condition in the page. Playwright's own wait polls by eval, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        page.wait_for_timeout(50)


@pytest.fixture(scope="session")
def _watched(browser: Browser, explorer: Path) -> Iterator[Page]:
    """The page, opened once; whatever it reports or requests on the way fails the test that made it do so."""
    opened = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints: list[str] = []
    opened.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "request",
        lambda r: None if r.url.split(":")[0] in ("file", "blob", "data") else complaints.append(f"request {r.url}"),
    )
    opened.complaints = complaints  # type: ignore[attr-defined]
    opened.goto(explorer.as_uri())
    opened.wait_for_selector("[data-testid=plot] canvas")
    until(opened, "!!document.querySelector('[data-testid=plot]')._fullLayout?.scene._scene.glplot.cameraParams")
    yield opened


@pytest.fixture
def page(_watched: Page) -> Iterator[Page]:
    _watched.keyboard.press("Escape")
    _watched.get_by_test_id("search").fill("")
    _watched.locator("[data-event='']").click()
    yield _watched
    assert _watched.complaints == []  # type: ignore[attr-defined]


def _listed(page: Page) -> list[str]:
    found: list[str] = page.locator("[data-note-id]").evaluate_all("all => all.map((b) => b.dataset.noteId)")
    return found


def _drawn(page: Page, role: str) -> list[list[Any]]:
    code = "(role) => { const t = document.querySelector('[data-testid=plot]').data.find((t) => t.meta === role);"
    points: list[list[Any]] = page.evaluate(code + " return t.x.map((x, i) => [x, t.y[i], t.z[i]]); }", role)
    return points


def test_choosing_a_note_shows_its_text_and_the_path_of_its_own_search(page: Page) -> None:
    for name in ("n05", "n42"):
        page.locator(f"[data-note-id={name}]").click()
        details = page.get_by_test_id("details")
        i = BUILT.index_of[name]
        assert NAV["nodes"][i]["content"] in details.inner_text()
        assert f"What was said in turn {i}." in details.inner_text()
        steps = TRACES[name].path()
        shown = page.locator("[data-testid=trace] [data-path-id]")
        assert shown.evaluate_all("all => all.map((b) => b.dataset.pathId)") == [s.target for s in steps]
        assert page.get_by_test_id("trace").locator("p").first.inner_text() == view.sentence(TRACES[name])
        assert _drawn(page, "path") == [list(_place(s.target, s.level)) for s in steps]
        links = [e for e in NAV["edges"] if name in (e["source"], e["target"])]
        assert page.locator(".links button").count() == len(links)


def test_the_page_draws_what_the_figure_draws(page: Page) -> None:
    page.locator("[data-note-id=n17]").click()
    fig = view.figure(NAV, TRACES["n17"])
    for role in ("path", "taken", "rejected", "entry", "target", "shadow", *(scope.value for scope in Scope)):
        (drawn,) = _of(fig, role)
        expected = [list(point) for point in zip(drawn.x, drawn.y, drawn.z, strict=True)]
        found = [point for point in _drawn(page, role) if role != "shadow" or point[0] is not None]
        assert found == expected, role


def test_clicking_a_node_in_the_plot_selects_it(page: Page) -> None:
    page.locator("[data-note-id=n00]").click()
    page.wait_for_timeout(500)  # the plot has moved over for the panel
    pixels = {name: page.evaluate(PIXEL, name) for name in BUILT.ids}
    alone = [
        name for name in BUILT.ids[1:]
        if all(np.hypot(*np.subtract(pixels[name], pixels[other])) > 24 for other in BUILT.ids if other != name)
    ]  # fmt: skip
    assert len(alone) >= 5
    for name in alone[:5]:
        page.mouse.click(*pixels[name])
        page.wait_for_selector(f"[data-note-id={name}][aria-current=true]", timeout=5000)
    assert NAV["nodes"][BUILT.index_of[name]]["content"] in page.get_by_test_id("details").inner_text()


def test_dragging_turns_the_graph_and_selects_nothing(page: Page) -> None:
    x, y = page.evaluate(PIXEL, "n10")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 10, steps=4)
    page.mouse.up()
    page.wait_for_timeout(200)
    assert page.locator("[aria-current=true]").count() == 0
    assert page.get_by_test_id("details").is_hidden()


def test_markup_in_notes_turns_and_titles_is_shown_and_not_run(page: Page) -> None:
    page.locator("[data-note-id=n03]").click()
    details = page.get_by_test_id("details")
    assert details.locator(".content").inner_text() == EVIL
    assert EVIL in details.locator("blockquote").inner_text()
    assert page.locator("[data-note-id=n03]").inner_text().strip().endswith(EVIL)
    assert "The <b>deposit</b>" in page.get_by_test_id("event-index").inner_text()
    assert page.title() == "March </title>"
    page.mouse.move(*page.evaluate(PIXEL, "n03"))
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    assert page.locator(".amem img, .amem b").count() == 0


def test_search_event_and_scope_reduce_list_and_graph(page: Page) -> None:
    assert _listed(page) == list(BUILT.ids)
    page.locator("[data-event=deposit]").click()
    assert _listed(page) == list(BUILT.ids[1::3])
    page.get_by_test_id("search").fill("fact 押金 NUMBER 1")
    assert _listed(page) == [f"n{i:02d}" for i in range(1, N, 3) if "1" in str(i)]
    box = page.get_by_role("checkbox").first
    first_scope = next(iter(view.SCOPE_STYLE)).value
    box.uncheck()
    left = [NAV["nodes"][BUILT.index_of[name]]["scope"] for name in _listed(page)]
    assert left
    assert first_scope not in left
    assert _drawn(page, first_scope) == []
    box.check()
    page.get_by_test_id("search").fill("no such word")
    assert _listed(page) == []
    assert "No note fits" in page.locator(".notes").inner_text()


def test_the_list_works_by_keyboard(page: Page) -> None:
    page.locator("[data-note-id=n00]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("[aria-current=true]").get_attribute("data-note-id") == "n01"
    page.keyboard.press("Escape")
    assert page.get_by_test_id("details").is_hidden()


def test_the_details_panel_moves_the_plot(page: Page) -> None:
    width = "document.querySelector('[data-testid=plot] canvas').getBoundingClientRect().right"
    before = page.evaluate(width)
    page.locator("[data-note-id=n00]").click()
    until(page, f"{width} < {before} - 200")
    box = page.get_by_test_id("details").bounding_box()
    assert box is not None
    assert page.evaluate(width) <= box["x"] + 1


def test_dark_follows_the_system_and_keeps_the_path_visible(page: Page) -> None:
    page.locator("[data-note-id=n05]").click()
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(".amem[data-theme=dark]")
    code = "document.querySelector('[data-testid=plot]').data.find((t) => t.meta === 'path').line.color"
    assert page.evaluate(code) == "#f4f6f8"
    page.emulate_media(color_scheme="light")
    page.wait_for_selector(".amem[data-theme=light]")
    assert page.evaluate(code) == view.INK


def test_an_empty_page_says_so(browser: Browser, tmp_path: Path) -> None:
    opened = browser.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(view.page(EMPTY, {}, {}, tmp_path / "empty.html", language="zh").as_uri())
    opened.wait_for_selector(".notes li")
    assert "还没有记忆" in opened.locator(".notes").inner_text()
    assert opened.locator("[data-note-id]").count() == 0
    assert errors == []
    opened.close()


def test_the_page_is_small_whole_and_the_same_each_time(explorer: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    built = graph.article(rng.normal(size=(150, 24)), [f"n{i}" for i in range(150)])
    nav = _nav(built)
    traces = {name: search(built, built.vectors[i], k=16).expect(name) for i, name in enumerate(built.ids)}
    turns = {f"t{i}": {"speaker": "Ann", "time": None, "text": f"{i} 押金三千六百元。" * 8} for i in range(150)}
    first = view.page(nav, traces, turns, tmp_path / "page.html").read_bytes()
    assert len(first) < 1_200_000
    assert view.page(nav, traces, turns, tmp_path / "page.html").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
