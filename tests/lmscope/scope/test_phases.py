"""The spans of a request's life, on structs made by hand and on a run that preempts."""

from __future__ import annotations

import pytest

from lmscope import LLM, SamplingParams, record
from lmscope.boundary import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    RequestOutput,
    RequestSnapshot,
    SchedulerOutput,
)
from lmscope.scope.phases import KINDS, Phase, lanes

INFO = EngineInfo("m", 4, 16, 8, 64, 64)


def arrive(step, time, name="a"):
    return EngineCoreRequest(
        step=step,
        time=time,
        request_id=name,
        prompt_token_ids=(1, 2, 3),
        sampling_params=SamplingParams(),
    )


def schedule(step, time, preempted=(), **tokens):
    return SchedulerOutput(
        step=step, time=time, num_scheduled_tokens=tokens, preempted_req_ids=preempted
    )


def outputs(step, time, *ids, reason=None):
    made = tuple(EngineCoreOutput(i, new_token_ids=(7,), finish_reason=reason) for i in ids)
    return EngineCoreOutputs(step=step, time=time, outputs=made)


def test_a_life_is_spans_without_gaps_and_names_what_was_lost():
    (lane,) = lanes(
        EngineSnapshot(info=INFO),
        [
            arrive(0, 1.0),
            schedule(1, 2.0),
            outputs(1, 3.0),
            schedule(2, 4.0, a=2),
            outputs(2, 5.0),
            schedule(3, 6.0, a=1),
            outputs(3, 7.0, "a"),
            schedule(4, 8.0, a=1),
            outputs(4, 9.0, "a"),
            schedule(5, 10.0, preempted=("a",)),
            outputs(5, 11.0),
            schedule(6, 12.0, a=5),
            outputs(6, 13.0, "a"),
            schedule(7, 14.0, a=1),
            outputs(7, 15.0, "a", reason="length"),
        ],
    )
    assert lane.phases == [
        Phase("waiting", 1.0, 4.0, 1, 1, 0),
        Phase("prefill", 4.0, 7.0, 2, 3, 3),
        Phase("decode", 7.0, 10.0, 4, 4, 1),
        Phase("preempted", 10.0, 12.0, 5, 5, 0),
        Phase("recompute", 12.0, 13.0, 6, 6, 5),
        Phase("decode", 13.0, 15.0, 7, 7, 1),
    ]
    assert lane.outcome == "length"


def test_the_front_end_may_end_a_request_and_its_id_may_come_again():
    def end(step, time, reason):
        completion = CompletionOutput(0, "", (), finish_reason=reason)
        return RequestOutput(
            step=step, time=time, request_id="a", outputs=(completion,), finished=True
        )

    first, second = lanes(
        EngineSnapshot(info=INFO),
        [arrive(0, 1.0), end(0, 2.0, "abort"), arrive(0, 3.0), schedule(1, 4.0, a=3)],
    )
    assert [p.kind for p in first.phases] == ["waiting"]
    assert first.outcome == "abort"
    assert [(p.kind, p.end) for p in second.phases] == [("waiting", 4.0), ("prefill", 4.0)]
    assert second.outcome is None


@pytest.mark.parametrize(
    ("status", "token_ids", "kind"),
    [
        ("waiting", (), "waiting"),
        ("preempted", (5,), "preempted"),
        ("running", (), "prefill"),
        ("running", (5,), "decode"),
    ],
)
def test_who_was_live_when_the_recording_began_begins_with_it(status, token_ids, kind):
    known = RequestSnapshot(arrive(0, 1.0), status, output_token_ids=token_ids)
    (lane,) = lanes(
        EngineSnapshot(info=INFO, step=3, time=5.0, requests=(known,)), [outputs(4, 6.0)]
    )
    assert lane.phases == [Phase(kind, 5.0, 6.0, 4, 4, 0)]


def test_a_real_run_fits_together_and_with_the_frames():
    with (
        LLM(
            "s",
            execute="scripted",
            script=lambda request_id, position: 97 + position % 26,
            block_size=4,
            num_kv_blocks=14,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        ) as llm,
        record(llm) as recording,
    ):
        prompts = [f"Shared beginning, question {number}" for number in range(8)]
        llm.generate(prompts, SamplingParams(max_tokens=9), use_tqdm=False)
    made = lanes(recording.snapshot, recording.boundaries)
    requests = recording.frames.requests

    assert [lane.request_id for lane in made] == list(requests["request_id"])
    assert [lane.outcome for lane in made] == list(requests["finish_reason"])
    counted = [sum(p.kind == "preempted" for p in lane.phases) for lane in made]
    assert counted == list(requests["preemptions"])
    assert sum(counted) > 0
    assert sum(p.tokens for lane in made for p in lane.phases) == int(
        recording.frames.steps["scheduled_tokens"].sum()
    )
    for lane in made:
        assert {phase.kind for phase in lane.phases} <= set(KINDS)
        for before, after in zip(lane.phases, lane.phases[1:], strict=False):
            assert before.end == after.start
            assert before.last_step + 1 == after.first_step
