"""Recall against cost, for our graphs and for the indexes that people run: one row a point of a curve.

All systems solve one problem, cosine distance over unit vectors (data of another metric is scaled to unit length and
its true neighbours are computed anew). Evaluations are counted, not timed: exact and the same on every machine.
Queries/s are medians over repeats on one thread, with their lowest and highest.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from amem import graph, kernel, trace
from amem.datasets import Data
from amem.graph import Floats, LayeredGraph, unit_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

Points = npt.NDArray[np.int64]
Row = dict[str, Any]
COLUMNS = (
    "dataset n dim system degree_cap setting recall evaluations qps build_cpu_s link_bytes "
    "k qps_low qps_high repeats sketch_bytes"
).split()
EFS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
SLACKS = (0.0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
ARTICLE_MOST = 2000  # its construction is quadratic in memory
SEED = 100
EF_CONSTRUCTION = 200


@dataclass(frozen=True)
class System:
    """A built index. search(setting) -> (points (m, k), evaluations a query); settings are tried in order."""

    name: str
    degree_cap: int
    build_cpu_s: float
    link_bytes: int
    settings: Sequence[str]
    search: Callable[[str], Points]
    evaluations: Callable[[str], float]
    sketch_bytes: int = 0


def link_bytes(g: LayeredGraph) -> int:
    """Bytes of the links alone: place and links of each point of each level, 4 bytes each."""
    return sum(4 * (int(np.sum(g.levels >= level)) + 1 + len(indices)) for level, (_, indices) in enumerate(g.links))


def hnswlib_bytes(g: LayeredGraph, m: int) -> int:
    """The same in hnswlib's layout, which reserves every slot: 1 + 2M words at level 0, 1 + M on each level above."""
    return 4 * (len(g) * (1 + 2 * m) + int(g.levels.sum()) * (1 + m))


def one_thread() -> AbstractContextManager[Any]:
    """numpy's BLAS on one thread, so that CPU seconds are comparable."""
    if find_spec("threadpoolctl") is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _value(setting: str) -> float:
    return float(setting.split("=")[1])


def _ours(name: str, g: LayeredGraph, data: Data, cap: int, cpu: float, settings: Sequence[str]) -> System:
    k = data.truth.shape[1]

    def run(setting: str) -> tuple[Points, Floats, Points]:
        if setting.startswith("slack"):
            return kernel.search_many(g, data.queries, k, slack=_value(setting))
        return kernel.search_many(g, data.queries, k, int(_value(setting)))

    kept = 0 if g.sketch is None or settings[0].startswith("ef") else g.sketch.nbytes
    return System(name, cap, cpu, link_bytes(g), settings, lambda s: run(s)[0], lambda s: float(run(s)[2].mean()), kept)


def _in_hnswlib(name: str, index: Any, g: LayeredGraph, data: Data, cap: int, cpu: float, m: int) -> System:
    """hnswlib's own search; its evaluations are counted by the same search over the decoded links."""
    k = data.truth.shape[1]

    def run(setting: str) -> Points:
        index.set_ef(int(_value(setting)))
        return np.asarray(index.knn_query(data.queries, k=k, num_threads=1)[0], dtype=np.int64)

    def count(setting: str) -> float:
        return float(kernel.search_many(g, data.queries, k, int(_value(setting)))[2].mean())

    return System(name, cap, cpu, hnswlib_bytes(g, m), _efs(k), run, count)


def _efs(k: int) -> list[str]:
    return [f"ef={ef}" for ef in EFS if ef >= k]


def _slacks() -> list[str]:
    return [f"slack={slack:g}" for slack in SLACKS]


def article(data: Data) -> Iterator[System]:
    """Seed 000's graph with the proper stop rule (small n only)."""
    if len(data.base) <= ARTICLE_MOST:
        start = time.process_time()
        g = graph.article(data.base, [f"n{i}" for i in range(len(data.base))])
        yield _ours("article", g, data, graph.ARTICLE_M, time.process_time() - start, _efs(data.truth.shape[1]))


