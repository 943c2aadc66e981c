"""Hard cases of prompts and lengths (I), through the whole engine."""

from __future__ import annotations

import pytest

from lmscope import SamplingParams
from lmscope.boundary import EngineCoreRequest, SchedulerOutput
from lmscope.scope.view import EngineView


@pytest.mark.parametrize("prompt", [[], "", {"prompt": ""}, {"prompt_token_ids": []}])
def test_i1_an_empty_prompt_is_refused_and_the_engine_lives(scripted, prompt):
    llm = scripted("ok")

    with pytest.raises(ValueError, match="0 tokens"):
        llm.submit(prompt)

    (output,) = llm.generate("good", use_tqdm=False)
    assert output.outputs[0].text == "ok"


def test_i1_no_prompts_at_all_are_no_outputs(scripted):
    assert scripted("ok").generate([], use_tqdm=False) == []


@pytest.mark.parametrize("length", [32, 33])
def test_i2_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(scripted, length):
    llm = scripted("ok", max_model_len=32)

    with pytest.raises(ValueError, match=rf"{length} tokens, max_model_len is 32"):
        llm.generate([[97] * length], use_tqdm=False)


def test_i2_one_token_less_gives_exactly_one_token(scripted, endless):
    llm = scripted(endless, max_model_len=32)

    (output,) = llm.generate([[97] * 31], SamplingParams(max_tokens=None), use_tqdm=False)

    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_i3_an_id_outside_the_vocabulary_is_named_with_the_limit(scripted):
    llm = scripted("ok")

    with pytest.raises(ValueError, match="5000 at position 1, the largest is 258"):
        llm.generate([[97, 5000]], use_tqdm=False)

    assert llm.generate("good", use_tqdm=False)[0].outputs[0].text == "ok"


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(None, 22), (500, 22), (22, 22), (5, 5)])
def test_i4_max_tokens_is_cut_to_the_room_that_is_left(scripted, endless, max_tokens, num_tokens):
    llm = scripted(endless, max_model_len=32)

    (output,) = llm.generate([[97] * 10], SamplingParams(max_tokens=max_tokens), use_tqdm=False)

    assert len(output.outputs[0].token_ids) == num_tokens
    assert output.outputs[0].finish_reason == "length"


def test_i4_max_tokens_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)


def test_i5_the_length_in_force_is_the_one_that_everybody_uses(scripted, endless):
    llm = scripted(endless, num_kv_blocks=17)  # 64 tokens; the script has no limit of its own

    assert llm.config.max_model_len == llm.tap.info.max_model_len == 64
    assert "64 tokens a request" in str(llm)
    with pytest.raises(ValueError, match="100 tokens, max_model_len is 64"):
        llm.submit("x" * 100)
    (output,) = llm.generate("x" * 60, SamplingParams(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_i6_a_prompt_of_special_tokens_runs_and_is_shown(scripted):
    llm = scripted("ok")
    view = None
    snapshot, subscription = llm.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)

    (output,) = llm.generate([[256, 256]], use_tqdm=False)
    subscription.close()

    assert output.prompt_token_ids == (256, 256)
    assert output.outputs[0].text == "ok"
    (request,) = view.requests.values()
    assert request.num_prompt_tokens == 2
    assert request.token_texts()[:2] == ["<END>", "<END>"]


def test_i7_one_bad_prompt_leaves_nothing_of_the_call_behind(scripted, state_of):
    llm = scripted("ok", max_model_len=32)
    arrived = []
    llm.tap.on(EngineCoreRequest, arrived.append)

    with pytest.raises(ValueError, match="max_model_len"):
        llm.generate(["good", "x" * 40], use_tqdm=False)

    assert state_of(llm).requests == ()
    assert arrived == []
    outputs = llm.generate(["again"], use_tqdm=False)
    assert [o.prompt for o in outputs] == ["again"]
    assert len(arrived) == 1


def test_t3_a_view_has_the_token_ids_that_run(scripted):
    llm = scripted("ok")
    seen = []
    llm.tap.on(EngineCoreRequest, seen.append)
    llm.tap.on(SchedulerOutput, seen.append)

    # "<END>" in a text is the special token, as ids it may stand anywhere
    for prompt in ("<END>ab", [256, 97, 98], {"prompt": "other", "prompt_token_ids": [97]}):
        seen.clear()
        stream = llm.submit(prompt)
        stream.wait(200)
        request, step = seen[0], seen[1]
        assert request.prompt_token_ids == stream.prompt_token_ids
        assert step.scheduled_new_reqs[0].prompt_token_ids == stream.prompt_token_ids
