"""Tokens become text: the cases of users' reports, named by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models

from lmscope.boundary import EngineCoreRequest
from lmscope.frontend.detokenizer import IncrementalDetokenizer, TextStream, check_stop_strings
from lmscope.frontend.tokenizer import BYTE_LEVEL_ALPHABET, TokenizerAdapter
from lmscope.sampling_params import SamplingParams
from lmscope.testing import byte_tokenizer

BYTES = byte_tokenizer()
END, NOTE = 256, 258


def detokenizer(
    tokenizer: TokenizerAdapter | None = BYTES, prompt: Sequence[int] = (120,), **params: Any
) -> IncrementalDetokenizer:
    request = EngineCoreRequest(
        request_id="0",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**params),
        eos_token_id=END,
    )
    return IncrementalDetokenizer.for_request(tokenizer, request)


def emit(
    tokens: Sequence[int] | str,
    finish: str | None = None,
    *,
    tokenizer: TokenizerAdapter = BYTES,
    prompt: Sequence[int] = (120,),
    **params: Any,
) -> tuple[list[str], IncrementalDetokenizer, str | None]:
    """Let a request produce `tokens` one by one; its deltas, state and stop string."""
    state = detokenizer(tokenizer, prompt, **params)
    ids = list(tokens.encode()) if isinstance(tokens, str) else list(tokens)
    deltas = []
    for number, token_id in enumerate(ids, 1):
        reason = finish if number == len(ids) else None
        stop = state.update([token_id], reason == "stop", reason is not None)
        deltas.append(state.get_next_output_text(bool(stop or reason), delta=True))
        if stop is not None:
            return deltas, state, stop
    return deltas, state, None


def word_tokenizer(*words: str) -> TokenizerAdapter:
    """Whole words in SentencePiece's spelling; the decoder strips the text's first space."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TokenizerAdapter.from_backend(backend)


