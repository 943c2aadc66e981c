"""Rows that attend by themselves: right against the definition, and with the same bits always."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lmscope_kernels.decode_attention_cpu import decode_kernel_choice
from lmscope_kernels.invariant_attention import InvariantRows
from lmscope_kernels.paged_attention import paged_attention_reference

SCALE = 0.17
# query heads, KV heads, head size, tokens per block
SHAPES = [(9, 3, 64, 16), (3, 3, 20, 7), (4, 1, 96, 1)]


@pytest.fixture(params=["numba", "torch"])
def kernel(request):
    has_numba = decode_kernel_choice(torch.float32, torch.device("cpu")).name == "numba"
    if request.param == "numba" and not has_numba:
        pytest.skip("numba is not installed")
    return request.param


class Pool:
    """Requests with random keys and values in blocks that lie anywhere."""

    def __init__(self, shape, seq_lens, seed=0):
        H, K, D, S = shape
        random = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.block_size = S
        counts = [-(-length // S) for length in seq_lens]
        ids = rng.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
        self.table = np.zeros((len(seq_lens), max(counts)), np.int32)
        for request, count in enumerate(counts):
            self.table[request, :count], ids = ids[:count], ids[count:]
        cache_shape = (sum(counts) + 1, S, K, D)
        self.key = torch.randn(cache_shape, generator=random)
        self.value = torch.randn(cache_shape, generator=random)
        self.key[0] = self.value[0] = 0
        self.queries = [torch.randn(length, H, D, generator=random) for length in seq_lens]

    def attend(self, parts, kernel, window=None):
        """parts: (request, first position, end); the rows of each, in their order."""
        positions = np.concatenate([np.arange(first, end) for _, first, end in parts])
        requests = np.concatenate([np.full(end - first, request) for request, first, end in parts])
        query = torch.cat([self.queries[request][first:end] for request, first, end in parts])
        rows = InvariantRows(requests, positions, self.table, self.block_size, kernel)
        output = rows.attend(query, self.key, self.value, SCALE, window)
        return torch.split(output, [end - first for _, first, end in parts])


@pytest.mark.parametrize("window", [None, 1, 5, 260])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_definition(shape, window, kernel):
    seq_lens, query_lens = [1, 30, 300, 600], [1, 30, 7, 45]
    pool = Pool(shape, seq_lens)
    parts = [
        (request, length - count, length)
        for request, (length, count) in enumerate(zip(seq_lens, query_lens, strict=True))
    ]

    got = torch.cat(pool.attend(parts, kernel, window))

    wanted = paged_attention_reference(
        torch.cat([pool.queries[request][first:end] for request, first, end in parts]),
        pool.key,
        pool.value,
        torch.from_numpy(pool.table),
        torch.tensor(seq_lens),
        torch.tensor([0, *np.cumsum(query_lens)]),
        SCALE,
        window,
    )
    error = torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted)
    assert error < 1e-6


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape, window, num_threads, kernel):
    length = 530
    pool = Pool(shape, [length, 280, 13, 513])
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        (whole,) = pool.attend([(0, 0, length)], kernel, window)
        for first, end in [(0, 1), (255, 256), (256, 257), (511, 513), (500, 530), (3, 60)]:
            alone = pool.attend([(0, first, end)], kernel, window)[0]
            assert torch.equal(alone, whole[first:end])
            company = [(1, 270, 280), (0, first, end), (2, 12, 13), (3, 512, 513)]
            assert torch.equal(pool.attend(company, kernel, window)[1], whole[first:end])
    finally:
        torch.set_num_threads(threads_before)


def test_what_lies_past_the_end_of_a_request_does_not_matter(kernel):
    pool = Pool(SHAPES[0], [33, 5])
    before = pool.attend([(0, 20, 33), (1, 4, 5)], kernel)
    for request, length in ((0, 33), (1, 5)):
        block = pool.table[request, (length - 1) // pool.block_size]
        for cache in (pool.key, pool.value):
            cache[block, length % pool.block_size :] = float("nan")

    after = pool.attend([(0, 20, 33), (1, 4, 5)], kernel)

    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_key_that_is_no_number_is_not_seen_by_the_rows_before_it(kernel, which, damage):
    pool = Pool((4, 2, 16, 4), [40])
    (expected,) = pool.attend([(0, 0, 40)], kernel)
    place = 25
    getattr(pool, which)[pool.table[0, place // 4], place % 4, 1, 3] = damage

    (got,) = pool.attend([(0, 0, 40)], kernel)

    assert torch.equal(got[:place], expected[:place])
    if damage is torch.nan:  # a key that is infinite may have no weight at all
        assert not got[place:].isfinite().all(dim=(1, 2)).any()
