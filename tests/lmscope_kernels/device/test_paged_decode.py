"""paged_decode: rows against float64, what blocks receive, padding, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.paged_decode import (
    DecodeWorkspace,
    decode_tile,
    paged_decode,
    paged_decode_reference,
)

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import (
    DEVICE,
    DTYPES,
    IS_INTERPRETED,
    LIMITS,
    SHAPES,
    paged_batch,
    poisoned,
    randn,
    relative_error,
)

# One token, less than a block, whole splits, and more; 0 is padding. A split has 64 tokens here.
SEQ_LENS = [1, 70, 0, 64, 129] if IS_INTERPRETED else [1, 700, 0, 256, 1024, 3000, 17]
SPLIT = 64 if IS_INTERPRETED else 256


def workspace_for(batch, num_heads, head_size, block_size=16):
    max_seq_len = batch.block_table.shape[1] * block_size
    shape = (len(batch.seq_lens), num_heads, -(-max_seq_len // SPLIT))
    return DecodeWorkspace(poisoned(*shape, head_size), poisoned(*shape), SPLIT)


def decode(query, batch, scale, **options):
    return paged_decode(
        query,
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.seq_lens,
        scale,
        **options,
    )


def reference(query, batch, scale, **options):
    # Rows of the table that nobody owns point at the null block, where NaN must not be read.
    caches = (cache.double().nan_to_num() for cache in (batch.key_cache, batch.value_cache))
    return paged_decode_reference(
        query.double(), *caches, batch.block_table, batch.seq_lens, scale, **options
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SHAPES)
def test_rows_and_what_blocks_receive_equal_the_reference(
    num_heads, num_kv_heads, head_size, dtype
):
    batch = paged_batch(SEQ_LENS, [1] * len(SEQ_LENS), num_kv_heads, head_size, 16, dtype)
    query = randn(len(SEQ_LENS), num_heads, head_size, dtype=dtype)
    out, lse = poisoned(*query.shape, dtype=dtype), poisoned(*query.shape[:2])
    block_lse = poisoned(*query.shape[:2], batch.block_table.shape[1])
    scale = head_size**-0.5

    workspace = workspace_for(batch, num_heads, head_size)
    result = decode(query, batch, scale, workspace=workspace, out=out, lse=lse, block_lse=block_lse)

    assert result is out
    expected, expected_lse, expected_block_lse = reference(query, batch, scale)
    assert relative_error(out, expected) < LIMITS[dtype]
    is_own = expected_block_lse > -torch.inf
    assert relative_error(block_lse[is_own], expected_block_lse[is_own]) < LIMITS[dtype]
    # Nothing is written where no block is; whoever reads it knows how many there are.
    assert block_lse[~is_own].isnan().all()
    is_token = batch.seq_lens > 0
    assert relative_error(lse[is_token], expected_lse[is_token]) < LIMITS[dtype]
    assert out[~is_token].count_nonzero() == 0
    assert (lse[~is_token] == -torch.inf).all()


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (40, None), (None, 2.0), (100, 2.0)])
def test_a_window_and_a_soft_cap(window, softcap):
    batch = paged_batch(SEQ_LENS, [1] * len(SEQ_LENS), 3, 64, 16, torch.float32)
    if window is not None:
        # What has slid out of the window may have been given away.
        for row, seq_len in enumerate(SEQ_LENS):
            num_gone = max(seq_len - window, 0) // 16
            batch.block_table[row, :num_gone] = 0
    query = randn(len(SEQ_LENS), 9, 64)
    block_lse = poisoned(len(SEQ_LENS), 9, batch.block_table.shape[1])

    out = decode(
        query,
        batch,
        0.3,
        workspace=workspace_for(batch, 9, 64),
        window=window,
        softcap=softcap,
        block_lse=block_lse,
    )

    expected, _, expected_block_lse = reference(query, batch, 0.3, window=window, softcap=softcap)
    assert relative_error(out, expected) < LIMITS[torch.float32]
    is_own = expected_block_lse > -torch.inf
    assert relative_error(block_lse[is_own], expected_block_lse[is_own]) < LIMITS[torch.float32]


@pytest.mark.parametrize("block_size", [1, 24, 64])
def test_blocks_of_other_sizes(block_size):
    batch = paged_batch(SEQ_LENS, [1] * len(SEQ_LENS), 2, 64, block_size, torch.float32)
    query = randn(len(SEQ_LENS), 4, 64)

    out = decode(query, batch, 0.2, workspace=workspace_for(batch, 4, 64, block_size))

    assert relative_error(out, reference(query, batch, 0.2)[0]) < LIMITS[torch.float32]


def test_watching_and_neighbours_change_no_bit_of_a_row():
    batch = paged_batch(SEQ_LENS, [1] * len(SEQ_LENS), 2, 128, 16, torch.float16)
    query = randn(len(SEQ_LENS), 8, 128, dtype=torch.float16)
    block_lse = poisoned(len(SEQ_LENS), 8, batch.block_table.shape[1])

    together = decode(
        query, batch, 0.1, workspace=workspace_for(batch, 8, 128), block_lse=block_lse
    )

    for row in range(len(SEQ_LENS)):
        alone = paged_decode(
            query[row : row + 1],
            batch.key_cache,
            batch.value_cache,
            batch.block_table[row : row + 1],
            batch.seq_lens[row : row + 1],
            0.1,
            workspace=workspace_for(batch, 8, 128),
        )
        assert torch.equal(alone[0], together[row])


def test_no_rows_are_no_work():
    batch = paged_batch([3], [1], 2, 64, 16, torch.float32)
    workspace = DecodeWorkspace.allocate(1, 4, 64, 16, DEVICE)
    empty = randn(0, 4, 64)

    out = paged_decode(
        empty,
        batch.key_cache,
        batch.value_cache,
        batch.block_table[:0],
        batch.seq_lens[:0],
        1.0,
        workspace=workspace,
    )

    assert out.shape == (0, 4, 64)


def test_what_it_cannot_do_right_is_refused():
    batch = paged_batch([3, 20], [1, 1], 2, 64, 16, torch.float32)
    workspace = DecodeWorkspace.allocate(2, 4, 64, 32, DEVICE)
    query = randn(2, 4, 64)

    with pytest.raises(ValueError, match=r"workspace is \[2, 4, 1, 64\] .* needs more"):
        decode(randn(2, 2, 64), batch, 1.0, workspace=workspace)
    with pytest.raises(ValueError, match="block_table is"):
        decode(randn(3, 4, 64), batch, 1.0, workspace=workspace)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        decode(randn(2, 3, 64), batch, 1.0, workspace=workspace)
    with pytest.raises(TypeError, match=r"key_cache is torch\.float32"):
        decode(query.half(), batch, 1.0, workspace=workspace)
    with pytest.raises(ValueError, match="window is 0"):
        decode(query, batch, 1.0, workspace=workspace, window=0)
    with pytest.raises(ValueError, match="softcap is -1"):
        decode(query, batch, 1.0, workspace=workspace, softcap=-1.0)
    small = DecodeWorkspace.allocate(2, 4, 64, 32, DEVICE, split=8)
    with pytest.raises(ValueError, match="split is 8, must be a multiple"):
        decode(query, batch, 1.0, workspace=small)
    gaps = DecodeWorkspace.allocate(4, 4, 64, 32, DEVICE)
    gaps = DecodeWorkspace(gaps.output[::2], gaps.lse[::2], gaps.split)
    with pytest.raises(ValueError, match=r"workspace has strides .* must be contiguous"):
        decode(query, batch, 1.0, workspace=gaps)
    narrow = batch.key_cache.new_zeros(3, 16, 2, 72)[..., :64]
    with pytest.raises(ValueError, match="key_cache has strides"):
        paged_decode(
            query,
            narrow,
            narrow,
            batch.block_table,
            batch.seq_lens,
            1.0,
            workspace=workspace,
        )


def test_a_block_beyond_the_pool_is_found_when_asked_for():
    batch = paged_batch([3, 20], [1, 1], 2, 64, 16, torch.float32)
    workspace = DecodeWorkspace.allocate(2, 4, 64, 32, DEVICE)
    batch.block_table[1, 1] = 4

    with pytest.raises(ValueError, match="request 1 of the batch has block 4 at place 1"):
        decode(randn(2, 4, 64), batch, 1.0, workspace=workspace, check=True)


def test_blocks_that_do_not_fill_a_tile_cannot_be_watched():
    batch = paged_batch([3], [1], 2, 64, 24, torch.float32)
    block_lse = poisoned(1, 4, 1)

    with pytest.raises(ValueError, match="blocks have 24 tokens"):
        decode(
            randn(1, 4, 64),
            batch,
            1.0,
            workspace=DecodeWorkspace.allocate(1, 4, 64, 24, DEVICE),
            block_lse=block_lse,
        )


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_is_whole_blocks_unless_they_do_not_fit_into_every_gpu(dtype, capability):
    for head_size in (64, 80, 128, 256):
        for block_size in (1, 16, 32, 64):
            num_keys, *_ = decode_tile(dtype, head_size, block_size, capability)
            padded = 1 << (head_size - 1).bit_length()
            is_large = 2 * block_size * padded * dtype.itemsize > 64 << 10
            assert (num_keys % block_size == 0) is not is_large, (head_size, block_size)
