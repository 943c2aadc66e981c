"""sample: the tokens that the CPU's rule draws, whatever the filters, and how often."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.gumbel_noise import gumbel_noise_reference
from lmscope_kernels.sampling import SamplingWorkspace, sample, sample_reference

from lmscope.execute.logits_filters import filter_min_p, filter_top_k, filter_top_p
from lmscope.execute.random_draws import draw_tokens

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DEVICE, DTYPES, IS_INTERPRETED, randn

VOCAB_SIZES = [999, 49152, 151936]
# Each row: temperature, top_k, top_p, min_p. 0 and 1 switch a filter off, as does a large top_k.
ROWS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.1, 0.9),
    (0.7, 50, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 1 << 30, 0.5, 0.02),
    (2.0, 40, 0.8, 0.001),
    (0.5, 1, 1.0, 0.0),
    (1.0, 900, 0.999, 0.0),
]


def columns(rows):
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, device=DEVICE),
        torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor(top_p, device=DEVICE),
        torch.tensor(min_p, dtype=torch.float64, device=DEVICE),
    )


def draws(num_rows):
    """Seeds of 64 bits, some of them negative as int64 holds them, and positions."""
    seed = torch.randint(-(2**63), 2**63 - 1, (num_rows,)).to(DEVICE)
    return seed, torch.randint(0, 4000, (num_rows,)).to(DEVICE)


def kept_by_cpu(logits, rows):
    """What the engine's filters leave on a CPU, in its order: scaled logits and -inf."""
    kept = logits.float().cpu().clone()
    for row, (temperature, top_k, top_p, min_p) in zip(kept, rows, strict=True):
        if temperature == 0.0:
            continue
        one = row[None]
        one /= temperature
        if min_p:
            filter_min_p(one, torch.tensor([math.log(min_p)]))
        if 0 < top_k < one.shape[1]:
            filter_top_k(one, torch.tensor([top_k]))
        if top_p < 1.0:
            filter_top_p(one, torch.tensor([top_p]))
    return kept


def drawn_by_cpu(logits, rows, seed, position):
    kept = kept_by_cpu(logits, rows)
    is_greedy = torch.tensor([temperature == 0.0 for temperature, *_ in rows])
    _, tokens = draw_tokens(kept, seed.tolist(), position.tolist())
    return torch.where(is_greedy, kept.argmax(dim=-1), tokens)


def is_near_tie(logits, row, parameters, seed, position, tokens):
    """Whether rounding alone decides between two tokens: of the draw, or of the last one kept."""
    temperature, top_k, top_p, min_p = parameters
    values = kept_by_cpu(logits[row : row + 1], [(temperature, top_k, 1.0, min_p)])[0].double()
    noise = gumbel_noise_reference(int(seed[row]), int(position[row]), len(values))
    first, second = (values + noise)[tokens].tolist()
    shares = values.softmax(dim=-1)
    # What is more probable than each of the two, beside top_p.
    above = [float(shares[shares > shares[token]].sum()) for token in tokens]
    is_at_the_edge = any(abs(each - top_p) < 1e-5 for each in above)
    return abs(first - second) < 1e-5 or is_at_the_edge


def assert_same_draws(tokens, expected, logits, rows, seed, position):
    for row in (tokens != expected).nonzero()[:, 0].tolist():
        both = [int(tokens[row]), int(expected[row])]
        assert is_near_tie(logits, row, rows[row], seed, position, both), (row, both)


