"""Paged attention: the reference against dense attention, the torch paths against the reference."""

from __future__ import annotations

import pytest
import torch
from lmscope_kernels.paged_attention import (
    attend_many_rows,
    attend_one_row_each,
    paged_attention_reference,
)

# (query heads, KV heads, head size); the second is the demo model's, no power of two anywhere.
SHAPES = [(4, 4, 16), (9, 3, 64), (8, 1, 32), (6, 2, 20)]


def make_requests(seq_lens, num_kv_heads, head_size, block_size):
    """Keys and values of requests, each [L, K, D], and the same in a shuffled cache."""
    max_blocks = -(-max(seq_lens) // block_size)
    block_ids = 1 + torch.randperm(len(seq_lens) * max_blocks)
    block_table = torch.zeros(len(seq_lens), max_blocks, dtype=torch.int32)
    shape = (1 + len(block_ids), block_size, num_kv_heads, head_size)
    # What no request wrote is NaN, so reading it shows.
    key_cache, value_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    keys, values = [], []
    for request, seq_len in enumerate(seq_lens):
        own = block_ids[request * max_blocks : (request + 1) * max_blocks]
        num_blocks = -(-seq_len // block_size)
        block_table[request, :num_blocks] = own[:num_blocks]
        keys.append(torch.randn(seq_len, num_kv_heads, head_size))
        values.append(torch.randn(seq_len, num_kv_heads, head_size))
        for position in range(seq_len):
            place = own[position // block_size], position % block_size
            key_cache[place] = keys[-1][position]
            value_cache[place] = values[-1][position]
    return keys, values, key_cache, value_cache, block_table


def dense_attention(query, key, value, scale, window=None, softcap=None):
    """Causal attention written out in float64, row by row and head by head."""
    num_rows, num_heads, _ = query.shape
    output = torch.empty_like(query, dtype=torch.float64)
    for row in range(num_rows):
        end = key.shape[0] - num_rows + row + 1
        visible = slice(0 if window is None else max(end - window, 0), end)
        for head in range(num_heads):
            kv_head = head * key.shape[1] // num_heads
            scores = key[visible, kv_head].double() @ query[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[row, head] = scores.softmax(dim=0) @ value[visible, kv_head].double()
    return output


def relative_error(output, expected):
    return ((output.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (8, None), (None, 2.0), (8, 2.0)]
)
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SHAPES)
def test_the_reference_is_dense_attention_over_a_shuffled_cache(
    num_heads, num_kv_heads, head_size, block_size, window, softcap
):
    seq_lens, query_lens = [5, 33, 1, 16], [1, 20, 1, 16]  # decode, chunk, new, whole prompt
    keys, values, key_cache, value_cache, block_table = make_requests(
        seq_lens, num_kv_heads, head_size, block_size
    )
    query = torch.randn(sum(query_lens) + 2, num_heads, head_size)  # two rows of padding
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()

    output = paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_table,
        torch.tensor(seq_lens),
        starts,
        0.3,
        window,
        softcap,
    )

    for request, (start, length) in enumerate(zip(starts.tolist(), query_lens, strict=False)):
        rows = slice(start, start + length)
        own = keys[request], values[request]
        expected = dense_attention(query[rows], *own, 0.3, window, softcap)
        assert relative_error(output[rows], expected) < 1e-6
    assert output[sum(query_lens) :].count_nonzero() == 0


def test_the_reference_passes_over_a_request_without_rows():
    keys, values, key_cache, value_cache, block_table = make_requests([3, 4], 2, 8, 2)
    query = torch.randn(1, 2, 8)

    output = paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_table,
        torch.tensor([0, 4]),
        torch.tensor([0, 0, 1]),
        1.0,
    )

    assert relative_error(output, dense_attention(query, keys[1], values[1], 1.0)) < 1e-6


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SHAPES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_one_row_each_equals_the_reference(num_heads, num_kv_heads, head_size, block_size, softcap):
    seq_lens = [7, 40, 1]
    _, _, key_cache, value_cache, block_table = make_requests(
        seq_lens, num_kv_heads, head_size, block_size
    )
    key_cache[0], value_cache[0] = 0, 0  # the null block, where padding points to
    query = torch.randn(3, num_heads, head_size)
    position = torch.arange(40)
    slots = block_table[:, position // block_size] * block_size + position % block_size
    is_past = position >= torch.tensor(seq_lens)[:, None]
    bias = torch.zeros(3, 40).masked_fill(is_past, -torch.inf)[:, None, None]
    slots[is_past] = 0

    output = attend_one_row_each(
        query,
        key_cache.flatten(0, 1)[slots],
        value_cache.flatten(0, 1)[slots],
        bias,
        0.2,
        softcap,
    )

    expected = paged_attention_reference(
        query,
        key_cache,
        value_cache,
        block_table,
        torch.tensor(seq_lens),
        torch.arange(4),
        0.2,
        softcap=softcap,
    )
    assert relative_error(output, expected.double()) < 1e-6


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SHAPES)
@pytest.mark.parametrize(("num_rows", "num_keys"), [(12, 12), (5, 30), (2, 3)])
def test_many_rows_equal_dense_attention(
    num_heads, num_kv_heads, head_size, num_rows, num_keys, softcap
):
    query = torch.randn(num_rows, num_heads, head_size)
    key = torch.randn(num_keys, num_kv_heads, head_size)
    value = torch.randn(num_keys, num_kv_heads, head_size)
    position = torch.arange(num_keys - num_rows, num_keys)
    is_later = torch.arange(num_keys) > position[:, None]
    bias = torch.zeros(num_rows, num_keys).masked_fill(is_later, -torch.inf)
    if num_rows == num_keys and softcap is None:
        bias = None

    output = attend_many_rows(query, key, value, bias, 0.25, softcap)

    expected = dense_attention(query, key, value, 0.25, softcap=softcap)
    assert relative_error(output, expected) < 1e-6


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("num_keys", [7, 9])
def test_more_rows_than_are_attended_to_at_a_time(monkeypatch, num_keys, softcap):
    query = torch.randn(7, 6, 8)
    key, value = torch.randn(num_keys, 2, 8), torch.randn(num_keys, 2, 8)
    is_later = torch.ones(7, num_keys).triu(num_keys - 6) > 0
    bias = torch.zeros(7, num_keys).masked_fill(is_later, -torch.inf)
    at_once = attend_many_rows(query, key, value, bias, 0.25, softcap)
    monkeypatch.setattr("lmscope_kernels.paged_attention._ROWS_AT_A_TIME", 3)

    in_parts = attend_many_rows(query, key, value, bias, 0.25, softcap)

    torch.testing.assert_close(in_parts, at_once)
    expected = dense_attention(query, key, value, 0.25, softcap=softcap)
    assert relative_error(at_once, expected) < 1e-6


def test_a_soft_cap_keeps_scores_small():
    """Without the cap the first key would have all of the weight."""
    query, key = torch.tensor([[[100.0]]]), torch.tensor([[[1.0]], [[0.0]]])
    value, bias = torch.tensor([[[1.0]], [[0.0]]]), torch.zeros(1, 2)

    output = attend_many_rows(query, key, value, bias, 1.0, 3.0)

    assert output.item() == pytest.approx(torch.sigmoid(torch.tensor(3.0)).item())
