"""Linear layers and whole layers with 8-bit weights: what they lose, and the loops."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from lmscope_kernels import int8_linear_cpu
from lmscope_kernels.int8_linear_cpu import (
    Int8Linear,
    int8_linear,
    int8_linear_reference,
    quantize_int8,
)
from lmscope_kernels.int8_step_cpu import Int8Layer, int8_layer_reference, why_no_int8_step

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra cpu"
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def relative_error(output, expected):
    return ((output.double() - expected.double()).norm() / expected.double().norm()).item()


def test_a_weight_is_off_by_half_a_scale_at_most():
    weight = torch.randn(20, 33) * torch.logspace(-3, 3, 20)[:, None]

    quantized = quantize_int8(weight)

    assert quantized.weight.dtype == torch.int8
    assert quantized.weight.abs().amax(dim=1).tolist() == [127] * 20
    error = (quantized.dequantize() - weight).abs()
    assert (error <= 0.5001 * quantized.scales[:, None]).all()


def test_a_row_of_zeros_stays_zero():
    weight = torch.stack([torch.zeros(8), torch.ones(8)])

    assert torch.equal(quantize_int8(weight).dequantize(), weight)


@needs_numba
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 576), (7, 33), (50, 12000)])
def test_the_loops_equal_the_reference(num_rows, num_outputs, num_inputs, has_bias):
    weight = quantize_int8(torch.randn(num_outputs, num_inputs))
    rows, bias = torch.randn(num_rows, num_inputs), torch.randn(num_outputs) if has_bias else None

    output = int8_linear(rows, weight, bias)

    # The rows are rounded too: to 2**-15 of the largest number of a row, less for long rows.
    limit = 1e-3 if num_inputs > 2000 else 1e-4
    assert relative_error(output, int8_linear_reference(rows, weight, bias)) < limit


@needs_numba
def test_the_largest_sum_fits():
    weight = quantize_int8(torch.ones(3, 1000))
    rows = torch.full((1, 1000), 5.0)

    output = int8_linear(rows, weight)

    torch.testing.assert_close(output, torch.full((1, 3), 5000.0))


@needs_numba
def test_a_row_of_zeros_gives_the_bias():
    weight, bias = quantize_int8(torch.randn(5, 8)), torch.randn(5)

    assert torch.equal(int8_linear(torch.zeros(1, 8), weight, bias), bias[None])


@needs_numba
@pytest.mark.parametrize("has_loops", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (4, 64), (5, 64), (1, 2, 64), (2, 40, 64)])
def test_few_and_many_rows_are_multiplied_by_the_same_weights(
    monkeypatch, shape, has_bias, has_loops
):
    if has_loops and int8_linear_cpu.why_no_half_loops() is not None:
        pytest.skip("needs a processor with the loops for half precision")
    if not has_loops:
        monkeypatch.setattr(int8_linear_cpu, "why_no_half_loops", lambda: "no AVX2")
    linear = Int8Linear(torch.randn(10, 64), torch.randn(10) if has_bias else None)
    rows = torch.randn(shape)

    output = linear(rows)

    expected = int8_linear_reference(rows.view(-1, 64), linear.weight, linear.bias)
    assert output.shape == (*shape[:-1], 10)
    assert not expected.numel() or relative_error(output.view(-1, 10), expected) < 1e-3


@needs_numba
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e6])
@pytest.mark.parametrize("num_rows", [4, 5])
def test_weights_of_any_size_lose_the_same_for_few_and_many_rows(size, num_rows):
    weight, rows = size * torch.randn(10, 64), torch.randn(num_rows, 64)
    bias = size * torch.randn(10)

    output = Int8Linear(weight, bias)(rows)

    assert relative_error(output, int8_linear_reference(rows, quantize_int8(weight), bias)) < 1e-3


@needs_numba
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row(damage):
    weight, rows = quantize_int8(torch.randn(6, 33)), torch.randn(3, 33)
    expected = int8_linear(rows, weight)
    rows[1, 20] = damage

    output = int8_linear(rows, weight)

    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2]], expected[[0, 2]])


@needs_numba
@pytest.mark.parametrize("size", [1e-32, 1e-36, 1e-42])
def test_rows_of_hardly_anything_stay_what_they_are_or_give_zeros(size):
    weight, rows = quantize_int8(torch.randn(6, 33)), size * torch.randn(2, 33)

    output = int8_linear(rows, weight)

    largest = int8_linear_reference(rows, weight).abs().max()
    torch.testing.assert_close(
        output,
        int8_linear_reference(rows, weight),
        atol=float(largest) if size < 1e-33 else 1e-35,
        rtol=0,
    )


def make_layer(num_heads, num_kv_heads, head_size, has_bias):
    hidden_size, mlp_size = 48, 80

    def linear(num_outputs, num_inputs):
        bias = 0.1 * torch.randn(num_outputs) if has_bias else None
        return Int8Linear(torch.randn(num_outputs, num_inputs) / num_inputs**0.5, bias)

    return Int8Layer(
        1 + 0.1 * torch.randn(hidden_size),
        1e-5,
        linear((num_heads + 2 * num_kv_heads) * head_size, hidden_size),
        linear(hidden_size, num_heads * head_size),
        1 + 0.1 * torch.randn(hidden_size),
        1e-6,
        linear(2 * mlp_size, hidden_size),
        linear(hidden_size, mlp_size),
    )


@needs_numba
@pytest.mark.skipif(why_no_int8_step() is not None, reason="numba has no safe threads here")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (2, 2, 20)])
def test_a_layer_in_one_call_equals_the_reference(
    num_heads, num_kv_heads, head_size, num_rows, has_bias
):
    layer = make_layer(num_heads, num_kv_heads, head_size, has_bias)
    hidden = torch.randn(num_rows, 48)
    seq_lens = np.array([7, 1, 33, 16], dtype=np.int32)[:num_rows]
    first_keys = np.array([0, 0, 20, 0], dtype=np.int32)[:num_rows]
    table = (1 + np.random.default_rng(0).permutation(num_rows * 3)).astype(np.int32)
    table = table.reshape(num_rows, 3)
    position = seq_lens.astype(np.int64) - 1
    slots = table[np.arange(num_rows), position // 16].astype(np.int64) * 16 + position % 16
    cache = torch.randn(2, 1 + num_rows * 3, 16, num_kv_heads, head_size)
    angle = torch.rand(num_rows, head_size // 2)
    cosine = torch.cat([angle.cos(), angle.cos()], -1)
    sine = torch.cat([-angle.sin(), angle.sin()], -1)
    batch = (slots, table, first_keys, seq_lens, head_size**-0.5, 0.5)
    expected, expected_cache = hidden.clone(), cache.clone()
    int8_layer_reference(layer, expected, cosine, sine, *expected_cache, *batch)

    layer(hidden, cosine, sine, *cache, *batch)

    assert relative_error(hidden, expected) < 1e-3
    assert relative_error(cache, expected_cache) < 1e-3
    is_written = (cache != expected_cache).flatten(3).any(-1)
    # Nothing but the rows' own slots differs, and these by rounding.
    assert int(is_written.sum()) <= 2 * num_rows
