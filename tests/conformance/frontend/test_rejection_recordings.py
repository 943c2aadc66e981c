"""Drafts are accepted and replaced as vLLM 0.16 does it: recorded cases."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmscope.execute import draft_sampling, random_rows, sampler
from lmscope.execute.draft_sampling import sample_with_drafts
from lmscope.execute.sampler import Sampler, SamplerOutput, SamplingRow
from lmscope.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
import compare
import recordings

CASES = recordings.load("rejection")


class WatchedSampler(Sampler):
    """Keeps what it gave: the logits of the draft rows, and the bonus tokens."""

    target: Tensor
    bonus: list[int]

    def process(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        self.target = super().process(logits, rows)
        return self.target

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        output = super().sample(logits, rows)
        self.bonus = output.token_ids
        return output


def row_of(recorded: dict[str, Any], index: int) -> SamplingRow:
    """One request; its seed is its row in the recording, to find its noise by."""
    params = SamplingParams(**recorded["params"])
    return SamplingRow(
        request_id=str(index),
        params=params,
        prompt_token_ids=recorded["prompt"],
        output_token_ids=recorded.get("output", []),
        seed=index,
        stop_ids=frozenset({recorded["eos"]}),
        bad_words_ids=tuple(map(tuple, recorded.get("bad_words", []))),
    )


@pytest.fixture
def with_recorded_noise(monkeypatch: pytest.MonkeyPatch):
    """Draw with the noise of a case instead of our own."""

    def use(case: dict[str, Any]) -> None:
        rows = case["rows"]

        def drawing_with(name: str) -> Any:
            def draw(logits: Tensor, seeds: Sequence[int], positions: object) -> Any:
                noise = torch.tensor([rows[seed][name] for seed in seeds])
                best = (logits.softmax(dim=-1) / noise).max(dim=-1)
                return best.values, best.indices

            return draw

        def uniform(seeds: Sequence[int], positions: Sequence[int], device: object) -> Tensor:
            return torch.tensor(
                [
                    rows[seed]["uniform"][position - len(rows[seed].get("output", []))]
                    if "uniform" in rows[seed]
                    else math.nan
                    for seed, position in zip(seeds, positions, strict=True)
                ],
                dtype=torch.float64,
            )

        monkeypatch.setattr(random_rows, "draw_tokens", drawing_with("bonus_noise"))
        monkeypatch.setattr(sampler, "sampling_loops", lambda vocab_size: None)
        monkeypatch.setattr(draft_sampling, "draw_tokens", drawing_with("noise"))
        monkeypatch.setattr(draft_sampling, "uniform_draws", uniform)

    return use


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_targets_bonus_and_emitted_tokens_are_the_recorded_ones(
    case: dict[str, Any], with_recorded_noise: Any
):
    with_recorded_noise(case)
    sampler = WatchedSampler(case["vocab"])

    output = sample_with_drafts(
        sampler,
        torch.tensor(case["logits"], dtype=torch.float32),
        [row_of(row, i) for i, row in enumerate(case["rows"])],
        [row.get("drafts", []) for row in case["rows"]],
        torch.tensor(case["draft_probs"]) if "draft_probs" in case else None,
    )

    target = [
        [None if value == -math.inf else value for value in row] for row in sampler.target.tolist()
    ]
    got = {"tokens": output.token_ids, "bonus": sampler.bonus, "target": target}
    assert not compare.differences(case["want"], got, case["id"])
    assert not output.errors


def test_all_80_cases_are_there_and_drafts_end_in_every_way():
    ends = [
        len(tokens) - len(row.get("drafts", []))
        for case in CASES
        for row, tokens in zip(case["rows"], case["want"]["tokens"], strict=True)
        if row.get("drafts")
    ]

    assert len(CASES) == 80
    assert sum(end == 1 for end in ends) > 20  # all accepted
    assert sum(end < 1 for end in ends) > 50
