"""silu_mul: rows against float64, and rows that the kernel cannot take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lmscope_kernels.silu_mul import silu_mul, silu_mul_reference

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DTYPES, IS_INTERPRETED, LIMITS, poisoned, randn, relative_error

NUM_ROWS = 3 if IS_INTERPRETED else 4096


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 1536, 3072, 8192, 14336])
def test_rows_equal_the_reference(size, dtype):
    gate_up = 3 * randn(NUM_ROWS, 2 * size, dtype=dtype)
    out = poisoned(NUM_ROWS, size, dtype=dtype)

    assert silu_mul(gate_up, out=out) is out

    assert relative_error(out, silu_mul_reference(gate_up.double())) < LIMITS[dtype]


def test_no_rows_are_no_work():
    assert silu_mul(randn(0, 32)).shape == (0, 16)


def test_halves_that_begin_between_multiples_of_16_are_refused():
    with pytest.raises(ValueError, match=r"rows have 48 numbers, must have a multiple of 32"):
        silu_mul(randn(2, 48))
    with pytest.raises(ValueError, match=r"gate_up has strides \(72, 1\)"):
        silu_mul(randn(2, 72)[:, :64])
    with pytest.raises(ValueError, match=r"out is \(2, 64\), must be \(2, 32\)"):
        silu_mul(randn(2, 64), out=randn(2, 64))
