"""The loops of half_linear_cpu, compiled by numba (the extra `cpu`).

A piece of work is a tile of outputs and up to six rows. Outputs stay in registers until all inputs
have been multiplied into them; for each input a few registers of weights are widened to float32
once and meet a number of each row. A tile is as wide as six rows of it fit into registers: 64
outputs with AVX-512, 16 with AVX2.

An output is a sum over the inputs in their order, whatever it is computed beside: a row has the
same bits alone and in any batch, with one thread and with many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, prange, types
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
    prefetch_line,
    store,
)

__all__ = ["MISSING_FEATURES", "OUTPUTS_PER_TILE", "linear_parallel", "linear_serial"]

_MOST_ROWS = 6
_FLOAT_BYTES, _HALF_BYTES = 4, 2
_HALVES = ir.VectorType(ir.HalfType(), LANES).as_pointer()


def _features() -> dict[str, bool]:
    """Of the processor that is compiled for."""
    if config.CPU_FEATURES is not None:
        return {each[1:]: each[0] == "+" for each in config.CPU_FEATURES.split(",") if each}
    try:
        return dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know them everywhere
        return {}


# What these loops are slow without, or cannot be compiled.
MISSING_FEATURES = [name for name in ("avx2", "fma", "f16c") if not _features().get(name)]
OUTPUTS_PER_TILE = 64 if _features().get("avx512f") else 16
# A narrow tile wants its next weights so seldom that a processor does not fetch them far enough
# ahead; a wide one only loses by being told to. Measured at 4 and 6 rows: 14.6 and 18.6 ms
# instead of 26.6 and 36.5 for the demo model.
_BYTES_AHEAD = 0 if OUTPUTS_PER_TILE == 64 else 8192


def _product_of(num_rows: int) -> Any:
    """An intrinsic for this many rows."""

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
        """output [rows, R] = bias [R] + rows [rows, inputs] times a tile [inputs, R].

        Addresses in bytes, strides in numbers.
        """

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, num_inputs, rows, row_stride, bias, output, output_stride = arguments
            numbers = builder.inttoptr(rows, FLOATS)
            starts = [builder.mul(row_stride, INT(row)) for row in range(num_rows)]
            lanes = range(0, OUTPUTS_PER_TILE, LANES)

            def load_weights(index: Any, lane: int) -> Any:
                place = builder.add(builder.mul(index, INT(OUTPUTS_PER_TILE)), INT(lane))
                place = builder.add(weights, builder.mul(place, INT(_HALF_BYTES)))
                halves = builder.load(builder.inttoptr(place, _HALVES))
                halves.align = _HALF_BYTES
                return builder.fpext(halves, VECTOR)

            begin = [load(builder, at(builder, bias, INT(lane)), None) for lane in lanes]
            sums = [[cgutils.alloca_once_value(builder, each) for each in begin] for _ in starts]
            with cgutils.for_range(builder, num_inputs) as loop:
                if _BYTES_AHEAD:
                    place = builder.mul(loop.index, INT(OUTPUTS_PER_TILE * _HALF_BYTES))
                    prefetch_line(
                        builder, builder.add(weights, builder.add(place, INT(_BYTES_AHEAD)))
                    )
                widened = [load_weights(loop.index, lane) for lane in lanes]
                for start, totals in zip(starts, sums, strict=True):
                    place = builder.gep(numbers, [builder.add(start, loop.index)])
                    number = on_all_lanes(builder, builder.load(place))
                    for weight, total in zip(widened, totals, strict=True):
                        added = multiply_add(builder, number, weight, builder.load(total))
                        builder.store(added, total)
            for row, totals in enumerate(sums):
                for lane, total in zip(lanes, totals, strict=True):
                    place = builder.add(builder.mul(output_stride, INT(row)), INT(lane))
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
    first, num_rows = tile * OUTPUTS_PER_TILE, min(_MOST_ROWS, M - first_row)
    weights = tiles.ctypes.data + tile * K * OUTPUTS_PER_TILE * _HALF_BYTES
    numbers = rows.ctypes.data + first_row * K * _FLOAT_BYTES
    begin = bias.ctypes.data + first * _FLOAT_BYTES
    # What hangs over the last output goes into memory of its own.
    is_whole = first + OUTPUTS_PER_TILE <= N
    hanging = np.empty((0 if is_whole else _MOST_ROWS, OUTPUTS_PER_TILE), np.float32)
    if is_whole:
        place, stride = output.ctypes.data + (first_row * N + first) * _FLOAT_BYTES, N
    else:
        place, stride = hanging.ctypes.data, OUTPUTS_PER_TILE
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
    """output [M, out] = rows [M, in] times tiles [T, in, R], which are uint16 to numba, + bias."""
    for piece in range(len(tiles) * -(-len(rows) // _MOST_ROWS)):
        _piece(piece, rows, tiles, bias, output)


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def linear_parallel(rows: Any, tiles: Any, bias: Any, output: Any) -> None:
    """The same on numba's threads, as many as numba.set_num_threads said."""
    for piece in prange(len(tiles) * -(-len(rows) // _MOST_ROWS)):
        _piece(np.int64(piece), rows, tiles, bias, output)
