"""The navigator: what its edges promise, the adaptive stop, upkeep under change, and bad input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hnswlib
import networkx as nx
import numpy as np
import pytest

from amem import bench, datasets, graph, kernel, navigator, sketch, trace
from amem.graph import LayeredGraph


def cloud(n: int, dim: int = 32, seed: int = 0, clusters: int = 20) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(clusters, dim))[rng.integers(clusters, size=n)] + 0.7 * rng.normal(size=(n, dim))


def assert_sound(g: LayeredGraph, degree: int) -> None:
    """Degree cap at both ends, symmetric, connected, no point linked on a level where it does not stand."""
    for level, (indptr, indices) in enumerate(g.links):
        counts = np.diff(indptr)
        assert counts.max(initial=0) <= (degree if level == 0 else max(2, degree // 2))
        source = np.repeat(np.arange(len(g)), counts)
        assert set(zip(source.tolist(), indices.tolist(), strict=True)) == set(
            zip(indices.tolist(), source.tolist(), strict=True)
        )
        assert np.all(source != indices)
        assert np.all(g.levels[source] >= level) and np.all(g.levels[indices] >= level)
    assert len(g) == 0 or nx.is_connected(g.to_networkx(0))
    assert len(g) == 0 or g.levels[g.entry] == g.levels.max() == g.max_level


@pytest.mark.parametrize("degree", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 9, 65, 700])
def test_cap_holds_and_every_point_is_reachable(n: int, degree: int) -> None:
    assert_sound(graph.navigator(cloud(n), degree=degree), degree)


@pytest.mark.parametrize("copies", [2, 40, 150])
def test_duplicates_stay_reachable_and_inside_the_cap(copies: int) -> None:
    points = np.repeat(cloud(600 // copies, seed=1), copies, axis=0)
    g = graph.navigator(points, degree=4)
    assert_sound(g, 4)
    _, near, _ = kernel.search_many(g, points[::copies], k=1, ef=64)
    assert np.all(near < 1e-5)


def test_the_same_input_gives_the_same_graph() -> None:
    one, two = (graph.navigator(cloud(1500), [f"n{i}" for i in range(1500)]) for _ in range(2))
    for a, b in zip(one.links, two.links, strict=True):
        assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    assert one.entry == two.entry and np.array_equal(one.levels, two.levels)


def test_levels_are_those_of_the_ids() -> None:
    ids = [f"note {i}" for i in range(900)]
    forward = dict(zip(ids, graph.navigator(cloud(900), ids).levels.tolist(), strict=True))
    turned = graph.navigator(cloud(900)[::-1], ids[::-1])
    assert forward == dict(zip(ids[::-1], turned.levels.tolist(), strict=True))


@pytest.mark.parametrize(("n", "share"), [(200, 1.0), (2000, 0.99)])
def test_a_notes_own_text_finds_it(n: int, share: float) -> None:
    points = cloud(n, dim=64)
    g = graph.navigator(points)
    hits = [trace.search(g, point, k=16, ef=16).expect(i).hit for i, point in enumerate(points)]
    assert np.mean(hits) >= share


@pytest.mark.parametrize("setting", [{"ef": 10}, {"ef": 60}, {"slack": 0.0}, {"slack": 0.15}, {"slack": 1.0}])
def test_compiled_search_gives_the_same_results_as_the_traced_one(setting: dict[str, float]) -> None:
    for g in (graph.navigator(cloud(1200)), graph.navigator(cloud(1200), sketches=False)):
        queries = cloud(60, seed=5)
        points, near, spent = kernel.search_many(g, queries, k=10, **setting)  # type: ignore[arg-type]
        for row, query in enumerate(queries):
            t = trace.search(g, query, k=10, **setting)  # type: ignore[arg-type]
            assert [name for name, _ in t.results] == points[row].tolist()
            assert [distance for _, distance in t.results] == near[row].tolist()
            assert t.evaluations == spent[row] == sum(step.kind != "descend" for step in t.steps)


@pytest.mark.parametrize("degree", [2, 3, 8, 16])
def test_inside_hnswlib_it_finds_the_same_labels(degree: int) -> None:
    g = graph.navigator(cloud(1200), degree=degree)
    index, queries = g.to_hnswlib(), cloud(1000, seed=5)
    index.set_ef(40)
    labels, distances = index.knn_query(queries, k=10, num_threads=1)
    points, near, _ = kernel.search_many(g, queries, k=10, ef=40)
    assert np.array_equal(labels, points) and np.array_equal(distances, near)


def test_labels_in_hnswlib_are_the_ids_where_these_are_integers() -> None:
    ids = [2**63 - 1, *range(10, 300)]
    g = graph.navigator(cloud(291), ids)
    labels, _ = g.to_hnswlib().knn_query(g.vectors, k=1, num_threads=1)
    assert {2**63 - 1, 10, 299} <= set(labels.ravel().tolist()) <= set(ids)


def test_the_adaptive_stop_is_traced_and_widens_with_slack() -> None:
    g = graph.navigator(cloud(2000))
    query = cloud(1, seed=9)[0]
    traces = [trace.search(g, query, k=10, slack=slack) for slack in (0.0, 0.2, 2.0)]
    assert [t.stop for t in traces] == ["slack"] * 3 and traces[1].to_dict()["slack"] == 0.2
    assert traces[0].evaluations < traces[1].evaluations < traces[2].evaluations
    reach = 1.2 * traces[1].results[-1][1]
    walked = {step.source for step in traces[1].steps if step.kind == "expand" and step.level == 0}
    first = {s.target: s.distance for s in traces[1].steps if s.kind in ("expand", "enter", "hop")}
    open_after = [first[name] for name in first if name not in walked]
    assert traces[1].skipped and all(np.isfinite(guess) for _, _, guess in traces[1].skipped)
    assert open_after and max(open_after) > reach  # what was left open lay beyond the bound


def test_a_skipped_note_is_told_from_an_unreached_one() -> None:
    g = graph.navigator(cloud(2000))
    t = trace.search(g, cloud(1, seed=9)[0], k=5, slack=0.05)
    assert "passed over" in t.expect(t.skipped[-1][1]).reason


def test_sketches_guess_distances_without_bias() -> None:
    points = graph.unit_rows(cloud(3000, dim=100))
    kept = sketch.make(points[:2000])
    bits, lengths, cosines = kept.queries(points[2000:2100])
    errors = [
        sketch.guesses(kept.bits, kept.lengths, np.arange(2000), bits[i], lengths[i], cosines)
        - (1 - points[:2000] @ points[2000 + i])
        for i in range(100)
    ]
    assert abs(np.mean(errors)) < 0.01 and np.std(errors) < 0.15


def test_slack_beats_ef_on_evaluations_and_sketches_beat_both() -> None:
    data = datasets.clustered(4000, queries=200)
    g = graph.navigator(data.base)
    spent = {}
    for name, one in (("sketches", g), ("plain", replace(g, sketch=None))):
        rows = [(kernel.search_many(one, data.queries, 10, slack=s)) for s in np.arange(0, 0.6, 0.05)]
        good = [spent_.mean() for points, _, spent_ in rows if bench.recall_of(points, data.truth) >= 0.9]
        spent[name] = good[0]
    assert spent["sketches"] < 0.8 * spent["plain"]


def recall(g: LayeredGraph, queries: np.ndarray, ef: int) -> float:
    data = datasets.arrays("now", g.vectors, queries)
    return bench.recall_of(kernel.search_many(g, queries, 10, ef)[0], data.truth)


@pytest.mark.parametrize("degree", [8, 16])
def test_after_half_the_points_changed_it_is_as_good_as_a_fresh_build(degree: int) -> None:
    points, queries = cloud(3000, clusters=60), cloud(500, seed=3, clusters=60)
    g = graph.navigator(points[:2000], list(range(2000)), degree=degree)
    gone = np.random.default_rng(0).permutation(2000)[:1000]
    for part in range(10):
        g = navigator.delete(g, gone[part * 100 : part * 100 + 100].tolist())
        g = navigator.insert(g, points[2000 + part * 100 :][:100], range(2000 + part * 100, 2100 + part * 100))
        assert_sound(g, degree)
    fresh = graph.navigator(g.vectors, g.ids, degree=degree)
    assert np.array_equal(g.levels, fresh.levels)
    for ef in (16, 64):
        assert recall(g, queries, ef) >= recall(fresh, queries, ef) - (0.01 if ef == 64 else 0.02)


def test_insert_update_and_delete_one_by_one() -> None:
    points = cloud(400)
    g = graph.navigator(points[:5], [f"n{i}" for i in range(5)])
    for i in range(5, 300):
        g = navigator.insert(g, points[i : i + 1], [f"n{i}"])
    assert_sound(g, 8)
    assert trace.search(g, points[250], k=1, ef=64).results[0][0] == "n250"
    moved = navigator.insert(g, points[399:], ["n7"])
    assert len(moved) == 300 and trace.search(moved, points[399], k=1, ef=64).results[0][0] == "n7"
    assert np.allclose(g.vectors[7], graph.unit_rows(points[7:8])[0]), "the graph before is unchanged"
    for i in range(300):
        moved = navigator.delete(moved, [f"n{i}"])
        if i % 40 == 0 or i > 290:
            assert_sound(moved, 8)
    assert len(moved) == 0 and trace.search(moved, points[0]).results == []
    assert_sound(navigator.insert(moved, points[:3], ["a", "b", "c"]), 8)


@pytest.mark.parametrize(
    ("vectors", "ids", "said"),
    [
        (np.zeros((3, 4)), None, "vector 0 is zero"),
        (np.array([[1.0, 0], [np.nan, 1]]), None, "vector 1 is zero or not finite"),
        (np.ones((2, 4)), ["a", "a"], "distinct"),
        (np.ones((2, 4)), ["a"], "1 ids for 2 vectors"),
        (np.ones(4), None, "shape"),
    ],
)
def test_bad_input_is_told(vectors: np.ndarray, ids: list[str] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        graph.navigator(vectors, ids)


def test_bad_calls_are_told() -> None:
    g = graph.navigator(cloud(30))
    with pytest.raises(ValueError, match="at least 2"):
        graph.navigator(cloud(30), degree=1)
    with pytest.raises(ValueError, match="dimensions"):
        trace.search(g, np.ones(5))
    with pytest.raises(ValueError, match="no direction"):
        trace.search(g, np.full(32, np.nan), slack=0.1)
    with pytest.raises(ValueError, match="no direction"):
        kernel.search_many(g, np.zeros((2, 32)))
    with pytest.raises(ValueError, match="one query at a time"):
        trace.search(g, np.ones((2, 32)))
    with pytest.raises(ValueError, match="not in the graph"):
        navigator.delete(g, ["nobody"])
    with pytest.raises(ValueError, match="dimensions"):
        navigator.insert(g, np.ones((1, 5)), ["new"])
    with pytest.raises(ValueError, match="only a navigator"):
        navigator.delete(graph.article(cloud(30), [str(i) for i in range(30)]), ["1"])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_k_above_n_and_ef_below_k(n: int) -> None:
    g = graph.navigator(cloud(n))
    for setting in ({"ef": 1}, {"slack": 0.1}):
        assert len(trace.search(g, cloud(1)[0], k=20, **setting).results) == n  # type: ignore[arg-type]
        points, _, _ = kernel.search_many(g, cloud(3, seed=2), k=20, **setting)  # type: ignore[arg-type]
        assert np.all(np.sort(points[:, :n], axis=1) == np.arange(n)) and np.all(points[:, n:] == -1)


def test_two_threads() -> None:
    g, queries = graph.navigator(cloud(1000)), cloud(200, seed=2)
    alone = kernel.search_many(g, queries, slack=0.1)[0]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: kernel.search_many(g, queries, slack=0.1)[0], range(4)))
    assert all(np.array_equal(alone, one) for one in both)


@pytest.mark.slow
def test_a_hundred_thousand_points_build_no_slower_than_hnswlib() -> None:
    import time

    data = datasets.clustered(100_000, dim=128, queries=500)
    graph.navigator(data.base[:200])
    with bench.one_thread():
        start = time.process_time()
        g = graph.navigator(data.base)
        ours = time.process_time() - start
    start = time.process_time()
    index = hnswlib.Index("cosine", 128)
    index.init_index(100_000, M=16, ef_construction=200, random_seed=100)
    index.add_items(data.base, num_threads=1)
    theirs = time.process_time() - start
    assert_sound(g, 8)
    assert ours <= theirs, f"{ours:.1f} s against {theirs:.1f} s"
