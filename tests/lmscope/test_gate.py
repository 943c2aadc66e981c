"""Gate: pause, step, breakpoints, and what passes a closed gate. Scripted model, no torch."""

from __future__ import annotations

import threading

import pytest

from lmscope import LLM, SamplingParams
from lmscope.boundary import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.errors import GateClosedError, NothingToRun

DEADLINE_S = 200


@pytest.fixture
def llm():
    def script(request_id, position):
        return 97 + position % 26

    with LLM("s", execute="scripted", script=script, block_size=4, num_kv_blocks=12) as engine:
        yield engine


def wait_idle(llm):
    for _ in range(DEADLINE_S * 100):
        if llm._loop.is_idle():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the engine did not become idle")


def test_steps_stop_at_every_boundary_in_order(llm):
    gate = llm.gate
    assert gate.pause() is None
    stream = llm.submit("abc", SamplingParams(max_tokens=2))

    kinds = [type(gate.step()) for _ in range(9)]

    step = [SchedulerOutput, ModelRunnerOutput, EngineCoreOutputs, RequestOutput]
    assert kinds == [EngineCoreRequest, *step, *step]
    assert stream.text == "a"  # the last one stands at the gate and is not delivered yet
    gate.resume()
    assert stream.wait(DEADLINE_S).text == "ab"


def test_the_first_boundary_after_an_idle_pause_is_not_lost_however_late_one_asks(llm):
    gate = llm.gate
    for _ in range(3):
        assert gate.pause() is None
        stream = llm.submit("abc", SamplingParams(max_tokens=1))
        while gate.at is None:  # it has stopped by itself before anybody asked
            threading.Event().wait(0.001)
        assert type(gate.step()) is EngineCoreRequest
        assert type(gate.step()) is SchedulerOutput
        gate.resume()
        stream.wait(DEADLINE_S)
        wait_idle(llm)


def test_asking_where_it_stands_counts_as_being_told(llm):
    llm.gate.pause()
    llm.submit("abc", SamplingParams(max_tokens=1))
    while llm.gate.at is None:
        threading.Event().wait(0.001)

    assert type(llm.gate.pause()) is EngineCoreRequest
    assert type(llm.gate.step()) is SchedulerOutput


def test_a_step_to_a_kind_passes_the_others(llm):
    llm.gate.pause()
    llm.submit("abc", SamplingParams(max_tokens=5))

    steps = [llm.gate.step(ModelRunnerOutput).step for _ in range(3)]

    assert steps == [1, 2, 3]
    assert llm.gate.at is not None


def test_nothing_to_run_is_said_at_once(llm):
    llm.gate.pause()
    with pytest.raises(NothingToRun, match="submit"):
        llm.gate.step()
    llm.submit("abc", SamplingParams(max_tokens=1))
    assert llm.gate.step(ModelRunnerOutput).step == 1
    assert llm.gate.step(ModelRunnerOutput).step == 2  # reports the end, runs nothing
    with pytest.raises(NothingToRun):
        llm.gate.step(ModelRunnerOutput)


def test_waiting_behind_ones_own_closed_gate_raises(llm):
    llm.gate.pause()
    stream = llm.submit("abc")
    llm.gate.step(SchedulerOutput)
    with pytest.raises(GateClosedError, match=r"SchedulerOutput of step 1.*resume"):
        stream.wait()
    with pytest.raises(GateClosedError):
        llm.generate("abc", use_tqdm=False)
    with pytest.raises(GateClosedError):
        list(stream)

    waited = []
    other = threading.Thread(target=lambda: waited.append(stream.wait(DEADLINE_S).text))
    other.start()
    llm.gate.resume()
    other.join(DEADLINE_S)
    assert waited == [stream.text]


def test_an_abort_passes_a_closed_gate(llm):
    llm.gate.pause()
    running = llm.submit("abc", SamplingParams(max_tokens=None))
    llm.gate.step(SchedulerOutput)
    unseen = llm.submit("xyz")
    running.abort()
    unseen.abort()

    for stream in (running, unseen):
        done = threading.Thread(target=stream.wait, args=(DEADLINE_S,))
        done.start()
        done.join(DEADLINE_S)
        assert stream.outputs[0].finish_reason == "abort"
    assert llm.gate.at is not None
    llm.gate.resume()
    (output,) = llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].text == "abc"


def test_close_passes_a_closed_gate(llm):
    llm.gate.pause()
    stream = llm.submit("abc")
    llm.gate.step(SchedulerOutput)
    llm.close()
    assert stream.finished
    with pytest.raises(NothingToRun):
        llm.gate.step()


def test_a_view_can_join_while_the_engine_stands(llm):
    llm.gate.pause()
    llm.submit("abcdefgh", SamplingParams(max_tokens=3))
    llm.gate.step(SchedulerOutput)
    seen = []

    snapshot, _ = llm.tap.follow(seen.append)

    assert [r.status for r in snapshot.requests] == ["running"]
    assert [b.owners for b in snapshot.blocks] == [("0",), ("0",)]
    assert type(llm.gate.step()) is ModelRunnerOutput
    assert [type(b) for b in seen] == [ModelRunnerOutput]


def test_a_breakpoint_stops_where_its_predicate_holds(llm):
    @llm.gate.break_when(SchedulerOutput)
    def third_step(output):
        return output.step == 3

    stopped = llm.submit("abc", SamplingParams(max_tokens=9))
    for _ in range(DEADLINE_S * 100):
        if llm.gate.at is not None:
            break
        threading.Event().wait(0.01)

    assert llm.gate.at.step == 3
    assert (third_step.hits, llm.gate.breakpoints) == (1, (third_step,))
    third_step.remove()
    third_step.remove()
    llm.gate.resume()
    assert stopped.wait(DEADLINE_S).finished


