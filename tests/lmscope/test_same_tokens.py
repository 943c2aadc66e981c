"""Greedy tokens are those of transformers' generate, whatever the scheduler does meanwhile.

30 prompts run together on the demo model in float32: lengths from 1 to 600 tokens, shared
prefixes, a pool that preempts and a budget that chunks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lmscope import LLM, NothingToRun, SamplingParams, record
from lmscope.boundary import EngineCoreRequest, SchedulerOutput
from lmscope.scope.view import differences

NEAR_TIE = 1e-3
MAX_TOKENS = 20

TEXT = (
    "The keeper of the lighthouse wrote down every ship that passed, its name, its colours "
    "and the hour. On quiet days he wrote about the weather instead, and about the birds, "
    "which came back each spring to the same ledge and quarrelled over the same two places. "
)


def make_prompts(tokenizer) -> list[list[int]]:
    """Token ids; the same in every run."""
    rng = random.Random(7)
    source = tokenizer(TEXT * 12)["input_ids"]
    shared = source[:200]
    prompts = [source[:1], source[5:7], source[:15], source[:16], source[:17], source[:600]]
    for _ in range(12):
        tail = rng.randint(1, 60)
        start = rng.randrange(len(source) - tail)
        prompts.append(shared[: rng.choice([48, 100, 200])] + source[start : start + tail])
    while len(prompts) < 30:
        length = rng.randint(2, 150)
        prompts.append([rng.randrange(20, 40_000) for _ in range(length)])
    return prompts


@pytest.fixture(scope="module")
def reference(demo_model: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(demo_model)


def first_difference(model, prompt: list[int], output: list[int]) -> tuple[int, float] | None:
    """Where `output` leaves the greedy path, and how far apart the two logits are there.

    Greedy decoding is a path on which each token is the best after those before it, so one
    forward pass over prompt and output checks all of it.
    """
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = model(ids).logits[0, len(prompt) - 1 :]
    for position, token_id in enumerate(output):
        best = int(logits[position].argmax())
        if best != token_id:
            gap = float(logits[position, best] - logits[position, token_id])
            return position, gap
    return None


def test_thirty_prompts_run_together_as_transformers_runs_them_alone(reference, demo_model):
    model, tokenizer = reference
    prompts = make_prompts(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with (
        LLM(
            str(demo_model), num_kv_blocks=70, max_num_batched_tokens=192, threads=1, exact=True
        ) as llm,
        record(llm) as recording,
    ):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        # Between two calls nothing is in use, and what was recorded says the same.
        snapshot = llm.tap.follow(print)[0]
    steps = [b for b in recording.boundaries if isinstance(b, SchedulerOutput)]
    assert any(step.preempted_req_ids for step in steps), "the pool was meant to be too small"
    assert any(d.tokens_left for step in steps for d in step.decisions), "nothing was chunked"
    assert sum(o.num_cached_tokens > 0 for o in outputs) >= 5, "no prefix was shared"

    ties = []
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        assert len(token_ids) == MAX_TOKENS
        difference = first_difference(model, prompt, token_ids)
        if difference is not None:
            ties.append((len(prompt), *difference))
    assert len(ties) <= 1, ties
    assert all(gap < NEAR_TIE for *_, gap in ties), ties

    assert all(not block.owners for block in snapshot.blocks)
    assert len(snapshot.free_queue) == llm.config.num_usable_blocks
    assert differences(recording.at(), snapshot) == []


def test_a_few_prompts_against_generate_itself(reference, demo_model):
    import torch

    model, tokenizer = reference
    prompts = make_prompts(tokenizer)[1:8:2]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(str(demo_model), threads=1, exact=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
            )
        wanted = ids[0, len(prompt) :].tolist()
        got = list(output.outputs[0].token_ids)
        if got != wanted:
            difference = first_difference(model, prompt, got)
            assert difference is not None
            assert difference[1] < NEAR_TIE


def run_with_stops(demo_model, stops: bool):
    """Tokens, log probabilities and decisions of three requests that arrive before step 1."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, logprobs=3)
    decided = []
    with LLM(
        str(demo_model), num_kv_blocks=12, max_num_batched_tokens=24, block_size=8, threads=1
    ) as llm:
        llm.tap.on(SchedulerOutput, lambda b: decided.append((b.decisions, b.kv_events, b.behind)))
        llm.gate.pause()
        streams = [llm.submit(TEXT[:end], params) for end in (60, 110, 110)]
        for _ in streams:
            llm.gate.step(EngineCoreRequest)
        while stops:
            try:
                llm.gate.step()
            except NothingToRun:
                break
        llm.gate.resume()
        outputs = [stream.wait(600).output for stream in streams]
    return [(o.outputs, o.num_cached_tokens) for o in outputs], decided


