"""Writes the keys and values of a batch of tokens into their slots of the paged cache.

Slot s is place s % S of block s // S. A step writes the whole batch before any of it is
attended to, so a request may read what another one stored in the same step.

T tokens in the batch, K KV heads, D head size, B blocks in the pool, S tokens per block.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["store_kv_reference"]


def store_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Each row goes to its slot; a row whose slot is -1 is padding and goes nowhere.

    key, value                [T, K, D]
    key_cache, value_cache    [B, S, K, D]  changed in place; contiguous
    slot_mapping              [T]           int64; no slot twice
    """
    is_token = slot_mapping >= 0
    slots = slot_mapping[is_token]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = rows[is_token].to(cache.dtype)
