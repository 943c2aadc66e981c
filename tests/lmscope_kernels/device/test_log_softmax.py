"""log_softmax: log probabilities against float64, and the bits of a row in any company."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.log_softmax import log_softmax, log_softmax_reference

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DTYPES, poisoned, randn, relative_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 97), (5, 4097), (2, 151_936)])
def test_log_probabilities_equal_the_reference(num_rows, vocab_size, dtype):
    logits = (5 * randn(num_rows, vocab_size)).to(dtype)
    out = poisoned(num_rows, vocab_size)

    assert log_softmax(logits, out=out) is out

    assert relative_error(out, log_softmax_reference(logits)) < 1e-6
    assert torch.allclose(out.double().exp().sum(dim=-1), torch.ones_like(out[:, 0]).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [97, 50_257])
def test_a_row_has_the_same_bits_wherever_it_stands(vocab_size, dtype):
    """Rows of an odd number of tokens, each beginning elsewhere between two multiples of 16."""
    logits = randn(9, vocab_size, dtype=dtype)
    wide = torch.zeros(9, vocab_size + 15, dtype=dtype, device=logits.device)
    wide[:, :vocab_size] = logits
    whole = log_softmax(logits)

    for row in range(9):
        assert torch.equal(log_softmax(logits[row : row + 1])[0], whole[row])
        assert torch.equal(log_softmax(logits[row:])[0], whole[row])
    assert torch.equal(log_softmax(wide[:, :vocab_size]), whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's
def test_barred_tokens_and_rows_that_are_no_numbers():
    logits = randn(3, 40)
    logits[0, :39] = -math.inf
    logits[1, 7] = torch.nan
    logits[2] = -math.inf

    out = log_softmax(logits)

    assert out[0].tolist() == [-math.inf] * 39 + [0.0]
    assert out[1:].isnan().all()


def test_no_rows_are_no_work_and_other_shapes_are_refused():
    assert log_softmax(randn(0, 40)).shape == (0, 40)
    with pytest.raises(ValueError, match=r"logits have strides \(1, 3\)"):
        log_softmax(randn(40, 3).t())
    with pytest.raises(ValueError, match=r"out"):
        log_softmax(randn(2, 40), out=poisoned(2, 41))
    with pytest.raises(RuntimeError, match="float64"):
        log_softmax(randn(2, 40).double())
