"""One-bit sketches of vectors: a guess at a distance from 64 bytes instead of 1,536, to pass over hopeless neighbours.

A vector, less the mean of all, is turned by a random rotation (rounds of sign flips and Hadamard butterflies) and only
the signs are kept. The share of differing signs between two sketches estimates their angle (Charikar 2002; the
use inside a graph search follows FINGER, Chen et al. 2023, and RaBitQ, Gao and Long 2024). With 512 bits the guess at
a cosine distance is off by about 0.05. `trace.search` uses it with the adaptive stop only: a neighbour whose guess lies
beyond the stop bound is not compared. With `ef` every neighbour is compared, as in hnswlib.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types

from amem import arith

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Sketch:
    """Sketches of n points. bits: (n, words) uint64; lengths: (n,) of the vectors less mean; mean: (d,)."""

    bits: Bits
    lengths: Floats
    mean: Floats

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + self.lengths.nbytes

    def take(self, points: npt.NDArray[np.int64]) -> Sketch:
        """The sketches of some of the points."""
        return Sketch(self.bits[points], self.lengths[points], self.mean)

    def extended(self, vectors: Floats) -> Sketch:
        """With more points (m, d) behind the others, sketched around the same mean."""
        more = make(vectors, self.mean)
        return Sketch(np.vstack([self.bits, more.bits]), np.concatenate([self.lengths, more.lengths]), self.mean)

    def queries(self, rows: Floats) -> tuple[Bits, Floats, Floats]:
        """Queries (m, d) made ready: bits (m, words), lengths (m,), and the cosine by number of differing bits."""
        asked = make(rows, self.mean)
        size = asked.bits.shape[1] * 64
        return asked.bits, asked.lengths, np.cos(np.pi * np.arange(size + 1) / size).astype(np.float32)


@numba.njit(cache=True)
def _rotate(rows: Floats, flips: Floats) -> None:
    """Turn each row in place: per round sign flips, butterflies over strides of 8 and more (they run in vector
    registers), then a transposition that makes the low strides high for the next round."""
    size = rows.shape[1]
    spare = np.empty(size, np.float32)
    for at in range(rows.shape[0]):
        row = rows[at]
        for turn in range(flips.shape[0]):
            for j in range(size):
                row[j] *= flips[turn, j]
            half = 8
            while half < size:
                for start in range(0, size, 2 * half):
                    low, high = row[start : start + half], row[start + half : start + 2 * half]
                    for j in range(half):
                        x, y = low[j], high[j]
                        low[j] = x + y
                        high[j] = x - y
                half *= 2
            for j in range(size):
                spare[(j % 8) * (size // 8) + j // 8] = row[j]
            row[:] = spare


def make(vectors: Floats, mean: Floats | None = None) -> Sketch:
    """Sketch vectors (n, d); `mean` (d,) defaults to their own. As many bits as d, rounded up to a power of two."""
    n, d = vectors.shape
    if mean is None:
        mean = vectors.mean(axis=0, dtype=np.float64).astype(np.float32) if n else np.zeros(d, np.float32)
    size = max(64, 1 << (d - 1).bit_length())
    flips = np.random.default_rng(0).choice(np.array([-1, 1], dtype=np.float32), size=(2, size))
    bits, lengths = np.empty((n, size // 64), np.uint64), np.empty(n, np.float32)
    for start in range(0, n, 4096):
        rows = np.zeros((min(4096, n - start), size), np.float32)
        rows[:, :d] = vectors[start : start + 4096] - mean
        lengths[start : start + 4096] = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        _rotate(rows, flips)
        bits[start : start + 4096] = np.packbits(rows > 0, axis=1).view(np.uint64)
    return Sketch(bits, lengths, mean)


@arith.intrinsic
def _ones(typingctx: Any, word: Any) -> Any:
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@numba.njit(cache=True)
def guess(bits: Bits, lengths: Floats, point: int, q: Bits, length: np.float32, cosines: Floats) -> np.float32:
    """Estimated cosine distance (half the squared Euclidean one) of a sketched query to a point."""
    differing = np.uint64(0)
    own = bits[point]
    for word in range(q.size):
        differing += _ones(own[word] ^ q[word])
    a, b = length, lengths[point]
    return np.float32(0.5) * (a * a + b * b) - a * b * cosines[differing]


@numba.njit(cache=True)
def guesses(
    bits: Bits, lengths: Floats, points: npt.NDArray[Any], q: Bits, length: np.float32, cosines: Floats
) -> Floats:
    """`guess` for several points."""
    out = np.empty(points.size, np.float32)
    for j in range(points.size):
        out[j] = guess(bits, lengths, points[j], q, length, cosines)
    return out
