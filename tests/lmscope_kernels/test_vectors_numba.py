"""Pieces of vector loops against NumPy: every size, and nothing read or written outside."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("numba") is None:
    pytest.skip("needs the extra cpu", allow_module_level=True)

from lmscope_kernels import vectors_numba
from numba import njit

SIZES = [1, 7, 15, 16, 17, 20, 48, 63, 64, 65, 80, 128, 200]


@njit
def four_dots(left, right, stride, size):
    return vectors_numba.four_dots(left.ctypes.data, right.ctypes.data, stride, size)


@njit
def one_dot(left, right, size):
    return vectors_numba.dot(left.ctypes.data, right.ctypes.data, size)


@njit
def add_weighted_rows(weights, rows, stride, size, output):
    vectors_numba.add_weighted_rows(
        weights.ctypes.data, len(weights), rows.ctypes.data, stride, size, output.ctypes.data
    )


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def rows_among_nan(rng, num_rows, size):
    """[num_rows, size + 5] float32, NaN behind the numbers of each row."""
    rows = np.full((num_rows, size + 5), np.nan, np.float32)
    rows[:, :size] = rng.standard_normal((num_rows, size))
    return rows


@pytest.mark.parametrize("size", SIZES)
def test_dots_are_those_of_numpy_with_the_same_bits_by_four_and_by_one(rng, size):
    left, right = rows_among_nan(rng, 1, size), rows_among_nan(rng, 4, size)

    got = four_dots(left, right, right.shape[1], size)

    expected = right[:, :size].astype(np.float64) @ left[0, :size].astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert list(got) == [one_dot(left, right[row:], size) for row in range(4)]


@pytest.mark.parametrize("num_rows", [0, 1, 4, 9])
@pytest.mark.parametrize("size", SIZES)
def test_weighted_rows_are_added_to_what_is_there_and_to_nothing_behind(rng, num_rows, size):
    rows, output = rows_among_nan(rng, num_rows, size), rows_among_nan(rng, 1, size)
    weights = rng.random(num_rows, dtype=np.float32)
    before = output.copy()

    add_weighted_rows(weights, rows, rows.shape[1], size, output)

    expected = before[0, :size] + weights.astype(np.float64) @ rows[:, :size].astype(np.float64)
    np.testing.assert_allclose(output[0, :size], expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(output[0, size:]).all()


def test_a_loop_around_them_begins_anew_each_time(rng):
    @njit
    def several(left, right, stride, size):
        return [
            vectors_numba.four_dots(left.ctypes.data, right.ctypes.data, stride, size)
            for _ in range(3)
        ]

    left, right = rows_among_nan(rng, 1, 40), rows_among_nan(rng, 4, 40)

    assert several(left, right, 45, 40) == [four_dots(left, right, 45, 40)] * 3
