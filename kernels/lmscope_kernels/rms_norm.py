"""Divides each row by the root of its mean square, and multiplies by a weight.

With a residual, the row is added to it first and the sum is what is normed. The sum is rounded
to the type of the residual before, so that norming it again gives the same bits.

T tokens in the batch, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

__all__ = ["rms_norm", "rms_norm_kernel", "rms_norm_reference", "rms_norm_warps"]

# A row stays in registers from its first load to its store.
_MAX_SIZE = 16384

_launches: Launches[Launch] = Launches()


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor:
    """The definition, in float64; returns [T, E] in the dtype of x.

    x           [T, E]
    weight      [E]
    residual    [T, E]  becomes x + residual in place
    """
    row = x.double()
    if residual is not None:
        residual.copy_(row + residual.double())
        row = residual.double()
    scale = torch.rsqrt(row.square().mean(dim=-1, keepdim=True) + eps)
    return (row * scale * weight.double()).to(x.dtype)


@jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]  # arguments of kernels have no Python types
    out_ptr,
    x_ptr,
    weight_ptr,
    residual_ptr,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program a row: its sum does not depend on what else is in the batch."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + row * residual_stride + columns
        residual = tl.load(residual_row, mask=is_inside, other=0.0).to(tl.float32)
        stored = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_row, stored, mask=is_inside)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=is_inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """rms_norm_reference on the device of x; allocates the result unless `out` is given.

    Raises for rows that do not begin at multiples of 16 elements, or are longer than 16,384.
    """
    key = launch_key(x, weight, residual, out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, _launch(x, weight, residual, out))
    if launch.grid is not None:
        rms_norm_kernel[launch.grid](
            out, x, weight, residual, *launch.numbers, eps, **launch.constants
        )
    return out


def _launch(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> Launch:
    """Raises as rms_norm says."""
    T, E = x.shape
    if E > _MAX_SIZE:
        raise ValueError(f'a row has {E} numbers, the limit is {_MAX_SIZE}; use backend="torch"')
    if weight.shape != (E,) or out.shape != x.shape:
        raise ValueError(
            f"weight is {tuple(weight.shape)} and out {tuple(out.shape)}, must be ({E},) and "
            f"({T}, {E}) as x is"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual is {tuple(residual.shape)}, must be ({T}, {E}) as x is")
    require_triton(x)
    check_tensors(x.device, DTYPES, x=x, weight=weight, residual=residual, out=out)
    check_strides(x=x, weight=weight, residual=residual, out=out)
    block = triton.next_power_of_2(E)
    return Launch(
        grid=(T,) if T else None,
        numbers=(x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0)),
        constants={
            "SIZE": E,
            "BLOCK": block,
            "HAS_RESIDUAL": residual is not None,
            "num_warps": rms_norm_warps(block),
            "enable_fp_fusion": FP_FUSION,
        },
    )


def rms_norm_warps(block: int) -> int:
    """Eight numbers a thread, one 16-byte load of bfloat16, as long as there are warps."""
    return min(max(block // 256, 1), 16)
