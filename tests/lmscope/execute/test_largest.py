"""The largest score of each row, as torch's own `max` finds it."""

from __future__ import annotations

import math

import pytest
import torch

from lmscope.execute.largest import largest, largest_k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 49_152), (16, 1_000), (5, 7)])
def test_it_is_what_max_finds(shape, dtype):
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, token_ids = largest(scores)
    expected = scores.max(dim=-1)
    assert values.equal(expected.values)
    assert token_ids.equal(expected.indices)
    assert token_ids.dtype is torch.int64


def test_the_first_of_equal_ones_is_taken():
    assert largest(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]))[1].tolist() == [1, 0]


def test_nothing_but_barred_tokens_is_minus_infinity():
    assert largest(torch.full((1, 4), -math.inf))[0].tolist() == [-math.inf]


def test_a_row_with_nan_says_so_and_leaves_the_others_alone():
    values, token_ids = largest(torch.tensor([[1.0, math.nan, 5.0], [1.0, 2.0, 0.0]]))
    assert math.isnan(values[0])
    assert (values[1].item(), token_ids[1].item()) == (2.0, 1)


def test_columns_of_a_larger_table_are_read_where_they_lie():
    table = torch.arange(12.0).reshape(3, 4)
    assert largest(table[:, 1:3])[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("k", [1, 5, 64, 300])
@pytest.mark.parametrize("vocab_size", [600, 49_152, 50_257])
def test_the_k_largest_are_those_of_a_whole_sort(k: int, vocab_size: int):
    generator = torch.Generator().manual_seed(k)
    # Coarse, so that many are equal.
    scores = (8 * torch.randn(4, vocab_size, generator=generator)).round()
    scores[1] = torch.randn(vocab_size, generator=generator)
    scores[2, k:] = -math.inf
    scores[3, vocab_size - k :] += 100.0

    values, token_ids = largest_k(scores, k)

    assert values.equal(scores.sort(dim=-1, descending=True).values[:, :k])
    assert scores.gather(1, token_ids).equal(values)
    assert all(len(set(row)) == k for row in token_ids.tolist())


def test_of_equal_ones_the_first_come_first():
    scores = torch.zeros(2, 20_000)
    scores[0, [7, 900, 19_999]] = 1.0

    _, token_ids = largest_k(scores, 4)

    assert token_ids.tolist() == [[7, 900, 19_999, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("k", [1, 4])
def test_nan_and_too_few_numbers_are_treated_as_topk_does(k: int):
    scores = torch.full((3, 5_000), -math.inf)
    scores[0, :2] = torch.tensor([1.0, math.nan])
    scores[1, 4_999] = 3.0
    scores[2] = torch.arange(5_000.0)

    values, token_ids = largest_k(scores, k)

    assert values.nan_to_num(9e9).equal(scores.topk(k, dim=-1).values.nan_to_num(9e9))
    assert token_ids[2].tolist() == list(range(4_999, 4_999 - k, -1))
