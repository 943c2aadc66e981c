"""The ways by which a CPU and other devices find what top-p keeps are one function."""

from __future__ import annotations

import math

import pytest
import torch

from lmscope.execute import logits_filters
from lmscope.execute.logits_filters import filter_min_p, filter_top_k, filter_top_p


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("vocab_size", [7, 1_000, 30_011])
def test_a_cpu_finds_the_same_threshold_to_the_bit(spread: float, vocab_size: int):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = spread * torch.randn(9, vocab_size, generator=generator)
    logits[1, : vocab_size // 2] = -math.inf
    logits[2] = 1.0
    logits[3, 1:] = -math.inf
    top_p = torch.tensor([0.9, 0.5, 0.99, 0.1, 0.999999, 1e-6, 0.95, 0.7, 1 - 2.0**-24])
    weights = logits.softmax(dim=-1)
    top_p, total = top_p.double(), weights.sum(dim=-1, dtype=torch.float64)

    on_cpu = logits_filters._top_p_threshold_on_cpu(weights.numpy(), top_p, total)

    assert on_cpu.equal(logits_filters._top_p_threshold(weights, top_p, total))


@pytest.mark.parametrize("function", [filter_min_p, filter_top_k, filter_top_p])
def test_a_row_of_nan_stays_one_and_harms_no_other(function):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5_000, generator=generator)
    values = torch.tensor([3, 3, 3]) if function is filter_top_k else torch.tensor([0.5] * 3).log()
    if function is filter_top_p:
        values = values.exp()
    alone = logits.clone()
    function(alone, values)
    with_nan = logits.clone()
    with_nan[1, 77] = math.nan

    function(with_nan, values)

    assert with_nan[1].isnan().any()
    assert with_nan[0].equal(alone[0])
    assert with_nan[2].equal(alone[2])


def test_tokens_that_are_barred_already_do_not_count_among_the_k():
    logits = torch.full((1, 5_000), -math.inf)
    logits[0, [3, 4_000]] = torch.tensor([1.0, 2.0])

    filter_top_k(logits, torch.tensor([5]))

    assert (logits > -math.inf).nonzero()[:, 1].tolist() == [3, 4_000]
