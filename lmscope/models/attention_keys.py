"""Where the keys of rows lie, for attention by torch: runs of slots, slots to gather, and biases.

Rows whose keys are gathered together are padded to a common length, so they are grouped with care.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Keys", "causal_bias", "groups_of_like_length", "padded_slots", "run_of_slots"]

# Rows times tokens of padding that cost as much as one more call per layer.
_PADDING_PER_CALL = 512
# From so many consecutive keys on, a call of its own that copies none of them is cheaper.
_KEYS_PER_CALL = 256


class Keys:
    """Where the keys and values of some rows lie: a run of slots to view, or slots to gather.

    slots    [R * L], slot 0, in the null block, past the end of a request; or a slice
    """

    def __init__(self, slots: Tensor | slice) -> None:
        self.slots = slots
        # Filled again by each layer: fresh memory of this size costs more than the copy.
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def of(self, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R * L, K, D], to be read before the next layer asks."""
        keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        if isinstance(self.slots, slice):
            return keys[self.slots], values[self.slots]
        if self._key is None or self._value is None:
            self._key = keys.new_empty(len(self.slots), *keys.shape[1:])
            self._value = torch.empty_like(self._key)
        # Selecting whole rows of K * D numbers is a memory copy; indexing [B, S, K, D] by a
        # tensor of slots gives the same and takes half as long again.
        for cache, rows in ((keys, self._key), (values, self._value)):
            torch.index_select(cache.flatten(1), 0, self.slots, out=rows.view(len(rows), -1))
        return self._key, self._value


def groups_of_like_length(
    requests: NDArray[np.intp],
    num_keys: NDArray[np.int32],
    run_of: Callable[[int], slice | None],
) -> list[NDArray[np.intp]]:
    """`requests` in groups, so that padding each to its longest wastes little.

    One call costs as much as some padding; a new group begins where the padding that it
    saves is more. A request with many keys in a run needs no copy of them, so it goes alone.
    """
    alone = [
        request
        for request in requests.tolist()
        if num_keys[request] >= _KEYS_PER_CALL and run_of(request) is not None
    ]
    if alone:
        others = np.setdiff1d(requests, alone)
        groups = groups_of_like_length(others, num_keys, lambda request: None)
        return [np.array([request]) for request in alone] + groups
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


def run_of_slots(
    block_ids: NDArray[np.int32], first_key: int, num_keys: int, block_size: int
) -> slice | None:
    """The slots of num_keys tokens from the first, where their blocks are consecutive."""
    first_block, end = first_key // block_size, first_key + num_keys
    own = block_ids[first_block : -(-end // block_size)]
    if len(own) > 1 and not bool((np.diff(own) == 1).all()):
        return None
    start = (int(own[0]) - first_block) * block_size
    return slice(start + first_key, start + end)


def padded_slots(
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


def causal_bias(num_rows: int, num_keys: int, window: int | None) -> NDArray[np.float32]:
    """[num_rows, num_keys]: -inf for keys that are later than the row or outside its window.

    The last row and the last key are the newest token.
    """
    position = np.arange(num_keys - num_rows, num_keys)[:, None]
    key_position = np.arange(num_keys)
    is_hidden = key_position > position
    if window is not None:
        is_hidden |= key_position <= position - window
    return np.where(is_hidden, np.float32(-np.inf), np.float32(0))
