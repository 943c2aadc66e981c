"""Hard cases of abort, interrupt and failure (A)."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading

import pytest

from lmscope import LLM, EngineDeadError, SamplingParams, record
from lmscope.boundary import EngineCoreOutputs, RequestOutput, SchedulerOutput
from lmscope.engine.loop import EngineLoop
from lmscope.frontend.stream import Stream
from lmscope.scope.replay import replay

DEADLINE_S = 200
ENDLESS = SamplingParams(max_tokens=None)


def assert_nothing_is_left(snapshot):
    assert snapshot.requests == ()
    assert len(snapshot.free_queue) == snapshot.info.num_blocks - 1


# -- A1: leaving a stream early ---------------------------------------------------------


def test_a1_leaving_the_with_block_aborts_and_frees_the_blocks(scripted, held, state_of):
    script = held(3)
    llm = scripted(script)

    with llm.submit("abc", ENDLESS) as stream:
        for number, _ in enumerate(stream, start=1):
            if number == 2:
                break
    script.go.set()

    assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    assert len(stream.token_ids) <= 4  # the step that was running, and none after it
    assert_nothing_is_left(state_of(llm))


def test_a1_so_does_leaving_it_in_a_coroutine(scripted, held, state_of):
    script = held(3)
    llm = scripted(script)

    async def main():
        with llm.submit("abc", ENDLESS) as stream:
            count = 0
            async for _ in stream:
                count += 1
                if count == 2:
                    break
        script.go.set()
        return await stream

    stream = asyncio.run(main())

    assert stream.outputs[0].finish_reason == "abort"
    assert_nothing_is_left(state_of(llm))


def test_a1_and_cancelling_a_task_that_is_in_it(scripted, held, state_of):
    script = held(3)
    llm = scripted(script)
    streams = []

    async def read():
        with llm.submit("abc", ENDLESS) as stream:
            streams.append(stream)
            await stream

    async def main():
        task = asyncio.create_task(read())
        while not script.arrived.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        script.go.set()

    asyncio.run(main())

    assert streams[0].wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    assert_nothing_is_left(state_of(llm))


def test_a1_leaving_a_loop_leaves_the_request_running_for_other_readers(scripted, endless):
    llm = scripted(endless)
    stream = llm.submit("abc", SamplingParams(max_tokens=20))

    for _ in stream:
        break

    assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "length"


# -- A2: one id for several requests ----------------------------------------------------


def test_a2_an_id_that_is_live_gets_a_number_and_each_is_aborted_alone(scripted, held):
    script = held(1)
    llm = scripted(script)
    first, second = (llm.submit("abc", ENDLESS, request_id="x") for _ in range(2))
    assert (first.request_id, second.request_id) == ("x", "x-2")

    llm.abort("x")
    again = llm.submit("abc", SamplingParams(max_tokens=3), request_id="x")
    script.go.set()

    assert first.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    assert not second.finished
    assert again.request_id == "x-3"  # the first had not left yet
    assert again.wait(DEADLINE_S).outputs[0].finish_reason == "length"
    second.abort()
    assert second.wait(DEADLINE_S).outputs[0].finish_reason == "abort"


def test_a2_an_id_can_be_used_again_right_after_its_abort(scripted, endless):
    llm = scripted(endless, num_kv_blocks=64)
    for number in range(20):
        stream = llm.submit("abc", ENDLESS, request_id="x")
        stream.abort()
        stream.wait(DEADLINE_S)
        fresh = llm.submit("abc", SamplingParams(max_tokens=3), request_id="x")
        assert fresh.request_id == "x", number
        assert fresh.wait(DEADLINE_S).outputs[0].finish_reason == "length"
        assert len(fresh.token_ids) == 3


# -- A3, A4: aborts at any time ---------------------------------------------------------


def test_a3_a_request_that_still_waits_leaves_the_queue_with_a_final_output(
    scripted, held, state_of
):
    script = held(1)
    llm = scripted(script, num_kv_blocks=4)
    running = llm.submit("x" * 9, SamplingParams(max_tokens=3))  # all three blocks
    assert script.arrived.wait(DEADLINE_S)
    waiting = llm.submit("y" * 9, SamplingParams(max_tokens=3))

    waiting.abort()
    script.go.set()

    assert waiting.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    assert waiting.token_ids == ()
    assert running.wait(DEADLINE_S).outputs[0].finish_reason == "length"
    assert_nothing_is_left(state_of(llm))


def test_a3_one_that_was_refused_for_blocks_before_does_too(scripted, state_of):
    llm = scripted("abcdefgh", num_kv_blocks=4)
    llm.gate.pause()
    llm.submit("x" * 9, SamplingParams(max_tokens=3))
    waiting = llm.submit("y" * 9, SamplingParams(max_tokens=3))
    llm.gate.step(SchedulerOutput)
    output = llm.gate.step(SchedulerOutput)
    assert [d.code for d in output.decisions] == ["decode", "no_blocks"]

    waiting.abort()
    llm.gate.resume()

    assert waiting.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    llm.generate("z", use_tqdm=False)
    assert_nothing_is_left(state_of(llm))


def test_a4_late_and_repeated_aborts_change_nothing(scripted):
    llm = scripted("ok")
    stream = llm.submit("abc").wait(DEADLINE_S)
    for name in (stream.request_id, stream.request_id, "unknown", ""):
        llm.abort(name)
    stream.abort()

    assert stream.outputs[0].finish_reason == "stop"
    assert llm.generate("abc", use_tqdm=False)[0].outputs[0].text == "ok"


@pytest.mark.parametrize("place", [SchedulerOutput, EngineCoreOutputs, RequestOutput])
def test_a4_what_arrives_for_an_aborted_request_is_dropped(scripted, state_of, place):
    llm = scripted("abcdefgh")
    delivered = []
    llm.tap.on(RequestOutput, delivered.append)
    llm.gate.pause()
    stream = llm.submit("abc", SamplingParams(max_tokens=5))
    llm.gate.step(place)

    stream.abort()
    stream.abort()
    llm.gate.resume()

    assert stream.wait(DEADLINE_S).outputs[0].finish_reason == "abort"
    assert stream.text == ("a" if place is RequestOutput else "")
    llm.generate("xyz", use_tqdm=False)
    assert [d.finished for d in delivered if d.request_id == stream.request_id][-1]
    assert sum(d.finished for d in delivered) == 2  # this one and the one after it
    assert_nothing_is_left(state_of(llm))


# -- A5: the engine dies ----------------------------------------------------------------


def test_a5_everybody_who_waits_gets_the_error_and_later_calls_raise_at_once(caplog):
    steps = []

    def script(request_id, position):
        if position == 2:
            raise ArithmeticError("the third forward is cursed")
        return 97

    llm = LLM("s", execute="scripted", script=script, block_size=4, max_num_seqs=1)
    llm.tap.on(SchedulerOutput, lambda output: steps.append(output.step))
    streams = [llm.submit("abc", SamplingParams(max_tokens=9)) for _ in range(4)]

    async def ask():
        with pytest.raises(EngineDeadError, match="cursed"):
            await streams[3]

    for stream in streams:  # one runs, three wait in the queue
        with pytest.raises(EngineDeadError, match="cursed") as caught:
            stream.wait(DEADLINE_S)
        assert isinstance(caught.value.__cause__, ArithmeticError)
    asyncio.run(ask())
    for call in (
        lambda: llm.submit("abc"),
        lambda: llm.generate("abc", use_tqdm=False),
        llm.reset_prefix_cache,
        lambda: llm.tap.follow(print),
    ):
        with pytest.raises(EngineDeadError, match="cursed"):
            call()
    llm.abort("0")
    assert steps == [1, 2, 3]
    assert "closed" in repr(llm)
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    llm.close()


def test_an_engine_that_ran_out_of_memory_says_what_takes_less():
    class OutOfMemoryError(RuntimeError):
        """As torch calls it."""

    def script(request_id, position):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with LLM("s", execute="scripted", script=script) as llm:
        for call in (lambda: llm.generate("abc", use_tqdm=False), lambda: llm.submit("abc")):
            with pytest.raises(EngineDeadError, match=r"2\.00 GiB; load a new one that takes less"):
                call()


# -- A6: an interrupt -------------------------------------------------------------------


def test_a6_an_interrupt_ends_what_the_call_started_and_nothing_else(
    scripted, endless, state_of, monkeypatch
):
    llm = scripted(endless, num_kv_blocks=200)
    other = llm.submit("another cell", SamplingParams(max_tokens=300))
    steps = []
    interrupt_after = 3
    wait = Stream.wait

    def interrupted(self, timeout_s=None):
        # Python raises it in the main thread, which waits here.
        if self is not other and len(self.token_ids) >= interrupt_after:
            raise KeyboardInterrupt
        return wait(self, timeout_s=0.001)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "defg"], ENDLESS, use_tqdm=False)

    assert other.wait(DEADLINE_S).outputs[0].finish_reason == "length"
    assert_nothing_is_left(state_of(llm))
    llm.tap.on(SchedulerOutput, steps.append)
    (output,) = llm.generate("wxyz", SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert dict(steps[0].num_scheduled_tokens) == {output.request_id: 4}


@pytest.mark.parametrize("is_posted", [True, False])
def test_a6_so_does_one_that_comes_while_the_prompts_are_queued(
    scripted, endless, state_of, monkeypatch, is_posted
):
    llm = scripted(endless, num_kv_blocks=200)
    post = EngineLoop.post

    def interrupted(self, function, **options):
        if options:  # the abort
            return post(self, function, **options)
        if is_posted:
            post(self, function)
        raise KeyboardInterrupt

    for call in (lambda: llm.generate(["a", "b"], ENDLESS), lambda: llm.submit("a", ENDLESS)):
        with monkeypatch.context() as patch:
            patch.setattr(EngineLoop, "post", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
        assert "0 live requests" in repr(llm)

    (output,) = llm.generate("wxyz", SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert_nothing_is_left(state_of(llm))


def interrupted_at(moment, call):
    """Run `call` and raise KeyboardInterrupt in it; False when it was over before.

    Python looks for Ctrl-C where a function begins and where one of C has returned. Those
    are the events of a profiler, so all moments can be gone through one by one.
    """
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        # Python ignores what is raised while it closes a generator.
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if event in ("call", "c_return") and not is_generator:
            count += 1
            if count == moment:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return count >= moment


def test_a6_an_interrupt_at_any_moment_leaves_the_engine_usable(scripted, endless, state_of):
    llm = scripted(endless, num_kv_blocks=64)
    params = SamplingParams(max_tokens=3)
    answers = []

    def generate():
        return llm.generate(["abc", "de"], params, use_tqdm=False)

    moment = 1
    while interrupted_at(moment, generate):
        # In a thread of its own: it would wait for ever if a lock were left taken.
        thread = threading.Thread(target=lambda: answers.append(generate()), daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert len(answers) == moment, f"no answer after an interrupt at moment {moment}"
        assert "0 live requests" in repr(llm)
        moment += 1

    assert moment > 100
    assert all(len(o.outputs[0].token_ids) == 3 for outputs in answers for o in outputs)
    assert_nothing_is_left(state_of(llm))


def in_time(call):
    """What `call` returns; in a thread of its own, where a lock left taken holds it for ever."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    (answer,) = answers
    return answer


