"""Bad words become the token sequences that would write them."""

from __future__ import annotations

import pytest

from lmscope.frontend.bad_words import bad_words_token_ids
from lmscope.testing import byte_tokenizer

# Pieces of a tokenizer that keeps the space before a word in the word.
PIECES = {"bad": (5,), " bad": (6,), "worse": (7, 8), " worse": (9, 8), "a": (1,), " a": (2, 1)}


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        (["bad"], ((5,), (6,))),
        ([" bad"], ((5,), (6,))),
        (["worse"], ((7, 8), (9, 8))),
        # With its space it is longer, and ends in the same token.
        (["a"], ((1,),)),
        (["a", "bad"], ((1,), (5,), (6,))),
        ([], ()),
    ],
)
def test_a_word_is_barred_with_and_without_its_space(words, sequences):
    assert bad_words_token_ids(words, PIECES.__getitem__) == sequences


def test_bytes_are_barred_one_by_one():
    tokenizer = byte_tokenizer()

    sequences = bad_words_token_ids(["ab"], lambda text: tokenizer.encode(text).ids)

    assert sequences == ((97, 98),)


@pytest.mark.parametrize("word", ["", "  "])
def test_a_word_without_a_token_is_refused(word: str):
    with pytest.raises(ValueError, match=f"bad_words holds {word!r}, which has no token"):
        bad_words_token_ids(["a", word], lambda text: [ord(letter) for letter in text])
