"""Products by the compiled loops beside fbgemm: both multiply by the same, and the table."""

from __future__ import annotations

import half_linear
import pytest
import torch
from half_linear import SHAPES, Products
from lmscope_kernels.half_linear_cpu import why_no_half_loops


@pytest.mark.skipif(
    why_no_half_loops() is not None or "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="needs the extra cpu, and fbgemm",
)
def test_both_ways_multiply_by_the_same_weights():
    loops, fbgemm = (Products(in_loops, num_layers=1, head=(70, 576)) for in_loops in (True, False))

    products = loops.multiply(3)

    assert loops.num_weights == fbgemm.num_weights == sum(a * b for a, b in (*SHAPES, (70, 576)))
    assert [each.shape[1] for each in products] == [960, 576, 3072, 576, 70]
    for got, expected in zip(products, fbgemm.multiply(3), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_line_has_both_ways_ratios_within_pairs_and_rates():
    *_, line = half_linear.table({2: {"loops": [1.0, 2.0, 4.0], "fbgemm": [4.0] * 3}}, 10**9)

    assert line == ("| 2 | 2.0, 1.5 to 3.0 | 4.0, 4.0 to 4.0 | 2.00, 1.50 to 3.00 | 4000 | 1000 |")


def test_pairs_must_be_at_least_one():
    with pytest.raises(SystemExit):
        half_linear.main(["--pairs", "0"])
