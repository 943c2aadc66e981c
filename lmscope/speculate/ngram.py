"""NgramProposer: drafts copied from what followed the same tokens earlier in the text.

The engine does not draft yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmscope.checks import as_integer

__all__ = ["NgramProposer", "find_continuation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramProposer:
    """Proposes drafts for the requests of a batch; keeps nothing between two steps.

    num_speculative_tokens   most drafts of one request
    prompt_lookup_min        shortest end of the text that is looked for in the text before
    prompt_lookup_max        longest one
    max_model_len            most tokens of one request, drafts included

    ValueError for a number below 1 and for a minimum above the maximum.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            as_integer(name, getattr(self, name), 1)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, prompt_lookup_max is "
                f"{self.prompt_lookup_max}; the minimum must not be larger"
            )

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]]
    ) -> list[tuple[int, ...]]:
        """The drafts of each request, possibly none.

        sampled_token_ids   what each one sampled in this step; one that sampled nothing is
                            still in its prompt and gets no drafts
        token_ids           all its tokens, prompt and output, the sampled ones included
        """
        return [
            self._continue(tokens) if sampled else ()
            for sampled, tokens in zip(sampled_token_ids, token_ids, strict=True)
        ]

    def _continue(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        room = min(self.num_speculative_tokens, self.max_model_len - len(token_ids))
        if room <= 0:
            return ()
        start = find_continuation(token_ids, self.prompt_lookup_min, self.prompt_lookup_max)
        return () if start is None else tuple(token_ids[start : start + room])


def find_continuation(token_ids: Sequence[int], min_n: int, max_n: int) -> int | None:
    """Where the text went on after an earlier place that reads like its end.

    The longest end of `token_ids`, from `min_n` to `max_n` tokens, that also occurs earlier
    counts, and of its places the first; a place may overlap the end. Returns the index
    behind it, or None. The time is linear in the number of tokens, whatever `max_n` is.
    """
    # Read backwards, the end of the text is its beginning, and what is looked for is the
    # longest prefix of `pattern` in all that comes behind it: Knuth, Morris and Pratt's.
    pattern = token_ids[: -max_n - 1 : -1]
    borders = _borders(pattern)
    best_length = best_index = length = 0
    for index in range(len(token_ids) - 2, -1, -1):
        length = _extend(pattern, borders, length, token_ids[index])
        if length >= best_length:
            best_length, best_index = length, index
    return best_index + best_length if best_length >= min_n else None


def _borders(pattern: Sequence[int]) -> list[int]:
    """For each prefix of `pattern` the length of its longest proper prefix that also ends it."""
    borders = [0] * len(pattern)
    for index in range(1, len(pattern)):
        borders[index] = _extend(pattern, borders, borders[index - 1], pattern[index])
    return borders


def _extend(pattern: Sequence[int], borders: list[int], length: int, token_id: int) -> int:
    """The length of the match after one more token; it was `length` before.

    A whole match has no next token, so it goes on as its own longest border.
    """
    while length and (length == len(pattern) or pattern[length] != token_id):
        length = borders[length - 1]
    return length + 1 if pattern[length] == token_id else length
