"""The sampler masks, filters, chooses and reports what vLLM 0.16 does: recorded cases."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from lmscope_kernels.numba_support import why_not_numba
from lmscope_kernels.sampling_cpu import Changes, sampling_loops
from torch import Tensor

from lmscope.boundary import LogprobsLists
from lmscope.execute import random_rows, sampler as sampler_module
from lmscope.execute.logits_adjustment import adjusted_logits
from lmscope.execute.sampler import LogprobsMode, Sampler, SamplerOutput, SamplingRow
from lmscope.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
import compare
import recordings

CASES = recordings.load("sampler")


def row_of(recorded: dict[str, Any], request_id: str, **changes: object) -> SamplingRow:
    params = SamplingParams(**recorded["params"])
    stop_ids = frozenset(params.stop_token_ids)
    return SamplingRow(
        request_id=request_id,
        params=params.replace(**changes),
        prompt_token_ids=recorded["prompt"],
        output_token_ids=recorded.get("output", []),
        seed=params.seed or 0,
        stop_ids=stop_ids | {recorded["eos"]} if "eos" in recorded else stop_ids,
        bad_words_ids=tuple(map(tuple, recorded.get("bad_words", []))),
    )


def rows_of(case: dict[str, Any], **changes: object) -> list[SamplingRow]:
    return [row_of(row, str(i), **changes) for i, row in enumerate(case["rows"])]


def logits_of(case: dict[str, Any]) -> Tensor:
    """The recorded logits after the grammar, whose mask is laid on before the sampler."""
    logits = torch.tensor(case["logits"], dtype=torch.float32)
    for i, row in enumerate(case["rows"]):
        if "grammar" in row:
            barred = torch.ones(case["vocab"], dtype=torch.bool)
            barred[row["grammar"]] = False
            logits[i, barred] = -math.inf
    return logits


def whole_rows(output: SamplerOutput, vocab_size: int) -> list[list[float | None]]:
    """What `logprobs=-1` reports, by token id; None for -inf, as recorded."""
    rows = []
    for lists in output.logprobs:
        assert lists is not None
        by_id = dict(zip(lists.logprob_token_ids[0][1:], lists.logprobs[0][1:], strict=True))
        values = [by_id[token] for token in range(vocab_size)]
        rows.append([None if value == -math.inf else value for value in values])
    return rows


@pytest.fixture
def with_recorded_noise(monkeypatch: pytest.MonkeyPatch):
    """Draw with the noise of a case instead of our own."""

    def use(case: dict[str, Any]) -> None:
        noises = [
            torch.tensor(row.get("noise", [1.0] * case["vocab"]))
            for row in case["rows"]
            if row["params"].get("temperature", 1.0) != 0
        ]

        def draw(
            logits: Tensor, seeds: Sequence[int], positions: Sequence[int]
        ) -> tuple[Tensor, Tensor]:
            best = (logits.softmax(dim=-1) / torch.stack(noises)).max(dim=-1)
            return best.values, best.indices

        monkeypatch.setattr(random_rows, "draw_tokens", draw)
        monkeypatch.setattr(sampler_module, "sampling_loops", lambda vocab_size: None)

    return use


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_adjusted_logits_are_the_recorded_ones(case: dict[str, Any]):
    # A greedy row is not processed further, so it reports its adjusted logits.
    rows = rows_of(case, temperature=0.0, logprobs=-1)

    output = Sampler(case["vocab"], "processed_logits").sample(logits_of(case), rows)

    adjusted = whole_rows(output, case["vocab"])
    assert not compare.differences(case["want"]["adjusted"], adjusted, case["id"])
    assert output.token_ids == case["want"]["argmax"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_processed_logits_are_the_recorded_ones(case: dict[str, Any]):
    output = Sampler(case["vocab"], "processed_logits").sample(
        logits_of(case), rows_of(case, logprobs=-1)
    )

    processed = whole_rows(output, case["vocab"])
    assert not compare.differences(case["want"]["processed"], processed, case["id"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_tokens_and_logprobs_are_the_recorded_ones(case: dict[str, Any], with_recorded_noise):
    with_recorded_noise(case)
    rows = rows_of(case)
    for mode in get_args(LogprobsMode):
        output = Sampler(case["vocab"], mode).sample(logits_of(case), rows)

        assert not output.errors
        recorded = case["want"].get(mode, [None] * len(rows))
        for i, token in enumerate(case["want"]["token"]):
            where = f"{case['id']} row {i} {mode}"
            assert token is None or output.token_ids[i] == token, where
            lists = output.logprobs[i]
            assert (lists is None) == (rows[i].params.logprobs is None), where
            if recorded[i] is not None:
                assert lists is not None, where
                assert not logprob_differences(recorded[i], lists, where)


def logprob_differences(recorded: list[Any], lists: LogprobsLists, where: str) -> list[str]:
    token, value, rank, top = recorded
    ids, values = lists.logprob_token_ids[0], lists.logprobs[0]
    found = compare.differences(
        [token, value, rank], [ids[0], values[0], lists.sampled_token_ranks[0]], where
    )
    return found + compare.logprob_columns(top, list(ids[1:]), list(values[1:]), where)


@pytest.mark.skipif(why_not_numba() is not None, reason="needs the extra cpu")
def test_compiled_loops_leave_the_recorded_tokens_to_be_drawn_from():
    num_decided = num_random = 0
    for case in CASES:
        rows, logits = rows_of(case), logits_of(case)
        batch = Sampler(case["vocab"])._batch_of(rows, logits.device)
        changes = batch.changes()
        loops = sampling_loops(case["vocab"])
        assert loops is not None

        choices = loops.choose(
            logits.numpy(),
            batch._columns,
            np.array([len(row.output_token_ids) for row in rows]),
            Changes.none(len(rows)) if changes is None else changes,
        )

        adjusted = adjusted_logits(logits, changes)
        for i, row in enumerate(rows):
            if row.params.is_greedy:
                assert choices.token_ids[i] == case["want"]["argmax"][i]
                continue
            num_random += 1
            if choices.is_decided[i]:
                num_decided += 1
                left = adjusted[i] / np.float32(row.params.temperature) >= choices.least[i]
                left &= adjusted[i] > -math.inf
                recorded = [value is not None for value in case["want"]["processed"][i]]
                assert left.tolist() == recorded, case["id"]
                assert recorded[choices.token_ids[i]]
    assert num_decided > 0.9 * num_random > 100


def test_all_120_cases_are_there_and_most_rows_have_a_known_token():
    tokens = [token for case in CASES for token in case["want"]["token"]]

    assert len(CASES) == 120
    assert sum(token is not None for token in tokens) > 200
