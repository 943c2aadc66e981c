"""store_kv: rows go to their slots, padding goes nowhere."""

from __future__ import annotations

import torch
from lmscope_kernels.store_kv import store_kv_reference


def test_each_row_lands_in_its_slot_and_nothing_else_changes():
    key, value = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    key_cache, value_cache = torch.zeros(4, 2, 2, 5), torch.zeros(4, 2, 2, 5)

    # Slots 7, 2 and 3 are block 3 place 1, block 1 place 0 and block 1 place 1.
    store_kv_reference(key, value, key_cache, value_cache, torch.tensor([7, 2, 3]))

    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[3, 1], rows[0])
        assert torch.equal(cache[1], rows[1:])
        assert cache.count_nonzero() == rows.numel()


def test_padding_is_not_written():
    key_cache, value_cache = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    rows = torch.ones(3, 1, 4)

    store_kv_reference(rows, rows, key_cache, value_cache, torch.tensor([2, -1, -1]))

    assert key_cache.count_nonzero() == 4
    assert torch.equal(key_cache[1, 0], rows[0])


def test_rows_are_stored_in_the_type_of_the_cache():
    key_cache = torch.zeros(1, 2, 1, 2, dtype=torch.bfloat16)
    rows = torch.full((1, 1, 2), 1.0001)

    store_kv_reference(rows, rows, key_cache, key_cache.clone(), torch.tensor([1]))

    assert torch.equal(key_cache[0, 1, 0], torch.ones(2, dtype=torch.bfloat16))
