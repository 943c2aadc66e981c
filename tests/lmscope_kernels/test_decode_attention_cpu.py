"""The compiled decode loops against the reference, and when they are chosen."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from lmscope_kernels import numba_support
from lmscope_kernels.decode_attention_cpu import (
    decode_kernel_choice,
    paged_decode_cpu,
    prepare_decode_kernel,
)
from lmscope_kernels.paged_attention import paged_attention_reference

CPU = torch.device("cpu")
needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)

# (query heads, KV heads, head size)
SHAPES = [(9, 3, 64), (4, 4, 96), (8, 2, 80), (6, 1, 20)]
SEQ_LENS = [7, 131, 1, 64, 65]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make_cache(num_kv_heads, head_size, block_size, seq_lens=SEQ_LENS):
    """A shuffled cache in which all is NaN but what requests wrote, and its block table."""
    max_blocks = -(-max(seq_lens) // block_size)
    ids = 1 + torch.randperm(len(seq_lens) * max_blocks, dtype=torch.int32)
    table = torch.zeros(len(seq_lens), max_blocks, dtype=torch.int32)
    shape = (len(ids) + 1, block_size, num_kv_heads, head_size)
    key_cache, value_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for request, seq_len in enumerate(seq_lens):
        num_blocks = -(-seq_len // block_size)
        table[request, :num_blocks] = ids[request * max_blocks :][:num_blocks]
        position = torch.arange(seq_len)
        places = table[request, position // block_size].long(), position % block_size
        key_cache[places] = torch.randn(seq_len, num_kv_heads, head_size)
        value_cache[places] = torch.randn(seq_len, num_kv_heads, head_size)
    return key_cache, value_cache, table


def decode(query, key_cache, value_cache, table, requests, window=None, softcap=None):
    """The rows of some requests, in their order; row r of query is that of request r."""
    seq_lens = np.array(SEQ_LENS, dtype=np.int32)[requests]
    first = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    output = torch.full_like(query, torch.nan)
    paged_decode_cpu(
        query,
        key_cache,
        value_cache,
        np.ascontiguousarray(table.numpy()[requests]),
        first.astype(np.int32),
        seq_lens,
        np.array(requests, dtype=np.int64),
        0.3,
        softcap,
        output=output,
    )
    return output[requests]


@needs_numba
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (20, None), (None, 2.0), (20, 2.0)]
)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SHAPES)
def test_it_equals_the_reference(num_heads, num_kv_heads, head_size, block_size, window, softcap):
    key_cache, value_cache, table = make_cache(num_kv_heads, head_size, block_size)
    query = torch.randn(len(SEQ_LENS), num_heads, head_size)

    output = decode(query, key_cache, value_cache, table, list(range(5)), window, softcap)

    expected = paged_attention_reference(
        query,
        key_cache,
        value_cache,
        table,
        torch.tensor(SEQ_LENS),
        torch.arange(6),
        0.3,
        window,
        softcap,
    )
    error = (output.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-5


@needs_numba
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_threads):
    key_cache, value_cache, table = make_cache(3, 64, 16)
    query = torch.randn(len(SEQ_LENS), 9, 64)
    before = torch.get_num_threads()
    alone = [decode(query, key_cache, value_cache, table, [r]) for r in range(5)]
    torch.set_num_threads(num_threads)
    try:
        together = decode(query, key_cache, value_cache, table, [0, 1, 2, 3, 4])
        reversed_ = decode(query, key_cache, value_cache, table, [4, 3, 1])
    finally:
        torch.set_num_threads(before)

    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(reversed_, torch.cat([alone[4], alone[3], alone[1]]))


@needs_numba
def test_a_strided_query_and_rows_that_are_not_asked_for():
    key_cache, value_cache, table = make_cache(2, 16, 4)
    wide = torch.randn(len(SEQ_LENS), 6, 16)
    query = wide[:, :4]
    output = torch.full((5, 4, 16), 7.0)
    rows = np.array([3], dtype=np.int64)
    lengths = np.array(SEQ_LENS[3:4], dtype=np.int32)

    paged_decode_cpu(
        query,
        key_cache,
        value_cache,
        np.ascontiguousarray(table.numpy()[3:4]),
        np.zeros(1, np.int32),
        lengths,
        rows,
        0.3,
        output=output,
    )

    assert (output[[0, 1, 2, 4]] == 7).all()
    expected = decode(query.contiguous(), key_cache, value_cache, table, [3])
    assert torch.equal(output[3:4], expected)


@needs_numba
def test_large_scores_do_not_overflow():
    key_cache, value_cache, table = make_cache(2, 16, 4)
    query = 1000 * torch.randn(len(SEQ_LENS), 4, 16)

    output = decode(query, key_cache, value_cache, table, list(range(5)))

    lengths, starts = torch.tensor(SEQ_LENS), torch.arange(6)
    expected = paged_attention_reference(query, key_cache, value_cache, table, lengths, starts, 0.3)
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=1e-3)


@needs_numba
def test_without_threads_that_two_engines_may_share_it_runs_on_the_calling_thread(monkeypatch):
    kernels = importlib.import_module("lmscope_kernels.decode_attention_numba")
    key_cache, value_cache, table = make_cache(2, 16, 4)
    query = torch.randn(len(SEQ_LENS), 4, 16)
    usual = decode(query, key_cache, value_cache, table, list(range(5)))
    monkeypatch.setattr(numba_support, "has_safe_threads", lambda: False)
    monkeypatch.delattr(kernels, "attend_parallel")

    output = decode(query, key_cache, value_cache, table, list(range(5)))

    torch.testing.assert_close(output, usual)


@needs_numba
def test_preparing_compiles_once_for_all_shapes():
    prepare_decode_kernel()
    kernels = importlib.import_module("lmscope_kernels.decode_attention_numba")
    is_parallel = numba_support.has_safe_threads()
    kernel = kernels.attend_parallel if is_parallel else kernels.attend_serial
    known = len(kernel.signatures)
    key_cache, value_cache, table = make_cache(1, 20, 4)

    decode(torch.randn(5, 6, 20), key_cache, value_cache, table, list(range(5)))

    assert len(kernel.signatures) == known > 0


@needs_numba
def test_float32_on_a_cpu_is_for_the_compiled_loops():
    assert decode_kernel_choice(torch.float32, CPU).name == "numba"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_for_torch(dtype):
    choice = decode_kernel_choice(dtype, CPU)

    assert choice.name == "torch"
    assert str(dtype).removeprefix("torch.") in choice.why


def test_another_device_is_for_torch():
    assert decode_kernel_choice(torch.float32, torch.device("meta")).name == "torch"


def test_without_numba_torch_runs_and_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    numba_support.why_not_numba.cache_clear()
    try:
        choice = decode_kernel_choice(torch.float32, CPU)
    finally:
        numba_support.why_not_numba.cache_clear()

    assert choice.name == "torch"
    assert "lmscope[cpu]" in choice.why


@needs_numba
def test_torch_keeps_its_one_thread_when_numba_starts_its_own():
    code = (
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "from lmscope_kernels.decode_attention_cpu import prepare_decode_kernel\n"
        "from lmscope_kernels.numba_support import use_torch_threads\n"
        "prepare_decode_kernel()\n"
        "use_torch_threads()\n"
        "print(torch.get_num_threads())"
    )
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )

    assert done.stdout.strip() == "1"
