"""AttentionPlan: which keys the rows of a step attend to, worked out once for all layers.

Compiled loops over the block table attend for all requests with one row at once, and for all with
several. Where there are no such loops, torch does: requests with one row each together, padded to
a common length, and a request with several rows alone. A window only leaves keys out: the cache
keeps them, and a plan for a window never reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lmscope_kernels.decode_attention_cpu import decode_kernel_choice, paged_decode_cpu
from lmscope_kernels.paged_attention import attend_many_rows, attend_one_row_each
from lmscope_kernels.prompt_attention_cpu import Prompts, attend_prompts_cpu
from numpy.typing import NDArray
from torch import Tensor

from lmscope.models.attention_keys import (
    Keys,
    causal_bias,
    groups_of_like_length,
    padded_slots,
    run_of_slots,
)

__all__ = ["AttentionPlan", "Decoding"]

# A whole prompt of so many rows is quicker with a bias, of which keys that nobody in a tile of
# rows attends to are left out. Torch itself passes over them when there are more.
_BIASED_PROMPT_ROWS = range(129, 769)


@dataclass(frozen=True)
class _OneRowEach:
    """Requests that have one query row and are attended to together.

    rows     [R]            their rows in the batch; None when they are all of it, in order
    keys     [R * L]        where their keys lie
    bias     [R, 1, 1, L]   0 or -inf; None when all have L keys
    """

    rows: Tensor | None
    keys: Keys
    bias: Tensor | None


@dataclass(frozen=True)
class _ManyRows:
    """One request with several query rows.

    start, end    its rows in the batch
    keys          [L]          where its keys lie; None when they are the rows themselves
    bias          [rows, L]    0 or -inf; None when each row attends to all rows up to its own
    """

    start: int
    end: int
    keys: Keys | None
    bias: Tensor | None


@dataclass(frozen=True)
class Decoding:
    """The requests that have one query row, as the compiled loops and the groups need them.

    rows                    [R]   their rows in the batch
    first_keys, seq_lens    [R]   positions first_key up to seq_len - 1 are attended to
    block_table             [R, max_blocks]
    is_all                  the batch has no other rows
    """

    rows: NDArray[np.int64]
    first_keys: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    block_size: int
    is_all: bool
    device: torch.device


@dataclass(frozen=True)
class Prefilling:
    """The requests that have several query rows.

    starts, ends            [R]   their rows in the batch
    first_keys, seq_lens    [R]   their first row attends from position first_key on, the last one
                                  up to seq_len - 1
    block_table             [R, max_blocks]
    window                  most keys of a row, its own among them; None: all
    with_bias               torch needs a bias for every request
    """

    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    first_keys: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    block_size: int
    window: int | None
    with_bias: bool
    device: torch.device


@dataclass(frozen=True)
class AttentionPlan:
    """Who attends to what in one step, for all layers with the same window."""

    decoding: Decoding
    prefilling: Prefilling

    @classmethod
    def build(
        cls,
        *,
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        block_size: int,
        window: int | None,
        with_bias: bool,
        device: torch.device,
    ) -> AttentionPlan:
        """Work out the plan on the host and copy it to `device`.

        query_start_loc    [R + 1]   first row of each request, and the end; no padding here
        seq_lens           [R]       tokens of each request, those of this step included
        block_table        [R, max_blocks]
        window             most keys of a row, its own among them; None: all
        with_bias          every request with several rows gets a bias
        """
        query_lens = np.diff(query_start_loc)
        # The first key that any row of a request attends to. Rows of later positions attend to
        # less, which the bias says.
        if window is None:
            first_keys = np.zeros_like(seq_lens)
        else:
            first_keys = np.maximum(seq_lens - query_lens + 1 - window, 0)

        is_decoding = query_lens == 1
        decoding = Decoding(
            rows=query_start_loc[:-1][is_decoding].astype(np.int64),
            first_keys=first_keys[is_decoding].astype(np.int32),
            seq_lens=seq_lens[is_decoding].astype(np.int32),
            block_table=np.ascontiguousarray(block_table[is_decoding], dtype=np.int32),
            block_size=block_size,
            is_all=int(np.count_nonzero(is_decoding)) == query_start_loc[-1],
            device=device,
        )
        has_many = query_lens > 1
        prefilling = Prefilling(
            starts=query_start_loc[:-1][has_many],
            ends=query_start_loc[1:][has_many],
            first_keys=first_keys[has_many],
            seq_lens=seq_lens[has_many],
            block_table=block_table[has_many],
            block_size=block_size,
            window=window,
            with_bias=with_bias,
            device=device,
        )
        return cls(decoding, prefilling)

    @cached_property
    def prompts(self) -> Prompts:
        """The requests with several rows for the compiled loops."""
        of = self.prefilling
        return Prompts(of.starts, of.ends - of.starts, of.seq_lens, of.block_table)

    @cached_property
    def many_rows(self) -> tuple[_ManyRows, ...]:
        """The requests with several rows for torch, which are made when it is asked."""
        of = self.prefilling

        def to_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(of.device)

        segments = []
        num_keys = of.seq_lens - of.first_keys
        for request in range(len(of.starts)):
            start, end = int(of.starts[request]), int(of.ends[request])
            num_rows, seq_len = end - start, int(of.seq_lens[request])
            keys = bias = None
            is_whole = num_rows == seq_len
            if not is_whole:
                where: Tensor | slice | None = run_of_slots(
                    of.block_table[request],
                    int(of.first_keys[request]),
                    int(num_keys[request]),
                    of.block_size,
                )
                if where is None:
                    only = [request]
                    slots, _ = padded_slots(
                        of.block_table[only], of.first_keys[only], num_keys[only], of.block_size
                    )
                    where = to_device(slots)
                keys = Keys(where)
            if (
                of.with_bias
                or not is_whole
                or (of.window is not None and of.window < seq_len)
                or num_rows in _BIASED_PROMPT_ROWS
            ):
                bias = to_device(causal_bias(num_rows, int(num_keys[request]), of.window))
            segments.append(_ManyRows(start, end, keys, bias))
        return tuple(segments)

    @cached_property
    def one_row_each(self) -> tuple[_OneRowEach, ...]:
        """The requests with one row in groups for torch, which are made when it is asked."""
        decoding = self.decoding
        num_keys = decoding.seq_lens - decoding.first_keys

        def run_of(request: int) -> slice | None:
            return run_of_slots(
                decoding.block_table[request],
                int(decoding.first_keys[request]),
                int(num_keys[request]),
                decoding.block_size,
            )

        groups = []
        requests = np.arange(len(num_keys))
        for members in groups_of_like_length(requests, num_keys, run_of):
            bias = None
            run = run_of(int(members[0])) if len(members) == 1 else None
            if run is not None:
                keys = Keys(run)
            else:
                slots, bias = padded_slots(
                    decoding.block_table[members],
                    decoding.first_keys[members],
                    num_keys[members],
                    decoding.block_size,
                )
                keys = Keys(torch.from_numpy(slots).to(decoding.device))
            is_all = decoding.is_all and len(members) == len(requests)
            rows = None if is_all else torch.from_numpy(decoding.rows[members])
            groups.append(
                _OneRowEach(
                    rows=None if rows is None else rows.to(decoding.device),
                    keys=keys,
                    bias=None if bias is None else torch.from_numpy(bias).to(decoding.device),
                )
            )
        return tuple(groups)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Attention of all rows; keys and values are in the cache already.

        query                     [T, H, D]
        key, value                [T, K, D]
        key_cache, value_cache    [B, S, K, D]
        returns                   [T, H, D]
        """

        def attend_group(group: _OneRowEach, rows: Tensor) -> Tensor:
            keys, values = group.keys.of(key_cache, value_cache)
            shape = (len(rows), -1, *keys.shape[1:])
            return attend_one_row_each(
                rows, keys.view(shape), values.view(shape), group.bias, scale, softcap
            )

        decoding = self.decoding
        is_compiled = len(decoding.rows) > 0 and _is_compiled(query, key_cache)
        groups = () if is_compiled else self.one_row_each
        if len(groups) == 1 and groups[0].rows is None:
            return attend_group(groups[0], query)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if is_compiled:
            paged_decode_cpu(
                query,
                key_cache,
                value_cache,
                decoding.block_table,
                decoding.first_keys,
                decoding.seq_lens,
                decoding.rows,
                scale,
                softcap,
                output=output,
            )
        for group in groups:
            assert group.rows is not None
            result = attend_group(group, query.index_select(0, group.rows))
            output.index_copy_(0, group.rows, result)
        self.attend_many_rows(
            query, key, value, key_cache, value_cache, scale, softcap, output=output
        )
        return output

    def attend_many_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        softcap: float | None,
        *,
        output: Tensor,
    ) -> None:
        """Attention of the requests with several rows, into their rows of `output` [T, H, D]."""
        if not len(self.prefilling.starts):
            return
        if _is_compiled(query, key_cache):
            attend_prompts_cpu(
                query,
                key_cache,
                value_cache,
                self.prompts,
                scale,
                self.prefilling.window,
                softcap,
                output=output,
            )
            return
        for segment in self.many_rows:
            rows = slice(segment.start, segment.end)
            if segment.keys is None:
                keys, values = key[rows], value[rows]
            else:
                keys, values = segment.keys.of(key_cache, value_cache)
            own = attend_many_rows(query[rows], keys, values, segment.bias, scale, softcap)
            if own.device.type == "cpu" and not math.isfinite(float(own.sum())):
                self._attend_apart(own, query[rows], keys, values, segment.bias, scale, softcap)
            output[rows] = own

    def _attend_apart(
        self,
        own: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Have rows of `own` not see a key that is no number and hidden from them.

        A weight of zero times what is no number is none, and earlier rows may be in blocks that
        another request shares. Rows that see such a key stay as they are.
        """
        is_bad = ~(keys.isfinite() & values.isfinite()).flatten(1).all(dim=1)
        keys, values = (each.masked_fill(is_bad[:, None, None], 0) for each in (keys, values))
        is_seen = torch.from_numpy(causal_bias(len(query), len(keys), self.prefilling.window) == 0)
        sees_none = ~(is_seen & is_bad).any(dim=1)
        without = attend_many_rows(query, keys, values, bias, scale, softcap)
        own[sees_none] = without[sees_none]


def _is_compiled(query: Tensor, key_cache: Tensor) -> bool:
    choice = decode_kernel_choice(key_cache.dtype, key_cache.device)
    return query.dtype == key_cache.dtype and choice.name == "numba"
