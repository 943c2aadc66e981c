"""Matrices in the blocks of a GGUF file: the weights to the last bit, and the loops."""

from __future__ import annotations

import importlib.util
import re

import gguf
import numpy as np
import pytest
import torch
from lmscope_kernels import gguf_linear_cpu
from lmscope_kernels.gguf_linear_cpu import (
    dequantize,
    gguf_linear,
    gguf_linear_reference,
    pack_blocks,
    side_by_side,
    why_not_packed,
)

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)
QUANTIZATIONS = ("Q4_0", "Q4_1", "Q8_0")


def stored(quantization, num_outputs, num_inputs):
    """Bytes of a random matrix as a file has them, and what gguf says they stand for."""
    weights = np.random.default_rng(num_inputs).normal(size=(num_outputs, num_inputs))
    kind = gguf.GGMLQuantizationType[quantization]
    data = gguf.quantize(weights.astype(np.float32), kind)
    return data, gguf.dequantize(data, kind)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_weights_are_those_of_the_file_to_the_last_bit(quantization):
    data, expected = stored(quantization, 192, 96)

    blocks = pack_blocks(data, quantization)

    assert blocks.shape == (192, 96)
    assert np.array_equal(dequantize(blocks).numpy(), expected)
    bits = 8 * blocks.num_bytes / expected.size
    assert bits == {"Q4_0": 6, "Q4_1": 6, "Q8_0": 9}[quantization]


@needs_numba
@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 32), (192, 576), (128, 1536)])
def test_the_loops_equal_the_reference(num_rows, has_bias, quantization, num_outputs, num_inputs):
    torch.manual_seed(0)
    blocks = pack_blocks(stored(quantization, num_outputs, num_inputs)[0], quantization)
    rows = torch.randn(num_rows, num_inputs) * torch.tensor([[1.0], [1000.0]])[:num_rows]
    bias = torch.randn(num_outputs) if has_bias else None

    output = gguf_linear(rows, blocks, bias)

    expected = gguf_linear_reference(rows.double(), blocks, bias)
    error = (output - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-6


@needs_numba
@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0"])
def test_the_serial_loops_give_the_same_numbers(quantization, monkeypatch):
    blocks = pack_blocks(stored(quantization, 128, 96)[0], quantization)
    rows = torch.randn(2, 96)
    expected = gguf_linear(rows, blocks)

    monkeypatch.setattr(gguf_linear_cpu, "use_torch_threads", lambda: False)

    torch.testing.assert_close(gguf_linear(rows, blocks), expected, rtol=1e-5, atol=1e-5)


def test_matrices_side_by_side_are_one_and_of_two_kinds_are_none():
    first, second = (pack_blocks(stored("Q4_1", rows, 64)[0], "Q4_1") for rows in (64, 128))
    other = pack_blocks(stored("Q8_0", 64, 64)[0], "Q8_0")

    both = side_by_side([first, second])

    assert both is not None
    assert torch.equal(dequantize(both), torch.cat([dequantize(first), dequantize(second)]))
    assert side_by_side([first]) is first
    assert side_by_side([first, other]) is None


@pytest.mark.parametrize(
    ("shape", "quantization", "reason"),
    [
        ((64, 256), "Q6_K", "Q6_K, and the loops know Q4_0, Q4_1, Q8_0"),
        ((96, 64), "Q4_1", r"\(96, 64\) is no multiple of \(64, 32\)"),
        ((64,), "Q4_1", "no multiple"),
    ],
)
def test_what_cannot_be_packed_says_why(shape, quantization, reason):
    assert why_not_packed((64, 32), "Q4_1") is None
    found = why_not_packed(shape, quantization)
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    ("row_bytes", "quantization", "reason"),
    [(210, "Q6_K", "Q6_K"), (21, "Q4_1", "inside a block")],
)
def test_packing_what_cannot_be_packed_is_an_error(row_bytes, quantization, reason):
    with pytest.raises(ValueError, match=reason):
        pack_blocks(np.zeros((64, row_bytes), np.uint8), quantization)
