"""Bars the tokens that a grammar forbids, from one bit for each token of the vocabulary.

Bit i of word w speaks of token 32 * w + i and is set where the token is allowed. A barred token
gets the logit -inf; the others keep theirs. Only some rows of a batch have a grammar, so `rows`
says to which row of the logits each mask belongs.

R requests, V vocabulary, n masks.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmscope_kernels.shapes import check_shape
from lmscope_kernels.triton_support import DTYPES, check_tensors, jit, require_triton, tl

__all__ = ["apply_token_bitmask", "apply_token_bitmask_reference"]

BLOCK = 4096


def apply_token_bitmask_reference(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """The definition, with every bit unpacked; parameters as in apply_token_bitmask."""
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    is_allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    for row, allowed in zip(rows.tolist(), is_allowed, strict=True):
        if row >= 0:
            logits[row].masked_fill_(~allowed, -math.inf)


@jit
def token_bitmask_kernel(
    logits_ptr,
    bitmask_ptr,
    rows_ptr,
    logits_stride,
    bitmask_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK tokens of one mask."""
    mask_id = tl.program_id(0)
    row = tl.load(rows_ptr + mask_id).to(tl.int64)
    if row < 0:
        return
    words = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    bits = tl.load(
        bitmask_ptr + mask_id.to(tl.int64) * bitmask_stride + words,
        mask=words * 32 < vocab_size,
        other=0,
    )
    is_allowed = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
    tokens = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(
        logits_ptr + row * logits_stride + tokens,
        float("-inf"),
        mask=(tokens < vocab_size) & (is_allowed == 0),
    )


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Set the logits of barred tokens to -inf, in place.

    logits     [R, V]             float32, float16 or bfloat16; each row contiguous
    bitmask    [n, ceil(V / 32)]  int32, or more words, which are not read
    rows       [n]                int32 or int64, no row twice; -1: a mask that is padding

    Raises ValueError for other shapes, types and strides. What `rows` holds is not looked at:
    it must be below R.
    """
    require_triton(logits)
    check_tensors(logits.device, DTYPES, logits=logits)
    check_tensors(logits.device, (torch.int32,), bitmask=bitmask)
    check_tensors(logits.device, (torch.int32, torch.int64), rows=rows)
    check_shape("logits", logits, None, None)
    check_shape("bitmask", bitmask, None, None)
    check_shape("rows", rows, bitmask.shape[0])
    if logits.stride(1) != 1 or bitmask.stride(1) != 1 or rows.stride(0) != 1:
        raise ValueError(
            f"strides are {logits.stride()} of logits, {bitmask.stride()} of bitmask and "
            f"{rows.stride()} of rows, the last of each must be 1; call contiguous() on them"
        )
    vocab_size = logits.shape[1]
    num_words = -(-vocab_size // 32)
    if bitmask.shape[1] < num_words:
        raise ValueError(
            f"bitmask has {bitmask.shape[1]} words a row, a vocabulary of {vocab_size} takes "
            f"{num_words}; make it [n, {num_words}]"
        )
    if not rows.shape[0]:
        return
    grid = (rows.shape[0], -(-vocab_size // BLOCK))
    token_bitmask_kernel[grid](
        logits,
        bitmask,
        rows,
        logits.stride(0),
        bitmask.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
