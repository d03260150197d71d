"""Plotly figures, the 2D layout under them, and the stand-alone page. Only what graph or trace hold is drawn."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import unicodedata
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from amem.notes import SCOPE_NAMES, Scope
from amem.trace import Step, Trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

Language = Literal["en", "zh"]
Nav = Mapping[str, Any]
Point = tuple[float, float, float]
Line = list[Point]
AnyTrace = Trace | Mapping[str, Any]

# Okabe and Ito's colours, told apart by the colour-blind; the symbol says the same again.
SCOPE_STYLE: dict[Scope, tuple[str, str, str]] = {
    Scope.CASE_HISTORY: ("#0072b2", "circle", "●"),
    Scope.USER_PROFILE: ("#e69f00", "diamond", "◆"),
    Scope.GENERAL_LAW: ("#d55e00", "square", "■"),
    Scope.CROSS_CASE: ("#cc79a7", "diamond-open", "◇"),
    Scope.GLOBAL_PROCEDURE: ("#009e73", "square-open", "□"),
}
# Opaque colours: half-transparent 3D lines are blended wrongly where they cross. Their dark twins are in style.json.
PAPER, INK, SOFT, PLANE, DIM, SHADOW = "#ffffff", "#15181c", "#57606a", "#a8b0ba", "#e9ecef", "#cbd1d8"
TAKEN, REJECTED, BRIDGE, TARGET = "#5b8fc7", "#c7a17a", "#b5651d", "#c2185b"
EDGES = ("#c3cad2", "#93a8c2", "#8d9f8f", "#a595b5")
BEHIND = (0, 0.004, -0.01)  # edges lie this much behind a path walked over them, or the two flicker
STATIC = files("amem") / "static"


@cache
def _static(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((STATIC / name).read_text("utf-8"))
    return content


def layout(vectors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Places for n unit vectors (n, d) on a plane: (n, 2) in [0, 1], rounded to 3 decimals, the same on every run.

    t-SNE (van der Maaten and Hinton 2008) from the two main directions, with the six nearest neighbours as equal
    affinities, so that notes of one matter stay together; then points that would overlap are pushed apart.
    """
    rows = np.asarray(vectors, dtype=np.float64)
    n = len(rows)
    if n < 2:
        return np.full((n, 2), 0.5)
    centred = rows - rows.mean(axis=0)
    angle = np.arange(n) * 2.399963  # the golden angle: equal vectors leave in different directions
    main = spiral = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    for _ in range(30):  # PCA by power iteration: a LAPACK SVD waits seconds for its threads on a busy machine
        main, _ = np.linalg.qr(centred @ (centred.T @ main))
    flat = (main * np.sqrt(n) + 1e-3 * spiral).round(6)

    cosine = (rows @ rows.T).round(6)
    np.fill_diagonal(cosine, -np.inf)
    near = np.argsort(-cosine, axis=1, kind="stable")[:, :6]
    wanted = np.zeros((n, n))
    wanted[np.arange(n)[:, None], near[:, : n - 1]] = 1
    wanted = (wanted + wanted.T) / (2 * wanted.sum())
    rounds = int(np.clip(1e8 / n**2, 40, 300))  # each round is quadratic in n
    speed = np.zeros((n, 2))
    for done in range(rounds):
        square = (flat**2).sum(axis=1)
        closeness = 1 / (1 + square[:, None] + square[None] - 2 * flat @ flat.T)
        np.fill_diagonal(closeness, 0)
        force = (wanted * (4 if done < rounds // 3 else 1) - closeness / closeness.sum()) * closeness
        speed = 0.7 * speed - n / 2 * (force.sum(axis=1)[:, None] * flat - force @ flat)
        # Rounding drops what differs from one processor's arithmetic to another's before it can grow.
        flat = (flat + speed).round(6)

    ranks = flat.argsort(axis=0, kind="stable").argsort(axis=0) / (n - 1)
    flat = (_stretched(flat) + ranks) / 2
    radius = 0.7 / np.sqrt(n)
    for _ in range(rounds // 10):
        apart = flat[:, None] - flat[None]
        distance = np.maximum(np.hypot(apart[..., 0], apart[..., 1]), 1e-9)
        flat = _stretched(flat + 0.3 * np.einsum("ij,ijk->ik", np.maximum(radius - distance, 0) / distance, apart))
    return flat.round(3)


def _stretched(flat: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = flat.min(axis=0), flat.max(axis=0)
    return np.where(high > low, (flat - low) / np.where(high > low, high - low, 1), 0.5)


def _wrap(text: str, columns: int = 48, limit: int = 7) -> str:
    """`text` in lines of at most `columns` (a wide character counts two), as harmless text of a plotly label."""
    rows, used = [""], 0
    for piece in re.findall(r"\n|[^\S\n]+|[^\s\u1100-\uffff]{1,40}|.", text.strip()):
        width = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in piece)
        if piece == "\n" or used + width > columns:
            rows, used = [*rows, ""], 0
        if used or not piece.isspace():
            rows[-1] += piece
            used += width
    shown = [*rows[:limit], "…"] if len(rows) > limit else rows
    # A pair of dollar signs would be taken for TeX where MathJax is loaded.
    return "<br>".join(html.escape(row, quote=False).replace("$", "&#36;") for row in shown)


def _hover(node: Nav, language: Language) -> str:
    where = f"{SCOPE_NAMES[language][Scope(node['scope'])]} · L{node['level']}"
    parts = (node["speaker"], node["turn_id"], node["session"], (node["time"] or "")[:16].replace("T", " "))
    return f"{_wrap(node['content'])}<br><b>{where}</b><br>{_wrap(' · '.join(filter(None, parts)))}"


def _trace(trace: AnyTrace, known: Container[str]) -> Trace:
    if not isinstance(trace, Trace):
        fields = {**trace, "steps": [Step(*s) for s in trace["steps"]], "results": [tuple(r) for r in trace["results"]]}
        fields.pop("path", None)
        trace = Trace(**fields)
    for name in trace.visited:
        if name not in known:
            raise ValueError(f"the trace walks note {name}, which the graph lacks; make both by the same filters")
    return trace


def sentence(trace: Trace, language: Language = "en") -> str:
    """What the search cost and whether it found what was looked for, in one sentence."""
    names = [name for name, _ in trace.results]
    if trace.target is None or trace.hit:
        key = "query" if trace.target is None else "hit"
    else:
        key = "outside" if not trace.steps else "seen" if trace.target in trace.visited else "unseen"
    rank = names.index(str(trace.target)) + 1 if key == "hit" else 0
    return _static("words.json")[language][key].format(evaluations=trace.evaluations, rank=rank, k=len(names))


def walked(trace: Trace, at: Mapping[str, Nav]) -> dict[str, list[Line]]:
    """The lines of a trace by role: "path" (one line through all moves), "taken", "rejected" (one a comparison).

    at: node of each id, with x and y; the height is the level.
    """

    def place(name: str, level: int) -> Point:
        return at[name]["x"], at[name]["y"], float(level)

    path = trace.path()
    lines: dict[str, list[Line]] = {"path": [[place(s.target, s.level) for s in path]], "taken": [], "rejected": []}
    for step in trace.steps:
        if step.source is not None and step not in path:
            role = "rejected" if step.kind == "reject" else "taken"
            lines[role].append([place(step.source, step.level), place(step.target, step.level)])
    return lines


def _coordinates(lines: Iterable[Line]) -> dict[str, list[float | None]]:
    """x, y, z of many lines in one trace: a None parts one line from the next."""
    points: list[tuple[float | None, ...]] = []
    for line in lines:
        points += [*([(None,) * 3] if points else []), *line]
    return {axis: [point[i] for point in points] for i, axis in enumerate("xyz")}


def _between(a: Point, b: Point, gap: float = 0.016) -> Line:
    """The line from a to b without its ends: the end of a line would be drawn across the marker it leads to."""
    start, way = np.array(a) + BEHIND, np.array(b) - np.array(a)
    share = min(gap / max(float(np.hypot(way[0], way[1])), abs(way[2]) / 3, 1e-9), 0.4)
    return [tuple(start + share * way), tuple(start + (1 - share) * way)]


def figure(nav: Nav, trace: AnyTrace | None = None, language: Language = "en") -> go.Figure:
    """The navigation graph in 3D: a plane a level, notes on their top level (faint below it), edges, and the trace.

    nav: what `Memory.nav_graph()` returns. trace: a `Trace` or its `to_dict()`; its path is drawn as it was walked and
    all that it compared beside it. Each plotly trace says its role in `meta`. Raises ValueError for a trace of
    another graph. An empty graph gives a figure with a sentence.
    """
    import plotly.graph_objects as go

    words, style, nodes = _static("words.json")[language], _static("style.json"), nav["nodes"]
    at = {node["id"]: node for node in nodes}
    walk = None if trace is None else _trace(trace, at)
    said = sentence(walk, language) if walk else ""
    fig = go.Figure(layout=style["layout"])
    if not nodes:
        fig.update_layout(style["empty"]).layout.annotations[0].text = "<br>".join(filter(None, [words["empty"], said]))
        return fig
    levels = len(nav["layers"])
    fig.update_layout(
        title_text=said or words["graph"].format(n=len(nodes), levels=levels), scene=style["scene"],
        scene_zaxis_range=[-0.15, max(levels - 1, 1) + 0.15],
        scene_aspectratio={"x": 2.1, "y": 1.35, "z": min(0.3 + 0.4 * levels, 1.62)},
    )  # fmt: skip

    def lines(role: str, drawn: Iterable[Line], colour: str, width: float, **more: Any) -> None:
        coordinates = _coordinates(drawn)
        named = {"name": words.get(role, ""), "showlegend": role in words and colour != DIM and bool(coordinates["x"])}
        line = {"color": colour, "width": width, **more}
        fig.add_scatter3d(**coordinates, mode="lines", meta=role, line=line, hoverinfo="skip", **named)

    def marks(role: str, points: list[Point], **more: Any) -> None:
        fixed = {"mode": "markers", "hoverinfo": "skip", "showlegend": False}
        fig.add_scatter3d(**_coordinates([points]), meta=role, **{**fixed, **more})

    def place(name: str, level: int | None = None) -> Point:
        return at[name]["x"], at[name]["y"], float(at[name]["level"] if level is None else level)

    def edges(level: int, bridge: bool) -> Iterator[Line]:
        for e in nav["edges"]:
            if level in e["levels"] and bridge == (e["bridge"] and level == 0):
                yield _between(place(e["source"], level), place(e["target"], level))

    low, high = -0.05, 1.05
    square = [(low, low), (high, low), (high, high), (low, high), (low, low)]
    lines("plane", ([(x, y, float(level)) for x, y in square] for level in range(levels)), PLANE, 2)
    marks(
        "label", [(low, low, float(level)) for level in range(levels)], mode="text", textposition="middle left",
        text=[words["level"].format(**layer) for layer in nav["layers"]], textfont={"size": 13, "color": SOFT},
    )  # fmt: skip
    below = [(node["id"], level) for node in nodes for level in range(node["level"])]
    lines("pillar", (_between(place(name, level), place(name, level + 1)) for name, level in below), DIM, 2)
    for level in range(levels):
        lines("edge", edges(level, False), DIM if walk else EDGES[level % len(EDGES)], 2)
    lines("bridge", edges(0, True), DIM if walk else BRIDGE, 3, dash="dash")
    marks("shadow", [place(name, level) for name, level in below], marker={"size": 3, "color": SHADOW})
    for scope, (colour, symbol, _) in SCOPE_STYLE.items():
        members = [node for node in nodes if node["scope"] == scope]
        line = {"width": 2, "color": colour} if "open" in symbol else {"width": 1, "color": PAPER}
        marks(
            scope.value, [place(node["id"]) for node in members], name=SCOPE_NAMES[language][scope],
            marker={"size": 5.5, "color": colour, "symbol": symbol, "line": line},
            hovertext=[_hover(node, language) for node in members], hoverinfo="text", showlegend=bool(members),
            customdata=[node["id"] for node in members],
        )  # fmt: skip
    found = walked(walk, at) if walk else {}
    for role, colour, width in (("rejected", REJECTED, 2), ("taken", TAKEN, 3), ("path", INK, 8)):
        lines(role, found.get(role, []), colour, width)
    entry = walk.steps[0].target if walk and walk.steps else nav["params"]["entry"]
    goal = walk.target if walk else None
    for role, name, colour, symbol in (("entry", entry, INK, "diamond-open"), ("target", goal, TARGET, "circle-open")):
        points = [place(str(name))] if name in at else []
        marks(
            role, points, marker={"size": 13, "color": colour, "symbol": symbol, "line": {"width": 3, "color": colour}}
        )
        # An annotation lies on top of the scene: text among the points would be covered by nearer ones.
        fig.layout.scene.annotations += ({
            **dict(zip("xyz", points[0] if points else (0, 0, 0), strict=True)), "visible": bool(points), "name": role,
            "text": words[role], "showarrow": False, "yshift": 26 if role == "entry" else -26, "bgcolor": PAPER,
            "opacity": 0.9, "font": {"color": colour, "size": 13},
        },)  # fmt: skip
    return fig


def _png(fig: go.Figure, width: int, height: int) -> bytes | None:
    try:
        return fig.to_image("png", width=width, height=height)
    except RuntimeError:  # what kaleido raises when there is no Chromium, or none that starts
        return None


def show(fig: go.Figure, width: int = 900, height: int = 620) -> None:
    """Display `fig` in a notebook: interactive, and as a PNG beside it (for GitHub) where kaleido finds a Chromium."""
    import plotly.graph_objects as go
    from IPython.display import display

    sized = go.Figure(fig).update_layout(width=width, height=height)
    bundle = {"application/vnd.plotly.v1+json": json.loads(sized.to_json()), "text/plain": "a plotly figure"}
    png = _png(sized, width, height)
    if png is None:
        print(_static("words.json")["en"]["no_image"])
    else:
        bundle["image/png"] = base64.b64encode(png).decode()
    display(bundle, raw=True)


def image(fig: go.Figure, path: str | Path, width: int = 900, height: int = 620) -> bool:
    """Write `fig` as a PNG of width x height pixels; False, and no file, where kaleido finds no Chromium."""
    png = _png(fig, width, height)
    return png is not None and bool(Path(path).write_bytes(png))


def page(
    nav: Nav, traces: Mapping[str, AnyTrace], turns: Mapping[str, Mapping[str, Any]], path: str | Path,
    title: str = "", language: Language = "en", event_titles: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write the explorer as one HTML file that needs no network, and return its path. The file appears whole or not.

    nav: what `Memory.nav_graph()` returns. traces: the search for each note, by note id. turns: speaker, time and text
    by turn id. event_titles: what to call the events. Raises ValueError for a trace of another graph.
    """
    fig = figure(nav, language=language).update_layout(title_text="", margin_t=0)
    place = {node["id"]: i for i, node in enumerate(nav["nodes"])}
    walks = {name: _packed(_trace(trace, place), place, language) for name, trace in traces.items() if name in place}
    data = {
        "title": title, "words": _static("words.json")[language], "nav": nav, "events": dict(event_titles or {}),
        "figure": json.loads(fig.to_json()), "dark": _static("style.json")["dark"], "dim": DIM, "traces": walks,
        "scopes": [[s, SCOPE_NAMES[language][s], colour, glyph] for s, (colour, _, glyph) in SCOPE_STYLE.items()],
        "turns": {name: [turn.get(part) for part in ("speaker", "time", "text")] for name, turn in turns.items()},
    }  # fmt: skip
    whole = Template((STATIC / "page.html").read_text("utf-8")).substitute(
        language=language, title=html.escape(title or "amem"), css=(STATIC / "explorer.css").read_text("utf-8"),
        script=(STATIC / "explorer.js").read_text("utf-8").replace("export default", "const explorer ="),
        plotly=base64.b64encode((STATIC / "plotly-gl3d.min.js.gz").read_bytes()).decode(),
        # mtime 0: the same run gives the same page, byte for byte.
        data=base64.b64encode(gzip.compress(json.dumps(data, ensure_ascii=False).encode(), 9, mtime=0)).decode(),
    )  # fmt: skip
    target = Path(path)
    draft = target.with_name(f".{target.name}.part")
    draft.write_text(whole, "utf-8")
    return draft.replace(target)


def _packed(trace: Trace, place: Mapping[str, int], language: Language) -> dict[str, Any]:
    """A trace for the page: notes by number, distances in 1/10000, the path as places in the list of steps."""
    steps = [
        [s.kind, s.level, -1 if s.source is None else place[s.source], place[s.target], round(s.distance * 1e4)]
        for s in trace.steps
    ]
    path = [trace.steps.index(step) for step in trace.path()]
    return {"said": sentence(trace, language), "hit": trace.hit, "steps": steps, "path": path}
