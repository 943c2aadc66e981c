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
kernels are in paged_decode_kernels.py, and paged_decode_launch.py checks what they are given.

R requests, H query heads, K KV heads, G = H / K, D head size, B blocks in the pool, S tokens per
block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmscope_kernels.batch_checks import check_batch
from lmscope_kernels.launches import Launch, Launches, launch_key
from lmscope_kernels.paged_decode_kernels import merge_kernel, split_kernel
from lmscope_kernels.paged_decode_launch import decode_launches, decode_tile

__all__ = [
    "DecodeWorkspace",
    "decode_tile",
    "merge_kernel",
    "paged_decode",
    "paged_decode_reference",
    "split_kernel",
]

# Of the splits, and of their merge.
_launches: Launches[tuple[Launch, Launch]] = Launches()


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
    key = (
        launch_key(
            query,
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            workspace.output,
            workspace.lse,
            out,
            lse,
            block_lse,
        ),
        workspace.split,
        window,
        softcap,
    )
    launches = _launches.get(key)
    if launches is None:
        launches = _launches.keep(
            key,
            decode_launches(
                query,
                key_cache,
                value_cache,
                block_table,
                seq_lens,
                workspace,
                window,
                softcap,
                out,
                lse,
                block_lse,
            ),
        )
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if lse is None:
        R, H, _ = query.shape
        lse = torch.empty(R, H, dtype=torch.float32, device=query.device)
    splits, merge = launches
    if splits.grid is None or merge.grid is None:
        return out
    if check:
        check_batch(
            block_table,
            seq_lens,
            None,
            num_rows=query.shape[0],
            num_blocks=key_cache.shape[0],
            block_size=key_cache.shape[1],
        )
    split_kernel[splits.grid](
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
        *splits.numbers,
        **splits.constants,
    )
    merge_kernel[merge.grid](
        out,
        lse,
        workspace.output,
        workspace.lse,
        seq_lens,
        *merge.numbers,
        **merge.constants,
    )
    return out
