"""SamplingParams takes, changes and refuses what vLLM 0.16's does: recorded cases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lmscope.sampling_params import SamplingParams, with_generation_config

sys.path.insert(0, str(Path(__file__).parent))
import compare
import recordings

CASES = recordings.load("params")
DEFAULTS = CASES[0]["want"]
# Not built: asking for it is an error, whatever the value.
NOT_BUILT = [case for case in CASES if "truncate_prompt_tokens" in case["given"]]
EOS_CASES = [case for case in CASES if "eos" in case]
PLAIN_CASES = [case for case in CASES if case not in NOT_BUILT and case not in EOS_CASES]


@pytest.mark.parametrize("case", PLAIN_CASES, ids=lambda case: case["id"])
def test_the_constructor_does_what_was_recorded(case: dict[str, Any]):
    error = case["want"].get("error")
    if error is not None:
        with pytest.raises({"ValueError": ValueError, "TypeError": TypeError}[error]):
            SamplingParams(**case["given"])
        return

    params = SamplingParams(**case["given"])

    got = {name: getattr(params, name) for name in DEFAULTS}
    got["sampling_type"] = got["sampling_type"].name.lower()
    choices = [DEFAULTS | choice for choice in compare.expected(case, "want")]
    problems = [compare.differences(choice, got, case["id"]) for choice in choices]
    assert not all(problems), problems[0]


@pytest.mark.parametrize("case", EOS_CASES, ids=lambda case: case["id"])
def test_stop_ids_are_completed_as_recorded(case: dict[str, Any]):
    params, stop_ids = with_generation_config(
        SamplingParams(**case["given"]), case["eos"], case["generation_config"].get("eos_token_id")
    )

    got = {
        "stop_token_ids": sorted(params.stop_token_ids),
        "all_stop_token_ids": sorted(stop_ids),
    }
    assert not compare.differences(case["want"], got, case["id"])


@pytest.mark.parametrize("case", NOT_BUILT, ids=lambda case: case["id"])
def test_what_is_not_built_is_refused_by_name(case: dict[str, Any]):
    with pytest.raises((TypeError, ValueError)) as error:
        SamplingParams(**case["given"])

    assert "truncate_prompt_tokens" in str(error.value)


def test_all_144_cases_are_there_and_all_but_15_can_be_replayed():
    assert len(CASES) == 144
    assert len(PLAIN_CASES) == 120
    assert len(EOS_CASES) == 9
