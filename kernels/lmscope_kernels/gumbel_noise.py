"""Noise that is a function of (seed, output position, token id) and of nothing else.

With it the token with the largest logit + noise has the probabilities of softmax(logits), and a
draw depends neither on the batch around it nor on what was drawn before. In unsigned arithmetic
that wraps:

    key      64 bits, output number `position` of SplitMix64 started at mix64(seed)
    bits     x = id ^ key[0];  x ^= x >> 16;  x *= 0x85ebca6b;  x ^= x >> 13;  x ^= key[1];
             x *= 0xc2b2ae35;  x ^= x >> 16        key[0] is the low half of the key
    u        (bits & 0x7fffffff) * 2**-31 + 2**-32, in float32, at most 1 - 2**-24
    noise    -log(-log(1 - u))

u is the same number on every device. The logarithms are right to about one unit in the last
place, so only tokens whose logit + noise differ by about 1e-6 can change places between two.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
from torch import Tensor

from lmscope_kernels.triton_support import jit, tl

__all__ = ["gumbel_noise", "gumbel_noise_reference"]

_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1


def gumbel_noise_reference(seed: int, position: int, vocab_size: int) -> Tensor:
    """The noise of every token of one draw: [V] float64, from the u that float32 holds."""
    key = _mix((_mix(seed & _MASK_64) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK_64)
    x = torch.arange(vocab_size) ^ (key & _MASK_32)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK_32
    x = ((x ^ (x >> 13) ^ (key >> 32)) * 0xC2B2AE35) & _MASK_32
    bits = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = (bits.float() * 2.0**-31 + 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return (-(-u.double()).log1p()).log().neg()


def _mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


@jit
def gumbel_noise(seed, position, token_ids):
    """The noise of some tokens of one draw; seed and position are int64 scalars."""
    number = (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    key = _mix_64(_mix_64(seed.to(tl.uint64)) + number)
    x = token_ids.to(tl.uint32) ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ (key >> 32).to(tl.uint32)) * 0xC2B2AE35
    bits = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = bits.to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    u = tl.minimum(u, 0.999999940395355224609375)
    # log(1 - u), where what rounding took from 1 - u is given back to its logarithm: small
    # u win, and of them 1 - u keeps little.
    rest = 1.0 - u
    lost = tl.div_rn((1.0 - rest) - u, rest)
    return -_log(-(_log(rest) + lost))


@jit
def _mix_64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def _log(x):
    """The logarithm of positive, normal float32 numbers, to about one unit in the last place.

    The hardware's is right to about 2**-22 near 1, where the logarithm is smaller than that.
    """
    bits = x.to(tl.int32, bitcast=True)
    # x = m * 2**exponent with m between the square roots of 1/2 and 2.
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    # log(m) = 2 * artanh(s) and s is at most 0.172, so that these terms leave out 1e-9 of it.
    s = tl.div_rn(m - 1.0, m + 1.0)
    z = s * s
    tail = z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9))))
    n = exponent.to(tl.float32)
    # log(2) in two parts; the first has few digits, so n times it is exact.
    return n * 0.693145751953125 + (2.0 * s + (2.0 * s * tail + n * 1.428606820309417e-06))
