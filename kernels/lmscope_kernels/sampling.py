"""Draws one token for each row of logits, with top-k, top-p and min-p and without a sort.

What is drawn is the token with the largest logit / temperature + noise (see gumbel_noise.py), or
with a temperature of 0 the one with the largest logit, the lowest id among equals. A filter keeps
the tokens whose logit / temperature is at least a threshold, so the threshold is all it needs:

    min_p    the largest, plus log(min_p)
    top_k    the k-th largest
    top_p    the largest t for which the tokens from t up have at least the part top_p of the
             probability, of all that the two filters above leave

Tokens equal to a threshold are all kept. How the last two are found is in sampling_search.py. V is
split over programs, whose results are put together in a fixed order, so what a row draws depends
on that row only.

R requests, V vocabulary.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmscope_kernels.gumbel_noise import gumbel_noise, gumbel_noise_reference
from lmscope_kernels.sampling_search import (
    from_ordered,
    largest_of,
    least_by_min_p,
    least_by_top_k,
    load_scaled,
    narrow_kernel,
    narrowed,
    row_maximum_kernel,
)
from lmscope_kernels.shapes import check_shape
from lmscope_kernels.triton_support import (
    DTYPES,
    INTERPRET,
    check_contiguous,
    check_tensors,
    jit,
    require_triton,
    tl,
)

__all__ = ["SamplingWorkspace", "sample", "sample_reference"]

_NUM_BINS = 16
_NUM_PASSES = 8
NUM_PASSES: Any = tl and tl.constexpr(_NUM_PASSES)
# Tokens that one program looks at, and how many of them at a time. The interpreter pays for
# each operation and not for its size.
_CHUNK, _STRIP = (65536, 65536) if INTERPRET else (2048, 256)


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """The definition, with a sort, and probabilities and noise in float64.

    Parameters and result as in `sample`.
    """
    tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    for row, values in enumerate(logits.float()):
        if float(temperature[row]) == 0.0:
            tokens[row] = values.argmax()
            continue
        values = values / temperature[row]
        least = torch.full_like(values[0], -math.inf)
        if min_p is not None and float(min_p[row]) > 0.0:
            least = values.max() + math.log(float(min_p[row]))
        ordered = values.sort(descending=True).values
        if top_k is not None and 0 < int(top_k[row]) < len(values):
            least = torch.maximum(least, ordered[int(top_k[row]) - 1])
        if top_p is not None and float(top_p[row]) < 1.0:
            up_to = ordered[ordered >= least].double().softmax(dim=-1).cumsum(dim=-1)
            num_above = int((up_to[:-1] < top_p[row].double()).sum())
            least = torch.maximum(least, ordered[num_above])
        noise = gumbel_noise_reference(int(seed[row]), int(position[row]), len(values))
        kept = values.double().masked_fill(values < least, -math.inf)
        tokens[row] = (kept + noise.to(kept.device)).argmax()
    return tokens


# Not compiled anew for one row or for an even number of them: a row must draw the same.
@jit(do_not_specialize=["num_rows", "sums_stride", "state_stride"])
def draw_kernel(
    best_ptr, best_id_ptr, sums_ptr, state_ptr, maxima_ptr, logits_ptr, temperature_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, logits_stride, vocab_size,
    num_chunks, num_rows, sums_stride, state_stride, HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best of each chunk and its token, [R, num_chunks] each."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    divisor = tl.where(is_greedy, 1.0, temperature)
    score = load_scaled(logits_ptr, row, logits_stride, token_ids, vocab_size, divisor)
    if not is_greedy:
        least = tl.full([], float("-inf"), tl.float32)
        if HAS_MIN_P:
            largest = largest_of(maxima_ptr, row, num_chunks, CHUNKS)
            least = least_by_min_p(min_p_ptr, row, largest)
        if HAS_TOP_K:
            by_top_k = least_by_top_k(
                top_k_ptr, sums_ptr, state_ptr, row, num_rows, num_chunks, vocab_size, CHUNKS
            )
            least = tl.maximum(least, by_top_k)
        if HAS_TOP_P:
            top_p = tl.load(top_p_ptr + row).to(tl.float32)
            if top_p < 1.0:
                key, _, _ = narrowed(
                    sums_ptr + sums_stride, state_ptr + state_stride, row, num_rows,
                    num_chunks, NUM_PASSES, top_p, BY_MASS=True, CHUNKS=CHUNKS,
                )  # fmt: skip
                least = tl.maximum(least, from_ordered(key))
        seed = tl.load(seed_ptr + row).to(tl.int64)
        position = tl.load(position_ptr + row).to(tl.int64)
        # Not x >= least: a number that is none must not be hidden.
        is_removed = score < least
        noisy = score + gumbel_noise(seed, position, token_ids)
        score = tl.where(is_removed, float("-inf"), noisy)
    is_nan = score != score
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    best, index = tl.max(tl.where(is_nan, float("inf"), score), axis=0, return_indices=True)
    tl.store(best_ptr + row * num_chunks + chunk, tl.where(has_nan, float("nan"), best))
    tl.store(best_id_ptr + row * num_chunks + chunk, chunk * CHUNK + index)


@jit
def pick_kernel(tokens_ptr, score_ptr, best_ptr, best_id_ptr, num_chunks, CHUNKS: tl.constexpr):
    """The best of the chunks of each row; among equals the first."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    best = tl.load(best_ptr + row * num_chunks + chunks, mask=is_chunk, other=float("-inf"))
    is_nan = best != best
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    score, index = tl.max(tl.where(is_nan, float("inf"), best), axis=0, return_indices=True)
    token = tl.load(best_id_ptr + row * num_chunks + index)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(score_ptr + row, tl.where(has_nan, float("nan"), score))


