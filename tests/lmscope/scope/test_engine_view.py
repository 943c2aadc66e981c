"""The fold of real runs on the scripted model: equal to the engine's own state."""

from __future__ import annotations

import random

import pytest

from lmscope import LLM, SamplingParams
from lmscope.boundary import EngineCoreOutputs, SchedulerOutput
from lmscope.scope.recording import record
from lmscope.scope.view import EngineView, differences


def script(request_id, position):
    return 97 + (position * 7 + len(request_id) * 3 + sum(map(ord, request_id))) % 26


def make_llm(**options):
    defaults = {
        "block_size": 4,
        "num_kv_blocks": 24,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "max_model_len": 64,
    }
    return LLM("scripted", execute="scripted", script=script, **{**defaults, **options})


def truth(llm):
    """The engine's own state now; on the engine's thread, between two structs."""
    snapshot, subscription = llm.tap.follow(lambda boundary: None)
    subscription.close()
    return snapshot


def prompts(count, seed):
    rng = random.Random(seed)
    shared = "You are a patient tutor. "
    return [
        shared[: 4 * rng.randrange(7)] + "".join(rng.choices("abc", k=rng.randrange(1, 12)))
        for _ in range(count)
    ]


OPTIONS = [
    {},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority"},
    {"block_size": 1, "num_kv_blocks": 90},
    {"block_size": 16, "num_kv_blocks": 9},
    {"long_prefill_token_threshold": 5},
    {"max_num_batched_tokens": 7},
    {"num_kv_blocks": 200},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "default")
def test_the_fold_equals_the_engine_after_every_step(options):
    problems, compared = [], []

    def fold(boundary):
        view.apply(boundary)
        if isinstance(boundary, (SchedulerOutput, EngineCoreOutputs)):
            compared.append(boundary)
            problems.extend(f"step {boundary.step}: {d}" for d in differences(view, truth(llm)))
        if isinstance(boundary, SchedulerOutput):
            live = {*view.running, *view.waiting}
            missing = live - view.decisions.keys()
            problems.extend(f"step {boundary.step}: no decision for {i}" for i in missing)

    with make_llm(**options) as llm:
        snapshot, subscription = llm.tap.follow(fold, strict=True)
        view = EngineView(snapshot)
        streams = [
            llm.submit(
                prompt,
                SamplingParams(max_tokens=4 + n % 17, stop=["xe"] if n % 3 else []),
                priority=n % 3,
            )
            for n, prompt in enumerate(prompts(24, seed=1))
        ]
        for stream in streams[::5]:
            stream.abort()
        for stream in streams:
            stream.wait(200)
        final = truth(llm)
        subscription.close()

    assert problems == []
    assert len(compared) > 20
    assert view.num_used == 0
    assert {r.status for r in view.requests.values()} == {"finished"}
    assert final.requests == ()
    for stream in streams:
        if stream.request_id not in view.requests:  # aborted before it reached the engine
            assert stream in streams[::5]
            continue
        request = view.requests[stream.request_id]
        assert tuple(request.output_token_ids) == stream.token_ids
        assert request.text == stream.text
        assert request.finish_reason == stream.output.outputs[0].finish_reason
        assert "".join(request.token_texts()) == stream.output.prompt + stream.text


def test_a_recording_of_an_engine_folds_to_the_engine(tmp_path):
    with make_llm() as llm:
        llm.generate(prompts(4, seed=3), SamplingParams(max_tokens=8), use_tqdm=False)
        with record(llm) as recording:
            llm.generate(prompts(20, seed=4), SamplingParams(max_tokens=20), use_tqdm=False)
            # the engine says in one more step that the last requests are over
            llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
        final = truth(llm)

    assert recording.steps[0] > 0
    view = recording.at()
    found = [d for d in differences(view, final) if not d.startswith("requests")]
    assert found == []
    assert view.totals.preemptions > 0
    assert view.totals.hits > 0
    # cached tokens are counted once for each request, at its admission
    assert view.totals.cached_tokens == sum(r.num_cached_tokens for r in view.requests.values())
    recording.save(tmp_path / "run.lmscope")
    assert len(recording.frames.requests) == 21
