"""Draws depend on seed, position and token id alone, and follow softmax."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from lmscope.execute import random_draws
from lmscope.execute.random_draws import (
    derived_seed,
    draw_tokens,
    gumbel_noise,
    row_keys,
    uniform_draws,
)

WORD = 0xFFFFFFFF


def mix_64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key_by_hand(seed: int, position: int) -> tuple[int, int]:
    """The rule of the module's docstring, in Python's own integers."""
    key = mix_64((mix_64(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    return key & WORD, key >> 32


def noise_by_hand(key: tuple[int, int], token_id: int) -> float:
    x = token_id ^ key[0]
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x ^= key[1]
    x = x * 0xC2B2AE35 & WORD
    x ^= x >> 16
    u = min((x & 0x7FFFFFFF) * 2.0**-31 + 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def token_with_bits(key: tuple[int, int], bits: int) -> int:
    """The token id whose 32 bits are `bits`: the rule backwards."""
    x = bits ^ (bits >> 16)
    x = x * pow(0xC2B2AE35, -1, 2**32) & WORD
    x ^= key[1]
    x ^= (x >> 13) ^ (x >> 26)
    x = x * pow(0x85EBCA6B, -1, 2**32) & WORD
    x ^= x >> 16
    x ^= key[0]
    return x - 2**32 if x >= 2**31 else x


@pytest.mark.parametrize("seed", [0, 7, -5, 2**63 + 11, 2**64 - 2])
@pytest.mark.parametrize("vocab_size", [1, 37, 1000])
def test_noise_is_the_documented_function_of_seed_position_and_token(seed: int, vocab_size: int):
    for position in (0, 1, 5000):
        token_ids = torch.arange(vocab_size, dtype=torch.int32)

        noise = gumbel_noise(row_keys([seed], [position]), token_ids)[0]

        key = key_by_hand(seed, position)
        by_hand = torch.tensor([noise_by_hand(key, token) for token in range(vocab_size)])
        torch.testing.assert_close(noise, by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0, -math.log(2**-32)),
        (1, -math.log(1.5 * 2**-31)),
        (0x7FFFFFFF, -math.log(24 * math.log(2))),
        (0x7FFFFFC0, -math.log(24 * math.log(2))),
    ],
)
def test_the_rarest_bits_give_finite_noise(bits: int, expected: float):
    key = key_by_hand(seed=7, position=3)
    token_ids = torch.tensor([token_with_bits(key, bits)], dtype=torch.int32)

    noise = gumbel_noise(row_keys([7], [3]), token_ids)

    assert noise.item() == pytest.approx(expected, rel=1e-5)


def test_tokens_come_with_the_probabilities_of_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -2.0, -4.0, -math.inf])
    num_draws = 8000

    _, tokens = draw_tokens(logits.repeat(num_draws, 1), [3] * num_draws, range(num_draws))

    expected = logits.softmax(dim=0)[:7] * num_draws
    counts = torch.bincount(tokens, minlength=8)
    assert counts[7] == 0
    # 22.5 is exceeded once in a thousand times with 6 degrees of freedom.
    assert ((counts[:7] - expected) ** 2 / expected).sum() < 22.5


def test_a_token_of_no_probability_is_not_drawn_from_a_large_vocabulary():
    logits = torch.full((50, 50_000), -40.0)
    logits[:, 123] = 0.0

    _, tokens = draw_tokens(logits, range(50), [0] * 50)

    assert tokens.tolist() == [123] * 50


@pytest.mark.parametrize("other", ["seeds", "positions", "tokens"])
def test_neighbouring_draws_are_independent(other: str):
    token_ids = torch.arange(2048, dtype=torch.int32)
    keys = row_keys(range(1000), [4] * 1000)
    if other == "positions":
        keys = row_keys([9] * 1000, range(1000))
    noise = gumbel_noise(keys, token_ids).double()
    noise = (noise - np.euler_gamma) / (math.pi / math.sqrt(6))

    one, next_one = (noise[:, :-1], noise[:, 1:]) if other == "tokens" else (noise[:-1], noise[1:])

    num_pairs = one.numel()
    assert abs(noise.mean()) * math.sqrt(noise.numel()) < 4
    assert abs((one * next_one).mean()) * math.sqrt(num_pairs) < 4


# Not a multiple of any vector length, so the end of a row is computed by other instructions.
@pytest.mark.parametrize("vocab_size", [1000, 1003, 49_155])
def test_a_row_draws_the_same_alone_and_anywhere_in_a_batch(vocab_size: int):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, generator=generator)
    seeds, positions = [5, 5, 6, 7, 2**40, 0, 5], [0, 1, 0, 9, 3, 0, 400]

    best, tokens = draw_tokens(logits, seeds, positions)

    order = [4, 2, 6, 0, 1, 5, 3]
    shuffled_best, shuffled = draw_tokens(
        logits[order], [seeds[i] for i in order], [positions[i] for i in order]
    )
    assert torch.equal(shuffled, tokens[order])
    assert torch.equal(shuffled_best, best[order])
    for i in range(7):
        alone_best, alone = draw_tokens(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        assert torch.equal(alone, tokens[i : i + 1])
        assert torch.equal(alone_best, best[i : i + 1])


@pytest.mark.parametrize("seed", [0, 7, -5, 2**64 - 2])
def test_uniform_numbers_are_the_documented_function_of_seed_and_position(seed: int):
    numbers = uniform_draws([seed] * 3, [0, 1, 5000])

    keys = [key_by_hand(seed, position) for position in (0, 1, 5000)]
    wanted = [(mix_64(low | high << 32) >> 12) * 2.0**-52 + 2.0**-53 for low, high in keys]
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == wanted


def test_uniform_numbers_are_spread_evenly_and_depend_on_nothing_near():
    by_seed = uniform_draws(range(20_000), [3] * 20_000)
    by_position = uniform_draws([5] * 20_000, range(20_000))
    noise = gumbel_noise(row_keys(range(20_000), [3] * 20_000), torch.tensor([0, 1, 77]))

    for numbers in (by_seed, by_position):
        counts = torch.histc(numbers, bins=50, min=0.0, max=1.0)
        # 85.4 is exceeded once in a thousand times with 49 degrees of freedom.
        assert ((counts - 400) ** 2 / 400).sum() < 85.4
        centred = (numbers - 0.5) * math.sqrt(12)
        assert abs((centred[1:] * centred[:-1]).mean()) * math.sqrt(20_000) < 4
    centred = (by_seed - 0.5) * math.sqrt(12)
    for column in noise.double().T:
        unit = (column - np.euler_gamma) / (math.pi / math.sqrt(6))
        assert abs((centred * unit).mean()) * math.sqrt(20_000) < 4


@pytest.mark.parametrize(("mixed", "expected"), [(0, 2.0**-53), (2**64 - 1, 1 - 2.0**-53)])
def test_uniform_numbers_are_never_0_or_1(
    mixed: int, expected: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(random_draws, "_mix_64", lambda x: mixed)

    assert uniform_draws([0], [0]).item() == expected


def test_p9_no_global_random_state_is_touched():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    derived_seed(0, 3)
    draw_tokens(torch.zeros(3, 100), [1, 2, 3], [0, 1, 2])
    uniform_draws([1, 2, 3], [0, 1, 2])

    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_derived_seeds_differ_from_each_other_and_from_small_ones():
    seeds = {derived_seed(engine, index) for engine in range(20) for index in range(500)}

    assert len(seeds) == 10_000
    assert min(seeds) > 2**32
    assert max(seeds) < 2**64
    assert derived_seed(0, 0) == derived_seed(0, 0)


@pytest.mark.parametrize("num_left", [1, 3, 1_000, 12_250, 30_000, 49_000])
def test_few_tokens_that_are_left_are_drawn_from_as_all_would_be(num_left: int):
    generator = torch.Generator().manual_seed(num_left)
    logits = torch.full((3, 49_000), -math.inf)
    for row in logits:
        left = torch.randperm(49_000, generator=generator)[:num_left]
        row[left] = torch.randn(num_left, generator=generator)
    best, tokens = draw_tokens(logits, [1, 2, 3], [4, 5, 6])
    noise = gumbel_noise(row_keys([1, 2, 3], [4, 5, 6]), torch.arange(49_000, dtype=torch.int32))
    expected = (noise + logits).max(dim=-1)
    assert tokens.equal(expected.indices)
    # A logarithm may be rounded otherwise at another place of a buffer.
    torch.testing.assert_close(best, expected.values, rtol=1e-6, atol=1e-6)


# Peaked, as a language model's are, and flat; so large that whole numbers are hardly told apart.
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0, 3e7])
@pytest.mark.parametrize("top", [0.0, 50.0, -3e7, math.inf])
def test_tokens_that_cannot_win_are_left_out_and_no_others(spread: float, top: float):
    generator = torch.Generator().manual_seed(int(spread))
    logits = spread * torch.randn(40, 8_003, generator=generator)
    logits[:, 5] += top
    seeds, positions = list(range(40)), [3] * 40

    best, tokens = draw_tokens(logits, seeds, positions)

    token_ids = torch.arange(8_003, dtype=torch.int32)
    expected = (gumbel_noise(row_keys(seeds, positions), token_ids) + logits).max(dim=-1)
    assert tokens.equal(expected.indices)
    torch.testing.assert_close(best, expected.values, rtol=1e-6, atol=1e-6)


def test_noise_is_made_for_few_tokens_of_a_language_model(monkeypatch: pytest.MonkeyPatch):
    made = []

    def counted(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        made.append(token_ids.numel())
        return gumbel_noise(keys, token_ids)

    monkeypatch.setattr(random_draws, "gumbel_noise", counted)
    generator = torch.Generator().manual_seed(0)
    draw_tokens(4 * torch.randn(64, 49_152, generator=generator), range(64), [0] * 64)

    assert len(made) * 16 == 64  # in one go for 16 rows
    assert sum(made) < 64 * 49_152 / 20


@pytest.mark.parametrize("num_left", [0, 2])
def test_no_token_and_no_number_are_told_apart_among_few(num_left: int):
    logits = torch.full((1, 1_000), -math.inf)
    assert draw_tokens(logits, [1], [0])[0].item() == -math.inf
    logits[0, :num_left] = 1.0
    logits[0, 500] = math.nan
    assert math.isnan(draw_tokens(logits, [1], [0])[0].item())
