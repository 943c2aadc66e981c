"""ModelRunner, driven with hand-made SchedulerOutputs, against transformers' own forward."""

from __future__ import annotations

import math

import pytest
import torch

from lmscope import SamplingParams
from lmscope.execute.model_runner import ModelRunner

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
PROMPT_A = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11]
PROMPT_B = [*PROMPT_A[:17], 60, 61, 62, 63]
PROMPT_C = [77]


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers_at_every_position(tiny_model, driver, kind, block_size):
    loaded, reference = tiny_model(kind)
    run = driver(loaded, block_size)
    num_shared_blocks = 16 // block_size
    run.add("a", PROMPT_A)
    run.step({"a": 6})  # a chunk alone
    run.add("c", PROMPT_C)
    run.step({"a": 11, "c": 1})  # a chunk that goes on, and a whole prompt
    run.add("b", PROMPT_B, shares="a", num_shared_blocks=num_shared_blocks)
    run.step({"c": 1, "a": 2, "b": 3})  # decode, the end of a prompt, a chunk after a hit
    for _ in range(6):
        run.step(["b", "a", "c"])
    run.preempt("a")
    run.step(["b", "c"])
    for _ in range(3):
        run.step(["b", "c", "a"])  # a computes everything again, beside decodes

    for request_id in "abc":
        assert run.largest_difference(request_id, reference) < TOLERANCE
    assert run.tokens["b"][:17] == PROMPT_A[:17]
    assert min(run.logits["b"]) == 16  # the hit was not computed again
    assert len(run.tokens["c"]) == 13


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_what_is_in_a_cached_block_decides_the_output(tiny_model, driver, kind):
    """The companion of the test above: without it a model that ignores its cache would pass."""
    loaded, reference = tiny_model(kind)
    run = driver(loaded, 4)
    run.add("a", PROMPT_A)
    run.step(["a"])
    block_id = run.blocks["a"][1]
    for layer in range(loaded.num_layers):
        run.runner.kv_cache.value[layer][block_id].add_(1.0)
    run.add("b", PROMPT_B, shares="a", num_shared_blocks=4)
    run.step(["a", "b"])

    assert run.largest_difference("b", reference) > 1.0
    assert min(run.logits["b"]) == 16


def test_a_request_may_read_what_another_stores_in_the_same_step(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded, 4)
    run.add("a", PROMPT_A)
    scheduled = {"a": len(PROMPT_A)}
    plan = run.schedule(scheduled)
    run.add("b", PROMPT_B, shares="a", num_shared_blocks=4)
    # In one step: the scheduler counts a block as cached when it hands it out.
    both = run.schedule({"b": len(PROMPT_B) - 16})
    run.run(
        type(plan)(
            step=1,
            scheduled_new_reqs=both.scheduled_new_reqs + plan.scheduled_new_reqs,
            num_scheduled_tokens={**both.num_scheduled_tokens, **plan.num_scheduled_tokens},
            total_num_scheduled_tokens=len(PROMPT_A) + len(PROMPT_B) - 16,
        )
    )

    assert run.largest_difference("b", reference) < TOLERANCE
    assert run.largest_difference("a", reference) < TOLERANCE


def test_a_batch_of_very_different_lengths_decodes_right(tiny_model, driver):
    loaded, reference = tiny_model(max_position_embeddings=600)
    run = driver(loaded, 16)
    for index, length in enumerate([1, 3, 250, 4, 120, 2]):
        run.add(str(index), [(7 * i + index) % 95 + 1 for i in range(length)])
        run.step([str(index)])
    for _ in range(4):
        run.step([str(index) for index in range(6)])

    for index in range(6):
        assert run.largest_difference(str(index), reference) < TOLERANCE


