"""The loops of layer_rows_cpu, compiled by numba; importing this needs the extra `cpu`.

T rows, E hidden size, H query heads, K KV heads, D head size. Each row is worked on by itself, so
it has the same bits alone and among others, with one thread and with many. An optional array that
is not there is an empty one, so that one compiled version serves every family.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from lmscope_kernels.decode_attention_numba import EXACT_ENOUGH, exp
from lmscope_kernels.numba_support import of_these_sources

__all__ = [
    "add_norm",
    "rotate_and_store",
    "silu_mul_parallel",
    "silu_mul_serial",
]

_ZERO, _ONE = np.float32(0), np.float32(1)


# With NumPy's rule for a division by zero: a row of zeros is not a number where epsilon is zero, as
# in torch, and no error that would end the step of all requests.
@njit(fastmath=EXACT_ENOUGH, nogil=True, error_model="numpy")
def _scale_of(row: Any, epsilon: Any) -> Any:
    """One divided by the root of the mean of squares."""
    squares = _ZERO
    for e in range(len(row)):
        squares += row[e] * row[e]
    return _ONE / np.sqrt(squares / np.float32(len(row)) + epsilon)


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def add_norm(
    hidden: Any,
    new: Any,
    new_weight: Any,
    new_epsilon: Any,
    multiplier: Any,
    weight: Any,
    epsilon: Any,
    output: Any,
) -> None:
    """Arrays as in layer_rows_cpu.LayerLoops.

    On one thread: a row takes less than the start of another.
    """
    for t in range(len(hidden)):
        row = hidden[t]
        if len(new) > 0:
            added = new[t]
            if len(new_weight) > 0:
                factor = _scale_of(added, new_epsilon) * multiplier
                for e in range(len(row)):
                    row[e] += added[e] * factor * new_weight[e]
            else:
                for e in range(len(row)):
                    row[e] += added[e] * multiplier
        if len(weight) > 0:
            factor = _scale_of(row, epsilon)
            normed = output[t]
            for e in range(len(row)):
                normed[e] = row[e] * factor * weight[e]


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _norm_heads(part: Any, weight: Any, epsilon: Any) -> None:
    """part [n * len(weight)], each stretch of len(weight) numbers by itself."""
    size = len(weight)
    for start in range(0, len(part), size):
        group = part[start : start + size]
        factor = _scale_of(group, epsilon)
        for e in range(size):
            group[e] = group[e] * factor * weight[e]


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def rotate_and_store(
    heads: Any,
    num_query_heads: Any,
    query_weight: Any,
    query_epsilon: Any,
    key_weight: Any,
    key_epsilon: Any,
    cosine: Any,
    sine: Any,
    slots: Any,
    key_cache: Any,
    value_cache: Any,
) -> None:
    """Arrays as in layer_rows_cpu.LayerLoops. On one thread, as add_norm."""
    S, K, D = key_cache.shape[1], key_cache.shape[2], key_cache.shape[3]
    keys, values, half = num_query_heads * D, (num_query_heads + K) * D, D // 2
    for t in range(len(heads)):
        row = heads[t]
        if len(query_weight) > 0:
            _norm_heads(row[:keys], query_weight, query_epsilon)
            _norm_heads(row[keys:values], key_weight, key_epsilon)
        if len(cosine) > 0:
            for start in range(0, values, D):
                left, right = row[start : start + half], row[start + half : start + D]
                for d in range(half):
                    x, y = left[d], right[d]
                    # The sine of the first half of a head is negative already.
                    left[d] = x * cosine[t, 0, d] + y * sine[t, 0, d]
                    right[d] = y * cosine[t, 0, half + d] + x * sine[t, 0, half + d]
        block, place = slots[t] // S, slots[t] % S
        for k in range(K):
            key, value = key_cache[block, place, k], value_cache[block, place, k]
            for d in range(D):
                key[d] = row[keys + k * D + d]
                value[d] = row[values + k * D + d]


# Without NumPy's rule for a division by zero each division may raise, and a loop that may end early
# is not compiled to vector instructions: it then takes ten times as long.
@njit(fastmath=EXACT_ENOUGH, nogil=True, error_model="numpy")
def _silu_mul(gate_up: Any, output: Any) -> None:
    size = len(output)
    gates, ups = gate_up[:size], gate_up[size:]
    for n in range(size):
        gate = gates[n]
        output[n] = gate / (_ONE + exp(-gate)) * ups[n]


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True, error_model="numpy")
@of_these_sources
def silu_mul_parallel(gate_up: Any, output: Any) -> None:
    """output [T, I] = SiLU of the first half of gate_up [T, 2 I] times the second half."""
    for t in prange(len(output)):
        _silu_mul(gate_up[t], output[t])


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True, error_model="numpy")
@of_these_sources
def silu_mul_serial(gate_up: Any, output: Any) -> None:
    """The same on the calling thread."""
    for t in range(len(output)):
        _silu_mul(gate_up[t], output[t])
