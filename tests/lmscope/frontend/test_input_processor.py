"""Prompts and parameters become requests, or errors that say what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer

from lmscope.boundary import EngineCoreRequest, decode, encode
from lmscope.frontend.input_processor import InputProcessor
from lmscope.frontend.tokenizer import BYTE_LEVEL_ALPHABET, TokenizerAdapter
from lmscope.sampling_params import SamplingParams
from lmscope.testing import byte_tokenizer

BYTES = byte_tokenizer()
END, PAD, NOTE = 256, 257, 258


def make(tokenizer: TokenizerAdapter | None = BYTES, **settings: Any) -> InputProcessor:
    settings = {
        "vocab_size": 264,
        "max_model_len": 64,
        "eos_token_id": END,
        "max_pool_tokens": 160,
        "block_size": 16,
        **settings,
    }
    return InputProcessor(tokenizer, **settings)


def process(
    prompt: Any,
    *,
    processor: InputProcessor | None = None,
    want_text: bool = False,
    add_special_tokens: bool = True,
    **params: Any,
) -> EngineCoreRequest:
    return (processor or make()).process(
        prompt,
        SamplingParams(**params),
        request_id="7",
        want_text=want_text,
        add_special_tokens=add_special_tokens,
    )


def with_bos() -> TokenizerAdapter:
    """The byte tokenizer with a BOS, 256, that it puts in front."""
    vocab = {character: byte for byte, character in enumerate(BYTE_LEVEL_ALPHABET)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    return TokenizerAdapter.from_backend(backend, special_tokens={"bos_token": "<s>"})


# -- prompts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "Hi",
        {"prompt": "Hi"},
        {"prompt": "Hi", "prompt_token_ids": None, "multi_modal_data": None},
        [72, 105],
        (72, 105),
        np.array([72, 105]),
        [np.int64(72), 105],
        torch.tensor([72, 105]),
        {"prompt_token_ids": [72, 105]},
        {"prompt_token_ids": [72, 105], "prompt": "Hi", "cache_salt": None},
    ],
)
def test_every_form_of_a_prompt_gives_the_same_ids(prompt: Any):
    request = process(prompt)

    assert request.prompt_token_ids == (72, 105)
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)


def test_a_request_carries_what_was_asked():
    before = time.time()

    request = make().process(
        {"prompt": "Hi", "cache_salt": "x"},
        SamplingParams(seed=1, stop=["!"]),
        request_id="mine",
        priority=-3,
    )

    assert (request.request_id, request.priority, request.cache_salt) == ("mine", -3, "x")
    assert request.eos_token_id == END
    assert request.sampling_params == SamplingParams(seed=1, stop=["!"])
    assert before <= request.arrival_time <= time.time()
    assert decode(encode(request)) == request


def test_an_arrival_time_can_be_given():
    request = make().process("Hi", SamplingParams(), request_id="0", arrival_time=12.5)

    assert request.arrival_time == 12.5


def test_the_ids_run_where_a_text_comes_with_them():
    request = process({"prompt_token_ids": [97, 98], "prompt": "xy"})

    assert (request.prompt_token_ids, request.prompt) == ((97, 98), "xy")


def test_a_template_s_text_is_tokenized_without_special_tokens():
    processor = make(with_bos())

    assert process("a", processor=processor).prompt_token_ids == (256, 97, 257)
    assert process("a", processor=processor, add_special_tokens=False).prompt_token_ids == (97,)


@pytest.mark.parametrize("prompt", [[], (), "", {"prompt": ""}, {"prompt_token_ids": []}])
def test_i1_an_empty_prompt_is_refused(prompt: Any):
    with pytest.raises(ValueError, match=r"prompt has 0 tokens.*at least 1"):
        process(prompt)


def test_i1_an_empty_text_runs_where_the_tokenizer_adds_a_token():
    assert process("", processor=make(with_bos())).prompt_token_ids == (256, 257)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (32, "prompt has 32 tokens, max_model_len is 32.*to 31 tokens.*max_model_len=96"),
        (33, "prompt has 33 tokens, max_model_len is 32"),
    ],
)
def test_i2_a_prompt_without_room_for_an_output_is_refused(length: int, message: str):
    with pytest.raises(ValueError, match=message):
        process([97] * length, processor=make(max_model_len=32))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"max_model_len": 1}, r"one is for the output; load the model with max_model_len=65$"),
        (
            {"max_model_len": 1, "max_pool_tokens": 16},
            r"the output; load the model with max_model_len=65 and num_kv_blocks=6 or more$",
        ),
    ],
)
def test_i2_the_advice_can_be_followed(settings: dict[str, int], advice: str):
    with pytest.raises(ValueError, match=advice):
        process([97], processor=make(**settings))


def test_i2_one_token_less_leaves_room_for_one_output():
    request = process([97] * 31, processor=make(max_model_len=32), max_tokens=None)

    assert request.sampling_params.max_tokens == 1


def test_i3_an_id_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="token id 5000 at position 1, the largest is 263"):
        process([97, 5000])


def test_i3_a_negative_id_is_named():
    with pytest.raises(ValueError, match="token id -1 at position 2, the smallest is 0"):
        process([97, 98, -1])


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 60), (5, 5), (100, 100)])
def test_i4_without_max_tokens_all_the_room_is_used(max_tokens: int | None, expected: int):
    request = process("abcd", max_tokens=max_tokens)

    assert request.sampling_params.max_tokens == expected


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_i4_the_pool_limits_the_output_of_a_request_that_would_outgrow_it(
    max_tokens: int | None,
):
    request = process([97] * 40, processor=make(max_pool_tokens=48), max_tokens=max_tokens)

    assert request.sampling_params.max_tokens == 9


def test_i4_max_tokens_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_tokens"):
        process("a", max_tokens=0)


def test_i5_the_limit_in_force_is_the_one_that_counts():
    with pytest.raises(ValueError, match="prompt has 100 tokens, max_model_len is 64"):
        process([97] * 100)


def test_i6_a_prompt_of_special_tokens_runs():
    request = process([END, END], want_text=True)

    assert request.prompt_token_ids == (END, END)
    assert (request.prompt, request.prompt_offsets) == ("<END><END>", (5, 10))


@pytest.mark.parametrize("want_text", [False, True])
def test_i8_ids_that_only_the_model_knows_run(want_text: bool):
    request = process([97, 262], want_text=want_text)

    assert request.prompt_token_ids == (97, 262)
    assert (request.prompt, request.prompt_offsets) == (("a", (1, 1)) if want_text else (None, ()))


def test_e65_ids_that_only_the_tokenizer_knows_are_taken_as_in_vllm():
    processor = make(vocab_size=100)

    assert process([NOTE], processor=processor).prompt_token_ids == (NOTE,)
    with pytest.raises(ValueError, match="the largest is 258"):
        process([259], processor=processor)


def test_k1_a_prompt_that_never_fits_is_refused():
    processor = make(max_model_len=64, max_pool_tokens=3 * 16)

    with pytest.raises(
        ValueError, match=r"49 tokens and needs 4 blocks of 16.* 3 usable .*num_kv_blocks=5"
    ):
        process([97] * 49, processor=processor)
    assert len(process([97] * 48, processor=processor).prompt_token_ids) == 48


def test_t1_two_bos_tokens_are_warned_of(caplog: pytest.LogCaptureFixture):
    processor = make(with_bos())

    process("<s>Hi", processor=processor)
    assert "two BOS tokens (id 256)" in caplog.text

    caplog.clear()
    process("<s>Hi", processor=processor, add_special_tokens=False)
    process("Hi", processor=processor)
    assert not caplog.text


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ({"promt": "x"}, ValueError, "unknown key 'promt'; did you mean prompt"),
        ({"prompt_token_id": [1]}, ValueError, "did you mean prompt_token_ids"),
        ({"prompt": "x", 5: 1}, ValueError, "unknown key 5"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, ValueError, "multi_modal_data, which"),
        ({"prompt_embeds": [[0.5]]}, ValueError, "prompt_embeds, which lmscope cannot use yet"),
        ({}, ValueError, "neither 'prompt' nor 'prompt_token_ids'"),
        ({"cache_salt": "x"}, ValueError, "neither .*keys are .'cache_salt'"),
        ({"prompt": "x", "cache_salt": ""}, ValueError, "cache_salt is empty"),
        ({"prompt": "x", "cache_salt": 5}, TypeError, "cache_salt is 5"),
        ({"prompt": [1, 2]}, TypeError, "prompt is .1, 2.; it takes a string"),
        ({"prompt_token_ids": "ab"}, TypeError, "it takes a text, a list of token ids"),
        (5, TypeError, "prompt is 5; it takes a text"),
        (None, TypeError, "prompt is None"),
        (b"Hi", TypeError, "prompt is b'Hi'"),
        (["Hi", "you"], TypeError, "'Hi' at position 0.*several prompts"),
        ([[1, 2], [3]], TypeError, "at position 0.*several prompts"),
        (np.array([[1, 2]]), TypeError, "at position 0.*several prompts"),
        (np.array(5), TypeError, "prompt is 5; it takes a text"),
        ([1, True], TypeError, "True at position 1"),
        ([1, 2.0], TypeError, "2.0 at position 1"),
        ("a\ud800b", ValueError, r"prompt has half a surrogate pair at position 1"),
        ({"prompt": "x", "cache_salt": "ab\udc00"}, ValueError, "cache_salt .*position 2"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        process(prompt)


def test_without_a_tokenizer_only_ids_are_taken():
    processor = make(None)

    assert process([97], processor=processor, want_text=True).prompt is None
    with pytest.raises(ValueError, match="no tokenizer; give a list of token ids"):
        process("a", processor=processor)


# -- text and where each token's ends ------------------------------------------------


def test_offsets_of_a_text_count_a_character_for_its_last_token():
    request = process("a🌶 b")

    assert request.prompt == "a🌶 b"
    assert request.prompt_offsets == (1, 1, 1, 1, 2, 3, 4)


def test_tokens_that_stand_for_no_text_add_nothing():
    request = process("éa", processor=make(with_bos()))

    assert request.prompt_token_ids == (256, 0xC3, 0xA9, 97, 257)
    assert request.prompt_offsets == (0, 0, 1, 2, 2)


def test_tokens_of_a_text_that_is_normalised_end_in_the_text_as_given():
    backend = Tokenizer(models.WordLevel({"f": 0, "i": 1, "x": 2}, "x"))
    backend.normalizer = normalizers.NFKC()  # one character becomes two
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")

    request = process("ﬁx", processor=make(TokenizerAdapter.from_backend(backend)))

    assert request.prompt_token_ids == (0, 1, 2)
    assert request.prompt_offsets == (0, 1, 2)


@pytest.mark.parametrize("want_text", [False, True])
def test_ids_are_decoded_only_for_somebody_who_looks(want_text: bool):
    request = process([97, *"é".encode(), END, 98], want_text=want_text)

    assert request.prompt == ("aé<END>b" if want_text else None)
    assert request.prompt_offsets == ((1, 1, 2, 7, 8) if want_text else ())


def test_a_prompt_that_ends_inside_a_character_has_its_whole_characters():
    request = process([97, 0xF0, 0x9F], want_text=True)

    assert (request.prompt, request.prompt_offsets) == ("a", (1, 1, 1))


@pytest.mark.parametrize(
    ("token_ids", "text", "ends"),
    [
        ([97, END, 98], "ab", (1, 1, 2)),
        ([97, END, 98], "a<END>b", (1, 6, 7)),
        ([97, 98], "xyz", (0, 3)),  # they say different things
    ],
)
def test_a_text_that_comes_with_ids_is_kept(token_ids: list[int], text: str, ends: tuple[int, ...]):
    request = process({"prompt_token_ids": token_ids, "prompt": text})

    assert (request.prompt, request.prompt_offsets) == (text, ends)


def test_without_a_tokenizer_a_text_belongs_to_the_last_token():
    request = process({"prompt_token_ids": [5, 6, 7], "prompt": "abc"}, processor=make(None))

    assert (request.prompt, request.prompt_offsets) == ("abc", (0, 0, 3))


def test_a_tokenizer_without_offsets_is_asked_to_decode():
    tokenizer = TokenizerAdapter.from_transformers(ByT5Tokenizer())

    request = process("aé", processor=make(tokenizer, vocab_size=400))

    assert len(request.prompt_token_ids) == 4  # with an EOS
    assert request.prompt_offsets == (1, 1, 2, 2)


# Without "<", since "<note>" as a text is one token.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd<")


@given(st.text(CHARACTERS, min_size=1, max_size=15))
def test_text_and_ids_give_the_same_ends(text: str):
    from_text = process(text)
    from_ids = process(list(text.encode()), want_text=True)

    assert from_text.prompt_offsets == from_ids.prompt_offsets
    assert from_ids.prompt == text
    assert from_text.prompt_offsets[-1] == len(text)


# -- parameters ----------------------------------------------------------------------


@pytest.mark.parametrize("generation", [[END, NOTE], NOTE, (NOTE,)])
def test_s6_every_id_of_the_generation_config_stops(generation: int | Sequence[int]):
    request = process("hi", processor=make(generation_eos_ids=generation), stop_token_ids=[80])

    assert request.eos_token_id == END
    assert set(request.sampling_params.stop_token_ids) == {80, NOTE}


def test_s7_ignore_eos_switches_those_off_and_keeps_the_caller_s():
    request = process(
        "hi",
        processor=make(generation_eos_ids=[END, NOTE]),
        ignore_eos=True,
        stop_token_ids=[80],
    )

    assert request.sampling_params.stop_token_ids == (80,)


def test_ids_of_the_generation_config_that_cannot_be_sampled_are_left_out(
    caplog: pytest.LogCaptureFixture,
):
    request = process("hi", processor=make(generation_eos_ids=[NOTE, 9999]))

    assert request.sampling_params.stop_token_ids == (NOTE,)
    assert "9999" in caplog.text


def test_s10_a_stop_string_that_is_never_shown_is_warned_of(caplog: pytest.LogCaptureFixture):
    process("hi", stop=["<END>", "x"])
    assert "stop string '<END>' is a special token" in caplog.text
    assert "stop_token_ids=[256]" in caplog.text

    caplog.clear()
    process("hi", stop=["<END>"], skip_special_tokens=False)
    process("hi", stop=["<note>"])
    assert not caplog.text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [99999], "min_tokens": 1}, "stop_token_ids .*99999.*263"),
        ({"logit_bias": {264: 1.0}}, "logit_bias .*264.*263"),
        ({"allowed_token_ids": [5, 264]}, "allowed_token_ids .*264.*263"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": [""]}, "bad_words holds '', which has no token"),
        ({"bad_words": ["ok", " "]}, "bad_words holds ' ', which has no token"),
    ],
)
def test_p8_what_the_vocabulary_lacks_is_refused(params: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        process("hi", **params)


def test_p8_words_that_the_model_cannot_write_are_refused():
    with pytest.raises(ValueError, match=r"bad_words holds '<note>', .* 258, .* largest is 257"):
        process("hi", processor=make(vocab_size=258), bad_words=["x", "<note>"])
    assert process("hi", bad_words=["x", "<note>"]).sampling_params.bad_words == ("x", "<note>")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("asked", [21, 1000, -1])
def test_l5_more_logprobs_than_allowed_are_refused(name: str, asked: int):
    with pytest.raises(ValueError, match=f"{name} is {asked}.*max_logprobs is 20"):
        process("hi", **{name: asked})


def test_l5_the_limit_can_be_set():
    processor = make(max_logprobs=-1)

    assert process("hi", processor=processor, logprobs=-1).sampling_params.logprobs == -1
    assert process("hi", logprobs=20).sampling_params.logprobs == 20


@pytest.mark.parametrize("max_tokens", [20, None])
def test_e9_min_tokens_beyond_the_room_are_refused(max_tokens: int | None):
    processor = make(max_model_len=16)

    with pytest.raises(
        ValueError, match=r"min_tokens is 12, max_model_len is 16.* 10 tokens; use min_tokens=6 or"
    ):
        process([97] * 10, processor=processor, min_tokens=12, max_tokens=max_tokens)
    request = process([97] * 10, processor=processor, min_tokens=6, max_tokens=max_tokens)
    assert request.sampling_params.min_tokens == 6


def test_e9_the_pool_limits_the_room_too():
    processor = make(max_model_len=64, max_pool_tokens=48)

    with pytest.raises(ValueError, match="min_tokens is 10, the KV cache holds 48 tokens"):
        process([97] * 40, processor=processor, min_tokens=10)
    # The last token is never computed, so it needs no place.
    assert process([97] * 40, processor=processor, min_tokens=9)


@pytest.mark.parametrize("params", [{"stop": ["x"]}, {"bad_words": ["x"]}])
def test_words_need_a_tokenizer(params: dict[str, Any]):
    with pytest.raises(ValueError, match="no tokenizer"):
        process([97], processor=make(None), **params)


def test_parameters_of_another_type_are_refused():
    with pytest.raises(TypeError, match=r"sampling_params is .*it takes a SamplingParams"):
        make().process("hi", {"max_tokens": 3}, request_id="0")  # type: ignore[arg-type]


def test_a_priority_is_an_integer():
    with pytest.raises(TypeError, match="priority is 'high'; it takes an integer"):
        make().process("hi", SamplingParams(), request_id="0", priority="high")  # type: ignore[arg-type]


def test_the_caller_s_parameters_stay_as_they_are():
    params = SamplingParams(max_tokens=None)

    make(generation_eos_ids=[NOTE]).process("hi", params, request_id="0")

    assert params == SamplingParams(max_tokens=None)
