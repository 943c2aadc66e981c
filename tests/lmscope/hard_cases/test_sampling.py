"""Hard cases of log probabilities and sampling (L, P) on a tiny random model."""

from __future__ import annotations

import logging
import math
import random

import pytest

from lmscope import LLM, RequestOutputKind, SamplingParams
from lmscope.boundary import SchedulerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = "The lighthouse keeper wrote a log book. "
assert len(PROMPT) == 40


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


# -- log probabilities ------------------------------------------------------------------


def test_l1_the_chosen_token_and_the_k_most_likely(tiny):
    llm = tiny()
    hot = SamplingParams(temperature=2.0, seed=3, max_tokens=30, ignore_eos=True)

    (zero,) = run(llm, PROMPT, hot.replace(logprobs=0))
    (two,) = run(llm, PROMPT, hot.replace(logprobs=2))

    assert [len(entry) for entry in zero.outputs[0].logprobs] == [1] * 30
    sizes = [len(entry) for entry in two.outputs[0].logprobs]
    assert set(sizes) == {2, 3}
    for token, entry in zip(two.outputs[0].token_ids, two.outputs[0].logprobs, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].rank >= 1
        assert (entry[token].rank <= 2) == (len(entry) == 2)
        assert isinstance(entry[token].decoded_token, str)


def test_l2_values_are_raw_whatever_the_temperature(tiny):
    llm = tiny()
    values = []
    for temperature in (0.2, 2.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=1, logprobs=20)
        (output,) = run(llm, PROMPT, params)
        (entry,) = output.outputs[0].logprobs
        values.append({token: each.logprob for token, each in entry.items()})
    common = values[0].keys() & values[1].keys()

    assert len(common) >= 20
    assert all(values[0][token] == values[1][token] for token in common)


def test_l3_prompt_logprobs_do_not_read_the_prefix_cache(tiny):
    llm = tiny(block_size=16)
    params = GREEDY.replace(max_tokens=1, prompt_logprobs=0)

    cold, warm = (run(llm, PROMPT, params)[0] for _ in range(2))

    for output in (cold, warm):
        assert output.num_cached_tokens == 0
        assert len(output.prompt_logprobs) == 40
        assert output.prompt_logprobs[0] is None
        assert [list(entry) for entry in output.prompt_logprobs[1:]] == [
            [token] for token in PROMPT.encode()[1:]
        ]
    assert cold.prompt_logprobs == warm.prompt_logprobs
    assert run(llm, PROMPT, GREEDY)[0].num_cached_tokens == 32


def test_l4_chunks_give_one_list_with_the_same_values(tiny):
    params = GREEDY.replace(max_tokens=2, prompt_logprobs=1)
    (whole,) = run(tiny(), PROMPT, params)
    llm = tiny(max_num_batched_tokens=16, max_num_seqs=4)
    steps = []
    llm.tap.on(SchedulerOutput, steps.append)
    stream = llm.submit(PROMPT, params.replace(output_kind=RequestOutputKind.DELTA))
    deltas = list(stream)

    assert [s.num_scheduled_tokens.get("0") for s in steps[:3]] == [16, 16, 8]
    assert [d.prompt_logprobs is None for d in deltas] == [False, True]
    cut = deltas[0].prompt_logprobs
    assert len(cut) == len(whole.prompt_logprobs) == 40
    assert cut[0] is None
    for mine, theirs in zip(cut[1:], whole.prompt_logprobs[1:], strict=True):
        assert list(mine) == list(theirs)
        for token in mine:
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
            assert mine[token].rank == theirs[token].rank


def test_l5_more_than_the_limit_is_refused_with_both_numbers(tiny):
    with pytest.raises(ValueError, match=r"logprobs is 1000, max_logprobs is 20"):
        tiny().submit(PROMPT, GREEDY.replace(logprobs=1000))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_l7_prompt_logprobs_are_there_once_and_equal_for_both_samples(tiny, kind):
    llm = tiny()
    params = SamplingParams(
        n=2, max_tokens=3, prompt_logprobs=1, ignore_eos=True, seed=5, output_kind=kind
    )
    (alone,) = run(llm, PROMPT, params.replace(n=1, seed=None))

    stream = llm.submit(PROMPT, params)
    outputs = list(stream)

    given = [output.prompt_logprobs for output in outputs]
    if kind is RequestOutputKind.DELTA:  # which are to be added up
        assert len(given) == 6
        assert given[1:] == [None] * 5
        del given[1:]
    assert len(given) == {"CUMULATIVE": 6, "DELTA": 1, "FINAL_ONLY": 1}[kind.name]
    for prompt_logprobs in (*given, stream.output.prompt_logprobs):
        assert prompt_logprobs == alone.prompt_logprobs
        assert len(prompt_logprobs) == 40


