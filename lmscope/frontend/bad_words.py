"""Bad words as token sequences, the only form in which a sampler can bar them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmscope.checks import shown

__all__ = ["bad_words_token_ids"]


def bad_words_token_ids(
    bad_words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The sequences that would write `bad_words`, at the start of a text and inside one.

    Inside a text a word usually begins with its space. That form is barred as well when it
    is as long as the other and begins with another token; a longer one begins with a token
    that is a space alone and ends like the other. vLLM's rule.

    encode  text to ids, without special tokens
    raises  ValueError for a word that has no token
    """
    sequences = []
    for word in bad_words:
        bare = tuple(encode(word.lstrip()))
        if not bare:
            raise ValueError(f"bad_words holds {shown(word)}, which has no token; remove it")
        sequences.append(bare)
        spaced = tuple(encode(f" {word.lstrip()}"))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(sequences)
