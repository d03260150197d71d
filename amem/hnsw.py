"""hnswlib's index as a `LayeredGraph` and back: a trace then explains the index that people really run.

Layout of hnswlib 0.8.0 (`hnswalg.h`, `bindings.cpp`). `data_level0`, an element: uint32 word (low 16 bits the number of
links, bit 16 set when deleted), max_M0 uint32 link slots, the vector, the uint64 label. `link_lists`: for each element
with level l > 0, l blocks of (uint32 count, max_M uint32 slots). Everything is read by array, never element by element.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from amem import arith, graph

if TYPE_CHECKING:
    import hnswlib

    from amem.graph import Floats, Ints, LayeredGraph, LinkTable

SPACES = ("l2", "ip", "cosine")
DELETED = 1 << 16
# save_index: offset of level 0, capacity, count, bytes an element, offsets of label and vector, top level, entry,
# max_M, max_M0, M, mult, ef_construction.
HEADER = struct.Struct("<QQQQQQiIQQQdQ")


def from_hnswlib(
    index: hnswlib.Index | str | os.PathLike[str], space: str | None = None, dim: int | None = None
) -> LayeredGraph:
    """The links, levels, vectors, labels and deletions of an `hnswlib.Index`, or of a file that `save_index` wrote.

    A file does not say its `space` ("l2", "ip", "cosine") and `dim`, so they are asked for. ids are the labels (int).
    `trace.search` on the result returns what `knn_query` returns, bit for bit. Raises ValueError on a file that is cut
    off, corrupt, or of another dimension; the file is checked before anything is followed, and hnswlib never sees it.
    """
    if isinstance(index, str | os.PathLike):
        return _from_file(Path(index), space, dim)
    state = index.__getstate__()[0]
    n = int(state.get("cur_element_count", 0))
    return _decode(
        where="the index",
        n=n,
        level0=np.asarray(state.get("data_level0", ())).view(np.uint8),
        levels=np.asarray(state.get("element_levels", ()), dtype=np.int64)[:n],
        upper=np.asarray(state.get("link_lists", ())).view(np.uint8),
        m=int(state.get("max_M", 1)),
        m0=int(state.get("max_M0", 2)),
        entry=int(state.get("enterpoint_node", 0)),
        top=int(state.get("max_level", 0)),
        space=str(state["space"]),
        dim=int(state["dim"]),
    )


def _from_file(path: Path, space: str | None, dim: int | None) -> LayeredGraph:
    if space not in SPACES or dim is None or dim < 1:
        raise ValueError(f"{path}: say space= ('l2', 'ip' or 'cosine') and dim=; a saved index does not hold them")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) < HEADER.size:
        raise ValueError(f"{path}: {len(raw)} bytes are too few for an hnswlib index; the file is cut off")
    _, _, n, size, label_at, vector_at, top, entry, m, m0, _, _, _ = HEADER.unpack(raw[: HEADER.size].tobytes())
    if not (0 < m < DELETED and 0 < m0 < DELETED and vector_at == 4 + 4 * m0 and label_at == size - 8 > vector_at):
        raise ValueError(f"{path}: not an index that hnswlib 0.8 saved (its header does not fit together)")
    if label_at - vector_at != 4 * dim:
        raise ValueError(f"{path}: the vectors have {(label_at - vector_at) // 4} dimensions, not {dim}")
    start = HEADER.size + n * size
    if start > len(raw):
        raise ValueError(f"{path}: cut off, {n} elements need {start} bytes and there are {len(raw)}")
    from amem import kernel

    block = 4 + 4 * m
    levels, end = kernel.walk_lists(raw, start, n, block)
    if end != len(raw):
        raise ValueError(f"{path}: corrupt or cut off, the link lists of the upper levels do not end with the file")
    kept = np.ones(len(raw) - start, dtype=bool)  # all but each element's own length word
    kept[(np.arange(n)[:, None] * 4 + (np.cumsum(levels) - levels)[:, None] * block + np.arange(4)).ravel()] = False
    level0, upper = raw[HEADER.size : start], raw[start:][kept]
    return _decode(str(path), n, level0, levels, upper, m, m0, entry, top, space, dim)


def _table(n: int, points: Ints, words: npt.NDArray[np.uint32], where: str) -> LinkTable:
    """CSR links of `points` from their blocks (count word, slots) of shape (len(points), 1 + slots)."""
    counts = (words[:, 0] & 0xFFFF).astype(np.int64)
    if np.any(counts > words.shape[1] - 1):
        raise ValueError(f"{where}: corrupt, an element claims more links than it has room for")
    indices = words[:, 1:][np.arange(words.shape[1] - 1) < counts[:, None]]
    if len(indices) and int(indices.max()) >= n:
        raise ValueError(f"{where}: corrupt, a link leads to element {indices.max()} of {n}")
    indptr = np.zeros(n + 1, dtype=np.int64)
    indptr[points + 1] = counts
    return np.cumsum(indptr), indices.astype(np.int32)


def _decode(
    where: str,
    n: int,
    level0: npt.NDArray[np.uint8],
    levels: Ints,
    upper: npt.NDArray[np.uint8],
    m: int,
    m0: int,
    entry: int,
    top: int,
    space: str,
    dim: int,
) -> LayeredGraph:
    params: dict[str, Any] = {"M": m, "M0": m0, "metric": space}
    if n == 0:
        empty = (np.zeros(1, np.int64), np.zeros(0, np.int32))
        return graph.LayeredGraph(
            (), np.zeros((0, dim), np.float32), np.zeros(0, np.int64), (empty,), -1, "hnswlib", params
        )
    words = np.ascontiguousarray(level0).view(np.uint32).reshape(n, -1)
    blocks = np.ascontiguousarray(upper).view(np.uint32).reshape(-1, 1 + m)
    if words.shape[1] != 1 + m0 + dim + 2 or len(blocks) != levels.sum():
        raise ValueError(f"{where}: corrupt, its arrays do not have the sizes that its parameters call for")
    if not 0 <= entry < n or levels.max() != top or levels[entry] != top:
        raise ValueError(f"{where}: corrupt, entry point {entry} of {n} does not stand on the top level {top}")
    tables = [_table(n, np.arange(n), words[:, : 1 + m0], where)]
    first = np.cumsum(levels) - levels
    for level in range(1, top + 1):
        points = np.flatnonzero(levels >= level)
        indptr, indices = _table(n, points, blocks[first[points] + level - 1], where)
        if len(indices) and levels[indices].min() < level:
            raise ValueError(f"{where}: corrupt, a link of level {level} leads to an element below it")
        tables.append((indptr, indices))
    vectors = np.ascontiguousarray(words[:, 1 + m0 : 1 + m0 + dim]).view(np.float32)
    if not np.isfinite(vectors.sum(dtype=np.float64)):  # one pass without a mask; names the place only when needed
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise ValueError(f"{where}: the vector of element {bad[0]} is not finite")
    labels = np.ascontiguousarray(words[:, -2:]).view(np.uint64).ravel()
    deleted = np.flatnonzero(words[:, 0] & DELETED)
    return graph.LayeredGraph(
        tuple(labels.tolist()),
        vectors,
        levels,
        tuple(tables),
        entry,
        "hnswlib",
        params,
        deleted=frozenset(deleted.tolist()),
    )


def to_hnswlib(g: LayeredGraph) -> hnswlib.Index:
    """The same points and links inside hnswlib: `knn_query` then walks our graph in C++.

    Labels are the ids where these are integers, else the index of the point. M is the smallest that holds the degrees
    (hnswlib keeps 2 M link slots at level 0). Results equal `trace.search`'s for the navigator and for decoded
    indexes; the article's graph, searched here in double precision, can differ where distances agree to 7 digits.
    `set_ef` as on any index.
    """
    import hnswlib

    n, dim = len(g), g.vectors.shape[1]
    degrees = [np.diff(indptr) for indptr, _ in g.links]
    m = max(2, (int(degrees[0].max(initial=0)) + 1) // 2, *(int(d.max(initial=0)) for d in degrees[1:]))
    if n == 0:
        m = max(m, int(g.params.get("M", m)))
    if 2 * m >= DELETED:
        raise ValueError(f"a point has more links than hnswlib can hold ({2 * m})")
    index = hnswlib.Index(g.metric, max(dim, 1))
    index.init_index(max(n, 1), M=m, ef_construction=200, random_seed=100)
    if n == 0:
        return index
    state = dict(index.__getstate__()[0])
    words = np.zeros((n, 1 + 2 * m + dim + 2), dtype=np.uint32)
    _fill(words[:, : 1 + 2 * m], *g.links[0], np.arange(n))
    words[list(g.deleted), 0] |= DELETED
    words[:, 1 + 2 * m : 1 + 2 * m + dim] = np.ascontiguousarray(g.vectors).view(np.uint32)
    whole = all(isinstance(name, int) for name in g.ids)
    labels = np.array([name % 2**64 for name in g.ids] if whole else range(n), dtype=np.uint64)
    words[:, -2:] = labels.view(np.uint32).reshape(n, 2)
    levels = np.asarray(g.levels, dtype=np.int64)
    blocks = np.zeros((int(levels.sum()), 1 + m), dtype=np.uint32)
    first = np.cumsum(levels) - levels
    for level, (indptr, indices) in enumerate(g.links[1:], start=1):
        points = np.flatnonzero(levels >= level)
        rows = np.zeros((len(points), 1 + m), dtype=np.uint32)
        _fill(rows, indptr, indices, points)
        blocks[first[points] + level - 1] = rows
    state.update(
        cur_element_count=n,
        max_level=int(levels.max()),
        enterpoint_node=g.entry,
        has_deletions=bool(g.deleted),
        ep_added=True,
        label_lookup_external=labels,
        label_lookup_internal=np.arange(n, dtype=np.uint32),
        element_levels=levels.astype(np.int32),
        data_level0=words.view(np.int8).ravel(),
        link_lists=blocks.view(np.int8).ravel(),
    )
    out = hnswlib.Index.__new__(hnswlib.Index)
    out.__setstate__((state,))
    return out


def _fill(rows: npt.NDArray[np.uint32], indptr: Ints, indices: Ints, points: Ints) -> None:
    """Write the links of `points` into their blocks (count word, slots)."""
    counts = (indptr[points + 1] - indptr[points]).astype(np.int64)
    rows[:, 0] = counts
    rows[:, 1:][np.arange(rows.shape[1] - 1) < counts[:, None]] = indices


def prepare(g: LayeredGraph, queries: npt.ArrayLike) -> Floats:
    """Queries (m, d) or one (d,) as hnswlib hands them to its distance: float32, for cosine scaled its way."""
    q = np.ascontiguousarray(queries, dtype=np.float32)
    if not np.isfinite(q).all():
        raise ValueError("the query does not fit into float32")
    if g.metric != "cosine":
        return q
    rows = np.atleast_2d(q)
    order = arith.scheme("cosine", rows.shape[1])
    scaled = arith.units(rows, order[1]) if order is not None else np.array([_unit_by_hnswlib(row) for row in rows])
    return scaled.reshape(q.shape)


def distances(g: LayeredGraph, query: npt.ArrayLike, points: npt.ArrayLike) -> Floats:
    """Distances from a prepared query to points of a graph, as hnswlib computes them."""
    q, at = np.asarray(query, dtype=np.float32), np.asarray(points)
    order = arith.scheme(g.metric, len(q))
    if order is None:
        return _by_hnswlib(g, q)[at]
    return arith.distances(q, g.vectors, at, order[0])


# Where no known order of summation agrees with this build of hnswlib, hnswlib computes every distance itself: slow
# (all n a query) and right.
_brute: dict[int, tuple[LayeredGraph, Any, bytes, Floats]] = {}


def _by_hnswlib(g: LayeredGraph, q: Floats) -> Floats:
    import hnswlib

    _, brute, last, found = _brute.get(id(g), (g, None, b"", np.zeros(0, np.float32)))
    if brute is None:
        brute = hnswlib.BFIndex("l2" if g.metric == "l2" else "ip", len(q))
        brute.init_index(len(g))
        brute.add_items(g.vectors, np.arange(len(g)))
    if q.tobytes() != last:
        labels, sorted_ = brute.knn_query(q, k=len(g), num_threads=1)
        found = np.empty(len(g), np.float32)
        found[labels[0].astype(np.int64)] = sorted_[0]
        _brute.clear()  # one graph and one query are remembered: a search asks for the same query many times
        _brute[id(g)] = (g, brute, q.tobytes(), found)
    return found


def _unit_by_hnswlib(q: Floats) -> Floats:
    import hnswlib

    one = hnswlib.Index("cosine", len(q))
    one.init_index(1)
    one.add_items(q)
    return np.asarray(one.get_items([0])[0], dtype=np.float32)
