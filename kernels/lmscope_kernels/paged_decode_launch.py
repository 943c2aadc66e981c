"""Checks what paged_decode is given, and works out how its two kernels are launched on it.

R requests, H query heads, K KV heads, G = H / K, D head size, B blocks in the pool, S tokens per
block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmscope_kernels.launches import Launch
from lmscope_kernels.shapes import check_shape
from lmscope_kernels.triton_support import (
    FP_FUSION,
    attention_tile,
    capability,
    check_contiguous,
    check_strides,
    check_tensors,
    require_triton,
)

if TYPE_CHECKING:
    from lmscope_kernels.paged_decode import DecodeWorkspace

__all__ = ["decode_launches", "decode_tile"]

_LARGEST_TILE = 64
# Keys and values of one tile, beside which there must be room in the 99 KiB that each GPU has.
_MOST_TILE_BYTES = 64 << 10
# Two tiles on their way while a third is in use: a decode waits for memory and little else.
_NUM_STAGES = 3


def decode_launches(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace: DecodeWorkspace,
    window: int | None,
    softcap: float | None,
    out: Tensor | None,
    lse: Tensor | None,
    block_lse: Tensor | None,
) -> tuple[Launch, Launch]:
    """Of the splits, and of their merge; parameters, and what is raised, as in paged_decode.

    Without `out` and `lse` it is for contiguous ones.
    """
    require_triton(query)
    R, H, D, S, K = _check(query, key_cache, value_cache, block_table, seq_lens)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1; use None for none")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, must be above 0; use None for none")
    max_blocks = block_table.shape[1]
    _check_results(query, out, lse, block_lse, max_blocks)
    num_splits, split = workspace.lse.shape[2], workspace.split
    check_tensors(
        query.device, (torch.float32,), workspace=workspace.output, workspace_lse=workspace.lse
    )
    check_contiguous(workspace=workspace.output, workspace_lse=workspace.lse)
    if (
        workspace.output.shape[0] < R
        or workspace.output.shape[1:] != (H, num_splits, D)
        or num_splits * split < max_blocks * S
    ):
        raise ValueError(
            f"workspace is {list(workspace.output.shape)} for splits of {split}, and a batch of "
            f"{list(query.shape)} with {max_blocks} blocks of {S} needs more; "
            f"use DecodeWorkspace.allocate({R}, {H}, {D}, {max_blocks * S}, ...)"
        )
    num_keys, num_warps, num_stages = decode_tile(query.dtype, D, S, capability(query.device))
    if split % num_keys:
        raise ValueError(
            f"split is {split}, must be a multiple of the {num_keys} keys of a tile; use 256"
        )
    if block_lse is not None and num_keys % S:
        most = _LARGEST_TILE if S & (S - 1) or S > _LARGEST_TILE else num_keys
        raise ValueError(
            f"blocks have {S} tokens, with block_lse they must be a power of two up to "
            f"{most}; load the model with such a block_size"
        )
    padded = 1 << (D - 1).bit_length()
    G = H // K
    of_both = {
        "D": D,
        "D_PADDED": padded,
        "SPLIT": split,
        "WINDOW": window or 0,
        "enable_fp_fusion": FP_FUSION,
    }
    splits = Launch(
        # As many splits as the table could hold, not as many as there are: the grid of a captured
        # graph cannot change. Those past the end return at once.
        grid=(R, K, -(-max_blocks * S // split)) if R else None,
        numbers=(
            num_splits,
            query.stride(0),
            query.stride(1),
            block_table.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            0 if block_lse is None else block_lse.stride(0),
            0 if block_lse is None else block_lse.stride(1),
        ),
        constants={
            **of_both,
            "G": G,
            "S": S,
            "NUM_ROWS": max(16, 1 << (G - 1).bit_length()),
            "NUM_KEYS": num_keys,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_BLOCK_LSE": block_lse is not None,
            "num_warps": num_warps,
            "num_stages": num_stages,
        },
    )
    merge = Launch(
        grid=(R, H) if R else None,
        numbers=(num_splits, *((H * D, D) if out is None else out.stride()[:2])),
        constants={**of_both, "num_warps": 1},
    )
    return splits, merge


def decode_tile(
    dtype: torch.dtype, head_size: int, block_size: int, capability: tuple[int, int]
) -> tuple[int, int, int]:
    """Keys of one turn of the loop, warps and stages.

    A tile holds whole blocks where their size allows it, whether or not anybody asks for what
    blocks receive: to watch must not change a bit.
    """
    tile = attention_tile(dtype, head_size, capability, has_many_rows=False)
    is_power_of_two = block_size & (block_size - 1) == 0
    num_bytes = 2 * block_size * (1 << (head_size - 1).bit_length()) * dtype.itemsize
    if (
        not is_power_of_two
        or not tile.num_keys < block_size <= _LARGEST_TILE
        or num_bytes > _MOST_TILE_BYTES
    ):
        return tile.num_keys, tile.num_warps, _NUM_STAGES
    # Tiles larger than those of the table leave no room for a second one on its way.
    return block_size, tile.num_warps, 1


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor
) -> tuple[int, int, int, int, int]:
    """R, H, D, S and K, when everything that is read fits."""
    device = query.device
    check_tensors(device, (query.dtype,), key_cache=key_cache, value_cache=value_cache)
    check_tensors(device, (torch.int32,), block_table=block_table, seq_lens=seq_lens)
    check_shape("query", query, None, None, None)
    R, H, D = query.shape
    check_shape("key_cache", key_cache, None, None, None, D)
    _, S, K, _ = key_cache.shape
    check_shape("value_cache", value_cache, key_cache.shape[0], S, K, D)
    check_shape("block_table", block_table, R, None)
    check_shape("seq_lens", seq_lens, R)
    check_strides(query=query, key_cache=key_cache, value_cache=value_cache)
    if D % 16 or not 16 <= D <= 256:
        raise ValueError(
            f'heads have {D} numbers, must have a multiple of 16 up to 256; use backend="torch"'
        )
    if H % K:
        raise ValueError(f"{H} query heads cannot share {K} KV heads; H must be a multiple of K")
    if block_table.stride(1) != 1 or not seq_lens.is_contiguous():
        raise ValueError(
            f"block_table has strides {block_table.stride()} and seq_lens {seq_lens.stride()}, the "
            "last of each must be 1; call contiguous() on them"
        )
    return R, H, D, S, K


def _check_results(
    query: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    block_lse: Tensor | None,
    max_blocks: int,
) -> None:
    R, H, D = query.shape
    check_tensors(query.device, (query.dtype,), out=out)
    check_tensors(query.device, (torch.float32,), lse=lse, block_lse=block_lse)
    check_shape("out", out, R, H, D)
    check_shape("lse", lse, R, H)
    check_shape("block_lse", block_lse, R, H, max_blocks)
    check_strides(out=out)
    if (lse is not None and not lse.is_contiguous()) or (
        block_lse is not None and block_lse.stride(2) != 1
    ):
        raise ValueError("lse, and each row of block_lse, must be contiguous; copy them")
