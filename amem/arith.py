"""Distances in hnswlib's own float32 arithmetic, so that a search of ours equals `knn_query` bit for bit.

A float32 sum depends on its order. hnswlib sums in 16, 8 or 4 lanes (AVX-512, AVX, SSE; chosen at run time), adds the
lanes up one by one or by halves, and its compiler fuses some multiply-adds and not others (`space_l2.h`, `space_ip.h`
of 0.8.0, compiled with -march=native). `scheme` finds out by trial which order this build uses: every known one is
compared with distances that hnswlib itself returns, and only one that agrees on all of them is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import hnswlib
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

Floats = npt.NDArray[np.float32]
Scheme = tuple[int, int, int]
"""(mode, stop, tail): lane order of the first `stop` dimensions, then a plain sum in which whole blocks of `tail`
products are rounded before they are added and the rest is fused (0: all fused)."""

# (lanes, fused, metric); "fold" is hnswlib's AVX inner product of 4n dimensions: 8 lanes, folded to 4 for the rest.
MODES: tuple[tuple[int, bool, str], ...] = (
    *itertools.product((16, 8, 4), (True, False), ("l2",)),
    *itertools.product((16, 8, 4), (True, False), ("ip", "fold")),
)
TAILS = (8, 0, 1, 4, 16)
L2_MODES = 6
LINE = 64  # bytes
intrinsic: Callable[[Any], Any] = extending.intrinsic  # called from compiled code with one argument fewer


def _accumulate(
    builder: Any, a: Any, b: Any, span: tuple[Any, Any], acc: Any, lanes: int, fused: bool, square: bool
) -> Any:
    """IR of a loop that adds products of `lanes` neighbouring dimensions to the vector `acc`."""
    vector = ir.VectorType(ir.FloatType(), lanes)
    cell = cgutils.alloca_once_value(builder, acc)
    step = ir.Constant(span[0].type, lanes)
    with cgutils.for_range_slice(builder, span[0], span[1], step, span[0].type) as (at, _):
        x, y = (
            builder.load(builder.bitcast(builder.gep(p, [at]), vector.as_pointer()), align=4, typ=vector)
            for p in (a, b)
        )
        if square:
            x = y = builder.fsub(x, y)
        if fused:
            kind = ir.FunctionType(vector, [vector] * 3)
            fused_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}f32")
            total = builder.call(fused_add, [x, y, builder.load(cell)])
        else:
            total = builder.fadd(builder.load(cell), builder.fmul(x, y))
        builder.store(total, cell)
    return builder.load(cell)


def _half(builder: Any, acc: Any, lanes: int, upper: bool) -> Any:
    take = [i + (lanes // 2 if upper else 0) for i in range(lanes // 2)]
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes // 2), take)
    return builder.shuffle_vector(acc, ir.Constant(acc.type, ir.Undefined), mask)


def _lane(builder: Any, acc: Any, i: int) -> Any:
    return builder.extract_element(acc, ir.Constant(ir.IntType(32), i))


@intrinsic
def lanes_sum(typingctx: Any, rows: Any, i: Any, q: Any, stop: Any, mode: Any) -> Any:
    """Sum over the first `stop` dimensions of row `i` against `q`, in the lane order `mode` of MODES."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = context.make_array(signature.args[0])(context, builder, args[0])
        width = cgutils.unpack_tuple(builder, table.shape)[1]
        a = builder.gep(context.make_array(signature.args[2])(context, builder, args[2]).data, [width.type(0)])
        b = builder.gep(table.data, [builder.mul(args[1], width)])
        stop_, out = args[3], cgutils.alloca_once(builder, ir.FloatType())
        after = builder.append_basic_block("after")
        unknown = builder.append_basic_block("unknown")
        switch = builder.switch(args[4], unknown)
        for number, (lanes, fused, metric) in enumerate(MODES):
            block = builder.append_basic_block(f"mode{number}")
            switch.add_case(ir.Constant(args[4].type, number), block)
            builder.position_at_end(block)
            zero = ir.Constant(ir.VectorType(ir.FloatType(), lanes), None)
            middle = stop_
            if metric == "fold":
                middle = builder.and_(stop_, ir.Constant(stop_.type, -16))
            acc = _accumulate(builder, a, b, (stop_.type(0), middle), zero, lanes, fused, metric == "l2")
            size = lanes
            if metric == "fold" and lanes > 4:
                while size > 4:
                    acc, size = (
                        builder.fadd(_half(builder, acc, size, False), _half(builder, acc, size, True)),
                        size // 2,
                    )
            if metric == "fold":
                acc = _accumulate(builder, a, b, (middle, stop_), acc, 4, fused, False)
            if metric == "ip" and lanes == 16:  # _mm512_reduce_add_ps: by halves
                while size > 1:
                    acc, size = (
                        builder.fadd(_half(builder, acc, size, False), _half(builder, acc, size, True)),
                        size // 2,
                    )
                total = _lane(builder, acc, 0)
            else:
                total = _lane(builder, acc, 0)
                for lane in range(1, size):
                    total = builder.fadd(total, _lane(builder, acc, lane))
            builder.store(total, out)
            builder.branch(after)
        builder.position_at_end(unknown)
        builder.store(ir.Constant(ir.FloatType(), 0.0), out)
        builder.branch(after)
        builder.position_at_end(after)
        return builder.load(out)

    return types.float32(rows, types.int64, q, types.int64, types.int64), codegen


