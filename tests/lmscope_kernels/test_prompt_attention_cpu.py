"""The compiled loops for requests with several rows against the reference."""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import pytest
import torch
from lmscope_kernels import numba_support
from lmscope_kernels.paged_attention import paged_attention_reference
from lmscope_kernels.prompt_attention_cpu import (
    Prompts,
    attend_prompts_cpu,
    prepare_prompt_kernel,
)

if importlib.util.find_spec("numba") is None:
    pytest.skip("needs the extra cpu", allow_module_level=True)

# (query heads, KV heads, head size)
SHAPES = [(9, 3, 64), (4, 4, 96), (8, 2, 80), (6, 1, 20)]
# (rows of this step, tokens): whole prompts, chunks behind others, more than a piece of rows.
REQUESTS = [(7, 7), (2, 3), (131, 131), (33, 170), (5, 64), (64, 64)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Step:
    """Requests with several rows in a shuffled cache, NaN where nothing was written.

    One row that belongs to nobody stands before the rows of each request.
    """

    def __init__(self, num_heads, num_kv_heads, head_size, block_size, requests=REQUESTS):
        self.rows, self.lens = np.array(requests, dtype=np.int32).T
        max_blocks = -(-max(self.lens) // block_size)
        ids = 1 + torch.randperm(len(requests) * max_blocks, dtype=torch.int32)
        self.table = torch.zeros(len(requests), max_blocks, dtype=torch.int32)
        shape = (len(ids) + 1, block_size, num_kv_heads, head_size)
        self.key_cache, self.value_cache = (torch.full(shape, torch.nan) for _ in range(2))
        for request, seq_len in enumerate(self.lens.tolist()):
            num_blocks = -(-seq_len // block_size)
            self.table[request, :num_blocks] = ids[request * max_blocks :][:num_blocks]
            position = torch.arange(seq_len)
            places = self.table[request, position // block_size].long(), position % block_size
            for cache in (self.key_cache, self.value_cache):
                cache[places] = torch.randn(seq_len, num_kv_heads, head_size)
        self.starts = np.cumsum(self.rows + 1) - self.rows
        self.query = torch.randn(int(self.starts[-1] + self.rows[-1]), num_heads, head_size)

    def prompts(self, chosen=slice(None)):
        table = self.table.numpy()[chosen]
        return Prompts(self.starts[chosen], self.rows[chosen], self.lens[chosen], table)

    def attend(self, requests=None, query=None, window=None, softcap=None):
        query = self.query if query is None else query
        chosen = slice(None) if requests is None else np.array(requests)
        output = torch.full(query.shape, 7.0)
        attend_prompts_cpu(
            query,
            self.key_cache,
            self.value_cache,
            Prompts(
                self.starts[chosen],
                self.rows[chosen],
                self.lens[chosen],
                self.table.numpy()[chosen],
            ),
            0.3,
            window,
            softcap,
            output=output,
        )
        return output

    def of(self, output, request):
        return output[self.starts[request] : self.starts[request] + self.rows[request]]

    def expected(self, request, window=None, softcap=None):
        return paged_attention_reference(
            self.of(self.query, request),
            self.key_cache,
            self.value_cache,
            self.table[request : request + 1],
            torch.tensor([self.lens[request]]),
            torch.tensor([0, self.rows[request]]),
            0.3,
            window,
            softcap,
        )


@pytest.mark.parametrize(
    ("window", "softcap"),
    [(None, None), (1, None), (20, None), (100, None), (None, 2.0), (20, 2.0)],
)
@pytest.mark.parametrize("block_size", [1, 6, 16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_reference_and_writes_no_other_rows(shape, block_size, window, softcap):
    step = Step(*shape, block_size)

    output = step.attend(window=window, softcap=softcap)

    is_own = torch.zeros(len(output), dtype=torch.bool)
    for request in range(len(REQUESTS)):
        step.of(is_own, request)[:] = True
        expected = step.expected(request, window, softcap).double()
        error = (step.of(output, request).double() - expected).norm() / expected.norm()
        assert error < 1e-5
    assert (output[~is_own] == 7).all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_request_has_the_same_bits_alone_and_beside_others(num_threads):
    step = Step(9, 3, 64, 16)
    before = torch.get_num_threads()
    together = step.attend()
    torch.set_num_threads(num_threads)
    try:
        alone = [step.of(step.attend([request]), request) for request in range(len(REQUESTS))]
    finally:
        torch.set_num_threads(before)

    for request, output in enumerate(alone):
        assert torch.equal(step.of(together, request), output)


def test_queries_at_the_begin_of_longer_rows_are_read_where_they_are():
    step = Step(4, 2, 16, 4)
    longer = torch.randn(len(step.query), 8, 16)
    longer[:, :4] = step.query
    behind = torch.cat((torch.randn(len(step.query), 4, 16), step.query), dim=1)[:, 4:]
    by_head = step.query.transpose(0, 1).contiguous().transpose(0, 1)

    expected = step.attend()

    for query in (longer[:, :4], behind, by_head, longer[1:, :4]):
        if len(query) < len(step.query):
            query = torch.cat((longer[:1, :4], query))
        assert torch.equal(query, step.query)
        assert torch.equal(step.attend(query=query), expected)


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_key", [True, False])
def test_what_is_no_number_is_seen_by_all_who_read_it_and_by_no_one_else(damage, is_key):
    step = Step(6, 2, 16, 16, requests=[(40, 40), (10, 70), (40, 40)])
    cache = step.key_cache if is_key else step.value_cache
    block = int(step.table[1, 1])
    cache[block, 3, 1] = damage * torch.ones(16)

    output = step.attend()

    seen = step.of(output, 1)
    assert (~torch.isfinite(seen[:, 3:])).any(-1).all()
    assert torch.isfinite(seen[:, :3]).all()
    for request in (0, 2):
        assert torch.isfinite(step.of(output, request)).all()


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_no_number_is_not_seen_by_rows_before_it(damage, is_key, window):
    step = Step(6, 2, 16, 16, requests=[(70, 70)])
    expected = step.of(step.attend(window=window), 0)
    cache = step.key_cache if is_key else step.value_cache
    cache[int(step.table[0, 2]), 3] = damage * torch.ones(16)

    output = step.of(step.attend(window=window), 0)

    position = 2 * 16 + 3
    torch.testing.assert_close(output[:position], expected[:position], atol=2e-6, rtol=0)
    seen = output[position : position + (window or 70)]
    assert (~torch.isfinite(seen)).any(-1).all()
    if window is not None:
        assert torch.isfinite(output[position + window :]).all()


def test_large_scores_do_not_overflow():
    step = Step(4, 2, 16, 4)
    step.query *= 1000

    output = step.attend()

    for request in range(len(REQUESTS)):
        torch.testing.assert_close(
            step.of(output, request), step.expected(request), atol=1e-3, rtol=1e-3
        )


def test_without_threads_that_two_engines_may_share_it_runs_on_the_calling_thread(monkeypatch):
    kernels = importlib.import_module("lmscope_kernels.prompt_attention_numba")
    step = Step(4, 2, 16, 4)
    usual = step.attend()
    monkeypatch.setattr(numba_support, "has_safe_threads", lambda: False)
    monkeypatch.delattr(kernels, "attend_prompts_parallel")

    torch.testing.assert_close(step.attend(), usual)


def test_preparing_compiles_once_for_all_shapes():
    prepare_prompt_kernel()
    kernels = importlib.import_module("lmscope_kernels.prompt_attention_numba")
    is_parallel = numba_support.has_safe_threads()
    kernel = kernels.attend_prompts_parallel if is_parallel else kernels.attend_prompts_serial
    known = len(kernel.signatures)

    Step(6, 1, 20, 4).attend()

    assert len(kernel.signatures) == known > 0


@pytest.mark.parametrize(("num_kv_heads", "G"), [(3, 3), (1, 1), (2, 200)])
def test_pieces_hold_every_row_once_for_each_kv_head_the_longest_first(num_kv_heads, G):
    step = Step(4, 2, 16, 4)
    prompts = step.prompts()

    pieces = prompts.pieces(num_kv_heads, G).tolist()

    rows = sorted(
        (request, kv_head, first_row + i, position + i)
        for request, kv_head, first_row, num_rows, position in pieces
        for i in range(num_rows)
    )
    assert rows == [
        (request, kv_head, int(step.starts[request]) + i, seq_len - num_rows + i)
        for request, (num_rows, seq_len) in enumerate(REQUESTS)
        for kv_head in range(num_kv_heads)
        for i in range(num_rows)
    ]
    work = [num_rows * (num_rows + position) for *_, num_rows, position in pieces]
    assert work == sorted(work, reverse=True)
    assert prompts.pieces(num_kv_heads, G) is prompts.pieces(num_kv_heads, G)
