"""Pieces of loops in vector instructions, for numba: LLVM finds none that are as quick by itself.

A compiler that sees a dot product takes the sum across a vector's lanes for each of them, and one
that sees a weighted sum of rows goes through memory for each row. Here four dot products share
their first factor, and a weighted sum of rows stays in registers until all rows are in it.

Addresses are integers, in bytes, of float32 numbers that lie one behind the other; sizes and
strides are in numbers. Nothing outside the given rows is read. Sums have a fixed order, so the
bits depend on nothing but the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lmscope_kernels.vector_code import (
    FLOATS,
    INT,
    LANES,
    ZEROS,
    at,
    lanes_before,
    load,
    multiply_add,
    on_all_lanes,
    on_rest,
    prefetch_line,
    store,
    sum_of_lanes,
)

__all__ = ["LANES", "ROWS", "add_weighted_rows", "dot", "four_dots", "prefetch", "product"]

# Rows that are multiplied at a time, and chunks of a row that are summed up at a time: enough that
# an addition need not wait for the one before it, few enough for the registers of AVX2.
ROWS = _CHUNKS = 4


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Have the cache line at this address fetched into the second-level cache, by and by."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch_line(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def four_dots(context: Any, left: Any, right: Any, stride: Any, size: Any) -> Any:
    """Dot products of the row at `left` with four rows, `stride` apart, the first at `right`.

    returns    (float32, float32, float32, float32)
    """
    signature = types.UniTuple(types.float32, ROWS)(*[types.int64] * 4)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right, stride, size = arguments
        sums = _dots(builder, left, right, stride, size, ROWS)
        return context.make_tuple(builder, signature.return_type, sums)

    return signature, code


@intrinsic
def dot(context: Any, left: Any, right: Any, size: Any) -> Any:
    """The dot product of two rows, in float32, with the bits that four_dots gives it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right, size = arguments
        return _dots(builder, left, right, INT(0), size, 1)[0]

    return types.float32(*[types.int64] * 3), code


@intrinsic
def add_weighted_rows(
    context: Any, weights: Any, num_rows: Any, rows: Any, stride: Any, size: Any, output: Any
) -> Any:
    """Add to the row at `output` each of some rows, `stride` apart, times its weight."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, num_rows, rows, stride, size, output = arguments
        weights = builder.inttoptr(weights, FLOATS)

        def add(first: Any, num_chunks: int, mask: Any | None) -> None:
            starts = [builder.add(first, INT(chunk * LANES)) for chunk in range(num_chunks)]
            outputs = [at(builder, output, start) for start in starts]
            sums = [cgutils.alloca_once_value(builder, ZEROS) for _ in outputs]
            with cgutils.for_range(builder, num_rows) as loop:
                weight = on_all_lanes(builder, builder.load(builder.gep(weights, [loop.index])))
                row = builder.mul(loop.index, stride)
                for start, total in zip(starts, sums, strict=True):
                    numbers = load(builder, at(builder, rows, builder.add(row, start)), mask)
                    builder.store(
                        multiply_add(builder, weight, numbers, builder.load(total)), total
                    )
            # What is there is added last, so that a sum of many rows is one of sums and loses less.
            for place, total in zip(outputs, sums, strict=True):
                before = load(builder, place, mask)
                store(builder, builder.fadd(before, builder.load(total)), place, mask)

        wide = INT(_CHUNKS * LANES)
        with cgutils.for_range(builder, builder.sdiv(size, wide)) as loop:
            add(builder.mul(loop.index, wide), _CHUNKS, None)
        done = builder.mul(builder.sdiv(size, wide), wide)
        num_left = builder.sdiv(builder.sub(size, done), INT(LANES))
        with cgutils.for_range(builder, num_left) as loop:
            add(builder.add(done, builder.mul(loop.index, INT(LANES))), 1, None)
        on_rest(builder, size, lambda first, mask: add(first, 1, mask))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), code


@intrinsic
def product(
    context: Any,
    left: Any,
    row_stride: Any,
    step_stride: Any,
    right: Any,
    right_stride: Any,
    num_steps: Any,
    num_lanes: Any,
    output: Any,
    output_stride: Any,
    is_added: Any,
) -> Any:
    """Four rows of a product of matrices, LANES numbers of each, summed up in registers.

    output[row, lane] = sum over step of left[row, step] * right[step, lane]

    row_stride, step_stride    of `left`, whose rows may as well be columns
    num_lanes                  of `right` and `output`; at most LANES
    is_added                   1: to what is there. 0: in its place
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (
            left,
            row_stride,
            step_stride,
            right,
            right_stride,
            num_steps,
            num_lanes,
            output,
            stride,
            is_added,
        ) = arguments
        left = builder.inttoptr(left, FLOATS)
        is_added = builder.icmp_signed("!=", is_added, INT(0))

        def add(mask: Any | None) -> None:
            outputs = [at(builder, output, builder.mul(stride, INT(row))) for row in range(ROWS)]
            sums = [cgutils.alloca_once_value(builder, ZEROS) for _ in outputs]
            with cgutils.for_range(builder, num_steps) as loop:
                start = builder.mul(loop.index, right_stride)
                numbers = load(builder, at(builder, right, start), mask)
                step = builder.mul(loop.index, step_stride)
                for row, total in enumerate(sums):
                    place = builder.add(step, builder.mul(row_stride, INT(row)))
                    factor = on_all_lanes(builder, builder.load(builder.gep(left, [place])))
                    builder.store(
                        multiply_add(builder, factor, numbers, builder.load(total)), total
                    )
            # Last here too.
            with builder.if_then(is_added):
                for place, total in zip(outputs, sums, strict=True):
                    before = load(builder, place, mask)
                    builder.store(builder.fadd(before, builder.load(total)), total)
            for place, total in zip(outputs, sums, strict=True):
                store(builder, builder.load(total), place, mask)

        is_whole = builder.icmp_signed("==", num_lanes, INT(LANES))
        with builder.if_else(is_whole, likely=True) as (whole, rest):
            with whole:
                add(None)
            with rest:
                add(lanes_before(builder, num_lanes))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), code


def _dots(
    builder: Any, left: Any, right: Any, stride: Any, size: Any, num_rows: int
) -> Sequence[Any]:
    sums = [cgutils.alloca_once_value(builder, ZEROS) for _ in range(num_rows)]

    def add(first: Any, mask: Any | None) -> None:
        shared = load(builder, at(builder, left, first), mask)
        for row, total in enumerate(sums):
            start = builder.add(first, builder.mul(stride, INT(row)))
            numbers = load(builder, at(builder, right, start), mask)
            builder.store(multiply_add(builder, shared, numbers, builder.load(total)), total)

    with cgutils.for_range(builder, builder.sdiv(size, INT(LANES))) as loop:
        add(builder.mul(loop.index, INT(LANES)), None)
    on_rest(builder, size, add)
    return [sum_of_lanes(builder, builder.load(total)) for total in sums]
