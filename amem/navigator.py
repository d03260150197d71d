"""The navigator: our navigation graph, and its upkeep without a rebuild.

Levels are the seed's (SHA-1 of the id), so a note always stands on the same level. Edges are chosen from each point's
64 nearest, in order of length, under a degree cap that holds at both ends (`edges.choose`): first a spanning forest, so
that every point is reachable; then every edge that is not occluded, that is, whose end is not already reached through
a closer neighbour (the relative neighbourhood graph of Toussaint 1980, which HNSW and Vamana approximate). Then each
point is searched by its own vector, and one that is not found gets an edge from where the search stopped.

Measured on 20,000 text embeddings and lost: edges weighted by how often a leave-one-out search used them (they fit the
points and not new queries), edges ordered by rank or by local scale in place of length, filling up unused degree,
nearest neighbours only, links of one direction, occlusion from either end, more than 64 candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from amem import arith, edges, kernel, sketch
from amem import levels as levels_
from amem.graph import Floats, Ints, LayeredGraph, LinkTable, unit_rows

CANDIDATES = 64
EXACT = 25_000  # up to here all pairs are compared; above, within overlapping cells
BLOCK = 512
PIVOT_SHARE, PIVOTS_EACH = 1000, 3
FIND_EF = 16  # a note's own text must find it with so few candidates (seed 000's ef)
FIND_TURNS, SMALL = 10, 5000
UPDATE_EF = 96
REACH = 4  # an insertion chooses anew the edges of its 4 x degree nearest points

Pairs = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Floats]


def navigator(
    vectors: npt.ArrayLike,
    ids: Sequence[Any] | None = None,
    degree: int = 8,
    promotion: int = 16,
    sketches: bool = True,
) -> LayeredGraph:
    """Build the navigation graph of vectors (n, d) under a degree cap; see the module for how.

    ids: n distinct names or integers (default 0..n-1). degree: most links of a point at level 0, above it half of
    that. promotion: one point in so many stands one level higher. sketches: keep one-bit sketches, with which the
    adaptive stop (`trace.search(..., slack=)`) passes over far neighbours. The same input gives the same graph.
    ValueError: ids that are not distinct or do not fit, a vector that is zero or not finite, a degree below 2.
    """
    rows = _in_lines(unit_rows(vectors))
    names = tuple(range(len(rows))) if ids is None else tuple(i.item() if isinstance(i, np.generic) else i for i in ids)
    if len(names) != len(rows):
        raise ValueError(f"{len(names)} ids for {len(rows)} vectors")
    if len(set(names)) != len(names):
        raise ValueError("ids must be distinct: levels and paths are told apart by them")
    if degree < 2 or promotion < 2:
        raise ValueError(f"degree and promotion must be at least 2, got {degree} and {promotion}")
    params = {"M": degree // 2, "M0": degree, "promotion": promotion, "metric": "cosine"}
    levels = levels_.assign([str(name) for name in names], promotion)
    g = LayeredGraph(
        names, rows, levels, ((np.zeros(len(rows) + 1, np.int32), np.zeros(0, np.int32)),), -1, "navigator", params
    )
    if sketches:
        g = replace(g, sketch=sketch.make(rows))
    if len(rows) == 0:
        return g
    g = replace(g, links=(g.links[0], *_upper(g)), entry=_entry(g))
    links, count = np.full((len(rows), degree), -1, np.int32), np.zeros(len(rows), np.int32)
    _select(rows, links, count, nearest(rows))
    return _findable(g, links, count, np.arange(len(rows)))


def _in_lines(rows: Floats) -> Floats:
    """The rows in an array that starts at a cache line, which a search reads a tenth faster."""
    if rows.ctypes.data % arith.LINE == 0:
        return rows
    out = arith.aligned(rows.shape, np.float32)
    out[:] = rows
    return out


def _entry(g: LayeredGraph) -> int:
    top = np.flatnonzero(g.levels == g.levels.max())
    return int(top[np.argmax((g.vectors[top] @ g.vectors.mean(axis=0)).round(6))])


def _upper(g: LayeredGraph) -> list[LinkTable]:
    tables: list[LinkTable] = []
    cap = max(2, g.params["M0"] // 2)
    for level in range(1, int(g.levels.max()) + 1):
        points = np.flatnonzero(g.levels >= level)
        links, count = np.full((len(points), cap), -1, np.int32), np.zeros(len(points), np.int32)
        rows = np.ascontiguousarray(g.vectors[points])
        _select(rows, links, count, nearest(rows))
        all_links, all_count = np.full((len(g), cap), -1, np.int32), np.zeros(len(g), np.int32)
        all_links[points] = np.where(links >= 0, points[links], -1)
        all_count[points] = count
        tables.append(edges.as_table(all_links, all_count))
    return tables


def _scheme(rows: Floats) -> arith.Scheme:
    known = arith.scheme("cosine", rows.shape[1])
    return arith.plain("cosine", rows.shape[1]) if known is None else known[0]


def nearest(rows: Floats) -> Pairs:
    """Candidate edges (a, b, length), shortest first: every point with its 64 nearest (above 25,000 points: nearly)."""
    n, k = len(rows), min(CANDIDATES, len(rows) - 1)
    near, score, held = np.full((n, k + 1), -1, np.int32), np.empty((n, k + 1), np.float32), np.zeros(n, np.int32)
    worst = np.full(n, -np.inf, np.float32)
    if n <= EXACT:
        for start in range(0, n if k else 0, BLOCK):
            edges.keep_nearest(rows[start : start + BLOCK] @ rows[start:].T, start, near, score, held, worst)
    else:
        for members in _cells(rows):
            inside = np.ascontiguousarray(rows[members])
            for start in range(0, len(members), BLOCK):
                block = inside[start : start + BLOCK] @ inside[start:].T
                edges.keep_new(block, members, start, near, score, held, worst)
    return _pairs(rows, np.repeat(np.arange(n), k + 1), near.ravel(), np.arange(k + 1) < held[:, None])


def _cells(rows: Floats) -> Iterator[npt.NDArray[np.int64]]:
    """Overlapping cells: a random 1 in 1,000 points are pivots, each point belongs to its 3 nearest pivots' cells."""
    n = len(rows)
    rng = np.random.default_rng(n)
    pivots = rows[np.sort(rng.choice(n, n // PIVOT_SHARE, replace=False))]
    cells = np.empty((n, PIVOTS_EACH), np.int64)
    for start in range(0, n, BLOCK):
        near = rows[start : start + BLOCK] @ pivots.T
        cells[start : start + BLOCK] = np.argpartition(-near, PIVOTS_EACH - 1, axis=1)[:, :PIVOTS_EACH]
    order = np.argsort(cells.ravel(), kind="stable")
    bounds = np.searchsorted(cells.ravel()[order], np.arange(len(pivots) + 1))
    for cell in range(len(pivots)):
        yield order[bounds[cell] : bounds[cell + 1]] // PIVOTS_EACH


def _pairs(rows: Floats, a: Ints, b: Ints, real: npt.NDArray[np.bool_]) -> Pairs:
    """Distinct undirected pairs with their lengths, in order of (length, a, b)."""
    real = real.ravel() & (a != b)
    low, high = np.minimum(a, b)[real].astype(np.int64), np.maximum(a, b)[real].astype(np.int64)
    keys = np.sort(low * len(rows) + high)  # np.unique hashes, which takes five times as long here
    keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
    one, two = (keys // len(rows)).astype(np.int32), (keys % len(rows)).astype(np.int32)
    length = edges.lengths(rows, one, two, _scheme(rows))
    order = np.argsort(length, kind="stable")
    return one[order], two[order], length[order]


def _select(rows: Floats, links: npt.NDArray[np.int32], count: npt.NDArray[np.int32], pairs: Pairs) -> None:
    """Fill free slots from the pairs, then make the graph connected."""
    scheme = _scheme(rows)
    edges.choose(rows, links, count, np.zeros(len(rows), np.int32), *pairs, scheme)
    while True:
        part, kept, used = edges.forest(rows, links, count)
        parts, sizes = np.unique(part, return_counts=True)
        if len(parts) < 2:
            return
        # Every part but the largest reaches for the nearest point outside it; at least half of the parts vanish.
        a, b = [], []
        able = used < links.shape[1]
        for name in parts[np.argsort(-sizes, kind="stable")][1:].tolist():
            inside = np.flatnonzero((part == name) & able)[:4]
            outside = np.flatnonzero((part != name) & able)
            at = int(np.argmax(rows[inside] @ rows[outside].T))
            a.append(int(inside[at // len(outside)]))
            b.append(int(outside[at % len(outside)]))
        edges.join(rows, links, count, kept, used, np.array(a, np.int32), np.array(b, np.int32), scheme)


def _findable(
    g: LayeredGraph, links: npt.NDArray[np.int32], count: npt.NDArray[np.int32], points: Ints
) -> LayeredGraph:
    """The graph with these level-0 links, after each of `points` that its own vector does not find got an edge."""
    scheme, every = _scheme(g.vectors), points
    for turn in range(FIND_TURNS):
        done = replace(g, links=(edges.as_table(links, count), *g.links[1:]))
        stops, far, _ = kernel.search_many(done, g.vectors[points], FIND_EF, FIND_EF)
        found = (stops == points[:, None]).any(axis=1) | (far[:, -1] <= 1e-6)  # among as many duplicates any will do
        lost, ends = points[~found], stops[~found].astype(np.int32)
        if len(lost) == 0:
            return done
        before = links.copy()
        _, kept, used = edges.forest(g.vectors, links, count)
        edges.swap_in(g.vectors, links, count, kept, used, lost.astype(np.int32), ends, scheme)
        # Next those whose edges changed, since one given up can lose its ends; now and then all once more (in a large
        # graph once: it is a search for every point).
        again = turn % 2 and (turn == 1 or len(every) <= SMALL)
        points = every if again else np.flatnonzero((links != before).any(axis=1))
    return replace(g, links=(edges.as_table(links, count), *g.links[1:]))


def insert(g: LayeredGraph, vectors: npt.ArrayLike, ids: Sequence[Any]) -> LayeredGraph:
    """A graph with more points (m, d); an id that is there already gets its new vector. `g` itself is unchanged."""
    names = [i.item() if isinstance(i, np.generic) else i for i in ids]
    rows = unit_rows(vectors)
    if len(names) != len(rows) or len(set(names)) != len(names):
        raise ValueError(f"{len(names)} ids ({len(set(names))} distinct) for {len(rows)} vectors")
    _check(g)
    if len(g) and rows.shape[1] != g.vectors.shape[1]:
        raise ValueError(f"vectors have {rows.shape[1]} dimensions, the graph's have {g.vectors.shape[1]}")
    known = [name for name in names if name in g.index_of]
    step = max(64, len(g) // 8)
    for start in range(0, len(rows), step):
        part = names[start : start + step]
        g = _change(g, rows[start : start + step], part, [g.index_of[name] for name in part if name in known])
    return g


def delete(g: LayeredGraph, ids: Iterable[Any]) -> LayeredGraph:
    """A graph without these points; their neighbours are linked anew among themselves. `g` itself is unchanged."""
    _check(g)
    names = list(ids)
    missing = [name for name in names if name not in g.index_of]
    if missing:
        raise ValueError(f"not in the graph: {missing[0]!r}")
    step = max(64, len(g) // 8)
    for start in range(0, len(names), step):
        g = _change(g, g.vectors[:0], [], [g.index_of[name] for name in names[start : start + step]])
    return g


def _check(g: LayeredGraph) -> None:
    if g.kind != "navigator":
        raise ValueError(f"only a navigator can be changed, this graph is of kind {g.kind!r}")


def _change(g: LayeredGraph, rows: Floats, names: list[Any], gone: list[int]) -> LayeredGraph:
    """Take the points `gone` out and put new ones in, choosing again the edges around them and no others."""
    n, m, cap = len(g), len(rows), int(g.params["M0"])
    stay = np.ones(n, dtype=bool)
    stay[gone] = False
    place = np.where(stay, np.cumsum(stay) - 1, -1)  # old index -> new index
    all_names = (*(name for name, keep in zip(g.ids, stay, strict=True) if keep), *names)
    vectors = _in_lines(np.vstack([g.vectors[stay], rows]))
    old = len(vectors) - m
    if old <= CANDIDATES:
        fresh = navigator(vectors, all_names, cap, int(g.params["promotion"]), g.sketch is not None)
        return replace(fresh, vectors=vectors)

    links, _ = edges.as_slots(*g.links[0], cap)
    beside = np.unique(links[gone][links[gone] >= 0])  # neighbours of what goes
    near_new = np.zeros((0, 1), np.int64)
    if m:
        near_new, _, _ = kernel.search_many(g, rows, CANDIDATES, UPDATE_EF)
    around = np.union1d(beside, near_new[:, : REACH * cap])
    around = around[(around >= 0) & stay[around]]
    near_around = kernel.search_many(g, g.vectors[around], CANDIDATES, UPDATE_EF)[0] if len(around) else near_new[:0]

    a = [np.repeat(old + np.arange(m), near_new.shape[1]), np.repeat(place[around], near_around.shape[1])]
    b = [np.where(found >= 0, place[found], -1).ravel() for found in (near_new, near_around)]
    a.append(np.repeat(place[around], cap))
    b.append(np.where(links[around] >= 0, place[links[around]], -1).ravel())
    if m > 1:
        k = min(CANDIDATES, m - 1)
        mutual = rows @ rows.T
        a.append(np.repeat(old + np.arange(m), k + 1))
        b.append(old + np.argpartition(-mutual, k, axis=1)[:, : k + 1].ravel())
    ones, twos = np.concatenate(a), np.concatenate(b)
    touched = np.unique(np.concatenate([ones, b[2][b[2] >= 0]]))  # what is chosen anew, and what lost an edge to it

    links = np.where(links >= 0, place[links], -1)[stay]
    loose = np.zeros(len(vectors), dtype=bool)
    loose[place[around]] = True
    kept = (links >= 0) & ~loose[:old][:, None] & ~loose[links]
    slots, degree = np.full((len(vectors), cap), -1, np.int32), np.zeros(len(vectors), np.int32)
    degree[:old] = kept.sum(axis=1)
    slots[:old][np.arange(cap) < degree[:old, None]] = links[kept]
    pairs = _pairs(vectors, ones, twos, twos >= 0)
    _select(vectors, slots, degree, pairs)

    kept_sketch = None if g.sketch is None else g.sketch.take(np.flatnonzero(stay)).extended(rows)
    done = replace(g, ids=all_names, vectors=vectors, sketch=kept_sketch, **_levels(g, vectors, all_names, stay, names))
    return _findable(done, slots, degree, touched)


def _levels(
    g: LayeredGraph, vectors: Floats, all_names: tuple[Any, ...], stay: npt.NDArray[np.bool_], names: list[Any]
) -> dict[str, Any]:
    """Levels, links and entry after a change; levels above 0 are linked anew only where one of their points changed."""
    promotion = int(g.params["promotion"])
    highest = levels_.top_level(len(all_names), promotion)
    new = np.array([levels_.climb(str(name), promotion, highest) for name in names], dtype=np.int64)
    levels = np.concatenate([g.levels[stay], new])
    empty = (np.zeros(len(all_names) + 1, np.int32), np.zeros(0, np.int32))
    if not np.any(new) and not np.any(g.levels[~stay]) and highest == g.max_level:
        moved = [_moved(table, stay, len(names)) for table in g.links[1:]]
        return {"levels": levels, "links": (empty, *moved), "entry": int(np.sum(stay[: g.entry]))}
    levels = levels_.assign([str(name) for name in all_names], promotion)
    part = replace(g, ids=all_names, vectors=vectors, levels=levels, links=(empty,))
    return {"levels": levels, "links": (empty, *_upper(part)), "entry": _entry(part)}


def _moved(table: LinkTable, stay: npt.NDArray[np.bool_], more: int) -> LinkTable:
    """A link table after points without links went and `more` came."""
    indptr, indices = table
    place = np.cumsum(stay) - 1
    kept = indptr[np.append(np.flatnonzero(stay), len(stay))]
    return np.concatenate([kept, np.full(more, kept[-1])]).astype(np.int32), place[indices].astype(np.int32)
