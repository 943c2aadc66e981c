"""The n-gram proposer drafts what vLLM 0.16's drafts: recorded cases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lmscope.speculate.ngram import NgramProposer

sys.path.insert(0, str(Path(__file__).parent))
import compare
import recordings

CASES = recordings.load("ngram")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_drafts_are_the_recorded_ones(case: dict[str, Any]):
    proposer = NgramProposer(
        num_speculative_tokens=case["k"],
        prompt_lookup_min=case["min_n"],
        prompt_lookup_max=case["max_n"],
        max_model_len=case["max_model_len"],
    )

    drafts = proposer.propose(
        [row.get("sampled", []) for row in case["rows"]],
        [row["tokens"] for row in case["rows"]],
    )

    assert not compare.differences(case["want"], drafts, case["id"])


def test_all_150_cases_are_there_and_half_of_the_rows_have_drafts():
    drafts = [draft for case in CASES for draft in case["want"]]

    assert len(CASES) == 150
    assert len(drafts) == 388
    assert sum(map(bool, drafts)) == 186
