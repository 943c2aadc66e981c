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

import numpy as np
import torch
from torch import Tensor

from lmscope.execute.largest import largest

__all__ = ["derived_seed", "draw_tokens", "gumbel_noise", "row_keys", "uniform_draws"]

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# When so many times fewer tokens are left as there are, picking them out pays.
_FEWER_BY = 4


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
    num_rows, vocab_size = logits.shape
    keys = row_keys(seeds, positions, logits.device)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
    if logits.device.type != "cpu":
        return largest(gumbel_noise(keys, token_ids).add_(logits))
    # One row at a time: its dozen passes stay in the cache, and how a vectorised logarithm treats
    # the end of a buffer cannot depend on the neighbours.
    best = [_draw(logits[row : row + 1], keys[row : row + 1], token_ids) for row in range(num_rows)]
    values, drawn = zip(*best, strict=True)
    return torch.cat(values), torch.cat(drawn)


def _draw(logits: Tensor, keys: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one row, [1, V]; where few tokens are left, noise is made for those only."""
    # numpy takes a sixth of torch's time to find them.
    is_left = logits[0].detach().numpy() != -math.inf  # which a NaN is too
    if not 0 < np.count_nonzero(is_left) * _FEWER_BY <= len(token_ids):
        return largest(gumbel_noise(keys, token_ids).add_(logits))
    left = torch.from_numpy(np.flatnonzero(is_left))
    values, places = largest(gumbel_noise(keys, token_ids[left]).add_(logits[:, left]))
    return values, left[places]


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
    token_ids  [V] int32
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


def _token_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    bits = token_ids ^ keys[:, :1]
    bits.bitwise_xor_(_shift_right(bits, 16)).mul_(_signed(0x85EBCA6B))
    bits.bitwise_xor_(_shift_right(bits, 13)).bitwise_xor_(keys[:, 1:])
    bits.mul_(_signed(0xC2B2AE35))
    return bits.bitwise_xor_(_shift_right(bits, 16))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """A shift that fills with zeros; torch's own repeats the sign of an int32."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


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
