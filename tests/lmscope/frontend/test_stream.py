"""Stream: every reader gets every output, at its own pace, from any thread or coroutine."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmscope.boundary import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    Logprob,
    RequestOutput,
)
from lmscope.errors import EngineDeadError, GateClosedError
from lmscope.frontend.output_processor import OutputProcessor
from lmscope.frontend.parallel_sampling import Child
from lmscope.frontend.stream import Stream
from lmscope.sampling_params import SamplingParams
from lmscope.tap import Tap
from lmscope.testing import byte_tokenizer

KINDS = ("cumulative", "delta", "final_only")
# Only what hangs takes so long, and then the test fails.
HANGS_S = 200
TOKENIZER = byte_tokenizer()


def make_stream(kind: str = "cumulative", **options: Any) -> Stream:
    options.setdefault("abort", lambda request_id: None)
    params = SamplingParams(output_kind=kind)
    return Stream("7", "Hi", (72, 105), params, **options)


def delta(
    text: str, ids: Sequence[int] = (), end: str | None = None, **fields: Any
) -> RequestOutput:
    """One step of a request, as it crosses the tap."""
    prompt_logprobs = fields.pop("prompt_logprobs", None)
    part = CompletionOutput(0, text, tuple(ids), finish_reason=end, **fields)
    return RequestOutput(
        request_id="7",
        prompt_logprobs=prompt_logprobs,
        outputs=(part,),
        finished=end is not None,
        num_cached_tokens=0,
    )


def words(count: int) -> list[RequestOutput]:
    """A request of `count` steps; step i gives token i."""
    ends = [None] * (count - 1) + ["length"]
    return [delta(f"{i} ", [i], end) for i, end in enumerate(ends)]


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def joined(outputs: Sequence[RequestOutput]) -> CompletionOutput:
    """What deltas make together."""
    parts = [output.outputs[0] for output in outputs]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    sums = [part.cumulative_logprob for part in parts if part.cumulative_logprob is not None]
    return CompletionOutput(
        0,
        "".join(part.text for part in parts),
        tuple(itertools.chain(*(part.token_ids for part in parts))),
        sums[-1] if sums else None,
        tuple(itertools.chain(*logprobs)) if logprobs else None,
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


# -- kinds -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("cumulative", ["a", "ab", "abc"]),
        ("delta", ["a", "b", "c"]),
        ("final_only", ["abc"]),
    ],
)
def test_the_kind_shapes_what_a_reader_gets(kind: str, wanted: list[str]):
    stream = make_stream(kind)
    for text, end in (("a", None), ("b", None), ("c", "stop")):
        stream.push(delta(text, text.encode(), end))

    outputs = list(stream)

    assert texts(outputs) == wanted
    assert [output.finished for output in outputs] == [False] * (len(wanted) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert {output.prompt for output in outputs} == {"Hi"}
    assert {output.prompt_token_ids for output in outputs} == {(72, 105)}


@pytest.mark.parametrize(
    ("kind", "wanted"), [("cumulative", [1, 1, 1]), ("delta", [1, 0, 0]), ("final_only", [1])]
)
def test_prompt_logprobs_come_once_in_deltas_and_always_otherwise(kind: str, wanted: list[int]):
    stream = make_stream(kind)
    prompt_logprobs = (None, {105: Logprob(-0.5, 1, "i")})
    stream.push(delta("a", [97], prompt_logprobs=prompt_logprobs))
    stream.push(delta("b", [98]))
    stream.push(delta("c", [99], "length"))

    outputs = list(stream)

    given = [output.prompt_logprobs for output in outputs]
    assert given == [prompt_logprobs if has else None for has in wanted]
    assert stream.output.prompt_logprobs == prompt_logprobs


def test_what_has_been_handed_out_does_not_grow():
    stream = make_stream()
    reader = iter(stream)
    logprob = {97: Logprob(-0.5, 1, "a")}
    stream.push(delta("a", [97], logprobs=(logprob,), cumulative_logprob=-0.5))
    early = next(reader)
    kept = copy.deepcopy(early)

    stream.push(delta("b", [98], "length", logprobs=(logprob,), cumulative_logprob=-1.0))
    late = next(reader)

    assert early == kept
    assert len(late.outputs[0].logprobs or ()) == 2


LOGPROBS = st.dictionaries(
    st.integers(0, 9),
    st.builds(Logprob, st.floats(-9, 0), st.integers(1, 9), st.text(max_size=2)),
    min_size=1,
    max_size=3,
)


@st.composite
def whole_requests(draw: st.DrawFn) -> list[RequestOutput]:
    """The deltas of a request that has ended; an abort ends it without tokens."""
    with_logprobs = draw(st.booleans())
    steps = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=8))
    end = draw(st.sampled_from(["stop", "length", "abort"]))
    if end == "abort" or not steps:
        steps.append([])
    deltas = []
    total = 0.0
    for i, ids in enumerate(steps):
        logprobs = tuple(draw(LOGPROBS) for _ in ids)
        total -= len(ids)
        deltas.append(
            delta(
                draw(st.text(max_size=3)),
                ids,
                end if i == len(steps) - 1 else None,
                logprobs=logprobs if with_logprobs and ids else None,
                cumulative_logprob=total if with_logprobs else None,
            )
        )
    return deltas


@given(deltas=whole_requests())
def test_all_kinds_tell_the_same_in_the_end(deltas: list[RequestOutput]):
    outputs = {}
    for kind in KINDS:
        stream = make_stream(kind)
        for each in deltas:
            stream.push(each)
        outputs[kind] = list(stream)
        (whole,) = stream.outputs
        assert whole == joined(deltas)
        assert whole.text == stream.text
        assert whole.token_ids == stream.token_ids
        assert len(whole.token_ids) == stream.num_tokens

    assert joined(outputs["delta"]) == whole
    assert outputs["cumulative"][-1].outputs == (whole,)
    assert outputs["final_only"] == [outputs["cumulative"][-1]]
    for i, output in enumerate(outputs["cumulative"]):
        assert output.outputs == (joined(outputs["delta"][: i + 1]),)


@given(
    tokens=st.lists(st.integers(0, 258), min_size=1, max_size=24),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=24),
    stop=st.lists(st.text("ab\u00e9 ", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    finish=st.sampled_from(["stop", "length", "abort"]),
)
def test_all_kinds_tell_the_same_of_any_tokens(
    tokens: list[int], sizes: list[int], stop: list[str], include: bool, finish: str
):
    info = EngineInfo(
        model="m",
        block_size=4,
        num_blocks=8,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=28,
    )
    processor = OutputProcessor(TOKENIZER, Tap(info))
    streams = {}
    for kind in KINDS:
        params = SamplingParams(
            output_kind=kind, stop=stop, include_stop_str_in_output=include, max_tokens=24
        )
        request = EngineCoreRequest(
            request_id=kind, prompt_token_ids=(97,), sampling_params=params, eos_token_id=256
        )
        streams[kind] = Stream(kind, "a", (97,), params, abort=lambda request_id: None)
        processor.add_request(request, Child(kind, 0, streams[kind]), lambda request_id: None)
    num_steps = 0
    left = tokens
    while left and not streams["delta"].finished:
        new, left = left[: sizes[num_steps % len(sizes)]], left[sizes[num_steps % len(sizes)] :]
        num_steps += 1
        end = finish if not left and finish != "abort" else None
        outputs = tuple(EngineCoreOutput(kind, tuple(new), finish_reason=end) for kind in KINDS)
        processor.process(EngineCoreOutputs(step=num_steps, outputs=outputs))
    processor.abort_requests([Child(kind, 0, streams[kind]) for kind in KINDS], num_steps)

    cumulative, deltas, final = (list(streams[kind]) for kind in KINDS)

    (whole,) = final
    assert joined(deltas) == whole.outputs[0]
    assert cumulative[-1].outputs == whole.outputs
    for earlier, later in itertools.pairwise(cumulative):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    assert whole.outputs[0].token_ids == tuple(tokens[: len(whole.outputs[0].token_ids)])


# -- paces ---------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(["cumulative", "delta"]),
    num_steps=st.integers(1, 6),
    moves=st.lists(st.integers(0, 3), max_size=30),
)
def test_readers_at_any_pace_get_the_same_outputs(kind: str, num_steps: int, moves: list[int]):
    stream = make_stream(kind)
    left = words(num_steps)
    readers = [iter(stream) for _ in range(3)]
    read: list[list[RequestOutput]] = [[] for _ in readers]
    # Move 3 is a step of the engine, the others one of a reader that has something to read.
    for move in moves:
        if move == 3 and left:
            stream.push(left.pop(0))
        elif move < 3 and len(read[move]) < num_steps - len(left):
            read[move].append(next(readers[move]))
    for each in left:
        stream.push(each)
    for reader, outputs in zip(readers, read, strict=True):
        outputs += reader

    assert read == [list(stream)] * 3
    assert len(read[0]) == num_steps


def test_a_reader_that_leaves_early_takes_nothing_from_the_others():
    stream = make_stream("delta")
    for each in words(3):
        stream.push(each)

    for _ in stream:
        break

    assert texts(list(stream)) == ["0 ", "1 ", "2 "]


# -- threads -------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a function on a thread of its own."""
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


