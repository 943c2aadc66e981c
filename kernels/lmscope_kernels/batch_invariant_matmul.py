"""A matrix product in which a row has the same bits whatever rows stand beside it.

One program makes a tile of fixed size and goes over the inner dimension from its beginning to its
end, in steps of fixed length. Nothing is split over the inner dimension, and nothing depends on the
number of rows: rows that are missing in the last tile are zeros, and the kernel is compiled once
and not anew for one row or for multiples of sixteen. A bias is what a sum begins with.

T rows, E inner dimension, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmscope_kernels.triton_support import (
    DTYPES,
    FP_FUSION,
    INTERPRET,
    check_strides,
    check_tensors,
    dot,
    jit,
    require_triton,
    tl,
    triton,
)

__all__ = [
    "MatmulTile",
    "batch_invariant_matmul",
    "batch_invariant_matmul_kernel",
    "batch_invariant_matmul_reference",
    "matmul_tile",
]


class MatmulTile(NamedTuple):
    """num_inner: numbers of the inner dimension in one turn of the loop."""

    num_rows: int
    num_outputs: int
    num_inner: int
    num_warps: int
    num_stages: int


def matmul_tile(dtype: torch.dtype) -> MatmulTile:
    """The tile for all products of this dtype, of one row and of thousands."""
    if INTERPRET:
        # The interpreter pays for each operation and not for its size.
        return MatmulTile(64, 256, 256, num_warps=4, num_stages=2)
    # IEEE products of float32 keep whole tiles in registers.
    if dtype == torch.float32:
        return MatmulTile(16, 32, 32, num_warps=4, num_stages=2)
    return MatmulTile(64, 64, 64, num_warps=4, num_stages=3)


def batch_invariant_matmul_reference(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The definition, in float64: F.linear of [T, E], [N, E] and perhaps [N] is [T, N].

    In the dtype of the rows.
    """
    return F.linear(rows.double(), weight.double(), None if bias is None else bias.double()).to(
        rows.dtype
    )


@jit(do_not_specialize=["num_rows"])
def batch_invariant_matmul_kernel(  # type: ignore[no-untyped-def]  # kernels' have no Python types
    out_ptr,
    rows_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    num_outputs,
    rows_stride,
    weight_stride,
    out_stride,
    SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program for NUM_ROWS rows and NUM_OUTPUTS of their outputs."""
    row = (tl.program_id(0) * NUM_ROWS + tl.arange(0, NUM_ROWS)).to(tl.int64)
    output = (tl.program_id(1) * NUM_OUTPUTS + tl.arange(0, NUM_OUTPUTS)).to(tl.int64)
    inner = tl.arange(0, NUM_INNER)
    is_row, is_output = row < num_rows, output < num_outputs
    total = tl.zeros((NUM_ROWS, NUM_OUTPUTS), dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + output, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    for start in range(0, SIZE, NUM_INNER):
        place = start + inner
        is_inside = place < SIZE
        left = tl.load(
            rows_ptr + row[:, None] * rows_stride + place[None, :],
            mask=is_row[:, None] & is_inside[None, :],
            other=0.0,
        )
        right = tl.load(
            weight_ptr + output[None, :] * weight_stride + place[:, None],
            mask=is_output[None, :] & is_inside[:, None],
            other=0.0,
        )
        total += dot(left, right)
    tl.store(
        out_ptr + row[:, None] * out_stride + output[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def batch_invariant_matmul(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """batch_invariant_matmul_reference on the device of the rows.

    Allocates [T, N] unless `out` is given, in rows that begin at multiples of 16. Raises when E is
    no multiple of 16, or a row of any of them does not begin at one.
    """
    T, size = rows.shape
    num_outputs = len(weight)
    if weight.shape[1] != size:
        raise ValueError(
            f"weight is {tuple(weight.shape)}, must be (N, {size}) as rows are {tuple(rows.shape)}"
        )
    if out is None:
        # Rows of an odd vocabulary begin at multiples of 16 too.
        padded = -(-num_outputs // 16) * 16
        out = torch.empty(T, padded, dtype=rows.dtype, device=rows.device)[:, :num_outputs]
    if out.shape != (T, num_outputs):
        raise ValueError(f"out is {tuple(out.shape)}, must be ({T}, {num_outputs})")
    if bias is not None and bias.shape != (num_outputs,):
        raise ValueError(f"bias is {tuple(bias.shape)}, must be ({num_outputs},)")
    require_triton(rows)
    check_tensors(rows.device, DTYPES, rows=rows)
    check_tensors(rows.device, (rows.dtype,), weight=weight, bias=bias, out=out)
    check_strides(rows=rows, weight=weight, bias=bias, out=out)
    if T == 0 or num_outputs == 0:
        return out
    tile = matmul_tile(rows.dtype)
    batch_invariant_matmul_kernel[
        (triton.cdiv(T, tile.num_rows), triton.cdiv(num_outputs, tile.num_outputs))
    ](
        out,
        rows,
        weight,
        bias,
        T,
        num_outputs,
        rows.stride(0),
        weight.stride(0),
        out.stride(0),
        SIZE=size,
        NUM_ROWS=tile.num_rows,
        NUM_OUTPUTS=tile.num_outputs,
        NUM_INNER=tile.num_inner,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    return out
