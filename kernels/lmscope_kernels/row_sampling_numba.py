"""Loops over rows of logits, compiled by numba; importing this needs the extra `cpu`.

They are what sampling_numba is made of, and log probabilities. Nothing here or there is compiled
with fastmath: each operation is rounded as IEEE 754 says and sums have one order, so a row has the
same bits alone and in any batch, and on every processor. Loops over a row add up and compare in
columns, which makes vector instructions of them without reordering anything.

V vocabulary, P the same rounded up to whole blocks of 64: a row of numbers that is worked on is as
long, -inf behind the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from lmscope_kernels.decode_attention_numba import exp
from lmscope_kernels.numba_support import of_these_sources
from lmscope_kernels.vector_code import INT, LANES, at, load, on_all_lanes

__all__ = [
    "BARRED",
    "BLOCK",
    "FLOAT_BYTES",
    "LOWEST",
    "NUM_PIECES",
    "NUM_SUMS",
    "ONE",
    "QUARTER",
    "ZERO",
    "at_least",
    "collect",
    "first_at_least",
    "first_bit",
    "inner",
    "kth_piece",
    "largest_of",
    "log_probabilities",
    "pad",
    "reach",
    "total_weight",
    "weigh",
]

# Numbers that are compared at a time, one bit for each.
BLOCK = 64
# A row is cut into so many pieces: number i is in piece i % NUM_PIECES.
NUM_PIECES = 512
QUARTER = NUM_PIECES // 4
_NUM_BINS = 128
NUM_SUMS = QUARTER + _NUM_BINS
FLOAT_BYTES = 4
ZERO, ONE = np.float32(0), np.float32(1)
BARRED, LOWEST = np.float32(-np.inf), np.float32(np.finfo(np.float32).min)

# Cannot be called from Python, which saves a tenth of the time to compile.
inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


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


@inner
def largest_of(row: Any, maxima: Any) -> Any:
    """The largest number of a row and whether it has a NaN; maxima [NUM_PIECES] of each piece."""
    for i in range(NUM_PIECES):
        maxima[i] = BARRED
    num_nan = 0
    for start in range(0, len(row), NUM_PIECES):
        part = row[start : start + NUM_PIECES]
        for i in range(len(part)):
            x = part[i]
            maxima[i] = x if x > maxima[i] else maxima[i]
            num_nan += x != x
    largest = BARRED
    for i in range(NUM_PIECES):
        largest = max(largest, maxima[i])
    return largest, num_nan > 0


@njit(nogil=True, error_model="numpy")
def weigh(values: Any, count: Any, temperature: Any, most: Any, weights: Any) -> None:
    """weights [count] = exp(values / temperature - most)"""
    # As long as what follows, and no division where there is none.
    if temperature == ONE:
        for i in range(count):
            weights[i] = exp(values[i] - most)
    else:
        for i in range(count):
            weights[i] = exp(values[i] / temperature - most)


@njit(nogil=True, error_model="numpy")
def total_weight(row: Any, temperature: Any, most: Any, weights: Any, sums: Any) -> Any:
    """The sum of exp(row / temperature - most), which no barred token adds to by more than 1e-37.

    weights    [P] at least, scratch
    sums       [NUM_SUMS] float64
    """
    for i in range(QUARTER):
        sums[i] = 0.0
    for start in range(0, len(row), NUM_PIECES):
        part = row[start : start + NUM_PIECES]
        weigh(part, len(part), temperature, most, weights)
        for i in range(len(part), NUM_PIECES):
            weights[i] = ZERO
        for i in range(QUARTER):
            left = weights[i] + weights[i + QUARTER]
            right = weights[i + 2 * QUARTER] + weights[i + 3 * QUARTER]
            sums[i] += np.float64(left + right)
    total = 0.0
    for i in range(QUARTER):
        total += sums[i]
    return total


@inner
def first_at_least(row: Any, bound: Any) -> Any:
    for start in range(0, len(row), BLOCK):
        found = at_least(row.ctypes.data + start * FLOAT_BYTES, bound)
        if found != 0:
            return start + first_bit(found)
    return 0


@inner
def collect(row: Any, temperature: Any, least: Any, token_ids: Any, values: Any) -> Any:
    """The tokens whose row / temperature is at least `least`, above -inf: how many there are."""
    # Before the division, with room for its rounding where numbers are tiny as well.
    product = np.float64(least) * np.float64(temperature)
    bound = np.float32(product - abs(product) * 1e-6 - np.float64(temperature) * 2.0**-148)
    bound = max(bound, LOWEST)
    count = 0
    for start in range(0, len(row), BLOCK):
        found = at_least(row.ctypes.data + start * FLOAT_BYTES, bound)
        while found != 0:
            place = start + first_bit(found)
            found &= found - 1
            value = row[place] / temperature
            if value >= least:
                token_ids[count] = place
                values[count] = value
                count += 1
    return count


@inner
def reach(values: Any, weights: Any, count: Any, target: Any, bins: Any) -> Any:
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


@inner
def _bin(value: Any, high: Any, scale: Any) -> Any:
    # The lowest value is in the last one.
    return min(np.int64((np.float64(high) - np.float64(value)) * scale), _NUM_BINS - 1)


@inner
def kth_piece(maxima: Any, k: Any, values: Any, weights: Any, bins: Any) -> Any:
    """Above -inf, a number that at least k of a row reach, if each of k pieces has a number."""
    count = 0
    for i in range(NUM_PIECES):
        if maxima[i] > BARRED:
            values[count] = maxima[i]
            weights[count] = ONE
            count += 1
    return reach(values, weights, count, np.float64(k), bins)[0] if count >= k else LOWEST


@inner
def pad(source: Any, count: Any, row: Any) -> None:
    for i in range(count):
        row[i] = source[i]
    for i in range(count, len(row)):
        row[i] = BARRED


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
            pad(row, V, padded)
            row = padded
        most, has_nan = largest_of(row, maxima)
        is_done[n] = not has_nan and np.isfinite(most)
        if not is_done[n]:
            continue
        log_total = np.float32(np.log(total_weight(row, ONE, most, floats[1], sums)))
        own = row[chosen[n]] - most - log_total
        rank = 0
        for i in range(V):
            rank += row[i] - most - log_total >= own
        top_ids[n, 0], top_values[n, 0], ranks[n] = chosen[n], own, rank
        if k == 0:
            continue
        kth = kth_piece(maxima, k, values, floats[1], sums[QUARTER:])
        # Some that are less likely may be as likely once rounded.
        slack = (abs(kth - most) + abs(log_total) + ONE) * np.float32(1e-6)
        count = collect(row, ONE, kth - slack, ids, values)
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
