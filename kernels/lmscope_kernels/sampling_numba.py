"""The loops of sampling_cpu that choose tokens, compiled by numba; this needs the extra `cpu`.

How they are compiled, and what V and P are, is in row_sampling_numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lmscope_kernels.numba_support import of_these_sources
from lmscope_kernels.row_sampling_numba import (
    BARRED,
    BLOCK,
    FLOAT_BYTES,
    LOWEST,
    ONE,
    QUARTER,
    ZERO,
    at_least,
    collect,
    first_at_least,
    first_bit,
    inner,
    kth_piece,
    largest_of,
    pad,
    reach,
    total_weight,
    weigh,
)

__all__ = ["TOTAL_ERROR", "WEIGHT_ERROR", "choose_rows"]

# The nucleus of top-p is looked for among the tokens of which so many together would be more than
# it leaves out, in the end among all.
_NUM_LEFT_OUT = (64, 1024, 16384)
# By how much of itself a weight here may differ from one of torch's softmax, but for a factor that
# all of a row have: both are within two units in the last place of the true one. And by how much a
# total may, which takes two roundings here and three there before it is added up in float64.
WEIGHT_ERROR, TOTAL_ERROR = 5e-7, 4e-7
# Logits that are at least this far apart have different weights, in the same order.
_GAP = np.float32(1e-6)
# Noise here and in float32, and a rounded score per unit of its size, differ by less than a fourth.
_NOISE_ERROR, _SCORE_ERROR, _MOST_NOISE = 2e-5, 2.0**-21, 25.0
_NAN = np.float32(np.nan)
_LN_2, _TO_EXPONENT, _BIAS = np.float32(0.6931472), np.float32(2.0**-23), np.float32(127)
_TO_UNIFORM, _HALF_STEP = np.float32(2.0**-31), np.float32(2.0**-32)
_LARGEST_UNIFORM = np.float32(1 - 2.0**-24)
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_HALF = np.uint64(32)
_BITS_1, _BITS_2, _MASK = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x7FFFFFFF)
_SIXTEEN, _THIRTEEN = np.uint32(16), np.uint32(13)


# --- filters -------------------------------------------------------------------------------


@inner
def _kth_largest(row: Any, maxima: Any, k: Any, token_ids: Any, floats: Any, sums: Any) -> Any:
    """-inf where fewer than k tokens are left."""
    values, weights, bins = floats[0], floats[1], sums[QUARTER:]
    bound = kth_piece(maxima, k, values, weights, bins)
    count = collect(row, ONE, bound, token_ids, values)
    if count < k:
        return BARRED
    for i in range(count):
        weights[i] = ONE
    return reach(values, weights, count, np.float64(k), bins)[0]


@inner
def _is_short(above: Any, total: Any, top_p: Any) -> Any:
    """Whether so much of the total weight is less than top_p of it, whoever rounded."""
    rest = max(total - above, 0.0)
    most = above * (1 - top_p) * (1 + WEIGHT_ERROR) + top_p * total * TOTAL_ERROR
    return most < top_p * rest * (1 - WEIGHT_ERROR)


@inner
def _is_enough(up_to: Any, total: Any, top_p: Any) -> Any:
    """Whether so much of the total weight is at least top_p of it, whoever rounded."""
    rest = max(total - up_to, 0.0)
    least = up_to * (1 - top_p) * (1 - WEIGHT_ERROR) - top_p * total * TOTAL_ERROR
    return least > top_p * rest * (1 + WEIGHT_ERROR)


@inner
def _least_by_top_p(
    row: Any,
    temperature: Any,
    most: Any,
    least: Any,
    top_p: Any,
    token_ids: Any,
    floats: Any,
    sums: Any,
) -> Any:
    """The lowest logit of the nucleus of what `least` leaves, and whether rounding decides it."""
    values, weights, bins = floats[0], floats[1], sums[QUARTER:]
    has_all = least > BARRED
    total = 0.0 if has_all else total_weight(row, temperature, most, weights, sums)
    for level in range(len(_NUM_LEFT_OUT) + 1):
        lowest = least
        if not has_all:
            has_all = level == len(_NUM_LEFT_OUT)
            if has_all:
                lowest = LOWEST
            else:
                smallest = (1 - top_p) * total / _NUM_LEFT_OUT[level]
                lowest = np.float32(np.float64(most) + np.log(smallest))
        count = collect(row, temperature, lowest, token_ids, values)
        weigh(values, count, ONE, most, weights)
        up_to = 0.0
        for i in range(count):
            up_to += np.float64(weights[i])
        total = up_to if has_all else total
        if not _is_enough(up_to, total, top_p):
            if has_all:
                return least, False
            continue
        for i in range(count):
            floats[2, i] = values[i]
            floats[3, i] = weights[i]
        reached, above, weight = reach(floats[2], floats[3], count, top_p * total, bins)
        if not has_all and reached - most - (lowest - most) <= _GAP:
            continue
        is_sure = _is_short(above, total, top_p) and _is_enough(above + weight, total, top_p)
        for i in range(count):
            if values[i] != reached:
                is_sure &= abs((values[i] - most) - (reached - most)) > _GAP
        return reached, is_sure
    return least, False


# --- draws ---------------------------------------------------------------------------------


@inner
def _mix_64(x: Any) -> Any:
    x = (x ^ (x >> _SHIFT_1)) * _MIX_1
    x = (x ^ (x >> _SHIFT_2)) * _MIX_2
    return x ^ (x >> _SHIFT_3)


@njit(nogil=True, error_model="numpy")
def _uniform(token_id: Any, low: Any, high: Any) -> Any:
    """u of a token, in float32, as random_draws says."""
    x = np.uint32(np.uint32(token_id) ^ low)
    x = np.uint32(x ^ (x >> _SIXTEEN))
    x = np.uint32(x * _BITS_1)
    x = np.uint32(x ^ (x >> _THIRTEEN))
    x = np.uint32(x ^ high)
    x = np.uint32(x * _BITS_2)
    x = np.uint32(x ^ (x >> _SIXTEEN))
    u = np.float32(np.int32(x & _MASK)) * _TO_UNIFORM + _HALF_STEP
    return u if u < _LARGEST_UNIFORM else _LARGEST_UNIFORM


@inner
def _draw(
    token_ids: Any, values: Any, count: Any, most: Any, seed: Any, position: Any, bounds: Any
) -> Any:
    """The best score, its token, and whether no other one is within rounding of it."""
    key = _mix_64(_mix_64(seed) + np.uint64(position + 1) * _GOLDEN_GAMMA)
    low, high = np.uint32(key), np.uint32(key >> _HALF)
    for i in range(count):
        # Noise is below -log(u), and a float32's exponent and fraction, taken as one number, is
        # below its logarithm.
        bits = np.float32(_uniform(token_ids[i], low, high)).view(np.int32)
        power = np.float32(bits) * _TO_EXPONENT
        bounds[i] = values[i] + _LN_2 * (_BIAS - power)
    end = (count + BLOCK - 1) // BLOCK * BLOCK
    for i in range(count, end):
        bounds[i] = BARRED
    margin = _NOISE_ERROR + _SCORE_ERROR * (np.float64(abs(most)) + _MOST_NOISE)
    best = second = -np.inf
    token = np.int64(0)
    for start in range(0, end, BLOCK):
        bound = max(np.float32(best - margin), LOWEST)
        found = at_least(bounds.ctypes.data + start * FLOAT_BYTES, bound)
        while found != 0:
            i = start + first_bit(found)
            found &= found - 1
            if bounds[i] < best - margin:
                continue
            u = np.float64(_uniform(token_ids[i], low, high))
            score = np.float64(values[i]) - np.log(-np.log1p(-u))
            if score > best:
                best, second, token = score, best, np.int64(token_ids[i])
            else:
                second = max(second, score)
    return best, token, best - second > margin


# --- all rows of a step --------------------------------------------------------------------


@inner
def _change(
    logits: Any,
    entry_ids: Any,
    entries: Any,
    barred_ids: Any,
    is_only: Any,
    row: Any,
) -> None:
    """row [P] = logits [V] after the changes of one request; as in sampling_cpu.Changes."""
    pad(logits, 0 if is_only else len(logits), row)
    for i in range(len(entry_ids)):
        token = entry_ids[i]
        x = logits[token] + entries[0, i]
        x = x / entries[1, i] if x > ZERO else x * entries[1, i]
        row[token] = x - entries[2, i] - entries[3, i]
    for i in range(len(barred_ids)):
        row[barred_ids[i]] = BARRED


@njit(nogil=True, cache=True, error_model="numpy")
@of_these_sources
def choose_rows(
    logits: Any,
    temperature: Any,
    log_min_p: Any,
    top_k: Any,
    top_p: Any,
    seeds: Any,
    positions: Any,
    entry_starts: Any,
    entry_ids: Any,
    entries: Any,
    barred_starts: Any,
    barred_ids: Any,
    is_only: Any,
    floats: Any,
    ids: Any,
    maxima: Any,
    sums: Any,
    best: Any,
    token_ids: Any,
    least: Any,
    is_decided: Any,
) -> None:
    """Arrays as in sampling_cpu.SamplingLoops.choose; floats, ids, maxima, sums are scratch."""
    R, V = logits.shape
    P = len(ids)
    values = floats[0]
    for r in range(R):
        row = logits[r]
        first, end = entry_starts[r], entry_starts[r + 1]
        first_barred, end_barred = barred_starts[r], barred_starts[r + 1]
        if P != V or end > first or end_barred > first_barred or is_only[r]:
            changed = floats[4, :P]
            _change(
                row,
                entry_ids[first:end],
                entries[:, first:end],
                barred_ids[first_barred:end_barred],
                is_only[r],
                changed,
            )
            row = changed
        largest, has_nan = largest_of(row, maxima)
        is_decided[r], token_ids[r], least[r] = True, 0, BARRED
        best[r] = _NAN if has_nan else largest
        if temperature[r] == ZERO:
            if not has_nan:
                token_ids[r] = first_at_least(row, largest)
            continue
        most = largest / temperature[r]
        if has_nan or not np.isfinite(most):
            is_decided[r] = False
            continue
        lowest = most + log_min_p[r]
        if top_k[r] > 0:
            kth = _kth_largest(row, maxima, top_k[r], ids, floats, sums)
            lowest = max(lowest, kth / temperature[r])
        is_sure = True
        if top_p[r] < ONE:
            lowest, is_sure = _least_by_top_p(
                row, temperature[r], most, lowest, np.float64(top_p[r]), ids, floats, sums
            )
        if not is_sure:
            is_decided[r] = False
            continue
        least[r] = lowest
        if lowest > BARRED:
            count = collect(row, temperature[r], lowest, ids, values)
        else:
            count = V
            for i in range(V):
                ids[i] = i
                values[i] = row[i] / temperature[r]
        score, token, is_sure = _draw(ids, values, count, most, seeds[r], positions[r], floats[1])
        best[r], token_ids[r], is_decided[r] = np.float32(score), token, is_sure
