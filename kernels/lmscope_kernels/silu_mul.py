"""The gate of an MLP: silu of the first half of each row, times the second half.

T tokens in the batch, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lmscope_kernels.launches import Launch, Launches, launch_key
from lmscope_kernels.triton_support import (
    DTYPES,
    FP_FUSION,
    check_strides,
    check_tensors,
    jit,
    require_triton,
    tl,
    triton,
)

__all__ = ["BLOCK", "NUM_WARPS", "silu_mul", "silu_mul_kernel", "silu_mul_reference"]

# Columns of one program: two 16-byte loads of bfloat16 a thread.
BLOCK = 2048
NUM_WARPS = 8

_launches: Launches[Launch] = Launches()


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The definition, in float64: [T, 2I] becomes [T, I], in the same dtype."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@jit
def silu_mul_kernel(  # type: ignore[no-untyped-def]  # arguments of kernels have no Python types
    out_ptr, gate_up_ptr, gate_up_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    gate_row = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_row, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_row + SIZE, mask=is_inside, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=is_inside)


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu_mul_reference on the device of gate_up; allocates [T, I] unless `out` is given.

    Raises when I is no multiple of 16, or a row does not begin at one.
    """
    key = launch_key(gate_up, out)
    T, columns = gate_up.shape
    if out is None:
        out = torch.empty(T, columns // 2, dtype=gate_up.dtype, device=gate_up.device)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, _launch(gate_up, out))
    if launch.grid is not None:
        silu_mul_kernel[launch.grid](out, gate_up, *launch.numbers, **launch.constants)
    return out


def _launch(gate_up: Tensor, out: Tensor) -> Launch:
    """Raises as silu_mul says."""
    T, columns = gate_up.shape
    size = columns // 2
    if columns % 32:
        raise ValueError(
            f'rows have {columns} numbers, must have a multiple of 32; use backend="torch"'
        )
    if out.shape != (T, size):
        raise ValueError(f"out is {tuple(out.shape)}, must be ({T}, {size}), half of gate_up")
    require_triton(gate_up)
    check_tensors(gate_up.device, DTYPES, gate_up=gate_up, out=out)
    check_strides(gate_up=gate_up, out=out)
    return Launch(
        grid=(T, triton.cdiv(size, BLOCK)) if T and size else None,
        numbers=(gate_up.stride(0), out.stride(0)),
        constants={
            "SIZE": size,
            "BLOCK": BLOCK,
            "num_warps": NUM_WARPS,
            "enable_fp_fusion": FP_FUSION,
        },
    )
