"""A live or saved hnswlib index as a `LayeredGraph`: searches equal `knn_query` bit for bit, both ways."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hnswlib
import numpy as np
import pytest

from amem import arith, graph, hnsw, kernel, trace

N = 2000
QUERIES = 1000


def cloud(n: int, dim: int, seed: int = 0, ties: bool = False, doubles: float = 0.0) -> np.ndarray:
    """Gaussian points; with `ties` on an integer grid, with a share of exact duplicates."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(n, dim)).astype(np.float32)
    if ties:
        points = np.round(points)
        points[~points.any(axis=1)] = 1
    points[rng.choice(n, int(n * doubles), replace=False)] = points[rng.choice(n, int(n * doubles))]
    return points


def build(space: str, points: np.ndarray, m: int = 8, labels: np.ndarray | None = None, **kw: int) -> hnswlib.Index:
    index = hnswlib.Index(space, points.shape[1])
    capacity = kw.get("capacity", len(points))
    index.init_index(capacity, M=m, ef_construction=60, random_seed=7, allow_replace_deleted=True)
    index.add_items(points, np.arange(len(points)) if labels is None else labels, num_threads=kw.get("threads", 1))
    return index


def plain(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    return build(space, cloud(N, 32)), cloud(QUERIES, 32, 1)


def ties_and_doubles(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    return build(space, cloud(N, 16, ties=True, doubles=0.5)), cloud(QUERIES, 16, 1, ties=True)


def odd_dimension(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    return build(space, cloud(N, 30)), cloud(QUERIES, 30, 1)


def four_dimensions_at_a_time(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    return build(space, cloud(N, 20)), cloud(QUERIES, 20, 1)


def seven_dimensions(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    return build(space, cloud(N, 7)), cloud(QUERIES, 7, 1)


def deletions(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    index = build(space, cloud(N, 32))
    for label in range(0, N, 3):
        index.mark_deleted(label)
    return index, cloud(QUERIES, 32, 1)


def replaced(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    index, queries = deletions(space)
    index.add_items(cloud(400, 32, 5), np.arange(10**6, 10**6 + 400), num_threads=1, replace_deleted=True)
    return index, queries


def any_labels_partly_filled_two_threads(space: str) -> tuple[hnswlib.Index, np.ndarray]:
    labels = np.random.default_rng(2).choice(2**62, N, replace=False)
    labels[:3] = (2**63 - 1, 2**53 + 1, 0)
    return build(space, cloud(N, 32), labels=labels, capacity=3 * N, threads=2), cloud(QUERIES, 32, 1)


CASES = (
    plain,
    ties_and_doubles,
    odd_dimension,
    four_dimensions_at_a_time,
    seven_dimensions,
    deletions,
    replaced,
    any_labels_partly_filled_two_threads,
)


@pytest.mark.parametrize(("case", "space"), list(itertools.product(CASES, hnsw.SPACES)))
def test_search_of_a_decoded_index_equals_knn_query_bit_for_bit(case, space: str) -> None:  # type: ignore[no-untyped-def]
    index, queries = case(space)
    g = graph.from_hnswlib(index)
    ids = np.array(g.ids, dtype=np.uint64)
    for k, ef in ((10, 30), (1, 1), (40, 10)):
        index.set_ef(ef)
        labels, distances = index.knn_query(queries, k=k, num_threads=1)
        found, near, spent = kernel.search_many(g, queries, k, ef)
        assert np.array_equal(ids[found], labels)
        assert np.array_equal(near, distances)
        for row in range(0, QUERIES, 1 if (k, ef) == (10, 30) else 20):
            t = trace.search(g, queries[row], k=k, ef=ef)
            assert [name for name, _ in t.results] == labels[row].tolist()
            assert [distance for _, distance in t.results] == distances[row].tolist()
            assert t.evaluations == spent[row]


@pytest.mark.parametrize("space", hnsw.SPACES)
def test_k_near_n_and_a_filter(space: str) -> None:
    index, queries = build(space, cloud(300, 16)), cloud(50, 16, 1)
    g = graph.from_hnswlib(index)
    index.set_ef(300)
    labels, distances = index.knn_query(queries, k=290, num_threads=1)
    odd, odd_distances = index.knn_query(queries, k=10, num_threads=1, filter=lambda label: label % 2 == 1)
    for row, query in enumerate(queries):
        assert trace.search(g, query, k=290, ef=300).results == list(
            zip(labels[row].tolist(), distances[row].tolist(), strict=True)
        )
        t = trace.search(g, query, k=10, ef=300, allow=lambda label: label % 2 == 1)
        assert t.results == list(zip(odd[row].tolist(), odd_distances[row].tolist(), strict=True))


def test_evaluations_are_those_that_hnswlib_makes() -> None:
    """The entry, each neighbour above, the entry of level 0 once more, each point first seen at level 0."""
    g = graph.from_hnswlib(build("l2", cloud(N, 32)))
    for query in cloud(100, 32, 1):
        t = trace.search(g, query, k=5, ef=20)
        assert t.evaluations == sum(step.kind != "descend" for step in t.steps) + 1


@pytest.mark.parametrize("space", hnsw.SPACES)
@pytest.mark.parametrize("dim", [16, 30])
def test_where_the_order_of_summation_is_unknown_hnswlib_itself_computes(
    space: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, queries = build(space, cloud(400, dim)), cloud(40, dim, 1)
    monkeypatch.setattr(arith, "scheme", lambda space, dim: None)
    g = graph.from_hnswlib(index)
    index.set_ef(20)
    labels, distances = index.knn_query(queries, k=5, num_threads=1)
    for row, query in enumerate(queries):
        t = trace.search(g, query, k=5, ef=20)
        assert t.results == list(zip(labels[row].tolist(), distances[row].tolist(), strict=True))


@pytest.mark.parametrize("case", [plain, deletions, any_labels_partly_filled_two_threads])
def test_a_saved_index_decodes_like_the_live_one(case, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    index, _ = case("cosine")
    index.save_index(str(tmp_path / "index.bin"))
    live, saved = graph.from_hnswlib(index), graph.from_hnswlib(tmp_path / "index.bin", space="cosine", dim=32)
    assert (live.ids, live.entry, live.deleted) == (saved.ids, saved.entry, saved.deleted)
    assert np.array_equal(live.vectors, saved.vectors) and np.array_equal(live.levels, saved.levels)
    for one, two in zip(live.links, saved.links, strict=True):
        assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])


def test_a_corrupt_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "index.bin"
    build("l2", cloud(200, 16), m=4).save_index(str(path))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 7, 50, 100, 5000, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"index\.bin"):
            graph.from_hnswlib(path, space="l2", dim=16)
    with pytest.raises(ValueError, match="no such file"):
        graph.from_hnswlib(tmp_path / "none", space="l2", dim=16)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="16 dimensions, not 17"):
        graph.from_hnswlib(path, space="l2", dim=17)
    with pytest.raises(ValueError, match="say space="):
        graph.from_hnswlib(path)
    refused = 0
    for _ in range(300):  # any byte changed: an error or a graph that can be searched, never a crash
        broken = bytearray(whole)
        for at in rng.integers(0, len(whole) if rng.random() < 0.5 else 100, size=3):
            broken[at] = rng.integers(256)
        path.write_bytes(bytes(broken))
        try:
            trace.search(graph.from_hnswlib(path, space="l2", dim=16), np.ones(16), k=3)
        except ValueError as error:
            assert "index.bin" in str(error)
            refused += 1
    assert refused > 100


def test_empty_single_and_unused_indexes() -> None:
    unused = hnswlib.Index("l2", 8)
    assert len(graph.from_hnswlib(unused)) == 0
    unused.init_index(10)
    g = graph.from_hnswlib(unused)
    assert len(g) == 0 and trace.search(g, np.ones(8)).results == []
    unused.add_items(np.ones((1, 8)), [5])
    assert trace.search(graph.from_hnswlib(unused), np.ones(8), k=3).results == [(5, 0.0)]


@pytest.mark.parametrize("space", hnsw.SPACES)
def test_there_and_back_again_is_the_same_index(space: str) -> None:
    for case in (plain, deletions):
        index, queries = case(space)
        back = graph.from_hnswlib(index).to_hnswlib()
        for one in (index, back):
            one.set_ef(40)
        first, second = (one.knn_query(queries, k=10, num_threads=1) for one in (index, back))
        assert np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])


@pytest.mark.parametrize("m", [2, 4, 9])
def test_article_graph_runs_inside_hnswlib(m: int) -> None:
    points = cloud(500, 24)
    g = graph.article(points, [f"n{i}" for i in range(500)], m=m)
    index = g.to_hnswlib()
    index.set_ef(24)
    queries = cloud(300, 24, 1)
    labels, _ = index.knn_query(queries, k=5, num_threads=1)
    for row, query in enumerate(queries):
        assert [name for name, _ in trace.search(g, query, k=5, ef=24).results] == [g.ids[i] for i in labels[row]]


def test_two_threads_search_one_graph() -> None:
    index, queries = plain("cosine")
    g = graph.from_hnswlib(index)
    alone = [trace.search(g, query).results for query in queries[:200]]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda query: trace.search(g, query).results, queries[:200])) == alone


def test_slack_is_refused_where_distances_can_be_negative() -> None:
    g = graph.from_hnswlib(build("ip", cloud(50, 8)))
    with pytest.raises(ValueError, match="slack"):
        trace.search(g, np.ones(8), slack=0.1)
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="slack"):
            trace.search(graph.from_hnswlib(build("l2", cloud(50, 8))), np.ones(8), slack=bad)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "limit"), [(100_000, 1.0), (1_000_000, 10.0)])
def test_decoding_takes_less_than_a_second_per_hundred_thousand_points(n: int, limit: float) -> None:
    index = hnswlib.Index("l2", 16)
    index.init_index(n, M=16, ef_construction=20, random_seed=1)
    index.add_items(cloud(n, 16))
    times = []
    for _ in range(3):
        start = time.process_time()
        g = graph.from_hnswlib(index)
        times.append(time.process_time() - start)
    assert len(g) == n and sorted(times)[1] < limit
