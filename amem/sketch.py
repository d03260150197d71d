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
from llvmlite import ir
from numba import types
from numba.core import cgutils

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


@arith.intrinsic
def _signs(typingctx: Any, row: Any, start: Any) -> Any:
    """One bit for each of the 64 numbers from `start` on: whether it is above 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), 64)
        at = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        values = builder.load(builder.bitcast(at, vector.as_pointer()), align=4, typ=vector)
        above = builder.fcmp_ordered(">", values, ir.Constant(vector, None))
        return builder.bitcast(above, ir.IntType(64))

    return types.uint64(row, types.int64), codegen


@numba.njit(cache=True)
def _sketch(vectors: Floats, mean: Floats, flips: Floats, bits: Bits, lengths: Floats, scheme: arith.Scheme) -> None:
    """Sketch each row. The rotation: per round sign flips, butterflies over strides of 8 and more (they run in vector
    registers), then a transposition that makes the low strides high for the next round."""
    d, size = mean.size, flips.shape[1]
    row, spare = np.empty(size, np.float32), np.empty(size, np.float32)
    for at in range(vectors.shape[0]):
        lengths[at] = np.sqrt(arith.distance(mean, vectors, at, scheme))
        for j in range(d):
            row[j] = vectors[at, j] - mean[j]
        row[d:] = 0
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
            row, spare = spare, row
        for word in range(size // 64):
            bits[at, word] = _signs(row, 64 * word)


def make(vectors: Floats, mean: Floats | None = None) -> Sketch:
    """Sketch vectors (n, d); `mean` (d,) defaults to their own. As many bits as d, rounded up to a power of two."""
    n, d = vectors.shape
    if mean is None:
        mean = vectors.mean(axis=0, dtype=np.float64).astype(np.float32) if n else np.zeros(d, np.float32)
    size = max(64, 1 << (d - 1).bit_length())
    flips = np.random.default_rng(0).choice(np.array([-1, 1], dtype=np.float32), size=(2, size))
    bits, lengths = arith.aligned((n, size // 64), np.uint64), np.empty(n, np.float32)
    _sketch(vectors, mean, flips, bits, lengths, arith.plain("l2", d))
    return Sketch(bits, lengths, mean)


@arith.intrinsic
def _ones(typingctx: Any, word: Any) -> Any:
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@arith.intrinsic
def _differing(typingctx: Any, bits: Any, i: Any, q: Any) -> Any:
    """Number of bits in which row `i` differs from `q`, 8 words at a time."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = context.make_array(signature.args[0])(context, builder, args[0])
        width = cgutils.unpack_tuple(builder, table.shape)[1]
        own = builder.gep(table.data, [builder.mul(args[1], width)])
        asked = context.make_array(signature.args[2])(context, builder, args[2]).data
        words = ir.VectorType(ir.IntType(64), 8)
        count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(words, [words]), "llvm.ctpop.v8i64")
        kind = ir.FunctionType(ir.IntType(64), [words])
        add_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v8i64")
        cell = cgutils.alloca_once_value(builder, ir.Constant(words, None))
        with cgutils.for_range_slice(builder, width.type(0), width, width.type(8), width.type) as (at, _):
            x, y = (
                builder.load(builder.bitcast(builder.gep(p, [at]), words.as_pointer()), align=8, typ=words)
                for p in (own, asked)
            )
            builder.store(builder.add(builder.load(cell), builder.call(count, [builder.xor(x, y)])), cell)
        return builder.call(add_up, [builder.load(cell)])

    return types.uint64(bits, types.int64, q), codegen


@numba.njit(cache=True)
def guess(bits: Bits, lengths: Floats, point: int, q: Bits, length: np.float32, cosines: Floats) -> np.float32:
    """Estimated cosine distance (half the squared Euclidean one) of a sketched query to a point."""
    differing = np.uint64(0)
    if q.size % 8:
        for word in range(q.size):
            differing += _ones(bits[point, word] ^ q[word])
    else:
        differing = _differing(bits, point, q)
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