@pytest.mark.parametrize("kind", KINDS)
def test_threads_at_different_paces_get_every_output(kind: str, start: Callable[..., Future[Any]]):
    stream = make_stream(kind)
    num_steps = 200
    has_ended = threading.Event()
    has_read = threading.Event()

    def read_at_once() -> list[RequestOutput]:
        outputs = []
        for output in stream:
            has_read.set()
            outputs.append(output)
        return outputs

    def read_a_few_then_the_rest() -> list[RequestOutput]:
        reader = iter(stream)
        first = list(itertools.islice(reader, 2))
        assert has_ended.wait(HANGS_S)
        return first + list(reader)

    def read_late() -> list[RequestOutput]:
        assert has_ended.wait(HANGS_S)
        return list(stream)

    readers = [start(read_at_once) for _ in range(4)]
    readers += [start(read) for read in (read_a_few_then_the_rest, read_late) for _ in range(2)]
    waiting = [start(stream.wait) for _ in range(2)]
    watching = [start(watch_grow, stream) for _ in range(2)]
    for i, each in enumerate(words(num_steps)):
        if i == num_steps // 2 and kind != "final_only":
            assert has_read.wait(HANGS_S)  # so that somebody reads while the engine writes
        stream.push(each)
    has_ended.set()

    wanted = list(stream)
    assert len(wanted) == (1 if kind == "final_only" else num_steps)
    assert [reader.result(HANGS_S) for reader in readers] == [wanted] * 8
    assert [waiter.result(HANGS_S) for waiter in waiting] == [stream] * 2
    assert all(watcher.result(HANGS_S) == num_steps for watcher in watching)


