"""apply_token_bitmask: every bit counts, and nothing else is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DEVICE, DTYPES, ints, randn


def random_bits(num_masks, num_words):
    return torch.randint(-(2**31), 2**31, (num_masks, num_words), dtype=torch.int64).to(
        DEVICE, torch.int32
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [37, 1000, 49152, 151936])
def test_barred_tokens_become_impossible_and_others_keep_their_logits(vocab_size, dtype):
    logits = randn(4, vocab_size, dtype=dtype)
    bitmask = random_bits(3, -(-vocab_size // 32))
    rows = ints([2, -1, 0])  # the second mask is padding
    expected = logits.clone()
    apply_token_bitmask_reference(expected, bitmask, rows)

    apply_token_bitmask(logits, bitmask, rows)

    assert torch.equal(logits, expected)
    barred = int((logits[[0, 2]] == -torch.inf).sum())
    assert 0.3 < barred / (2 * vocab_size) < 0.7
    assert not logits[[1, 3]].isinf().any()


def test_bits_are_numbered_from_the_lowest():
    logits = torch.zeros(1, 70, device=DEVICE)
    bitmask = ints([1 << 3, -(2**31), 1])[None]

    apply_token_bitmask(logits, bitmask, ints([0], torch.int64))

    assert (logits[0] == 0).nonzero()[:, 0].tolist() == [3, 63, 64]


def test_rows_of_a_wider_tensor_are_changed_where_they_lie():
    wide = torch.zeros(2, 100, device=DEVICE)

    apply_token_bitmask(
        wide[:, :64], torch.zeros(2, 3, dtype=torch.int32, device=DEVICE), ints([0, 1])
    )

    assert (wide[:, :64] == -torch.inf).all()
    assert (wide[:, 64:] == 0).all()


def test_no_masks_are_no_work():
    logits = torch.zeros(1, 32, device=DEVICE)

    apply_token_bitmask(logits, random_bits(0, 1), ints([]))

    assert (logits == 0).all()


def test_what_does_not_fit_is_refused():
    logits = torch.zeros(2, 100, device=DEVICE)
    with pytest.raises(ValueError, match="3 words a row, a vocabulary of 100 takes 4"):
        apply_token_bitmask(logits, random_bits(1, 3), ints([0]))
    with pytest.raises(ValueError, match=r"rows is \[2\], must be \[1\]"):
        apply_token_bitmask(logits, random_bits(1, 4), ints([0, 1]))
    with pytest.raises(TypeError, match=r"bitmask is torch\.int64"):
        apply_token_bitmask(logits, random_bits(1, 4).long(), ints([0]))
    with pytest.raises(ValueError, match="the last of each must be 1"):
        apply_token_bitmask(torch.zeros(100, 2, device=DEVICE).T, random_bits(1, 4), ints([0]))
