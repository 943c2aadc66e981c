"""store_kv: the kernel leaves the cache as the reference does, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.store_kv import store_kv, store_kv_reference

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import (
    DEVICE,
    DTYPES,
    IS_INTERPRETED,
    SHAPES,
    ints,
    poisoned,
    randn,
    relative_error,
)

NUM_ROWS = 6 if IS_INTERPRETED else 2048


def shuffled_slots(num_rows, num_slots):
    """Slots in no order, two rows of padding among them."""
    slots = torch.randperm(num_slots)[:num_rows]
    slots[[1, num_rows - 1]] = -1
    return slots.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 24, 32])
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [shape[1:] for shape in SHAPES])
def test_the_cache_is_what_the_reference_leaves(num_kv_heads, head_size, block_size, dtype):
    num_blocks = 2 + NUM_ROWS // block_size
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    key, value = (randn(NUM_ROWS, num_kv_heads, head_size, dtype=dtype) for _ in range(2))
    slots = shuffled_slots(NUM_ROWS, num_blocks * block_size)
    caches, expected = ([poisoned(*shape, dtype=dtype) for _ in range(2)] for _ in range(2))
    norm, expected_norm = (poisoned(num_blocks * block_size, num_kv_heads) for _ in range(2))

    store_kv(key, value, *caches, slots, norm, check=True)

    store_kv_reference(key, value, *expected, slots, expected_norm)
    for cache, reference in zip(caches, expected, strict=True):
        # Equal in every slot, those that stay NaN among them.
        torch.testing.assert_close(cache, reference, rtol=0, atol=0, equal_nan=True)
    is_written = ~expected_norm.isnan()
    assert torch.equal(norm.isnan(), expected_norm.isnan())
    assert is_written.sum() == (NUM_ROWS - 2) * num_kv_heads
    assert relative_error(norm[is_written], expected_norm[is_written]) < 1e-5


def test_rows_of_one_projection_are_read_where_they_lie():
    """Query, key and value of a token are one row; nothing is copied apart."""
    projected = randn(NUM_ROWS, 4 + 2 + 2, 64)
    key, value = projected[:, 4:6], projected[:, 6:]
    caches, expected = ([poisoned(NUM_ROWS, 16, 2, 64) for _ in range(2)] for _ in range(2))
    slots = shuffled_slots(NUM_ROWS, NUM_ROWS * 16)

    store_kv(key, value, *caches, slots)

    store_kv_reference(key, value, *expected, slots)
    for cache, reference in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, reference, rtol=0, atol=0, equal_nan=True)


def test_the_cache_may_be_a_view_of_a_larger_pool():
    """Keys and values of a block side by side, as one pool for both has them."""
    pool, expected = poisoned(4, 2, 16, 2, 64), poisoned(2, 4, 16, 2, 64)
    key, value = randn(4, 2, 64), randn(4, 2, 64)
    slots = ints([60, 3, 17, 40], torch.int64)

    store_kv(key, value, pool[:, 0], pool[:, 1], slots)

    store_kv_reference(key, value, expected[0], expected[1], slots)
    torch.testing.assert_close(pool.transpose(0, 1), expected, rtol=0, atol=0, equal_nan=True)


def test_a_slot_outside_of_the_pool_is_found_before_the_launch():
    cache, rows = poisoned(2, 16, 1, 64), randn(3, 1, 64)

    with pytest.raises(ValueError, match=r"row 1 of the batch goes to slot 32.*slots 0 to 31"):
        store_kv(rows, rows, cache, cache, ints([3, 32, -1], torch.int64), check=True)

    assert cache.isnan().all()


def test_what_the_kernel_cannot_take_is_refused():
    cache, rows = randn(2, 16, 1, 64), randn(1, 1, 64)
    slots = ints([0], torch.int64)
    with pytest.raises(ValueError, match=r"key_cache has strides .*multiples of 16"):
        store_kv(rows, rows, *(randn(2, 16, 1, 72)[..., :64] for _ in range(2)), slots)
    with pytest.raises(ValueError, match=r"key has stride 2 in its last dimension"):
        store_kv(randn(1, 1, 128)[..., ::2], rows, cache, cache, slots)
    with pytest.raises(ValueError, match=r"value is \(2, 1, 64\)"):
        store_kv(rows, randn(2, 1, 64), cache, cache, slots)
    with pytest.raises(ValueError, match=r"key_cache is \(2, 16, 1, 32\)"):
        store_kv(rows, rows, cache[..., :32], cache, slots)
    with pytest.raises(TypeError, match=r"slot_mapping is torch\.int32"):
        store_kv(rows, rows, cache, cache, slots.int())
    with pytest.raises(ValueError, match=r"key_norm is \(32, 2\), must be \(32, 1\)"):
        store_kv(rows, rows, cache, cache, slots, randn(32, 2))
