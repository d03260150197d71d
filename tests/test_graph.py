"""Levels, the article's graph, and the traced search."""

from __future__ import annotations

import hashlib
import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem import graph, levels, trace


def points(n: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim))


def names(n: int) -> list[str]:
    return [f"n{i}" for i in range(n)]


def test_level_of_a_note_is_the_run_of_sha1_digests_below_a_quarter() -> None:
    ids = names(400)
    found = levels.assign(ids, 4)
    for name, level in zip(ids, found.tolist(), strict=True):
        units = [int(hashlib.sha1(f"{name}:{i}".encode()).hexdigest(), 16) / 2**160 for i in range(8)]
        run = next(i for i, unit in enumerate(units) if unit >= 0.25)
        assert level == min(run, levels.top_level(400, 4)) or (level > run and np.sum(found == level) == 1)
    shares = [np.mean(found >= level) for level in (1, 2)]
    assert 0.18 < shares[0] < 0.32 and 0.03 < shares[1] < 0.10


def test_levels_do_not_depend_on_the_other_notes_order() -> None:
    ids = names(100)
    forward = dict(zip(ids, levels.assign(ids, 4).tolist(), strict=True))
    backward = dict(zip(ids[::-1], levels.assign(ids[::-1], 4).tolist(), strict=True))
    assert forward == backward


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17, 64, 65, 300])
def test_no_level_is_empty_and_the_most_important_note_fills_a_gap(n: int) -> None:
    importance = [0.1] * n
    importance[n // 2] = 0.9
    found = levels.assign(names(n), 4, importance)
    assert set(found.tolist()) == set(range(levels.top_level(n, 4) + 1)) or n < 4
    units = [[levels.stable_unit(f"n{i}:{level}") for level in range(9)] for i in range(n)]
    bare = [next(level for level, unit in enumerate(row) if unit >= 0.25) for row in units]
    if max(bare) < levels.top_level(n, 4):
        assert found[n // 2] == levels.top_level(n, 4)


@pytest.mark.parametrize("n", [1, 2, 3, 30, 200])
def test_article_graph_keeps_its_degree_cap_but_for_bridges_and_is_connected(n: int) -> None:
    g = graph.article(points(n), names(n))
    for level in range(g.max_level + 1):
        degree = dict.fromkeys(range(n), 0)
        for i, j in g.edges(level):
            assert min(g.levels[i], g.levels[j]) >= level, "a point is linked on a level it does not stand on"
            if level or (i, j) not in g.bridges:
                degree[i] += 1
                degree[j] += 1
        assert max(degree.values()) <= graph.ARTICLE_M
    assert nx.is_connected(g.to_networkx())
    assert g.levels[g.entry] == g.levels.max()


def test_article_graph_hands_out_the_best_pairs_first() -> None:
    g = graph.article(points(40), names(40))
    cosine = g.vectors.astype(float) @ g.vectors.T.astype(float)
    a, b = np.triu_indices(40, 1)
    best = int(np.argmax(cosine[a, b]))
    assert (int(a[best]), int(b[best])) in set(g.edges(0))


def test_bridges_join_clusters_that_the_cap_left_apart() -> None:
    far = np.vstack([np.eye(8)[c] + 0.01 * points(5, 8, seed=c) for c in range(4)])
    g = graph.article(far, names(20))
    assert len(g.bridges) == 3
    assert nx.is_connected(g.to_networkx())


def test_words_in_common_move_edges() -> None:
    vectors = points(30)
    alone = [frozenset({f"only{i}"}) for i in range(30)]
    plain = set(graph.article(vectors, names(30), alone).edges(0))
    far = next((i, j) for i, j in itertools.combinations(range(30), 2) if (i, j) not in plain)
    shared = [frozenset({"same", "words"}) if i in far else terms for i, terms in enumerate(alone)]
    assert far in set(graph.article(vectors, names(30), shared).edges(0))


def test_same_notes_give_the_same_graph() -> None:
    one, two = (graph.article(points(120), names(120)) for _ in range(2))
    assert all(
        np.array_equal(a, b) for la, lb in zip(one.links, two.links, strict=True) for a, b in zip(la, lb, strict=True)
    )


@pytest.mark.parametrize(
    ("vectors", "ids", "said"),
    [
        (np.zeros((3, 4)), names(3), "vector 0 is zero"),
        (np.array([[1.0, 0], [np.nan, 1]]), names(2), "vector 1 is zero or not finite"),
        (np.ones((2, 4)), ["a", "a"], "distinct"),
        (np.ones((2, 4)), names(3), "3 ids for 2 vectors"),
        (np.ones(4), names(4), "shape"),
    ],
)
def test_bad_vectors_are_told_by_place(vectors: np.ndarray, ids: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        graph.article(vectors, ids)


def test_every_distance_is_one_step_and_no_step_is_invented() -> None:
    g = graph.article(points(150), names(150))
    for i in range(0, 150, 7):
        t = trace.search(g, g.vectors[i], k=5)
        assert t.evaluations == sum(step.kind != "descend" for step in t.steps)
        linked = [{frozenset((g.ids[a], g.ids[b])) for a, b in g.edges(lv)} for lv in range(g.max_level + 1)]
        for step in t.steps:
            if step.kind in ("hop", "expand", "reject"):
                assert frozenset((step.source, step.target)) in linked[step.level]
            if step.kind != "descend":
                truth = 1 - float(g.vectors[g.index_of[step.target]].astype(float) @ g.vectors[i].astype(float))
                assert step.distance == pytest.approx(truth, abs=1e-6)


def test_path_is_a_chain_of_walked_moves_from_the_entry_to_the_goal() -> None:
    g = graph.article(points(200), names(200))
    reached = 0
    for i in range(200):
        t = trace.search(g, g.vectors[i], k=16).expect(g.ids[i])
        if not t.hit:
            continue
        reached += 1
        path = t.path()
        assert path[0].kind == "enter" and path[0].target == g.ids[g.entry]
        assert path[-1].target == g.ids[i] and path[-1].level == 0
        for before, after in itertools.pairwise(path):
            assert after.source == before.target
            assert after.level in (before.level, before.level - 1)
        assert all(step in t.steps for step in path)
    assert reached > 100


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 60), k=st.integers(1, 70), seed=st.integers(0, 10**6))
def test_with_ef_as_large_as_the_graph_search_is_exact(n: int, k: int, seed: int) -> None:
    g = graph.article(points(n, 8, seed), names(n))
    query = points(1, 8, seed + 1)[0]
    t = trace.search(g, query, k=k, ef=n)
    unit = query / np.linalg.norm(query)
    truth = sorted((1 - float(v @ unit), i) for i, v in enumerate(g.vectors.astype(float)))
    assert [name for name, _ in t.results] == [g.ids[i] for _, i in truth[:k]]


def test_a_search_that_misses_says_so() -> None:
    g = graph.article(points(400), names(400))
    missed = [t for i in range(400) if not (t := trace.search(g, g.vectors[i], k=1, ef=2).expect(g.ids[i])).hit]
    assert missed, "with two candidates among 400 points some note must be missed"
    for t in missed:
        assert t.target not in [name for name, _ in t.results]
        assert "not reached" in t.reason or "others were nearer" in t.reason


def test_the_articles_stop_rule_finds_less_than_the_proper_one() -> None:
    g = graph.article(points(300), names(300))
    hits = {
        rule: sum(bool(trace.search(g, g.vectors[i], k=1, ef=16, stop=rule).expect(g.ids[i]).hit) for i in range(300))
        for rule in ("article", "hnsw")
    }
    assert hits["article"] < hits["hnsw"]


def test_empty_graph_and_bad_queries() -> None:
    empty = graph.article(np.zeros((0, 4)), [])
    assert trace.search(empty, np.ones(4)).results == []
    g = graph.article(points(5, 4), names(5))
    with pytest.raises(ValueError, match="no direction"):
        trace.search(g, np.zeros(4))
    with pytest.raises(ValueError, match="dimensions"):
        trace.search(g, np.ones(5))
    with pytest.raises(ValueError, match="at least 1"):
        trace.search(g, np.ones(4), k=0)


def test_a_trace_reads_well_and_becomes_plain_data() -> None:
    g = graph.article(points(60), names(60))
    t = trace.search(g, g.vectors[7], k=3).expect("n7")
    assert "n7" in repr(t) and str(t.evaluations) in repr(t)
    data = t.to_dict()
    assert data["path"][-1] == "n7" and len(data["steps"]) == len(t.steps)
    assert list(t.to_frame().columns) == ["kind", "level", "source", "target", "distance"]
