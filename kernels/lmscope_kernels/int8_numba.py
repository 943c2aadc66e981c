"""The loops of int8_linear_cpu and int8_step_cpu, compiled by numba (the extra `cpu`).

Rows are rounded to 16-bit integers before they meet the 8-bit weights: then a product is one
multiply-add of integers, which a processor does on twice as many numbers at a time as on floats,
and the sum is exact. How many levels a row has is such that the sum fits into 32 bits.

One piece of work is one output of a matrix for all M rows, so its weights come from memory once.
M rows, E hidden size, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from lmscope_kernels.decode_attention_numba import EXACT_ENOUGH, attend_piece, exp
from lmscope_kernels.numba_support import of_these_sources

__all__ = ["layer_step", "linear_parallel", "linear_serial"]

_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST_SUM, _LARGEST_WEIGHT, _LARGEST_INT16 = 2**31 - 1, 127, 2**15 - 1
# Rows with no larger number count as zeros: what they would be multiplied by is no float32.
_LEAST = np.float32(1e-33)


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _round(rows: Any, integers: Any, scales: Any) -> None:
    """rows [M, in] is about integers [M, in] times scales [M]; a row of zeros has scale 0.

    The scale of a row in which a number is none, or is infinite, is NaN: integers cannot be.
    """
    num_inputs = rows.shape[1]
    levels = np.float32(min(_LARGEST_INT16, _LARGEST_SUM // (_LARGEST_WEIGHT * num_inputs)))
    for m in range(rows.shape[0]):
        largest = zero = _ZERO
        for k in range(num_inputs):
            largest = max(largest, abs(rows[m, k]))
            zero += rows[m, k] * _ZERO
        scales[m] = largest / levels + zero
        factor = levels / largest if largest > _LEAST else _ZERO
        for k in range(num_inputs):
            integers[m, k] = np.int16(np.rint(rows[m, k] * factor))


@njit(nogil=True)
def _dot(integers: Any, weight: Any) -> Any:
    """Of two rows of integers, 16 and 8 bits wide; the casts keep it in 32 bits."""
    total = np.int32(0)
    for k in range(len(weight)):
        total = np.int32(total + np.int32(np.int32(integers[k]) * np.int32(weight[k])))
    return np.float32(total)


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def linear_parallel(rows: Any, weight: Any, scales: Any, bias: Any, output: Any) -> None:
    """output [M, out] = rows [M, in] times weight [out, in]; bias [out], or [0] for none."""
    M = len(rows)
    has_bias = len(bias) > 0
    integers = np.empty(rows.shape, np.int16)
    row_scales = np.empty(M, np.float32)
    _round(rows, integers, row_scales)
    for n in prange(len(weight)):
        added = bias[n] if has_bias else _ZERO
        for m in range(M):
            output[m, n] = _dot(integers[m], weight[n]) * scales[n] * row_scales[m] + added


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def linear_serial(rows: Any, weight: Any, scales: Any, bias: Any, output: Any) -> None:
    """The same on the calling thread."""
    M = len(rows)
    has_bias = len(bias) > 0
    integers = np.empty(rows.shape, np.int16)
    row_scales = np.empty(M, np.float32)
    _round(rows, integers, row_scales)
    for n in range(len(weight)):
        added = bias[n] if has_bias else _ZERO
        for m in range(M):
            output[m, n] = _dot(integers[m], weight[n]) * scales[n] * row_scales[m] + added


# With NumPy's rule for a division by zero, as in layer_rows_numba.
@njit(fastmath=EXACT_ENOUGH, nogil=True, error_model="numpy")
def _norm(rows: Any, weight: Any, epsilon: Any, output: Any) -> None:
    for m in range(rows.shape[0]):
        squares = _ZERO
        for e in range(rows.shape[1]):
            squares += rows[m, e] * rows[m, e]
        factor = _ONE / np.sqrt(squares / np.float32(rows.shape[1]) + epsilon)
        for e in range(rows.shape[1]):
            output[m, e] = rows[m, e] * factor * weight[e]


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def layer_step(
    hidden: Any,
    norms: Any,
    epsilons: Any,
    qkv: Any,
    o: Any,
    gate_up: Any,
    down: Any,
    cosine: Any,
    sine: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    block_table: Any,
    first_keys: Any,
    seq_lens: Any,
    scale: Any,
    residual_multiplier: Any,
) -> None:
    """One decoder layer for M requests with one row each; arrays as in int8_step_cpu."""
    M, E = hidden.shape
    S, K, D = key_cache.shape[1], key_cache.shape[2], key_cache.shape[3]
    width = o[0].shape[1]
    num_query_heads = width // D
    half = D // 2
    size = down[0].shape[1]

    normed = np.empty((M, E), np.float32)
    integers = np.empty((M, E), np.int16)
    row_scales = np.empty(M, np.float32)
    _norm(hidden, norms[0], epsilons[0], normed)
    _round(normed, integers, row_scales)
    weight, scales, bias = qkv
    heads = np.empty((M, len(weight)), np.float32)
    has_bias = len(bias) > 0
    for n in prange(len(weight)):
        added = bias[n] if has_bias else _ZERO
        for m in range(M):
            heads[m, n] = _dot(integers[m], weight[n]) * scales[n] * row_scales[m] + added

    for m in range(M):
        for head in range(num_query_heads + K):
            at = head * D
            for d in range(half):
                left, right = heads[m, at + d], heads[m, at + half + d]
                # The sine of the first half of a head is negative already.
                heads[m, at + d] = left * cosine[m, d] + right * sine[m, d]
                heads[m, at + half + d] = right * cosine[m, half + d] + left * sine[m, half + d]
        block, place = slots[m] // S, slots[m] % S
        for k in range(K):
            for d in range(D):
                key_cache[block, place, k, d] = heads[m, width + k * D + d]
                value_cache[block, place, k, d] = heads[m, width + (K + k) * D + d]

    attended = np.empty((M, width), np.float32)
    rows = np.arange(M)
    for piece in prange(M * K):
        attend_piece(
            np.int64(piece),
            K,
            heads,
            num_query_heads,
            key_cache,
            value_cache,
            block_table,
            first_keys,
            seq_lens,
            rows,
            scale,
            _ZERO,
            attended,
        )

    attended_integers = np.empty((M, width), np.int16)
    _round(attended, attended_integers, row_scales)
    weight, scales, bias = o
    has_bias = len(bias) > 0
    for n in prange(E):
        added = bias[n] if has_bias else _ZERO
        for m in range(M):
            new = _dot(attended_integers[m], weight[n]) * scales[n] * row_scales[m] + added
            hidden[m, n] += new * residual_multiplier

    _norm(hidden, norms[1], epsilons[1], normed)
    _round(normed, integers, row_scales)
    activated = np.empty((M, size), np.float32)
    weight, scales, bias = gate_up
    has_bias = len(bias) > 0
    for n in prange(size):
        gate_bias = bias[n] if has_bias else _ZERO
        up_bias = bias[size + n] if has_bias else _ZERO
        for m in range(M):
            gate = _dot(integers[m], weight[n]) * scales[n] * row_scales[m] + gate_bias
            up = _dot(integers[m], weight[size + n]) * scales[size + n] * row_scales[m] + up_bias
            activated[m, n] = gate / (_ONE + exp(-gate)) * up

    activated_integers = np.empty((M, size), np.int16)
    _round(activated, activated_integers, row_scales)
    weight, scales, bias = down
    has_bias = len(bias) > 0
    for n in prange(E):
        added = bias[n] if has_bias else _ZERO
        for m in range(M):
            new = _dot(activated_integers[m], weight[n]) * scales[n] * row_scales[m] + added
            hidden[m, n] += new * residual_multiplier
