"""The detokenizer gives the text that vLLM 0.16 gave: every recorded request, replayed.

Where a recording marks a defect of vLLM and says what would be right, the right text is
wanted. How texts become request outputs (queues, intervals, several continuations) is the
output processor's; here only text, ids and stop strings are looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lmscope.boundary import EngineCoreRequest
from lmscope.frontend.detokenizer import IncrementalDetokenizer, check_stop_strings
from lmscope.frontend.tokenizer import TokenizerAdapter
from lmscope.sampling_params import SamplingParams

FOLDER = Path(__file__).parents[2] / "conformance" / "frontend"
sys.path.insert(0, str(FOLDER))
import compare  # noqa: E402
import recordings  # noqa: E402

CASES = {name: recordings.load(f"text_{name}") for name in ("tiny", "fallback", "smollm2")}


def read_tokenizer(path: Path) -> TokenizerAdapter:
    return TokenizerAdapter.from_backend(Tokenizer.from_file(str(path)))


BYTES = read_tokenizer(FOLDER / "tokenizer_tiny.json")
PIECES = read_tokenizer(FOLDER / "tokenizer_fallback.json")


def ids_of(name: str) -> list[str]:
    return [case["id"] for case in CASES[name]]


@pytest.mark.parametrize("case", CASES["tiny"], ids=ids_of("tiny"))
def test_bytes(case: dict[str, Any]):
    assert not list(differences(case, BYTES))


@pytest.mark.parametrize("case", CASES["fallback"], ids=ids_of("fallback"))
def test_pieces_with_byte_fallback(case: dict[str, Any]):
    assert not list(differences(case, PIECES))


def test_the_tokenizer_of_the_demo_model(demo_model: Path):
    tokenizer = read_tokenizer(demo_model / "tokenizer.json")

    problems = [problem for case in CASES["smollm2"] for problem in differences(case, tokenizer)]

    assert not problems, problems[0]


@pytest.mark.parametrize("case", recordings.load("stop_strings"), ids=lambda case: case["id"])
def test_stop_strings(case: dict[str, Any]):
    found = check_stop_strings(case["text"], case["new"], case["stop"], case["include"])

    assert found == (tuple(case["want"]) if case["want"] else None)


def differences(case: dict[str, Any], tokenizer: TokenizerAdapter) -> Iterator[str]:
    """What is not as recorded, request by request and continuation by continuation."""
    for recorded in case["requests"]:
        params = dict(recorded["params"])
        kind = params.pop("output_kind")
        for index in range(params.pop("n", 1)):
            request = EngineCoreRequest(
                request_id=recorded["id"],
                prompt_token_ids=tuple(recorded["prompt_token_ids"]),
                sampling_params=SamplingParams(**params),
                eos_token_id=recorded["eos"],
            )
            played = Played(IncrementalDetokenizer.for_request(tokenizer, request))
            played.play(case, request.request_id, index, is_delta=kind == "delta")
            yield from played.problems


class Played:
    """One continuation, step by step against what was recorded of it."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self.detokenizer = detokenizer
        self.texts = [""]
        self.deltas = ""
        self.recorded_deltas = ""
        self.end: tuple[str, Any] | None = None
        self.problems: list[str] = []

    def play(self, case: dict[str, Any], request_id: str, index: int, is_delta: bool) -> None:
        # Only then does each step give the text it has made.
        is_direct = not case.get("queued") and case.get("stream_interval", 1) == 1
        for number, step in enumerate(case["steps"]):
            if request_id in step.get("abort", ()) and self.end is None:
                self.take((), "abort")
            for output in step.get("in", ()):
                is_mine = (output["id"], output.get("index", 0)) == (request_id, index)
                if is_mine and self.end is None:
                    self.take(output["tokens"], output.get("finish"))
            for wanted in wanted_outputs(step, request_id, index):
                self.compare(wanted, f"{case['id']} step {number}", is_delta, is_direct)
        if self.deltas != self.texts[-1]:
            self.problems.append(f"{case['id']}: deltas {self.deltas!r}, text {self.texts[-1]!r}")

    def take(self, tokens: Any, finish: str | None) -> None:
        stop = None
        if tokens:
            stop = self.detokenizer.update(tokens, finish == "stop", finish is not None)
        if stop is not None or finish is not None:
            self.end = ("stop" if stop is not None else finish or "", stop)
        is_finished = self.end is not None
        self.deltas += self.detokenizer.get_next_output_text(is_finished, delta=True)
        self.texts.append(self.detokenizer.get_next_output_text(is_finished, delta=False))

    def compare(self, wanted: dict[str, Any], where: str, is_delta: bool, is_direct: bool) -> None:
        text = wanted["text"]
        if is_delta:
            text = self.recorded_deltas = self.recorded_deltas + text
        # What waited in a queue may be older than the last step, but not at the end.
        good = [self.texts[-1]] if is_direct or "finish" in wanted else self.texts
        if text not in good:
            self.problems.append(f"{where}: wanted {text!r}, got {self.texts[-1]!r}")
        if "finish" in wanted:
            string = wanted.get("stop") if isinstance(wanted.get("stop"), str) else None
            if (wanted["finish"], string) != self.end:
                self.problems.append(f"{where}: wanted {wanted['finish']} {string}, {self.end}")
            ids = self.detokenizer.output_token_ids
            if not is_delta and wanted["token_ids"] != ids:
                self.problems.append(f"{where}: wanted {wanted['token_ids']}, got {ids}")


def wanted_outputs(step: dict[str, Any], request_id: str, index: int) -> Iterator[dict[str, Any]]:
    preferred, *_ = compare.expected(step)
    for output in preferred:
        if output["id"] == request_id:
            yield from (one for one in output["outputs"] if one["index"] == index)
