"""The loops of half_linear_cpu, compiled by numba (the extra `cpu`).

A piece of work is a tile of 64 outputs and up to six rows. Outputs stay in registers until all
inputs have been multiplied into them; for each input a few registers of weights are widened to
float32 once and meet a number of each row. With 32 registers of AVX-512 that is a tile in one go,
six rows by four vectors; with 16 of half the size it is a quarter of a tile at a time.

An output is a sum over the inputs in their order, whatever it is computed beside: a row has the
same bits alone and in any batch, with one thread and with many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from lmscope_kernels.decode_attention_numba import EXACT_ENOUGH
from lmscope_kernels.numba_support import of_these_sources
from lmscope_kernels.vector_code import (
    FLOATS,
    INT,
    LANES,
    VECTOR,
    at,
    load,
    multiply_add,
    on_all_lanes,
    store,
)

__all__ = ["MISSING_FEATURES", "linear_parallel", "linear_serial"]

_TILE = 64
_MOST_ROWS = 6
_FLOAT_BYTES, _HALF_BYTES = 4, 2
_NUM_VECTORS = _TILE // LANES
_HALVES = ir.VectorType(ir.HalfType(), LANES).as_pointer()


def _host_features() -> dict[str, bool]:
    try:
        return dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know them everywhere
        return {}


_FEATURES = _host_features()
# Of a processor of x86, what these loops are slow without, or cannot be compiled.
MISSING_FEATURES = [name for name in ("avx2", "fma", "f16c") if not _FEATURES.get(name)]
# Registers, and how many a vector of LANES takes.
_NUM_REGISTERS, _REGISTERS = (32, 1) if _FEATURES.get("avx512f") else (16, 2)


def _product_of(num_rows: int) -> Any:
    """An intrinsic for this many rows."""
    wide = max(
        vectors
        for vectors in (1, 2, 4)
        if vectors == 1 or _REGISTERS * vectors * (num_rows + 1) + _REGISTERS <= _NUM_REGISTERS
    )

    @intrinsic
    def half_product(
        context: Any,
        weights: Any,
        num_inputs: Any,
        rows: Any,
        row_stride: Any,
        bias: Any,
        output: Any,
        output_stride: Any,
    ) -> Any:
        """output [rows, 64] = bias [64] + rows [rows, inputs] times weights [inputs, 64].

        Addresses in bytes, strides in numbers.
        """

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, num_inputs, rows, row_stride, bias, output, output_stride = arguments
            numbers = builder.inttoptr(rows, FLOATS)
            starts = [builder.mul(row_stride, INT(row)) for row in range(num_rows)]

            def load_weights(index: Any, vector: int) -> Any:
                place = builder.add(builder.mul(index, INT(_TILE)), INT(vector * LANES))
                place = builder.add(weights, builder.mul(place, INT(_HALF_BYTES)))
                halves = builder.load(builder.inttoptr(place, _HALVES))
                halves.align = _HALF_BYTES
                return builder.fpext(halves, VECTOR)

            for first in range(0, _NUM_VECTORS, wide):
                vectors = range(first, first + wide)
                begin = [
                    load(builder, at(builder, bias, INT(vector * LANES)), None)
                    for vector in vectors
                ]
                sums = [
                    [cgutils.alloca_once_value(builder, each) for each in begin] for _ in starts
                ]
                with cgutils.for_range(builder, num_inputs) as loop:
                    widened = [load_weights(loop.index, vector) for vector in vectors]
                    for start, totals in zip(starts, sums, strict=True):
                        place = builder.gep(numbers, [builder.add(start, loop.index)])
                        number = on_all_lanes(builder, builder.load(place))
                        for weight, total in zip(widened, totals, strict=True):
                            added = multiply_add(builder, number, weight, builder.load(total))
                            builder.store(added, total)
                for row, totals in enumerate(sums):
                    for vector, total in zip(vectors, totals, strict=True):
                        place = builder.add(
                            builder.mul(output_stride, INT(row)), INT(vector * LANES)
                        )
                        store(builder, builder.load(total), at(builder, output, place), None)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return half_product


_one_row, _two_rows, _three_rows = _product_of(1), _product_of(2), _product_of(3)
_four_rows, _five_rows, _six_rows = _product_of(4), _product_of(5), _product_of(6)


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _piece(piece: Any, rows: Any, tiles: Any, bias: Any, output: Any) -> None:
    """A tile's outputs for up to six rows; pieces with one tile follow one another."""
    M, N = output.shape
    K = tiles.shape[1]
    num_blocks = -(-M // _MOST_ROWS)
    tile, first_row = piece // num_blocks, piece % num_blocks * _MOST_ROWS
    first, num_rows = tile * _TILE, min(_MOST_ROWS, M - first_row)
    weights = tiles.ctypes.data + tile * K * _TILE * _HALF_BYTES
    numbers = rows.ctypes.data + first_row * K * _FLOAT_BYTES
    begin = bias.ctypes.data + first * _FLOAT_BYTES
    # What hangs over the last output goes into memory of its own.
    is_whole = first + _TILE <= N
    hanging = np.empty((0 if is_whole else _MOST_ROWS, _TILE), np.float32)
    if is_whole:
        place, stride = output.ctypes.data + (first_row * N + first) * _FLOAT_BYTES, N
    else:
        place, stride = hanging.ctypes.data, _TILE
    if num_rows == 6:
        _six_rows(weights, K, numbers, K, begin, place, stride)
    elif num_rows == 5:
        _five_rows(weights, K, numbers, K, begin, place, stride)
    elif num_rows == 4:
        _four_rows(weights, K, numbers, K, begin, place, stride)
    elif num_rows == 3:
        _three_rows(weights, K, numbers, K, begin, place, stride)
    elif num_rows == 2:
        _two_rows(weights, K, numbers, K, begin, place, stride)
    else:
        _one_row(weights, K, numbers, K, begin, place, stride)
    if not is_whole:
        # Not as slices: the words of their errors would be compiled too, which takes seconds.
        for row in range(num_rows):
            for n in range(N - first):
                output[first_row + row, first + n] = hanging[row, n]


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def linear_serial(rows: Any, tiles: Any, bias: Any, output: Any) -> None:
    """output [M, out] = rows [M, in] times tiles [T, in, 64], which are uint16 to numba, + bias."""
    for piece in range(len(tiles) * -(-len(rows) // _MOST_ROWS)):
        _piece(piece, rows, tiles, bias, output)


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def linear_parallel(rows: Any, tiles: Any, bias: Any, output: Any) -> None:
    """The same on numba's threads, as many as numba.set_num_threads said."""
    for piece in prange(len(tiles) * -(-len(rows) // _MOST_ROWS)):
        _piece(np.int64(piece), rows, tiles, bias, output)