def test_a6_an_interrupt_at_any_moment_leaves_the_gate_usable(scripted, endless):
    llm = scripted(endless, num_kv_blocks=64)
    gate = llm.gate
    moment = 0

    def use():
        gate.pause()
        gate.step()
        gate.step(SchedulerOutput)
        gate.break_when(SchedulerOutput, lambda output: False).remove()
        gate.resume()

    while True:
        moment += 1
        in_time(gate.pause)
        stream = llm.submit("abc", SamplingParams(max_tokens=3))
        if not interrupted_at(moment, use):
            break
        in_time(gate.pause)
        for made in gate.breakpoints:  # its maker never got hold of it
            made.remove()
        in_time(gate.resume)
        assert in_time(stream.wait).num_tokens == 3

    assert moment > 100
    assert stream.wait(DEADLINE_S).num_tokens == 3


def test_a6_an_interrupt_at_any_moment_leaves_a_replay_usable(scripted):
    llm = scripted("abcdefgh")
    with record(llm) as recording:
        llm.generate("abc", use_tqdm=False)
    moments = 0
    with replay(recording) as player:

        def use():
            player.seek(2)
            player.speed = None
            player.back()
            player.gate.step()
            player.play().wait()

        while interrupted_at(moments + 1, use):
            moments += 1
            in_time(lambda: player.seek(1))  # it plays on if it was playing
            in_time(lambda: player.play().wait())
            assert player.is_at_end

    assert moments > 100


