"""The search of `amem.trace` without its log, compiled (numba): for benchmarks and for building graphs.

Heaps are binary, keyed by distance alone, with the element moves of C++'s std::push_heap and std::pop_heap (and of
Python's heapq), so that ties are resolved as hnswlib and `trace.search` resolve them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
import numpy.typing as npt

from amem import arith
from amem.arith import Scheme, distance, prefetch
from amem.sketch import guess

if TYPE_CHECKING:
    from amem.graph import LayeredGraph

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[Any]
Bits = npt.NDArray[np.uint64]

_rows: WeakKeyDictionary[LayeredGraph, Ints] = WeakKeyDictionary()


@numba.njit(cache=True)
def push(keys: Floats, items: Ints, size: int, key: np.float32, item: int) -> None:
    """Add an item to a heap of `size` items whose largest key is on top."""
    hole = size
    while hole > 0:
        parent = (hole - 1) >> 1
        if not keys[parent] < key:
            break
        keys[hole], items[hole] = keys[parent], items[parent]
        hole = parent
    keys[hole], items[hole] = key, item


@numba.njit(cache=True)
def pop(keys: Floats, items: Ints, size: int) -> None:
    """Take the item with the largest key from a heap of `size` items and leave it at place size - 1."""
    last = size - 1
    if last < 1:
        return
    key, item = keys[last], items[last]
    keys[last], items[last] = keys[0], items[0]
    hole, child = 0, 1
    while child < last:
        if child + 1 < last and not keys[child + 1] < keys[child]:
            child += 1
        keys[hole], items[hole] = keys[child], items[child]
        hole, child = child, 2 * child + 1
    while hole > 0:
        parent = (hole - 1) >> 1
        if not keys[parent] < key:
            break
        keys[hole], items[hole] = keys[parent], items[parent]
        hole = parent
    keys[hole], items[hole] = key, item


@numba.njit(cache=True, nogil=True)
def descend(
    vectors: Floats, indptr: Ints, indices: Ints, entry: int, floor: int, q: Floats, scheme: Scheme
) -> tuple[int, np.float32, int]:
    """Greedy walk from the entry down to level `floor`: (point, its distance, evaluations)."""
    here, near, evaluations = entry, distance(q, vectors, entry, scheme), 1
    for level in range(indptr.shape[0] - 1, floor, -1):
        improved = True
        while improved:
            improved = False
            origin = here
            for at in range(indptr[level, origin], indptr[level, origin + 1]):
                prefetch(vectors, indices[at])
            for at in range(indptr[level, origin], indptr[level, origin + 1]):
                point = indices[at]
                d = distance(q, vectors, point, scheme)
                evaluations += 1
                if d < near:
                    here, near, improved = point, d, True
    return here, near, evaluations


@numba.njit(cache=True)
def _bound(best_keys: Floats, kept: int, ef: int, slack: float) -> float:
    """Points farther than this are not taken up; see `trace.search`. A negative slack stands for none."""
    if kept < ef:
        return math.inf
    worst = float(best_keys[0])
    return worst if slack < 0 else (1 + slack) * max(worst, 0.0)


@numba.njit(cache=True, nogil=True)
def _search(
    vectors: Floats,
    indptr: Ints,
    indices: Ints,
    slots: Ints,
    entry: int,
    hidden: npt.NDArray[np.bool_],
    again: bool,
    rank: Ints,
    queries: Floats,
    k: int,
    ef: int,
    slack: float,
    scheme: Scheme,
    bits: Bits,
    lengths: Floats,
    asked_bits: Bits,
    asked_lengths: Floats,
    cosines: Floats,
) -> tuple[Ints, Floats, Ints]:
    n, many = vectors.shape[0], queries.shape[0]
    out = np.full((many, k), -1, np.int64)
    far = np.full((many, k), np.inf, np.float32)
    spent = np.zeros(many, np.int64)
    seen = np.zeros(n, np.int32)
    open_keys, open_items = np.empty(n + 1, np.float32), np.empty(n + 1, np.int32)
    best_keys, best_items = np.empty(ef + 2, np.float32), np.empty(ef + 2, np.int32)
    fresh = np.empty(slots.shape[1], np.int64)
    guesses = np.empty(fresh.size, np.float32)
    any_hidden, sketched = hidden.size > 0, bits.size > 0
    ask, ask_length = bits[0] if sketched else np.zeros(0, np.uint64), np.float32(0)
    for row in range(many):
        q = queries[row]
        if sketched:
            ask, ask_length = asked_bits[row], asked_lengths[row]
        here, near, evaluations = descend(vectors, indptr, indices, entry, 0, q, scheme)
        stamp = row + 1
        seen[here] = stamp
        open_keys[0], open_items[0], opened, kept = -near, here, 1, 0
        if not (any_hidden and hidden[here]):
            best_keys[0], best_items[0], kept = near, here, 1
            evaluations += again
        limit = _bound(best_keys, kept, ef, slack)
        while opened > 0 and not -open_keys[0] > limit:
            here = open_items[0]
            pop(open_keys, open_items, opened)
            opened -= 1
            if opened > 0:
                prefetch(slots, open_items[0])
            new = 0
            for at in range(slots.shape[1]):
                point = slots[here, at]
                if point < 0:
                    break
                if seen[point] != stamp:
                    seen[point] = stamp
                    fresh[new] = point
                    new += 1
                    if sketched:
                        prefetch(bits, point)
                    else:
                        prefetch(vectors, point)
            if sketched:
                likely = 0
                for at in range(new):
                    point = fresh[at]
                    guessed = guess(bits, lengths, point, ask, ask_length, cosines)
                    if not guessed > limit:
                        fresh[likely], guesses[likely] = point, guessed
                        likely += 1
                        prefetch(vectors, point)
                new = likely
            for at in range(new):
                if sketched and guesses[at] > limit:  # the bound has tightened since
                    continue
                point = fresh[at]
                d = distance(q, vectors, point, scheme)
                evaluations += 1
                if kept >= ef and not d < limit:
                    continue
                push(open_keys, open_items, opened, -d, point)
                opened += 1
                if any_hidden and hidden[point]:
                    continue
                if kept < ef or d < best_keys[0]:
                    push(best_keys, best_items, kept, d, point)
                    kept += 1
                    if kept > ef:
                        pop(best_keys, best_items, kept)
                        kept -= 1
                    limit = _bound(best_keys, kept, ef, slack)
        while kept > k:
            pop(best_keys, best_items, kept)
            kept -= 1
        for place in range(kept):  # insertion sort by (distance, rank)
            d, point = best_keys[place], best_items[place]
            to = place
            while to > 0 and (far[row, to - 1] > d or (far[row, to - 1] == d and rank[out[row, to - 1]] > rank[point])):
                far[row, to], out[row, to] = far[row, to - 1], out[row, to - 1]
                to -= 1
            far[row, to], out[row, to] = d, point
        spent[row] = evaluations
    return out, far, spent


def search_many(
    graph: LayeredGraph, queries: npt.ArrayLike, k: int = 10, ef: int = 16, slack: float | None = None
) -> tuple[Ints, Floats, Ints]:
    """`trace.search` for many queries (m, d), untraced, one thread.

    Returns (points, distances, evaluations): (m, k) indices into `graph.ids` (-1 where fewer than k were found),
    (m, k) float32, (m,) counts. The same rules and the same results as `trace.search`; the article's graph is searched
    in float32 here, so that near-ties may fall otherwise.
    """
    if k < 1 or ef < 1:
        raise ValueError(f"k and ef must be at least 1, got k={k}, ef={ef}")
    if slack is not None and (graph.metric == "ip" or not 0 <= slack < np.inf):
        raise ValueError(f"slack must be a number >= 0, with metric cosine or l2, got {slack}")
    rows = np.atleast_2d(np.asarray(queries))
    if len(graph) == 0:
        return np.full((len(rows), k), -1), np.full((len(rows), k), np.inf, np.float32), np.zeros(len(rows), np.int64)
    prepared = _prepared(graph, rows)
    hidden = np.zeros(len(graph) if graph.deleted else 0, dtype=bool)
    hidden[list(graph.deleted)] = True
    indptr, indices = graph.flat
    bits, lengths = np.zeros((0, 0), np.uint64), np.zeros(0, np.float32)
    asked = bits, lengths, lengths
    if slack is not None and graph.sketch is not None:
        bits, lengths, asked = graph.sketch.bits, graph.sketch.lengths, graph.sketch.queries(prepared)
    order = arith.scheme(graph.metric, graph.vectors.shape[1])
    return _search(
        graph.vectors,
        indptr,
        indices,
        _slots(graph),
        graph.entry,
        hidden,
        graph.kind == "hnswlib",
        graph.rank,
        prepared,
        k,
        max(ef, k) if slack is None else k,
        -1.0 if slack is None else float(slack),
        arith.plain(graph.metric, graph.vectors.shape[1]) if order is None else order[0],
        bits,
        lengths,
        *asked,
    )


def _slots(graph: LayeredGraph) -> Ints:
    """Level-0 links in rows of one width, -1 behind the last: (n, w), made once a graph.

    w is a power of two, so that a row of up to 16 links lies within a cache line.
    """
    rows = _rows.get(graph)
    if rows is None:
        indptr, indices = graph.links[0]
        degree = np.diff(indptr)
        rows = arith.aligned((len(graph), 1 << max(0, int(degree.max()) - 1).bit_length()), np.int32)
        rows[:] = -1
        rows[np.arange(rows.shape[1]) < degree[:, None]] = indices
        _rows[graph] = rows
    return rows


def _prepared(graph: LayeredGraph, rows: npt.NDArray[Any]) -> Floats:
    """`graph.prepare` in float32, without its passes in double precision where the rows are plainly in order."""
    if (
        graph.kind != "article"
        and rows.dtype == np.float32
        and rows.ndim == 2
        and rows.shape[1] == graph.vectors.shape[1]
    ):
        power = np.einsum("ij,ij->i", rows, rows)
        if np.isfinite(power).all() and power.all():
            from amem import hnsw

            return hnsw.prepare(graph, rows)
    return graph.prepare(rows).astype(np.float32)


@numba.njit(cache=True)
def walk_lists(raw: npt.NDArray[np.uint8], start: int, n: int, block: int) -> tuple[Ints, int]:
    """Levels of n elements from the length words of a saved index, and where the last list ends (-1: corrupt)."""
    levels = np.zeros(n, np.int64)
    at = start
    for i in range(n):
        if at + 4 > raw.size:
            return levels, -1
        size = raw[at] | raw[at + 1] << 8 | raw[at + 2] << 16 | np.int64(raw[at + 3]) << 24
        if size % block:
            return levels, -1
        levels[i] = size // block
        at += 4 + size
        if at > raw.size:
            return levels, -1
    return levels, at
