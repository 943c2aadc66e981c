"""The attention function: random batches against the kernel's reference, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lmscope_kernels.paged_attention import paged_attention_reference
from lmscope_kernels.store_kv import store_kv_reference
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from lmscope.models.attention import ATTENTION_NAME, BatchView, KVCache, paged_attention

CPU = torch.device("cpu")


def make_batch(
    seq_lens, query_lens, block_size, padded_tokens=0, padded_reqs=0, num_blocks=200, **layers
):
    """A BatchView over shuffled block tables, and the cache that it belongs to."""
    rng = np.random.default_rng(0)
    max_blocks = -(-max(seq_lens) // block_size)
    ids = 1 + rng.permutation(num_blocks - 1)[: len(seq_lens) * max_blocks]
    table = ids.reshape(len(seq_lens), max_blocks).astype(np.int32)
    positions, slots = [], []
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            positions.append(position)
            slots.append(table[row, position // block_size] * block_size + position % block_size)
    more_tokens = padded_tokens - len(positions)
    more_reqs = padded_reqs - len(seq_lens)
    if more_tokens > 0:
        positions += [0] * more_tokens
        slots += [-1] * more_tokens
    starts = np.cumsum([0, *query_lens]).tolist()
    if more_reqs > 0:
        starts += [starts[-1]] * more_reqs
        seq_lens = [*seq_lens, *[0] * more_reqs]
        table = np.concatenate((table, np.zeros((more_reqs, max_blocks), dtype=np.int32)))
    return BatchView.build(
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_start_loc=np.array(starts, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=table,
        block_size=block_size,
        device=CPU,
        **layers,
    )


def attend_and_expect(
    batch,
    num_heads,
    num_kv_heads,
    head_size,
    block_size,
    num_blocks=200,
    window=None,
    softcap=None,
):
    """What a layer gets, and what the two references give for the same."""
    torch.manual_seed(0)
    num_rows = len(batch.positions)
    query = torch.randn(num_rows, num_heads, head_size)
    key = torch.randn(num_rows, num_kv_heads, head_size)
    value = torch.randn(num_rows, num_kv_heads, head_size)
    key_cache = torch.randn(num_blocks, block_size, num_kv_heads, head_size)
    value_cache = torch.randn(num_blocks, block_size, num_kv_heads, head_size)
    expected_caches = key_cache.clone(), value_cache.clone()
    store_kv_reference(key, value, *expected_caches, batch.slot_mapping)
    expected = paged_attention_reference(
        query,
        *expected_caches,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        0.3,
        window,
        softcap,
    )

    output = batch.attend(query, key, value, key_cache, value_cache, 0.3, window, softcap)

    assert torch.equal(key_cache, expected_caches[0])
    assert torch.equal(value_cache, expected_caches[1])
    return output, expected


BATCHES = [
    ([9, 1, 17], [1, 1, 1]),  # decode, one of them at its first token
    ([6, 6], [1, 1]),  # decode without padding
    ([5], [5]),  # a whole prompt
    ([12, 30], [5, 30]),  # a later chunk, a whole prompt
    ([7, 20, 3, 11, 1], [1, 4, 3, 1, 1]),  # all of it
]


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (4, 4, 16)])
@pytest.mark.parametrize(("seq_lens", "query_lens"), BATCHES)
def test_equals_the_references(
    seq_lens, query_lens, num_heads, num_kv_heads, head_size, block_size
):
    batch = make_batch(seq_lens, query_lens, block_size)

    output, expected = attend_and_expect(batch, num_heads, num_kv_heads, head_size, block_size)

    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 16, 17, 100])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(("seq_lens", "query_lens"), BATCHES)
def test_a_window_and_a_soft_cap_equal_the_references(
    seq_lens, query_lens, block_size, window, softcap
):
    layers = {"windows": (window, None), "is_softcapped": softcap is not None}
    batch = make_batch(seq_lens, query_lens, block_size, **layers)

    for used in (window, None):
        output, expected = attend_and_expect(
            batch, 6, 2, 16, block_size, window=used, softcap=softcap
        )
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)


def test_keys_outside_the_window_are_not_read():
    """A cache that is NaN there shows it: NaN times a weight of zero is NaN."""
    batch = make_batch([30, 12, 25], [1, 6, 1], 4, windows=(5,))
    key_cache, value_cache = (torch.zeros(200, 4, 2, 16) for _ in range(2))
    for request, first in enumerate([25, 2, 20]):
        for position in range(first):
            place = batch.block_table[request, position // 4], position % 4
            key_cache[place] = value_cache[place] = torch.nan
    rows = torch.randn(8, 2, 16)

    output = batch.attend(rows, rows, rows, key_cache, value_cache, 0.3, 5)

    assert output.isfinite().all()


def test_windows_that_hide_nothing_share_one_plan():
    batch = make_batch([9, 30], [1, 30], 4, windows=(8, None, 30, 64))

    plans = batch._plans
    assert plans[None] is plans[30] is plans[64]
    assert plans[8] is not plans[None]


def test_padding_is_neither_stored_nor_attended_to():
    batch = make_batch([9, 4], [1, 4], 4, padded_tokens=8, padded_reqs=4)

    output, expected = attend_and_expect(batch, 6, 2, 16, 4)

    assert (batch.num_tokens, batch.num_reqs) == (5, 2)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)
    assert output.shape[0] == 8
    assert output[5:].count_nonzero() == 0


def test_requests_of_very_different_lengths_are_not_all_padded_to_the_longest():
    seq_lens = [600, 20, 580, 1, 25, 130]
    batch = make_batch(seq_lens, [1] * 6, 16, num_blocks=300)

    output, expected = attend_and_expect(batch, 9, 3, 64, 16, num_blocks=300)

    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)
    plan = batch._plans[None]
    assert sum(len(group.keys.slots) for group in plan.one_row_each) < sum(seq_lens) + 512


def test_a_cache_begins_with_zeros_in_the_shape_of_blocks():
    cache = KVCache.allocate(2, 5, 4, 3, 8, torch.bfloat16, CPU)

    assert len(cache.key) == len(cache.value) == 2
    for tensor in (*cache.key, *cache.value):
        assert tensor.shape == (5, 4, 3, 8)
        assert tensor.dtype == torch.bfloat16
        assert tensor.count_nonzero() == 0


def test_transformers_knows_the_function_by_name():
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention


def test_a_forward_without_a_batch_says_what_to_do():
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    config._attn_implementation = ATTENTION_NAME
    module = LlamaForCausalLM(config)

    with pytest.raises(TypeError, match=r"generate with the LLM, or load the folder in llm\.model"):
        module(torch.tensor([[1]]))


@pytest.mark.parametrize(
    ("room", "advice"), [(37, "num_kv_blocks=37 or less"), (1, "; free some memory")]
)
def test_a_cache_without_memory_says_how_many_blocks_would_fit(monkeypatch, room, advice):
    def little_room(shape, dtype, device):
        if shape[0] > room:
            raise RuntimeError("not enough memory")
        return torch.zeros(shape, dtype=dtype, device=device)

    monkeypatch.setattr("lmscope.models.attention.lazy_zeros", little_room)

    with pytest.raises(
        ValueError, match=f"of 1000 blocks takes 2 MB.* room for {room} of them"
    ) as e:
        KVCache.allocate(2, 1000, 4, 2, 16, torch.float32, CPU)

    assert advice in str(e.value)
    assert len(KVCache.allocate(2, room, 4, 2, 16, torch.float32, CPU).key[0]) == room


def test_a_cache_larger_than_the_memory_is_refused_though_the_system_would_promise_it(monkeypatch):
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    monkeypatch.setattr(
        "lmscope.models.attention.available_memory_bytes", lambda: 37 * block_bytes + 1
    )

    with pytest.raises(ValueError, match=r"of 38 blocks .* room for 37 of them.*num_kv_blocks=37"):
        KVCache.allocate(2, 38, 4, 2, 16, torch.float32, CPU)

    assert len(KVCache.allocate(2, 37, 4, 2, 16, torch.float32, CPU).key[0]) == 37


def test_where_the_system_does_not_say_what_is_free_it_is_tried(monkeypatch):
    monkeypatch.setattr("lmscope.models.attention.available_memory_bytes", lambda: None)

    assert len(KVCache.allocate(2, 37, 4, 2, 16, torch.float32, CPU).key[0]) == 37


@pytest.mark.parametrize("num_blocks", [10**9, 10**13, 10**18, 10**30])
def test_no_number_of_blocks_is_too_large_for_an_error_that_names_how_many_fit(num_blocks):
    with pytest.raises(ValueError, match=f"of {num_blocks} blocks .*there is room for"):
        KVCache.allocate(2, num_blocks, 16, 3, 64, torch.float32, CPU)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["numba", "torch"])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
@pytest.mark.parametrize(("num_rows", "window"), [(20, None), (200, None), (200, 30), (7, 9)])
def test_rows_do_not_see_what_is_no_number_behind_them(
    monkeypatch, is_compiled, damage, num_rows, window
):
    if not is_compiled:
        monkeypatch.setattr("lmscope.models.attention_plan._is_compiled", lambda *_: False)
    seq_len, bad = 220, 212
    table = np.arange(1, 56, dtype=np.int32)[None]
    positions = np.arange(seq_len - num_rows, seq_len)
    batch = BatchView.build(
        positions=positions,
        slot_mapping=positions + 4,
        query_start_loc=np.array([0, num_rows], dtype=np.int32),
        seq_lens=np.array([seq_len], dtype=np.int32),
        block_table=table,
        block_size=4,
        device=CPU,
        windows=(window,),
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(num_rows, n, 16, generator=generator) for n in (6, 2, 2))
    cache = KVCache.allocate(1, 56, 4, 2, 16, torch.float32, CPU)
    for each in (*cache.key, *cache.value):
        each.normal_(generator=generator)

    def attend():
        return batch.attend(query, key, value, cache.key[0], cache.value[0], 0.3, window)

    expected = attend()
    row = bad - (seq_len - num_rows)
    if row >= 0:
        value[row, 1, 3] = damage
    else:
        cache.value[0].flatten(0, 1)[4 + bad, 1, 3] = damage
    output = attend()

    before = max(row, 0)
    torch.testing.assert_close(output[:before], expected[:before], atol=2e-6, rtol=0)
    seen = output[before : bad + (window or seq_len) - (seq_len - num_rows)]
    assert (~seen.isfinite()).flatten(1).any(-1).all()
    beyond = output[before + len(seen) :]
    torch.testing.assert_close(beyond, expected[before + len(seen) :], atol=2e-6, rtol=0)