def some_rows(vocab_size):
    """All of them, or under the interpreter, where each row of a large vocabulary costs, a few."""
    return ROWS if vocab_size < 2000 or not IS_INTERPRETED else [ROWS[2], ROWS[5]]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(999, dtype) for dtype in DTYPES]
    + [(49152, torch.bfloat16), (49152, torch.float32), (151936, torch.float32)],
)
def test_draws_are_those_of_the_cpu(vocab_size, dtype):
    rows = some_rows(vocab_size)
    logits = (randn(len(rows), vocab_size) * 3).to(dtype)
    seed, position = draws(len(rows))

    tokens = sample(logits, *columns(rows), seed, position)

    expected = drawn_by_cpu(logits, rows, seed, position)
    assert_same_draws(tokens.cpu(), expected, logits, rows, seed, position)
    expected = sample_reference(logits, *columns(rows), seed, position)
    assert_same_draws(tokens, expected, logits, rows, seed, position)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_without_filters_draws_are_those_of_the_cpu_too(vocab_size):
    rows = [(temperature, 0, 1.0, 0.0) for temperature in (1.0, 0.6, 0.0, 3.0)]
    logits = randn(4, vocab_size) * 2
    seed, position = draws(4)

    tokens = sample(logits, columns(rows)[0], None, None, None, seed, position.int())

    assert_same_draws(
        tokens.cpu(), drawn_by_cpu(logits, rows, seed, position), logits, rows, seed, position
    )


def test_one_filter_alone_needs_no_other():
    logits = randn(2, 999) * 3
    seed, position = draws(2)
    for rows, keep in (
        ([(1.0, 5, 1.0, 0.0)] * 2, (0,)),
        ([(1.0, 0, 0.4, 0.0)] * 2, (1,)),
        ([(1.0, 0, 1.0, 0.2)] * 2, (2,)),
    ):
        temperature, *filters = columns(rows)
        given = [each if index in keep else None for index, each in enumerate(filters)]

        tokens = sample(logits, temperature, *given, seed, position)

        expected = drawn_by_cpu(logits, rows, seed, position)
        assert_same_draws(tokens.cpu(), expected, logits, rows, seed, position)


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too():
    # Token 5 is the most likely, then three are equal; two of them would do for each filter.
    logits = torch.full((3, 100), -5.0, device=DEVICE)
    logits[:, 5] = 2.0
    logits[:, [10, 20, 30]] = 1.0
    rows = [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1.0, math.exp(-1.0))]
    assert (kept_by_cpu(logits, rows) > -torch.inf).sum(dim=-1).tolist() == [4, 4, 4]
    seen = [set(), set(), set()]
    for position in range(5 if IS_INTERPRETED else 60):
        seeds = torch.arange(3, device=DEVICE) + 7
        tokens = sample(logits, *columns(rows), seeds, torch.full_like(seeds, position))
        for row, token in enumerate(tokens.tolist()):
            seen[row].add(token)

    assert set.union(*seen) == {5, 10, 20, 30}


def test_zero_and_minus_zero_are_equally_likely():
    logits = torch.full((4, 64), -3.0, device=DEVICE)
    logits[:, 7], logits[:, 9] = 0.0, -0.0
    rows = [(1.0, 1, 1.0, 0.0)] * 4
    seeds = torch.arange(4, device=DEVICE)

    seen = {
        token
        for position in range(2)
        for token in sample(
            logits, *columns(rows), seeds, torch.full_like(seeds, position)
        ).tolist()
    }

    assert seen == {7, 9}


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.zeros(2, 140000, device=DEVICE)
    logits[0, [777, 5000, 139000]] = 1.0
    logits[1, [70000, 139999]] = 1.0
    rows = [(0.0, 0, 1.0, 0.0)] * 2

    tokens = sample(logits, *columns(rows), *draws(2))

    assert tokens.tolist() == [777, 70000]


def test_frequencies_are_the_probabilities():
    num_rows, num_rounds = (16, 16) if IS_INTERPRETED else (256, 100)
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = probabilities.log().repeat(num_rows, 1).to(DEVICE)
    rows = [(1.0, 0, 1.0, 0.0)] * num_rows
    workspace = SamplingWorkspace.allocate(num_rows, 5, DEVICE)
    counts = torch.zeros(5)
    seeds = torch.arange(num_rows, device=DEVICE)
    for position in range(num_rounds):
        tokens = sample(
            logits,
            columns(rows)[0],
            None,
            None,
            None,
            seeds,
            torch.full_like(seeds, position),
            workspace=workspace,
        )
        counts += tokens.cpu().bincount(minlength=5)
    expected = probabilities * num_rows * num_rounds
    # The same seeds each time, so the same sum; chance alone exceeds 18.5 once in a thousand.
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5


