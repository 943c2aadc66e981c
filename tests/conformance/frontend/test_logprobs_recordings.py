"""Columns, ranks and labels of log probabilities are vLLM 0.16's: recorded cases."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from lmscope.boundary import Logprob, LogprobsLists
from lmscope.execute.sampler import Sampler
from lmscope.execute.token_logprobs import gather_logprobs
from lmscope.frontend.logprobs import LogprobsProcessor
from lmscope.frontend.tokenizer import TokenTexts

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import compare  # noqa: E402
import recordings  # noqa: E402

CASES = recordings.load("logprobs")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer_tiny.json"))


def columns_of(lists: LogprobsLists | None) -> list[list[Any]]:
    if lists is None:
        return []
    rows = zip(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, strict=True)
    return [[list(ids), list(values), rank] for ids, values, rank in rows]


def positions_of(positions: Sequence[Mapping[int, Logprob] | None]) -> list[Any]:
    return [
        position
        and [
            [token, each.logprob, each.rank, each.decoded_token] for token, each in position.items()
        ]
        for position in positions
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_columns_and_labels_are_the_recorded_ones(case: dict[str, Any], tokenizer: Tokenizer):
    sampled = prompt = None
    if "logits" in case:
        values = torch.tensor(case["logits"]).log_softmax(dim=-1)
        sampled = gather_logprobs(values, torch.tensor(case["tokens"]), case["batch_logprobs"])
    if "prompt_logits" in case:
        logits = torch.tensor(case["prompt_logits"])
        prompt = Sampler(logits.shape[1]).prompt_logprobs(
            logits, case["prompt_token_ids"][1:], case["prompt_logprobs"]
        )
    processor = LogprobsProcessor(
        case.get("logprobs"),
        case.get("prompt_logprobs"),
        TokenTexts(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)),
    )

    got = {
        "columns": columns_of(sampled),
        "prompt_columns": columns_of(prompt),
        "prompt_logprobs": positions_of(processor.update_prompt(prompt)) if prompt else [],
        "logprobs": positions_of(processor.update_sample(sampled)) if sampled else [],
        "cumulative_logprob": processor.cumulative_logprob,
    }

    assert not compare.differences(case["want"], got, case["id"])


def test_all_30_cases_are_there():
    assert len(CASES) == 30
