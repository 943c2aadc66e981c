"""The rejection sampler, with probabilities small enough to check by eye."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lmscope.speculate.rejection_sampler import rejection_sample


class Draws:
    """Draws the most likely token, and keeps what it was asked to draw from."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.probs: list[list[float]] = []

    def __call__(self, log_probs: Tensor, rows: list[int]) -> Tensor:
        self.rows += rows
        self.probs += [[round(value, 4) for value in row] for row in log_probs.exp().tolist()]
        return log_probs.argmax(dim=-1)


def never_draws(log_probs: Tensor, rows: list[int]) -> Tensor:
    raise AssertionError("nothing is to be drawn")


def peaks(*token_ids: int) -> Tensor:
    """Rows of logits with their largest at these tokens."""
    return torch.eye(16)[list(token_ids)]


def greedy(
    best: Sequence[int], drafts: Sequence[Sequence[int]], bonus: Sequence[int]
) -> list[tuple[int, ...]]:
    unused = torch.full((len(best),), math.nan, dtype=torch.float64)
    is_greedy = [True] * len(drafts)
    return rejection_sample(peaks(*best), drafts, bonus, is_greedy, unused, never_draws)


def random(
    target: Sequence[Sequence[float]],
    drafts: Sequence[Sequence[int]],
    uniform: Sequence[float],
    draw: Any,
    draft_probs: Sequence[Sequence[float]] | None = None,
) -> list[tuple[int, ...]]:
    """With bonus tokens 90, 91, ..."""
    return rejection_sample(
        torch.tensor(target).log(),
        drafts,
        [90 + i for i in range(len(drafts))],
        [False] * len(drafts),
        torch.tensor(uniform, dtype=torch.float64),
        draw,
        None if draft_probs is None else torch.tensor(draft_probs),
    )


# -- greedy ------------------------------------------------------------------------------


def test_all_drafts_that_are_the_most_likely_tokens_stay_and_the_bonus_follows():
    assert greedy([11, 12, 13], [[11, 12, 13]], [14]) == [(11, 12, 13, 14)]


def test_the_first_other_draft_is_replaced_and_the_rest_dropped():
    assert greedy([11, 7, 13], [[11, 12, 13]], [14]) == [(11, 7)]


def test_v1_the_first_draft_is_checked_like_the_rest():
    assert greedy([7, 12, 13], [[11, 12, 13]], [14]) == [(7,)]


def test_each_request_is_judged_by_its_own_rows():
    drafts = [[1, 2], [], [3], [4, 5, 6]]

    tokens = greedy([1, 2, 9, 4, 5, 8], drafts, [10, 11, 12, 13])

    assert tokens == [(1, 2, 10), (11,), (9,), (4, 5, 8)]


def test_requests_without_drafts_get_their_bonus_tokens():
    assert greedy([], [[], []], [10, 11]) == [(10,), (11,)]


# -- random, drafts that are certain -----------------------------------------------------


def test_a_draft_stays_when_its_probability_is_at_least_the_drawn_number():
    target = [[0.25, 0.75], [0.5, 0.5]]

    assert random(target, [[0, 1]], [0.25, 0.5], never_draws) == [(0, 1, 90)]
    assert random(target, [[0, 1]], [0.2501, 0.5], Draws()) == [(1,)]
    assert random(target, [[0, 1]], [0.25, 0.5001], Draws()) == [(0, 0)]


def test_a_replacement_is_drawn_from_the_target_without_the_draft():
    draws = Draws()

    tokens = random([[0.5, 0.3, 0.2]] * 2, [[2, 0]], [0.1, 0.9], draws)

    assert tokens == [(2, 1)]
    assert draws.rows == [1]
    assert draws.probs == [[0.0, 0.3, 0.2]]


def test_at_most_one_row_of_each_request_is_drawn():
    draws = Draws()
    target = [[0.5, 0.3, 0.2]] * 5

    random(target, [[0, 0], [1], [2, 2]], [0.9, 0.9, 0.1, 0.1, 0.9], draws)

    assert draws.rows == [0, 4]


def test_a_barred_draft_never_stays():
    assert random([[0.0, 1.0]], [[0]], [2.0**-53], Draws()) == [(1,)]


def test_the_only_token_left_always_stays():
    assert random([[0.0, 1.0]], [[1]], [1 - 2.0**-53], never_draws) == [(1, 90)]


# -- random, drafts with probabilities ---------------------------------------------------


def test_a_draft_stays_with_the_ratio_of_its_probabilities():
    target, draft = [[0.3, 0.7]], [[0.6, 0.4]]

    assert random(target, [[0]], [0.4999], never_draws, draft) == [(0, 90)]
    assert random(target, [[0]], [0.5001], Draws(), draft) == [(1,)]
    assert random(target, [[1]], [0.9999], never_draws, draft) == [(1, 90)]


def test_a_replacement_is_drawn_from_what_the_target_has_more():
    draws = Draws()

    tokens = random([[0.1, 0.5, 0.4]], [[0]], [0.9], draws, [[0.6, 0.1, 0.3]])

    assert tokens == [(1,)]
    assert draws.probs == [[0.0, 0.4, 0.1]]


def test_a_draft_that_could_not_have_been_drawn_does_not_stay():
    assert random([[0.5, 0.5]], [[0]], [0.0001], Draws(), [[0.0, 1.0]]) == [(0,)]
    # Nothing is left of the target, so the replacement comes from the target itself.
    assert random([[0.0, 1.0]], [[0]], [0.0001], Draws(), [[0.0, 1.0]]) == [(1,)]


# -- mixed ---------------------------------------------------------------------------------


def test_a_greedy_request_among_random_ones_takes_its_most_likely_tokens():
    draws = Draws()
    target = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.4, 0.6]]).log()
    uniform = torch.tensor([0.1, 0.1, 0.9], dtype=torch.float64)

    tokens = rejection_sample(
        target, [[0], [0], [0]], [7, 8, 9], [False, True, False], uniform, draws
    )

    assert tokens == [(0, 7), (1,), (1,)]
    assert draws.rows == [2]


def test_every_draft_needs_a_row_of_logits():
    with pytest.raises(AssertionError):
        greedy([1, 2], [[1, 2, 3]], [9])
