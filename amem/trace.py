"""The one search over a `LayeredGraph`. It returns what it did: every step, every distance, and whether it hit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from amem.graph import LayeredGraph

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["enter", "hop", "descend", "expand", "reject"]


class Step(NamedTuple):
    """One thing the search did. `source` is None for the entry; `distance` is that of `target` to the query.

    enter: start at the entry point. hop: move to a nearer neighbour above level 0. descend: one level down, no
    distance computed. expand: a level-0 neighbour taken up as a candidate. reject: a neighbour compared, not taken.
    """

    kind: Kind
    level: int
    source: Any
    target: Any
    distance: float


@dataclass
class Trace:
    """A search as it ran. results: (id, distance), nearest first. evaluations: distances computed.

    stop: the rule that ended it: "hnsw" (ef candidates), "slack" (adaptive; `slack` is its width) or "article".
    skipped: (source, target, guess) of neighbours that a sketch put beyond the stop bound, so not compared.

    target/hit: the note that was looked for and whether it is among the results (None when nothing was looked for);
    reason says in words why it was or was not reached.
    """

    kind: str
    k: int
    ef: int
    stop: str
    steps: list[Step] = field(default_factory=list)
    evaluations: int = 0
    results: list[tuple[Any, float]] = field(default_factory=list)
    target: Any = None
    hit: bool | None = None
    reason: str = ""
    slack: float | None = None
    skipped: list[tuple[Any, Any, float]] = field(default_factory=list)

    @property
    def visited(self) -> list[Any]:
        """Ids whose distance was computed, in order of first sight."""
        return list(dict.fromkeys(s.target for s in self.steps))

    def path(self, to: Any = None) -> list[Step]:
        """The moves that led from the entry to `to` (default: the target if reached, else the best result)."""
        goal = to if to is not None else self.target if self.hit else self.results[0][0] if self.results else None
        came_by: dict[tuple[int, Any], Step] = {}
        for step in self.steps:
            if step.kind != "reject":
                came_by.setdefault((step.level, step.target), step)
        level = 0 if (0, goal) in came_by else min((lv for lv, t in came_by if t == goal), default=-1)
        moves: list[Step] = []
        while goal is not None and level >= 0:
            step = came_by[level, goal]
            moves.append(step)
            level += step.kind == "descend"
            goal = step.source
        return moves[::-1]

    def expect(self, target: Any) -> Trace:
        """Say which note was looked for; sets `hit` and `reason` from what the search found."""
        self.target = target
        self.hit = any(name == target for name, _ in self.results)
        seen = next((s for s in self.steps if s.target == target and s.kind != "descend"), None)
        if self.hit:
            rank = [name for name, _ in self.results].index(target) + 1
            self.reason = f"reached after {self.evaluations} distance evaluations, rank {rank}"
        elif (passed := next((guess for _, name, guess in self.skipped if name == target), None)) is not None:
            self.reason = f"passed over: its sketch put it at about {passed:.4f}, beyond the stop bound"
        elif seen is None:
            self.reason = "not reached: no walked edge led to it before the stop rule ended the search"
        else:
            self.reason = f"seen at distance {seen.distance:.4f}, but {len(self.results)} others were nearer"
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; distances rounded to 6 decimals, steps as [kind, level, source, target, distance].

        A search with the adaptive stop has its `slack` and what it `skipped` besides.
        """
        names = ("kind", "k", "ef", "stop", "evaluations", "target", "hit", "reason")
        data = {
            **{name: getattr(self, name) for name in names},
            "results": [[name, round(distance, 6)] for name, distance in self.results],
            "steps": [[*s[:4], round(s.distance, 6)] for s in self.steps],
            "path": [s.target for s in self.path()],
        }
        if self.slack is not None:
            data["slack"] = self.slack
            data["skipped"] = [[source, name, round(guess, 6)] for source, name, guess in self.skipped]
        return data

    def to_frame(self) -> pd.DataFrame:
        """The steps, one a row."""
        import pandas as pd

        return pd.DataFrame(self.steps, columns=list(Step._fields))

    def __repr__(self) -> str:
        found = "" if self.target is None else f", target {self.target} {'hit' if self.hit else 'NOT hit'}"
        moves = " -> ".join(dict.fromkeys(f"L{s.level}:{s.target}" for s in self.path()))
        return f"Trace({self.kind}, ef={self.ef}, {self.evaluations} evaluations{found}: {moves or 'empty graph'})"


class _Item(float):
    """A distance that carries its point. Only the distance is compared, as hnswlib's heaps do: ties keep heap order."""

    __slots__ = ("point",)
    point: int


def _item(distance: float, point: int) -> _Item:
    item = _Item(distance)
    item.point = point
    return item


