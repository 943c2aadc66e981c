"""Attention of requests that have several query rows each, on a CPU, over the block table.

The definition is `paged_attention_reference`. The loops are compiled by numba, which is optional
(the extra `cpu`): keys and values are read where they lie, whether the blocks of a request are
neighbours or not, and nothing past the end of a request. One call does all requests of a step, so
a batch of short prompts costs no more than a long one. Float32 only; `decode_kernel_choice` says
where these loops run.

    Prompts(first_rows, num_rows, seq_lens, block_table)
    attend_prompts_cpu(query, key_cache, value_cache, prompts, scale, window=None, softcap=None,
                       output=...)
    prepare_prompt_kernel()             compiles, once for all shapes

T rows in the batch, R requests, H query heads, K KV heads, G = H / K, D head size, B blocks in the
pool, S tokens per block.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope_kernels.decode_attention_cpu import paged_decode_cpu, rows_of
from lmscope_kernels.numba_support import use_torch_threads

__all__ = ["Prompts", "attend_prompts_cpu", "prepare_prompt_kernel"]

# Query rows, of all heads that share a KV head, that are worked on together: enough to read a key
# seldom, few enough that their scores stay in the first-level cache.
_ROWS_TOGETHER = 96


class Prompts:
    """The requests of a step that have several rows. Made once, used by all layers.

    first_rows     [R]               their first rows in the batch
    num_rows       [R]               how many rows they have
    seq_lens       [R]               their tokens, those of this step included
    block_table    [R, max_blocks]   int32
    """

    def __init__(
        self,
        first_rows: NDArray[np.integer],
        num_rows: NDArray[np.integer],
        seq_lens: NDArray[np.integer],
        block_table: NDArray[np.int32],
    ) -> None:
        self.block_table = np.ascontiguousarray(block_table, dtype=np.int32)
        self._requests = list(
            zip(first_rows.tolist(), num_rows.tolist(), seq_lens.tolist(), strict=True)
        )
        self._pieces: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def pieces(self, num_kv_heads: int, G: int) -> NDArray[np.int64]:
        """[pieces, 5]: request, KV head, first row, number of rows, position of the first.

        The longest come first, so that threads which take turns end at about the same time.
        """
        known = self._pieces.get((num_kv_heads, G))
        if known is not None:
            return known
        most_rows = max(1, _ROWS_TOGETHER // G)
        pieces = [
            (request, kv_head, first_row + start, rows, seq_len - num_rows + start)
            for request, (first_row, num_rows, seq_len) in enumerate(self._requests)
            for start in range(0, num_rows, most_rows)
            for rows in (min(most_rows, num_rows - start),)
            for kv_head in range(num_kv_heads)
        ]
        pieces.sort(key=lambda piece: -piece[3] * (piece[3] + piece[4]))
        made = np.array(pieces, dtype=np.int64).reshape(-1, 5)
        self._pieces[num_kv_heads, G] = made
        return made


def attend_prompts_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prompts: Prompts,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    output: Tensor,
) -> None:
    """Attend for the rows of some requests and write them into the same rows of `output`.

    query, output             [T, H, D]       float32; output contiguous, its other rows stay
    key_cache, value_cache    [B, S, K, D]    float32, contiguous; H a multiple of K; the rows' own
                                              keys and values are in it
    window                    most keys of a row, its own among them; None: all
    softcap                   None: none

    Runs on as many of numba's threads as torch has, with the same bits for any number. Only when
    decode_kernel_choice says "numba".
    """
    if not len(prompts):
        return
    kernels: Any = importlib.import_module("lmscope_kernels.prompt_attention_numba")
    is_parallel = use_torch_threads()
    attend = kernels.attend_prompts_parallel if is_parallel else kernels.attend_prompts_serial
    K, G = key_cache.shape[2], query.shape[1] // key_cache.shape[2]
    pieces = prompts.pieces(K, G)
    are_numbers = np.ones(len(pieces), np.bool_)
    attend(
        torch.get_num_threads() if is_parallel else 1,
        rows_of(query).numpy(),
        key_cache.numpy(),
        value_cache.numpy(),
        prompts.block_table,
        pieces,
        G,
        window or 0,
        np.float32(scale),
        np.float32(softcap or 0.0),
        output.view(len(output), -1).numpy(),
        are_numbers,
    )
    if are_numbers.all():
        return
    # If the value of a hidden key is no number, nor is its weight of nearly nothing times that, and
    # a row before it must not see it: it may be in a block that another request shares.
    requests, _, first_rows, num_rows, positions = pieces[~are_numbers].T
    offsets = np.concatenate([np.arange(count) for count in num_rows])
    rows, first = np.unique(np.repeat(first_rows, num_rows) + offsets, return_index=True)
    seq_lens = (np.repeat(positions, num_rows) + offsets + 1)[first].astype(np.int32)
    first_keys = np.maximum(seq_lens - (window or seq_lens), 0).astype(np.int32)
    table = prompts.block_table[np.repeat(requests, num_rows)[first]]
    paged_decode_cpu(
        query,
        key_cache,
        value_cache,
        table,
        first_keys,
        seq_lens,
        rows,
        scale,
        softcap,
        output=output,
    )


def prepare_prompt_kernel() -> None:
    """Compile, or load what an earlier process compiled; it does not depend on shapes."""
    one = np.ones(1, np.int32)
    cache, row = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    prompts = Prompts(np.zeros(1, np.int32), one, one, np.zeros((1, 1), np.int32))
    attend_prompts_cpu(row, cache, cache, prompts, 1.0, output=torch.empty_like(row))
