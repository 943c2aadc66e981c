"""The arithmetic of the perplexity benchmark, and its text."""

from __future__ import annotations

import math
from types import SimpleNamespace

import perplexity
import pytest


def place(**ranks):
    """Log probabilities at one place: `place(t5=(rank, probability))`."""
    return {
        int(name[1:]): SimpleNamespace(rank=rank, logprob=math.log(probability))
        for name, (rank, probability) in ranks.items()
    }


FIRST = [None, place(t7=(1, 0.5)), place(t8=(2, 0.125), t9=(1, 0.75))]
SECOND = [None, place(t7=(1, 0.5)), place(t8=(1, 0.5))]


def test_perplexity_is_of_the_tokens_after_the_first():
    score = perplexity.score("float32", "F.linear", FIRST, [3, 7, 8])

    assert score.num_tokens == 2
    assert score.perplexity == pytest.approx(4)  # the geometric mean of 1/2 and 1/8 is 1/4
    assert score.likeliest == (7, 9)


def test_the_table_compares_with_the_first():
    scores = [
        perplexity.score("a", "x", FIRST, [3, 7, 8]),
        perplexity.score("b", "y", SECOND, [3, 7, 8], cpu_s=1.25),
    ]

    *_, first, second = perplexity.table(scores).split("\n")

    assert first == "| a | x | 4.0000 | +0.000% | 100.00% | 0.0 |"
    assert second == "| b | y | 2.0000 | -50.000% | 50.00% | 1.2 |"


def test_the_text_is_long_enough_to_tell_and_short_enough_to_wait_for():
    words = perplexity._TEXT.read_text().split()

    assert 1000 < len(words) < 1500
