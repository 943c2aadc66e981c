"""SamplingParams refuses every bad value at construction and says what is allowed.

Names with p, l, s and a number are hard cases from bug reports.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from lmscope.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    check_for_model,
    with_generation_config,
)

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")


# -- values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("n", 0, "at least 1"),
        ("n", -3, "at least 1"),
        ("n", 10**9, "at most 16384"),
        ("presence_penalty", 2.1, r"in \[-2, 2\]"),
        ("presence_penalty", -2.1, r"in \[-2, 2\]"),
        ("frequency_penalty", 2.1, r"in \[-2, 2\]"),
        ("frequency_penalty", -2.1, r"in \[-2, 2\]"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("temperature", -0.1, "at least 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", -0.5, r"in \(0, 1\]"),
        ("top_p", 1.1, r"in \(0, 1\]"),
        ("top_k", -2, "at least -1; 0 and -1 are off"),
        ("min_p", -0.1, r"in \[0, 1\]"),
        ("min_p", 1.1, r"in \[0, 1\]"),
        ("seed", -(2**63) - 1, "at least -9223372036854775808"),
        ("seed", 2**64, "at most 18446744073709551615"),
        ("max_tokens", 0, "at least 1, or None"),
        ("max_tokens", -1, "at least 1, or None"),
        ("max_tokens", 10**30, "at most 9223372036854775807, or None"),
        ("min_tokens", -1, "at least 0"),
        ("logprobs", -2, "at least -1; -1 is the whole vocabulary"),
        ("prompt_logprobs", -2, "at least -1; -1 is the whole vocabulary"),
        ("output_kind", "sometimes", "one of CUMULATIVE, DELTA, FINAL_ONLY"),
    ],
)
def test_p7_a_value_out_of_range_names_itself_and_the_limit(name: str, value: object, limit: str):
    with pytest.raises(ValueError, match=f"^{name} is .*{limit}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=str)
def test_a_number_must_be_one(name: str, value: float):
    with pytest.raises(ValueError, match=f"^{name} is .*; it must be "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["0.5", None, True, [0.5], 1j], ids=repr)
def test_a_number_of_the_wrong_type(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} is .*; it takes a number$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 2.0, "2", math.nan, [1]], ids=repr)
def test_an_integer_of_the_wrong_type(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} is .*; it takes an integer$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "max_tokens", "min_tokens"])
def test_true_is_no_integer(name: str):
    with pytest.raises(TypeError, match=f"^{name} is True; it takes an integer$"):
        SamplingParams(**{name: True})


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens"])
def test_none_is_no_integer_where_it_means_nothing(name: str):
    with pytest.raises(TypeError, match=f"^{name} is None; it takes an integer$"):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes", [True]], ids=repr)
def test_a_flag_of_the_wrong_type(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} is .*; it takes True"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [*LISTS, "stop"])
@pytest.mark.parametrize("value", [5, {"a": 1}, b"ab", 1.5], ids=repr)
def test_a_list_of_the_wrong_type(name: str, value: object):
    with pytest.raises(TypeError, match=f"^{name} is .*; it takes a list$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize(
    "item",
    ["a", 1.0, True, None, -1, 2**63, pytest.param(10**5000, id="huge")],
)
def test_a_list_of_token_ids_with_something_else_in_it(name: str, item: object):
    with pytest.raises(ValueError, match=f"^{name} holds .*; it takes token ids"):
        SamplingParams(**{name: [3, item]})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_a_list_of_strings_with_something_else_in_it(name: str):
    with pytest.raises(ValueError, match=f"^{name} holds 3; it takes strings$"):
        SamplingParams(**{name: ["a", 3]})
    with pytest.raises(ValueError, match=f"^{name} holds .*half a surrogate pair at character 1"):
        SamplingParams(**{name: ["a\ud800"]})


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_s9_an_empty_stop_string(stop: object):
    with pytest.raises(ValueError, match=r"^stop holds an empty string"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        ([1, 2], TypeError, "logit_bias is .*; it takes a mapping"),
        ({"a": 1.0}, ValueError, "logit_bias holds 'a'; it takes token ids"),
        ({-1: 1.0}, ValueError, "logit_bias holds -1; it takes token ids"),
        ({1.5: 1.0}, ValueError, "logit_bias holds 1.5; it takes token ids"),
        ({4: "much"}, TypeError, r"logit_bias\[4\] is 'much'; it takes a number"),
        ({4: math.nan}, ValueError, r"logit_bias\[4\] is nan; it must be finite"),
        ({4: -math.inf}, ValueError, r"logit_bias\[4\] is -inf; it must be finite"),
    ],
    ids=str,
)
def test_a_bad_bias(bias: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        SamplingParams(logit_bias=bias)


def test_a_wrong_output_kind():
    with pytest.raises(TypeError, match="output_kind is 1; it takes a RequestOutputKind"):
        SamplingParams(output_kind=1)


def test_errors_do_not_repeat_a_value_of_any_length():
    with pytest.raises(TypeError) as error:
        SamplingParams(temperature="x" * 100_000)

    assert len(str(error.value)) < 200


# -- contradictions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens is 4, max_tokens is 3"),
        ({"min_tokens": 17}, "min_tokens is 17, max_tokens is 16"),
        ({"stop": ["x"], "detokenize": False}, r"stop is \['x'\] with detokenize=False"),
        (
            {"prompt_logprobs": 0, "skip_reading_prefix_cache": False},
            "skip_reading_prefix_cache is False, prompt_logprobs is 0",
        ),
    ],
)
def test_values_that_contradict_each_other(params: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_p4_greedy_allows_one_continuation():
    with pytest.raises(ValueError, match=r"n is 2 with temperature 0; .* so use n=1"):
        SamplingParams(n=2, temperature=0.0)

    assert SamplingParams(n=2, temperature=1e-6).n == 2


# -- names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_new_tokens", "max_tokens"),
        ("temp", "temperature"),
        ("topk", "top_k"),
        ("top-p", "top_p"),
        ("stop_strings", "stop"),
        ("stop_ids", "stop_token_ids"),
        ("frequency_penality", "frequency_penalty"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one(name: str, nearest: str):
    with pytest.raises(TypeError, match=f"no parameter {name}; did you mean {nearest}\\?"):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match=f"did you mean {nearest}\\?"):
        SamplingParams().replace(**{name: 1})


def test_a_name_like_no_other_is_answered_with_all_of_them():
    with pytest.raises(TypeError, match=r"no parameter xyzzy; it takes n, presence_penalty, .*"):
        SamplingParams(xyzzy=1)


def test_a_value_without_a_name():
    with pytest.raises(TypeError, match=r"given 0.8 without a name; .*temperature=0.8"):
        SamplingParams(0.8)


@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [
        ("structured_outputs", {"regex": "a+"}, None),
        ("logits_processors", [print], None),
        ("truncate_prompt_tokens", 4, None),
        ("flat_logprobs", True, False),
        ("extra_args", {}, None),
        ("skip_clone", True, False),
        ("best_of", 3, None),
    ],
)
def test_what_vllm_has_and_lmscope_has_not_is_refused_unless_it_asks_for_nothing(
    name: str, value: object, nothing: object
):
    with pytest.raises(TypeError, match=f"^{name} is .*; lmscope does not take it: "):
        SamplingParams(**{name: value})

    assert SamplingParams(**{name: nothing}) == SamplingParams()


# -- what is made of good values ---------------------------------------------------------


def test_p10_shorthand_is_brought_into_one_form():
    params = SamplingParams(
        seed=-1, logprobs=True, stop="x", stop_token_ids=[7], bad_words=None, output_kind="delta"
    )

    assert params.seed is None
    assert params.logprobs == 1
    assert params.stop == ("x",)
    assert params.stop_token_ids == (7,)
    assert params.bad_words == ()
    assert params.output_kind is RequestOutputKind.DELTA
    assert SamplingParams(logprobs=False, prompt_logprobs=False) == SamplingParams()
    assert SamplingParams(logit_bias={"5": 2}).logit_bias == {5: 2.0}


def test_p5_a_tiny_temperature_is_raised_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="lmscope.sampling_params"):
        params = SamplingParams(temperature=1e-4)

    assert params.temperature == 0.01
    assert params.sampling_type is SamplingType.RANDOM
    assert "temperature 0.0001 is below 0.01" in caplog.text


def test_greedy_switches_the_filters_off():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.2, seed=3)

    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.is_greedy
    assert params.sampling_type is SamplingType.GREEDY


@pytest.mark.parametrize(
    ("params", "length"),
    [
        ({}, 0),
        ({"stop": "x"}, 0),
        ({"stop": ["a", "abcd", "ab"]}, 3),
        ({"stop": ["abcd"], "include_stop_str_in_output": True}, 0),
    ],
)
def test_characters_are_held_back_for_the_longest_stop_string(
    params: dict[str, object], length: int
):
    assert SamplingParams(**params).output_text_buffer_length == length


def test_l3_prompt_logprobs_do_not_read_the_prefix_cache():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert not SamplingParams(logprobs=0).skip_reading_prefix_cache


def test_numbers_of_numpy_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=[np.int32(9)]
    )

    assert [type(params.temperature), type(params.top_k)] == [float, int]
    assert type(params.stop_token_ids[0]) is int
    assert msgspec.msgpack.encode(params)


def test_params_are_frozen_and_share_nothing_with_the_caller():
    bias, stop = {3: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[4] = 2.0
    stop.append("b")

    assert params.logit_bias == {3: 1.0}
    assert params.stop == ("a",)
    with pytest.raises(AttributeError):
        params.temperature = 0.5


def test_replace_makes_a_checked_copy():
    params = SamplingParams(temperature=0.5)

    assert params.replace(seed=3) == SamplingParams(temperature=0.5, seed=3)
    assert params.seed is None
    with pytest.raises(ValueError, match="top_p is 7"):
        params.replace(top_p=7)


GOOD = st.fixed_dictionaries(
    {},
    optional={
        "n": st.just(1) | st.integers(1, 100),
        "temperature": st.floats(0, 1e30),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2**40),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "stop": st.lists(st.text(min_size=1), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 2**31)),
        "max_tokens": st.none() | st.integers(50, 10**9),
        "min_tokens": st.integers(0, 50),
        "logprobs": st.none() | st.booleans() | st.integers(-1, 50),
        "prompt_logprobs": st.none() | st.booleans() | st.integers(-1, 50),
        "output_kind": st.sampled_from(RequestOutputKind),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 99), st.floats(-1e6, 1e6)),
        "bad_words": st.lists(st.text(), max_size=3),
        "ignore_eos": st.booleans(),
    },
)


@given(GOOD)
def test_good_params_survive_the_wire_copying_and_replacing(values: dict[str, object]):
    if values.get("temperature") == 0.0 and values.get("n", 1) != 1:
        values["n"] = 1
    if values.get("max_tokens", 16) == 16:
        values.pop("min_tokens", None)

    params = SamplingParams(**values)

    for decoder in (msgspec.msgpack, msgspec.json):
        assert decoder.decode(decoder.encode(params), type=SamplingParams) == params
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert params.replace() == params


# -- what only the model can tell --------------------------------------------------------


def test_s6_every_eos_of_the_generation_config_stops():
    params, stop_ids = with_generation_config(SamplingParams(), 256, [256, 258])

    assert params.stop_token_ids == (258,)
    assert stop_ids == {256, 258}


def test_s7_ignore_eos_keeps_only_the_callers_stop_tokens():
    given_params = SamplingParams(ignore_eos=True, stop_token_ids=[5])

    params, stop_ids = with_generation_config(given_params, 256, 258)

    assert params is given_params
    assert stop_ids == {5, 256, 258}


def test_completing_keeps_the_callers_order_and_object():
    params, _ = with_generation_config(SamplingParams(stop_token_ids=[9, 3, 9]), 1, [4, 3, 1, 4])
    assert params.stop_token_ids == (9, 3, 9, 4)

    untouched = SamplingParams(stop_token_ids=[3])
    assert with_generation_config(untouched, 1, [3, 1])[0] is untouched
    assert with_generation_config(untouched, None, None) == (untouched, {3})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [99_999]}, "stop_token_ids has token id 99999, .*largest is 259"),
        ({"allowed_token_ids": [5, 260]}, "allowed_token_ids has token id 260, .*largest is 259"),
        ({"logit_bias": {260: 1.0}}, "logit_bias has token id 260, .*largest is 259"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": ["a", ""]}, "bad_words holds an empty string"),
        (
            {"allowed_token_ids": [256, 7], "min_tokens": 2},
            r"allowed_token_ids is \[256, 7\], all of which end the text, and min_tokens is 2",
        ),
    ],
)
def test_p8_what_the_model_does_not_have_is_refused(params: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        check_for_model(SamplingParams(**params), vocab_size=260, stop_ids=frozenset({256, 7}))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_l5_the_number_of_logprobs_is_bounded(name: str):
    with pytest.raises(ValueError, match=f"{name} is 1000, max_logprobs is 20; ask for fewer"):
        check_for_model(SamplingParams(**{name: 1000}), vocab_size=5000)
    with pytest.raises(ValueError, match=f"{name} is -1 .*5000 tokens.*, max_logprobs is 20"):
        check_for_model(SamplingParams(**{name: -1}), vocab_size=5000)

    check_for_model(SamplingParams(**{name: 20}), vocab_size=5000)
    check_for_model(SamplingParams(**{name: -1}), vocab_size=20)
    check_for_model(SamplingParams(**{name: -1}), vocab_size=5000, max_logprobs=-1)


def test_what_the_model_has_is_accepted():
    params = SamplingParams(
        stop_token_ids=[259],
        allowed_token_ids=[0, 256],
        logit_bias={259: 1.0},
        min_tokens=3,
        bad_words=["a"],
    )

    check_for_model(params, vocab_size=260, stop_ids=frozenset({256, 259}))
    check_for_model(
        params.replace(allowed_token_ids=[256], min_tokens=0),
        vocab_size=260,
        stop_ids=frozenset({256}),
    )