@intrinsic
def fma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32 with one rounding."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def prefetch(typingctx: Any, rows: Any, i: Any) -> Any:
    """Ask the processor for the whole row `i` of a C-ordered table before it is needed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table = context.make_array(signature.args[0])(context, builder, args[0])
        width = cgutils.unpack_tuple(builder, table.shape)[1]
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        first = builder.bitcast(builder.gep(table.data, [builder.mul(args[1], width)]), byte)
        size = builder.mul(width, table.itemsize)
        with cgutils.for_range_slice(builder, width.type(0), size, width.type(64), width.type) as (at, _):
            builder.call(ask, [builder.gep(first, [at]), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.none(rows, types.int64), codegen


@numba.njit(cache=True, inline="never")
def tail_sum(q: Floats, row: Floats, start: int, tail: int, square: bool) -> np.float32:
    """The plain loop over the dimensions from `start` on, as a compiler makes it of `L2Sqr` and `InnerProduct`."""
    total = np.float32(0)
    rounded = start + (q.size - start) // tail * tail if tail else start
    for j in range(start, q.size):
        x, y = q[j], row[j]
        if square:
            x = q[j] - row[j]
            y = x
        total = total + x * y if j < rounded else fma(x, y, total)
    return total


@numba.njit(cache=True)
def distance(q: Floats, rows: Floats, i: int, scheme: Scheme) -> np.float32:
    """Distance of `q` (d,) to row `i` of `rows` (n, d): squared Euclidean, or 1 - inner product."""
    mode, stop, tail = scheme
    square = mode < L2_MODES
    total = lanes_sum(rows, i, q, stop, mode) if stop else np.float32(0)
    if stop < q.size:
        rest = tail_sum(q, rows[i], stop, tail, square)
        total = total + rest if stop else rest
    return total if square else np.float32(1) - total


@numba.njit(cache=True)
def distances(q: Floats, rows: Floats, points: npt.NDArray[Any], scheme: Scheme) -> Floats:
    """Distances of `q` (d,) to the rows with the indices `points`, in that order."""
    out = np.empty(points.size, np.float32)
    for j in range(points.size):
        out[j] = distance(q, rows, points[j], scheme)
    return out


@numba.njit(cache=True)
def unit(q: Floats, tail: int) -> Floats:
    """`q` scaled to length one as hnswlib's `normalize_vector` does it; `tail` as in Scheme."""
    length = np.sqrt(tail_sum(q, q, 0, tail, False))
    return q * (np.float32(1) / (length + np.float32(1e-30)))


@numba.njit(cache=True)
def units(rows: Floats, tail: int) -> Floats:
    """`unit` of each row."""
    out = np.empty_like(rows)
    for i in range(rows.shape[0]):
        out[i] = unit(rows[i], tail)
    return out


def _candidates(metric: str, dim: int) -> list[Scheme]:
    # Which dimensions go through lanes: the dispatch at the end of space_l2.h and space_ip.h; 0 = no SIMD build.
    stop = dim // 16 * 16 if dim % 16 == 0 or dim > 16 else dim // 4 * 4
    if dim % 4 == 0:
        stop = dim
    whole = dim % 16 == 0 or (dim > 16 and dim % 4 != 0)
    names = ("l2",) if metric == "l2" else ("ip",) if whole else ("fold", "ip")
    modes = [i for i, (lanes, _, name) in enumerate(MODES) if name in names and (whole or lanes < 16)]
    tails = TAILS if stop < dim else (1,)
    found = [(mode, stop, tail) for mode in modes for tail in tails]
    return found + [(0 if metric == "l2" else L2_MODES, 0, tail) for tail in TAILS]


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An empty array that starts at a cache line: a row of 64 bytes or more then takes no line more than it must."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + size].view(dtype).reshape(shape)


def plain(metric: str, dim: int) -> Scheme:
    """An order of our own for compiled searches where hnswlib's is unknown: 16 lanes, then one by one."""
    return (0 if metric == "l2" else L2_MODES, dim // 16 * 16, 1)


@lru_cache(maxsize=64)
def scheme(space: str, dim: int) -> tuple[Scheme, int] | None:
    """hnswlib's order of summation here: (distance scheme, tail of the normalisation), or None when none agrees.

    Tried on 48 x 64 distances; a wrong order differs in a third of them or more.
    """
    rng = np.random.default_rng(dim)
    data = rng.normal(size=(64, dim)).astype(np.float32)
    queries = (rng.normal(size=(48, dim)) * rng.uniform(0.1, 9, size=(48, 1))).astype(np.float32)
    index = hnswlib.Index(space, dim)
    index.init_index(64, M=32, ef_construction=64, random_seed=1)
    index.add_items(data, num_threads=1)
    index.set_ef(64)
    points, truth = index.knn_query(queries, k=32, num_threads=1)
    rows = np.ascontiguousarray(index.get_items(np.arange(64)), dtype=np.float32)
    points = points.astype(np.int64)

    def agrees(order: Scheme, norm: int) -> bool:
        for q, at, expected in zip(queries, points, truth, strict=True):
            if space == "cosine":
                q = unit(q, norm)
            if not np.array_equal(distances(q, rows, at, order), expected):
                return False
        return True

    for order, norm in itertools.product(_candidates(space, dim), TAILS if space == "cosine" else (1,)):
        if agrees(order, norm):
            return order, norm
    return None