def test_greedy_tokens_are_the_largest_logits(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    for _ in range(5):
        run.step(["a"])

    for position in range(len(PROMPT_A) - 1, len(run.tokens["a"]) - 1):
        assert run.logits["a"][position].argmax().item() == run.tokens["a"][position + 1]


def test_a_partial_prefill_samples_nothing(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.add("c", PROMPT_C)

    output = run.step({"a": 5, "c": 1})

    assert output.req_ids == ("a", "c")
    assert output.sampled_token_ids[0] == ()
    assert len(output.sampled_token_ids[1]) == 1
    assert output.logprobs is None


def test_a_step_of_partial_prefills_only_is_a_step(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)

    assert run.step({"a": 5}).sampled_token_ids == ((),)


def test_only_sampled_rows_go_through_the_head(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.add("b", PROMPT_B)
    run.add("c", PROMPT_C)
    seen = []
    with loaded.module.lm_head.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape)
    ):
        run.step({"a": 19, "b": 4, "c": 1})

    assert seen[0] == (1, 2, 48)


def test_an_empty_step_answers_at_once_and_still_forgets_the_finished(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.step(["a"])

    output = run.step({}, finished=["a"])

    assert output.req_ids == ()
    assert output.step == 2
    assert run.runner.requests == {}
    assert run.runner.input_batch.num_reqs == 0


def test_the_output_carries_the_step(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)

    first, second = run.step(["a"]), run.step(["a"])

    assert (first.step, second.step) == (1, 2)
    assert 0 < first.time <= second.time


def test_an_id_may_finish_and_come_again_in_one_step(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.step(["a"])
    run.add("a", PROMPT_C)
    run.step(["a"], finished=["a"])
    run.step(["a"])

    assert run.tokens["a"][0] == 77
    assert len(run.tokens["a"]) == 3
    assert run.largest_difference("a", reference) < TOLERANCE


def test_a_checked_batch_with_a_block_beyond_the_pool_is_an_error(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded)
    run.runner = ModelRunner(loaded, 80, 4, 16, 256, check_batches=True)
    run.add("c", PROMPT_C)
    run.step(["c"])
    assert run.largest_difference("c", reference) < TOLERANCE  # nothing is wrong with this one
    run.add("a", PROMPT_A)
    run.free.insert(2, 80)

    with pytest.raises(ValueError, match=r"request 1 .* block 80 at place 2.*blocks 0 to 79"):
        run.step({"c": 1, "a": 12})


def test_two_execute_models_in_a_row_are_an_error(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.runner.execute_model(run.schedule({"a": 19}))

    with pytest.raises(RuntimeError, match="step 1 waits for sample_tokens"):
        run.runner.execute_model(run.schedule({"a": 1}))


def test_sample_tokens_without_execute_model_is_an_error(tiny_model, driver):
    loaded, _ = tiny_model()

    with pytest.raises(RuntimeError, match="needs an execute_model"):
        driver(loaded).runner.sample_tokens()


def test_outputs_that_the_scheduler_took_back_are_dropped(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    for _ in range(4):
        run.step(["a"])
    del run.tokens["a"][-2:]
    run.computed["a"] = len(run.tokens["a"]) - 1
    run.step(["a"])

    assert run.largest_difference("a", reference) < TOLERANCE
    assert run.runner.requests["a"].output_token_ids == run.tokens["a"][19:]


def test_tokens_given_from_outside_replace_those_held(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.step(["a"])
    run.step(["a"])
    run.preempt("a")
    run.tokens["a"][-1] = (run.tokens["a"][-1] + 1) % 97
    run.step(["a"])

    assert run.largest_difference("a", reference) < TOLERANCE


def test_tokens_given_from_outside_are_the_ones_that_penalties_count(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A, GREEDY.replace(frequency_penalty=2.0))
    for _ in range(3):
        run.step(["a"])
    run.preempt("a")
    # As many, and those at the end stay, so that the list looks as it was.
    run.tokens["a"][-3] = 50
    run.step(["a"])

    row = run.runner.requests["a"].sampling
    token_ids, _ = run.runner.sampler._adjustments[row].entries()
    assert set(token_ids.tolist()) == {50, *run.tokens["a"][-3:-1]}


@pytest.mark.parametrize("chunks", [[19], [6, 13], [1] * 19, [18, 1]])
def test_prompt_logprobs_equal_transformers_however_the_prompt_is_cut(tiny_model, driver, chunks):
    loaded, reference = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A, GREEDY.replace(prompt_logprobs=3))
    run.add("c", PROMPT_C)
    run.step(["c"])
    delivered = [run.step({"c": 1, "a": num_tokens}).prompt_logprobs_dict for num_tokens in chunks]
    after = run.step(["a"]).prompt_logprobs_dict

    assert delivered[:-1] == [{}] * (len(chunks) - 1)
    assert after == {}
    result = delivered[-1]["a"]
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT_A])).logits[0].log_softmax(-1)
    assert len(result.logprobs) == 18
    for position, token_id in enumerate(PROMPT_A[1:]):
        row = expected[position]
        assert result.logprob_token_ids[position][0] == token_id
        assert result.logprobs[position][0] == pytest.approx(row[token_id].item(), abs=1e-4)
        assert list(result.logprob_token_ids[position][1:]) == row.topk(3).indices.tolist()
        assert result.sampled_token_ranks[position] == (row >= row[token_id]).sum().item()


def test_prompt_logprobs_survive_a_preemption_in_the_prompt(tiny_model, driver):
    loaded, _ = tiny_model()
    params = GREEDY.replace(prompt_logprobs=1)
    run = driver(loaded)
    run.add("a", PROMPT_A, params)
    run.step({"a": 9})
    run.preempt("a")
    run.add("c", PROMPT_C)
    run.step(["c"])
    run.step({"a": 7, "c": 1})
    cut = run.step({"a": 12, "c": 1}).prompt_logprobs_dict["a"]
    whole_run = driver(loaded)
    whole_run.add("a", PROMPT_A, params)
    whole = whole_run.step(["a"]).prompt_logprobs_dict["a"]

    assert cut.logprob_token_ids == whole.logprob_token_ids
    assert len(cut.logprobs) == 18


def test_a_prompt_of_one_token_has_prompt_logprobs_without_rows(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("c", PROMPT_C, GREEDY.replace(prompt_logprobs=2))

    assert run.step(["c"]).prompt_logprobs_dict["c"].logprobs == ()


def test_logprobs_of_those_who_asked(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A, GREEDY.replace(logprobs=2))
    run.add("c", PROMPT_C)

    output = run.step(["a", "c"])

    assert output.logprobs is not None
    assert output.logprobs[1] is None
    expected = run.logits["a"][18].log_softmax(-1).topk(2)
    assert output.logprobs[0].logprobs[0][1:] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert output.logprobs[0].sampled_token_ranks == (1,)


def test_a_seeded_request_draws_the_same_alone_and_beside_others(tiny_model, driver):
    loaded, _ = tiny_model()
    params = SamplingParams(temperature=3.0, seed=11, max_tokens=64)
    alone = driver(loaded)
    alone.add("a", PROMPT_A, params)
    for _ in range(8):
        alone.step(["a"])
    crowd = driver(loaded, 2)
    crowd.add("b", PROMPT_B, SamplingParams(temperature=1.0, max_tokens=64))
    crowd.add("a", PROMPT_A, params)
    crowd.step({"b": 2, "a": 3})
    crowd.step({"b": 5, "a": 16})
    crowd.preempt("a")
    crowd.step(["b"])
    for _ in range(7):
        crowd.step(["a", "b"])

    assert crowd.tokens["a"] == alone.tokens["a"]
    greedy = driver(loaded)
    greedy.add("a", PROMPT_A)
    for _ in range(8):
        greedy.step(["a"])
    assert greedy.tokens["a"] != alone.tokens["a"]


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engine(
    tiny_model, driver
):
    loaded, _ = tiny_model()

    def tokens():
        run = driver(loaded)
        for request_id in ("a", "b"):
            run.add(request_id, PROMPT_C, SamplingParams(temperature=9.0, max_tokens=64))
        for _ in range(6):
            run.step(["a", "b"])
        return run.tokens

    first, second = tokens(), tokens()

    assert first == second
    assert first["a"] != first["b"]


def test_min_tokens_bars_every_id_that_would_end_the_text(tiny_model, driver):
    loaded, _ = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.step(["a"])
    best = run.tokens["a"][-1]
    barred = driver(loaded)
    barred.add("a", PROMPT_A, GREEDY.replace(min_tokens=1, stop_token_ids=[best]))
    barred.step(["a"])

    assert barred.tokens["a"][-1] == run.logits["a"][18].topk(2).indices[1].item()
    assert run.runner.requests["a"].sampling.stop_ids == {2}
    assert barred.runner.requests["a"].sampling.stop_ids == {2, best}


class WordTokenizer:
    def encode_bad_words(self, words):
        return tuple({"no": (10,), "far away": (20, 21)}[word] for word in words)


def test_bad_words_are_barred_as_the_tokenizer_writes_them(tiny_model):
    import dataclasses

    loaded, _ = tiny_model()
    runner = ModelRunner(dataclasses.replace(loaded, tokenizer=WordTokenizer()), 8, 4, 2, 16)
    from lmscope.boundary import NewRequestData, SchedulerOutput

    params = GREEDY.replace(bad_words=["no", "far away"])
    runner.execute_model(
        SchedulerOutput(
            step=1,
            scheduled_new_reqs=(NewRequestData("a", (5,), params, ((1,),), 0),),
            num_scheduled_tokens={"a": 1},
            total_num_scheduled_tokens=1,
        )
    )

    assert runner.requests["a"].sampling.bad_words_ids == ((10,), (20, 21))


def test_logits_that_are_not_numbers_end_that_request_only(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.add("b", PROMPT_B)
    run.step(["a", "b"])
    for layer in range(loaded.num_layers):
        run.runner.kv_cache.value[layer][run.blocks["a"][0]] = math.nan

    output = run.step(["b", "a"])

    assert list(output.errors) == ["a"]
    assert "NaN" in output.errors["a"]
    assert run.largest_difference("b", reference) < TOLERANCE


def test_stale_content_of_a_block_does_not_reach_its_next_owner(tiny_model, driver):
    loaded, reference = tiny_model()
    run = driver(loaded, 16)
    for cache in (*run.runner.kv_cache.key, *run.runner.kv_cache.value):
        cache[1:] = math.nan
    run.add("a", PROMPT_A)
    run.add("c", PROMPT_C)
    for _ in range(3):
        run.step(["a", "c"])

    for request_id in "ac":
        assert run.largest_difference(request_id, reference) < TOLERANCE


def test_the_demo_model_writes_what_transformers_writes(demo_model, driver):
    """Eight prompts together: shared beginnings, chunks, a preemption; up to near ties."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lmscope.models.loader import load_model

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    reference = AutoModelForCausalLM.from_pretrained(demo_model).eval()
    preamble = "The following is a short list of facts about the world. "
    prompts = [
        tokenizer.encode(text)
        for text in (
            preamble + "The capital of France is",
            preamble + "Water boils at",
            "Once upon a time",
            "def fibonacci(n):\n",
            "1, 2, 3, 4,",
            "The",
            "Photosynthesis is the process by which",
            preamble * 4 + "The largest planet is",
        )
    ]
    num_output_tokens = 10
    run = driver(load_model(demo_model, show_progress=False), 8, num_blocks=200)
    ids = [str(index) for index in range(len(prompts))]
    run.add("0", prompts[0])
    run.step(["0"])
    shared = sum(a == b for a, b in zip(prompts[0], prompts[1], strict=False)) // 8
    run.add("1", prompts[1], shares="0", num_shared_blocks=shared)
    for index in range(2, 8):
        run.add(str(index), prompts[index])
    run.step({**dict.fromkeys(ids[2:], 1), "0": 1, "1": 3})
    run.step({**{i: len(run.tokens[i]) - run.computed[i] for i in ids[:7]}, "7": 20})
    run.preempt("2")
    while unfinished := [
        i for i in ids if len(run.tokens[i]) < len(prompts[int(i)]) + num_output_tokens
    ]:
        run.step(unfinished)

    assert shared > 0
    num_ties = 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=num_output_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=2,
        )[0].tolist()  # fmt: skip
        if run.tokens[request_id] != expected:
            assert_near_tie(reference, run.tokens[request_id], expected)
            num_ties += 1
    assert num_ties <= 1
    assert "Paris" in tokenizer.decode(run.tokens["0"])


def assert_near_tie(reference, ours, theirs):
    """Where two texts part, the model must have been of two minds."""
    position = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.inference_mode():
        logits = reference(torch.tensor([theirs[:position]])).logits[0, -1]
    assert abs(logits[ours[position]] - logits[theirs[position]]) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_when_it_is_asked_for(tiny_model, driver, dtype):
    from transformers import AutoModelForCausalLM

    from lmscope.models.loader import load_model

    folder = tiny_model()[0].path
    loaded = load_model(folder, dtype=dtype, show_progress=False)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=loaded.dtype).eval()
    run = driver(loaded)
    run.add("a", PROMPT_A)
    run.add("c", PROMPT_C)
    run.step({"a": 7, "c": 1})
    for _ in range(3):
        run.step(["a", "c"])

    scale = max(row.abs().max().item() for row in run.logits["a"].values())
    for request_id in "ac":
        assert run.largest_difference(request_id, reference) < 0.2 * scale
    assert run.runner.kv_cache.key[0].dtype == loaded.dtype
