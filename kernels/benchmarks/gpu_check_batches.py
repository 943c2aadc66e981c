"""What gpu_check.py runs kernels on: shapes of models, batches of random numbers, and two backends.

R requests, H query heads, K KV heads, D head size, S tokens per block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BLOCK_SIZE",
    "SHAPES",
    "Kernels",
    "PagedBatch",
    "Shape",
    "kernels_for",
    "make_batch",
    "make_sampling",
    "random_bits",
]

BLOCK_SIZE = 16


class Shape(NamedTuple):
    """A model as kernels see it; step_goal_us is that of a decode step of 64 requests."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    step_goal_us: float


# The first has no power of two in it, and no goal of its own.
SHAPES = (
    Shape("135M", 9, 3, 64, 576, 1536, 49_152, 30, 3000.0),
    Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072, 151_936, 28, 3000.0),
    Shape("Llama-3.2-1B", 32, 8, 64, 2048, 8192, 128_256, 16, 1700.0),
    Shape("Llama-3.1-8B", 32, 8, 128, 4096, 14_336, 128_256, 32, 6900.0),
)


class Kernels(NamedTuple):
    """The kernels of one backend, each called as the launcher in lmscope_kernels is.

    attention    (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale,
                 window, fixed_tile)
    decode       (query, key_cache, value_cache, block_table, seq_lens, scale) -> output, lse,
                 block_lse; with its last argument False the last of them may hold anything
    """

    rms_norm: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    decode: Callable[..., tuple[Tensor, Tensor, Tensor]]
    block_attention_mass: Callable[..., None]
    sample: Callable[..., Tensor]
    apply_token_bitmask: Callable[..., None]
    store_kv: Callable[..., None]