def navigator(data: Data, caps: Sequence[int] = (4, 8, 16)) -> Iterator[System]:
    """Our graph: with ef, with the adaptive stop (with and without sketches), and inside hnswlib's C++."""
    graph.navigator(data.base[:100], degree=caps[0])  # numba compiles, or loads what it compiled before
    for cap in caps:
        start = time.process_time()
        g = graph.navigator(data.base, degree=cap)
        cpu = time.process_time() - start
        yield _ours("navigator", g, data, cap, cpu, _efs(data.truth.shape[1]))
        yield _ours("navigator, adaptive", g, data, cap, cpu, _slacks())
        yield _ours("navigator, adaptive, no sketches", replace(g, sketch=None), data, cap, cpu, _slacks())
        m = max(2, (cap + 1) // 2)
        yield _in_hnswlib("navigator in hnswlib", g.to_hnswlib(), g, data, cap, cpu, m)


def _hnswlib_index(base: Floats, m: int) -> Any:
    """An index of these vectors (n, d), the same on every call."""
    import hnswlib as library

    index = library.Index("cosine", base.shape[1])
    index.init_index(len(base), M=m, ef_construction=EF_CONSTRUCTION, random_seed=SEED)
    index.add_items(base, num_threads=1)
    return index


def hnswlib(data: Data, ms: Sequence[int] = (4, 8, 16)) -> Iterator[System]:
    """hnswlib itself (ef_construction 200), and the adaptive stop on its graph."""
    for m in ms:
        start = time.process_time()
        index = _hnswlib_index(data.base, m)
        cpu = time.process_time() - start
        g = graph.from_hnswlib(index)
        yield _in_hnswlib(f"hnswlib M={m}", index, g, data, 2 * m, cpu, m)
        yield _ours(f"hnswlib M={m}, adaptive", g, data, 2 * m, cpu, _slacks())


def faiss(data: Data, m: int = 16) -> Iterator[System]:
    """faiss IndexHNSWFlat, where it is installed."""
    if find_spec("faiss") is None:
        return
    library: Any = import_module("faiss")

    library.omp_set_num_threads(1)
    k, dim = data.truth.shape[1], data.base.shape[1]
    start = time.process_time()
    index = library.IndexHNSWFlat(dim, m, library.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = EF_CONSTRUCTION
    index.add(data.base)
    cpu = time.process_time() - start

    def run(setting: str) -> Points:
        index.hnsw.efSearch = int(_value(setting))
        return np.asarray(index.search(data.queries, k)[1], dtype=np.int64)

    def count(setting: str) -> float:
        library.cvar.hnsw_stats.reset()
        run(setting)
        return float(library.cvar.hnsw_stats.ndis) / len(data.queries)

    size = 4 * library.vector_to_array(index.hnsw.neighbors).size
    yield System(f"faiss HNSW M={m}", 2 * m, cpu, size, _efs(k), run, count)


def usearch(data: Data, m: int = 16) -> Iterator[System]:
    """usearch, where it is installed."""
    if find_spec("usearch") is None:
        return
    library: Any = import_module("usearch.index")

    k, (n, dim) = data.truth.shape[1], data.base.shape
    start = time.process_time()
    index = library.Index(ndim=dim, metric="cos", dtype="f32", connectivity=m, expansion_add=EF_CONSTRUCTION)
    index.add(np.arange(n), data.base, threads=1)
    cpu = time.process_time() - start

    def ask(setting: str) -> Any:
        index.expansion_search = int(_value(setting))
        return index.search(data.queries, k, threads=1)

    def count(setting: str) -> float:
        return float(ask(setting).computed_distances) / len(data.queries)

    size = index.serialized_length - 4 * n * dim
    yield System(f"usearch M={m}", 2 * m, cpu, size, _efs(k), lambda s: np.asarray(ask(s).keys, dtype=np.int64), count)


SYSTEMS: dict[str, Callable[[Data], Iterator[System]]] = {
    "article": article,
    "navigator": navigator,
    "hnswlib": hnswlib,
    "faiss": faiss,
    "usearch": usearch,
}


def recall_of(found: Points, truth: Points) -> float:
    """Share of the true neighbours that were found: mean over queries of recall@k."""
    return (
        float(np.mean([len(set(a) & set(b)) for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))
        / (truth.shape[1])
    )


def recall_rows(
    data: Data | Iterable[Data],
    systems: Iterable[str] = tuple(SYSTEMS),
    repeats: int = 3,
    enough: float = 0.995,
    report: Callable[[Row], None] | None = None,
) -> list[Row]:
    """One row for each data set, system and setting, with the columns of COLUMNS.

    recall: recall@k with k = the width of the true neighbours. qps: median of `repeats` runs over all queries on one
    thread; qps_low and qps_high are the slowest and fastest run. build_cpu_s: CPU seconds, candidates included.
    link_bytes: the links alone; sketch_bytes: what the sketches take besides. A curve ends once it has reached
    recall `enough`. report is called with each row as it comes.
    """
    rows: list[Row] = []
    with one_thread():
        for one in [data] if isinstance(data, Data) else data:
            for name in systems:
                if name not in SYSTEMS:
                    raise ValueError(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
                for system in SYSTEMS[name](one):
                    for row in _curve(one, system, repeats, enough):
                        rows.append(row)
                        if report is not None:
                            report(row)
    return rows


def _curve(data: Data, system: System, repeats: int, enough: float) -> Iterator[Row]:
    (n, dim), k, many = data.base.shape, data.truth.shape[1], len(data.queries)
    system.search(system.settings[0])  # warm caches
    for setting in system.settings:
        speeds = []
        for _ in range(repeats):
            start = time.perf_counter()
            found = system.search(setting)
            speeds.append(many / (time.perf_counter() - start))
        recall = recall_of(found, data.truth)
        values = (
            *(data.name, n, dim, system.name, system.degree_cap, setting, round(recall, 5)),
            *(round(system.evaluations(setting), 1), round(float(np.median(speeds)), 1), round(system.build_cpu_s, 3)),
            *(system.link_bytes, k, round(min(speeds), 1), round(max(speeds), 1), repeats, system.sketch_bytes),
        )
        yield dict(zip(COLUMNS, values, strict=True))
        if recall >= enough:
            return


def at_recall(rows: Sequence[Row], recall: float, column: str = "evaluations") -> dict[tuple[str, str, int], float]:
    """Value of a column at a recall, between the points of each curve; nan where the curve does not get there.

    Keys are (dataset, system, degree_cap).
    """
    curves: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        curves.setdefault((row["dataset"], row["system"], row["degree_cap"]), []).append(row)
    found = {}
    for key, points in curves.items():
        points = sorted(points, key=lambda row: row["evaluations"])
        after = next((i for i, row in enumerate(points) if row["recall"] >= recall), None)
        if after is None:
            found[key] = float("nan")
        elif after == 0:
            found[key] = float(points[0][column])
        else:
            low, high = points[after - 1], points[after]
            share = (recall - low["recall"]) / (high["recall"] - low["recall"])
            found[key] = float(low[column] + share * (high[column] - low[column]))
    return found


def found_rows(vectors: npt.ArrayLike, sizes: Sequence[int] = (50, 200, 1000, 2000), ef: int = 16) -> list[Row]:
    """How many notes are found by their own text (its vector) with `ef` candidates: what a path to a note promises.

    For the article's graph with its own stop rule and with the proper one, hnswlib M=4, and ours at cap 8, over the
    first n of `vectors` (n, d). A note counts when it is among the ef results. Columns: n, system, found.
    """
    rows: list[Row] = []
    for n in sizes:
        part = unit_rows(vectors)[:n]
        graphs: dict[str, LayeredGraph] = {
            "hnswlib M=4": graph.from_hnswlib(_hnswlib_index(part, 4)),
            "navigator, degree 8": graph.navigator(part),
        }
        if n <= ARTICLE_MOST:
            ours = graph.article(part, [str(i) for i in range(len(part))])
            hits = [
                any(name == str(i) for name, _ in trace.search(ours, row, ef, ef, stop="article").results)
                for i, row in enumerate(part)
            ]
            rows.append({"n": n, "system": "article, its stop rule", "found": float(np.mean(hits))})
            graphs = {"article, proper stop rule": ours, **graphs}
        for name, g in graphs.items():
            points = kernel.search_many(g, part, ef, ef)[0]
            found = float((points == np.arange(len(part))[:, None]).any(axis=1).mean())
            rows.append({"n": n, "system": name, "found": found})
    return rows


def figure(rows: Sequence[Row], x: str = "evaluations", y: str = "recall") -> go.Figure:
    """Curves of the rows: recall against `x` (evaluations, or qps), a line a system; `found_rows` go with x="n"."""
    import plotly.graph_objects as go

    if not rows:
        raise ValueError("there are no rows to draw")
    y = "found" if "found" in rows[0] else y
    fig = go.Figure()
    names = dict.fromkeys((row.get("dataset", ""), row["system"], row.get("degree_cap")) for row in rows)
    for key in names:
        points = [row for row in rows if (row.get("dataset", ""), row["system"], row.get("degree_cap")) == key]
        label = " ".join(str(part) for part in (key[0], key[1], f"(cap {key[2]})" if key[2] else "") if part)
        text = [row.get("setting", "") for row in points]
        fig.add_scatter(x=[p[x] for p in points], y=[p[y] for p in points], text=text, name=label, mode="lines+markers")
    titles = {"evaluations": "distance evaluations a query", "qps": "queries a second, one thread", "n": "notes"}
    fig.update_xaxes(title=titles.get(x, x), type="log")
    fig.update_yaxes(title="found by its own text" if y == "found" else "recall")
    return fig


def as_json(rows: Sequence[Row]) -> bytes:
    """The rows as a JSON list, one row a line; a number that is not there is null."""
    return ("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n").encode()


def as_csv(rows: Sequence[Row]) -> bytes:
    """The rows as CSV with a head line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
