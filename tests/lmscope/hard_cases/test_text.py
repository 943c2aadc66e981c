"""Hard cases of text, stopping and templates (D, S, T), through the whole engine.

`emit` is what the model writes, one token for each byte.
"""

from __future__ import annotations

import logging

import pytest

from lmscope import RequestOutputKind, SamplingParams
from lmscope.testing import byte_tokenizer

DEADLINE_S = 200
END, NOTE = 256, 258


def deltas(llm, **params):
    params = SamplingParams(**{"max_tokens": 50, "output_kind": "DELTA", **params})
    assert params.output_kind is RequestOutputKind.DELTA
    return [output.outputs[0] for output in llm.submit("x", params)]


def last(llm, **params):
    params = SamplingParams(**{"max_tokens": 50, **params})
    return llm.submit("x", params).wait(DEADLINE_S).outputs[0]


# -- D: tokens into text ----------------------------------------------------------------


def test_d1_a_character_comes_whole_and_each_token_in_its_step(scripted):
    parts = deltas(scripted("ok 🌶x"))

    assert [part.text for part in parts] == ["o", "k", " ", "", "", "", "🌶", "x", ""]
    assert [list(part.token_ids) for part in parts] == [[b] for b in [*"ok 🌶x".encode(), END]]


def test_d2_a_cut_character_is_left_out(scripted):
    output = last(scripted("ok 🌶x"), max_tokens=5)

    assert (output.text, len(output.token_ids), output.finish_reason) == ("ok ", 5, "length")


def test_d3_added_tokens_are_kept_and_special_ones_dropped(scripted):
    llm = scripted([97, NOTE, 257, 98, END])

    assert last(llm).text == "a<note>b"
    assert last(llm, skip_special_tokens=False).text == "a<note><PAD>b"


def test_d4_runs_of_spaces_keep_their_length(scripted):
    assert last(scripted("a    b")).text == "a    b"


def test_d5_a_delta_per_token_without_a_space(scripted):
    parts = deltas(scripted("abcdefgh"), max_tokens=8)

    assert [part.text for part in parts] == list("abcdefgh")


def test_d6_ids_only(scripted):
    output = last(scripted("abc"), detokenize=False, max_tokens=3)

    assert (output.text, output.token_ids) == ("", tuple(b"abc"))
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(detokenize=False, stop=["x"])


# -- S: stopping ------------------------------------------------------------------------


def test_s1_no_piece_of_the_stop_string_is_shown(scripted, state_of):
    llm = scripted("abcSTOPdef")
    parts = deltas(llm, stop="STOP")

    assert "".join(part.text for part in parts) == "abc"
    assert not any("S" in part.text for part in parts)
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == ("stop", "STOP")
    assert state_of(llm).requests == ()
    assert last(llm, stop="STOP", include_stop_str_in_output=True).text == "abcSTOP"


def test_s3_held_back_characters_come_when_no_stop_came(scripted):
    assert last(scripted("abcST"), stop="STOP").text == "abcST"
    assert last(scripted("abcSTxyz"), stop="STOP", max_tokens=5).text == "abcST"


def test_s4_a_match_within_min_tokens_does_not_count(scripted):
    assert last(scripted("abSTOPcdSTOPe"), stop="STOP", min_tokens=7).text == "abSTOPcd"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abP")])
def test_s5_a_stop_token_keeps_its_id(scripted, include, text):
    output = last(scripted("abPcd"), stop_token_ids=[80], include_stop_str_in_output=include)

    assert (output.text, output.token_ids) == (text, tuple(b"abP"))
    assert (output.finish_reason, output.stop_reason) == ("stop", 80)


def test_s7_ignore_eos_runs_on_and_the_callers_stop_tokens_still_stop(scripted):
    llm = scripted([97, END, 98, END, 99, 80, 100])

    assert last(llm, ignore_eos=True, max_tokens=4).finish_reason == "length"
    output = last(llm, ignore_eos=True, stop_token_ids=[80])
    assert (output.text, output.stop_reason) == ("abc", 80)


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (3, "stop"), (4, "stop")])
def test_s8_the_end_of_the_text_comes_before_the_length(scripted, max_tokens, reason):
    output = last(scripted([97, 98, END]), max_tokens=max_tokens)

    assert (output.finish_reason, output.stop_reason) == (reason, None)
    assert output.text == "ab"


def test_s8_min_tokens_come_before_the_end_of_the_text(scripted):
    output = last(scripted([97, END, 98, END]), min_tokens=3)

    assert (len(output.token_ids), output.finish_reason) == (4, "stop")


def test_s10_a_stop_string_that_is_never_shown_is_warned_of(scripted, caplog):
    llm = scripted([97, END, 98])
    with caplog.at_level(logging.WARNING):
        output = last(llm, stop=["<END>"], ignore_eos=True, max_tokens=3)

    assert output.finish_reason == "length"
    assert "stop_token_ids=[256]" in caplog.text
    shown = last(llm, stop=["<END>"], ignore_eos=True, skip_special_tokens=False)
    assert (shown.text, shown.stop_reason) == ("a", "<END>")


# -- T: chat templates ------------------------------------------------------------------

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_t2_a_model_without_a_template_says_so_and_generates(scripted):
    llm = scripted("ok")

    with pytest.raises(ValueError, match=r"no chat template.*chat_template"):
        llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)

    assert llm.generate("Hi", use_tqdm=False)[0].outputs[0].text == "ok"
    (output,) = llm.chat(
        [{"role": "user", "content": "Hi"}], use_tqdm=False, chat_template=TEMPLATE
    )
    assert output.prompt == "[Hi]"


def test_t1_a_templates_text_is_tokenized_as_it_is(scripted):
    llm = scripted("ok", tokenizer=byte_tokenizer(chat_template="<END>" + TEMPLATE))

    (output,) = llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)

    assert output.prompt_token_ids == (END, *b"[Hi]")
