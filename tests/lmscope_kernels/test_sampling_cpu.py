"""Compiled loops choose the tokens that the sampler chooses without them, or say they cannot."""

from __future__ import annotations

import importlib
import math
import re

import numpy as np
import pytest
import torch
from lmscope_kernels.numba_support import why_not_numba
from lmscope_kernels.sampling_cpu import Changes, RowColumns, SamplingLoops

from lmscope.execute import logits_filters, random_draws, random_rows, sampler as sampler_module
from lmscope.execute.sampler import Sampler, SamplingRow
from lmscope.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(why_not_numba() is not None, reason="needs the extra cpu")

CHOICES, ROWS = "lmscope_kernels.sampling_numba", "lmscope_kernels.row_sampling_numba"
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.3, "top_p": 0.99},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.9, "top_p": 0.95, "min_p": 0.01},
]


def row_of(seed: int = 0, output: tuple[int, ...] = (), **params: object) -> SamplingRow:
    return SamplingRow("r", SamplingParams(**params), (1, 2), list(output), seed)


def randn(num_rows: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(
        num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)
    )


def choices_of(logits: torch.Tensor, rows: list[SamplingRow], changes: Changes | None = None):
    return SamplingLoops(logits.shape[1]).choose(
        logits.numpy(),
        random_rows.row_columns(rows, logits.shape[1]),
        np.array([len(row.output_token_ids) for row in rows]),
        Changes.none(len(rows)) if changes is None else changes,
    )


def sampler_in_torch(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    monkeypatch.setattr(sampler_module, "sampling_loops", lambda vocab_size: None)
    return Sampler(vocab_size)


# Whole blocks of 64 and not, smaller than a block, smaller and larger than the pieces of a row.
@pytest.mark.parametrize("vocab_size", [3, 64, 500, 700, 30_011, 49_152])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 40.0])
def test_tokens_and_thresholds_are_those_of_the_definition(
    vocab_size: int, spread: float, monkeypatch: pytest.MonkeyPatch
):
    logits = randn(4 * len(KINDS), vocab_size, spread)
    rows = [
        row_of(seed=7 * i - 3, output=(1,) * (i % 5), **KINDS[i % len(KINDS)])
        for i in range(len(logits))
    ]

    choices = choices_of(logits, rows)

    definition = sampler_in_torch(vocab_size, monkeypatch)
    expected, processed = definition.sample(logits, rows), definition.process(logits, rows)
    decided = np.flatnonzero(choices.is_decided)
    assert choices.token_ids[decided].tolist() == [expected.token_ids[i] for i in decided]
    for i in decided:
        if not rows[i].params.is_greedy:
            scaled = logits[i] / torch.tensor(rows[i].params.temperature)
            assert (scaled >= choices.least[i]).equal(processed[i] > -math.inf), rows[i].params
    # Where all are alike, many are hardly apart from the last one kept.
    assert len(decided) > (0.6 if spread < 1 else 0.9) * len(rows)
    # And where they leave it to the definition, the sampler does.
    monkeypatch.undo()
    assert Sampler(vocab_size).sample(logits, rows).token_ids == expected.token_ids


@pytest.mark.parametrize("vocab_size", [700, 704])
def test_a_row_is_the_same_alone_and_anywhere(vocab_size: int):
    logits = randn(len(KINDS), vocab_size)
    rows = [row_of(seed=i, **kind) for i, kind in enumerate(KINDS)]
    together = choices_of(logits, rows)
    order = [5, 2, 9, 0, 11, 1]

    shuffled = choices_of(logits[order], [rows[i] for i in order])

    for mixed, whole in zip(shuffled, together, strict=True):
        assert mixed.tolist() == whole[order].tolist()


def test_what_rounding_decides_is_left_to_the_definition(monkeypatch: pytest.MonkeyPatch):
    logits = torch.full((4, 128), -60.0)
    # The first two are just what top-p wants, or just not.
    logits[0, :4] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    # Which of those that are hardly apart are as likely as the last one?
    logits[1, :3] = torch.tensor([3.0, 1.0, 1.0 - 2.0**-23])
    # Draws of two that have the same score.
    logits[2] = 3e9
    # So flat that each of them is less than what rounding leaves open.
    logits[3] = torch.linspace(0, 1e-6, 128)
    rows = [
        row_of(temperature=1.0, top_p=0.75),
        row_of(temperature=1.0, top_p=0.9),
        row_of(temperature=1.0),
        row_of(temperature=1.0, top_p=0.5),
    ]

    choices = choices_of(logits, rows)

    assert choices.is_decided.tolist() == [False] * 4
    expected = sampler_in_torch(128, monkeypatch).sample(logits, rows).token_ids
    monkeypatch.undo()
    assert Sampler(128).sample(logits, rows).token_ids == expected


