"""A model whose steps overlap gives what it gives one step after the other."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings, strategies as st

from lmscope import LLM, SamplingParams, record
from lmscope.boundary import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from lmscope.scope.view import differences
from lmscope.testing import byte_tokenizer

DEADLINE_S = 200


@pytest.fixture(scope="module")
def engine(tiny_model):
    """Makes an engine over the same weights: engine(is_async, **options)."""
    loaded, _ = tiny_model("llama", vocab_size=264, bos_token_id=None, eos_token_id=256)
    options = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 5, "threads": 1}
    first = LLM(loaded.path, tokenizer=byte_tokenizer(), num_kv_blocks=30, **options)
    yield lambda is_async, **more: first.like(async_scheduling=is_async, **more)
    first.close()


def make_work(seed):
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(20)]
    work = []
    for _ in range(rng.randint(2, 9)):
        prompt = shared[: rng.choice([0, 8, 13, 20])]
        prompt = prompt + [rng.randrange(256) for _ in range(rng.randint(1, 15))]
        is_greedy = rng.random() < 0.4
        params = SamplingParams(
            temperature=0.0 if is_greedy else 0.9,
            seed=rng.choice([None, 5]),
            top_p=rng.choice([1.0, 0.8]),
            presence_penalty=rng.choice([0.0, 0.7]),
            max_tokens=rng.randint(1, 25),
            min_tokens=rng.choice([0, 0, 1]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            n=1 if is_greedy else rng.choice([1, 1, 2]),
            stop=rng.choice([(), ("e", "a")]),
            stop_token_ids=rng.choice([(), tuple(range(100, 130))]),
        )
        work.append((prompt, params))
    return work


def run(llm, work):
    """All outputs, once all prompts have arrived before the first step; and the recording."""
    with llm, record(llm) as recording:
        llm.gate.pause()
        streams = [llm.submit({"prompt_token_ids": prompt}, params) for prompt, params in work]
        llm.gate.resume()
        outputs = [stream.wait(DEADLINE_S).output for stream in streams]
        while not llm._loop.is_idle():
            threading.Event().wait(0.001)
        snapshot, _ = llm.tap.follow(lambda boundary: None)
    assert differences(recording.at(), snapshot) == []
    assert len(snapshot.free_queue) == snapshot.info.num_blocks - 1
    return outputs, recording


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert len(one.outputs) == len(other.outputs)
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                (b.token_ids, b.text, b.finish_reason, b.stop_reason)
            )
            assert ranks_of(a.logprobs) == ranks_of(b.logprobs)
            assert chances_of(a.logprobs) == pytest.approx(chances_of(b.logprobs), abs=1e-4)
        assert chances_of(one.prompt_logprobs) == pytest.approx(
            chances_of(other.prompt_logprobs), abs=1e-4
        )


def ranks_of(logprobs):
    return [list(place) for place in logprobs or () if place]


def chances_of(logprobs):
    return [one.logprob for place in logprobs or () if place for one in place.values()]


def test_mixed_work_gets_the_same_with_preemption_chunks_and_hits(engine):
    num_preempted = num_chunked = num_hits = num_ended = 0
    for seed in range(12):
        options = {"num_kv_blocks": 16 + seed % 3 * 6}
        want, _ = run(engine(False, **options), make_work(seed))
        got, recording = run(engine(True, **options), make_work(seed))
        assert_same(got, want)
        for b in recording.boundaries:
            if isinstance(b, SchedulerOutput):
                num_preempted += len(b.preempted_req_ids)
                num_chunked += any(d.tokens_left for d in b.decisions)
                num_hits += sum(new.num_computed_tokens > 0 for new in b.scheduled_new_reqs)
        num_ended += sum(o.finish_reason == "stop" for each in got for o in each.outputs)
    assert num_preempted > 5
    assert num_chunked > 5
    assert num_hits > 5
    assert num_ended > 5


def test_the_same_batches_give_the_same_numbers_bit_for_bit(engine):
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=3)
    work = [([7, 8, number], params) for number in range(4)]
    want, _ = run(engine(False), work)
    got, _ = run(engine(True), work)
    assert [o.outputs for o in got] == [o.outputs for o in want]


@settings(max_examples=15)
@given(seed=st.integers(100, 10_000), num_blocks=st.integers(13, 30))
def test_random_work_gets_the_same(engine, seed, num_blocks):
    want, _ = run(engine(False, num_kv_blocks=num_blocks), make_work(seed))
    got, _ = run(engine(True, num_kv_blocks=num_blocks), make_work(seed))
    assert_same(got, want)


def test_logits_that_are_no_numbers_end_the_request_and_nobody_else(engine):
    llm = engine(True)
    module = llm.module
    weight = module.get_input_embeddings().weight
    kept = weight[200].detach().clone()
    try:
        with llm, record(llm) as recording:
            weight.data[200] = float("nan")
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            llm.gate.pause()
            bad = llm.submit({"prompt_token_ids": [5, 200]}, params)
            good = llm.submit({"prompt_token_ids": [5, 6]}, params)
            llm.gate.resume()
            assert good.wait(DEADLINE_S).num_tokens == 6
            output = bad.wait(DEADLINE_S).outputs[0]
    finally:
        weight.data[200] = kept
    assert (output.finish_reason, output.token_ids) == ("error", ())
    assert "NaN" in output.stop_reason
    # It was in the next batch already, whose answer about it nobody hears.
    told = [b for b in recording.boundaries if isinstance(b, ModelRunnerOutput) and b.errors]
    assert [b.step for b in told] == [1, 2]
    ends = [
        b.step
        for b in recording.boundaries
        if isinstance(b, EngineCoreOutputs) and any(o.finish_reason == "error" for o in b.outputs)
    ]
    assert ends == [1]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_says_whether_its_steps_overlap_and_what_attends(engine, is_async):
    with engine(is_async) as llm:
        info, plan, words = llm.tap.info, llm.plan, str(llm)

    assert (info.device, info.attention_backend, info.async_scheduling) == (
        "cpu",
        "torch",
        is_async,
    )
    assert str(plan.device) == "cpu: device='auto'"
    assert str(plan.scheduling) == (
        "the next step while one runs: async_scheduling=True"
        if is_async
        else "a step when the one before is over: async_scheduling=False"
    )
    assert f"async scheduling {'on' if is_async else 'off'}" in words
    assert "attention  torch back end" in words