def kernels_for(device: str) -> Kernels:
    """Those of Triton on "cuda", the torch references on "cpu"; these take any device's tensors."""
    from lmscope_kernels import (
        block_attention_mass as mass,
        paged_attention,
        paged_decode,
        rms_norm,
        sampling,
        silu_mul,
        store_kv,
        token_bitmask,
        unified_attention,
    )

    if device == "cpu":
        return Kernels(
            rms_norm.rms_norm_reference,
            silu_mul.silu_mul_reference,
            lambda *arguments: paged_attention.paged_attention_reference(*arguments[:-1]),
            lambda *arguments: paged_decode.paged_decode_reference(*arguments[:-1]),
            mass.block_attention_mass_reference,
            sampling.sample_reference,
            token_bitmask.apply_token_bitmask_reference,
            store_kv.store_kv_reference,
        )
    spaces: dict[Any, Any] = {}

    def decode(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
        seq_lens: Tensor, scale: float, has_block_lse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        R, H, D = query.shape
        max_blocks = block_table.shape[1]
        # A captured graph must find its workspace where it was.
        key = (R, H, D, max_blocks)
        if key not in spaces:
            spaces[key] = (
                paged_decode.DecodeWorkspace.allocate(R, H, D, max_blocks * BLOCK_SIZE, device),
                torch.empty(R, H, device=device),
                torch.empty(R, H, max_blocks, device=device),
            )
        workspace, lse, block_lse = spaces[key]
        out = paged_decode.paged_decode(
            query, key_cache, value_cache, block_table, seq_lens, scale,
            workspace=workspace, lse=lse, block_lse=block_lse if has_block_lse else None,
        )  # fmt: skip
        return out, lse, block_lse

    def attention(*arguments: Any) -> Tensor:
        *tensors_and_scale, window, fixed_tile = arguments
        return unified_attention.paged_attention(
            *tensors_and_scale, window=window, fixed_tile=fixed_tile
        )

    return Kernels(
        rms_norm.rms_norm,
        silu_mul.silu_mul,
        attention,
        decode,
        mass.block_attention_mass,
        sampling.sample,
        token_bitmask.apply_token_bitmask,
        store_kv.store_kv,
    )


@dataclass(frozen=True)
class PagedBatch:
    """Requests whose keys and values lie in shuffled blocks; what no request owns is 0.

    query              [T, H, D]
    query_start_loc    [R + 1]
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float

    def attend(
        self,
        kernels: Kernels,
        *,
        double: bool = False,
        window: int | None = None,
        fixed_tile: bool = False,
    ) -> Tensor:
        """paged_attention; with `double` in float64, which the references can do.

        fixed_tile    as in a batch-invariant engine; else as in any other
        """
        return kernels.attention(
            *self._caches(double),
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.scale,
            window,
            fixed_tile,
        )

    def decode(
        self, kernels: Kernels, *, double: bool = False, has_block_lse: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, lse and block_lse; one query row each."""
        return kernels.decode(
            *self._caches(double), self.block_table, self.seq_lens, self.scale, has_block_lse
        )

    def mass(self, kernels: Kernels, *, double: bool = False) -> Tensor:
        """Shares of the blocks, [R, max_blocks], after a decode."""
        _, lse, block_lse = self.decode(kernels, double=double, has_block_lse=True)
        out = torch.zeros(self.block_table.shape, dtype=lse.dtype, device=lse.device)
        kernels.block_attention_mass(block_lse, lse, out, self.seq_lens, BLOCK_SIZE)
        return out

    def rows(self, first: int, end: int) -> PagedBatch:
        """Some requests of a batch with one query row each."""
        return replace(
            self,
            query=self.query[first:end],
            block_table=self.block_table[first:end],
            seq_lens=self.seq_lens[first:end],
            query_start_loc=self.query_start_loc[: end - first + 1],
        )

    def chunk(self, first: int, end: int) -> PagedBatch:
        """Some tokens of a batch that is one prompt, with all keys stored."""
        numbers = torch.tensor([end, 0, end - first], dtype=torch.int32, device=self.query.device)
        return replace(
            self, query=self.query[first:end], seq_lens=numbers[:1], query_start_loc=numbers[1:]
        )

    def _caches(self, double: bool) -> tuple[Tensor, Tensor, Tensor]:
        three = self.query, self.key_cache, self.value_cache
        return tuple(each.double() for each in three) if double else three  # type: ignore[return-value]  # three go in


def make_batch(
    shape: Shape, seq_lens: list[int], query_lens: list[int], dtype: torch.dtype, device: str
) -> PagedBatch:
    """Random queries, keys and values; a length of 0 makes a row of padding."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
    block_ids = 1 + torch.randperm(sum(num_blocks))
    table = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    first = 0
    for row, count in enumerate(num_blocks):
        table[row, :count] = block_ids[first : first + count]
        first += count
    cache_shape = (1 + sum(num_blocks), BLOCK_SIZE, shape.num_kv_heads, shape.head_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    query_shape = (sum(query_lens), shape.num_heads, shape.head_size)
    query, key_cache, value_cache = (
        torch.randn(size, device=device, dtype=dtype)
        for size in (query_shape, cache_shape, cache_shape)
    )
    return PagedBatch(
        query,
        key_cache,
        value_cache,
        table.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        starts.to(device),
        shape.head_size**-0.5,
    )


def make_sampling(
    num_rows: int, vocab_size: int, has_filters: bool, device: str
) -> tuple[Tensor | None, ...]:
    """The arguments of `sample`: logits of a usual spread, top-k 50 and top-p 0.9 or neither."""

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return (
        torch.randn(num_rows, vocab_size, device=device) * 3,
        column(0.8, torch.float32),
        column(50, torch.int32) if has_filters else None,
        column(0.9, torch.float32) if has_filters else None,
        None,
        torch.randint(1 << 60, (num_rows,)).to(device),
        torch.arange(num_rows, device=device),
    )


def random_bits(num_masks: int, vocab_size: int, device: str) -> Tensor:
    """Masks in which about half of the tokens are allowed: [num_masks, ceil(V / 32)] int32."""
    words = torch.randint(-(1 << 31), 1 << 31, (num_masks, -(-vocab_size // 32)))
    return words.to(device, torch.int32)
