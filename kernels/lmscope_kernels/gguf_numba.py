"""The loops of gguf_linear_cpu, compiled by numba (the extra `cpu`).

The innermost loop goes over the 64 rows of a tile, and the 32 products of a block are written
inside it, so that the compiler holds a register of outputs and multiplies into it. It only does so
where it sees that the arrays do not overlap and that what is inside is short: hence one array of
outputs for both rows, indices that are constants away from each other, and two loops of eight.
`reassociated` sums are allowed; the order is the same in each run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from lmscope_kernels.decode_attention_numba import EXACT_ENOUGH
from lmscope_kernels.numba_support import of_these_sources

__all__ = ["linear_parallel", "linear_serial"]

_R = 64
_ZERO = np.float32(0)
_LOW, _FOUR = np.int32(15), np.int32(4)


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _one_row_4(quanta: Any, scales: Any, minima: Any, x: Any, sums: Any, output: Any) -> None:
    """output [R] += a tile of 4-bit blocks times x [B, 32]; sums [B, 1] of x."""
    for b in range(len(quanta)):
        q, scale, minimum, numbers, total = quanta[b], scales[b], minima[b], x[b], sums[b, 0]
        for r in range(_R):
            new = _ZERO
            for k in range(16):
                two = np.int32(q[_R * k + r])
                new += np.float32(np.int32(two & _LOW)) * numbers[k]
                new += np.float32(np.int32(two >> _FOUR)) * numbers[16 + k]
            output[r] += scale[r] * new + minimum[r] * total


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _two_rows_4(quanta: Any, scales: Any, minima: Any, x: Any, sums: Any, output: Any) -> None:
    """The same for output [2 R], x [B, 2 * 32] and sums [B, 2]."""
    for b in range(len(quanta)):
        q, scale, minimum, numbers = quanta[b], scales[b], minima[b], x[b]
        first_sum, second_sum = sums[b, 0], sums[b, 1]
        for r in range(_R):
            first = second = _ZERO
            for k in range(8):
                two = np.int32(q[_R * k + r])
                low = np.float32(np.int32(two & _LOW))
                high = np.float32(np.int32(two >> _FOUR))
                first += low * numbers[k] + high * numbers[16 + k]
                second += low * numbers[32 + k] + high * numbers[48 + k]
            for k in range(8, 16):
                two = np.int32(q[_R * k + r])
                low = np.float32(np.int32(two & _LOW))
                high = np.float32(np.int32(two >> _FOUR))
                first += low * numbers[k] + high * numbers[16 + k]
                second += low * numbers[32 + k] + high * numbers[48 + k]
            output[r] += scale[r] * first + minimum[r] * first_sum
            output[_R + r] += scale[r] * second + minimum[r] * second_sum


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _one_row_8(quanta: Any, scales: Any, x: Any, output: Any) -> None:
    """output [R] += a tile of 8-bit blocks times x [B, 32]."""
    for b in range(len(quanta)):
        q, scale, numbers = quanta[b], scales[b], x[b]
        for r in range(_R):
            new = _ZERO
            for k in range(16):
                new += np.float32(np.int32(q[_R * k + r])) * numbers[k]
            for k in range(16, 32):
                new += np.float32(np.int32(q[_R * k + r])) * numbers[k]
            output[r] += scale[r] * new


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _two_rows_8(quanta: Any, scales: Any, x: Any, output: Any) -> None:
    """The same for output [2 R] and x [B, 2 * 32]."""
    for b in range(len(quanta)):
        q, scale, numbers = quanta[b], scales[b], x[b]
        for r in range(_R):
            first = second = _ZERO
            for k in range(16):
                weight = np.float32(np.int32(q[_R * k + r]))
                first += weight * numbers[k]
                second += weight * numbers[32 + k]
            for k in range(16, 32):
                weight = np.float32(np.int32(q[_R * k + r]))
                first += weight * numbers[k]
                second += weight * numbers[32 + k]
            output[r] += scale[r] * first
            output[_R + r] += scale[r] * second


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _by_block(rows: Any, x: Any, sums: Any) -> None:
    """rows [M, in] as x [B, M * 32], and the sums [B, M] of what belongs to one block."""
    for b in range(len(x)):
        for m in range(len(rows)):
            total = _ZERO
            for k in range(32):
                number = rows[m, 32 * b + k]
                x[b, 32 * m + k] = number
                total += number
            sums[b, m] = total


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _tile(
    t: Any, quanta: Any, scales: Any, minima: Any, bias: Any, x: Any, sums: Any, output: Any
) -> None:
    """The outputs of tile t, for all rows."""
    M = len(output)
    tile = np.zeros(M * _R, np.float32)
    if len(minima) > 0:
        if M == 1:
            _one_row_4(quanta[t], scales[t], minima[t], x, sums, tile)
        else:
            _two_rows_4(quanta[t], scales[t], minima[t], x, sums, tile)
    elif M == 1:
        _one_row_8(quanta[t], scales[t], x, tile)
    else:
        _two_rows_8(quanta[t], scales[t], x, tile)
    has_bias = len(bias) > 0
    for m in range(M):
        for r in range(_R):
            added = bias[t * _R + r] if has_bias else _ZERO
            output[m, t * _R + r] = tile[m * _R + r] + added


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def linear_parallel(
    rows: Any, quanta: Any, scales: Any, minima: Any, bias: Any, output: Any
) -> None:
    """output [M, out] = rows [M, in] times the matrix; bias [out], or [0] for none."""
    x = np.empty((quanta.shape[1], len(rows) * 32), np.float32)
    sums = np.empty((quanta.shape[1], len(rows)), np.float32)
    _by_block(rows, x, sums)
    for t in prange(len(quanta)):
        _tile(t, quanta, scales, minima, bias, x, sums, output)


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def linear_serial(rows: Any, quanta: Any, scales: Any, minima: Any, bias: Any, output: Any) -> None:
    """The same on the calling thread."""
    x = np.empty((quanta.shape[1], len(rows) * 32), np.float32)
    sums = np.empty((quanta.shape[1], len(rows)), np.float32)
    _by_block(rows, x, sums)
    for t in range(len(quanta)):
        _tile(t, quanta, scales, minima, bias, x, sums, output)
