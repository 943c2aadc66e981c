"""Linear layers with weights in half precision: the loops against the definition."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from lmscope_kernels import half_linear_cpu, numba_support
from lmscope_kernels.half_linear_cpu import (
    half_linear,
    half_linear_reference,
    pack_half,
    packed_half_bytes,
    prepare_half_loops,
    why_no_half_loops,
)

needs_loops = pytest.mark.skipif(
    why_no_half_loops() is not None, reason="needs the extra cpu, and x86 with AVX2"
)
# [out, in]: whole tiles, a part of one, more of them, one output, one input.
SHAPES = [(64, 32), (5, 7), (960, 576), (129, 1), (1, 40), (200, 1536)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@needs_loops
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 12, 33])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_it_equals_the_definition(num_outputs, num_inputs, num_rows, has_bias):
    weight = torch.randn(num_outputs, num_inputs)
    bias = torch.randn(num_outputs) if has_bias else None
    rows = torch.randn(num_rows, num_inputs)
    tiles = pack_half(weight, bias)

    output = half_linear(rows, tiles)

    assert output.shape == (num_rows, num_outputs)
    torch.testing.assert_close(output, half_linear_reference(rows, tiles), atol=2e-4, rtol=1e-5)
    expected = rows.double() @ weight.half().double().T + (0 if bias is None else bias)
    torch.testing.assert_close(output.double(), expected, atol=2e-4, rtol=1e-5)


@needs_loops
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_threads):
    tiles = pack_half(torch.randn(200, 96), torch.randn(200))
    rows = torch.randn(33, 96)
    alone = torch.cat([half_linear(row[None], tiles) for row in rows])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows in range(1, 34):
            assert torch.equal(half_linear(rows[:num_rows], tiles), alone[:num_rows])
    finally:
        torch.set_num_threads(before)


@needs_loops
def test_what_is_no_number_stays_in_its_row():
    tiles = pack_half(torch.randn(70, 16))
    rows = torch.randn(8, 16)
    rows[3, 2], rows[5, 0] = torch.nan, torch.inf

    is_finite = half_linear(rows, tiles).isfinite().all(dim=1)

    assert is_finite.tolist() == [True, True, True, False, True, False, True, True]


@needs_loops
def test_rows_that_are_not_contiguous_and_that_want_gradients():
    tiles = pack_half(torch.randn(70, 16, requires_grad=True))
    wide = torch.randn(9, 32, requires_grad=True)

    output = half_linear(wide[:, 5:21], tiles)

    assert torch.equal(output, half_linear(wide.detach()[:, 5:21].clone(), tiles))
    assert not output.requires_grad


@needs_loops
def test_without_threads_that_two_engines_may_share_it_runs_on_the_calling_thread(monkeypatch):
    kernels = importlib.import_module("lmscope_kernels.half_numba")
    tiles, rows = pack_half(torch.randn(70, 16)), torch.randn(8, 16)
    usual = half_linear(rows, tiles)
    monkeypatch.setattr(numba_support, "has_safe_threads", lambda: False)
    monkeypatch.delattr(kernels, "linear_parallel")

    torch.testing.assert_close(half_linear(rows, tiles), usual)


@needs_loops
def test_preparing_compiles_once_for_all_shapes():
    prepare_half_loops()
    kernels = importlib.import_module("lmscope_kernels.half_numba")
    is_parallel = numba_support.has_safe_threads()
    kernel = kernels.linear_parallel if is_parallel else kernels.linear_serial
    known = len(kernel.signatures)

    half_linear(torch.randn(7, 16), pack_half(torch.randn(70, 16), torch.randn(70)))

    assert len(kernel.signatures) == known > 0


@needs_loops
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_tiles_take_the_memory_that_is_said(num_outputs, num_inputs):
    tiles = pack_half(torch.randn(num_outputs, num_inputs))

    assert tiles.tiles.nbytes == packed_half_bytes(num_outputs, num_inputs)
    assert tiles.shape == (num_outputs, num_inputs)


@needs_loops
def test_tiles_for_a_processor_without_avx512(tmp_path):
    code = (
        "import torch\n"
        "torch.manual_seed(0)\n"
        "torch.set_num_threads(1)\n"
        "from lmscope_kernels.half_linear_cpu import *\n"
        "from lmscope_kernels.half_numba import OUTPUTS_PER_TILE\n"
        "tiles = pack_half(torch.randn(150, 70), torch.randn(150))\n"
        "for num_rows in (1, 5, 13):\n"
        "    rows = torch.randn(num_rows, 70)\n"
        "    expected = half_linear_reference(rows, tiles)\n"
        "    torch.testing.assert_close(half_linear(rows, tiles), expected, atol=1e-4, rtol=1e-5)\n"
        "print(OUTPUTS_PER_TILE)"
    )
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )

    assert done.stdout.split() == ["16"]


def test_without_numba_or_on_an_old_processor_the_reason_is_said(monkeypatch):
    def reason():
        why_no_half_loops.cache_clear()
        try:
            return why_no_half_loops()
        finally:
            why_no_half_loops.cache_clear()

    if importlib.util.find_spec("numba") is not None:
        kernels = importlib.import_module("lmscope_kernels.half_numba")
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "MISSING_FEATURES", ["f16c"])
            assert reason() == "this processor has no f16c"
    monkeypatch.setattr(half_linear_cpu, "why_not_numba", lambda: "numba is not installed")
    assert reason() == "numba is not installed"
