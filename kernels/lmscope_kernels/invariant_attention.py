"""Causal attention on a CPU in which a row has the same bits whatever is computed beside it.

The definition is `paged_attention_reference`. What is done for a row, and in which order, depends
on its own position, its own keys and its window, and on nothing else: not on the other requests,
not on how its prompt was cut into chunks, and not on whether its keys came from this step or from
an earlier one. So a prompt is not attended to as a whole: each of its rows goes the way of a
decoding request.

    numba    the loops of decode_attention_cpu, each row as a request of its own
    torch    calls of one shape, twelve rows in each, over whole tiles of 256 keys; a row's number
             of tiles follows from its position. For float32 without numba, and slower.

The two have other bits, so an engine uses one of them all its life.

T rows in the batch, R requests, H query heads, K KV heads, G = H / K, D head size, B blocks in the
pool, S tokens per block, L keys in whole tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope_kernels.decode_attention_cpu import paged_decode_cpu

__all__ = ["InvariantRows"]

_TILE = 256
# Rows in every call of torch: how its products are computed changes with the shape.
_ROWS_PER_CALL = 12


class InvariantRows:
    """The rows of one step, and the keys of each. Made once, used by all layers.

    requests       [T]               whose row it is
    positions      [T]               of the row in its request
    block_table    [R, max_blocks]   int32
    kernel         "numba" or "torch"
    """

    def __init__(
        self,
        requests: NDArray[np.integer],
        positions: NDArray[np.integer],
        block_table: NDArray[np.int32],
        block_size: int,
        kernel: str,
    ) -> None:
        assert kernel in ("numba", "torch")
        self._block_size = block_size
        self._seq_lens = (positions + 1).astype(np.int32)
        self._table_of_rows = np.ascontiguousarray(block_table[requests], dtype=np.int32)
        self._requests = requests
        self._is_numba = kernel == "numba"
        self._rows = np.arange(len(positions))
        self._calls: dict[int | None, list[_Call]] = {}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attention of all rows; their own keys and values are in the cache already.

        query                     [T, H, D]      float32
        key_cache, value_cache    [B, S, K, D]   float32, contiguous; zeros in block 0
        window                    most keys of a row, its own among them; None: all
        returns                   [T, H, D]
        """
        output = torch.empty(query.shape)
        if self._is_numba:
            paged_decode_cpu(
                query,
                key_cache,
                value_cache,
                self._table_of_rows,
                self._first_keys(window),
                self._seq_lens,
                self._rows,
                scale,
                output=output,
            )
            return output
        if window not in self._calls:
            self._calls[window] = list(self._make_calls(self._first_keys(window)))
        keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        for call in self._calls[window]:
            call.attend(query, keys, values, scale, output)
        return output

    def _first_keys(self, window: int | None) -> NDArray[np.int32]:
        if window is None:
            return np.zeros_like(self._seq_lens)
        first_keys: NDArray[np.int32] = np.maximum(self._seq_lens - np.int32(window), np.int32(0))
        return first_keys

    def _make_calls(self, first_keys: NDArray[np.int32]) -> Iterator[_Call]:
        """The rows in groups with the same number of tiles, _ROWS_PER_CALL at a time."""
        first_tiles = first_keys // _TILE
        num_tiles = -(-self._seq_lens // _TILE) - first_tiles
        for count in np.unique(num_tiles).tolist():
            alone = []
            same = np.flatnonzero(num_tiles == count)
            # Rows with the very same tiles read them without a copy for each.
            kinds = np.stack((self._requests[same], first_tiles[same]))
            _, kind_of_row = np.unique(kinds, axis=1, return_inverse=True)
            for kind in range(int(kind_of_row.max()) + 1):
                members = same[kind_of_row.ravel() == kind]
                if len(members) == 1:
                    alone.append(int(members[0]))
                    continue
                for rows in _split(members):
                    yield self._call(rows, first_keys, int(first_tiles[rows[0]]), count, True)
            for rows in _split(np.array(alone, dtype=np.int64)):
                yield self._call(rows, first_keys, None, count, False)

    def _call(
        self,
        rows: NDArray[np.int64],
        first_keys: NDArray[np.int32],
        first_tile: int | None,
        num_tiles: int,
        is_shared: bool,
    ) -> _Call:
        padded = np.resize(rows, _ROWS_PER_CALL)
        seq_lens, first_keys = self._seq_lens[padded, None], first_keys[padded, None]
        starts = first_keys // _TILE * _TILE
        positions = starts + np.arange(num_tiles * _TILE)
        is_hidden = (positions < first_keys) | (positions >= seq_lens)
        longest = seq_lens.max() if is_shared else seq_lens
        # Past the end of a request lies what may not be a number; block 0 holds zeros.
        is_past = positions >= longest
        places = np.where(is_past, 0, positions)
        if is_shared:
            places, is_past, padded_table = places[:1], is_past[:1], self._table_of_rows[rows[:1]]
        else:
            padded_table = self._table_of_rows[padded]
        blocks = np.take_along_axis(padded_table, places // self._block_size, axis=1)
        slots = blocks.astype(np.int64) * self._block_size + places % self._block_size
        slots[is_past] = 0
        bias = np.where(is_hidden, np.float32(-np.inf), np.float32(0))
        return _Call(
            len(rows),
            torch.from_numpy(padded.astype(np.int64)),
            torch.from_numpy(slots),
            torch.from_numpy(bias)[:, None, None],
        )


class _Call:
    """Rows that torch attends for in products of one shape.

    num_rows    of _ROWS_PER_CALL that are meant; the others fill up
    rows        [_ROWS_PER_CALL]            their places in the batch
    slots       [_ROWS_PER_CALL or 1, L]    1: all rows have these keys
    bias        [_ROWS_PER_CALL, 1, 1, L]   0 or -inf
    """

    def __init__(self, num_rows: int, rows: Tensor, slots: Tensor, bias: Tensor) -> None:
        self._num_rows = num_rows
        self._rows = rows
        self._slots = slots
        self._bias = bias

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, output: Tensor
    ) -> None:
        """Write the rows' results into `output`; keys and values [B * S, K, D]."""
        num_kv_heads, head_size = keys.shape[1:]
        grouped = query.index_select(0, self._rows).view(
            _ROWS_PER_CALL, num_kv_heads, -1, head_size
        )
        own_keys, own_values = (
            each.index_select(0, self._slots.flatten())
            .view(*self._slots.shape, num_kv_heads, head_size)
            .expand(_ROWS_PER_CALL, -1, -1, -1)
            for each in (keys, values)
        )
        result = self._weighted(grouped, own_keys, own_values, scale)
        if not bool(result.isfinite().all()):
            # A weight of zero times what is no number is none, and a row that such a key is hidden
            # from must not see it. Zeros in its place give that row the bits it always has.
            is_bad = ~(own_keys.isfinite() & own_values.isfinite()).flatten(2).all(dim=2)
            own_keys, own_values = (
                each.masked_fill(is_bad[:, :, None, None], 0) for each in (own_keys, own_values)
            )
            sees_none = ~((self._bias[:, 0, 0] == 0) & is_bad).any(dim=1)
            result[sees_none] = self._weighted(grouped, own_keys, own_values, scale)[sees_none]
        meant = self._num_rows
        output.index_copy_(0, self._rows[:meant], result.flatten(1, 2)[:meant])

    def _weighted(
        self, grouped: Tensor, own_keys: Tensor, own_values: Tensor, scale: float
    ) -> Tensor:
        """Sums of values by softmax.

        grouped                 [_ROWS_PER_CALL, K, G, D]
        own_keys, own_values    [_ROWS_PER_CALL, L, K, D]
        """
        num_kv_heads = grouped.shape[1]
        scores = torch.empty(*grouped.shape[:3], self._slots.shape[1])
        for head in range(num_kv_heads):
            scores[:, head] = torch.bmm(grouped[:, head], own_keys[:, :, head].transpose(1, 2))
        weights = scores.mul_(scale).add_(self._bias).softmax(dim=-1)
        result = torch.empty_like(grouped)
        for head in range(num_kv_heads):
            result[:, head] = torch.bmm(weights[:, head], own_values[:, :, head])
        return result


def _split(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows[start : start + _ROWS_PER_CALL] for start in range(0, len(rows), _ROWS_PER_CALL)]
