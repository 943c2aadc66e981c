"""Attention of requests that have one query row each, over the keys in their own blocks.

The keys of a request are cut into splits of a fixed length: split s has positions 256 s up to
256 s + 256. One program takes one split of one KV head, with all query heads that read it as rows
of one tile, so that keys and values are read once; its output and the logarithm of its sum go to a
workspace. A second kernel merges the splits of a row in order of position. What a request gets so
depends on its own length only, and on neither its neighbours nor the longest of them.

A split holds the probabilities of its keys anyway, so it can also say, block by block, the
logarithm of their sum; block_attention_mass.py makes shares of it. All logarithms are of base 2:

    lse[r, h]          log2 of the sum of exp(score) over the keys that are attended to
    block_lse[r, h, b] the same over those in block b of the table; -inf where there is none

Which keys are attended to, and what a window and a soft cap are, is in paged_attention.py; the
kernels are in paged_decode_kernels.py.

R requests, H query heads, K KV heads, G = H / K, D head size, B blocks in the pool, S tokens per
block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmscope_kernels.batch_checks import check_batch
from lmscope_kernels.paged_decode_kernels import merge_kernel, split_kernel
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

__all__ = [
    "DecodeWorkspace",
    "decode_tile",
    "merge_kernel",
    "paged_decode",
    "paged_decode_reference",
    "split_kernel",
]

_LARGEST_TILE = 64
# Keys and values of one tile, beside which there must be room in the 99 KiB that each GPU has.
_MOST_TILE_BYTES = 64 << 10
# Two tiles on their way while a third is in use: a decode waits for memory and little else.
_NUM_STAGES = 3


def paged_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one request after the other, in float64; parameters as in paged_decode.

    returns    output [R, H, D], lse [R, H], block_lse [R, H, max_blocks], float64 each; zero and
               -inf for a request of no tokens
    """
    R, H, D = query.shape
    S, K = key_cache.shape[1:3]
    max_blocks = block_table.shape[1]
    output = torch.zeros(R, H, D, dtype=torch.float64, device=query.device)
    block_lse = torch.full((R, H, max_blocks), -math.inf, dtype=torch.float64, device=query.device)
    for request, seq_len in enumerate(seq_lens.tolist()):
        if not seq_len:
            continue
        start = 0 if window is None else max(seq_len - window, 0)
        key, value = (
            cache[block_table[request].long()].flatten(0, 1)[start:seq_len].double()
            for cache in (key_cache, value_cache)
        )
        key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
        scores = torch.einsum("hd,lhd->hl", query[request].double(), key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        output[request] = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), value)
        padded = scores.new_full((H, max_blocks * S), -math.inf)
        padded[:, start:seq_len] = scores
        block_lse[request] = padded.view(H, max_blocks, S).logsumexp(dim=-1) / math.log(2)
    return output, (block_lse * math.log(2)).logsumexp(dim=-1) / math.log(2), block_lse


@dataclass(frozen=True)
class DecodeWorkspace:
    """What the splits leave for the merge; allocated once, for so many requests or fewer.

    output    [R, H, max_splits, D]  float32
    lse       [R, H, max_splits]     float32
    split     tokens of one split
    """

    output: Tensor
    lse: Tensor
    split: int

    @classmethod
    def allocate(
        cls,
        num_reqs: int,
        num_heads: int,
        head_size: int,
        max_seq_len: int,
        device: torch.device | str,
        split: int = 256,
    ) -> DecodeWorkspace:
        shape = (num_reqs, num_heads, -(-max_seq_len // split))
        return cls(
            output=torch.empty(*shape, head_size, dtype=torch.float32, device=device),
            lse=torch.empty(shape, dtype=torch.float32, device=device),
            split=split,
        )


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    workspace: DecodeWorkspace,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_lse: Tensor | None = None,
    check: bool = False,
) -> Tensor:
    """Attention of each row over its request's keys, in two launches.

    query                     [R, H, D]
    key_cache, value_cache    [B, S, K, D]       all three of one type; H a multiple of K
    block_table               [R, max_blocks]    int32; entries below B
    seq_lens                  [R]                int32, the query's token included; 0: padding,
                                                 whose output is zero and whose lse is -inf
    workspace                 for R requests and max_blocks * S tokens, or more
    window, softcap           None: none
    out                       [R, H, D]          where the result goes; made anew unless given
    lse                       [R, H]             float32, contiguous
    block_lse                 [R, H, max_blocks] float32; written where a block has a key that
                                                 is attended to, other entries keep what they hold
    check                     reads block_table and seq_lens on the host first, and raises
                              ValueError where they are wrong; else nobody looks at them
    returns                   [R, H, D]

    Raises ValueError for shapes, strides that are no multiples of 16, a split that is no multiple
    of the tile and, with block_lse, blocks that do not fill a tile; TypeError for types;
    RuntimeError where Triton cannot run.
    """
    require_triton(query)
    R, H, D, S, K = _check(query, key_cache, value_cache, block_table, seq_lens)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1; use None for none")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, must be above 0; use None for none")
    max_blocks = block_table.shape[1]
    out = torch.empty(R, H, D, dtype=query.dtype, device=query.device) if out is None else out
    if lse is None:
        lse = torch.empty(R, H, dtype=torch.float32, device=query.device)
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
    if R == 0:
        return out
    if check:
        check_batch(
            block_table,
            seq_lens,
            None,
            num_rows=R,
            num_blocks=key_cache.shape[0],
            block_size=S,
        )

    padded = 1 << (D - 1).bit_length()
    G = H // K
    # As many splits as the table could hold, not as many as there are: the grid of a captured
    # graph cannot change. Those past the end return at once.
    split_kernel[(R, K, -(-max_blocks * S // split))](
        workspace.output,
        workspace.lse,
        block_lse,
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        scale,
        softcap or 1.0,
        num_splits,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        0 if block_lse is None else block_lse.stride(0),
        0 if block_lse is None else block_lse.stride(1),
        G=G,
        D=D,
        D_PADDED=padded,
        S=S,
        NUM_ROWS=max(16, 1 << (G - 1).bit_length()),
        NUM_KEYS=num_keys,
        SPLIT=split,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_BLOCK_LSE=block_lse is not None,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    merge_kernel[(R, H)](
        out,
        lse,
        workspace.output,
        workspace.lse,
        seq_lens,
        num_splits,
        out.stride(0),
        out.stride(1),
        D=D,
        D_PADDED=padded,
        SPLIT=split,
        WINDOW=window or 0,
        num_warps=1,
        enable_fp_fusion=FP_FUSION,
    )
    return out


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
    query: Tensor, out: Tensor, lse: Tensor, block_lse: Tensor | None, max_blocks: int
) -> None:
    R, H, D = query.shape
    check_tensors(query.device, (query.dtype,), out=out)
    check_tensors(query.device, (torch.float32,), lse=lse, block_lse=block_lse)
    check_shape("out", out, R, H, D)
    check_shape("lse", lse, R, H)
    check_shape("block_lse", block_lse, R, H, max_blocks)
    check_strides(out=out)
    if not lse.is_contiguous() or (block_lse is not None and block_lse.stride(2) != 1):
        raise ValueError("lse, and each row of block_lse, must be contiguous; copy them")
