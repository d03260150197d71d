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
def _keep(near: Ints, score: Floats, held: Ints, worst: Floats, i: int, j: int, s: np.float32) -> None:
    """Take j into the K best of i; `worst` (n,) holds the similarity that the next one must beat."""
    k = near.shape[1] - 1
    push(score[i], near[i], held[i], -s, j)
    if held[i] < k:
        held[i] += 1
    else:
        pop(score[i], near[i], k + 1)
    if held[i] == k:
        worst[i] = -score[i, 0]


@numba.njit(cache=True)
def keep_nearest(scores: Floats, start: int, near: Ints, score: Floats, held: Ints, worst: Floats) -> None:
    """Take similarities of the points from `start` on (rows) with themselves and all later ones (columns) both ways.

    near, score: (n, K + 1) heaps, the worst of a point's K best on top; held: (n,) how many there are; worst: (n,).
    """
    for r in range(scores.shape[0]):
        i = start + r
        for c in range(r + 1, scores.shape[1]):
            s = scores[r, c]
            if s > worst[i]:
                _keep(near, score, held, worst, i, start + c, s)
            if s > worst[start + c]:
                _keep(near, score, held, worst, start + c, i, s)


@numba.njit(cache=True)
def keep_new(
    scores: Floats, points: npt.NDArray[np.int64], start: int, near: Ints, score: Floats, held: Ints, worst: Floats
) -> None:
    """As `keep_nearest` within a cell: `points` are its members, and some pairs may have come before."""
    for r in range(scores.shape[0]):
        i = points[start + r]
        for c in range(r + 1, scores.shape[1]):
            s, j = scores[r, c], points[start + c]
            if s > worst[i] and j not in near[i, : held[i]]:
                _keep(near, score, held, worst, i, j, s)
            if s > worst[j] and i not in near[j, : held[j]]:
                _keep(near, score, held, worst, j, i, s)


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
    for s in range(degree[i]):  # noqa: SIM110 (compiled: a plain loop)
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

    Grown depth first from the lowest index, which makes long thin trees: most points have two forest edges and can
    give up the others; a leaf, which every component has, can give up all but one.
    """
    n, cap = links.shape
    component = np.full(n, -1, np.int32)
    kept, count = np.full((n, cap), -1, np.int32), np.zeros(n, np.int32)
    stack, slot = np.empty(n, np.int32), np.zeros(n, np.int32)
    for start in range(n):
        if component[start] >= 0:
            continue
        component[start], stack[0], top = start, start, 1
        while top:
            i = stack[top - 1]
            if slot[i] == degree[i]:
                top -= 1
                continue
            j = links[i, slot[i]]
            slot[i] += 1
            if component[j] < 0:
                component[j] = start
                link(kept, count, i, j)
                stack[top] = j
                top += 1
    return component, kept, count


@numba.njit(cache=True)
def make_room(vectors: Floats, links: Ints, degree: Ints, kept: Ints, count: Ints, i: int, scheme: Scheme) -> bool:
    """See that `i` has a free slot, giving up its most roundabout edge if need be: not in the forest, best bypassed."""
    if degree[i] < links.shape[1]:
        return True
    least, worst = np.float32(np.inf), -1
    for s in range(degree[i]):
        j = links[i, s]
        if linked(kept, count, i, j):
            continue
        way_round = np.float32(np.inf)  # the closest other neighbour of i to j, as a share of the edge's length
        for t in range(degree[i]):
            if t != s:
                way_round = min(way_round, distance(vectors[j], vectors, links[i, t], scheme))
        way_round /= max(distance(vectors[i], vectors, j, scheme), np.float32(1e-12))
        if way_round < least:
            least, worst = way_round, j
    if worst < 0:
        return False
    unlink(links, degree, i, worst)
    return True


@numba.njit(cache=True)
def join(vectors: Floats, links: Ints, degree: Ints, kept: Ints, count: Ints, a: Ints, b: Ints, scheme: Scheme) -> int:
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
