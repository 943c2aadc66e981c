"""Of equal values the lowest ids, where that is asked for; else the largest as torch finds them."""

from __future__ import annotations

import math

import pytest
import torch

from lmscope.execute.token_logprobs import gather_logprobs

TOKENS = torch.tensor([0, 1])


@pytest.mark.parametrize("k", [0, 1, 3, -1])
def test_without_ties_both_give_the_same(k):
    # Both sides of zero, and what has no probability.
    values = torch.randn(2, 40) * 5
    values[1, 7] = -math.inf

    asked = gather_logprobs(values, TOKENS, k, are_ties_by_id=True)

    assert asked == gather_logprobs(values, TOKENS, k)
    assert len(asked.logprobs[0]) == 1 + (40 if k == -1 else k)


def test_of_equal_values_the_lowest_ids_are_first():
    values = torch.tensor([[1.0, -2.0, 3.0, 3.0, -2.0, 3.0], [-4.0, 0.0, -4.0, -9.0, 0.0, -4.0]])

    asked = gather_logprobs(values, TOKENS, 4, are_ties_by_id=True)

    assert asked.logprob_token_ids == ((0, 2, 3, 5, 0), (1, 1, 4, 0, 2))
    assert asked.logprobs == ((1.0, 3.0, 3.0, 3.0, 1.0), (0.0, 0.0, 0.0, -4.0, -4.0))
    assert asked.sampled_token_ranks == (4, 2)


def test_rows_do_not_notice_how_many_there_are():
    values = torch.randint(-3, 3, (40, 30)).float()
    token_ids = torch.arange(40) % 30

    together = gather_logprobs(values, token_ids, 5, are_ties_by_id=True)

    for row in (0, 15, 16, 39):
        alone = gather_logprobs(
            values[row : row + 1], token_ids[row : row + 1], 5, are_ties_by_id=True
        )
        assert alone.logprob_token_ids[0] == together.logprob_token_ids[row]


def test_no_rows_are_no_work():
    asked = gather_logprobs(torch.empty(0, 9), TOKENS[:0], 3, are_ties_by_id=True)

    assert asked.logprobs == ()