def words_tokenizer(*words: str) -> TokenizerAdapter:
    """Words as they are, without anything between them."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    backend.decoder = decoders.Fuse()
    return TokenizerAdapter.from_backend(backend)


def pair_tokenizer(first: int, second: int) -> TokenizerAdapter:
    """Bytes, and a token 256 of the two bytes given."""
    alphabet = BYTE_LEVEL_ALPHABET
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    vocab[alphabet[first] + alphabet[second]] = 256
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return TokenizerAdapter.from_backend(backend)


# -- turning tokens into text ----------------------------------------------------


def test_d1_a_character_of_several_tokens_comes_with_its_last_one():
    deltas, state, _ = emit("ok 🌶x")

    assert deltas == ["o", "k", " ", "", "", "", "🌶", "x"]
    assert state.output_token_ids == list("ok 🌶x".encode())


def test_d1_joined_deltas_equal_the_final_text():
    deltas, state, _ = emit("日本 é 👩‍👩‍👧 x", "length")

    assert "".join(deltas) == state.get_next_output_text(True, delta=False) == "日本 é 👩‍👩‍👧 x"


def test_d2_a_cut_character_is_left_out_and_its_ids_are_kept():
    ids = list("ok 🌶x".encode())[:5]

    deltas, state, _ = emit(ids, "length")

    assert "".join(deltas) == "ok "
    assert state.output_token_ids == ids


def test_d2_a_last_token_that_ends_one_character_and_begins_another_shows_the_first():
    tokenizer = pair_tokenizer(0xA5, 0xE6)  # ends 日, begins another
    ids = [*b"a\xe6\x97", 256]

    deltas, _, _ = emit(ids, "length", tokenizer=tokenizer)

    assert "".join(deltas) == "a日"


def test_d2_an_aborted_request_shows_it_too():
    state = detokenizer(pair_tokenizer(0xA5, 0xE6))
    state.update([*b"a\xe6\x97", 256], stop_terminated=False)

    assert state.get_next_output_text(finished=False, delta=True) == "a"
    assert state.get_next_output_text(finished=True, delta=True) == "日"


def test_d3_special_tokens_are_dropped_and_added_ones_kept():
    ids = [97, NOTE, 98, END]

    assert "".join(emit(ids)[0]) == "a<note>b" == BYTES.decode(ids)


def test_d3_special_tokens_are_shown_when_they_are_not_skipped():
    ids = [97, NOTE, 98, END, 257]

    text = "".join(emit(ids, skip_special_tokens=False)[0])

    assert text == "a<note>b<END><PAD>" == BYTES.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("between", "text"), [(True, "<END> <PAD> <END>"), (False, "<END><PAD><END>")]
)
def test_d3_neighbouring_special_tokens_can_be_kept_together(between: bool, text: str):
    backend = Tokenizer(models.WordLevel({"?": 0}, "?"))
    backend.add_special_tokens(["<END>", "<PAD>"])  # no decoder: tokens are joined by spaces
    tokenizer = TokenizerAdapter.from_backend(backend)

    deltas, _, _ = emit(
        [1, 2, 1],
        tokenizer=tokenizer,
        prompt=(),
        skip_special_tokens=False,
        spaces_between_special_tokens=between,
    )

    assert "".join(deltas) == text


def test_d4_a_continuation_keeps_its_leading_space():
    tokenizer = word_tokenizer("▁Hello", "▁world")

    assert tokenizer.decode([1]) == "world"
    assert emit([1], tokenizer=tokenizer, prompt=[0])[0] == [" world"]


def test_d4_runs_of_spaces_keep_their_length():
    assert "".join(emit("a    b")[0]) == "a    b"


def test_d5_each_token_gives_a_delta_at_once():
    assert emit("abcdefgh")[0] == list("abcdefgh")


@pytest.mark.parametrize("tokenizer", [BYTES, None])
def test_d6_without_detokenize_or_tokenizer_there_are_ids_and_no_text(
    tokenizer: TokenizerAdapter | None,
):
    state = detokenizer(tokenizer, detokenize=False)

    assert state.update([97, 98, 99], stop_terminated=True, finished=True) is None
    assert state.get_next_output_text(finished=True, delta=False) == ""
    assert state.output_token_ids == [97, 98, 99]


def test_d6_stop_strings_without_detokenize_are_an_error():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(detokenize=False, stop=["x"])


def test_d7_a_part_of_a_character_has_a_byte_label():
    assert [BYTES.id_to_piece(byte) for byte in "🌶".encode()] == [
        "<0xF0>",
        "<0x9F>",
        "<0x8C>",
        "<0xB6>",
    ]


def test_a_character_that_the_prompt_began_is_shown_whole():
    prompt = [*b"Hi ", *"🌶".encode()[:2]]

    deltas, _, _ = emit([*"🌶".encode()[2:], 33], prompt=prompt)

    assert deltas == ["", "🌶", "!"]


def test_bytes_that_the_prompt_left_do_not_show_in_the_output():
    prompt = [*b"Hi ", *"🌶".encode()[:2]]

    assert emit("z!", prompt=prompt)[0] == ["z", "!"]


@pytest.mark.parametrize(("output", "text"), [("本".encode()[1:], "本"), (b"z", "z")])
def test_a_whole_character_of_the_prompt_is_not_shown_again(output: bytes, text: str):
    tokenizer = pair_tokenizer(0xA5, 0xE6)  # the end of 日 and the beginning of 本
    prompt = [*b"Hi \xe6\x97", 256]

    assert "".join(emit([*output], tokenizer=tokenizer, prompt=prompt)[0]) == text


def test_a_long_prompt_of_broken_bytes_is_not_decoded_whole():
    class Counting(TextStream):
        num_decoded = 0

        def _decode(self, ids: list[int]) -> str:
            self.num_decoded += len(ids)
            return super()._decode(ids)

    stream = Counting(BYTES, [0xFF, 97] * 5_000)

    assert stream.step(98) == "b"
    assert stream.num_decoded < 500


def test_a_decoder_that_rewrites_given_text_does_not_stop_the_stream():
    backend = Tokenizer(models.WordLevel({"ab": 0, "c": 1, "abc": 2}, "ab"))
    # Text that has been given ("ab") turns into other text when "c" follows.
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("abc", "xyz!")])
    stream = TextStream(TokenizerAdapter.from_backend(backend))

    assert [stream.step(token_id) for token_id in (0, 1, 1)] == ["ab", "c", "c"]


def test_ids_that_nothing_can_decode_add_no_text():
    assert emit([97, -1, 5_000, 2**40, 98])[0] == ["a", "", "", "", "b"]


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")


@given(st.text(CHARACTERS, max_size=30), st.integers(1, 4), st.integers(0, 8))
def test_whole_texts_come_out_however_they_are_cut(text: str, size: int, num_prompt: int):
    ids = list(text.encode())
    prompt, output = ids[:num_prompt], ids[num_prompt:]
    state = detokenizer(prompt=prompt)
    deltas = []
    for start in range(0, len(output), size):
        state.update(output[start : start + size], stop_terminated=False)
        deltas.append(state.get_next_output_text(finished=False, delta=True))
    deltas.append(state.get_next_output_text(finished=True, delta=True))

    # The prompt's whole characters are the prompt's, the rest is output.
    assert "".join(deltas) == text.removeprefix(bytes(prompt).decode(errors="ignore"))


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_tokens_give_the_text_of_decode_without_a_cut_end(ids: list[int]):
    deltas, state, _ = emit(ids, "length", prompt=())

    text = "".join(deltas)
    assert text == state.get_next_output_text(True, delta=False)
    assert text == BYTES.decode(ids).rstrip("\ufffd")


class Together(TextStream):
    """Decodes every token together with those before it, whatever the tokenizer is."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_byte_level = False


