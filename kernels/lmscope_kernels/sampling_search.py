"""Searches the thresholds of sampling without a sort; what they are is in sampling.py.

A float32 is 32 bits that can be put in order, so a threshold is found four bits at a time: a pass
adds up, in 16 bins, how many tokens (or how much probability) each holds, one sum for each chunk
of the vocabulary and bin. The next pass adds the chunks, always in the same order, takes the
highest bin from which up there is enough, and looks into that one only. Eight passes give the
threshold exactly.

R requests, V vocabulary.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

from lmscope_kernels.triton_support import jit, tl

__all__ = [
    "from_ordered",
    "largest_of",
    "least_by_min_p",
    "least_by_top_k",
    "load_scaled",
    "narrow_kernel",
    "narrowed",
    "row_maximum_kernel",
]

NUM_BINS: Any = tl and tl.constexpr(16)
NUM_PASSES: Any = tl and tl.constexpr(8)


@jit
def to_ordered(x):
    """A uint32 for each float32, in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits < 0x80000000, bits ^ 0x80000000, bits ^ 0xFFFFFFFF)


@jit
def from_ordered(bits):
    bits = tl.where(bits < 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return bits.to(tl.float32, bitcast=True)


@jit
def load_scaled(logits_ptr, row, logits_stride, token_ids, vocab_size, temperature):
    """Logits over the temperature, rounded as IEEE says; -inf past the vocabulary."""
    x = tl.load(
        logits_ptr + row * logits_stride + token_ids,
        mask=token_ids < vocab_size,
        other=float("-inf"),
    )
    return tl.div_rn(x.to(tl.float32), temperature)


@jit
def largest_of(maxima_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.max(
        tl.load(
            maxima_ptr + row * num_chunks + chunks,
            mask=chunks < num_chunks,
            other=float("-inf"),
        ),
        axis=0,
    )


@jit
def narrowed(
    sums_ptr, state_ptr, row, num_rows, num_chunks, level, wanted, BY_MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """A search after `level` passes: the digits found, what lies above them, the target.

    Comes from the state before the last pass and the sums of the last pass.
    """
    key = tl.full([], 0, tl.uint32)
    above = tl.full([], 0.0, tl.float32)
    target = wanted
    if level > 0:
        state = state_ptr + ((level - 1) * num_rows + row) * 3
        key = tl.load(state).to(tl.uint32, bitcast=True)
        above = tl.load(state + 1).to(tl.float32, bitcast=True)
        target = tl.load(state + 2).to(tl.float32, bitcast=True)
        chunks = tl.arange(0, CHUNKS)
        bins = tl.arange(0, NUM_BINS)
        first = ((level - 1) % 2 * num_rows + row) * num_chunks
        sums = tl.load(
            sums_ptr + (first + chunks)[:, None] * NUM_BINS + bins[None, :],
            mask=(chunks < num_chunks)[:, None],
            other=0.0,
        )
        totals = tl.sum(sums, axis=0)
        if BY_MASS and level == 1:
            # The part is one of what the other filters leave: all that has been added up.
            target = wanted * tl.sum(totals, axis=0)
        is_from_here = bins[None, :] >= bins[:, None]
        up_from = above + tl.sum(tl.where(is_from_here, totals[None, :], 0.0), axis=1)
        # The lowest bin where rounding leaves the target out of reach: all are kept.
        digit = tl.max(tl.where(up_from >= target, bins, 0), axis=0)
        above += tl.sum(tl.where(bins > digit, totals, 0.0), axis=0)
        key = (key << 4) | digit.to(tl.uint32)
    return key, above, target


@jit
def least_by_min_p(min_p_ptr, row, largest):
    min_p = tl.load(min_p_ptr + row)
    log_min_p = tl.log(tl.where(min_p > 0, min_p, 1).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0, largest + log_min_p, float("-inf"))


@jit
def least_by_top_k(
    top_k_ptr, sums_ptr, state_ptr, row, num_rows, num_chunks, vocab_size, CHUNKS: tl.constexpr
):
    least = tl.full([], float("-inf"), tl.float32)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab_size):
        key, _, _ = narrowed(
            sums_ptr, state_ptr, row, num_rows, num_chunks, NUM_PASSES, top_k.to(tl.float32),
            BY_MASS=False, CHUNKS=CHUNKS,
        )  # fmt: skip
        least = from_ordered(key)
    return least


@jit
def row_maximum_kernel(
    maxima_ptr, logits_ptr, temperature_ptr, logits_stride, vocab_size, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest of each chunk, [R, num_chunks]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_scaled(logits_ptr, row, logits_stride, token_ids, vocab_size, temperature)
    tl.store(maxima_ptr + row * num_chunks + chunk, tl.max(x, axis=0))


@jit(do_not_specialize=["num_rows", "sums_stride", "state_stride"])
def narrow_kernel(
    sums_ptr, state_ptr, maxima_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, logits_stride, vocab_size, num_chunks, num_rows, level, sums_stride,
    state_stride, HAS_TOP_K: tl.constexpr, HAS_MIN_P: tl.constexpr, BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr, STRIP: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One pass of a search: what each bin of the digit `level` holds, chunk by chunk."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    least = tl.full([], float("-inf"), tl.float32)
    largest = tl.full([], 0.0, tl.float32)
    own_sums_ptr = sums_ptr
    own_state_ptr = state_ptr
    if BY_MASS:
        wanted = tl.load(top_p_ptr + row).to(tl.float32)
        if (temperature == 0.0) | (wanted >= 1.0):
            return
        own_sums_ptr += sums_stride
        own_state_ptr += state_stride
        largest = largest_of(maxima_ptr, row, num_chunks, CHUNKS)
        if HAS_MIN_P:
            least = least_by_min_p(min_p_ptr, row, largest)
        if HAS_TOP_K:
            by_top_k = least_by_top_k(
                top_k_ptr, sums_ptr, state_ptr, row, num_rows, num_chunks, vocab_size, CHUNKS
            )
            least = tl.maximum(least, by_top_k)
    else:
        top_k = tl.load(top_k_ptr + row)
        if (temperature == 0.0) | (top_k <= 0) | (top_k >= vocab_size):
            return
        wanted = top_k.to(tl.float32)
    key, above, target = narrowed(
        own_sums_ptr, own_state_ptr, row, num_rows, num_chunks, level, wanted, BY_MASS, CHUNKS
    )
    if chunk == 0:
        state = own_state_ptr + (level * num_rows + row) * 3
        tl.store(state, key.to(tl.int32, bitcast=True))
        tl.store(state + 1, above.to(tl.int32, bitcast=True))
        tl.store(state + 2, target.to(tl.int32, bitcast=True))
    bins = tl.arange(0, NUM_BINS).to(tl.uint32)
    sums = tl.zeros([NUM_BINS], tl.float32)
    for start in range(0, CHUNK, STRIP):
        token_ids = chunk * CHUNK + start + tl.arange(0, STRIP)
        x = load_scaled(logits_ptr, row, logits_stride, token_ids, vocab_size, temperature)
        digits = to_ordered(x) >> (28 - 4 * level)
        # What is past the vocabulary is -inf and may count: it can only make -inf, which keeps
        # everything, of a threshold that is -inf already.
        is_counted = (digits >> 4) == key
        if BY_MASS:
            # The largest weighs 1, also where it is infinite.
            weight = tl.where(x == largest, 1.0, tl.exp(x - largest))
            weight = tl.where(is_counted & (x >= least), weight, 0.0)
        else:
            weight = tl.where(is_counted, 1.0, 0.0)
        is_in_bin = (digits & 15)[:, None] == bins[None, :]
        sums += tl.sum(tl.where(is_in_bin, weight[:, None], 0.0), axis=0)
    first = ((level % 2 * num_rows + row) * num_chunks + chunk) * NUM_BINS
    tl.store(own_sums_ptr + first + tl.arange(0, NUM_BINS), sums)