def test_hits_and_once(llm):
    late = llm.gate.break_when(ModelRunnerOutput, lambda b: True, once=True, hits=4)
    llm.gate.pause()
    llm.submit("abc", SamplingParams(max_tokens=9))

    assert llm.gate.step(RequestOutput).step == 1
    llm.gate.step(RequestOutput)
    llm.gate.step(RequestOutput)
    assert llm.gate.step(RequestOutput).step == 4  # the breakpoint stops before it
    assert type(llm.gate.at) is ModelRunnerOutput
    assert (late.hits, late.enabled) == (1, False)
    with pytest.raises(ValueError, match="at least 1"):
        llm.gate.break_when(ModelRunnerOutput, bool, hits=0)
    with pytest.raises(TypeError, match="boundary struct"):
        llm.gate.break_when(dict, bool)
    with pytest.raises(TypeError, match="boundary struct"):
        llm.gate.step(dict)


def test_a_predicate_that_raises_is_switched_off(llm):
    bad = llm.gate.break_when(SchedulerOutput, lambda b: 1 / 0)
    (output,) = llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].text == "abc"
    assert isinstance(bad.error, ZeroDivisionError)
    assert not bad.enabled


def test_a_listener_can_pause_its_engine(llm):
    llm.tap.on(ModelRunnerOutput, lambda b: llm.gate.pause() if b.step == 2 else None)
    stream = llm.submit("abc", SamplingParams(max_tokens=9))
    for _ in range(DEADLINE_S * 100):
        if llm.gate.at is not None:
            break
        threading.Event().wait(0.01)
    assert (type(llm.gate.at), llm.gate.at.step) == (ModelRunnerOutput, 2)
    llm.gate.resume()
    assert stream.wait(DEADLINE_S).finished


def test_tokens_are_the_same_with_a_stop_at_every_boundary():
    def script(request_id, position):
        return (int(request_id) * 7 + position) % 250

    def run(stops):
        with LLM("s", execute="scripted", script=script, block_size=4, num_kv_blocks=9) as llm:
            outputs = []
            keep = lambda b: outputs.append((b.num_scheduled_tokens, b.decisions))  # noqa: E731
            llm.tap.on(SchedulerOutput, keep)
            llm.gate.pause()
            streams = [llm.submit("abcdefg", SamplingParams(max_tokens=12)) for _ in range(3)]
            # all three have arrived before the first step, with stops and without
            for _ in streams:
                llm.gate.step(EngineCoreRequest)
            try:
                while stops:
                    llm.gate.step()
            except NothingToRun:
                pass
            llm.gate.resume()
            return [s.wait(DEADLINE_S).token_ids for s in streams], outputs

    assert run(stops=True) == run(stops=False)


def wait_until(gate, condition):
    bell = gate._bell
    while True:
        with bell.lock:
            if condition():
                return
            ring = bell.listen()
        assert bell.wait(ring, DEADLINE_S)


def test_a_button_stops_and_steps_without_waiting(llm):
    gate = llm.gate
    gate.ask_to_pause()
    stream = llm.submit("abc", SamplingParams(max_tokens=3))
    wait_until(gate, lambda: gate.at is not None)
    assert isinstance(gate.at, EngineCoreRequest)

    gate.ask_to_step()
    wait_until(gate, lambda: isinstance(gate.at, SchedulerOutput))
    gate.ask_to_step(RequestOutput)
    wait_until(gate, lambda: isinstance(gate.at, RequestOutput))
    gate.resume()
    assert stream.wait(DEADLINE_S).finished


def test_a_button_that_finds_nothing_to_run_says_so_and_leaves_the_gate_closed(llm):
    with pytest.raises(NothingToRun, match="submit one first"):
        llm.gate.ask_to_step()
    with pytest.raises(TypeError, match="is not a boundary struct"):
        llm.gate.ask_to_step(str)
    llm.submit("abc", SamplingParams(max_tokens=1))
    wait_until(llm.gate, lambda: llm.gate.at is not None)
    assert isinstance(llm.gate.at, EngineCoreRequest)


def test_a_kind_that_does_not_come_any_more_is_forgotten_with_the_last_request(llm):
    gate = llm.gate
    gate.pause()
    llm.submit("abc", SamplingParams(max_tokens=1))
    gate.step(RequestOutput)
    gate.ask_to_step(RequestOutput)
    wait_until(gate, lambda: gate.at is None and not gate._is_running)

    llm.submit("def", SamplingParams(max_tokens=1))
    wait_until(gate, lambda: gate.at is not None)
    assert isinstance(gate.at, EngineCoreRequest)


def test_watchers_hear_of_each_stop_and_each_way_on(llm):
    gate = llm.gate
    heard = []
    listener = lambda: heard.append((gate.is_closed, type(gate.at).__name__))  # noqa: E731
    gate.watch(listener)
    gate.pause()
    llm.submit("abc", SamplingParams(max_tokens=1))
    gate.step()
    gate.break_when(SchedulerOutput, lambda output: False, name="never").remove()
    gate.resume()
    assert (True, "NoneType") in heard
    assert (True, "EngineCoreRequest") in heard
    assert heard[-1][0] is False
    gate.unwatch(listener)
    gate.unwatch(listener)
    count = len(heard)
    gate.pause()
    assert len(heard) == count
