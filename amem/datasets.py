"""Data sets to measure searches on: generated ones, the notes of the committed runs, files of vectors.

Queries are held out: none of them is among the points. All data is brought to unit length and its true neighbours by
cosine are computed by an exact scan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from amem.graph import Floats, unit_rows
from amem.memory import Memory

Points = npt.NDArray[np.int64]
GENERATED = (200, 2000, 20_000)


@dataclass(frozen=True)
class Data:
    """name; base (n, d) and queries (m, d), unit length float32, queries not in base; truth (m, k) nearest indices."""

    name: str
    base: Floats
    queries: Floats
    truth: Points

    def first(self, k: int) -> Data:
        """The same data with k true neighbours."""
        return replace(self, truth=self.truth[:, :k])


def arrays(name: str, base: npt.ArrayLike, queries: npt.ArrayLike, k: int = 10) -> Data:
    """Data from two arrays; the true neighbours are found by an exact scan."""
    rows, asked = unit_rows(base), unit_rows(queries)
    truth = np.empty((len(asked), min(k, len(rows))), dtype=np.int64)
    for start in range(0, len(asked), 256):
        scores = asked[start : start + 256] @ rows.T
        truth[start : start + 256] = np.argsort(-scores, axis=1, kind="stable")[:, : truth.shape[1]]
    return Data(name, rows, asked, truth)


def clustered(n: int, dim: int = 64, queries: int = 1000, k: int = 10, seed: int = 0) -> Data:
    """Generated data: Gaussian clusters of low inner dimension (8), about 100 points each; queries held out."""
    rng = np.random.default_rng(seed)
    clusters, total = max(2, n // 100), n + queries
    centres = rng.normal(size=(clusters, dim))
    axes = rng.normal(size=(clusters, 8, dim)) / np.sqrt(dim)
    own = rng.integers(clusters, size=total)
    made = np.empty((total, dim), dtype=np.float32)
    for start in range(0, total, 20_000):
        part = own[start : start + 20_000]
        inner = np.einsum("ij,ijk->ik", rng.normal(size=(len(part), 8)), axes[part])
        made[start : start + 20_000] = centres[part] + 2 * inner + 0.1 * rng.normal(size=(len(part), dim))
    return arrays(f"clustered-{n}", made[:n], made[n:], k)


def hdf5(path: str | os.PathLike[str], most: int | None = None, queries: int = 1000, k: int = 10) -> Data:
    """An ann-benchmarks file: its `train` (the first `most`) and `test` (the first `queries`) vectors."""
    if find_spec("h5py") is None:
        raise ValueError("reading HDF5 needs h5py: pip install 'amem[bench]'")
    import h5py

    try:
        with h5py.File(path) as file:
            base, asked = file["train"][:most], file["test"][:queries]
    except (OSError, KeyError) as error:
        raise ValueError(f"{path}: not an ann-benchmarks file (HDF5 with 'train' and 'test'): {error}") from error
    return arrays(Path(path).stem, base, asked, k)


def notes(queries: int = 100, k: int = 10) -> Data:
    """The notes of the two committed runs; every so many-th note is held out as a query."""
    rows = []
    for language in ("zh", "en"):
        with Memory.open(Path(__file__).parents[1] / "runs" / f"showcase_{language}") as mem:
            rows.append(mem.store.vectors([note.id for note in mem.notes()]))
    return split("notes", np.vstack(rows), queries, k)


def split(name: str, vectors: npt.ArrayLike, queries: int, k: int = 10) -> Data:
    """Data from one array (n, d): `queries` rows, evenly spread and at most a quarter, are held out."""
    rows = unit_rows(vectors)
    if len(rows) < 4:
        raise ValueError(f"{name}: {len(rows)} vectors are too few to hold queries out; give at least 4")
    asked = np.unique(np.linspace(0, len(rows) - 1, min(queries, len(rows) // 4)).astype(int))
    return arrays(name, np.delete(rows, asked, axis=0), rows[asked], k)


def sets(files: Sequence[Path], sizes: Sequence[int], queries: int = 1000, k: int = 10) -> Iterator[Data]:
    """The data of a benchmark: each file (ann-benchmarks HDF5, or .npy of (n, d)) once for each size, the most points
    taken of it; without files the notes of the committed runs, and generated data of each size."""
    for path in files:
        choices: list[int | None] = [*sizes] or [None]
        for most in choices:
            if path.suffix == ".npy":
                try:
                    rows = np.load(path, allow_pickle=False)
                except (OSError, ValueError) as error:
                    raise ValueError(f"{path}: not a .npy file of (n, d) numbers: {error}") from error
                yield split(path.stem, rows[: most + queries if most else None], queries, k)
            else:
                yield hdf5(path, most, queries, k)
    if not files:
        if not sizes:
            yield notes(k=k)
        for n in sizes or GENERATED:
            yield clustered(n, queries=queries, k=k)