def test_l6_a_certain_token_keeps_its_value(tiny):
    import torch

    llm = tiny()
    weight = llm.module.lm_head.weight
    with torch.no_grad():
        weight.mul_(1e4)
    (output,) = run(llm, PROMPT, GREEDY.replace(logprobs=1))

    entries = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    chosen = [entry[token] for token, entry in entries]
    assert [each.logprob for each in chosen] == [0.0] * 12  # and not None, or nothing at all
    assert [each.rank for each in chosen] == [1] * 12
    assert output.outputs[0].cumulative_logprob == 0.0


# -- sampling ---------------------------------------------------------------------------


def test_p1_a_seeded_request_gives_the_same_alone_and_as_the_middle_one_of_three(tiny):
    llm = tiny()
    seeded = SamplingParams(temperature=1.5, seed=7, max_tokens=16, ignore_eos=True)
    other = SamplingParams(temperature=1.5, max_tokens=16, ignore_eos=True)

    (alone,) = run(llm, PROMPT, seeded)
    crowd = run(llm, ["Another", PROMPT, "A third one"], [other, seeded, other])
    reordered = run(llm, [PROMPT, "x"], [seeded, other])

    assert tokens_of([crowd[1]]) == tokens_of([alone])
    assert tokens_of([reordered[0]]) == tokens_of([alone])
    (unseeded,) = run(llm, PROMPT, other)
    assert tokens_of([unseeded]) != tokens_of([alone])


def test_p2_sample_i_is_that_of_a_single_request_with_seed_plus_i(tiny):
    llm = tiny()
    seven = SamplingParams(temperature=1.5, seed=7, max_tokens=16, ignore_eos=True)

    (both,) = run(llm, PROMPT, seven.replace(n=2))
    singles = run(llm, [PROMPT] * 2, [seven, seven.replace(seed=8)])

    assert [part.index for part in both.outputs] == [0, 1]
    assert [part.token_ids for part in both.outputs] == tokens_of(singles)
    assert both.outputs[0].token_ids != both.outputs[1].token_ids
    (unseeded,) = run(llm, PROMPT, seven.replace(n=2, seed=None))
    assert unseeded.outputs[0].token_ids != unseeded.outputs[1].token_ids


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_p3_samples_of_different_lengths_are_all_delivered(scripted, kind):
    lengths = {"0": 1, "1": 5, "2": 9}

    def script(request_id, position):
        return 97 + position if position < lengths[request_id[0]] else None

    llm = scripted(script)
    stream = llm.submit("x", SamplingParams(n=3, max_tokens=50, output_kind=kind))
    outputs = list(stream)

    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = ["a", "abcde", "abcdefghi"]
    assert [(part.index, part.text) for part in stream.outputs] == list(enumerate(texts))
    assert {part.finish_reason for part in stream.outputs} == {"stop"}
    if kind is RequestOutputKind.FINAL_ONLY:
        assert [output.outputs for output in outputs] == [stream.outputs]
        return
    # One more than its length: each ends with a token of its own.
    assert [output.outputs[0].index for output in outputs] == [
        *[0, 1, 2] * 2, *[1, 2] * 4, *[2] * 4
    ]  # fmt: skip
    ends = [part for output in outputs for part in output.outputs if part.finished()]
    assert [part.index for part in ends] == [0, 1, 2]
    for i, text in enumerate(texts):
        parts = [output.outputs[0].text for output in outputs if output.outputs[0].index == i]
        assert text == ("".join(parts) if kind is RequestOutputKind.DELTA else parts[-1])


def test_p4_greedy_sampling_has_one_continuation():
    with pytest.raises(ValueError, match=r"n is 2 with temperature 0"):
        SamplingParams(temperature=0, n=2)


