"""The curves: every row complete, counts exact, other indexes read right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from amem import bench, datasets, graph

NAMED = "dataset n dim system degree_cap setting recall evaluations qps build_cpu_s link_bytes".split()


@pytest.fixture(scope="module")
def data() -> datasets.Data:
    return datasets.clustered(600, dim=24, queries=50)


@pytest.fixture(scope="module")
def rows(data: datasets.Data) -> list[bench.Row]:
    return bench.recall_rows(data, repeats=2)


def test_a_row_has_the_named_columns_and_is_plain_data(rows: list[bench.Row]) -> None:
    assert all(list(row)[: len(NAMED)] == NAMED for row in rows)
    assert json.loads(json.dumps(rows)) == rows
    assert all(0 <= row["recall"] <= 1 and row["evaluations"] > 0 and row["qps"] > 0 for row in rows)
    assert all(row["qps_low"] <= row["qps"] <= row["qps_high"] for row in rows)


def test_all_systems_are_there(rows: list[bench.Row]) -> None:
    systems = {row["system"] for row in rows}
    assert {"article", "navigator", "navigator, adaptive", "navigator in hnswlib", "hnswlib M=16"} <= systems


def test_every_system_gets_to_a_good_recall(rows: list[bench.Row]) -> None:
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["system"], row["degree_cap"]
        best[key] = max(best.get(key, 0), row["recall"])
    assert all(value > 0.9 for (system, cap), value in best.items() if system != "article" and cap >= 8), best


def test_inside_hnswlib_the_same_graph_has_the_same_recall_and_counts(rows: list[bench.Row]) -> None:
    ours = {
        (r["degree_cap"], r["setting"]): (r["recall"], r["evaluations"]) for r in rows if r["system"] == "navigator"
    }
    theirs = [r for r in rows if r["system"] == "navigator in hnswlib"]
    assert theirs
    for row in theirs:
        assert ours[row["degree_cap"], row["setting"]] == (row["recall"], row["evaluations"])


def test_truth_is_exact(data: datasets.Data) -> None:
    for query, truth in zip(data.queries[:20], data.truth[:20], strict=True):
        assert set(truth.tolist()) == set(np.argsort(-(data.base @ query))[:10].tolist())


def test_between_two_points_of_a_curve_values_are_interpolated() -> None:
    point = {"dataset": "d", "system": "s", "degree_cap": 8}
    rows = [{**point, "recall": 0.8, "evaluations": 100.0}, {**point, "recall": 1.0, "evaluations": 300.0}]
    assert bench.at_recall(rows, 0.9)["d", "s", 8] == pytest.approx(200)
    assert bench.at_recall(rows, 0.5)["d", "s", 8] == 100
    assert np.isnan(bench.at_recall(rows[:1], 0.9)["d", "s", 8])


def test_an_ann_benchmarks_file_is_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "tiny-25-angular.hdf5", "w") as file:
        file["train"], file["test"] = rng.normal(size=(300, 25)), rng.normal(size=(40, 25))
    data = datasets.hdf5(tmp_path / "tiny-25-angular.hdf5")
    assert (data.name, data.base.shape, data.queries.shape) == ("tiny-25-angular", (300, 25), (40, 25))
    (tmp_path / "no.hdf5").write_bytes(b"no")
    with pytest.raises(ValueError, match="not an ann-benchmarks file"):
        datasets.hdf5(tmp_path / "no.hdf5")


def test_link_bytes_are_those_of_the_links() -> None:
    g = graph.navigator(datasets.clustered(500, dim=16).base)
    words = sum(len(indices) + int(np.sum(g.levels >= level)) + 1 for level, (_, indices) in enumerate(g.links))
    assert bench.link_bytes(g) == 4 * words


def test_figures_and_the_articles_losses(rows: list[bench.Row], data: datasets.Data) -> None:
    assert len(bench.figure(rows).data) == len({(row["system"], row["degree_cap"]) for row in rows})
    found = bench.found_rows(data.base, sizes=(50, 600))
    share = {(row["n"], row["system"]): row["found"] for row in found}
    assert share[600, "article, its stop rule"] < share[600, "article, proper stop rule"]
    assert share[600, "article, proper stop rule"] < share[600, "navigator, degree 8"] == 1.0
    assert bench.figure(found, x="n").layout.yaxis.title.text == "found by its own text"
    with pytest.raises(ValueError, match="no rows"):
        bench.figure([])


def test_an_unknown_system_is_named(data: datasets.Data) -> None:
    with pytest.raises(ValueError, match="no system 'annoy'"):
        bench.recall_rows(data, systems=["annoy"])


def test_evaluations_of_faiss_are_counted_alike(rows: list[bench.Row]) -> None:
    counts = {row["system"]: row["evaluations"] for row in rows if row["setting"] == "ef=10"}
    for other in ("faiss HNSW M=16", "usearch M=16"):
        if other not in counts:
            pytest.skip(f"{other} is not installed: pip install 'amem[bench]'")
        assert counts[other] == pytest.approx(counts["hnswlib M=16"], rel=0.4)
