"""What kernel tests share: where they run, how near is right, and paged caches of random numbers.

They run on a GPU where there is one, and under Triton's interpreter else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lmscope_kernels.triton_support import INTERPRET
from torch import Tensor

IS_INTERPRETED = bool(INTERPRET)
DEVICE = torch.device("cpu") if IS_INTERPRETED else torch.device("cuda", 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Of ‖output - reference‖ / ‖reference‖, the latter in float64. The interpreter cuts float32 to
# bfloat16 instead of rounding.
LIMITS = {
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3 if IS_INTERPRETED else 5e-3,
}

# Query heads, KV heads, head size. The first is the demo model's shape: no power of two.
SHAPES = [(9, 3, 64), (4, 2, 80), (4, 4, 96), (8, 2, 128)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN everywhere: what a kernel leaves unwritten shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def relative_error(output: Tensor, reference: Tensor) -> float:
    """‖output - reference‖ / ‖reference‖ in float64; NaN, which no limit admits, where one is."""
    output, reference = output.double(), reference.double()
    return ((output - reference).norm() / reference.norm()).item()


@dataclass(frozen=True)
class PagedBatch:
    """Requests with their keys and values in a shuffled cache; what no request owns is NaN.

    A sequence of length 0 is a padding row of the batch.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor


def paged_batch(
    seq_lens: list[int],
    query_lens: list[int],
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
) -> PagedBatch:
    """A cache just large enough, each request's blocks in random order; table padded with 0."""
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    block_ids = (1 + torch.randperm(sum(num_blocks))).tolist()
    block_table = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    shape = (1 + len(block_ids), block_size, num_kv_heads, head_size)
    key_cache, value_cache = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype)
    for request, seq_len in enumerate(seq_lens):
        own = [block_ids.pop() for _ in range(num_blocks[request])]
        block_table[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for index, block_id in enumerate(own):
            used = min(block_size, seq_len - index * block_size)
            for cache in (key_cache, value_cache):
                cache[block_id, :used] = randn(used, num_kv_heads, head_size, dtype=dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return PagedBatch(
        key_cache,
        value_cache,
        block_table.to(DEVICE),
        ints(seq_lens),
        starts.to(DEVICE, torch.int32),
    )
