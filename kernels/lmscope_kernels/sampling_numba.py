"""The loops of sampling_cpu, compiled by numba; importing this needs the extra `cpu`.

Nothing here is compiled with fastmath: each operation is rounded as IEEE 754 says and sums have one
order, so a row has the same bits alone and in any batch, and on every processor. Loops over a row
add up and compare in columns, which makes vector instructions of them without reordering anything.

V vocabulary, P the same rounded up to whole blocks of 64: a row of numbers that is worked on is as
long, -inf behind the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from lmscope_kernels.numba_support import of_these_sources
from lmscope_kernels.vector_code import INT, LANES, at, load, on_all_lanes

__all__ = ["BLOCK", "NUM_PIECES", "NUM_SUMS", "choose_rows", "log_probabilities"]

# Numbers that are compared at a time, one bit for each.
BLOCK = 64
# A row is cut into so many pieces: number i is in piece i % NUM_PIECES.
NUM_PIECES = 512
_NUM_BINS = 128
_QUARTER = NUM_PIECES // 4
NUM_SUMS = _QUARTER + _NUM_BINS
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
_FLOAT_BYTES = 4
_ZERO, _ONE = np.float32(0), np.float32(1)
_BARRED, _LOWEST = np.float32(-np.inf), np.float32(np.finfo(np.float32).min)
_NAN = np.float32(np.nan)
_SMALLEST, _HALF_ONE, _LOG2_E = np.float32(-87), np.float32(0.5), np.float32(1.4426950408889634)
# ln 2 in two parts, the first of which times a small integer is exact.
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
_LN_2, _TO_EXPONENT, _BIAS = np.float32(0.6931472), np.float32(2.0**-23), np.float32(127)
_TO_UNIFORM, _HALF_STEP = np.float32(2.0**-31), np.float32(2.0**-32)
_LARGEST_UNIFORM = np.float32(1 - 2.0**-24)
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_HALF = np.uint64(32)
_BITS_1, _BITS_2, _MASK = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x7FFFFFFF)
_SIXTEEN, _THIRTEEN = np.uint32(16), np.uint32(13)

# Cannot be called from Python, which saves a tenth of the time to compile.
_inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def at_least(context: Any, address: Any, bound: Any) -> Any:
    """Which of the 64 numbers at `address` are at least `bound`: an int64, bit 0 the first."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, bound = arguments
        bounds, found = on_all_lanes(builder, bound), INT(0)
        for start in range(0, BLOCK, LANES):
            numbers = load(builder, at(builder, address, INT(start)), None)
            is_above = builder.fcmp_ordered(">=", numbers, bounds)
            bits = builder.zext(builder.bitcast(is_above, ir.IntType(LANES)), INT)
            found = builder.or_(found, builder.shl(bits, INT(start)))
        return found

    return types.int64(types.int64, types.float32), code


