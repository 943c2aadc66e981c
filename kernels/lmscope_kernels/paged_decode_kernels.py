"""The two Triton kernels of paged_decode.py, which says what they compute and launches them.

R requests, H query heads, K KV heads, G = H / K, D head size, S tokens per block.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import Any

from lmscope_kernels.triton_support import dot, jit, tanh, tl

__all__ = ["merge_kernel", "split_kernel"]

LOG2_E: Any = tl and tl.constexpr(math.log2(math.e))


@jit
def split_kernel(
    partial_output_ptr,
    partial_lse_ptr,
    block_lse_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    seq_lens_ptr,
    scale,
    softcap,
    num_splits,
    query_stride_r,
    query_stride_h,
    table_stride,
    key_stride_b,
    key_stride_s,
    key_stride_k,
    value_stride_b,
    value_stride_s,
    value_stride_k,
    block_lse_stride_r,
    block_lse_stride_h,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    S: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BLOCK_LSE: tl.constexpr,
):
    """One split of the keys of one request, for the G heads of one KV head."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    # Of the last query row, which is the only one.
    visible_from = 0
    if WINDOW > 0:
        visible_from = tl.maximum(seq_len - WINDOW, 0)
    first = tl.maximum(split * SPLIT, visible_from // NUM_KEYS * NUM_KEYS)
    end = tl.minimum(split * SPLIT + SPLIT, seq_len)
    if first >= end:
        return

    group = tl.arange(0, NUM_ROWS)
    dims = tl.arange(0, D_PADDED)
    is_row = group < G
    is_dim = dims < D
    heads = kv_head * G + group
    query = tl.load(
        query_ptr + request * query_stride_r + heads[:, None] * query_stride_h + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    maximum = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    output = tl.zeros([NUM_ROWS, D_PADDED], tl.float32)
    for start in range(first, end, NUM_KEYS):
        positions = start + tl.arange(0, NUM_KEYS)
        # What a window hides may have been given away, and may hold anything.
        is_key = (positions < end) & (positions >= visible_from)
        block_ids = tl.load(
            block_table_ptr + request * table_stride + positions // S, mask=is_key, other=0
        ).to(tl.int64)
        slots = positions % S
        key = tl.load(
            key_ptr
            + (block_ids * key_stride_b + slots * key_stride_s)[None, :]
            + kv_head * key_stride_k
            + dims[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        value = tl.load(
            value_ptr
            + (block_ids * value_stride_b + slots * value_stride_s)[:, None]
            + kv_head * value_stride_k
            + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        scores = dot(query, key) * scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        scores = tl.where(is_key[None, :], scores * LOG2_E, float("-inf"))
        # Finite: each turn has a key that is attended to, and -inf - -inf is no number.
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=1)
        output = output * rescale[:, None] + dot(weights.to(value.dtype), value)
        maximum = new_maximum
        if HAS_BLOCK_LSE:
            NUM_BLOCKS: tl.constexpr = NUM_KEYS // S
            sums = tl.sum(tl.reshape(weights, (NUM_ROWS, NUM_BLOCKS, S)), axis=2)
            blocks = start // S + tl.arange(0, NUM_BLOCKS)
            tl.store(
                block_lse_ptr
                + request * block_lse_stride_r
                + heads[:, None] * block_lse_stride_h
                + blocks[None, :],
                new_maximum[:, None] + tl.log2(sums),
                mask=is_row[:, None] & (blocks * S < end)[None, :],
            )
    num_heads = tl.num_programs(1) * G
    place = (request * num_heads + heads) * num_splits + split
    tl.store(
        partial_output_ptr + place[:, None] * D + dims[None, :],
        output / total[:, None],
        mask=is_row[:, None] & is_dim[None, :],
    )
    tl.store(partial_lse_ptr + place, maximum + tl.log2(total), mask=is_row)


@jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    partial_output_ptr,
    partial_lse_ptr,
    seq_lens_ptr,
    num_splits,
    out_stride_r,
    out_stride_h,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The splits of one query head of one request, in order of position."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // SPLIT
    dims = tl.arange(0, D_PADDED)
    is_dim = dims < D
    row = request * tl.num_programs(1) + head
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    output = tl.zeros([D_PADDED], tl.float32)
    for split in range(first, tl.cdiv(seq_len, SPLIT)):
        lse = tl.load(partial_lse_ptr + row * num_splits + split)
        part = tl.load(
            partial_output_ptr + (row * num_splits + split) * D + dims, mask=is_dim, other=0.0
        )
        new_maximum = tl.maximum(maximum, lse)
        rescale = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(lse - new_maximum)
        output = output * rescale + part * weight
        total = total * rescale + weight
        maximum = new_maximum
    # A request of no tokens is padding: zeros, so that what follows stays finite.
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + request * out_stride_r + head * out_stride_h + dims,
        tl.where(seq_len > 0, output / divisor, 0.0).to(out_ptr.dtype.element_ty),
        mask=is_dim,
    )
    tl.store(lse_ptr + row, maximum + tl.log2(divisor))