def search(
    graph: LayeredGraph,
    query: npt.ArrayLike,
    k: int = 10,
    ef: int = 16,
    stop: Literal["hnsw", "article"] = "hnsw",
    slack: float | None = None,
    allow: Callable[[Any], bool] | None = None,
) -> Trace:
    """Greedy descent from the entry, then best-first search at level 0 (Malkov and Yashunin 2018, algorithms 2 and 5).

    query: (d,), any length but zero. k results are wanted; ef >= k candidates are kept (a smaller ef is raised to k).
    stop "hnsw": end when the nearest open candidate is farther than the ef-th best. stop "article": seed 000's rule,
    end as soon as ef points have been collected, near or not.
    slack: adaptive stop in place of ef: end when the nearest open candidate is farther than (1 + slack) times the
    k-th best. It spends more on hard queries, less on easy ones. Distances must not be negative: cosine is cut off at
    0 (rounding can give -1e-7), l2 is squared, ip has no zero point and is refused. On a graph with sketches
    (navigator) a neighbour whose sketch puts it beyond that bound is not compared; it is listed under `skipped`.
    allow: only points whose id it accepts are returned; the others are still walked through (hnswlib's `filter`).
    Returns a `Trace`; each distance computed is one enter, hop, expand or reject step (and on a decoded hnswlib index
    one more evaluation, since hnswlib computes the entry of level 0 twice).
    """
    if k < 1 or ef < 1:
        raise ValueError(f"k and ef must be at least 1, got k={k}, ef={ef}")
    if slack is not None and (stop != "hnsw" or graph.metric == "ip" or not 0 <= slack < math.inf):
        raise ValueError(f"slack must be a number >= 0, with stop 'hnsw' and metric cosine or l2, got {slack}")
    ef = max(ef, k) if slack is None else k
    trace = Trace(graph.kind, k, ef, "slack" if slack is not None else stop, slack=slack)
    if len(graph) == 0:
        trace.reason = "the graph is empty"
        return trace
    q = graph.prepare(query)
    if q.ndim != 1:
        raise ValueError(f"one query at a time, got shape {q.shape}; kernel.search_many takes several")
    sketched = graph.guesser(q) if slack is not None else None

    def note(kind: Kind, level: int, source: int | None, target: int, distance: float) -> None:
        trace.steps.append(
            Step(kind, level, None if source is None else graph.ids[source], graph.ids[target], distance)
        )

    def compare(points: npt.NDArray[Any]) -> list[float]:
        trace.evaluations += len(points)
        return graph.distances(q, points).tolist()

    def returnable(point: int) -> bool:
        return point not in graph.deleted and (allow is None or allow(graph.ids[point]))

    def bound() -> float:
        """Points farther than this are not taken up: the ef-th best, or with slack a multiple of the k-th."""
        if len(best) < ef:
            return math.inf
        return -best[0] if slack is None else (1 + slack) * max(-best[0], 0.0)

    here = graph.entry
    near = compare(np.array([here]))[0]
    note("enter", graph.max_level, None, here, near)
    for level in range(graph.max_level, 0, -1):
        improved = True
        while improved:
            improved = False
            origin = here
            around = graph.neighbours(level, origin)
            for point, distance in zip(around.tolist(), compare(around), strict=True):
                if distance < near:
                    here, near, improved = point, distance, True
                    note("hop", level, origin, point, distance)
                else:
                    note("reject", level, origin, point, distance)
        note("descend", level - 1, here, here, near)

    seen = np.zeros(len(graph), dtype=bool)
    seen[here] = True
    open_ = [_item(near, here)]
    best: list[_Item] = []  # max-heap by negated distance: the farthest of the ef best on top
    if returnable(here):
        best.append(_item(-near, here))
    if graph.kind == "hnswlib" and best:
        trace.evaluations += 1
    while open_:
        if stop == "article" and len(best) >= ef:
            break
        if stop == "hnsw" and open_[0] > bound():
            break
        here = heapq.heappop(open_).point
        around = graph.neighbours(0, here)
        around = around[~seen[around]]
        seen[around] = True
        guesses = sketched(around) if sketched is not None else [-math.inf] * len(around)
        known: Sequence[float | None] = compare(around) if sketched is None else [None] * len(around)
        for point, guess, compared in zip(around.tolist(), guesses, known, strict=True):
            limit = bound()
            if guess > limit:
                trace.skipped.append((graph.ids[here], graph.ids[point], guess))
                continue
            distance = compare(np.array([point]))[0] if compared is None else compared
            if stop == "article" or len(best) < ef or distance < limit:
                heapq.heappush(open_, _item(distance, point))
                # With slack a point beyond the k best is a way to go on, not a result.
                if returnable(point) and (len(best) < ef or stop == "article" or distance < -best[0]):
                    heapq.heappush(best, _item(-distance, point))
                    if stop == "hnsw" and len(best) > ef:
                        heapq.heappop(best)
                note("expand", 0, here, point, distance)
            else:
                note("reject", 0, here, point, distance)
    while len(best) > k and stop == "hnsw":
        heapq.heappop(best)
    ranked = sorted((-item, graph.rank[item.point], item.point) for item in best)
    trace.results = [(graph.ids[i], d) for d, _, i in ranked[:k]]
    return trace
