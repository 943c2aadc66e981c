"""The byte tokenizer that most tests stand on."""

from __future__ import annotations

import pytest
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from lmscope.testing import byte_tokenizer


def test_ids_are_the_bytes_of_the_text():
    text = "".join(chr(code) for code in range(0x250)) + "日🌶\ufffd"

    assert byte_tokenizer().encode(text).ids == list(text.encode())
    assert byte_tokenizer().decode(list(text.encode())) == text


def test_every_byte_has_an_id_and_three_tokens_follow():
    tokenizer = byte_tokenizer()

    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("<END><PAD><note>").ids == [256, 257, 258]
    assert tokenizer.all_special_ids == {256, 257}
    assert tokenizer.eos_token_id == 256
    assert tokenizer.encode("").ids == []


@pytest.mark.parametrize(("skip", "text"), [(True, "a<note>b"), (False, "a<note>b<END>")])
def test_special_tokens_are_skipped_on_demand(skip: bool, text: str):
    assert byte_tokenizer().decode([97, 258, 98, 256], skip_special_tokens=skip) == text


def test_a_cut_character_is_a_replacement_character():
    assert byte_tokenizer().decode([97, 0xF0, 0x9F]) == "a\ufffd"


def test_the_libraries_take_it_too():
    backend = byte_tokenizer().backend
    stream = DecodeStream(skip_special_tokens=True)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<END>")

    assert [stream.step(backend, id_) for id_ in "é!".encode()] == [None, "é", "!"]
    assert wrapped.decode(wrapped.encode("é🌶")) == "é🌶"
