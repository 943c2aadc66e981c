"""Sampling with drafts gives what sampling without them would have given."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from lmscope.execute.draft_sampling import DraftSamplerOutput, sample_with_drafts
from lmscope.execute.random_draws import draw_tokens
from lmscope.execute.sampler import Sampler, SamplingRow
from lmscope.sampling_params import SamplingParams
from lmscope.speculate.ngram import NgramProposer

V = 12
Model = Callable[[Sequence[int]], Tensor]
GREEDY_KINDS: tuple[dict[str, object], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.5, 4: -2.0}},
    {"min_tokens": 6},
    {"allowed_token_ids": (1, 2, 5, 7)},
)


def make_row(
    prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int = 0, **params: object
) -> SamplingRow:
    """Greedy unless a temperature is given; 9 ends a text, and 5, 2 must not be written."""
    return SamplingRow(
        request_id="r",
        params=SamplingParams(**{"temperature": 0.0, **params}),
        prompt_token_ids=tuple(prompt),
        output_token_ids=list(output),
        seed=seed,
        stop_ids=frozenset({9}),
        bad_words_ids=((5, 2),),
    )


def small_model(seed: int) -> Model:
    """Logits [V] that depend on the last two tokens, so its texts soon repeat themselves."""
    generator = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(V, V, V, generator=generator)
    return lambda tokens: table[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]]


def text_of(row: SamplingRow) -> list[int]:
    return [*row.prompt_token_ids, *row.output_token_ids]


def sample(
    model: Model, rows: Sequence[SamplingRow], drafts: Sequence[Sequence[int]]
) -> DraftSamplerOutput:
    logits = [
        model([*text_of(row), *draft[:count]])
        for row, draft in zip(rows, drafts, strict=True)
        for count in range(len(draft) + 1)
    ]
    return sample_with_drafts(Sampler(V), torch.stack(logits), rows, drafts)


def write(model: Model, row: SamplingRow, num_tokens: int) -> list[int]:
    """The output without drafts, one token after the other."""
    output: list[int] = []
    row = dataclasses.replace(row, output_token_ids=output)
    sampler = Sampler(V)
    while len(output) < num_tokens:
        output += sampler.sample(model(text_of(row))[None], [row]).token_ids
    return output


# -- greedy ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GREEDY_KINDS, ids=str)
def test_v1_greedy_with_drafts_is_greedy_without(kind: dict[str, object]):
    proposer = NgramProposer(
        num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=60
    )
    prompts = ([1, 1, 1], [3, 4], [7])
    num_steps = num_written = 0
    for seed in range(5):
        model = small_model(seed)
        outputs: list[list[int]] = [[] for _ in prompts]
        rows = [
            dataclasses.replace(make_row(prompt, **kind), output_token_ids=output)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        drafts: list[tuple[int, ...]] = [()] * len(prompts)
        while min(map(len, outputs)) < 30:
            sampled = sample(model, rows, drafts).token_ids
            for output, tokens in zip(outputs, sampled, strict=True):
                output += tokens
            drafts = proposer.propose(sampled, [text_of(row) for row in rows])
            num_steps += len(prompts)
        num_written += sum(map(len, outputs))

        for row, output in zip(rows, outputs, strict=True):
            assert output == write(model, row, len(output))
    assert num_written > 1.1 * num_steps  # drafts were accepted, so this has shown something


@given(
    seed=st.integers(0, 50),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=4),
    kind=st.sampled_from(GREEDY_KINDS),
    drafts=st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=1, max_size=6),
    num_right=st.integers(0, 4),
)
def test_v1_whatever_is_drafted_changes_no_greedy_token(
    seed: int,
    prompt: list[int],
    kind: dict[str, object],
    drafts: list[list[int]],
    num_right: int,
):
    model = small_model(seed)
    row = make_row(prompt, **kind)
    wanted = write(model, row, 40)
    output: list[int] = []
    row = dataclasses.replace(row, output_token_ids=output)

    for draft in drafts:
        right = wanted[len(output) : len(output) + num_right]
        (tokens,) = sample(model, [row], [[*right, *draft]]).token_ids
        assert len(tokens) > len(right)
        output += tokens

    assert output == wanted[: len(output)]


# -- random ------------------------------------------------------------------------------

NUM_DRAWS = 4000


def chi_square(tokens: Sequence[int], probabilities: Tensor) -> float:
    expected = probabilities.double() * len(tokens)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(probabilities))
    assert not counts[expected == 0].any()
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("greedy_draft", [0, 3])
def test_tokens_have_the_distribution_that_they_have_without_drafts(
    greedy_draft: int, has_probs: bool
):
    first = torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -math.inf])
    second = torch.tensor([0.0, 0.5, 1.0, -math.inf, 0.0, -1.0])
    rows = [make_row(seed=seed, temperature=1.0) for seed in range(NUM_DRAWS)]
    probs = None
    drafts = [[greedy_draft]] * NUM_DRAWS
    if has_probs:
        # Seeds of their own: what drafts are drawn with must not decide about them.
        draft_logits = torch.tensor([0.0, 0.0, 2.0, -1.0, 0.0, 1.0]).roll(greedy_draft)
        probs = draft_logits.softmax(dim=0).repeat(NUM_DRAWS, 1)
        seeds = range(10**6, 10**6 + NUM_DRAWS)
        drafts = draw_tokens(probs.log(), seeds, [0] * NUM_DRAWS)[1][:, None].tolist()

    output = sample_with_drafts(
        Sampler(6), torch.stack([first, second]).repeat(NUM_DRAWS, 1), rows, drafts, probs
    )

    # 20.5 is exceeded once in a thousand times with 5 degrees of freedom.
    assert chi_square([tokens[0] for tokens in output.token_ids], first.softmax(dim=0)) < 20.5
    behind = [tokens[1] for tokens in output.token_ids if len(tokens) > 1]
    assert len(behind) > NUM_DRAWS / 20
    assert chi_square(behind, second.softmax(dim=0)) < 20.5


def test_a_request_without_drafts_gets_the_sampler_s_token():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(20, V, generator=generator)
    rows = [make_row(seed=i, output=[1] * i, temperature=0.5 * (i % 3)) for i in range(20)]

    output = sample_with_drafts(Sampler(V), logits, rows, [[]] * 20)

    wanted = Sampler(V).sample(logits, rows).token_ids
    assert output.token_ids == [(token_id,) for token_id in wanted]


def test_the_token_behind_accepted_drafts_is_drawn_as_at_its_position():
    model = small_model(4)
    drafts = write(model, make_row([1]), 2)
    num_accepted = 0
    for seed in range(40):
        row = make_row([1], seed=seed, temperature=0.8)
        (tokens,) = sample(model, [row], [drafts]).token_ids
        if len(tokens) == 3:
            num_accepted += 1
            later = make_row([1], drafts, seed=seed, temperature=0.8)
            behind = Sampler(V).sample(model(text_of(later))[None], [later]).token_ids
            assert tokens == (*drafts, *behind)

    assert num_accepted > 5


def test_a_request_gets_the_same_tokens_alone_and_in_any_batch():
    model = small_model(1)
    kinds = [{"temperature": 1.0}, {}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.5}]
    rows = [make_row([i % 4], seed=i, **kinds[i % 4]) for i in range(24)]
    drafts = [[(i + j) % V for j in range(i % 4)] for i in range(24)]

    together = sample(model, rows, drafts).token_ids

    alone = [sample(model, [rows[i]], [drafts[i]]).token_ids[0] for i in range(24)]
    assert together == alone
    backwards = sample(model, rows[::-1], drafts[::-1]).token_ids
    assert together == backwards[::-1]


def test_p9_no_global_random_state_is_touched():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    sample(small_model(0), [make_row(temperature=1.0), make_row()], [[1, 2], [3]])

    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


# -- parameters and trouble ----------------------------------------------------------------


def test_a_draft_is_judged_behind_the_drafts_before_it():
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0, 0.0, 5.0] + [0.0] * 6] * 3)

    # Token 5 is the most likely one in every row, and behind a drafted 5 it is penalised.
    row = make_row(presence_penalty=2.0, frequency_penalty=2.0)

    assert sample_with_drafts(Sampler(V), logits, [row], [[5, 5]]).token_ids == [(5, 1)]


def test_rows_and_logits_are_left_as_they_were():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    row = make_row([1], [2], temperature=0.8, repetition_penalty=1.5)

    sample_with_drafts(Sampler(V), logits, [row], [[5, 2]])

    assert torch.equal(logits, before)
    assert row.output_token_ids == [2]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_only_a_row_that_gave_a_token_can_fail(value: float, params: dict[str, object]):
    likes_4 = torch.full((V,), -40.0)
    likes_4[4] = 40.0
    bad = torch.full((V,), value)

    def errors(*logits: Tensor) -> dict[int, str]:
        rows = [make_row(**params), make_row(**params)]
        batch = torch.stack([likes_4, *logits])
        return sample_with_drafts(Sampler(V), batch, rows, [[], [4, 4]]).errors

    assert list(errors(bad, likes_4, likes_4)) == [1]
    assert list(errors(likes_4, bad, likes_4)) == [1]
    assert list(errors(likes_4, likes_4, bad)) == [1]
    likes_3 = likes_4.roll(-1)
    assert errors(likes_3, bad, bad) == {}
    assert errors(likes_4, likes_3, bad) == {}
