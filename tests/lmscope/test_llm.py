"""LLM on the scripted model: generation, trouble, and what must never hang. No torch."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest

from lmscope import LLM, EngineClosedError, EngineDeadError, RequestOutputKind, SamplingParams
from lmscope.boundary import BOUNDARIES, RequestOutput, SchedulerOutput

DEADLINE_S = 200


def make_llm(text="Hello, world!", **options) -> LLM:
    def script(request_id, position):
        return text.encode()[position] if position < len(text.encode()) else None

    return LLM("scripted", execute="scripted", script=script, **{"block_size": 4, **options})


def endless(request_id, position):
    return 97 + position % 26


@pytest.fixture
def llm():
    with make_llm() as engine:
        yield engine


def pool_of(llm):
    """The engine's block pool, for looking at once the engine is idle."""
    return llm._loop.call(lambda core: core.scheduler.kv_cache_manager.block_pool)


def assert_all_free(llm):
    pool = pool_of(llm)
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert set(pool.ref_cnt) == {0}


def wait_idle(llm):
    deadline = threading.Event()
    for _ in range(DEADLINE_S * 100):
        if llm._loop.is_idle():
            return
        deadline.wait(0.01)
    raise AssertionError("the engine did not become idle")


def test_generate_returns_a_list_in_the_order_of_the_prompts(llm):
    outputs = llm.generate(["a", "bb", "ccc"], SamplingParams(max_tokens=50), use_tqdm=False)

    assert [o.prompt for o in outputs] == ["a", "bb", "ccc"]
    assert [o.request_id for o in outputs] == ["0", "1", "2"]
    assert all(o.outputs[0].text == "Hello, world!" for o in outputs)
    assert all(o.outputs[0].finish_reason == "stop" for o in outputs)
    wait_idle(llm)
    assert_all_free(llm)


def test_one_prompt_is_a_list_of_one(llm):
    for prompt in ("abc", [97, 98, 99], {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=3), use_tqdm=False)
        assert output.outputs[0].text == "Hel"
        assert output.outputs[0].finish_reason == "length"


def test_prompts_of_one_call_arrive_in_one_step(llm):
    first = []
    with llm.tap.on(SchedulerOutput, first.append):
        llm.generate(["a"] * 5, SamplingParams(max_tokens=1), use_tqdm=False)

    assert len(first[0].scheduled_new_reqs) == 5


def test_structs_cross_in_the_documented_order(llm):
    kinds = []
    for kind in BOUNDARIES:
        llm.tap.on(kind, lambda b: kinds.append(type(b).__name__))
    llm.submit("a", SamplingParams(max_tokens=2)).wait(DEADLINE_S)
    wait_idle(llm)

    step = ["SchedulerOutput", "ModelRunnerOutput", "EngineCoreOutputs"]
    assert kinds == ["EngineCoreRequest", *[*step, "RequestOutput"] * 2, *step]


def test_the_tapped_output_is_a_delta_whatever_the_caller_gets(llm):
    seen = []
    with llm.tap.on(RequestOutput, seen.append):
        params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = list(llm.submit("a", params))

    assert [o.outputs[0].text for o in seen] == ["H", "e", "l", "l"]
    assert [o.outputs[0].text for o in outputs] == ["Hell"]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (RequestOutputKind.DELTA, ["H", "e", "l"]),
        (RequestOutputKind.CUMULATIVE, ["H", "He", "Hel"]),
        (RequestOutputKind.FINAL_ONLY, ["Hel"]),
    ],
)
def test_output_kind_shapes_what_a_reader_gets(llm, kind, texts):
    stream = llm.submit("a", SamplingParams(max_tokens=3, output_kind=kind))
    for _ in range(2):  # any number of readers, each from the start
        assert [o.outputs[0].text for o in stream] == texts


def test_a_stream_can_be_awaited_and_iterated_in_a_running_loop(llm):
    async def main():
        streams = [llm.submit("a", SamplingParams(max_tokens=5)) for _ in range(20)]
        done = await asyncio.gather(*streams)
        assert [s.text for s in done] == ["Hello"] * 20
        texts = [o.outputs[0].text async for o in llm.submit("a", SamplingParams(max_tokens=2))]
        assert texts == ["H", "He"]

    asyncio.run(main())


def test_a_stop_string_ends_the_request_in_the_engine_too(llm):
    stream = llm.submit("a", SamplingParams(max_tokens=50, stop="wor")).wait(DEADLINE_S)

    assert stream.text == "Hello, "
    assert (stream.outputs[0].finish_reason, stream.outputs[0].stop_reason) == ("stop", "wor")
    wait_idle(llm)
    assert_all_free(llm)


