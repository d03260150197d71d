"""Choosing the edges of a navigator: compiled loops over links kept as (n, cap) int32 slots and (n,) degrees.

Edges are undirected and no point ever has more than `cap`. How they are chosen, and what was tried and lost, is told
in `amem.navigator`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from amem.arith import Scheme, distance
from amem.kernel import pop, push

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

OCCLUSION = np.float32(0.95)  # below 1 an edge must be clearly useless before it is left out


@numba.njit(cache=True)
def keep_nearest(scores: Floats, row0: int, col0: int, near: Ints, score: Floats, held: Ints) -> None:
    """Take a block of similarities (rows x columns, at row0 and col0 of the whole) into each row's K best.

    near, score: (n, K + 1) heaps, the worst on top; held: (n,) how many of the K are there.
    """
    k = near.shape[1] - 1
    for r in range(scores.shape[0]):
        i = row0 + r
        worst = -score[i, 0] if held[i] == k else np.float32(-np.inf)
        for c in range(scores.shape[1]):
            s = scores[r, c]
            if s <= worst or i == col0 + c:
                continue
            push(score[i], near[i], held[i], -s, col0 + c)
            held[i] += 1
            if held[i] > k:
                pop(score[i], near[i], held[i])
                held[i] = k
            if held[i] == k:
                worst = -score[i, 0]


@numba.njit(cache=True)
def keep_new(
    scores: Floats,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    near: Ints,
    score: Floats,
    held: Ints,
) -> None:
    """As `keep_nearest` for a block of any rows and columns, of which some pairs may have come before."""
    k = near.shape[1] - 1
    for r in range(rows.size):
        i = rows[r]
        worst = -score[i, 0] if held[i] == k else np.float32(-np.inf)
        for c in range(columns.size):
            s, j = scores[r, c], columns[c]
            if s <= worst or i == j or j in near[i, : held[i]]:
                continue
            push(score[i], near[i], held[i], -s, j)
            held[i] += 1
            if held[i] > k:
                pop(score[i], near[i], held[i])
                held[i] = k
            if held[i] == k:
                worst = -score[i, 0]


@numba.njit(cache=True)
def lengths(vectors: Floats, a: Ints, b: Ints, scheme: Scheme) -> Floats:
    """Distance of each pair a[e], b[e]."""
    out = np.empty(a.size, np.float32)
    for e in range(a.size):
        out[e] = distance(vectors[a[e]], vectors, b[e], scheme)
    return out


@numba.njit(cache=True)
def root(parent: Ints, i: int) -> int:
    """Representative of the component of `i`, halving the path to it."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@numba.njit(cache=True)
def linked(links: Ints, degree: Ints, i: int, j: int) -> bool:
    """Whether i and j are neighbours."""
    return j in links[i, : degree[i]]


@numba.njit(cache=True)
def link(links: Ints, degree: Ints, i: int, j: int) -> None:
    """Add the edge i - j; both have room."""
    links[i, degree[i]] = j
    links[j, degree[j]] = i
    degree[i] += 1
    degree[j] += 1


@numba.njit(cache=True)
def unlink(links: Ints, degree: Ints, i: int, j: int) -> None:
    """Take the edge i - j away."""
    for x, y in ((np.int64(i), np.int64(j)), (np.int64(j), np.int64(i))):
        for s in range(degree[x]):
            if links[x, s] == y:
                degree[x] -= 1
                links[x, s:-1] = links[x, s + 1 :].copy()
                links[x, -1] = -1
                break


@numba.njit(cache=True)
def _occluded(vectors: Floats, links: Ints, degree: Ints, i: int, j: int, length: np.float32, scheme: Scheme) -> bool:
    """Whether a neighbour of `i` is closer to `j` than `i` is, so that greedy search gets there without the edge."""
    for s in range(degree[i]):
        if OCCLUSION * distance(vectors[j], vectors, links[i, s], scheme) < length:
            return True
    return False