@dataclass(frozen=True)
class SamplingWorkspace:
    """What the programs of one call leave for each other; allocated once, for a size or less.

    maxima, best, best_id    one number for each row and chunk
    sums                     of the two searches, the last two passes of each, and 16 bins
    state                    of the two searches after each of their passes: three numbers a row
    score                    one number for each row
    """

    maxima: Tensor
    best: Tensor
    best_id: Tensor
    sums: Tensor
    state: Tensor
    score: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device | str
    ) -> SamplingWorkspace:
        """At most `num_rows` rows of `vocab_size` logits: 40 bytes for each 1,000 logits."""
        num_chunks = -(-vocab_size // _CHUNK)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            maxima=floats(num_rows, num_chunks),
            best=floats(num_rows, num_chunks),
            best_id=ints(num_rows, num_chunks),
            sums=floats(2, 2, num_rows, num_chunks, _NUM_BINS),
            state=ints(2, _NUM_PASSES, num_rows, 3),
            score=floats(num_rows),
        )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
    *,
    workspace: SamplingWorkspace | None = None,
    out: Tensor | None = None,
    score: Tensor | None = None,
) -> Tensor:
    """One token for each row, as the rule of the CPU draws it.

    logits         [R, V]  float32, float16 or bfloat16; each row contiguous; not changed
    temperature    [R]     float32; 0: the token with the largest logit
    top_k          [R]     int32 or int64; below 1, or V and above: no such filter
    top_p          [R]     float32; 1 and above: no such filter
    min_p          [R]     float32 or float64; 0: no such filter
    seed           [R]     int64, all of its bits
    position       [R]     int32 or int64, output tokens before this one
    workspace      made anew unless given, which a captured graph needs
    out            [R]     int64, where the result goes
    score          [R]     float32, where the largest logit + noise goes: NaN when a logit of
                           the row is none, -inf when all are, and then the token means nothing

    A filter that is None costs nothing; top_k and top_p cost eight launches each where they
    are given, though only rows that have one do any work in them. Raises ValueError for
    shapes and strides, TypeError for types, RuntimeError where Triton cannot run.
    """
    require_triton(logits)
    R, V = _check(logits, temperature, top_k, top_p, min_p, seed, position)
    num_chunks = -(-V // _CHUNK)
    if workspace is None:
        workspace = SamplingWorkspace.allocate(R, V, logits.device)
    elif workspace.score.shape[0] < R or workspace.maxima.shape[1] < num_chunks:
        raise ValueError(
            f"workspace is for {workspace.score.shape[0]} rows and {workspace.maxima.shape[1]} "
            f"chunks of {_CHUNK} tokens, logits are {list(logits.shape)}; "
            f"use SamplingWorkspace.allocate({R}, {V}, ...)"
        )
    out = torch.empty(R, dtype=torch.int64, device=logits.device) if out is None else out
    score = workspace.score[:R] if score is None else score
    check_tensors(logits.device, (torch.int64,), out=out)
    check_tensors(logits.device, (torch.float32,), score=score, workspace=workspace.sums)
    check_shape("out", out, R)
    check_shape("score", score, R)
    check_contiguous(out=out, score=score, workspace=workspace.sums)
    if not R:
        return out

    space = workspace
    sizes = {"logits_stride": logits.stride(0), "vocab_size": V, "num_chunks": num_chunks}
    chunks = {"CHUNK": _CHUNK, "CHUNKS": 1 << (num_chunks - 1).bit_length()}
    # Sums are compared with each other from program to program, so no product is fused into one.
    options = {"num_warps": 8, "enable_fp_fusion": False}
    grid = (R, num_chunks)
    if min_p is not None or top_p is not None:
        row_maximum_kernel[grid](
            space.maxima, logits, temperature, **sizes, CHUNK=_CHUNK, **options
        )
    # What a search and the draw read in the same order.
    filtered = (
        *(space.sums, space.state, space.maxima),
        *(logits, temperature, top_k, top_p, min_p),
    )
    searches = {
        **sizes,
        **chunks,
        "sums_stride": 2 * R * num_chunks * _NUM_BINS,
        "state_stride": _NUM_PASSES * R * 3,
        "num_rows": R,
        "HAS_TOP_K": top_k is not None,
        "HAS_MIN_P": min_p is not None,
    }
    for by_mass, values in ((False, top_k), (True, top_p)):
        for level in range(_NUM_PASSES if values is not None else 0):
            narrow_kernel[grid](
                *filtered, level=level, BY_MASS=by_mass, STRIP=_STRIP, **searches, **options
            )
    draw_kernel[grid](
        space.best,
        space.best_id,
        *filtered,
        seed,
        position,
        HAS_TOP_P=top_p is not None,
        **searches,
        **options,
    )
    pick_kernel[(R,)](
        out, score, space.best, space.best_id, num_chunks, CHUNKS=chunks["CHUNKS"], **options
    )
    return out


def _check(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seed: Tensor,
    position: Tensor,
) -> tuple[int, int]:
    """R and V, when everything fits."""
    device = logits.device
    integers = (torch.int32, torch.int64)
    check_tensors(device, DTYPES, logits=logits)
    check_tensors(device, (torch.float32,), temperature=temperature, top_p=top_p)
    check_tensors(device, (torch.float32, torch.float64), min_p=min_p)
    check_tensors(device, (torch.int64,), seed=seed)
    check_tensors(device, integers, top_k=top_k, position=position)
    check_shape("logits", logits, None, None)
    R, V = logits.shape
    rows = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "position": position,
    }
    for name, tensor in rows.items():
        check_shape(name, tensor, R)
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has stride {tensor.stride(0)}, must have 1; copy it")
    if R and logits.stride(1) != 1:
        raise ValueError(
            f"logits have stride {logits.stride(1)} in their last dimension, must have 1; "
            "call contiguous() on them"
        )
    # A float32 counts to 2 ** 24 one by one.
    if not 0 < V <= 1 << 24:
        raise ValueError(f"logits have {V} tokens a row, must have 1 to {1 << 24}; split them")
    return R, V