def test_an_abort_ends_the_stream_and_frees_its_blocks():
    with make_llm() as engine:
        engine.close()
    with LLM("s", execute="scripted", script=endless, block_size=4) as llm:
        stream = llm.submit("abc", SamplingParams(max_tokens=None))
        next(iter(stream))
        llm.abort(stream.request_id)
        llm.abort(stream.request_id)
        llm.abort("unknown")

        assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
        wait_idle(llm)
        assert_all_free(llm)


def test_leaving_the_with_block_aborts_and_leaving_the_loop_does_not():
    with LLM("s", execute="scripted", script=endless, block_size=4) as llm:
        stream = llm.submit("abc", SamplingParams(max_tokens=40))
        for _ in stream:
            break
        assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "length"
        with llm.submit("abc", SamplingParams(max_tokens=None)) as stream:
            next(iter(stream))
        assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "abort"


def test_a_live_id_gets_a_number_and_is_free_again_after_the_end():
    with LLM("s", execute="scripted", script=endless, block_size=4) as llm:
        first = llm.submit("abc", SamplingParams(max_tokens=None), request_id="x")
        second = llm.submit("abc", SamplingParams(max_tokens=None), request_id="x")
        assert (first.request_id, second.request_id) == ("x", "x-2")
        first.abort()
        first.wait(DEADLINE_S)
        third = llm.submit("abc", SamplingParams(max_tokens=3), request_id="x")
        assert third.request_id == "x"
        assert third.wait(DEADLINE_S).outputs[0].finish_reason == "length"
        assert not second.finished


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "0 tokens"),
        ([], "0 tokens"),
        ([97, 5000], "5000"),
        ("x" * 200, "200 tokens"),
        ({"promt": "a"}, "promt"),
    ],
)
def test_a_bad_prompt_fails_alone_at_submission(prompt, message):
    with make_llm(num_kv_blocks=20) as llm:
        with pytest.raises(ValueError, match=message):
            llm.submit(prompt)
        with pytest.raises(ValueError, match=message):
            llm.generate(["good", prompt], use_tqdm=False)
        outputs = llm.generate(["good"], SamplingParams(max_tokens=2), use_tqdm=False)
        assert [o.prompt for o in outputs] == ["good"]


def test_an_id_that_is_no_text_is_refused(llm):
    with pytest.raises(ValueError, match="surrogate"):
        llm.submit("a", request_id="x\ud800")
    with pytest.raises(TypeError, match="request_id"):
        llm.submit("a", request_id=7)
    assert repr(llm).count("0 live requests") == 1