@numba.njit(cache=True)
def choose(
    vectors: Floats, links: Ints, degree: Ints, tree: Ints, a: Ints, b: Ints, length: Floats, scheme: Scheme
) -> None:
    """Fill the free slots from the pairs a[e], b[e], which come by growing length.

    First the pairs that join two components, at most half of a point's slots (`tree` counts them); then the others
    where both ends have room and the edge is not occluded from both ends.
    """
    cap = links.shape[1]
    half = max(2, cap // 2)
    parent = np.arange(links.shape[0]).astype(np.int32)
    for i in range(links.shape[0]):
        for s in range(degree[i]):
            parent[root(parent, i)] = root(parent, links[i, s])
    for e in range(a.size):
        i, j = a[e], b[e]
        if degree[i] < cap and degree[j] < cap and tree[i] < half and tree[j] < half:
            u, v = root(parent, i), root(parent, j)
            if u != v:
                parent[u] = v
                link(links, degree, i, j)
                tree[i] += 1
                tree[j] += 1
    for e in range(a.size):
        i, j = a[e], b[e]
        if degree[i] < cap and degree[j] < cap and not linked(links, degree, i, j):
            occluded = _occluded(vectors, links, degree, i, j, length[e], scheme)
            if not (occluded and _occluded(vectors, links, degree, j, i, length[e], scheme)):
                link(links, degree, i, j)


@numba.njit(cache=True)
def forest(vectors: Floats, links: Ints, degree: Ints) -> tuple[Ints, Ints, Ints]:
    """A spanning forest: (component of each point, forest links (n, cap), forest degrees).

    Grown breadth first from the lowest index; each component's leaves have one forest edge, so every component has a
    point that can give up another edge or has room.
    """
    n, cap = links.shape
    component = np.full(n, -1, np.int32)
    kept, count = np.full((n, cap), -1, np.int32), np.zeros(n, np.int32)
    queue = np.empty(n, np.int32)
    for start in range(n):
        if component[start] >= 0:
            continue
        component[start], queue[0], head, tail = start, start, 0, 1
        while head < tail:
            i = queue[head]
            head += 1
            for s in range(degree[i]):
                j = links[i, s]
                if component[j] < 0:
                    component[j] = start
                    link(kept, count, i, j)
                    queue[tail] = j
                    tail += 1
    return component, kept, count


@numba.njit(cache=True)
def make_room(vectors: Floats, links: Ints, degree: Ints, kept: Ints, count: Ints, i: int, scheme: Scheme) -> bool:
    """See that `i` has a free slot, giving up its longest edge outside the forest if need be."""
    if degree[i] < links.shape[1]:
        return True
    longest, worst = np.float32(-1), -1
    for s in range(degree[i]):
        j = links[i, s]
        if not linked(kept, count, i, j):
            d = distance(vectors[i], vectors, j, scheme)
            if d > longest:
                longest, worst = d, j
    if worst < 0:
        return False
    unlink(links, degree, i, worst)
    return True


@numba.njit(cache=True)
def join(
    vectors: Floats, links: Ints, degree: Ints, kept: Ints, count: Ints, a: Ints, b: Ints, scheme: Scheme
) -> int:
    """Add the edges a[e] - b[e] between components, each where both ends can make room; returns how many."""
    made = 0
    for e in range(a.size):
        i, j = a[e], b[e]
        if linked(links, degree, i, j) or count[i] >= kept.shape[1] or count[j] >= kept.shape[1]:
            continue
        if make_room(vectors, links, degree, kept, count, i, scheme) and make_room(
            vectors, links, degree, kept, count, j, scheme
        ):
            link(links, degree, i, j)
            link(kept, count, i, j)
            made += 1
    return made


@numba.njit(cache=True)
def swap_in(
    vectors: Floats, links: Ints, degree: Ints, kept: Ints, count: Ints, lost: Ints, stops: Ints, scheme: Scheme
) -> int:
    """Give each lost point an edge from where the search for it stopped (`stops`, nearest first); returns how many.

    A stop with a free slot is taken before one that must give up an edge.
    """
    made = 0
    for e in range(lost.size):
        i = lost[e]
        done = False
        for free in (True, False):
            for s in range(stops.shape[1]):
                j = stops[e, s]
                if j < 0 or j == i or linked(links, degree, i, j) or (free and degree[j] >= links.shape[1]):
                    continue
                if make_room(vectors, links, degree, kept, count, j, scheme) and make_room(
                    vectors, links, degree, kept, count, i, scheme
                ):
                    link(links, degree, i, j)
                    made += 1
                    done = True
                    break
            if done:
                break
    return made


def as_table(links: Ints, degree: Ints) -> tuple[npt.NDArray[Any], Ints]:
    """Slots as a CSR link table with int32 places."""
    indptr = np.zeros(len(links) + 1, dtype=np.int32)
    np.cumsum(degree, out=indptr[1:])
    return indptr, links[np.arange(links.shape[1]) < degree[:, None]]


def as_slots(indptr: npt.NDArray[Any], indices: npt.NDArray[Any], cap: int) -> tuple[Ints, Ints]:
    """A CSR link table as slots (n, cap) and degrees; the other way from `as_table`."""
    degree = np.diff(indptr).astype(np.int32)
    links = np.full((len(degree), cap), -1, dtype=np.int32)
    links[np.arange(cap) < degree[:, None]] = indices
    return links, degree
