"""Why: chains of causes and the way out, live and from a recording; no torch."""

from __future__ import annotations

import random

import pytest

from lmscope import LLM, RecordingError, SamplingParams, record
from lmscope.boundary import SchedulerOutput
from lmscope.decisions import Change, Code, Outcome
from lmscope.engine.what_if import WhatIf
from lmscope.scope.questions import scheduler_before

DEADLINE_S = 200


def script(request_id, position):
    return 97 + position % 26


def run(prompts, params, **options):
    """A finished run of the scripted model and its recording."""
    settings = {"execute": "scripted", "script": script, "block_size": 4} | options
    with LLM("s", **settings) as llm, record(llm) as recording:
        llm.generate(prompts, params, use_tqdm=False)
    return recording


def mixed_run(seed):
    """Many requests in a small pool: shared prefixes, preemptions, aborts, both policies."""
    rng = random.Random(seed)
    settings = {
        "execute": "scripted",
        "script": script,
        "block_size": 4,
        "num_kv_blocks": rng.choice([10, 16]),
        "max_num_seqs": rng.choice([3, 6]),
        "max_num_batched_tokens": rng.choice([8, 24]),
        "long_prefill_token_threshold": rng.choice([0, 5]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }
    with LLM("s", **settings) as llm, record(llm) as recording:
        streams = []
        for _ in range(15):
            prompt = rng.choice(["", "shared prefix "]) + "abcdefghijklmnop"[: rng.randint(1, 16)]
            params = SamplingParams(max_tokens=rng.randint(1, 9))
            streams.append(llm.submit(prompt, params, priority=rng.randint(0, 2)))
            if rng.random() < 0.1:
                rng.choice(streams).abort()
        for stream in streams:
            stream.wait(DEADLINE_S)
    return recording


@pytest.mark.parametrize("seed", range(6))
def test_the_restored_scheduler_decides_what_was_decided(seed):
    recording = mixed_run(seed)
    outputs = [b for b in recording.boundaries if isinstance(b, SchedulerOutput)]
    assert any(o.preempted_req_ids for o in outputs) or seed
    for output in outputs:
        scheduler = scheduler_before(recording, output.step)
        again = scheduler.schedule()
        assert dict(again.num_scheduled_tokens) == dict(output.num_scheduled_tokens)
        assert again.preempted_req_ids == output.preempted_req_ids
        assert [(d.request_id, d.code) for d in again.decisions] == [
            (d.request_id, d.code) for d in output.decisions
        ]
        assert [r.block_ids for r in again.scheduled_new_reqs] == [
            r.block_ids for r in output.scheduled_new_reqs
        ]


@pytest.mark.parametrize("seed", range(2))
def test_every_live_request_of_every_step_can_be_asked_about(seed):
    recording = mixed_run(seed)
    for step in recording.steps[1:]:
        for request_id, decision in recording.at(step).decisions.items():
            answer = recording.why(request_id, step)
            assert answer.decision == decision
            assert answer.step == step
            assert 1 <= len(answer.sentences) <= 3
            assert answer.chain[0].request_id == request_id
            if decision.outcome is Outcome.SCHEDULED:
                assert answer.would_run_if is None
            elif answer.would_run_if is not None:
                what_if = WhatIf(scheduler_before(recording, step))
                assert what_if.runs(request_id, answer.would_run_if)


def test_no_blocks_names_the_holder_and_how_many_would_do():
    recording = run(["a" * 12, "b" * 8], SamplingParams(max_tokens=2), num_kv_blocks=5)

    answer = recording.why("1", step=1)

    assert answer.decision.code is Code.NO_BLOCKS
    assert answer.would_run_if == Change(blocks=1)
    assert [link.request_id for link in answer.chain] == ["1", "0"]
    assert str(answer) == (
        "Step 1, request 1: waiting: needs 2 blocks, 1 free; 0 holds 3. "
        "The first cause: 0: prefill: 12 tokens. "
        "It would have run with 1 more free block."
    )


def test_behind_leads_to_the_head_and_to_who_is_in_its_way():
    recording = run(
        ["a" * 12, "b" * 8, "c" * 3, "d" * 3], SamplingParams(max_tokens=2), num_kv_blocks=5
    )

    answer = recording.why("3", step=1)

    assert answer.decision.code is Code.BEHIND
    assert [link.request_id for link in answer.chain] == ["3", "1", "0"]
    assert answer.would_run_if == Change(position=2) or answer.would_run_if == Change(position=1)


def test_a_preempted_request_says_for_whom():
    recording = run(["a" * 4, "b" * 4], SamplingParams(max_tokens=8), num_kv_blocks=5)
    step, decision = next(
        (b.step, d)
        for b in recording.boundaries
        if isinstance(b, SchedulerOutput)
        for d in b.decisions
        if d.outcome is Outcome.PREEMPTED
    )

    answer = recording.why(decision.request_id, step)

    assert answer.chain[1].request_id == decision.other_id
    assert answer.would_run_if == Change(blocks=2)  # one for each of the two
    assert "preempted for" in str(answer)


def test_a_cause_that_ended_in_the_same_step_is_told_by_what_it_did():
    recording = run(["a" * 4, "b" * 4], SamplingParams(max_tokens=6), num_kv_blocks=5)
    step = next(
        b.step
        for b in recording.boundaries
        if isinstance(b, SchedulerOutput) and b.preempted_req_ids
    )
    told = []
    for later in range(step, recording.steps[-1]):
        for request_id in recording.at(later).decisions:
            told += [link.sentence for link in recording.why(request_id, later).chain[1:]]
    assert told
    assert not any(words.startswith("finished") for words in told)


def test_two_limits_that_bind_together_are_named():
    recording = run(
        ["a" * 8, "b" * 8], SamplingParams(max_tokens=3), num_kv_blocks=4, max_num_seqs=1
    )

    # In step 2 the first one runs: a place further in front does not help either.
    answer = recording.why("1", step=2)

    assert answer.decision.code is Code.SEATS
    assert answer.would_run_if is None
    assert answer.limits == ("blocks", "seats")
    assert "free blocks and max_num_seqs bind together" in str(answer)


def test_without_a_step_it_is_about_the_last_one():
    recording = run(["a" * 8], SamplingParams(max_tokens=2))
    answer = recording.why("0")
    assert answer.step == 2
    assert "finished at step 2" in str(answer)


def test_questions_about_what_is_not_there_name_what_is():
    recording = run(["a" * 8], SamplingParams(max_tokens=2))
    with pytest.raises(RecordingError, match="known: 0"):
        recording.why("7")
    with pytest.raises(RecordingError, match="steps 0 to 3"):
        recording.why("0", step=9)


def test_a_live_engine_answers_with_nobody_listening():
    with LLM(
        "s", execute="scripted", script=script, block_size=4, num_kv_blocks=8, max_num_seqs=1
    ) as llm:
        llm.gate.pause()
        llm.submit("abc", SamplingParams(max_tokens=12), request_id="first")
        llm.submit("xyz", SamplingParams(max_tokens=3), request_id="second")
        llm.submit("uvw", SamplingParams(max_tokens=3), request_id="third")
        for _ in range(6):
            llm.gate.step()

        answer = llm.why("second")

        assert answer.decision.code is Code.SEATS
        assert answer.would_run_if == Change(seats=1)
        assert str(answer).endswith("It would run with max_num_seqs larger by 1.")
        assert llm.why("third").would_run_if == Change(seats=2)
        assert llm.why("first").decision.outcome is Outcome.SCHEDULED
        with pytest.raises(ValueError, match="live: first, second, third"):
            llm.why("fourth")
        llm.gate.resume()


def test_the_table_escapes_what_users_chose():
    with LLM("s", execute="scripted", script=script, block_size=4) as llm, record(llm) as rec:
        llm.submit("abc", request_id="<script>alert(1)</script>").wait(DEADLINE_S)
    table = rec.why("<script>alert(1)</script>", step=1)._repr_html_()
    assert "<script>" not in table
    assert "&lt;script&gt;" in table