def test_a_request_that_can_never_fit_is_refused_and_one_that_outgrows_the_pool_ends():
    options = {"execute": "scripted", "script": endless, "block_size": 4, "num_kv_blocks": 4}
    with LLM("s", max_model_len=100, **options) as llm:
        with pytest.raises(ValueError, match="num_kv_blocks"):
            llm.submit("x" * 13)
        (output,) = llm.generate("x" * 10, SamplingParams(max_tokens=50), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 3  # 12 places, and the last needs none
        wait_idle(llm)
        assert_all_free(llm)


def test_unknown_options_name_the_nearest_known_one():
    with pytest.raises(TypeError, match="block_size"):
        make_llm(blok_size=4)
    with pytest.raises(ValueError, match="at least 2"):
        make_llm(num_kv_blocks=1)
    with pytest.raises(ValueError, match="not available"):
        make_llm(engine="process")
    with pytest.raises(ValueError, match="max_num_seqs"):
        make_llm(max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        make_llm(tensor_parallel_size=2)
    make_llm(tensor_parallel_size=1, enforce_eager=True).close()


def test_a_dead_engine_tells_everybody_why():
    def script(request_id, position):
        if position == 3:
            raise ArithmeticError("the third token is cursed")
        return 97

    llm = LLM("s", execute="scripted", script=script)
    streams = [llm.submit("abc", SamplingParams(max_tokens=9)) for _ in range(4)]
    for stream in streams:
        with pytest.raises(EngineDeadError, match="cursed") as caught:
            stream.wait(DEADLINE_S)
        assert isinstance(caught.value.__cause__, ArithmeticError)
        with pytest.raises(EngineDeadError):
            list(stream)
    with pytest.raises(EngineDeadError) as caught:
        llm.generate("abc", use_tqdm=False)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    llm.close()


def test_close_ends_running_requests_and_later_calls_raise():
    llm = LLM("s", execute="scripted", script=endless)
    stream = llm.submit("abc", SamplingParams(max_tokens=None))
    next(iter(stream))
    llm.close()
    llm.close()

    assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        llm.submit("abc")
    with pytest.raises(EngineClosedError):
        llm.reset_prefix_cache()
    llm.abort(stream.request_id)


def test_two_engines_live_side_by_side_and_share_weights():
    with make_llm("one") as first, first.like(num_kv_blocks=8) as second:
        assert second.config.num_kv_blocks == 8
        for engine in (first, second):
            (output,) = engine.generate("a", use_tqdm=False)
            assert output.outputs[0].text == "one"


def test_a_failing_listener_does_not_change_the_output(llm):
    subscription = llm.tap.on(SchedulerOutput, lambda b: 1 / 0)
    (output,) = llm.generate("a", use_tqdm=False)
    assert output.outputs[0].text == "Hello, world!"
    assert isinstance(subscription.error, ZeroDivisionError)


def test_an_interrupt_aborts_what_the_call_started(llm):
    # generate() waits in the main thread; the interrupt arrives there, as Ctrl-C would.
    code = """
import _thread, threading, time
from lmscope import LLM, SamplingParams
def script(request_id, position):
    if position == 2 and request_id == "0":
        threading.Thread(target=_thread.interrupt_main).start()
    if position > 2:
        time.sleep(0.002)  # the pool must not be full before the interrupt has come
    return 97
llm = LLM("s", execute="scripted", script=script, block_size=4)
try:
    llm.generate(["abc"], SamplingParams(max_tokens=None), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted")
(output,) = llm.generate(["abcd"], SamplingParams(max_tokens=3), use_tqdm=False)
print(output.request_id, output.outputs[0].text)
pool = llm._loop.call(lambda core: core.scheduler.kv_cache_manager.block_pool)
print(pool.num_free_blocks == pool.num_blocks - 1)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert result.stdout.split() == ["interrupted", "1", "aaa", "True"]


def test_neither_an_engine_nor_a_stream_can_be_copied(llm):
    stream = llm.submit("a")
    for thing in (llm, stream):
        for copying in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                copying(thing)


def test_waiting_can_time_out_and_the_request_goes_on():
    ready = threading.Event()

    def script(request_id, position):
        ready.wait(DEADLINE_S)
        return 97

    with LLM("s", execute="scripted", script=script) as llm:
        stream = llm.submit("a", SamplingParams(max_tokens=2))
        with pytest.raises(TimeoutError, match="not finished"):
            stream.wait(timeout_s=0.05)
        ready.set()
        assert stream.wait(DEADLINE_S).text == "aa"


def test_a_thousand_requests_from_several_threads_all_end():
    with LLM("s", execute="scripted", script=endless, block_size=4, num_kv_blocks=60) as llm:
        streams = []

        def work(number):
            for i in range(100):
                params = SamplingParams(max_tokens=1 + (i * 7 + number) % 12)
                stream = llm.submit("prompt"[: 1 + i % 6], params)
                streams.append(stream)
                if i % 3 == 0:
                    stream.abort()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S * 10)
        assert len(streams) == 1000
        for stream in streams:
            reason = stream.wait(DEADLINE_S * 10).outputs[0].finish_reason
            assert reason in ("length", "abort")
        wait_idle(llm)
        assert_all_free(llm)
        assert repr(llm).count("0 live requests") == 1


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (RequestOutputKind.DELTA, ["H", "ello", ", wo"]),
        (RequestOutputKind.CUMULATIVE, ["H", "Hello", "Hello, wo"]),
        (RequestOutputKind.FINAL_ONLY, ["Hello, wo"]),
    ],
)
def test_stream_interval_spaces_what_readers_get_and_not_what_is_tapped(kind, texts):
    seen = []
    with make_llm(stream_interval=4) as llm:
        llm.tap.on(RequestOutput, seen.append)
        stream = llm.submit("a", SamplingParams(max_tokens=9, output_kind=kind))
        assert [o.outputs[0].text for o in stream] == texts

        assert [o.outputs[0].text for o in seen] == list("Hello, wo")
        with llm.like() as other:
            assert other.config.stream_interval == 4


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
def test_stream_interval_is_a_number_from_1(value, error):
    with pytest.raises(error, match=f"stream_interval is {value!r}"):
        make_llm(stream_interval=value)


_ASK_IN_A_FORK = """
import os, sys
from lmscope import LLM
from lmscope.errors import EngineClosedError

with LLM("s", execute="scripted", script=lambda request_id, position: 65) as llm:
    child = os.fork()
    if child == 0:
        try:
            llm.generate("a", use_tqdm=False)
        except EngineClosedError as error:
            os._exit(3 if "fork" in str(error) and "LLM(...)" in str(error) else 4)
        os._exit(5)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert llm.generate("a", use_tqdm=False)
sys.exit(status)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_fork_is_told_that_the_engine_is_elsewhere():
    done = subprocess.run(
        [sys.executable, "-c", _ASK_IN_A_FORK], timeout=120, capture_output=True, check=False
    )

    assert done.returncode == 3, done.stderr.decode()