@intrinsic
def first_bit(context: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set; one is."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code


@njit(nogil=True, error_model="numpy", inline="always")
def _exp(x: Any) -> Any:
    """e**x in float32 for what is not above 0, to 2 units in the last place; at least e**-87."""
    x = x if x > _SMALLEST else _SMALLEST
    n = np.floor(x * _LOG2_E + _HALF_ONE)
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return p * np.int32((np.int32(n) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)


# --- a row ---------------------------------------------------------------------------------


@_inner
def _largest(row: Any, maxima: Any) -> Any:
    """The largest number of a row and whether it has a NaN; maxima [NUM_PIECES] of each piece."""
    for i in range(NUM_PIECES):
        maxima[i] = _BARRED
    num_nan = 0
    for start in range(0, len(row), NUM_PIECES):
        part = row[start : start + NUM_PIECES]
        for i in range(len(part)):
            x = part[i]
            maxima[i] = x if x > maxima[i] else maxima[i]
            num_nan += x != x
    largest = _BARRED
    for i in range(NUM_PIECES):
        largest = max(largest, maxima[i])
    return largest, num_nan > 0


@njit(nogil=True, error_model="numpy")
def _weigh(values: Any, count: Any, temperature: Any, most: Any, weights: Any) -> None:
    """weights [count] = exp(values / temperature - most)"""
    # As long as what follows, and no division where there is none.
    if temperature == _ONE:
        for i in range(count):
            weights[i] = _exp(values[i] - most)
    else:
        for i in range(count):
            weights[i] = _exp(values[i] / temperature - most)


@njit(nogil=True, error_model="numpy")
def _total_weight(row: Any, temperature: Any, most: Any, weights: Any, sums: Any) -> Any:
    """The sum of exp(row / temperature - most), which no barred token adds to by more than 1e-37.

    weights    [P] at least, scratch
    sums       [NUM_SUMS] float64
    """
    for i in range(_QUARTER):
        sums[i] = 0.0
    for start in range(0, len(row), NUM_PIECES):
        part = row[start : start + NUM_PIECES]
        _weigh(part, len(part), temperature, most, weights)
        for i in range(len(part), NUM_PIECES):
            weights[i] = _ZERO
        for i in range(_QUARTER):
            left = weights[i] + weights[i + _QUARTER]
            right = weights[i + 2 * _QUARTER] + weights[i + 3 * _QUARTER]
            sums[i] += np.float64(left + right)
    total = 0.0
    for i in range(_QUARTER):
        total += sums[i]
    return total


@_inner
def _first_at_least(row: Any, bound: Any) -> Any:
    for start in range(0, len(row), BLOCK):
        found = at_least(row.ctypes.data + start * _FLOAT_BYTES, bound)
        if found != 0:
            return start + first_bit(found)
    return 0


@_inner
def _collect(row: Any, temperature: Any, least: Any, token_ids: Any, values: Any) -> Any:
    """The tokens whose row / temperature is at least `least`, above -inf: how many there are."""
    # Before the division, with room for its rounding where numbers are tiny as well.
    product = np.float64(least) * np.float64(temperature)
    bound = np.float32(product - abs(product) * 1e-6 - np.float64(temperature) * 2.0**-148)
    bound = max(bound, _LOWEST)
    count = 0
    for start in range(0, len(row), BLOCK):
        found = at_least(row.ctypes.data + start * _FLOAT_BYTES, bound)
        while found != 0:
            place = start + first_bit(found)
            found &= found - 1
            value = row[place] / temperature
            if value >= least:
                token_ids[count] = place
                values[count] = value
                count += 1
    return count


@_inner
def _reach(values: Any, weights: Any, count: Any, target: Any, bins: Any) -> Any:
    """The largest value from which up the weights reach the target, or the lowest of all.

    values, weights    [count] finite; above zero; in no order afterwards
    bins               [_NUM_BINS] float64
    returns            the value, what lies above it, and what those weigh that are equal to it
    """
    above = 0.0
    while True:
        low = high = values[0]
        for i in range(1, count):
            low = min(low, values[i])
            high = max(high, values[i])
        if low == high:
            weight = 0.0
            for i in range(count):
                weight += np.float64(weights[i])
            return low, above, weight
        scale = _NUM_BINS / (np.float64(high) - np.float64(low))
        for i in range(_NUM_BINS):
            bins[i] = 0.0
        for i in range(count):
            bins[_bin(values[i], high, scale)] += np.float64(weights[i])
        chosen = 0
        while chosen < _NUM_BINS - 1 and above + bins[chosen] < target:
            above += bins[chosen]
            chosen += 1
        left = 0
        for i in range(count):
            if _bin(values[i], high, scale) == chosen:
                values[left] = values[i]
                weights[left] = weights[i]
                left += 1
        count = left


@_inner
def _bin(value: Any, high: Any, scale: Any) -> Any:
    # The lowest value is in the last one.
    return min(np.int64((np.float64(high) - np.float64(value)) * scale), _NUM_BINS - 1)


@_inner
def _kth_piece(maxima: Any, k: Any, values: Any, weights: Any, bins: Any) -> Any:
    """Above -inf, a number that at least k of a row reach, if each of k pieces has a number."""
    count = 0
    for i in range(NUM_PIECES):
        if maxima[i] > _BARRED:
            values[count] = maxima[i]
            weights[count] = _ONE
            count += 1
    return _reach(values, weights, count, np.float64(k), bins)[0] if count >= k else _LOWEST


# --- filters -------------------------------------------------------------------------------


@_inner
def _kth_largest(row: Any, maxima: Any, k: Any, token_ids: Any, floats: Any, sums: Any) -> Any:
    """-inf where fewer than k tokens are left."""
    values, weights, bins = floats[0], floats[1], sums[_QUARTER:]
    bound = _kth_piece(maxima, k, values, weights, bins)
    count = _collect(row, _ONE, bound, token_ids, values)
    if count < k:
        return _BARRED
    for i in range(count):
        weights[i] = _ONE
    return _reach(values, weights, count, np.float64(k), bins)[0]


@_inner
def _is_short(above: Any, total: Any, top_p: Any) -> Any:
    """Whether so much of the total weight is less than top_p of it, whoever rounded."""
    rest = max(total - above, 0.0)
    most = above * (1 - top_p) * (1 + WEIGHT_ERROR) + top_p * total * TOTAL_ERROR
    return most < top_p * rest * (1 - WEIGHT_ERROR)


@_inner
def _is_enough(up_to: Any, total: Any, top_p: Any) -> Any:
    """Whether so much of the total weight is at least top_p of it, whoever rounded."""
    rest = max(total - up_to, 0.0)
    least = up_to * (1 - top_p) * (1 - WEIGHT_ERROR) - top_p * total * TOTAL_ERROR
    return least > top_p * rest * (1 + WEIGHT_ERROR)


@_inner
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
    values, weights, bins = floats[0], floats[1], sums[_QUARTER:]
    has_all = least > _BARRED
    total = 0.0 if has_all else _total_weight(row, temperature, most, weights, sums)
    for level in range(len(_NUM_LEFT_OUT) + 1):
        lowest = least
        if not has_all:
            has_all = level == len(_NUM_LEFT_OUT)
            if has_all:
                lowest = _LOWEST
            else:
                smallest = (1 - top_p) * total / _NUM_LEFT_OUT[level]
                lowest = np.float32(np.float64(most) + np.log(smallest))
        count = _collect(row, temperature, lowest, token_ids, values)
        _weigh(values, count, _ONE, most, weights)
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
        reached, above, weight = _reach(floats[2], floats[3], count, top_p * total, bins)
        if not has_all and reached - most - (lowest - most) <= _GAP:
            continue
        is_sure = _is_short(above, total, top_p) and _is_enough(above + weight, total, top_p)
        for i in range(count):
            if values[i] != reached:
                is_sure &= abs((values[i] - most) - (reached - most)) > _GAP
        return reached, is_sure
    return least, False


# --- draws ---------------------------------------------------------------------------------


@_inner
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


@_inner
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
        bounds[i] = _BARRED
    margin = _NOISE_ERROR + _SCORE_ERROR * (np.float64(abs(most)) + _MOST_NOISE)
    best = second = -np.inf
    token = np.int64(0)
    for start in range(0, end, BLOCK):
        bound = max(np.float32(best - margin), _LOWEST)
        found = at_least(bounds.ctypes.data + start * _FLOAT_BYTES, bound)
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


@_inner
def _pad(source: Any, count: Any, row: Any) -> None:
    for i in range(count):
        row[i] = source[i]
    for i in range(count, len(row)):
        row[i] = _BARRED


@_inner
def _change(
    logits: Any,
    entry_ids: Any,
    entries: Any,
    barred_ids: Any,
    is_only: Any,
    row: Any,
) -> None:
    """row [P] = logits [V] after the changes of one request; as in sampling_cpu.Changes."""
    _pad(logits, 0 if is_only else len(logits), row)
    for i in range(len(entry_ids)):
        token = entry_ids[i]
        x = logits[token] + entries[0, i]
        x = x / entries[1, i] if x > _ZERO else x * entries[1, i]
        row[token] = x - entries[2, i] - entries[3, i]
    for i in range(len(barred_ids)):
        row[barred_ids[i]] = _BARRED


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
        largest, has_nan = _largest(row, maxima)
        is_decided[r], token_ids[r], least[r] = True, 0, _BARRED
        best[r] = _NAN if has_nan else largest
        if temperature[r] == _ZERO:
            if not has_nan:
                token_ids[r] = _first_at_least(row, largest)
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
        if top_p[r] < _ONE:
            lowest, is_sure = _least_by_top_p(
                row, temperature[r], most, lowest, np.float64(top_p[r]), ids, floats, sums
            )
        if not is_sure:
            is_decided[r] = False
            continue
        least[r] = lowest
        if lowest > _BARRED:
            count = _collect(row, temperature[r], lowest, ids, values)
        else:
            count = V
            for i in range(V):
                ids[i] = i
                values[i] = row[i] / temperature[r]
        score, token, is_sure = _draw(ids, values, count, most, seeds[r], positions[r], floats[1])
        best[r], token_ids[r], is_decided[r] = np.float32(score), token, is_sure


@njit(nogil=True, cache=True, error_model="numpy")
@of_these_sources
def log_probabilities(
    logits: Any,
    chosen: Any,
    k: Any,
    floats: Any,
    ids: Any,
    maxima: Any,
    sums: Any,
    top_ids: Any,
    top_values: Any,
    ranks: Any,
    is_done: Any,
) -> None:
    """Arrays as in sampling_cpu.SamplingLoops.log_probabilities; scratch as above."""
    N, V = logits.shape
    P = len(ids)
    values = floats[0]
    for n in range(N):
        row = logits[n]
        if P != V:
            padded = floats[4, :P]
            _pad(row, V, padded)
            row = padded
        most, has_nan = _largest(row, maxima)
        is_done[n] = not has_nan and np.isfinite(most)
        if not is_done[n]:
            continue
        log_total = np.float32(np.log(_total_weight(row, _ONE, most, floats[1], sums)))
        own = row[chosen[n]] - most - log_total
        rank = 0
        for i in range(V):
            rank += row[i] - most - log_total >= own
        top_ids[n, 0], top_values[n, 0], ranks[n] = chosen[n], own, rank
        if k == 0:
            continue
        kth = _kth_piece(maxima, k, values, floats[1], sums[_QUARTER:])
        # Some that are less likely may be as likely once rounded.
        slack = (abs(kth - most) + abs(log_total) + _ONE) * np.float32(1e-6)
        count = _collect(row, _ONE, kth - slack, ids, values)
        is_done[n] = count >= k
        num_kept = 0
        for i in range(count):
            value = values[i] - most - log_total
            if num_kept == k:
                if value <= top_values[n, k]:
                    continue
            else:
                num_kept += 1
            # Behind those that are as likely, whose ids are lower.
            place = num_kept
            while place > 1 and top_values[n, place - 1] < value:
                top_values[n, place] = top_values[n, place - 1]
                top_ids[n, place] = top_ids[n, place - 1]
                place -= 1
            top_values[n, place], top_ids[n, place] = value, ids[i]