# "é" and "日" in bytes, pairs of bytes, and what is no text at all.
PAIRS = pair_tokenizer(0xA9, 0x20)
IDS = st.lists(st.sampled_from([97, 32, *"é日".encode(), 0xFF, 256, 257, 258, 5_000]), max_size=24)


@given(IDS, IDS, st.sampled_from([BYTES, PAIRS]), st.booleans())
def test_whole_characters_need_no_context_where_tokens_are_bytes(
    prompt: list[int], output: list[int], tokenizer: TokenizerAdapter, skip: bool
):
    alone = TextStream(tokenizer, prompt, skip_special_tokens=skip)
    together = Together(tokenizer, prompt, skip_special_tokens=skip)

    assert [alone.step(i) for i in output] == [together.step(i) for i in output]
    assert alone.flush() == together.flush()


def count_decoded(tokenizer: TokenizerAdapter, output: Sequence[int], monkeypatch: Any) -> int:
    """How many tokens are decoded for a request, and again for another of the same text."""
    decode, decoded = tokenizer.decode, list[int]()

    def counted(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded.extend(ids)
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    for texts in tokenizer.token_texts.values():
        monkeypatch.setattr(texts, "decode", counted)
    for _ in range(2):
        stream = TextStream(tokenizer)
        for token_id in output:
            stream.step(token_id)
    return len(decoded)


def test_a_token_of_whole_characters_is_decoded_once(monkeypatch: Any):
    tokenizer = byte_tokenizer()
    assert count_decoded(tokenizer, b"abcabcabc", monkeypatch) == 3


def test_other_tokens_are_decoded_with_one_before_them(monkeypatch: Any):
    tokenizer = words_tokenizer("a", "b", "c")
    # Each alone for the context of the next, then pairs, for the first token none.
    assert count_decoded(tokenizer, [0, 1, 2] * 3, monkeypatch) == 3 + 2 * 8 * 2


# -- stopping ----------------------------------------------------------------------


def test_s1_no_piece_of_a_stop_string_is_shown():
    deltas, state, stop = emit("abcSTOPdef", stop=["STOP"])

    assert stop == "STOP"
    assert deltas == ["", "", "", "a", "b", "c", ""]
    assert state.get_next_output_text(True, delta=False) == "abc"


def test_s2_a_match_inside_a_token_cuts_the_token():
    tokenizer = words_tokenizer("abc", "xSTOPy")

    deltas, _, stop = emit([0, 1], tokenizer=tokenizer, prompt=(), stop=["STOP"])
    assert (stop, "".join(deltas)) == ("STOP", "abcx")

    deltas, _, _ = emit(
        [0, 1], tokenizer=tokenizer, prompt=(), stop=["STOP"], include_stop_str_in_output=True
    )
    assert "".join(deltas) == "abcxSTOP"


def test_s3_held_back_characters_are_released_when_no_stop_came():
    deltas, state, stop = emit([*b"abcST", END], "stop", stop=["STOP"])

    assert stop is None
    assert deltas[-1] == "cST"
    assert state.get_next_output_text(True, delta=False) == "abcST"


def test_s4_a_match_within_min_tokens_does_not_count_now_or_later():
    deltas, _, stop = emit("abSTOPcdSTOPe", stop=["STOP"], min_tokens=7)

    assert (stop, "".join(deltas)) == ("STOP", "abSTOPcd")


def test_s4_a_match_that_ends_behind_min_tokens_counts():
    deltas, _, stop = emit("abENDENDx", stop=["END"], min_tokens=4)

    assert (stop, "".join(deltas)) == ("END", "ab")


def test_s4_an_abort_within_min_tokens_keeps_the_text():
    state = detokenizer(stop=["END"], min_tokens=9)
    state.update(list(b"abENDc"), stop_terminated=False)

    assert state.get_next_output_text(finished=True, delta=False) == "abENDc"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abP")])
def test_s5_the_text_of_a_stop_token_is_left_out_and_its_id_kept(include: bool, text: str):
    deltas, state, _ = emit(
        [97, 98, 80], "stop", stop_token_ids=[80], include_stop_str_in_output=include
    )

    assert "".join(deltas) == text
    assert state.output_token_ids == [97, 98, 80]


def test_s8_an_end_by_length_shows_the_last_token():
    deltas, state, _ = emit("ab", "length")

    assert "".join(deltas) == "ab"
    assert state.output_token_ids == [97, 98]


def test_s9_an_empty_stop_string_is_an_error_and_a_plain_one_a_list():
    with pytest.raises(ValueError, match="empty"):
        SamplingParams(stop=[""])
    assert emit("axb", stop="x")[2] == "x"


def test_s10_a_stop_string_is_looked_for_in_the_text_as_shown():
    ids = [97, END, 98]

    assert emit(ids, stop=["<END>"])[2] is None
    assert emit(ids, stop=["<END>"], skip_special_tokens=False)[2] == "<END>"


# -- sharp edges -------------------------------------------------------------------


def test_e11_an_eos_is_a_token_and_no_text_even_when_it_is_not_special():
    deltas, state, _ = emit([97, 98, NOTE], "stop")

    assert "".join(deltas) == "ab"
    assert state.output_token_ids == [97, 98, NOTE]


def test_e12_a_stop_string_cuts_the_text_and_not_the_ids():
    deltas, state, stop = emit("abEND", "length", stop=["END"])

    assert stop == "END"
    assert "".join(deltas) == "ab"
    assert state.output_token_ids == list(b"abEND")


def test_e13_the_longest_stop_string_but_one_character_is_held_back():
    deltas, _, stop = emit("abEND", stop=["END"])

    assert (deltas, stop) == (["", "", "a", "b", ""], "END")


def test_e13_nothing_is_held_back_when_the_stop_string_is_included():
    deltas, _, _ = emit("abEND", stop=["END"], include_stop_str_in_output=True)

    assert deltas == ["a", "b", "E", "N", "D"]


def test_e13_cumulative_text_is_held_back_too():
    state = detokenizer(stop=["END"])
    state.update(list(b"abc"), stop_terminated=False)

    assert state.get_next_output_text(finished=False, delta=False) == "a"
    assert state.get_next_output_text(finished=True, delta=False) == "abc"


def test_e14_the_order_of_the_list_decides_and_not_that_of_the_text():
    assert check_stop_strings("abcSTOPxyz", 10, ["xyz", "STOP"], False) == ("xyz", 7)

    state = detokenizer(words_tokenizer("abcSTOPxyz"), (), stop=["xyz", "STOP"])
    assert state.update([0], stop_terminated=False) == "xyz"
    assert state.get_next_output_text(finished=True, delta=False) == "abcSTOP"


@pytest.mark.parametrize(("num_new", "found"), [(6, ("END", 6)), (4, None)])
def test_only_matches_that_end_in_new_text_count(num_new: int, found: tuple[str, int] | None):
    assert check_stop_strings("hello END wor", num_new, ["END"], False) == found


def test_a_stop_string_in_the_last_whole_character_is_found():
    tokenizer = pair_tokenizer(0xA5, 0xE6)

    deltas, _, stop = emit([*b"a\xe6\x97", 256], "length", tokenizer=tokenizer, stop=["日"])

    assert (stop, "".join(deltas)) == ("日", "a")


def test_nothing_new_means_no_search():
    state = detokenizer(stop=["b"], min_tokens=2)
    state.update([97, 98], stop_terminated=False)

    assert state.update([], stop_terminated=False) is None