def test_a_flat_row_of_a_large_vocabulary_is_decided():
    logits = randn(32, 50_000, spread=0.2)
    rows = [row_of(seed=i, temperature=1.0, top_p=0.9) for i in range(32)]

    assert choices_of(logits, rows).is_decided.mean() > 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_say_so_and_harm_no_other(temperature: float):
    logits = randn(5, 100)
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3, 9] = math.inf
    rows = [row_of(seed=i, temperature=temperature) for i in range(5)]

    choices = choices_of(logits, rows)

    assert math.isnan(choices.best[1])
    assert choices.best[2] == -math.inf
    is_greedy = temperature == 0.0
    assert choices.is_decided.tolist() == [True, is_greedy, is_greedy, is_greedy, True]
    if is_greedy:
        assert choices.token_ids[3] == 9
    for row in (0, 4):
        alone = choices_of(logits[[row]], [rows[row]])
        assert alone.token_ids[0] == choices.token_ids[row]


def test_negative_zero_and_the_smallest_numbers_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch,
):
    logits = torch.zeros(3, 64)
    logits[0, ::2] = -0.0
    logits[1] = torch.arange(64) * 2.0**-149
    logits[2] = -torch.arange(64) * 2.0**-126
    kinds = [{"top_k": 3}, {"top_k": 3}, {"min_p": 1.0, "temperature": 3.0}]
    rows = [row_of(**{"temperature": 1.0, **kind}) for kind in kinds]

    choices = choices_of(logits, rows)

    expected = sampler_in_torch(64, monkeypatch).process(logits, rows)
    for i in range(3):
        scaled = logits[i] / torch.tensor(rows[i].params.temperature)
        assert (scaled >= choices.least[i]).equal(expected[i] > -math.inf)


def test_logits_and_what_is_asked_for_are_not_changed():
    logits = randn(2, 130)
    before = logits.clone()
    changes = Changes(
        np.array([0, 1, 2]),
        np.array([3, 5]),
        np.array([[1, 2], [1, 1], [0, 0], [0, 0]], np.float32),
        np.array([0, 1, 1]),
        np.array([7]),
        np.array([False, True]),
    )
    choices = choices_of(logits, [row_of(temperature=0.0)] * 2, changes)

    assert logits.equal(before)
    assert choices.token_ids[1] == 5


def test_entries_change_what_they_say():
    logits = torch.tensor([[4.0, 4.0, -4.0, 1.0, 9.0]])
    # Bias, repetition, by frequency, by presence.
    entries = [[2.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.5, 1.0], [0.5, 0, 0, 0], [0.25, 0, 0, 0]]
    changes = Changes(
        np.array([0, 4]),
        np.array([0, 1, 2, 3]),
        np.array(entries, np.float32),
        np.array([0, 1]),
        np.array([4]),
        np.array([False]),
    )

    choices = choices_of(logits, [row_of(temperature=0.0)], changes)

    # (4 + 2) / 2 - 0.5 - 0.25, 4 / 2, -4 / 0.5, 1
    assert choices.token_ids[0] == 0
    assert choices.best[0] == 2.25


# --- log probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5, 64])
@pytest.mark.parametrize("vocab_size", [64, 700, 50_257])
def test_log_probabilities_are_those_of_float64(k: int, vocab_size: int):
    logits = randn(6, vocab_size, spread=5.0)
    logits[1] = logits[1].round()
    logits[2] = 1.0
    logits[3, k + 1 :] = -math.inf
    chosen = torch.tensor([3, 5, 9, 0, vocab_size - 1, 7])

    found = SamplingLoops(vocab_size).log_probabilities(logits.numpy(), chosen.numpy(), k)

    values = torch.from_numpy(found.logprobs)
    exact = logits.double().log_softmax(dim=-1)
    assert found.is_done.all()
    assert found.token_ids[:, 0].tolist() == chosen.tolist()
    expected = exact.gather(1, torch.from_numpy(found.token_ids))
    torch.testing.assert_close(values.double(), expected, rtol=3e-7, atol=2e-6)
    assert found.ranks[:3].tolist() == [
        int((logits[i] >= logits[i, chosen[i]]).sum()) for i in range(3)
    ]
    # Descending, all different, and of equal ones the lowest ids in their order.
    for i in range(6):
        order = logits[i].double().argsort(descending=True, stable=True)[:k]
        assert found.token_ids[i, 1:].tolist() == order.tolist()
        assert (np.diff(found.logprobs[i, 1:]) <= 0).all()


