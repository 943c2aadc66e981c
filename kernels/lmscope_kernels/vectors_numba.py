"""Pieces of loops in vector instructions, for numba: LLVM finds none that are as quick by itself.

A compiler that sees a dot product takes the sum across a vector's lanes for each of them, and one
that sees a weighted sum of rows goes through memory for each row. Here four dot products share
their first factor, and a weighted sum of rows stays in registers until all rows are in it.

Addresses are integers, in bytes, of float32 numbers that lie one behind the other; sizes and
strides are in numbers. Nothing outside the given rows is read. Sums have a fixed order, so the
bits depend on nothing but the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "ROWS", "add_weighted_rows", "dot", "four_dots", "prefetch", "product"]

LANES = 16
_FLOAT, _INT, _INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_LANE_NUMBERS = ir.Constant(ir.VectorType(_INT, LANES), list(range(LANES)))
_FIRST_LANE = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
_ZEROS = ir.Constant(_VECTOR, None)
_FLOATS, _BYTES = _FLOAT.as_pointer(), ir.IntType(8).as_pointer()
_VECTORS = _VECTOR.as_pointer()
_FLOAT_BYTES = 4
# Rows that are multiplied at a time, and chunks of a row that are summed up at a time: enough that
# an addition need not wait for the one before it, few enough for the registers of AVX2.
ROWS = _CHUNKS = 4


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Have the cache line at this address fetched into the second-level cache, by and by."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        # To read; level 2: with level 1 what is in use would be driven out; data.
        hints = _INT32(0), _INT32(2), _INT32(1)
        builder.call(function, [builder.inttoptr(arguments[0], _BYTES), *hints])
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
        return _dots(builder, left, right, _INT(0), size, 1)[0]

    return types.float32(*[types.int64] * 3), code


@intrinsic
def add_weighted_rows(
    context: Any, weights: Any, num_rows: Any, rows: Any, stride: Any, size: Any, output: Any
) -> Any:
    """Add to the row at `output` each of some rows, `stride` apart, times its weight."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, num_rows, rows, stride, size, output = arguments
        weights = builder.inttoptr(weights, _FLOATS)

        def add(first: Any, num_chunks: int, mask: Any | None) -> None:
            starts = [builder.add(first, _INT(chunk * LANES)) for chunk in range(num_chunks)]
            outputs = [_at(builder, output, start) for start in starts]
            sums = [cgutils.alloca_once_value(builder, _ZEROS) for _ in outputs]
            with cgutils.for_range(builder, num_rows) as loop:
                weight = _on_all_lanes(builder, builder.load(builder.gep(weights, [loop.index])))
                row = builder.mul(loop.index, stride)
                for start, total in zip(starts, sums, strict=True):
                    numbers = _load(builder, _at(builder, rows, builder.add(row, start)), mask)
                    builder.store(
                        _multiply_add(builder, weight, numbers, builder.load(total)), total
                    )
            # What is there is added last, so that a sum of many rows is one of sums and loses less.
            for place, total in zip(outputs, sums, strict=True):
                before = _load(builder, place, mask)
                _store(builder, builder.fadd(before, builder.load(total)), place, mask)

        wide = _INT(_CHUNKS * LANES)
        with cgutils.for_range(builder, builder.sdiv(size, wide)) as loop:
            add(builder.mul(loop.index, wide), _CHUNKS, None)
        done = builder.mul(builder.sdiv(size, wide), wide)
        num_left = builder.sdiv(builder.sub(size, done), _INT(LANES))
        with cgutils.for_range(builder, num_left) as loop:
            add(builder.add(done, builder.mul(loop.index, _INT(LANES))), 1, None)
        _on_rest(builder, size, lambda first, mask: add(first, 1, mask))
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
        left = builder.inttoptr(left, _FLOATS)
        is_added = builder.icmp_signed("!=", is_added, _INT(0))

        def add(mask: Any | None) -> None:
            outputs = [_at(builder, output, builder.mul(stride, _INT(row))) for row in range(ROWS)]
            sums = [cgutils.alloca_once_value(builder, _ZEROS) for _ in outputs]
            with cgutils.for_range(builder, num_steps) as loop:
                start = builder.mul(loop.index, right_stride)
                numbers = _load(builder, _at(builder, right, start), mask)
                step = builder.mul(loop.index, step_stride)
                for row, total in enumerate(sums):
                    place = builder.add(step, builder.mul(row_stride, _INT(row)))
                    factor = _on_all_lanes(builder, builder.load(builder.gep(left, [place])))
                    builder.store(
                        _multiply_add(builder, factor, numbers, builder.load(total)), total
                    )
            # Last here too.
            with builder.if_then(is_added):
                for place, total in zip(outputs, sums, strict=True):
                    before = _load(builder, place, mask)
                    builder.store(builder.fadd(before, builder.load(total)), total)
            for place, total in zip(outputs, sums, strict=True):
                _store(builder, builder.load(total), place, mask)

        is_whole = builder.icmp_signed("==", num_lanes, _INT(LANES))
        with builder.if_else(is_whole, likely=True) as (whole, rest):
            with whole:
                add(None)
            with rest:
                add(_lanes_before(builder, num_lanes))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), code


