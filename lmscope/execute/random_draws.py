"""Random draws that are functions of (seed, output position, token id) and of nothing else.

There is no generator state, so batching, chunking, preemption, forks and restored
checkpoints cannot disturb a draw, and nothing here touches the random state of Python,
numpy or torch. The rule, which a GPU kernel has to follow too, in unsigned arithmetic
that wraps:

    key    64 bits, output number `position` of SplitMix64 started at mix64(seed); its low
           half is key[0], its high half key[1]
    bits   32 bits for a token id: x = id ^ key[0];  x ^= x >> 16;  x *= 0x85ebca6b;
           x ^= x >> 13;  x ^= key[1];  x *= 0xc2b2ae35;  x ^= x >> 16
           (the finaliser of MurmurHash3 with half of the key put into its middle)
    u      float32, (bits & 0x7fffffff) * 2**-31 + 2**-32, at most 1 - 2**-24
    noise  -log(q) with q = -log(1 - u): q is exponential, -log(q) a Gumbel variable

The token drawn is the one with the largest logit + noise, which has the probabilities of
softmax(logits). Small q decide, so u is fine near 0 (steps of 2**-31) and log(1 - u) must
be computed without losing them: log1p here.

Whether a draft stays is decided by one more number of its position, which has nothing to
do with the noise of the tokens there:

    uniform   float64, (mix64(key) >> 12) * 2**-52 + 2**-53
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope.execute.largest import largest
from lmscope.execute.picked import pick

__all__ = ["derived_seed", "draw_tokens", "gumbel_noise", "row_keys", "uniform_draws"]

_Words = TypeVar("_Words", Tensor, NDArray[np.int32])

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# When so many times fewer tokens are left as there are, those are all that is looked at.
_FEWER_BY = 4
# Of 31 bits; one token in 64 has fewer, and noise above 4.15.
_RARE_BITS = 1 << 25
# So that what is made of each lies in memory for a part of the rows only.
_ROWS_AT_ONCE = 16


def derived_seed(engine_seed: int, index: int) -> int:
    """The seed of a request without one of its own: the `index`-th of the engine's.

    64 bits, and far from the small numbers that people use as seeds.
    """
    return _split_mix(engine_seed, index)


def draw_tokens(
    logits: Tensor, seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row from softmax(logits).

    logits     [R, V] float32, R at least 1; -inf: never drawn
    seeds      [R]
    positions  [R] number of output tokens before this one
    returns    the largest logit + noise of each row and its token, [R] each, as `max` does:
               -inf when no token could be drawn, NaN when the logits held one
    """
    keys = row_keys(seeds, positions, logits.device)
    if logits.device.type != "cpu":
        token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        return largest(gumbel_noise(keys, token_ids).add_(logits))
    drawn = [
        _draw(logits[start : start + _ROWS_AT_ONCE], keys[start : start + _ROWS_AT_ONCE])
        for start in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    values, columns = zip(*drawn, strict=True)
    return torch.cat(values), torch.cat(columns)


def _draw(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The same for some rows on a CPU: noise is made for the tokens that could be drawn only."""
    array = logits.detach().numpy()
    could_win = array != -math.inf  # which a NaN is too
    vocab_size = array.shape[1]
    token_ids = np.arange(vocab_size, dtype=np.int32)
    for row, key in enumerate(keys.numpy()):
        if np.count_nonzero(could_win[row]) * _FEWER_BY > vocab_size:
            could_win[row] = _could_win(array[row], key, token_ids)
    picked = pick(array, could_win, padding=-math.inf)
    columns = torch.from_numpy(picked.columns)
    noise = gumbel_noise(keys, columns.to(torch.int32))
    values, places = largest(noise.add_(torch.from_numpy(picked.values)))
    return values, columns.gather(1, places[:, None])[:, 0]


def _could_win(
    logits: NDArray[np.float32], key: NDArray[np.int32], token_ids: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Tokens that the most likely one does not beat for certain, whatever its noise is: [V].

    key          [2]
    token_ids    [V]
    """
    most = logits.max()
    if not math.isfinite(most):
        return np.ones(len(logits), dtype=np.bool_)
    # Noise is at least -2.82, and below 4.16 where bits are not rare. What is left of the 8, and a
    # few units in the last place of the logits, are for rounding.
    lowest = most - (np.float32(8.0) + abs(most) * np.float32(2.0**-20))
    bits = _token_bits(key, token_ids)
    bits &= 0x7FFFFFFF
    is_possible: NDArray[np.bool_] = bits < _RARE_BITS
    is_possible |= logits >= lowest
    return is_possible


def row_keys(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """The two halves of each row's key: [R, 2] int32."""
    keys = [_split_mix(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    halves = [[_signed(key & 0xFFFFFFFF), _signed(key >> 32)] for key in keys]
    return torch.tensor(halves, dtype=torch.int32, device=device).reshape(-1, 2)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise for each row and token.

    keys       [R, 2] int32
    token_ids  [V] int32, or [R, V] where each row has its own
    returns    [R, V] float32, between about -2.8 and 22.2
    """
    bits = _token_bits(keys, token_ids).bitwise_and_(0x7FFFFFFF)
    # -u in float32; rounding would take the largest to -1, whose logarithm is -inf.
    minus_u = bits.to(torch.float32).mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=2.0**-24 - 1.0)
    return minus_u.log1p_().neg_().log_().neg_()


def uniform_draws(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """A number for each row, above 0 and below 1: [R] float64."""
    numbers = [
        (_mix_64(_split_mix(seed, position)) >> 12) * 2.0**-52 + 2.0**-53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _token_bits(keys: _Words, token_ids: _Words) -> _Words:
    """32 bits for each token, [R, V] or for one key [V]; in torch or in numpy."""
    bits = token_ids ^ keys[..., :1]
    bits ^= _shift_right(bits, 16)
    bits *= _signed(0x85EBCA6B)
    bits ^= _shift_right(bits, 13)
    bits ^= keys[..., 1:]
    bits *= _signed(0xC2B2AE35)
    bits ^= _shift_right(bits, 16)
    return bits


def _shift_right(bits: _Words, count: int) -> _Words:
    """A shift that fills with zeros; that of an int32 repeats the sign."""
    shifted = bits >> count
    shifted &= (1 << (32 - count)) - 1
    return shifted


def _split_mix(seed: int, index: int) -> int:
    return _mix_64((_mix_64(seed & _MASK_64) + (index + 1) * _GOLDEN_GAMMA) & _MASK_64)


def _mix_64(x: int) -> int:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """A 32-bit word as int32 holds it."""
    return word - (1 << 32) if word >= 1 << 31 else word