def test_a_row_draws_the_same_alone_and_in_any_place():
    logits = randn(len(ROWS), 999) * 3
    seed, position = draws(len(ROWS))
    together = sample(logits, *columns(ROWS), seed, position)

    order = torch.randperm(len(ROWS))
    shuffled = sample(
        logits[order],
        *columns([ROWS[row] for row in order]),
        seed[order.to(DEVICE)],
        position[order.to(DEVICE)],
    )
    alone = sample(logits[3:4], *columns(ROWS[3:4]), seed[3:4], position[3:4])

    assert torch.equal(shuffled, together[order.to(DEVICE)])
    assert torch.equal(alone, together[3:4])


def test_the_score_says_when_a_token_means_nothing():
    logits = randn(4, 999)
    logits[1, 500] = torch.nan
    logits[2] = -torch.inf
    rows = [(1.0, 20, 0.9, 0.01)] * 3 + [(0.0, 0, 1.0, 0.0)]
    score = torch.empty(4, device=DEVICE)
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)

    result = sample(logits, *columns(rows), *draws(4), score=score, out=out)

    assert result is out
    assert score[1].isnan()
    assert score[2] == -torch.inf
    assert score[3] == logits[3].max()
    assert score[0].isfinite()
    assert ((out >= 0) & (out < 999)).all()


def test_a_workspace_serves_smaller_batches_and_what_it_held_does_not_matter():
    workspace = SamplingWorkspace.allocate(len(ROWS), 2000, DEVICE)
    for tensor in (workspace.maxima, workspace.best, workspace.sums, workspace.score):
        tensor.fill_(torch.nan)
    workspace.state.fill_(-1)
    workspace.best_id.fill_(-1)
    logits = randn(len(ROWS), 999) * 3
    seed, position = draws(len(ROWS))

    for num_rows in (len(ROWS), 3):
        some = slice(0, num_rows)
        arguments = (logits[some], *columns(ROWS[some]), seed[some], position[some])
        assert torch.equal(sample(*arguments, workspace=workspace), sample(*arguments))


def test_what_does_not_fit_is_refused():
    logits = randn(2, 100)
    parameters = columns(ROWS[:2])
    seed, position = draws(2)
    with pytest.raises(ValueError, match=r"top_k is \[3\], must be \[2\]"):
        sample(logits, parameters[0], torch.ones(3, dtype=torch.int32, device=DEVICE), None, None,
               seed, position)  # fmt: skip
    with pytest.raises(TypeError, match=r"temperature is torch\.float64"):
        sample(logits, parameters[0].double(), *parameters[1:], seed, position)
    with pytest.raises(TypeError, match=r"seed is torch\.int32"):
        sample(logits, *parameters, seed.int(), position)
    with pytest.raises(ValueError, match="logits have stride 2"):
        sample(randn(100, 2).T, *parameters, seed, position)
    with pytest.raises(ValueError, match="workspace is for 1 rows"):
        sample(logits, *parameters, seed, position,
               workspace=SamplingWorkspace.allocate(1, 100, DEVICE))  # fmt: skip
    for name, dtype in (("out", torch.int64), ("score", torch.float32)):
        gaps = {name: torch.zeros(4, dtype=dtype, device=DEVICE)[::2]}
        with pytest.raises(ValueError, match=rf"{name} has strides \(2,\), must be contiguous"):
            sample(logits, *parameters, seed, position, **gaps)
    with pytest.raises(ValueError, match="logits have 0 tokens a row"):
        sample(randn(2, 0), *parameters, seed, position)
