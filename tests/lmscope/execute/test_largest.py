"""The largest score of each row, as torch's own `max` finds it."""

from __future__ import annotations

import math

import pytest
import torch

from lmscope.execute.largest import largest


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