def _dots(
    builder: Any, left: Any, right: Any, stride: Any, size: Any, num_rows: int
) -> Sequence[Any]:
    sums = [cgutils.alloca_once_value(builder, _ZEROS) for _ in range(num_rows)]

    def add(first: Any, mask: Any | None) -> None:
        shared = _load(builder, _at(builder, left, first), mask)
        for row, total in enumerate(sums):
            start = builder.add(first, builder.mul(stride, _INT(row)))
            numbers = _load(builder, _at(builder, right, start), mask)
            builder.store(_multiply_add(builder, shared, numbers, builder.load(total)), total)

    with cgutils.for_range(builder, builder.sdiv(size, _INT(LANES))) as loop:
        add(builder.mul(loop.index, _INT(LANES)), None)
    _on_rest(builder, size, add)
    return [_sum_of_lanes(builder, builder.load(total)) for total in sums]


def _on_rest(builder: Any, size: Any, work: Callable[[Any, Any], None]) -> None:
    """Work on the numbers behind the last whole vector of a row: where they begin, which lanes."""
    num_left = builder.srem(size, _INT(LANES))
    with builder.if_then(builder.icmp_signed(">", num_left, _INT(0)), likely=False):
        work(builder.sub(size, num_left), _lanes_before(builder, num_left))


def _lanes_before(builder: Any, end: Any) -> Any:
    return builder.icmp_signed("<", _LANE_NUMBERS, _on_all_lanes(builder, end))


def _on_all_lanes(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    vector = builder.insert_element(nothing, value, _INT32(0))
    return builder.shuffle_vector(vector, nothing, _FIRST_LANE)


def _at(builder: Any, address: Any, index: Any) -> Any:
    """A pointer to the number with this index behind an address."""
    return builder.inttoptr(builder.add(address, builder.mul(index, _INT(_FLOAT_BYTES))), _VECTORS)


def _load(builder: Any, pointer: Any, mask: Any | None) -> Any:
    """A vector; zeros, and nothing read, where the mask is not set."""
    if mask is None:
        loaded = builder.load(pointer)
        loaded.align = _FLOAT_BYTES
        return loaded
    kind = ir.FunctionType(_VECTOR, [_VECTORS, _INT32, _MASK, _VECTOR])
    function = _function(builder, kind, "llvm.masked.load.v16f32.p0")
    return builder.call(function, [pointer, _INT32(_FLOAT_BYTES), mask, _ZEROS])


def _store(builder: Any, vector: Any, pointer: Any, mask: Any | None) -> None:
    if mask is None:
        builder.store(vector, pointer).align = _FLOAT_BYTES
        return
    kind = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTORS, _INT32, _MASK])
    function = _function(builder, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [vector, pointer, _INT32(_FLOAT_BYTES), mask])


def _multiply_add(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """In one instruction where the processor has one, in two where it has none."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(_function(builder, kind, "llvm.fmuladd.v16f32"), [left, right, added])


def _sum_of_lanes(builder: Any, vector: Any) -> Any:
    """Half to half, so that the order is the same wherever this stands."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_INT32, lanes), list(numbers))
            )
            for numbers in (range(lanes), range(lanes, 2 * lanes))
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, _INT32(0))


def _function(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)