def test_a_stop_at_every_boundary_changes_no_bit(demo_model):
    with_stops, without = (run_with_stops(demo_model, stops) for stops in (True, False))

    assert with_stops[1] == without[1]
    assert with_stops[0] == without[0]
    assert any(d.tokens_left for decisions, *_ in without[1] for d in decisions)


def test_log_probabilities_are_those_of_transformers(reference, demo_model):
    import torch

    model, tokenizer = reference
    prompts = [p[:120] for p in make_prompts(tokenizer)[5:13]]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    asked = [
        # Those that ask for the prompt's skip the cache; the others hit it.
        params.replace(prompt_logprobs=0) if number % 2 else params
        for number in range(len(prompts))
    ]
    with (
        LLM(
            str(demo_model), num_kv_blocks=24, max_num_batched_tokens=64, threads=1, exact=True
        ) as llm,
        record(llm) as recording,
    ):
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    steps = [b for b in recording.boundaries if isinstance(b, SchedulerOutput)]
    assert any(step.preempted_req_ids for step in steps)
    assert any(d.tokens_left for step in steps for d in step.decisions)
    assert any(output.num_cached_tokens for output in outputs)

    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        whole = prompt + token_ids
        with torch.inference_mode():
            wanted = model(torch.tensor([whole[:-1]])).logits[0].float().log_softmax(-1)
        for position, entry in enumerate(output.outputs[0].logprobs, start=len(prompt)):
            value = entry[whole[position]].logprob
            assert abs(value - float(wanted[position - 1, whole[position]])) < 1e-4
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(prompt)
            for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
                value = entry[prompt[position]].logprob
                assert abs(value - float(wanted[position - 1, prompt[position]])) < 1e-4
    assert sum(o.prompt_logprobs is not None for o in outputs) == len(prompts) // 2


def run_all(llm, prompts):
    """The tokens of each prompt, and what was decided in each step."""
    decided = []
    llm.tap.on(
        SchedulerOutput, lambda b: decided.append((b.num_scheduled_tokens, b.decisions, b.behind))
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs], decided


def test_packed_weights_give_nearly_all_of_the_tokens_and_the_same_decisions(reference, demo_model):
    prompts = make_prompts(reference[1])
    options = {"num_kv_blocks": 70, "max_num_batched_tokens": 192, "threads": 1}
    with LLM(str(demo_model), **options) as llm, llm.like(exact=True) as exact:
        if llm.plan.linears.what != "fp16-packed":
            pytest.skip(f"linears run as {llm.plan.linears}")
        assert exact.plan.linears.what == "F.linear"
        tokens, decided = run_all(llm, prompts)
        wanted, wanted_decided = run_all(exact, prompts)

    num_same = 0
    for got, exact_tokens in zip(tokens, wanted, strict=True):
        same = [a == b for a, b in zip(got, exact_tokens, strict=True)]
        # Behind the first other token all may be others.
        num_same += same.index(False) if False in same else len(same)
    assert num_same >= 0.98 * len(prompts) * MAX_TOKENS
    assert decided == wanted_decided


def said(output):
    """Tokens and log probabilities, as numbers that must be equal."""
    completion = output.outputs[0]
    return completion.token_ids, [
        {token_id: entry.logprob for token_id, entry in table.items()}
        for table in completion.logprobs
    ]


def together_and_alone(llm, prompts):
    """What each prompt says among the others, and by itself with nothing cached."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=4, ignore_eos=True)
    together = [said(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    alone = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone += [said(output) for output in llm.generate(prompt, params, use_tqdm=False)]
    return together, alone


def test_batch_invariant_prompts_say_together_what_they_say_alone_bit_for_bit(
    reference, demo_model
):
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(reference[1])[2:18]]
    options = {"num_kv_blocks": 60, "max_num_batched_tokens": 192, "threads": 1}
    with LLM(str(demo_model), **options) as llm, llm.like(batch_invariant=True) as invariant:
        assert invariant.plan.body.what == "batch-invariant forward"
        with record(invariant) as recording:
            together, alone = together_and_alone(invariant, prompts)
        default_together, default_alone = together_and_alone(llm, prompts[:5])
    steps = [b for b in recording.boundaries if isinstance(b, SchedulerOutput)]
    assert any(step.preempted_req_ids for step in steps)
    assert any(d.tokens_left for step in steps for d in step.decisions)

    assert together == alone
    assert default_together != default_alone, "the default mode notices no batch either"
