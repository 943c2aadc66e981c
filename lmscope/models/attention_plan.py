"""AttentionPlan: which keys the rows of a step attend to, worked out once for all layers.

Requests with one row each are attended to together, padded to a common length; a request with
several rows alone. A window only leaves keys out: the cache keeps them, and a plan for a window
never reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lmscope_kernels.paged_attention import attend_many_rows, attend_one_row_each
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["AttentionPlan"]

# Rows times tokens of padding that cost as much as one more call per layer.
_PADDING_PER_CALL = 512


@dataclass(frozen=True)
class _OneRowEach:
    """Requests that have one query row and are attended to together.

    rows     [R]            their rows in the batch; None when they are all of it, in order
    slots    [R * L]        where their keys lie; slot 0, in the null block, past the end
    bias     [R, 1, 1, L]   0 or -inf; None when all have L keys
    """

    rows: Tensor | None
    slots: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _ManyRows:
    """One request with several query rows.

    start, end    its rows in the batch
    slots         [L]          where its keys lie; None when they are the rows themselves
    bias          [rows, L]    0 or -inf; None when each row attends to all rows up to its own
    """

    start: int
    end: int
    slots: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Who attends to what in one step, for all layers with the same window."""

    one_row_each: tuple[_OneRowEach, ...]
    many_rows: tuple[_ManyRows, ...]

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

        def to_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        query_lens = np.diff(query_start_loc)
        # The first key that any row of a request attends to. Rows of later positions attend to
        # less, which the bias says.
        if window is None:
            first_keys = np.zeros_like(seq_lens)
        else:
            first_keys = np.maximum(seq_lens - query_lens + 1 - window, 0)
        num_keys = seq_lens - first_keys

        one_row_each = []
        for requests in _groups_of_like_length(np.flatnonzero(query_lens == 1), num_keys):
            slots, bias = _padded_slots(
                block_table[requests], first_keys[requests], num_keys[requests], block_size
            )
            is_all = len(requests) == query_start_loc[-1]
            one_row_each.append(
                _OneRowEach(
                    rows=None if is_all else to_device(query_start_loc[requests].astype(np.int64)),
                    slots=to_device(slots),
                    bias=None if bias is None else to_device(bias),
                )
            )
        many_rows = []
        for request in np.flatnonzero(query_lens > 1).tolist():
            start, end = query_start_loc[request : request + 2].tolist()
            num_rows, seq_len = end - start, int(seq_lens[request])
            segment_slots = segment_bias = None
            is_whole = num_rows == seq_len
            if not is_whole:
                only = [request]
                slots, _ = _padded_slots(
                    block_table[only], first_keys[only], num_keys[only], block_size
                )
                segment_slots = to_device(slots)
            if with_bias or not is_whole or (window is not None and window < seq_len):
                segment_bias = to_device(_bias(num_rows, int(num_keys[request]), window))
            many_rows.append(_ManyRows(start, end, segment_slots, segment_bias))
        return cls(tuple(one_row_each), tuple(many_rows))

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
        if len(self.one_row_each) == 1 and self.one_row_each[0].rows is None:
            group = self.one_row_each[0]
            return attend_one_row_each(
                query, key_cache, value_cache, group.slots, group.bias, scale, softcap
            )
        output = torch.empty_like(query)
        for group in self.one_row_each:
            assert group.rows is not None
            result = attend_one_row_each(
                query.index_select(0, group.rows),
                key_cache,
                value_cache,
                group.slots,
                group.bias,
                scale,
                softcap,
            )
            output.index_copy_(0, group.rows, result)
        for segment in self.many_rows:
            rows = slice(segment.start, segment.end)
            if segment.slots is None:
                keys, values = key[rows], value[rows]
            else:
                keys = key_cache.flatten(0, 1).index_select(0, segment.slots)
                values = value_cache.flatten(0, 1).index_select(0, segment.slots)
            output[rows] = attend_many_rows(query[rows], keys, values, segment.bias, scale, softcap)
        return output


def _groups_of_like_length(
    requests: NDArray[np.intp], num_keys: NDArray[np.int32]
) -> list[NDArray[np.intp]]:
    """`requests` in groups, so that padding each to its longest wastes little.

    One call costs as much as some padding; a new group begins where the padding that it
    saves is more.
    """
    if len(requests) == 0:
        return []
    lengths = num_keys[requests]
    if (int(lengths.max()) - int(lengths.min())) * len(requests) <= _PADDING_PER_CALL:
        return [requests]
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    borders = []
    longest = longest_first[0]
    for index, length in enumerate(longest_first):
        if (longest - length) * (len(longest_first) - index) > _PADDING_PER_CALL:
            borders.append(index)
            longest = length
    return [requests[np.sort(part)] for part in np.split(order, borders)]


def _padded_slots(
    block_table: NDArray[np.int32],
    first_keys: NDArray[np.int32],
    num_keys: NDArray[np.int32],
    block_size: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Slots [R * L] of num_keys tokens from the first, and the bias [R, 1, 1, L] for the rest.

    Past its end a request reads slot 0, which is in the null block: stale content of a block
    could be NaN, and NaN times a weight of zero is NaN.
    """
    index = np.arange(int(num_keys.max()))
    is_past = index >= num_keys[:, None]
    has_past = bool(is_past.any())
    if first_keys.any():
        position = first_keys[:, None] + index
        # Past the end there may be no block, not even in the table.
        position[is_past] = 0
        blocks = np.take_along_axis(block_table, position // block_size, axis=1)
    else:
        position = index
        blocks = block_table[:, position // block_size]
    slots = blocks.astype(np.int64)
    slots *= block_size
    slots += position % block_size
    if not has_past:
        return slots.ravel(), None
    slots[is_past] = 0
    bias = np.where(is_past, np.float32(-np.inf), np.float32(0))
    return slots.ravel(), bias[:, None, None, :]


def _bias(num_rows: int, num_keys: int, window: int | None) -> NDArray[np.float32]:
    """[num_rows, num_keys]: -inf for keys that are later than the row or outside its window.

    The last row and the last key are the newest token.
    """
    position = np.arange(num_keys - num_rows, num_keys)[:, None]
    key_position = np.arange(num_keys)
    is_hidden = key_position > position
    if window is not None:
        is_hidden |= key_position <= position - window
    return np.where(is_hidden, np.float32(-np.inf), np.float32(0))
