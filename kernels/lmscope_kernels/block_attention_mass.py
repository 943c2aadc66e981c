"""The share of attention that each block receives, from what paged_decode says of it.

    out[r, b] += mean over the heads of exp2(block_lse[r, h, b] - lse[r, h])

One call adds one layer. In each head the shares of the blocks of a request sum to 1, so after N
calls onto zeros a row of `out` sums to N.

R requests, H query heads, S tokens per block.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from lmscope_kernels.shapes import check_shape
from lmscope_kernels.triton_support import FP_FUSION, check_tensors, jit, require_triton, tl

__all__ = ["block_attention_mass", "block_attention_mass_reference"]

NUM_BLOCKS = 128


def block_attention_mass_reference(
    block_lse: Tensor,
    lse: Tensor,
    out: Tensor,
    seq_lens: Tensor,
    block_size: int,
    window: int | None = None,
) -> None:
    """The definition, in float64; parameters as in block_attention_mass."""
    shares = torch.exp2(block_lse.double() - lse.double()[:, :, None]).mean(dim=1)
    for request, seq_len in enumerate(seq_lens.tolist()):
        start = 0 if window is None else max(seq_len - window, 0)
        own = slice(start // block_size, -(-seq_len // block_size))
        out[request, own] += shares[request, own].to(out.dtype)


@jit
def block_attention_mass_kernel(
    out_ptr,
    block_lse_ptr,
    lse_ptr,
    seq_lens_ptr,
    out_stride,
    block_lse_stride_r,
    block_lse_stride_h,
    H: tl.constexpr,
    S: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One program for NUM_BLOCKS blocks of one request, all heads in order."""
    request = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    seq_len = tl.load(seq_lens_ptr + request)
    if tl.program_id(1) * NUM_BLOCKS * S >= seq_len:
        return
    is_own = blocks * S < seq_len
    if WINDOW > 0:
        is_own = is_own & (blocks >= tl.maximum(seq_len - WINDOW, 0) // S)
    shares = tl.zeros([NUM_BLOCKS], tl.float32)
    for head in range(H):
        lse = tl.load(lse_ptr + request * H + head)
        block_lse = tl.load(
            block_lse_ptr + request * block_lse_stride_r + head * block_lse_stride_h + blocks,
            mask=is_own,
            other=float("-inf"),
        )
        shares += tl.exp2(block_lse - lse)
    place = out_ptr + request * out_stride + blocks
    before = tl.load(place, mask=is_own, other=0.0)
    tl.store(place, before + shares / H, mask=is_own)


def block_attention_mass(
    block_lse: Tensor,
    lse: Tensor,
    out: Tensor,
    seq_lens: Tensor,
    block_size: int,
    window: int | None = None,
) -> None:
    """Add the shares of one layer to `out`.

    block_lse    [R, H, max_blocks]  float32, as paged_decode left it
    lse          [R, H]              float32, contiguous
    out          [R, max_blocks]     float32; entries of blocks without a key that was attended
                                     to are left as they are
    seq_lens     [R]                 int32, and
    window       what paged_decode was given: what lies outside was never written

    Raises ValueError for shapes and strides, TypeError for types, RuntimeError where Triton
    cannot run.
    """
    require_triton(out)
    check_tensors(out.device, (torch.float32,), block_lse=block_lse, lse=lse, out=out)
    check_tensors(out.device, (torch.int32,), seq_lens=seq_lens)
    check_shape("block_lse", block_lse, None, None, None)
    R, H, max_blocks = block_lse.shape
    check_shape("lse", lse, R, H)
    check_shape("out", out, R, max_blocks)
    check_shape("seq_lens", seq_lens, R)
    if (
        block_lse.stride(2) != 1
        or out.stride(1) != 1
        or not (lse.is_contiguous() and seq_lens.is_contiguous())
    ):
        raise ValueError("lse, seq_lens and each row of block_lse and out must be contiguous")
    if block_size < 1 or (window is not None and window < 1):
        raise ValueError(f"block_size is {block_size} and window {window}, must be at least 1")
    if R == 0 or max_blocks == 0:
        return
    block_attention_mass_kernel[(R, -(-max_blocks // NUM_BLOCKS))](
        out,
        block_lse,
        lse,
        seq_lens,
        out.stride(0),
        block_lse.stride(0),
        block_lse.stride(1),
        H=H,
        S=block_size,
        NUM_BLOCKS=NUM_BLOCKS,
        WINDOW=window or 0,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )
