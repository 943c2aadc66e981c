"""batch_invariant_matmul: products against float64, and the bits of a row in any company."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.batch_invariant_matmul import (
    batch_invariant_matmul,
    batch_invariant_matmul_reference,
)

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DTYPES, IS_INTERPRETED, LIMITS, poisoned, randn, relative_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "size", "num_outputs"), [(1, 64, 48), (70, 80, 96), (3, 576, 160)]
)
def test_products_equal_the_reference(num_rows, size, num_outputs, dtype):
    rows, weight = randn(num_rows, size, dtype=dtype), randn(num_outputs, size, dtype=dtype)
    out = poisoned(num_rows, num_outputs, dtype=dtype)

    assert batch_invariant_matmul(rows, weight, out=out) is out

    wanted = batch_invariant_matmul_reference(rows.double(), weight.double())
    assert relative_error(out, wanted) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_the_sum_is_rounded(dtype):
    rows, weight, bias = (randn(*shape, dtype=dtype) for shape in ((5, 48), (33, 48), (33,)))

    out = batch_invariant_matmul(rows, weight, bias)

    wanted = batch_invariant_matmul_reference(rows.double(), weight.double(), bias.double())
    assert relative_error(out, wanted) < LIMITS[dtype]
    without = batch_invariant_matmul_reference(rows.double(), weight.double())
    assert relative_error(out, without) > 0.01


def test_an_odd_number_of_outputs_is_padded_in_memory_only():
    rows, weight = randn(2, 32), randn(37, 32)

    out = batch_invariant_matmul(rows, weight)

    assert out.shape == (2, 37)
    assert relative_error(out, batch_invariant_matmul_reference(rows, weight)) < 1e-5


if not IS_INTERPRETED:  # NumPy's product depends on a row's place in a tile

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_has_the_same_bits_in_any_company(dtype):
        rows, weight = randn(300, 576, dtype=dtype), randn(1536, 576, dtype=dtype)
        whole = batch_invariant_matmul(rows, weight)

        for start, end in ((0, 1), (7, 9), (63, 65), (100, 300)):
            part = batch_invariant_matmul(rows[start:end], weight)
            assert torch.equal(part, whole[start:end])


def test_no_rows_are_no_work():
    assert batch_invariant_matmul(randn(0, 32), randn(16, 32)).shape == (0, 16)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"weight is \(16, 48\), must be \(N, 32\)"):
        batch_invariant_matmul(randn(2, 32), randn(16, 48))
    with pytest.raises(ValueError, match=r"rows has strides \(40, 1\)"):
        batch_invariant_matmul(randn(2, 40), randn(16, 40))
    with pytest.raises(ValueError, match=r"bias is \(32,\), must be \(16,\)"):
        batch_invariant_matmul(randn(2, 32), randn(16, 32), randn(32))
    with pytest.raises(TypeError, match=r"bias is torch\.float64"):
        batch_invariant_matmul(randn(2, 32), randn(16, 32), randn(16).double())
    with pytest.raises(ValueError, match=r"out is \(2, 32\), must be \(2, 16\)"):
        batch_invariant_matmul(randn(2, 32), randn(16, 32), out=randn(2, 32))
