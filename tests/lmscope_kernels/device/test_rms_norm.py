"""rms_norm: rows against float64, the residual, and rows that a kernel cannot take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.rms_norm import rms_norm, rms_norm_reference

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DTYPES, IS_INTERPRETED, LIMITS, poisoned, randn, relative_error

NUM_ROWS = 5 if IS_INTERPRETED else 4096


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 1024, 2048, 4096])
def test_rows_equal_the_reference(size, dtype):
    x, weight = randn(NUM_ROWS, size, dtype=dtype), randn(size, dtype=dtype)
    out = poisoned(NUM_ROWS, size, dtype=dtype)

    assert rms_norm(x, weight, 1e-5, out=out) is out

    expected = rms_norm_reference(x.double(), weight, 1e-5)
    assert relative_error(out, expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_left_in_the_residual_and_normed(dtype):
    x, weight, residual = (randn(NUM_ROWS, 576, dtype=dtype) for _ in range(3))
    weight = weight[0]
    exact_sum = x.double() + residual.double()

    out = rms_norm(x, weight, 1e-5, residual)

    assert relative_error(residual, exact_sum) < LIMITS[dtype]
    assert torch.equal(out, rms_norm(residual, weight, 1e-5))


def test_rows_of_a_wider_tensor_are_read_where_they_lie():
    wide = randn(NUM_ROWS, 128)

    out = rms_norm(wide[:, 64:], torch.ones_like(wide[0, 64:]), 1e-5)

    expected = rms_norm_reference(wide[:, 64:].double(), torch.ones_like(wide[0, 64:]), 1e-5)
    assert relative_error(out, expected) < LIMITS[torch.float32]


def test_no_rows_are_no_work():
    assert rms_norm(randn(0, 64), randn(64), 1e-5).shape == (0, 64)


def test_a_row_that_begins_between_multiples_of_16_is_refused():
    with pytest.raises(ValueError, match=r"multiples of 16"):
        rms_norm(randn(2, 72), randn(72), 1e-5)


def test_other_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match="weight is"):
        rms_norm(randn(2, 64), randn(32), 1e-5)
    with pytest.raises(ValueError, match="residual is"):
        rms_norm(randn(2, 64), randn(64), 1e-5, randn(1, 64))
    with pytest.raises(TypeError, match=r"weight is torch\.float64"):
        rms_norm(randn(2, 64), randn(64).double(), 1e-5)
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        rms_norm(randn(2, 64).double(), randn(64).double(), 1e-5)
    with pytest.raises(ValueError, match=r"16640 numbers, the limit is 16384"):
        rms_norm(randn(1, 16640), randn(16640), 1e-5)