def test_too_few_and_no_numbers_are_left_to_the_definition():
    logits = randn(4, 100)
    logits[0, 4] = math.nan
    logits[1, 3:] = -math.inf
    logits[2, 5] = math.inf
    found = SamplingLoops(100).log_probabilities(logits.numpy(), np.zeros(4, np.int64), 5)

    assert found.is_done.tolist() == [False, False, False, True]


# --- how they are compiled -----------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [100, 50_257])
def test_weights_differ_from_those_of_softmax_by_less_than_is_allowed_for(vocab_size: int):
    kernels = importlib.import_module(ROWS)
    logits = randn(40, vocab_size, spread=5.0)
    logits -= logits.amax(dim=-1, keepdim=True)
    exact = logits.double().exp()
    of_softmax = logits.softmax(dim=-1).double()
    of_softmax *= exact.sum(dim=-1, keepdim=True) / of_softmax.sum(dim=-1, keepdim=True)
    weights = np.empty_like(logits.numpy())
    for own, row in zip(weights, logits.numpy(), strict=True):
        kernels.weigh(row, vocab_size, np.float32(1), np.float32(0), own)

    mine = (torch.from_numpy(weights).double() / exact - 1).abs().max()
    theirs = (of_softmax / exact - 1).abs().max()

    assert mine < 2 * 2.0**-23
    assert mine + theirs < importlib.import_module(CHOICES).WEIGHT_ERROR


@pytest.mark.parametrize("vocab_size", [64, 49_152, 50_304])
def test_totals_differ_from_those_of_the_definition_by_less_than_is_allowed_for(vocab_size: int):
    kernels = importlib.import_module(ROWS)
    row = randn(1, vocab_size, spread=5.0)[0].numpy()
    weights = np.empty_like(row)
    kernels.weigh(row, vocab_size, np.float32(0.7), row.max(), weights)

    scratch = np.empty(max(vocab_size, kernels.NUM_PIECES), np.float32)
    mine = kernels.total_weight(
        row, np.float32(0.7), row.max(), scratch, np.empty(kernels.NUM_SUMS)
    )
    (theirs,) = logits_filters._totals(weights[None])

    exact = weights.sum(dtype=np.float64)
    allowed = importlib.import_module(CHOICES).TOTAL_ERROR
    assert abs(mine / exact - 1) + abs(theirs / exact - 1) < allowed
    assert allowed > (2 + 3) * 2.0**-24


def test_uniform_numbers_are_those_of_the_definition():
    kernels = importlib.import_module(CHOICES)
    low, high = random_draws.row_keys([5], [9])[0].tolist()
    for token in (0, 1, 77, 49_151, 150_000):
        u = kernels._uniform(token, np.uint32(low % 2**32), np.uint32(high % 2**32))
        noise = random_draws.gumbel_noise(
            random_draws.row_keys([5], [9]), torch.tensor([token], dtype=torch.int32)
        )
        assert -math.log(-math.log1p(-float(u))) == pytest.approx(noise.item(), rel=1e-5)


def test_weights_are_compiled_to_vector_instructions():
    kernels = importlib.import_module(ROWS)
    ones = np.ones(64, np.float32)
    kernels.weigh(ones, 64, np.float32(1), np.float32(1), ones.copy())

    (code,) = kernels.weigh.inspect_llvm().values()

    assert re.search(r"fdiv[a-z ]* <\d+ x float>", code)
    assert re.search(r"fmul <\d+ x float>", code)
    # In an order of its own a sum would have other bits on another processor.
    assert not re.search(r"f(add|mul|sub|div) (fast|reassoc|contract)", code)


def test_one_compiled_function_serves_all_shapes_and_parameters():
    choices = importlib.import_module(CHOICES)
    kernels = importlib.import_module(ROWS)
    for vocab_size in (5, 64, 900):
        choices_of(randn(2, vocab_size), [row_of(**KINDS[3]), row_of(**KINDS[9])])
        SamplingLoops(vocab_size).log_probabilities(
            randn(2, vocab_size).numpy(), np.zeros(2, np.int64), 2
        )

    assert len(choices.choose_rows.signatures) == 1
    assert len(kernels.log_probabilities.signatures) == 1


def test_columns_have_the_types_that_the_loops_are_compiled_for():
    columns = random_rows.row_columns([row_of(seed=-1, temperature=1e300, top_p=1 - 1e-12)], 9)

    assert isinstance(columns, RowColumns)
    assert columns.temperature.tolist() == [float(np.finfo(np.float32).max)]
    assert columns.top_p.tolist() == [1.0]
    assert columns.seeds.tolist() == [2**64 - 1]
