"""What was counted of a request is kept up, at the cost of its new tokens."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from lmscope_kernels.numba_support import why_not_numba

from lmscope.execute import sampler as sampler_module
from lmscope.execute.logits_adjustment import LogitsAdjustment, adjusted_logits, changes_of
from lmscope.execute.sampler import Sampler
from lmscope.execute.sampling_row import SamplingRow
from lmscope.sampling_params import SamplingParams

VOCAB_SIZE = 90
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2}
KINDS: list[dict[str, object]] = [
    PENALTIES,
    {"frequency_penalty": 0.4},
    {"presence_penalty": 0.7, "logit_bias": {3: 2.0, 50: -1e300, 89: 0.5}},
    {"repetition_penalty": 0.8, "allowed_token_ids": [1, 2, 3, 7, 11, 30, 31]},
    {"repetition_penalty": 1.5, "min_tokens": 6},
]
WORDS = ((4,), (1, 2), (3, 1, 2), (7, 7, 5))


def row_of(output: list[int], **params: object) -> SamplingRow:
    return SamplingRow(
        "r",
        SamplingParams(**{"temperature": 0.0, "max_tokens": 99, **params}),
        (1, 5, 5, 30),
        output,
        0,
        frozenset({8}),
        WORDS,
    )


def by_hand(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """One row, from the whole of its output, in the documented order."""
    params, output = row.params, list(row.output_token_ids)
    logits = logits.clone()
    if params.allowed_token_ids is not None:
        barred = torch.ones(len(logits), dtype=torch.bool)
        barred[list(params.allowed_token_ids)] = False
        logits[barred] = -torch.inf
    for word in row.bad_words_ids:
        if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
            logits[word[-1]] = -torch.inf
    if len(output) < params.min_tokens:
        logits[list(row.stop_ids)] = -torch.inf
    for token, value in (params.logit_bias or {}).items():
        logits[token] += max(value, -3.4028234663852886e38)
    counts = Counter(output)
    for token in {*counts, *row.prompt_token_ids}:
        value = logits[token]
        factor = torch.tensor(params.repetition_penalty)
        logits[token] = value / factor if value > 0 else value * factor
    for token, count in counts.items():
        logits[token] = logits[token] - params.frequency_penalty * torch.tensor(float(count))
        logits[token] -= params.presence_penalty
    return logits


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_what_is_kept_up_is_what_the_whole_output_gives(params: dict[str, object]):
    chance = random.Random(3)
    output: list[int] = []
    adjustment = LogitsAdjustment(row_of(output, **params), VOCAB_SIZE)
    generator = torch.Generator().manual_seed(1)
    for step in range(200):
        logits = torch.randn(1, VOCAB_SIZE, generator=generator)

        adjusted = adjusted_logits(logits, changes_of([(0, adjustment)], 1))

        assert adjusted[0].equal(by_hand(logits[0], row_of(output, **params)))
        output.append(chance.choice([1, 2, 3, 7, chance.randrange(VOCAB_SIZE)]))
        if step % 23 == 22:
            del output[chance.randrange(len(output)) :]


class Watched(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[override]
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


def test_a_step_reads_as_many_tokens_behind_a_long_output_as_behind_a_short_one():
    num_read = []
    for length in (20, 20_000):
        output = Watched([1, 7] * (length // 2))
        adjustment = LogitsAdjustment(row_of(output, **PENALTIES), VOCAB_SIZE)
        changes_of([(0, adjustment)], 1)
        output.append(9)
        output.num_read = 0
        changes_of([(0, adjustment)], 1)
        num_read.append(output.num_read)

    assert num_read[0] == num_read[1]
    assert 1 <= num_read[0] <= 8


def test_only_tokens_that_occurred_or_have_a_bias_are_looked_at():
    output = [7, 7, 9, 7]
    adjustment = LogitsAdjustment(row_of(output, logit_bias={3: 1.0}, **PENALTIES), 150_000)

    changes = changes_of([(0, adjustment)], 1)

    assert changes is not None
    assert sorted(changes.entry_ids.tolist()) == [1, 3, 5, 7, 9, 30]


def test_a_count_outlives_the_batch_and_ends_with_its_row(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(
        sampler_module,
        "LogitsAdjustment",
        type(
            "Counted",
            (LogitsAdjustment,),
            {
                "__init__": lambda self, *args: (
                    made.append(1) or super(type(self), self).__init__(*args)
                )
            },
        ),
    )
    sampler = Sampler(VOCAB_SIZE)
    one, two = row_of([1], **PENALTIES), row_of([2], **PENALTIES)
    for rows in ([one, two], [two], [two, one], [one]):
        sampler.sample(torch.zeros(len(rows), VOCAB_SIZE), rows)
    assert len(made) == 2

    gone = weakref.ref(two)
    del two, rows
    gc.collect()
    assert gone() is None
    assert len(sampler._adjustments) == 1


@pytest.mark.parametrize("way", ["compiled", "in torch"])
def test_a_batch_in_which_some_rows_change_is_that_of_each_row_alone(
    way: str, monkeypatch: pytest.MonkeyPatch
):
    if way == "in torch":
        monkeypatch.setattr(sampler_module, "sampling_loops", lambda vocab_size: None)
    elif why_not_numba() is not None:
        pytest.skip("needs the extra cpu")
    logits = torch.randn(12, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    kinds = [*KINDS, {}, {"temperature": 0.9, "top_p": 0.8}]
    rows = [
        row_of([1, 3, 1, i], **{"temperature": float(i % 2), **kinds[i % len(kinds)]})
        for i in range(12)
    ]

    together = Sampler(VOCAB_SIZE).sample(logits, rows)

    for i, row in enumerate(rows):
        alone = Sampler(VOCAB_SIZE).sample(logits[i : i + 1], [row])
        assert alone.token_ids == [together.token_ids[i]]
        if row.params.is_greedy:
            assert alone.token_ids[0] == int(by_hand(logits[i], row).argmax())
