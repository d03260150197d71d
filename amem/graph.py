"""`LayeredGraph`: levels, links and vectors of a navigation graph, and its builders.

One structure for every graph: builders make it, `trace.search` walks it, `view` draws it. `article` stands here;
`navigator` (ours) and `from_hnswlib` have rooms of their own and are reached through this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from amem import levels as levels_

if TYPE_CHECKING:
    import hnswlib

    from amem.hnsw import from_hnswlib
    from amem.navigator import navigator
    from amem.sketch import Sketch

__all__ = ["LayeredGraph", "article", "from_hnswlib", "jaccard", "navigator", "table", "unit_rows"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.signedinteger[Any]]
LinkTable = tuple[Ints, Ints]
Name = str | int

ARTICLE_M = 4  # seed 000: M = M0 = 4, few enough edges to look at
ARTICLE_EF = 16
LEXICAL_SHARE = 0.3  # the article names two sources of candidates and no weights; this is our reading


@dataclass(frozen=True, eq=False)
class LayeredGraph:
    """A navigation graph over n vectors.

    ids: n names; a decoded hnswlib index has its int labels here. vectors: (n, d) float32, unit length (a decoded l2
    or ip index keeps its own length). levels: (n,) highest level of each point.
    links: for each level 0..max one (indptr, indices) pair in CSR form over all n points.
    entry: index of the entry point, -1 in an empty graph. bridges: L0 pairs added past the degree cap.
    deleted: indices that are walked through and never returned (hnswlib's mark_deleted).
    sketch: one-bit sketches of the vectors, with which the adaptive stop passes over far neighbours (navigator only).
    """

    ids: tuple[Any, ...]
    vectors: Floats
    levels: Ints
    links: tuple[LinkTable, ...]
    entry: int
    kind: str
    params: dict[str, Any] = field(default_factory=dict)
    bridges: frozenset[tuple[int, int]] = frozenset()
    deleted: frozenset[int] = frozenset()
    sketch: Sketch | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        counts = "/".join(str(int(np.sum(self.levels >= level))) for level in range(len(self.links)))
        edges = "/".join(str(len(indices) // 2) for _, indices in self.links)
        return f"LayeredGraph({self.kind}, n={len(self)}, points a level {counts}, edges a level {edges})"

    @property
    def max_level(self) -> int:
        return len(self.links) - 1

    @property
    def metric(self) -> str:
        """cosine, l2 (squared) or ip (1 - dot)."""
        return str(self.params.get("metric", "cosine"))

    @cached_property
    def index_of(self) -> dict[Any, int]:
        return {name: i for i, name in enumerate(self.ids)}

    @cached_property
    def rank(self) -> Ints:
        """(n,) order among equal distances: by label where ids are integers (as in hnswlib), else by index."""
        if not all(isinstance(name, int) for name in self.ids):
            return np.arange(len(self))
        labels = np.array([name % 2**64 for name in self.ids], dtype=np.uint64)
        rank = np.empty(len(self), dtype=np.int64)
        rank[np.argsort(labels, kind="stable")] = np.arange(len(self))
        return rank

    @cached_property
    def flat(self) -> LinkTable:
        """All levels in two arrays for compiled searches: (levels, n + 1) places in one list of int32 links."""
        starts = np.cumsum([0, *(len(indices) for _, indices in self.links)])
        indptr = np.stack([table[0] + start for table, start in zip(self.links, starts, strict=False)])
        return indptr.astype(np.int64), np.concatenate([indices for _, indices in self.links]).astype(np.int32)

    def neighbours(self, level: int, i: int) -> Ints:
        """Indices linked to point `i` on `level`, in stored order."""
        indptr, indices = self.links[level]
        return indices[indptr[i] : indptr[i + 1]]

    def prepare(self, query: npt.ArrayLike) -> npt.NDArray[Any]:
        """A query (d,), or several (m, d), as `distances` wants it: of unit length where the metric is cosine."""
        q = np.asarray(query, dtype=np.float64)
        dim = self.vectors.shape[1]
        if q.ndim not in (1, 2) or q.shape[-1] != dim:
            raise ValueError(f"query has shape {q.shape}, the graph's vectors have {dim} dimensions")
        length = np.linalg.norm(q, axis=-1, keepdims=True)
        if not np.isfinite(length).all() or (self.metric == "cosine" and not length.all()):
            raise ValueError("the query vector is zero or not finite, so it has no direction")
        if self.kind == "article":
            return q / length
        from amem import hnsw

        return hnsw.prepare(self, query)

    def distances(self, query: npt.ArrayLike, points: npt.ArrayLike) -> npt.NDArray[Any]:
        """Distance from a prepared query (d,) to the points with these indices: 1 - dot, or squared Euclidean (l2).

        The article's graph sums in double precision, so that order and rounded values do not depend on the
        processor's BLAS; the others in hnswlib's own float32 order (`amem.arith`), so that they agree with it.
        """
        if self.kind == "article":
            rows = self.vectors[np.asarray(points, dtype=np.int64)].astype(np.float64)
            return 1.0 - np.einsum("ij,j->i", rows, np.asarray(query, dtype=np.float64))
        from amem import hnsw

        return hnsw.distances(self, query, points)

    def guesser(self, query: npt.NDArray[Any]) -> Callable[[Ints], list[float]] | None:
        """Guesses at the distances of a prepared query to points, from their sketches; None in a graph without any."""
        if (kept := self.sketch) is None:
            return None
        from amem import sketch

        bits, lengths, cosines = kept.queries(query[None, :])
        return lambda points: sketch.guesses(kept.bits, kept.lengths, points, bits[0], lengths[0], cosines).tolist()

    def to_hnswlib(self) -> hnswlib.Index:
        """This graph inside hnswlib's C++ search; see `amem.hnsw.to_hnswlib`."""
        from amem import hnsw

        return hnsw.to_hnswlib(self)

    def edges(self, level: int) -> Iterator[tuple[int, int]]:
        """Undirected pairs (i < j) linked on `level`, in order."""
        indptr, indices = self.links[level]
        for i in range(len(self)):
            for j in indices[indptr[i] : indptr[i + 1]]:
                if i < j or i not in indices[indptr[j] : indptr[j + 1]]:
                    yield (i, int(j))

    def to_networkx(self, level: int = 0) -> nx.Graph:
        """The links of one level as a networkx graph; nodes are ids with `level`, edges carry `distance`."""
        net = nx.Graph()
        for i in np.flatnonzero(self.levels >= level).tolist():
            net.add_node(self.ids[i], level=int(self.levels[i]))
        for i, j in self.edges(level):
            distance = float(self.distances(self.vectors[i], [j])[0])
            net.add_edge(self.ids[i], self.ids[j], distance=distance, bridge=(i, j) in self.bridges)
        return net


def unit_rows(vectors: npt.ArrayLike) -> Floats:
    """Rows scaled to unit length as (n, d) float32. A zero, NaN or infinite row is an error that names it."""
    rows = np.asarray(vectors, dtype=np.float32)
    if rows.ndim != 2:
        raise ValueError(f"vectors must have shape (n, d), got {rows.shape}")
    length = np.linalg.norm(rows.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(length) | (length == 0))
    if len(bad):
        raise ValueError(f"vector {bad[0]} is zero or not finite, so it has no direction; drop or re-embed it")
    return np.ascontiguousarray(rows / length[:, None].astype(np.float32))


def table(n: int, pairs: Iterable[tuple[int, int]]) -> LinkTable:
    """CSR link table over n points from undirected pairs; each point's links keep the order of the pairs."""
    lists: list[list[int]] = [[] for _ in range(n)]
    for i, j in pairs:
        lists[i].append(j)
        lists[j].append(i)
    indptr = np.zeros(n + 1, dtype=np.int64)
    indptr[1:] = np.cumsum([len(row) for row in lists])
    return indptr, np.array([j for row in lists for j in row], dtype=np.int64)


def jaccard(terms: Sequence[frozenset[str]]) -> npt.NDArray[np.float64]:
    """Pairwise Jaccard overlap of term sets, shape (n, n); two empty sets have overlap 0."""
    vocabulary = {term: k for k, term in enumerate(sorted(set().union(*terms)))} if terms else {}
    has = np.zeros((len(terms), len(vocabulary)), dtype=np.float32)
    for i, row in enumerate(terms):
        has[i, [vocabulary[term] for term in row]] = 1
    both = (has @ has.T).astype(np.float64)
    sizes = has.sum(axis=1, dtype=np.float64)
    return both / np.maximum(sizes[:, None] + sizes[None, :] - both, 1)


def _components(n: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    net = nx.Graph()
    net.add_nodes_from(range(n))
    net.add_edges_from(pairs)
    # Largest first, ties by smallest member: the article's max() over components, made deterministic.
    return sorted((sorted(c) for c in nx.connected_components(net)), key=lambda c: (-len(c), c[0]))


def article(
    vectors: npt.ArrayLike,
    ids: Sequence[str],
    terms: Sequence[frozenset[str]] | None = None,
    importance: Sequence[float] | None = None,
    m: int = ARTICLE_M,
) -> LayeredGraph:
    """The navigation graph of seed 000, the baseline and teaching version.

    vectors (n, d); ids n distinct names; terms the words of each note (for Jaccard; without them vectors alone);
    importance (n,) breaks ties when a level would be empty. M = M0 = m links a point and level, handed out from one
    list of pairs by falling score; level 0 is then made connected by bridges, which may exceed the cap as in the seed.
    Quadratic in n: meant for up to some thousand notes.
    """
    names = tuple(ids)
    if len(set(names)) != len(names):
        raise ValueError("ids must be distinct: levels and paths are told apart by them")
    n = len(names)
    if n == 0:
        return LayeredGraph(names, np.zeros((0, 0), np.float32), np.zeros(0, np.int64), (table(0, ()),), -1, "article")
    rows = unit_rows(vectors)
    if len(rows) != n:
        raise ValueError(f"{n} ids for {len(rows)} vectors")
    wide = rows.astype(np.float64)
    cosine = np.einsum("id,jd->ij", wide, wide, optimize=False) if n <= 512 else wide @ wide.T
    lexical = jaccard(terms) if terms is not None else cosine
    score = (1 - LEXICAL_SHARE) * cosine + LEXICAL_SHARE * lexical if terms is not None else cosine

    levels = levels_.assign(names, m, importance)
    per_level: list[list[tuple[int, int]]] = []
    for level in range(int(levels.max()) + 1):
        eligible = np.flatnonzero(levels >= level)
        a, b = np.triu_indices(len(eligible), 1)
        a, b = eligible[a], eligible[b]
        order = np.lexsort((b, a, -score[a, b].round(12)))
        degree = np.zeros(n, dtype=np.int64)
        pairs: list[tuple[int, int]] = []
        for i, j in zip(a[order].tolist(), b[order].tolist(), strict=True):
            if degree[i] < m and degree[j] < m:
                pairs.append((i, j))
                degree[[i, j]] += 1
        per_level.append(pairs)

    bridges: list[tuple[int, int]] = []
    while len(parts := _components(n, per_level[0] + bridges)) > 1:
        main = np.array(parts[0])
        rest = np.array(sorted(i for part in parts[1:] for i in part))
        best = int(np.argmax(lexical[np.ix_(main, rest)].round(12)))
        i, j = int(main[best // len(rest)]), int(rest[best % len(rest)])
        bridges.append((min(i, j), max(i, j)))
    links = (table(n, per_level[0] + bridges), *(table(n, pairs) for pairs in per_level[1:]))
    top = np.flatnonzero(levels == levels.max())
    weight = [1.0] * n if importance is None else list(importance)
    entry = min(top.tolist(), key=lambda i: (-weight[i], names[i]))
    params = {"M": m, "M0": m, "ef_search": ARTICLE_EF, "level_mult": round(1 / math.log(m), 6), "metric": "cosine"}
    return LayeredGraph(names, rows, levels, links, entry, "article", params, frozenset(bridges))


def __getattr__(name: str) -> Any:
    # The builders that need numba or hnswlib load with their first use.
    if name == "from_hnswlib":
        from amem import hnsw

        return hnsw.from_hnswlib
    if name == "navigator":
        from amem import navigator

        return navigator.navigator
    raise AttributeError(f"module 'amem.graph' has no attribute {name!r}")