# -- A7: an extension fails -------------------------------------------------------------


def failing_in_step_2(output):
    if output.step == 2:
        raise RuntimeError("this hook is broken")


def test_a7_a_hook_that_raises_is_shown_once_and_switched_off(scripted, caplog):
    llm = scripted("abcdef")
    seen = []
    subscription = llm.tap.on(SchedulerOutput, failing_in_step_2)
    llm.tap.on(SchedulerOutput, lambda output: seen.append(output.step))
    with caplog.at_level(logging.WARNING):
        (output,) = llm.generate("abc", use_tqdm=False)

    assert output.outputs[0].text == "abcdef"
    assert len(seen) > 3
    assert isinstance(subscription.error, RuntimeError)
    assert not subscription.is_open
    (record,) = caplog.records
    for words in ("failing_in_step_2", "SchedulerOutput", "step 2", "this hook is broken"):
        assert words in record.getMessage()


def test_a7_a_strict_hook_ends_the_engine_instead(scripted):
    llm = scripted("abcdef")
    llm.tap.on(SchedulerOutput, failing_in_step_2, strict=True)

    with pytest.raises(EngineDeadError, match="this hook is broken"):
        llm.generate("abc", use_tqdm=False)


def test_a7_a_predicate_of_a_breakpoint_that_raises_is_switched_off_too(scripted):
    llm = scripted("abcdef")

    def predicate(output):
        raise RuntimeError("this hook is broken")

    made = llm.gate.break_when(SchedulerOutput, predicate)

    assert llm.generate("abc", use_tqdm=False)[0].outputs[0].text == "abcdef"
    assert isinstance(made.error, RuntimeError)
    assert not made.enabled
