"""A reader of a Stream gets what vLLM 0.16's front end handed out: recorded cases.

The whole way of the output is played: OutputProcessor, tap, Stream, and an asynchronous
reader of it, which stands for any reader. Two things are put into the recorded form:

- A Stream keeps every output for each of its readers; vLLM's queue has one place and adds
  up what comes while nobody reads. So what a late reader finds is added up here.
- An aborted request gets a last output here. vLLM gives one only to a request with a queue,
  so without queues it is looked at by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from lmscope import LLM
from lmscope.boundary import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    Logprob,
    LogprobsLists,
    RequestOutput,
)
from lmscope.frontend.output_processor import OutputProcessor
from lmscope.frontend.stream import Stream
from lmscope.frontend.tokenizer import TokenizerAdapter
from lmscope.sampling_params import RequestOutputKind, SamplingParams
from lmscope.tap import Tap

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import compare  # noqa: E402
import recordings  # noqa: E402

INFO = EngineInfo(
    model="m",
    block_size=4,
    num_blocks=8,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=28,
)
CASES = {name: recordings.load(f"text_{name}") for name in ("tiny", "fallback", "smollm2")}
ALL_CASES = [case for cases in CASES.values() for case in cases]

# What is not built, so its cases are not replayed here; some need both. Their texts are
# compared where the detokenizer is tested.
SEVERAL = [case for case in ALL_CASES if any(r["params"].get("n", 1) > 1 for r in case["requests"])]
INTERVALS = [case for case in ALL_CASES if case.get("stream_interval", 1) > 1]
WAITING = {case["id"] for case in SEVERAL + INTERVALS}


def built(name: str) -> pytest.MarkDecorator:
    """The cases of a file that can be replayed, as parameters of a test."""
    cases = [case for case in CASES[name] if case["id"] not in WAITING]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["id"])


def read_tokenizer(path: Path) -> TokenizerAdapter:
    return TokenizerAdapter.from_backend(Tokenizer.from_file(str(path)))


BYTES = read_tokenizer(FOLDER / "tokenizer_tiny.json")
PIECES = read_tokenizer(FOLDER / "tokenizer_fallback.json")


@built("tiny")
def test_bytes(case: dict[str, Any], runner: asyncio.Runner):
    assert not played(case, BYTES, runner)


@built("fallback")
def test_pieces_with_byte_fallback(case: dict[str, Any], runner: asyncio.Runner):
    assert not played(case, PIECES, runner)


@built("smollm2")
def test_the_tokenizer_of_the_demo_model(
    case: dict[str, Any], runner: asyncio.Runner, demo_tokenizer: TokenizerAdapter
):
    assert not played(case, demo_tokenizer, runner)


@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: case["id"])
def test_cases_with_several_continuations_wait_for_n_above_1(case: dict[str, Any], llm: LLM):
    for request in case["requests"]:
        n = request["params"].get("n", 1)
        if n > 1:
            with pytest.raises(ValueError, match=f"n is {n}"):
                llm.submit([97], SamplingParams(**request["params"]))


@pytest.mark.parametrize("case", INTERVALS, ids=lambda case: case["id"])
def test_cases_with_an_interval_wait_for_stream_interval(case: dict[str, Any]):
    with pytest.raises(TypeError, match="stream_interval"):
        LLM("s", execute="scripted", script=len, stream_interval=case["stream_interval"])


def test_469_of_642_cases_are_replayed():
    assert len(ALL_CASES) == 642
    assert len(SEVERAL) == 57
    assert len(INTERVALS) == 129
    assert len(WAITING) == 173


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("s", execute="scripted", script=lambda request_id, position: 97) as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> TokenizerAdapter:
    return read_tokenizer(demo_model / "tokenizer.json")


def played(case: dict[str, Any], tokenizer: TokenizerAdapter, runner: asyncio.Runner) -> list[str]:
    """What is not as recorded."""
    front_end = FrontEnd(tokenizer, runner)
    try:
        found = compare.play_text(case, front_end)
        return found + front_end.problems()
    finally:
        for reader in front_end.readers.values():
            runner.run(reader.close())


class FrontEnd:
    """The output path, as `compare.play_text` drives it."""

    def __init__(self, tokenizer: TokenizerAdapter, runner: asyncio.Runner) -> None:
        self.processor = OutputProcessor(tokenizer, Tap(INFO))
        self.runner = runner
        self.readers: dict[str, Reader] = {}
        self.is_queued = False
        self.step = 0
        # Of one token, with log probabilities asked for: the core gives a table without rows,
        # once, and a recording leaves out what is empty.
        self.short_prompts: set[str] = set()
        # Last outputs of aborted requests, where vLLM has none.
        self.aborted: list[RequestOutput] = []

    def add(self, recorded: dict[str, Any], queued: bool) -> None:
        self.is_queued = queued
        params = SamplingParams(**recorded["params"])
        request = EngineCoreRequest(
            request_id=recorded["id"],
            prompt_token_ids=tuple(recorded["prompt_token_ids"]),
            sampling_params=params,
            eos_token_id=recorded["eos"],
        )
        if params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1:
            self.short_prompts.add(request.request_id)
        stream = Stream(
            request.request_id,
            recorded.get("prompt"),
            request.prompt_token_ids,
            params,
            abort=lambda request_id: None,
        )
        self.processor.add_request(request, stream, lambda request_id: None)
        self.readers[request.request_id] = Reader(stream)

    def process(self, outputs: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        self.step += 1
        core_outputs = tuple(self.core_output_of(output) for output in outputs)
        stopped = self.processor.process(EngineCoreOutputs(step=self.step, outputs=core_outputs))
        produced = []
        if not self.is_queued:
            for output in outputs:
                produced += self.take(output["id"])
        return [in_recorded_form(output) for output in produced], [[id_, 0] for id_ in stopped]

    def core_output_of(self, recorded: dict[str, Any]) -> EngineCoreOutput:
        prompt_logprobs = columns_of(recorded.get("prompt_logprobs"))
        if recorded["id"] in self.short_prompts:
            self.short_prompts.remove(recorded["id"])
            prompt_logprobs = LogprobsLists((), (), ())
        return EngineCoreOutput(
            recorded["id"],
            tuple(recorded["tokens"]),
            columns_of(recorded.get("logprobs")),
            prompt_logprobs,
            recorded.get("finish"),
            recorded.get("stop"),
            num_cached_tokens=recorded.get("cached", 0),
        )

    def abort(self, ids: list[str]) -> list[Any]:
        streams = [self.readers[id_].stream for id_ in ids if id_ in self.readers]
        ended = self.processor.abort_streams(streams, self.step)
        if not self.is_queued:
            for request_id in ended:
                self.aborted += self.take(request_id)
        return [[request_id, 0] for request_id in ended]

    def read(self, request_id: str) -> dict[str, Any] | None:
        outputs = self.take(request_id)
        if not outputs:
            return None
        return in_recorded_form(added_up(outputs, self.readers[request_id].kind))

    def take(self, request_id: str) -> list[RequestOutput]:
        return self.runner.run(self.readers[request_id].take())

    def problems(self) -> list[str]:
        """What no recording can show."""
        found = [
            f"{output.request_id}: {output.outputs[0]} ends an aborted request"
            for output in self.aborted
            if not output.finished or output.outputs[0].finish_reason != "abort"
        ]
        for request_id, reader in self.readers.items():
            self.take(request_id)
            if reader.has_ended != reader.stream.finished:
                found.append(f"{request_id}: finished is {reader.stream.finished}")
            found += reader.problems()
        return found


class Reader:
    """Reads one stream, without waiting."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kind = stream.sampling_params.output_kind
        self.has_ended = False
        self.outputs = aiter(stream)
        self.next: asyncio.Task[RequestOutput | None] | None = None
        self.everything: list[RequestOutput] = []

    async def take(self) -> list[RequestOutput]:
        """All that is there."""
        taken: list[RequestOutput] = []
        while not self.has_ended:
            if self.next is None:
                self.next = asyncio.ensure_future(self.read())
            # All that happens, happens on this loop, and takes it two rounds.
            for _ in range(4):
                await asyncio.sleep(0)
            if not self.next.done():
                break
            output, self.next = self.next.result(), None
            if output is None:
                self.has_ended = True
            else:
                taken.append(output)
        self.everything += taken
        return taken

    async def read(self) -> RequestOutput | None:
        return await anext(self.outputs, None)

    async def close(self) -> None:
        if self.next is not None:
            self.next.cancel()
            await asyncio.wait([self.next])

    def problems(self) -> list[str]:
        """Where this reader, a later one and `stream.output` do not tell the same."""
        if not self.stream.finished:
            return []
        again = list(self.stream)
        whole = added_up(again, self.kind)
        found = []
        if again != self.everything:
            found.append(f"{self.stream.request_id}: a second reader got something else")
        if whole.outputs != self.stream.outputs:
            found.append(f"{self.stream.request_id}: {whole.outputs} and {self.stream.outputs}")
        return found


