"""A reader of a Stream gets what vLLM 0.16's front end handed out: recorded cases.

The whole way of the output is played: OutputProcessor, tap, Stream, and an asynchronous
reader of it, which stands for any reader. Two things are put into the recorded form:

- A Stream keeps every output for each of its readers; vLLM's queue has one place and adds
  up what comes while nobody reads. So what a late reader finds is added up here.
- A recorded step calls a child by the id of its request and an index.
- An aborted request gets a last output here. vLLM gives one only to a request with a queue,
  so without queues it is looked at by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from lmscope.boundary import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    Logprob,
    LogprobsLists,
    RequestOutput,
)
from lmscope.frontend.output_processor import OutputProcessor
from lmscope.frontend.parallel_sampling import Child, child_requests
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


def cases_of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", CASES[name], ids=lambda case: case["id"])


def read_tokenizer(path: Path) -> TokenizerAdapter:
    return TokenizerAdapter.from_backend(Tokenizer.from_file(str(path)))


BYTES = read_tokenizer(FOLDER / "tokenizer_tiny.json")
PIECES = read_tokenizer(FOLDER / "tokenizer_fallback.json")


@cases_of("tiny")
def test_bytes(case: dict[str, Any], runner: asyncio.Runner):
    assert not played(case, BYTES, runner)


@cases_of("fallback")
def test_pieces_with_byte_fallback(case: dict[str, Any], runner: asyncio.Runner):
    assert not played(case, PIECES, runner)


@cases_of("smollm2")
def test_the_tokenizer_of_the_demo_model(
    case: dict[str, Any], runner: asyncio.Runner, demo_tokenizer: TokenizerAdapter
):
    assert not played(case, demo_tokenizer, runner)


def test_all_642_cases_are_there_many_with_several_samples_or_an_interval():
    params = [[request["params"] for request in case["requests"]] for case in ALL_CASES]

    assert len(ALL_CASES) == 642
    assert sum(any(each.get("n", 1) > 1 for each in some) for some in params) == 57
    assert sum(case.get("stream_interval", 1) > 1 for case in ALL_CASES) == 129


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> TokenizerAdapter:
    return read_tokenizer(demo_model / "tokenizer.json")


def played(case: dict[str, Any], tokenizer: TokenizerAdapter, runner: asyncio.Runner) -> list[str]:
    """What is not as recorded."""
    front_end = FrontEnd(tokenizer, runner, case.get("stream_interval", 1))
    try:
        found = compare.play_text(case, front_end)
        return found + front_end.problems()
    finally:
        for reader in front_end.readers.values():
            runner.run(reader.close())


class FrontEnd:
    """The output path, as `compare.play_text` drives it."""

    def __init__(
        self, tokenizer: TokenizerAdapter, runner: asyncio.Runner, stream_interval: int
    ) -> None:
        self.processor = OutputProcessor(tokenizer, Tap(INFO))
        self.runner = runner
        self.stream_interval = stream_interval
        self.readers: dict[str, Reader] = {}
        # Of each request, by index.
        self.children: dict[str, list[Child]] = {}
        self.is_queued = False
        self.step = 0
        # Of one token, with log probabilities asked for: the core gives a table without rows,
        # once for each child, and a recording leaves out what is empty.
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
        stream = Stream(
            request.request_id,
            recorded.get("prompt"),
            request.prompt_token_ids,
            params,
            abort=lambda request_id: None,
            stream_interval=self.stream_interval,
        )
        self.readers[request.request_id] = Reader(stream)
        self.children[request.request_id] = []
        for index, child_request in enumerate(child_requests(request)):
            child = Child(child_request.request_id, index, stream)
            self.children[request.request_id].append(child)
            self.processor.add_request(child_request, child, lambda request_id: None)
            if params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1:
                self.short_prompts.add(child.request_id)

    def process(self, outputs: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        self.step += 1
        core_outputs = tuple(self.core_output_of(output) for output in outputs)
        stopped = self.processor.process(EngineCoreOutputs(step=self.step, outputs=core_outputs))
        produced = []
        if not self.is_queued:
            # The outputs of one request lie together in all recorded steps.
            for output in outputs:
                produced += self.take(output["id"])
        return [in_recorded_form(output) for output in produced], self.recorded_ids(stopped)

    def core_output_of(self, recorded: dict[str, Any]) -> EngineCoreOutput:
        children = self.children.get(recorded["id"])
        child_id = children[recorded.get("index", 0)].request_id if children else recorded["id"]
        prompt_logprobs = columns_of(recorded.get("prompt_logprobs"))
        if child_id in self.short_prompts:
            self.short_prompts.remove(child_id)
            prompt_logprobs = LogprobsLists((), (), ())
        return EngineCoreOutput(
            child_id,
            tuple(recorded["tokens"]),
            columns_of(recorded.get("logprobs")),
            prompt_logprobs,
            recorded.get("finish"),
            recorded.get("stop"),
            num_cached_tokens=recorded.get("cached", 0),
        )

    def abort(self, ids: list[str]) -> list[Any]:
        children = itertools.chain(*(self.children.get(id_, ()) for id_ in ids))
        ended = self.processor.abort_requests(children, self.step)
        if not self.is_queued:
            for request_id in ids:
                if request_id in self.readers:
                    self.aborted += self.take(request_id)
        return self.recorded_ids(ended)

    def recorded_ids(self, ended: Iterable[str]) -> list[Any]:
        return [
            [request_id, child.index]
            for request_id, children in self.children.items()
            for child in children
            if child.request_id in ended
        ]

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
            if output.outputs[0].finish_reason != "abort"
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
    parts: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for part in output.outputs:
            parts.setdefault(part.index, []).append(part)
    is_delta = kind is RequestOutputKind.DELTA
    return msgspec.structs.replace(
        outputs[0],
        outputs=tuple(joined(some) if is_delta else some[-1] for some in parts.values()),
        finished=outputs[-1].finished,
    )


def joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(itertools.chain(*(part.token_ids for part in parts))),
        logprobs=tuple(itertools.chain(*logprobs)) if logprobs else None,
    )


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
