"""The n-gram proposer: what it copies, from where, and at what cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from lmscope.speculate.ngram import NgramProposer, find_continuation


def drafts_of(
    tokens: list[int], min_n: int, max_n: int, k: int, max_model_len: int = 100
) -> list[int]:
    proposer = NgramProposer(
        num_speculative_tokens=k,
        prompt_lookup_min=min_n,
        prompt_lookup_max=max_n,
        max_model_len=max_model_len,
    )
    (drafts,) = proposer.propose([tokens[-1:]], [tokens])
    return list(drafts)


@pytest.mark.parametrize(
    ("tokens", "lengths", "k", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2, 3], (2, 3), 3, [4, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], (2, 3), 2, [9, 1]),
        ([5, 1, 2, 7, 8, 1, 2], (2, 4), 3, [7, 8, 1]),
        ([1, 2, 3, 4], (1, 3), 3, []),
        ([7, 7, 7, 7], (1, 2), 3, [7, 7]),
        ([4, 1, 2, 3, 4, 1, 2, 3, 5, 2, 3], (2, 3), 3, [4, 1, 2]),
    ],
)
def test_drafts_follow_the_first_place_that_reads_like_the_end(tokens, lengths, k, wanted):
    assert drafts_of(tokens, *lengths, k) == wanted


def test_a_longer_match_is_better_than_an_earlier_one():
    assert drafts_of([2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 2, 3, k=1) == [9]
    assert drafts_of([2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 2, 2, k=1) == [8]


def test_no_draft_goes_beyond_max_model_len():
    text = [1, 2, 3, 4, 1, 2]

    assert drafts_of(text, 2, 2, k=3, max_model_len=9) == [3, 4, 1]
    assert drafts_of(text, 2, 2, k=3, max_model_len=7) == [3]
    assert drafts_of(text, 2, 2, k=3, max_model_len=6) == []
    assert drafts_of(text, 2, 2, k=3, max_model_len=5) == []


def test_a_request_that_sampled_nothing_gets_no_drafts():
    proposer = NgramProposer(
        num_speculative_tokens=2, prompt_lookup_min=1, prompt_lookup_max=1, max_model_len=9
    )

    assert proposer.propose([[], [5]], [[5, 5, 5], [5, 6, 5]]) == [(), (6, 5)]


@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    min_n=st.integers(1, 4),
    extra=st.integers(0, 6),
)
def test_the_search_finds_what_trying_every_place_finds(tokens, min_n, extra):
    max_n = min_n + extra
    wanted = None
    for n in range(min_n, max_n + 1):
        end = tokens[-n:]
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == end]
        if places:
            wanted = places[0] + n

    assert find_continuation(tokens, min_n, max_n) == wanted


class CountedToken:
    """A token that counts how often it is compared."""

    num_compared = 0

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __eq__(self, other: object) -> bool:
        CountedToken.num_compared += 1
        return isinstance(other, CountedToken) and self.token_id == other.token_id

    __hash__ = None  # type: ignore[assignment]  # it is only compared


@pytest.mark.parametrize("max_n", [5, 500])
@pytest.mark.parametrize("period", [1, 2, 3, 499, 10_000])
def test_the_search_takes_linear_time(period: int, max_n: int):
    tokens = [CountedToken(i % period) for i in range(4000)]
    tokens[1] = CountedToken(-1)  # every match breaks in the end
    CountedToken.num_compared = 0

    find_continuation(tokens, 2, max_n)  # type: ignore[arg-type]  # stands for a list of ints

    assert CountedToken.num_compared < 4 * len(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"prompt_lookup_min": 4}, "prompt_lookup_min is 4, prompt_lookup_max is 3"),
    ],
)
def test_numbers_that_cannot_work_are_refused(changes: dict[str, int], message: str):
    numbers = {
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
        "max_model_len": 8,
    }

    with pytest.raises(ValueError, match=message):
        NgramProposer(**(numbers | changes))


def test_the_proposer_needs_no_torch():
    code = "import lmscope.speculate.ngram, sys; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