def columns_of(rows: list[Any] | None) -> LogprobsLists | None:
    if not rows:
        return None
    ids, values, ranks = zip(*rows, strict=True)
    return LogprobsLists(tuple(map(tuple, ids)), tuple(map(tuple, values)), tuple(ranks))


def added_up(outputs: Sequence[RequestOutput], kind: RequestOutputKind) -> RequestOutput:
    """What one place in a queue holds after all of them; as in vLLM, it is the first, changed."""
    parts = [output.outputs[0] for output in outputs]
    part = parts[-1]
    if kind is RequestOutputKind.DELTA:
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        part = msgspec.structs.replace(
            part,
            text="".join(part.text for part in parts),
            token_ids=tuple(itertools.chain(*(part.token_ids for part in parts))),
            logprobs=tuple(itertools.chain(*logprobs)) if logprobs else None,
        )
    return msgspec.structs.replace(outputs[0], outputs=(part,), finished=outputs[-1].finished)


def in_recorded_form(output: RequestOutput) -> dict[str, Any]:
    return {
        "id": output.request_id,
        "finished": output.finished,
        "cached": output.num_cached_tokens or None,
        "prompt_logprobs": positions_of(output.prompt_logprobs),
        "outputs": [
            {
                "index": part.index,
                "text": part.text,
                "token_ids": list(part.token_ids),
                "finish": part.finish_reason,
                "stop": part.stop_reason,
                "logprobs": positions_of(part.logprobs),
                "cumulative_logprob": part.cumulative_logprob,
            }
            for part in output.outputs
        ],
    }


def positions_of(positions: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    return positions and [
        position
        and [
            [token, each.logprob, each.rank, each.decoded_token] for token, each in position.items()
        ]
        for position in positions
    ]
