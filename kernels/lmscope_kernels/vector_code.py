"""What intrinsics in vector instructions are written with: LLVM's language, by llvmlite.

Vectors have LANES numbers in float32, which LLVM divides among the registers that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

__all__ = [
    "FLOATS",
    "INT",
    "INT32",
    "LANES",
    "VECTOR",
    "ZEROS",
    "at",
    "lanes_before",
    "load",
    "multiply_add",
    "on_all_lanes",
    "on_rest",
    "prefetch_line",
    "store",
    "sum_of_lanes",
]

LANES = 16
FLOAT, INT, INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)
LANE_NUMBERS = ir.Constant(ir.VectorType(INT, LANES), list(range(LANES)))
FIRST_LANE = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
ZEROS = ir.Constant(VECTOR, None)
FLOATS = FLOAT.as_pointer()
VECTORS = VECTOR.as_pointer()
FLOAT_BYTES = 4
_BYTES = ir.IntType(8).as_pointer()


def on_rest(builder: Any, size: Any, work: Callable[[Any, Any], None]) -> None:
    """Work on the numbers behind the last whole vector of a row: where they begin, which lanes."""
    num_left = builder.srem(size, INT(LANES))
    with builder.if_then(builder.icmp_signed(">", num_left, INT(0)), likely=False):
        work(builder.sub(size, num_left), lanes_before(builder, num_left))


def lanes_before(builder: Any, end: Any) -> Any:
    return builder.icmp_signed("<", LANE_NUMBERS, on_all_lanes(builder, end))


def on_all_lanes(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    vector = builder.insert_element(nothing, value, INT32(0))
    return builder.shuffle_vector(vector, nothing, FIRST_LANE)


def at(builder: Any, address: Any, index: Any) -> Any:
    """A pointer to the number with this index behind an address."""
    return builder.inttoptr(builder.add(address, builder.mul(index, INT(FLOAT_BYTES))), VECTORS)


def load(builder: Any, pointer: Any, mask: Any | None) -> Any:
    """A vector; zeros, and nothing read, where the mask is not set."""
    if mask is None:
        loaded = builder.load(pointer)
        loaded.align = FLOAT_BYTES
        return loaded
    kind = ir.FunctionType(VECTOR, [VECTORS, INT32, MASK, VECTOR])
    function = _function(builder, kind, "llvm.masked.load.v16f32.p0")
    return builder.call(function, [pointer, INT32(FLOAT_BYTES), mask, ZEROS])


def store(builder: Any, vector: Any, pointer: Any, mask: Any | None) -> None:
    if mask is None:
        builder.store(vector, pointer).align = FLOAT_BYTES
        return
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, VECTORS, INT32, MASK])
    function = _function(builder, kind, "llvm.masked.store.v16f32.p0")
    builder.call(function, [vector, pointer, INT32(FLOAT_BYTES), mask])


def multiply_add(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """In one instruction where the processor has one, in two where it has none."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(_function(builder, kind, "llvm.fmuladd.v16f32"), [left, right, added])


def prefetch_line(builder: Any, address: Any) -> None:
    """Have the cache line at an address fetched into the second-level cache, by and by."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, INT32, INT32, INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
    # To read; level 2: with level 1 what is in use would be driven out; data.
    hints = INT32(0), INT32(2), INT32(1)
    builder.call(function, [builder.inttoptr(address, _BYTES), *hints])


def sum_of_lanes(builder: Any, vector: Any) -> Any:
    """Half to half, so that the order is the same wherever this stands."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(INT32, lanes), list(numbers))
            )
            for numbers in (range(lanes), range(lanes, 2 * lanes))
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, INT32(0))


def _function(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)
