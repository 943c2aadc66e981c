"""KernelAttention: a batch attended to by the Triton kernels, which read it on the device.

Nothing here depends on what is in the batch, only on its padded sizes, so a forward can be
captured in a CUDA graph and run again with other contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from lmscope_kernels.block_attention_mass import block_attention_mass
from lmscope_kernels.paged_decode import DecodeWorkspace, paged_decode
from lmscope_kernels.store_kv import store_kv
from lmscope_kernels.unified_attention import paged_attention
from torch import Tensor

__all__ = ["DecodeMass", "DecodeScratch", "KernelAttention", "readable"]

_SPLIT = 256  # tokens of a split of the decode kernel; fixed, see its file
# Partial results of splits take more only where long requests meet a large batch, and such a
# batch has enough rows to keep a GPU busy without splits.
_MOST_SCRATCH_BYTES = 256 << 20


class DecodeScratch:
    """Memory for the partial results of the decode kernel, allocated once for an engine."""

    def __init__(
        self,
        max_num_reqs: int,
        num_heads: int,
        head_size: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self._heads, self._head_size = num_heads, head_size
        row_bytes = num_heads * (head_size + 1) * 4
        most = max_num_reqs * -(-max_seq_len // _SPLIT)
        self.num_splits = max(1, min(most, _MOST_SCRATCH_BYTES // row_bytes))
        numbers = self.num_splits * num_heads
        self._output = torch.empty(numbers * head_size, dtype=torch.float32, device=device)
        self._lse = torch.empty(numbers, dtype=torch.float32, device=device)

    def workspace(self, num_reqs: int, max_seq_len: int) -> DecodeWorkspace | None:
        """For a batch of so many rows; None when its splits do not fit."""
        each = -(-max_seq_len // _SPLIT)
        if num_reqs * each > self.num_splits:
            return None
        shape = (num_reqs, self._heads, each)
        numbers = num_reqs * self._heads * each
        return DecodeWorkspace(
            output=self._output[: numbers * self._head_size].view(*shape, self._head_size),
            lse=self._lse[:numbers].view(shape),
            split=_SPLIT,
        )


class DecodeMass:
    """The attention mass of a batch in which each request has one row, summed over layers.

    share        [R, max_blocks]      sum over the layers so far
    layers       what each layer and head gave, when it is kept: [R, H, max_blocks] each
    """

    def __init__(
        self,
        num_reqs: int,
        num_heads: int,
        max_blocks: int,
        device: torch.device,
        keeps_heads: bool,
    ) -> None:
        self.keeps_heads = keeps_heads
        self.share = torch.zeros(num_reqs, max_blocks, dtype=torch.float32, device=device)
        self.lse = torch.empty(num_reqs, num_heads, dtype=torch.float32, device=device)
        self.block_lse = torch.full((num_reqs, num_heads, max_blocks), -torch.inf, device=device)
        self.layers: list[Tensor] = []
        self.num_layers = 0

    def mean(self) -> Tensor:
        """As of an AttentionMass, with rows of padding and all columns of the table."""
        return self.share / self.num_layers

    def heads(self) -> Tensor:
        return torch.stack(self.layers, dim=1)

    def add(self, seq_lens: Tensor, block_size: int, window: int | None) -> None:
        """Take one layer in, which has just written `lse` and `block_lse`."""
        self.num_layers += 1
        block_attention_mass(self.block_lse, self.lse, self.share, seq_lens, block_size, window)
        if self.keeps_heads:
            self.layers.append(torch.exp2(self.block_lse - self.lse[:, :, None]))
            # The next layer may have a window, and writes nothing of what that hides.
            self.block_lse.fill_(-torch.inf)


@dataclass(frozen=True)
class KernelAttention:
    """How the kernels attend to one batch.

    slot_mapping       [T]       int64; -1 in padding
    query_start_loc    [R + 1]   int32; all on the device, as in BatchView
    seq_lens           [R]       int32; 0 in padding
    block_table        [R, max_blocks]   int32
    workspace          for a batch of one row a request; None: the kernel for all batches
    has_fixed_tile     that kernel takes one tile for all batches, so that a row has the same bits
                       in each of them
    """

    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    workspace: DecodeWorkspace | None
    mass: DecodeMass | None = None
    has_fixed_tile: bool = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store, then attend; parameters and result as in BatchView.attend."""
        query, key, value = readable(query), readable(key), readable(value)
        # All of it first: a request may hit a block that another one fills in this step.
        store_kv(key, value, key_cache, value_cache, self.slot_mapping)
        if self.workspace is None:
            return paged_attention(
                query,
                key_cache,
                value_cache,
                self.block_table,
                self.seq_lens,
                self.query_start_loc,
                scale,
                window=window,
                softcap=softcap,
                fixed_tile=self.has_fixed_tile,
            )
        mass = self.mass
        output = paged_decode(
            query,
            key_cache,
            value_cache,
            self.block_table,
            self.seq_lens,
            scale,
            workspace=self.workspace,
            window=window,
            softcap=softcap,
            lse=None if mass is None else mass.lse,
            block_lse=None if mass is None else mass.block_lse,
        )
        if mass is not None:
            mass.add(self.seq_lens, key_cache.shape[1], window)
        return output


def readable(rows: Tensor) -> Tensor:
    """The same numbers where the kernels can read them: strides that are multiples of 16."""
    return (
        rows
        if _are_fine(rows.stride()) and rows.data_ptr() % 16 == 0
        else rows.clone(memory_format=torch.contiguous_format)
    )


# The layers of a step have the same few.
@lru_cache(maxsize=256)
def _are_fine(strides: tuple[int, ...]) -> bool:
    *others, last = strides
    return last == 1 and not any(stride % 16 for stride in others)
