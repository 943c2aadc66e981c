"""block_attention_mass: shares against probabilities, summed over layers, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.block_attention_mass import (
    block_attention_mass,
    block_attention_mass_reference,
)
from lmscope_kernels.paged_decode import DecodeWorkspace, paged_decode

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import DEVICE, DTYPES, IS_INTERPRETED, LIMITS, paged_batch, poisoned, randn

SEQ_LENS = [1, 70, 0, 129] if IS_INTERPRETED else [1, 700, 0, 1024, 3000]
H, K, D, S = 9, 3, 64, 16


def decoded(batch, query, window=None):
    """block_lse and lse of one layer, with NaN where nothing was written."""
    R, max_blocks = batch.block_table.shape
    lse, block_lse = poisoned(R, H), poisoned(R, H, max_blocks)
    paged_decode(
        query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.seq_lens,
        D**-0.5,
        workspace=DecodeWorkspace.allocate(R, H, D, max_blocks * S, DEVICE),
        window=window,
        lse=lse,
        block_lse=block_lse,
    )
    return block_lse, lse


def probabilities_by_block(batch, query, window=None):
    """The mean over heads of softmax, written out in float64 and summed by block."""
    R, max_blocks = batch.block_table.shape
    shares = torch.zeros(R, max_blocks, dtype=torch.float64, device=DEVICE)
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        start = 0 if window is None else max(seq_len - window, 0)
        key = batch.key_cache[batch.block_table[row].long()].flatten(0, 1)[start:seq_len].double()
        key = key.repeat_interleave(H // K, dim=1)
        scores = torch.einsum("hd,lhd->hl", query[row].double(), key) * D**-0.5
        for index, share in enumerate(scores.softmax(dim=-1).mean(dim=0).tolist()):
            shares[row, (start + index) // S] += share
    return shares


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_shares_are_the_probabilities_summed_by_block(window, dtype):
    batch = paged_batch(SEQ_LENS, [1] * len(SEQ_LENS), K, D, S, dtype)
    query = randn(len(SEQ_LENS), H, D, dtype=dtype)
    block_lse, lse = decoded(batch, query, window)
    out = torch.zeros(batch.block_table.shape, device=DEVICE)

    block_attention_mass(block_lse, lse, out, batch.seq_lens, S, window)

    expected = probabilities_by_block(batch, query, window)
    assert (out.double() - expected).abs().max() < LIMITS[dtype]
    is_token = (batch.seq_lens > 0).double()
    assert (out.double().sum(dim=-1) - is_token).abs().max() < 1e-5


def test_layers_add_up_and_what_nobody_wrote_is_not_read():
    batch = paged_batch(SEQ_LENS, [1] * len(SEQ_LENS), K, D, S, torch.float32)
    layers = [decoded(batch, randn(len(SEQ_LENS), H, D)) for _ in range(3)]
    out = torch.zeros(batch.block_table.shape, device=DEVICE)
    expected = torch.zeros(batch.block_table.shape, dtype=torch.float64, device=DEVICE)

    for block_lse, lse in layers:
        block_attention_mass(block_lse, lse, out, batch.seq_lens, S)
        block_attention_mass_reference(block_lse, lse, expected, batch.seq_lens, S)

    assert (out.double() - expected).abs().max() < 1e-6
    is_token = (batch.seq_lens > 0).double()
    assert (out.double().sum(dim=-1) - 3 * is_token).abs().max() < 1e-5


def test_more_blocks_than_one_program_takes():
    seq_lens = torch.tensor([300, 17, 0], dtype=torch.int32, device=DEVICE)
    block_lse, lse = randn(3, 2, 300), randn(3, 2)
    out, expected = torch.ones(3, 300, device=DEVICE), torch.ones(3, 300, device=DEVICE)

    block_attention_mass(block_lse, lse, out, seq_lens, 1)
    block_attention_mass_reference(block_lse, lse, expected, seq_lens, 1)

    assert (out - expected).abs().max() < 1e-4 * expected.max()
    assert (out[1, 17:] == 1).all()
    assert (out[2] == 1).all()


def test_what_does_not_fit_is_refused():
    seq_lens = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"lse is \[2, 3\], must be \[2, 4\]"):
        block_attention_mass(randn(2, 4, 5), randn(2, 3), randn(2, 5), seq_lens, 16)
    with pytest.raises(ValueError, match=r"out is \[2, 4\], must be \[2, 5\]"):
        block_attention_mass(randn(2, 4, 5), randn(2, 4), randn(2, 4), seq_lens, 16)
    with pytest.raises(TypeError, match=r"seq_lens is torch\.int64"):
        block_attention_mass(randn(2, 4, 5), randn(2, 4), randn(2, 5), seq_lens.long(), 16)
    with pytest.raises(ValueError, match="must be contiguous"):
        block_attention_mass(randn(2, 4, 5), randn(4, 2).T, randn(2, 5), seq_lens, 16)
    with pytest.raises(ValueError, match="block_size is 0"):
        block_attention_mass(randn(2, 4, 5), randn(2, 4), randn(2, 5), seq_lens, 0)
