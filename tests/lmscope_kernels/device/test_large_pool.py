"""Blocks so far into a pool that their place does not fit into 32 bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.paged_attention import paged_attention_reference
from lmscope_kernels.paged_decode import DecodeWorkspace, paged_decode
from lmscope_kernels.store_kv import store_kv
from lmscope_kernels.unified_attention import paged_attention
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DEVICE, LIMITS, ints, poisoned, randn, relative_error

DTYPE = torch.float16
NUM_BLOCKS, S, K, D = 3, 16, 1, 64
FAR = NUM_BLOCKS - 1
# Numbers from one block to the next: 32 bits hold the stride, and not where block 2 begins.
STRIDE = 1 << 30


@pytest.fixture
def far_caches() -> tuple[Tensor, Tensor]:
    """Keys and values side by side; of the pool's 4 GB a page or two are ever touched on a CPU."""
    pool = torch.empty(FAR * STRIDE + 2 * S * K * D, dtype=DTYPE, device=DEVICE)

    def cache(offset: int) -> Tensor:
        return pool.as_strided((NUM_BLOCKS, S, K, D), (STRIDE, K * D, D, 1), offset)

    return cache(0), cache(S * K * D)


def test_keys_and_values_are_stored_there(far_caches):
    key, value = randn(2, K, D, dtype=DTYPE), randn(2, K, D, dtype=DTYPE)

    store_kv(key, value, *far_caches, ints([FAR * S + 3, FAR * S], torch.int64), check=True)

    for cache, rows in zip(far_caches, (key, value), strict=True):
        assert torch.equal(cache[FAR, 3], rows[0])
        assert torch.equal(cache[FAR, 0], rows[1])


def test_they_are_read_from_there(far_caches):
    seq_len = 13
    for cache in far_caches:
        cache[FAR, :seq_len] = randn(seq_len, K, D, dtype=DTYPE)
    query = randn(1, 2, D, dtype=DTYPE)
    table, seq_lens, starts = ints([FAR]).view(1, 1), ints([seq_len]), ints([0, 1])
    workspace = DecodeWorkspace.allocate(1, 2, D, S, DEVICE)

    unified, decoded = (poisoned(1, 2, D, dtype=DTYPE) for _ in range(2))
    paged_attention(query, *far_caches, table, seq_lens, starts, 0.2, out=unified)
    paged_decode(query, *far_caches, table, seq_lens, 0.2, workspace=workspace, out=decoded)

    near = (cache[FAR:].double() for cache in far_caches)
    expected = paged_attention_reference(
        query.double(), *near, torch.zeros_like(table), seq_lens, starts, 0.2
    )
    assert relative_error(unified, expected) < LIMITS[DTYPE]
    assert relative_error(decoded, expected) < LIMITS[DTYPE]
