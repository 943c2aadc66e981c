"""Paged attention with Triton: chunks of prompts and decode rows in one launch.

What it computes, and the reference, are in paged_attention.py; the kernel, and how its programs
find their tokens, in unified_attention_kernel.py. This file checks and launches it.

T tokens in the batch, R requests, H query heads, K KV heads, D head size, B blocks in the pool,
S tokens per block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lmscope_kernels.batch_checks import check_batch
from lmscope_kernels.launches import Launch, Launches, launch_key
from lmscope_kernels.shapes import check_shape
from lmscope_kernels.triton_support import (
    FP_FUSION,
    Tile,
    attention_tile,
    capability,
    check_contiguous,
    check_strides,
    check_tensors,
    require_triton,
    triton,
)
from lmscope_kernels.unified_attention_kernel import paged_attention_kernel

__all__ = ["paged_attention", "paged_attention_constants", "paged_attention_kernel"]

_LOG2_E = math.log2(math.e)
_MAX_ROWS = 128

_launches: Launches[Launch] = Launches()


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    fixed_tile: bool = False,
    check: bool = False,
) -> Tensor:
    """paged_attention_reference on the device of query, with a result in the dtype of query.

    query                     [T, H, D]
    key_cache, value_cache    [B, S, K, D]    in the dtype of query
    block_table               [R, max_blocks] int32
    seq_lens                  [R]             int32; 0 for a row of padding
    query_start_loc           [R + 1]         int32; may end before T
    out                       [T, H, D]       allocated unless given; zero where nothing is seen
    lse                       [T, H]          float32; gets log2 of the sum of exp of each row's
                                              scores, -inf where nothing is seen
    fixed_tile    one tile for every batch, and one loop over its keys, so that a row gets the same
                  bits in all of them; else batches with one row a request take a smaller tile
    check         reads the batch on the host first and raises ValueError where it is wrong

    Raises for what the kernel cannot do right: strides that are no multiples of 16, more than
    128 query heads to a KV head, a scale that is not positive.
    """
    key = (
        launch_key(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, out, lse),
        scale,
        window,
        softcap,
        fixed_tile,
    )
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(
            key,
            _launch(
                query,
                key_cache,
                value_cache,
                block_table,
                seq_lens,
                query_start_loc,
                scale,
                window,
                softcap,
                out,
                lse,
                fixed_tile,
            ),
        )
    if check:
        check_batch(
            block_table,
            seq_lens,
            query_start_loc,
            num_rows=query.shape[0],
            num_blocks=key_cache.shape[0],
            block_size=key_cache.shape[1],
        )
    if launch.grid is not None:
        paged_attention_kernel[launch.grid](
            out,
            lse,
            query,
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            query_start_loc,
            *launch.numbers,
            **launch.constants,
        )
    return out


def _launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
    fixed_tile: bool,
) -> Launch:
    """Raises as paged_attention says."""
    T, H, D = query.shape
    B, S, K = key_cache.shape[:3]
    R = seq_lens.shape[0]
    check_shape("key_cache", key_cache, B, S, K, D)
    check_shape("value_cache", value_cache, B, S, K, D)
    check_shape("block_table", block_table, R, None)
    check_shape("seq_lens", seq_lens, R)
    check_shape("query_start_loc", query_start_loc, R + 1)
    check_shape("out", out, T, H, D)
    check_shape("lse", lse, T, H)
    if H % K:
        raise ValueError(f"{H} query heads share {K} KV heads, must be a multiple of them")
    if not scale > 0.0:
        raise ValueError(f"scale is {scale}, must be positive")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be 1 or more; None means all earlier keys")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap is {softcap}, must be positive; None means no cap")
    require_triton(query)
    check_tensors(
        query.device,
        (query.dtype,),
        key_cache=key_cache,
        value_cache=value_cache,
        out=out,
    )
    check_tensors(
        query.device,
        (torch.int32,),
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
    )
    check_tensors(query.device, (torch.float32,), lse=lse)
    check_strides(query=query, key_cache=key_cache, value_cache=value_cache, out=out)
    check_contiguous(seq_lens=seq_lens, query_start_loc=query_start_loc, lse=lse)
    if block_table.stride(1) != 1:
        raise ValueError(
            f"block_table has stride {block_table.stride(1)} in its last dimension, must have 1; "
            f"call contiguous() on it"
        )
    tile = attention_tile(
        query.dtype, D, capability(query.device), has_many_rows=fixed_tile or T > R
    )
    constants = paged_attention_constants(
        H,
        K,
        D,
        S,
        tile,
        window=window,
        has_softcap=softcap is not None,
        has_lse=lse is not None,
        fixed_tile=fixed_tile,
    )
    return Launch(
        grid=(T // constants["TOKENS"] + R + 1, K) if T else None,
        numbers=(
            R,
            T,
            (scale if softcap is None else softcap) * _LOG2_E,
            1.0 if softcap is None else scale / softcap,
            *query.stride()[:2],
            *out.stride()[:2],
            block_table.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
        ),
        constants={
            **constants,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": FP_FUSION,
        },
    )


def paged_attention_constants(
    H: int,
    K: int,
    D: int,
    S: int,
    tile: Tile,
    *,
    window: int | None,
    has_softcap: bool,
    has_lse: bool,
    fixed_tile: bool,
) -> dict[str, Any]:
    """What paged_attention_kernel is compiled for; raises for too many heads in one tile."""
    G = H // K
    block_m = max(tile.num_rows, triton.next_power_of_2(G))
    if block_m > _MAX_ROWS:
        raise ValueError(
            f'{G} query heads share one KV head, the limit is {_MAX_ROWS}; use backend="torch"'
        )
    return {
        "H": H,
        "G": G,
        "D": D,
        "S": S,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.num_keys,
        "BLOCK_D": max(triton.next_power_of_2(D), 16),
        "TOKENS": block_m // G,
        "WINDOW": window or 0,
        "HAS_SOFTCAP": has_softcap,
        "HAS_LSE": has_lse,
        "ONE_LOOP": fixed_tile,
    }