def watch_grow(stream: Stream) -> int:
    """Look at all so far again and again; the number of tokens in the end."""
    num_tokens = 0
    while True:
        is_finished = stream.finished
        output = stream.output.outputs[0]
        assert output.token_ids == tuple(range(len(output.token_ids)))
        assert output.text == "".join(f"{i} " for i in output.token_ids)
        assert len(output.token_ids) >= num_tokens
        num_tokens = len(output.token_ids)
        if is_finished:
            return num_tokens


def test_a_waiting_thread_is_woken_by_the_end(start: Callable[..., Future[Any]]):
    is_waiting = threading.Event()
    stream = make_stream(check_wait=is_waiting.set)
    waiter = start(stream.wait)
    assert is_waiting.wait(HANGS_S)

    stream.push(delta("a", [97]))
    stream.push(delta("b", [98], "length"))

    assert waiter.result(HANGS_S).text == "ab"


def test_wait_can_time_out_and_be_called_again():
    stream = make_stream()
    stream.push(delta("a", [97]))

    with pytest.raises(TimeoutError, match="request 7 is not finished after 0"):
        stream.wait(timeout_s=0)
    stream.push(delta("b", [98], "length"))

    assert stream.wait(timeout_s=0) is stream


def test_a_closed_gate_ends_waiting_but_not_what_can_be_read():
    def check() -> None:
        raise GateClosedError("the engine stands here")

    stream = make_stream("delta", check_wait=check)
    stream.push(delta("a", [97]))
    reader = iter(stream)

    assert next(reader).outputs[0].text == "a"
    with pytest.raises(GateClosedError):
        next(reader)
    with pytest.raises(GateClosedError):
        stream.wait()
    stream.push(delta("b", [98], "length"))
    assert stream.wait().text == "ab"


# -- coroutines ------------------------------------------------------------------------------


async def read(stream: Stream) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.mark.parametrize("kind", KINDS)
def test_coroutines_and_threads_read_together(kind: str, start: Callable[..., Future[Any]]):
    stream = make_stream(kind)

    async def main() -> list[list[RequestOutput]]:
        readers = [asyncio.ensure_future(read(stream)) for _ in range(3)]
        waiter = asyncio.ensure_future(asyncio.wait_for(stream, HANGS_S))
        await asyncio.sleep(0)
        start(push_all)
        outputs = await asyncio.wait_for(asyncio.gather(*readers), HANGS_S)
        assert await waiter is stream
        late = await read(stream)
        return [*outputs, late]

    def push_all() -> None:
        for each in words(100):
            stream.push(each)

    other_loop = start(asyncio.run, read(stream))
    thread = start(list, stream)
    outputs = asyncio.run(main())

    assert [*outputs, other_loop.result(HANGS_S), thread.result(HANGS_S)] == [list(stream)] * 6


def test_a_slow_coroutine_does_not_hold_up_another():
    stream = make_stream("delta")

    async def main() -> None:
        slow, quick = aiter(stream), aiter(stream)
        first, *rest = words(3)
        stream.push(first)
        assert (await anext(slow)).outputs[0].text == "0 "
        for each in rest:
            stream.push(each)
        assert [output.outputs[0].text async for output in quick] == ["0 ", "1 ", "2 "]
        assert [output.outputs[0].text async for output in slow] == ["1 ", "2 "]

    asyncio.run(asyncio.wait_for(main(), HANGS_S))