def test_p5_a_tiny_temperature_gives_numbers(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(temperature=1e-4, seed=1, max_tokens=12, logprobs=1)
    assert "raised" in caplog.text
    (output,) = run(tiny(), PROMPT, params.replace(ignore_eos=True))

    assert len(output.outputs[0].token_ids) == 12
    for entry in output.outputs[0].logprobs:
        assert all(math.isfinite(each.logprob) for each in entry.values())


PROMPTS = [
    PROMPT,
    PROMPT[:33] + "other words",
    "a",
    "A short one",
    PROMPT[:16],
    "Something else, and long enough to be cut into pieces by a small budget",
    PROMPT,
    PROMPT[:17],
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 8},
        {"block_size": 4, "num_kv_blocks": 24},
        {"block_size": 4, "num_kv_blocks": 30, "max_num_batched_tokens": 24, "max_num_seqs": 5},
        {"enable_prefix_caching": False, "block_size": 4, "num_kv_blocks": 40},
        {"long_prefill_token_threshold": 5, "scheduling_policy": "priority"},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_p6_greedy_tokens_do_not_depend_on_the_batch(tiny, options):
    llm = tiny()
    one_by_one = [tokens_of(run(llm, prompt, GREEDY))[0] for prompt in PROMPTS]
    crowd = tiny(**options)
    steps = []
    crowd.tap.on(SchedulerOutput, steps.append)

    together = tokens_of(run(crowd, PROMPTS, GREEDY))

    assert together == one_by_one
    if options.get("num_kv_blocks", 64) < 64:
        assert any(step.preempted_req_ids for step in steps)
    assert len(set(one_by_one)) >= 7


def test_p8_an_id_that_does_not_exist_is_refused_and_the_engine_lives(tiny):
    llm = tiny()
    for params in (
        {"stop_token_ids": [99_999], "min_tokens": 1},
        {"logit_bias": {99_999: 1.0}},
        {"allowed_token_ids": [99_999]},
        {"allowed_token_ids": []},
        {"bad_words": [""]},
    ):
        with pytest.raises(ValueError, match=r"99999|empty|no token"):
            llm.submit(PROMPT, GREEDY.replace(**params))

    assert len(tokens_of(run(llm, PROMPT, GREEDY))[0]) == 12


def test_p8_words_are_kept_out_by_the_tokens_of_the_engines_own_tokenizer(tiny):
    llm = tiny()
    (free,) = run(llm, PROMPT, GREEDY)
    word = next(chr(t) for t in free.outputs[0].token_ids if t < 128)

    (barred,) = run(llm, PROMPT, GREEDY.replace(bad_words=[word]))

    assert ord(word) not in barred.outputs[0].token_ids


def test_p9_an_engine_leaves_the_users_random_states_alone(tiny_folder):
    import numpy as np
    import torch

    from lmscope.testing import byte_tokenizer

    def states():
        return (
            random.getstate(),
            [str(part) for part in np.random.get_state()],
            torch.get_rng_state().tolist(),
        )

    before = states()
    with LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
        hot = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
        first = tokens_of(run(llm, [PROMPT, "b"], [hot, hot.replace(seed=3)]))
        assert "seed 0" in str(llm)
    assert states() == before

    with LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
        again = tokens_of(run(llm, [PROMPT, "b"], [hot, hot.replace(seed=3)]))
    assert first == again  # the engine's own seed is fixed


def test_p11_top_k_of_one_is_greedy(tiny):
    llm = tiny()
    rng = random.Random(1)
    prompts = ["".join(rng.choices("abcdefgh ", k=12)) for _ in range(20)]

    greedy = run(llm, prompts, GREEDY)
    drawn = run(llm, prompts, SamplingParams(top_k=1, max_tokens=12, ignore_eos=True))

    assert tokens_of(greedy) == tokens_of(drawn)


# -- prompts and the cache, where a model is needed -------------------------------------


def test_i8_an_id_that_only_the_model_knows_runs_and_has_no_text(tiny):
    llm = tiny()

    (output,) = run(llm, [[97, 262]], GREEDY.replace(logit_bias={263: 1e4}, max_tokens=3))

    assert output.prompt_token_ids == (97, 262)
    assert output.outputs[0].token_ids == (263, 263, 263)
    assert output.outputs[0].text == ""
    with pytest.raises(ValueError, match="264 at position 0, the largest is 263"):
        llm.submit([264])


def test_c9_after_an_edit_of_the_weights_a_reset_gives_what_a_fresh_engine_gives(tiny):
    import torch

    llm = tiny()
    before = tokens_of(run(llm, PROMPT, GREEDY))
    weight = llm.module.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight.mul_(-1.0)
    try:
        assert llm.reset_prefix_cache()
        (edited,) = run(llm, PROMPT, GREEDY)
        assert edited.num_cached_tokens == 0
        (fresh,) = run(tiny(), PROMPT, GREEDY)
        assert tokens_of([edited]) == tokens_of([fresh]) != before
    finally:
        with torch.no_grad():
            weight.mul_(-1.0)
