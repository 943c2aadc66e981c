"""Unified paged attention: prompts, chunks and decode rows of one launch, against float64."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from lmscope_kernels.paged_attention import paged_attention_reference
from lmscope_kernels.unified_attention import paged_attention

sys.path.insert(0, str(Path(__file__).parent))
from kernel_testing import (
    DTYPES,
    IS_INTERPRETED,
    LIMITS,
    SHAPES,
    PagedBatch,
    ints,
    paged_batch,
    poisoned,
    randn,
    relative_error,
)

# Tokens of each request, and how many of them are rows of this step: a decode row, a chunk, a
# row of padding, a whole prompt, a request without rows and a decode row of a short request.
if IS_INTERPRETED:
    SEQ_LENS, QUERY_LENS = [70, 90, 0, 40, 20, 3], [1, 45, 1, 40, 0, 1]
else:
    SEQ_LENS, QUERY_LENS = [3001, 4096, 0, 1500, 20, 3], [1, 1000, 1, 1500, 0, 1]


def arguments(batch: PagedBatch) -> list[torch.Tensor]:
    return [
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
    ]


def exactly(batch: PagedBatch, query, scale, **options):
    """The reference in float64, from the same rounded inputs."""
    key_cache, value_cache, *rest = arguments(batch)
    return paged_attention_reference(
        query.double(), key_cache.double(), value_cache.double(), *rest, scale, **options
    )


def queries(batch: PagedBatch, num_heads: int, dtype: torch.dtype, num_padding: int = 2):
    num_rows = int(batch.query_start_loc[-1]) + num_padding
    return randn(num_rows, num_heads, batch.key_cache.shape[-1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "block_size"), list(zip(SHAPES, (16, 24, 32, 16), strict=True)), ids=str
)
def test_a_mixed_batch_equals_the_reference(shape, block_size, dtype):
    num_heads, num_kv_heads, head_size = shape
    batch = paged_batch(SEQ_LENS, QUERY_LENS, num_kv_heads, head_size, block_size, dtype)
    query = queries(batch, num_heads, dtype)
    out = poisoned(*query.shape, dtype=dtype)
    scale = head_size**-0.5

    assert paged_attention(query, *arguments(batch), scale, out=out, check=True) is out

    assert relative_error(out, exactly(batch, query, scale)) < LIMITS[dtype]


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, None), (None, 3.0), (33, 3.0)])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]], ids=str)
@pytest.mark.parametrize("fixed_tile", [False, True])
def test_a_window_and_a_soft_cap_equal_the_reference(shape, window, softcap, fixed_tile):
    num_heads, num_kv_heads, head_size = shape
    dtype = torch.float16
    batch = paged_batch(SEQ_LENS, QUERY_LENS, num_kv_heads, head_size, 16, dtype)
    query = queries(batch, num_heads, dtype)
    out = poisoned(*query.shape, dtype=dtype)
    options = {"window": window, "softcap": softcap}

    paged_attention(query, *arguments(batch), 0.3, out=out, fixed_tile=fixed_tile, **options)

    assert relative_error(out, exactly(batch, query, 0.3, **options)) < LIMITS[dtype]


@pytest.mark.parametrize("fixed_tile", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (32, 1, 64)], ids=str)
def test_decode_rows_with_padding_equal_the_reference(shape, fixed_tile):
    """As a captured graph has them: one row a request, and requests without tokens at the end."""
    num_heads, num_kv_heads, head_size = shape
    dtype = torch.bfloat16
    seq_lens = [70, 1, 33, 0, 0] if IS_INTERPRETED else [4097, 1, 33, 1000] + [0] * 12
    batch = paged_batch(seq_lens, [1] * len(seq_lens), num_kv_heads, head_size, 16, dtype)
    query = queries(batch, num_heads, dtype, num_padding=0)
    out = poisoned(*query.shape, dtype=dtype)

    paged_attention(query, *arguments(batch), 0.2, out=out, fixed_tile=fixed_tile)

    assert relative_error(out, exactly(batch, query, 0.2)) < LIMITS[dtype]


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_tile_gives_a_row_its_bits_in_any_chunk(dtype, window):
    """A prompt as a whole, in chunks of 40 and the rest, and its last row as one that decodes.

    NumPy's product depends on where in a tile a row stands, so under the interpreter only rows
    that stay where they are can be compared: those of one loop with those of three.
    """
    length = 96 if IS_INTERPRETED else 1500
    batch = paged_batch([length], [length], 3, 64, 16, dtype)
    query = queries(batch, 9, dtype, num_padding=0)
    options = {"window": window, "fixed_tile": True}
    whole = paged_attention(query, *arguments(batch), 0.2, **options)

    if IS_INTERPRETED:
        options["fixed_tile"] = False
        assert torch.equal(paged_attention(query, *arguments(batch), 0.2, **options), whole)
        return
    for first, end in ((0, 40), (40, length), (length - 1, length)):
        rows = *arguments(batch)[:3], ints([end]), ints([0, end - first])
        part = paged_attention(query[first:end], *rows, 0.2, **options)
        assert torch.equal(part, whole[first:end])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_lse_is_the_logsumexp_of_the_scores_in_base_two(softcap):
    batch = paged_batch([40, 0, 21], [3, 1, 1], 3, 64, 16, torch.float16)
    query = queries(batch, 9, torch.float16)
    lse = poisoned(len(query), 9)

    paged_attention(query, *arguments(batch), 0.3, softcap=softcap, lse=lse)

    expected = torch.full_like(lse, -torch.inf, dtype=torch.float64)
    for request, rows in ((0, range(3)), (2, range(4, 5))):
        keys = batch.key_cache[batch.block_table[request].long()].flatten(0, 1).double()
        for row in rows:
            num_keys = int(batch.seq_lens[request]) - (rows.stop - 1 - row)
            seen = keys[:num_keys].repeat_interleave(3, dim=1)
            scores = torch.einsum("hd,lhd->hl", query[row].double(), seen) * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected[row] = scores.logsumexp(dim=-1) / math.log(2)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-4)


def test_great_scores_neither_overflow_nor_vanish():
    batch = paged_batch([70], [2], 1, 64, 16, torch.float32)
    query = 1000 * queries(batch, 1, torch.float32, num_padding=0)

    out = paged_attention(query, *arguments(batch), 1.0)
    capped = paged_attention(query, *arguments(batch), 1.0, softcap=5.0)

    assert relative_error(out, exactly(batch, query, 1.0)) < 1e-3
    assert relative_error(capped, exactly(batch, query, 1.0, softcap=5.0)) < 1e-5


def test_queries_are_read_and_written_where_they_lie():
    """Query, key and value of a token are one row of a projection."""
    batch = paged_batch([20, 5], [4, 1], 2, 64, 16, torch.float32)
    projected = randn(5, 4 + 2 + 2, 64)
    wide = poisoned(5, 5, 64)

    paged_attention(projected[:, :4], *arguments(batch), 0.2, out=wide[:, :4])

    expected = exactly(batch, projected[:, :4], 0.2)
    assert relative_error(wide[:, :4], expected) < LIMITS[torch.float32]
    assert wide[:, 4].isnan().all()


def test_no_rows_are_no_work():
    batch = paged_batch([20], [0], 2, 64, 16, torch.float32)

    assert paged_attention(randn(0, 4, 64), *arguments(batch), 0.2).shape == (0, 4, 64)


def test_a_block_beyond_the_pool_is_found_before_the_launch():
    batch = paged_batch([20, 40], [1, 1], 1, 64, 16, torch.float32)
    batch.block_table[1, 2] = len(batch.key_cache)
    query, out = queries(batch, 1, torch.float32, num_padding=0), poisoned(2, 1, 64)

    with pytest.raises(ValueError, match=r"request 1 of the batch has block 6 at place 2"):
        paged_attention(query, *arguments(batch), 0.2, out=out, check=True)

    assert out.isnan().all()


def test_what_the_kernel_cannot_take_is_refused():
    batch = paged_batch([20], [1], 2, 64, 16, torch.float32)
    query = randn(1, 4, 64)
    key_cache, value_cache, block_table, *rest = arguments(batch)
    cache = randn(3, 16, 2, 72)[..., :64]
    wide = ints([1, 1, 1, 1]).view(1, 4)[:, ::2]
    one_head = paged_batch([20], [1], 1, 64, 16, torch.float32)
    with pytest.raises(ValueError, match=r"key_cache has strides .*multiples of 16"):
        paged_attention(query, cache, cache, block_table, *rest, 0.2)
    with pytest.raises(TypeError, match=r"value_cache is torch\.float16, must be float32"):
        paged_attention(query, key_cache, value_cache.half(), block_table, *rest, 0.2)
    with pytest.raises(TypeError, match=r"block_table is torch\.int64"):
        paged_attention(query, key_cache, value_cache, block_table.long(), *rest, 0.2)
    with pytest.raises(ValueError, match=r"block_table has stride 2"):
        paged_attention(query, key_cache, value_cache, wide, *rest, 0.2)
    with pytest.raises(ValueError, match=r"3 query heads share 2 KV heads"):
        paged_attention(randn(1, 3, 64), *arguments(batch), 0.2)
    with pytest.raises(ValueError, match=r"query_start_loc is \[3\]"):
        paged_attention(query, key_cache, value_cache, block_table, rest[0], ints([0, 1, 1]), 0.2)
    with pytest.raises(ValueError, match=r"256 query heads share one KV head, the limit is 128"):
        paged_attention(randn(1, 256, 64), *arguments(one_head), 0.2)
    for option in ({"scale": 0.0}, {"window": 0}, {"softcap": 0.0}):
        with pytest.raises(ValueError, match=r"positive|1 or more"):
            paged_attention(query, *arguments(batch), **{"scale": 0.2, **option})