def test_who_waits_for_the_end_is_not_woken_by_each_step():
    async def count_calls() -> list[int]:
        stream = make_stream()
        loop = asyncio.get_running_loop()
        call, calls = loop.call_soon_threadsafe, []

        def counted(*arguments: Any) -> Any:
            calls.append(arguments)
            return call(*arguments)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        waiter = asyncio.ensure_future(stream._wait_async())
        reader = asyncio.ensure_future(read(stream))
        counts = []
        for step in words(3):
            await asyncio.sleep(0)
            stream.push(step)
            counts.append(len(calls))
            await asyncio.sleep(0)
        assert (await waiter).finished
        assert len(await reader) == 3
        return counts

    # The reader by each of them, the other one by the last.
    assert asyncio.run(count_calls()) == [1, 2, 4]


def test_cancelling_one_reader_leaves_the_others_and_no_trace():
    stream = make_stream("delta")

    async def main() -> list[list[RequestOutput]]:
        cancelled, *others = [asyncio.ensure_future(read(stream)) for _ in range(3)]
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        num_woken = 0
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def counting(*arguments: Any) -> asyncio.Handle:
            nonlocal num_woken
            num_woken += 1
            return call_soon(*arguments)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]  # to count the calls
        stream.push(delta("a", [97], "length"))
        assert num_woken == len(others)
        return await asyncio.wait_for(asyncio.gather(*others), HANGS_S)

    assert asyncio.run(main()) == [list(stream)] * 2


def test_a_reader_whose_loop_was_closed_does_not_stop_the_engine():
    stream = make_stream("delta")
    loop = asyncio.new_event_loop()
    reader = loop.create_task(read(stream))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    stream.push(delta("a", [97], "length"))

    assert texts(list(stream)) == ["a"]
    reader._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop is gone


# -- ends ----------------------------------------------------------------------------------


def fail(stream: Stream) -> None:
    """As a dying engine does."""
    error = EngineDeadError("the engine died")
    error.__cause__ = ZeroDivisionError("boom")
    stream.fail(error)


def test_an_error_comes_behind_what_can_be_read():
    stream = make_stream("delta")
    stream.push(delta("a", [97]))
    fail(stream)

    for _ in range(2):
        reader = iter(stream)
        assert next(reader).outputs[0].text == "a"
        with pytest.raises(EngineDeadError, match="the engine died") as error:
            next(reader)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert stream.text == "a"
    assert not stream.finished


def test_an_error_reaches_everybody_who_waits(start: Callable[..., Future[Any]]):
    is_waiting = threading.Semaphore(0)
    stream = make_stream(check_wait=is_waiting.release)

    async def main() -> list[Any]:
        readers = [asyncio.ensure_future(read(stream)), asyncio.ensure_future(stream)]
        await asyncio.sleep(0)
        for _ in threads:
            assert is_waiting.acquire(timeout=HANGS_S)
        fail(stream)
        return await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), HANGS_S)

    threads = [start(stream.wait), start(list, stream)]
    errors = asyncio.run(main()) + [thread.exception(HANGS_S) for thread in threads]

    assert [type(error) for error in errors] == [EngineDeadError] * 4
    assert [type(error.__cause__) for error in errors] == [ZeroDivisionError] * 4
    # One object for all would grow a traceback that belongs to none of them.
    assert len({id(error) for error in errors}) == 4


def test_an_engine_that_dies_after_the_end_changes_nothing():
    stream = make_stream()
    stream.push(delta("a", [97], "length"))
    fail(stream)

    assert stream.wait().text == "a"
    assert texts(list(stream)) == ["a"]
    assert asyncio.run(read(stream)) == list(stream)
    assert repr(stream) == "<Stream 7: finished, 1 tokens>"


def test_abort_asks_once_it_is_running_and_not_after_the_end():
    asked: list[str] = []
    stream = make_stream(abort=asked.append)

    with stream:
        pass
    stream.push(delta("", (), "abort"))
    stream.abort()
    with stream:
        pass

    assert asked == ["7"]


def test_a_stream_without_outputs_is_empty_and_says_so():
    stream = make_stream()

    assert stream.output.outputs == (CompletionOutput(0, "", ()),)
    assert stream.output.prompt == "Hi"
    assert not stream.output.finished
    assert repr(stream) == "<Stream 7: running, 0 tokens>"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_cannot_be_copied(copied: Callable[[Stream], object]):
    with pytest.raises(TypeError, match="belongs to a running engine"):
        copied(make_stream())
