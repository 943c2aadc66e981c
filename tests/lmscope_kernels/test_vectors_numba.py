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


@njit
def product(left, strides, right, num_steps, num_lanes, output, output_stride, is_added):
    vectors_numba.product(
        left.ctypes.data,
        strides[0],
        strides[1],
        right.ctypes.data,
        right.shape[1],
        num_steps,
        num_lanes,
        output.ctypes.data,
        output_stride,
        is_added,
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


@pytest.mark.parametrize("num_steps", [0, 1, 5, 64])
@pytest.mark.parametrize("num_lanes", [1, 7, 15, 16])
@pytest.mark.parametrize("is_added", [0, 1])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_four_rows_of_a_product_in_place_of_what_is_there_or_added_to_it(
    rng, is_transposed, is_added, num_lanes, num_steps
):
    left = rng.standard_normal((4, num_steps + 1)).astype(np.float32)
    right = rows_among_nan(rng, max(num_steps, 1), num_lanes)
    output = rows_among_nan(rng, 4, num_lanes)
    stored = np.ascontiguousarray(left.T) if is_transposed else left
    strides = (1, 4) if is_transposed else (num_steps + 1, 1)
    expected = left[:, :num_steps].astype(np.float64) @ right[:num_steps, :num_lanes]
    expected += is_added * output[:, :num_lanes]

    product(stored, strides, right, num_steps, num_lanes, output, num_lanes + 5, is_added)

    np.testing.assert_allclose(output[:, :num_lanes], expected, rtol=1e-4, atol=1e-4)
    assert np.isnan(output[:, num_lanes:]).all()


def test_strides_of_nothing_make_one_row(rng):
    left, right = rows_among_nan(rng, 1, 8), rows_among_nan(rng, 8, 16)
    output = np.full((1, 16), np.nan, np.float32)

    product(left, (0, 1), right, 8, 16, output, 0, 0)

    np.testing.assert_allclose(output[0], left[0, :8] @ right[:, :16], rtol=1e-4, atol=1e-4)


def test_a_loop_around_them_begins_anew_each_time(rng):
    @njit
    def several(left, right, stride, size):
        return [
            vectors_numba.four_dots(left.ctypes.data, right.ctypes.data, stride, size)
            for _ in range(3)
        ]

    left, right = rows_among_nan(rng, 1, 40), rows_among_nan(rng, 4, 40)

    assert several(left, right, 45, 40) == [four_dots(left, right, 45, 40)] * 3
