"""Hard cases of scheduling (Q)."""

from __future__ import annotations

import random

import pytest

from lmscope import SamplingParams
from lmscope.boundary import EngineCoreRequest, SchedulerOutput
from lmscope.decisions import Code

DEADLINE_S = 200


def run_together(llm, prompts, params, **options):
    """The steps of one call, whose prompts all arrive before its first step."""
    steps = []
    with llm.tap.on(SchedulerOutput, steps.append):
        llm.generate(prompts, params, use_tqdm=False, **options)
    return [step for step in steps if step.num_scheduled_tokens]


def test_q1_a_decoding_request_gets_its_token_in_every_step(scripted, endless):
    llm = scripted(endless, max_num_batched_tokens=16, max_num_seqs=4)
    steps = []
    llm.tap.on(SchedulerOutput, steps.append)
    llm.gate.pause()
    decoding = llm.submit("abc", SamplingParams(max_tokens=60))
    llm.gate.step(SchedulerOutput)
    long = llm.submit("x" * 200, SamplingParams(max_tokens=1))
    llm.gate.resume()
    decoding.wait(DEADLINE_S)
    long.wait(DEADLINE_S)

    last = max(n for n, step in enumerate(steps) if long.request_id in step.num_scheduled_tokens)
    assert 10 < last < 60
    for step in steps[1:last]:
        assert step.num_scheduled_tokens[decoding.request_id] == 1
    # and the rest of the budget goes to the prompt
    assert all(step.total_num_scheduled_tokens == 16 for step in steps[2:last])


@pytest.mark.parametrize(("threshold", "first_step"), [(0, 7), (8, 1)])
def test_q2_a_threshold_lets_short_requests_start_beside_a_long_prompt(
    scripted, endless, threshold, first_step
):
    llm = scripted(
        endless,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        long_prefill_token_threshold=threshold,
    )
    steps = run_together(llm, ["x" * 100, "y" * 5], SamplingParams(max_tokens=1))

    started = next(n for n, s in enumerate(steps, 1) if "1" in s.num_scheduled_tokens)
    assert started == first_step
    assert sum(s.num_scheduled_tokens.get("0", 0) for s in steps) == 100
    waiting = [{d.request_id: d.code for d in s.decisions}.get("1") for s in steps[: started - 1]]
    assert set(waiting) <= {Code.BUDGET}


def test_q3_chunking_off_with_a_small_budget_is_an_error_at_construction(scripted, endless):
    with pytest.raises(ValueError, match=r"is 16, max_model_len is 32.*wait for ever"):
        scripted(
            endless,
            enable_chunked_prefill=False,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            max_model_len=32,
        )


def test_q4_smaller_numbers_go_first_and_nobody_is_pushed_out_by_a_number_alone(scripted, endless):
    llm = scripted(endless, scheduling_policy="priority", max_num_seqs=1)
    first = llm.gate.pause()
    assert first is None
    running = llm.submit("r", SamplingParams(max_tokens=5), priority=9)
    llm.gate.step(SchedulerOutput)
    streams = [llm.submit("abc", SamplingParams(max_tokens=1), priority=p) for p in (5, 1, 5)]
    order = []
    llm.tap.on(SchedulerOutput, lambda s: order.extend(n.req_id for n in s.scheduled_new_reqs))
    llm.gate.resume()
    for stream in (running, *streams):
        stream.wait(DEADLINE_S)

    assert order == [streams[1].request_id, streams[0].request_id, streams[2].request_id]


def test_q4_when_blocks_run_out_the_victim_is_the_least_important(scripted, endless):
    llm = scripted(endless, scheduling_policy="priority", num_kv_blocks=7)
    steps = run_together(
        llm, ["a" * 7, "b" * 7, "c" * 7], SamplingParams(max_tokens=9), priority=[5, 1, 5]
    )

    preempted = [name for step in steps for name in step.preempted_req_ids]
    assert preempted[0] == "2"  # of the two with priority 5 the one that came later
    assert "1" not in preempted


def test_q5_the_limits_hold_in_every_step_under_random_load(scripted, endless):
    rng = random.Random(5)
    llm = scripted(endless, max_num_batched_tokens=9, max_num_seqs=3, num_kv_blocks=12)
    live: set[str] = set()
    most = [0, 0]

    def check(step):
        live.difference_update(step.preempted_req_ids)
        live.difference_update(step.finished_req_ids)
        live.update(step.num_scheduled_tokens)
        known = step.scheduled_cached_reqs.req_ids
        names = [*(n.req_id for n in step.scheduled_new_reqs), *known]
        assert len(names) == len(set(names)) == len(step.num_scheduled_tokens)
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens <= 9
        assert len(live) <= 3
        most[0] = max(most[0], step.total_num_scheduled_tokens)
        most[1] = max(most[1], len(live))

    llm.tap.on(SchedulerOutput, check, strict=True)
    streams = [
        llm.submit("x" * rng.randrange(1, 30), SamplingParams(max_tokens=rng.randrange(1, 12)))
        for _ in range(40)
    ]
    for stream in streams:
        stream.wait(DEADLINE_S)

    assert most == [9, 3]


def test_q6_what_running_requests_leave_of_the_budget_is_used(scripted, endless):
    llm = scripted(endless, max_num_batched_tokens=16, max_num_seqs=4)

    steps = run_together(llm, ["a" * 10, "b" * 10, "c" * 10], SamplingParams(max_tokens=1))

    assert [step.total_num_scheduled_tokens for step in steps] == [16, 14]


def test_prompts_of_one_call_are_all_there_before_its_first_step(scripted, endless):
    llm = scripted(endless)
    arrived = []
    llm.tap.on(EngineCoreRequest, lambda request: arrived.append(request.step))
    llm.generate(["a"] * 5, SamplingParams(max_tokens=3), use_tqdm=False)

    assert arrived == [0] * 5
