"""Overlapped steps: the same tokens, a fixed order of structs, and a reader of it all.

The scripted model runs here, so that a test decides when the device is done; no torch.
"""

from __future__ import annotations

import random
import threading

import pytest

from lmscope import LLM, EngineDeadError, SamplingParams, record
from lmscope.boundary import (
    BOUNDARIES,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.debugger import Debugger
from lmscope.engine.what_if import restore_scheduler
from lmscope.errors import GateClosedError
from lmscope.frontend.stream import Stream
from lmscope.scope.replay import replay
from lmscope.scope.run_log import LOG_NAMES
from lmscope.scope.view import EngineView, differences

DEADLINE_S = 200
SMALL = {"block_size": 4, "num_kv_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4}


def letters(request_id, position):
    return 97 + (position * 7 + sum(map(ord, request_id))) % 26


def make(script=letters, **options):
    options = {**SMALL, "async_scheduling": True, **options}
    return LLM("s", execute="scripted", script=script, **options)


def wait_until(condition):
    for _ in range(DEADLINE_S * 1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


def kinds_of(recording):
    return [(type(b), b.step) for b in recording.boundaries if not isinstance(b, EngineCoreRequest)]


def num_overlapped(recording):
    """Steps that were scheduled before the tokens of the step before had come."""
    seen = kinds_of(recording)
    return sum(
        seen.index((SchedulerOutput, step + 1)) < seen.index((ModelRunnerOutput, step))
        for kind, step in seen
        if kind is SchedulerOutput and (SchedulerOutput, step + 1) in seen
    )


def test_structs_come_in_the_documented_order():
    with make() as llm, record(llm) as recording:
        llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
        wait_until(llm._loop.is_idle)

    rest = (ModelRunnerOutput, EngineCoreOutputs)
    assert kinds_of(recording) == [
        (SchedulerOutput, 1),
        *((SchedulerOutput, 2), *((kind, 1) for kind in (*rest, RequestOutput))),
        *((SchedulerOutput, 3), *((kind, 2) for kind in (*rest, RequestOutput))),
        # max_tokens is on its way: a step in which nothing is computed
        *((SchedulerOutput, 4), *((kind, 3) for kind in (*rest, RequestOutput))),
        # it tells that the request is over
        *((SchedulerOutput, 5), *((kind, 4) for kind in rest)),
        *((kind, 5) for kind in rest),
    ]
    scheduled = [b for b in recording.boundaries if isinstance(b, SchedulerOutput)]
    assert [b.total_num_scheduled_tokens for b in scheduled] == [3, 1, 1, 0, 0]
    assert scheduled[3].decisions[0].code == "in_flight"
    assert num_overlapped(recording) == 4


def test_a_step_is_scheduled_while_the_device_runs_the_one_before():
    scheduled = threading.Event()

    def script(request_id, position):
        # The first token is not there before the second step is scheduled.
        if position == 0:
            assert scheduled.wait(DEADLINE_S)
        return 97

    with make(script) as llm:
        llm.tap.on(SchedulerOutput, lambda b: b.step == 2 and scheduled.set())
        assert llm.generate("abc", SamplingParams(max_tokens=3))[0].outputs[0].text == "aaa"


def random_run(seed, is_async, **options):
    """What each request of a random workload got, and the recording of it."""
    rng = random.Random(seed)
    shared = [rng.randrange(97, 123) for _ in range(12)]
    work = []
    for number in range(rng.randint(2, 14)):
        prompt = shared[: rng.choice([0, 4, 9, 12])] + [rng.randrange(97, 123)] * rng.randint(1, 9)
        params = SamplingParams(
            max_tokens=rng.randint(1, 20),
            min_tokens=rng.choice([0, 0, 1]),
            n=rng.choice([1, 1, 2]),
            stop=rng.choice([(), (), ("z",), ("ah", "b")]),
            stop_token_ids=rng.choice([(), (), (101,)]),
            ignore_eos=rng.choice([True, False]),
        )
        work.append((prompt, params, number % 3))
    ends = {str(i): rng.choice([None, None, rng.randint(0, 9)]) for i in range(99)}

    def script(request_id, position):
        parent = request_id.rpartition("_")[2]
        return None if position == ends[parent] else letters(request_id, position)

    with make(script, async_scheduling=is_async, **options) as llm, record(llm) as recording:
        llm.gate.pause()  # all arrive before the first step
        streams = [
            llm.submit({"prompt_token_ids": prompt}, params, priority=priority)
            for prompt, params, priority in work
        ]
        llm.gate.resume()
        for stream in streams:
            stream.wait(DEADLINE_S)
        wait_until(llm._loop.is_idle)
        snapshot, _ = llm.tap.follow(lambda boundary: None)
    return [[tuple_of(o) for o in stream.outputs] for stream in streams], recording, snapshot


def tuple_of(output):
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_random_work_gets_the_same_tokens_texts_and_reasons(policy):
    num_preempted = num_chunks = num_hits = 0
    for seed in range(25):
        options = {"scheduling_policy": policy, "num_kv_blocks": 12 + seed % 3 * 8}
        want, plain, _ = random_run(seed, False, **options)
        got, recording, snapshot = random_run(seed, True, **options)
        assert got == want, seed
        assert num_overlapped(plain) == 0
        assert num_overlapped(recording) > 0
        assert differences(recording.at(), snapshot) == []
        assert len(snapshot.free_queue) == snapshot.info.num_blocks - 1
        for b in recording.boundaries:
            if isinstance(b, SchedulerOutput):
                num_preempted += len(b.preempted_req_ids)
                num_chunks += any(d.tokens_left for d in b.decisions)
                num_hits += sum(new.num_computed_tokens for new in b.scheduled_new_reqs)
    assert num_preempted > 20
    assert num_chunks > 20
    assert num_hits > 20


def test_a_recording_of_overlapped_steps_answers_all_questions():
    _, recording, _ = random_run(3, True, num_kv_blocks=14)
    steps = list(recording.steps)
    assert len(steps) > 10
    by_hand = EngineView(recording.snapshot)
    ends = {}
    for boundary in recording.boundaries:
        if boundary.step > by_hand.step:
            ends[by_hand.step] = by_hand.snapshot()
        by_hand.apply(boundary)
    # A step lasts up to the next SchedulerOutput, so it has what the one before it brought.
    for step in steps[:-1]:
        assert recording.at(step).snapshot() == ends[step]
        structs = [b for b in recording.structs_of(step) if isinstance(b, ModelRunnerOutput)]
        assert step == 0 or {b.step for b in structs} <= {step - 1, step}
    frames = recording.frames
    assert list(frames.steps.step) == steps[1:]
    assert not frames.steps.step_s.isna().any()
    view = recording.at()
    assert frames.steps.output_tokens.sum() == view.totals.output_tokens
    assert len(frames.tokens) == view.totals.output_tokens
    step_ms = LOG_NAMES.index("step_ms")
    assert [record.counts[step_ms] for record in view.log.records[1:]].count(None) <= 1
    for request_id in view.requests:
        assert recording.why(request_id).decision is not None
        pieces = recording.provenance(request_id)
        assert pieces is not None
    with replay(recording) as player:
        seen = []
        for kind in BOUNDARIES:
            player.tap.on(kind, seen.append)
        player.play().wait(DEADLINE_S)
        assert seen == list(recording.boundaries)


def test_the_gate_stops_when_the_device_is_done_and_says_what_is_in_flight():
    ran = []

    def script(request_id, position):
        ran.append(position)
        return 97 + position

    with make(script) as llm:
        gate, debugger = llm.gate, Debugger(llm)
        gate.pause()
        stream = llm.submit("abc", SamplingParams(max_tokens=6))
        at = []
        for _ in range(10):
            boundary = gate.step()
            at.append((type(boundary), boundary.step, gate.in_flight, len(ran)))
        assert at == [
            (EngineCoreRequest, 0, (), 0),
            (SchedulerOutput, 1, (), 0),
            (SchedulerOutput, 2, (1,), 1),
            (ModelRunnerOutput, 1, (2,), 2),
            (EngineCoreOutputs, 1, (2,), 2),
            (RequestOutput, 1, (2,), 2),
            (SchedulerOutput, 3, (2,), 2),
            (ModelRunnerOutput, 2, (3,), 3),
            (EngineCoreOutputs, 2, (3,), 3),
            (RequestOutput, 2, (3,), 3),
        ]
        assert isinstance(gate.step(SchedulerOutput), SchedulerOutput)
        assert "stands at SchedulerOutput of step 4, step 3 in flight," in repr(debugger)
        llm.abort(stream.request_id)
        wait_until(lambda: stream.finished)
        assert stream.outputs[0].finish_reason == "abort"
        gate.resume()
        assert llm.generate("ab", SamplingParams(max_tokens=2))[0].outputs[0].text == "ab"


def test_an_id_that_comes_again_gets_nothing_of_what_was_on_its_way():
    def script(request_id, position):
        return 97 + position

    with make(script) as llm:
        llm.gate.pause()
        old = llm.submit("abc", SamplingParams(max_tokens=9), request_id="r")
        llm.gate.step(EngineCoreOutputs)  # step 2 is on its way
        old.abort()
        wait_until(lambda: old.finished)
        new = llm.submit("xyz", SamplingParams(max_tokens=3), request_id="r")
        assert new.request_id == "r"
        llm.gate.resume()
        assert new.wait(DEADLINE_S).text == "abc"


@pytest.mark.parametrize("num_structs", range(4, 16))
def test_a_forced_reset_in_the_middle_drops_no_token(num_structs):
    """Behind each of the first structs, also while a prompt is read in pieces."""
    options = {"max_num_batched_tokens": 4, "num_kv_blocks": 20}
    prompts = ["abcdefghij", "xy"]
    with make(**options) as llm, record(llm) as recording:
        llm.gate.pause()
        streams = [llm.submit(prompt, SamplingParams(max_tokens=6)) for prompt in prompts]
        for _ in range(num_structs):
            llm.gate.step()
        answers = []
        reset = lambda: answers.append(llm.reset_prefix_cache(True))  # noqa: E731
        thread = threading.Thread(target=reset)
        # It waits in the inbox until the gate opens; the thread that closed it may not wait.
        thread.start()
        wait_until(lambda: llm._loop._inbox)
        llm.gate.resume()
        thread.join(DEADLINE_S)
        texts = [stream.wait(DEADLINE_S).text for stream in streams]
        wait_until(llm._loop.is_idle)
        snapshot, _ = llm.tap.follow(lambda boundary: None)
    assert answers == [True]
    assert texts == ["".join(chr(letters(str(i), n)) for n in range(6)) for i in range(2)]
    assert recording.at().totals.preemptions > 0
    assert differences(recording.at(), snapshot) == []


def test_a_listener_cannot_wait_for_what_waits_for_it():
    errors = []

    def listen(output):
        if output.step == 2:
            try:
                llm.reset_prefix_cache()
            except GateClosedError as error:
                errors.append(str(error))

    with make() as llm:
        llm.tap.on(SchedulerOutput, listen)
        assert llm.generate("abc", SamplingParams(max_tokens=3))[0].finished
    assert errors == [
        "a listener asked for this while step 1 is in flight, and the engine waits for the "
        "listener; ask from outside of it"
    ]


def test_the_script_is_not_asked_behind_a_token_that_ends_the_request():
    def script(request_id, position):
        return [97, 98, None][position]  # IndexError behind it

    with make(script) as llm:
        assert llm.generate("abc")[0].outputs[0].finish_reason == "stop"
        params = SamplingParams(stop_token_ids=(98,))
        assert llm.generate("abc", params)[0].outputs[0].token_ids == (97, 98)


def test_a_device_that_fails_ends_the_engine_and_runs_nothing_more():
    before = set(threading.enumerate())
    asked = []

    def script(request_id, position):
        asked.append(position)
        if position == 2:
            raise ZeroDivisionError("no such token")
        return 97

    llm = make(script)
    with pytest.raises(EngineDeadError, match="no such token"):
        llm.generate("abc", SamplingParams(max_tokens=9), use_tqdm=False)
    assert asked == [0, 1, 2]
    llm.close()
    assert set(threading.enumerate()) <= before


def test_close_ends_both_threads_in_the_middle_of_a_batch():
    before = set(threading.enumerate())
    go, arrived = threading.Event(), threading.Event()

    def script(request_id, position):
        if position == 3:
            arrived.set()
            assert go.wait(DEADLINE_S)
        return 97

    llm = make(script)
    stream = llm.submit("abc", SamplingParams(max_tokens=20))
    assert arrived.wait(DEADLINE_S)
    closer = threading.Thread(target=llm.close)
    closer.start()
    go.set()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert stream.outputs[0].finish_reason == "abort"
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("seed", range(6))
def test_a_scheduler_restored_from_the_recording_decides_as_the_engine_did(seed):
    """What `recording.why` asks what would have to be different."""
    _, recording, _ = random_run(seed, True, num_kv_blocks=14)
    scheduled = [b for b in recording.boundaries if isinstance(b, SchedulerOutput)]
    assert len(scheduled) > 10
    for output in scheduled:
        before = recording.at(output.step - 1).snapshot()
        restored = restore_scheduler(before, ended=output.finished_req_ids).schedule()
        assert restored.num_scheduled_tokens == output.num_scheduled_tokens
        assert restored.preempted_req_ids == output.preempted_req_ids


def test_ctrl_c_aborts_what_the_call_started_and_leaves_the_engine_usable(monkeypatch):
    with make(num_kv_blocks=64) as llm:
        with monkeypatch.context() as patch:

            def interrupted(self, timeout_s=None):
                wait_until(lambda: self.num_tokens > 3)
                raise KeyboardInterrupt

            patch.setattr(Stream, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["abc", "de"], SamplingParams(max_tokens=None), use_tqdm=False)
        wait_until(llm._loop.is_idle)
        assert "0 live requests" in repr(llm)
        snapshot, _ = llm.tap.follow(lambda boundary: None)
        assert len(snapshot.free_queue) == snapshot.info.num_blocks - 1
        assert llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_a_recording_that_begins_with_a_batch_in_flight_folds_to_the_end():
    with make() as llm:
        llm.gate.pause()
        stream = llm.submit("abcdef", SamplingParams(max_tokens=9))
        for _ in range(9):
            llm.gate.step()
        assert llm.gate.in_flight
        recording = record(llm)
        llm.gate.resume()
        stream.wait(DEADLINE_S)
        wait_until(llm._loop.is_idle)
        recording.close()
        snapshot, _ = llm.tap.follow(lambda boundary: None)
    assert differences(recording.at(), snapshot) == []
    assert recording.at().requests["0"].text == stream.text
