"""Several samples of one prompt: children for the engine, one stream for the user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmscope import LLM, EngineDeadError, RequestOutputKind, SamplingParams
from lmscope.boundary import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.frontend.parallel_sampling import LiveRequests, child_requests
from lmscope.frontend.stream import Stream
from lmscope.scope.recording import record

DEADLINE_S = 200


def letters(request_id: str, position: int) -> int:
    """Sample 0 gets "aaa...", sample 1 "bbb...", and so on, without an end."""
    return 97 + (int(request_id[0]) if "_" in request_id else 25)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("s", execute="scripted", script=letters, block_size=4, num_kv_blocks=400) as engine:
        yield engine


def parts_of(stream: Stream) -> list[tuple[int, str, str | None]]:
    return [(part.index, part.text, part.finish_reason) for part in stream.outputs]


def assert_all_free(llm: LLM) -> None:
    # One request later the engine has done everything that was asked of it before.
    llm.generate([122], SamplingParams(max_tokens=2), use_tqdm=False)
    pool: Any = llm._loop.call(lambda core: core.scheduler.kv_cache_manager.block_pool)
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert "0 live requests" in repr(llm)


# -- children ------------------------------------------------------------------------------


def request_of(**params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="7", prompt_token_ids=(97,), sampling_params=SamplingParams(**params)
    )


def test_children_are_requests_of_their_own_with_seeds_that_count_up():
    children = child_requests(request_of(n=3, seed=10, max_tokens=4))

    assert [child.request_id for child in children] == ["0_7", "1_7", "2_7"]
    assert [child.sampling_params for child in children] == [
        SamplingParams(seed=seed, max_tokens=4) for seed in (10, 11, 12)
    ]
    assert {child.prompt_token_ids for child in children} == {(97,)}


def test_a_single_sample_is_the_request_itself():
    request = request_of(seed=10)

    assert child_requests(request) == [request]


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (None, [None] * 3),
        (-2, [-2, 2**64 - 1, 0]),  # -1 would mean no seed
        (2**64 - 2, [2**64 - 2, 2**64 - 1, 0]),
    ],
)
def test_every_child_has_a_seed_if_the_request_has_one(seed: int | None, seeds: list[int | None]):
    children = child_requests(request_of(n=3, seed=seed))

    assert [child.sampling_params.seed for child in children] == seeds


# -- what the engine and views know --------------------------------------------------------


def test_the_stream_of_structs_knows_children_only(llm: LLM):
    with record(llm) as recording:
        stream = llm.submit("abcd", SamplingParams(n=3, seed=4, max_tokens=2), request_id="x")
        stream.wait(DEADLINE_S)
        assert_all_free(llm)

    ids = {"0_x", "1_x", "2_x"}
    arrived = [b for b in recording.boundaries if isinstance(b, EngineCoreRequest)][:3]
    assert [b.request_id for b in arrived] == ["0_x", "1_x", "2_x"] == list(stream.child_ids)
    assert [b.sampling_params.seed for b in arrived] == [4, 5, 6]
    assert all(b.sampling_params.n == 1 for b in arrived)
    first = next(b for b in recording.boundaries if isinstance(b, SchedulerOutput))
    assert set(first.num_scheduled_tokens) == ids
    core = next(b for b in recording.boundaries if isinstance(b, EngineCoreOutputs))
    assert {output.request_id for output in core.outputs} == ids
    deltas = [b for b in recording.boundaries if isinstance(b, RequestOutput)][:6]
    assert [(b.request_id, b.outputs[0].index, b.outputs[0].text, b.finished) for b in deltas] == [
        (f"{i}_x", i, "abc"[i], is_last) for is_last in (False, True) for i in range(3)
    ]
    assert ids <= set(recording.at(step=1).requests)


def test_samples_share_the_blocks_of_their_prompt(llm: LLM):
    scheduled = []
    with llm.tap.on(SchedulerOutput, scheduled.append):
        llm.generate("a" * 17, SamplingParams(n=4, max_tokens=2), use_tqdm=False)

    blocks = [new.block_ids[0] for new in scheduled[0].scheduled_new_reqs]
    assert len(blocks) == 4
    assert len({block_ids[:4] for block_ids in blocks}) == 1
    assert len({block_ids[4] for block_ids in blocks}) == 4


def test_why_names_the_children(llm: LLM):
    stream = llm.submit("abc", SamplingParams(n=2, max_tokens=None), request_id="x")
    next(iter(stream))

    assert llm.why("1_x").request_id == "1_x"
    with pytest.raises(ValueError, match=r"'x', which is not live; live: 0_x, 1_x"):
        llm.why("x")
    stream.abort()


# -- what the user gets --------------------------------------------------------------------


def test_generate_returns_one_output_per_prompt_with_all_samples(llm: LLM):
    params = [SamplingParams(n=3, max_tokens=4), SamplingParams(max_tokens=2)]

    first, second = llm.generate(["p", "q"], params, use_tqdm=False)

    assert (first.request_id, first.prompt, first.finished) == ("0", "p", True)
    assert [part.text for part in first.outputs] == ["aaaa", "bbbb", "cccc"]
    assert [part.index for part in first.outputs] == [0, 1, 2]
    assert (second.request_id, second.outputs[0].text) == ("1", "zz")


def test_a_stream_keeps_the_id_that_the_user_knows(llm: LLM):
    stream = llm.submit("p", SamplingParams(n=2, max_tokens=3), request_id="x").wait(DEADLINE_S)

    assert stream.request_id == "x"
    assert {output.request_id for output in stream} == {"x"}
    assert stream.text == stream.text_of(0) == "aaa"
    assert stream.text_of(1) == "bbb"
    assert stream.token_ids == (97,) * 3
    assert stream.num_tokens == 6
    assert stream.num_finished == 2


def test_before_the_first_token_there_are_n_empty_outputs(llm: LLM):
    llm.gate.pause()
    stream = llm.submit("p", SamplingParams(n=2, max_tokens=3))

    assert parts_of(stream) == [(0, "", None), (1, "", None)]
    assert not stream.output.finished
    llm.gate.resume()


def test_a_stream_with_samples_can_be_awaited_and_iterated(llm: LLM):
    async def read() -> list[tuple[int, str]]:
        params = SamplingParams(n=2, max_tokens=2, output_kind=RequestOutputKind.DELTA)
        stream = llm.submit("p", params)
        outputs = [output async for output in stream]
        assert (await stream).finished
        return [(part.index, part.text) for output in outputs for part in output.outputs]

    assert asyncio.run(read()) == [(0, "a"), (1, "b"), (0, "a"), (1, "b")]


def test_a_stop_string_ends_its_sample_only(llm: LLM):
    params = SamplingParams(n=3, max_tokens=6, stop="bb")

    (output,) = llm.generate("p", params, use_tqdm=False)

    assert [(part.text, part.finish_reason) for part in output.outputs] == [
        ("aaaaaa", "length"), ("", "stop"), ("cccccc", "length")
    ]  # fmt: skip
    assert output.outputs[1].stop_reason == "bb"
    assert_all_free(llm)


def test_each_sample_has_its_own_interval():
    def script(request_id: str, position: int) -> int | None:
        return 97 + position if position < 3 + int(request_id[0]) * 2 else None

    with LLM("s", execute="scripted", script=script, stream_interval=3) as llm:
        params = SamplingParams(n=2, max_tokens=9, output_kind=RequestOutputKind.DELTA)
        outputs = list(llm.submit("p", params))

    assert [(output.outputs[0].index, output.outputs[0].text) for output in outputs] == [
        (0, "a"), (1, "a"), (0, "bc"), (1, "bcd"), (1, "e")
    ]  # fmt: skip


# -- ends ----------------------------------------------------------------------------------


def endless(llm: LLM, request_id: str = "x") -> Stream:
    """A request with three samples that run."""
    stream = llm.submit("p", SamplingParams(n=3, max_tokens=None), request_id=request_id)
    reader = iter(stream)
    while {part.text for part in stream.outputs} & {""}:
        next(reader)
    return stream


def test_an_abort_ends_all_samples(llm: LLM):
    stream = endless(llm)

    llm.abort("x")

    assert [end for _, _, end in parts_of(stream.wait(DEADLINE_S))] == ["abort"] * 3
    assert stream.output.finished
    assert_all_free(llm)


def test_an_abort_of_a_child_ends_that_sample(llm: LLM):
    stream = endless(llm)

    llm.abort("1_x")

    reader = iter(stream)
    while stream.num_finished == 0:
        next(reader)
    assert [end for _, _, end in parts_of(stream)] == [None, "abort", None]
    assert not stream.finished
    # The name is not free while one of its samples runs.
    other = llm.submit("q", SamplingParams(max_tokens=1), request_id="x")
    assert other.wait(DEADLINE_S).request_id == "x-2"
    stream.abort()
    stream.wait(DEADLINE_S)
    assert [end for _, _, end in parts_of(stream)] == ["abort"] * 3
    assert_all_free(llm)


def test_leaving_the_with_block_ends_all_samples(llm: LLM):
    with endless(llm) as stream:
        pass

    assert [end for _, _, end in parts_of(stream.wait(DEADLINE_S))] == ["abort"] * 3
    assert_all_free(llm)


@pytest.mark.parametrize(
    ("aborted", "wanted"), [("x", ["abort"] * 3), ("2_x", ["length", "length", "abort"])]
)
def test_an_abort_before_the_engine_has_seen_the_request(llm: LLM, aborted: str, wanted: list[str]):
    llm.gate.pause()
    other = llm.submit("o", SamplingParams(max_tokens=2))
    llm.gate.step()  # the engine stands where `other` arrives, so nothing else does
    stream = llm.submit("p", SamplingParams(n=3, max_tokens=2), request_id="x")

    llm.abort(aborted)
    llm.gate.resume()

    assert [end for _, _, end in parts_of(stream.wait(DEADLINE_S))] == wanted
    assert other.wait(DEADLINE_S).text == "zz"
    assert_all_free(llm)


def test_an_abort_while_the_last_output_of_a_sample_stands_at_the_gate(llm: LLM):
    params = SamplingParams(n=2, max_tokens=1)
    seen: list[RequestOutput] = []
    llm.tap.on(RequestOutput, seen.append)
    llm.gate.pause()
    stream = llm.submit("p", params)
    llm.gate.step(RequestOutput)

    stream.abort()
    llm._loop.call(lambda core: None, is_urgent=True)  # the abort has passed the gate

    assert [end for _, _, end in parts_of(stream)] == [None, "abort"]
    llm.gate.resume()
    assert [end for _, _, end in parts_of(stream.wait(DEADLINE_S))] == ["length", "abort"]
    assert_all_free(llm)
    assert [delta.outputs[0].finish_reason for delta in seen[:2]] == ["length", "abort"]


def test_closing_the_engine_ends_all_samples(llm: LLM):
    stream = endless(llm)

    llm.close()

    assert [end for _, _, end in parts_of(stream.wait(DEADLINE_S))] == ["abort"] * 3


def test_a_dead_engine_fails_the_stream_once_for_all_samples():
    def script(request_id: str, position: int) -> int:
        if (request_id, position) == ("1_0", 2):
            raise ArithmeticError("cursed")
        return 97

    with LLM("s", execute="scripted", script=script) as llm:
        stream = llm.submit("p", SamplingParams(n=2, max_tokens=9))
        for read in (lambda: stream.wait(DEADLINE_S), lambda: list(stream)):
            with pytest.raises(EngineDeadError, match="cursed"):
                read()
        assert not stream.finished


# -- ids -----------------------------------------------------------------------------------


def test_names_of_children_are_not_given_twice(llm: LLM):
    first = llm.submit("p", SamplingParams(n=2, max_tokens=None), request_id="x")
    taken = llm.submit("p", SamplingParams(max_tokens=None), request_id="1_x")
    late = llm.submit("p", SamplingParams(max_tokens=None), request_id="1_y")
    second = llm.submit("p", SamplingParams(n=2, max_tokens=None), request_id="y")

    assert taken.request_id == "1_x-2"
    assert (late.request_id, second.request_id) == ("1_y", "y-2")
    assert second.child_ids == ("0_y-2", "1_y-2")
    for stream in (first, taken, late, second):
        stream.abort()
        stream.wait(DEADLINE_S)
    assert llm.submit("p", SamplingParams(n=2), request_id="y").request_id == "y"


def test_a_refused_prompt_gives_its_names_back(llm: LLM):
    for _ in range(2):
        with pytest.raises(ValueError, match="0 tokens"):
            llm.submit("", SamplingParams(n=2), request_id="x")
    with pytest.raises(TypeError, match="request_id is 7"):
        llm.submit("p", request_id=7)  # type: ignore[arg-type] - that is the point

    assert llm.submit("p", SamplingParams(n=2), request_id="x").request_id == "x"


def test_an_old_child_does_not_stand_for_a_new_one_with_its_name():
    live = LiveRequests()

    def submitted() -> Stream:
        abort: Callable[[str], None] = lambda request_id: None  # noqa: E731
        name = live.reserve("x", 2)
        return Stream(name, None, (97,), SamplingParams(n=2), abort=abort)

    old = live.add(submitted())
    for child in old:
        live.remove(child.request_id)
        live.remove(child.request_id)
    new = live.add(submitted())

    assert [child.request_id for child in old] == [child.request_id for child in new]
    assert [live.holds(child) for child in (*old, *new)] == [False, False, True, True]
    assert live.find(["x", "0_x", "unknown"]) == new
    assert live.find(["1_x"]) == new[1:]
    assert len(live) == 2
    assert list(live) == ["0_x", "1_x"]
    assert live.clear() == new
    assert len(live) == 0
