"""AttentionMass: how much attention each block receives in one step, beside the real thing.

For each request it takes the query of its newest token, in every layer and head: what that query
gives to the keys of a block, as a share of all that it gives, is the block's mass. Over the
blocks of a request the shares sum to 1, in each head, so they do in the mean.

    mass[request, block] = mean over layers and heads of the sum of softmax(q . k * scale)
                           over the keys in the block

The attention itself runs as it always does; this reads the same queries and keys once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

__all__ = ["AttentionMass", "ByHead", "by_head_of", "shares_of"]

# Keys are read in float32, of so many requests at a time as take no more than this, or of one.
_MOST_KEY_BYTES = 256 << 20


class ByHead(NamedTuple):
    """What each layer and head gave in one step.

    step      0: none yet
    shares    by request: [layers, H, blocks of its table], each row of blocks sums to 1
    """

    step: int
    shares: dict[str, NDArray[np.float32]]


class AttentionMass:
    """Collects the mass of one step, layer by layer, in the order in which they run.

    query_start_loc    [R + 1]   first row of each request, and the end; no padding here
    seq_lens           [R]       tokens of each request, those of this step included
    block_table        [R, max_blocks]
    keeps_heads        also keep each layer's and head's own, which is what `by_head` gives
    """

    def __init__(
        self,
        *,
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        block_size: int,
        device: torch.device,
        keeps_heads: bool = False,
    ) -> None:
        max_blocks = -(-int(seq_lens.max()) // block_size)
        self._num_blocks = -(-seq_lens // block_size)
        self._newest_rows = _on(device, query_start_loc[1:].astype(np.int64) - 1)
        self._block_ids = _on(device, block_table[:, :max_blocks].astype(np.int64))
        self._lengths = _on(device, seq_lens.astype(np.int64))
        self._positions = torch.arange(max_blocks * block_size, device=device)
        self._block_size = block_size
        self.keeps_heads = keeps_heads
        self._sum: Tensor | None = None
        self._layers: list[Tensor] = []
        self._num_layers = 0

    def add(
        self,
        query: Tensor,
        key_cache: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Take one layer in; its keys are in the cache already.

        query        [T, H, D]
        key_cache    [B, S, K, D]
        """
        newest = query.index_select(0, self._newest_rows).float()
        parts = [
            self._mass_of(newest[rows], rows, num_blocks, key_cache, scale, window, softcap)
            for rows, num_blocks in self._parts(key_cache.shape[2] * key_cache.shape[3])
        ]
        mass = parts[0]
        if len(parts) > 1:
            most = self._block_ids.shape[1]
            mass = torch.cat([F.pad(part, (0, most - part.shape[2])) for part in parts])
        mean = mass.mean(dim=1)
        self._sum = mean if self._sum is None else self._sum.add_(mean)
        self._num_layers += 1
        if self.keeps_heads:
            self._layers.append(mass)

    def _parts(self, numbers_per_token: int) -> Iterator[tuple[slice, int]]:
        """Requests that are looked at together, and the blocks of the longest of them."""
        counts = self._num_blocks.tolist()
        block_bytes = self._block_size * numbers_per_token * 4
        first, longest = 0, 0
        for row, count in enumerate(counts):
            num_bytes = (row + 1 - first) * max(longest, count) * block_bytes
            if row > first and num_bytes > _MOST_KEY_BYTES:
                yield slice(first, row), longest
                first, longest = row, 0
            longest = max(longest, count)
        yield slice(first, len(counts)), longest

    def _mass_of(
        self,
        newest: Tensor,
        rows: slice,
        num_blocks: int,
        key_cache: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[R, H, num_blocks] of one layer, for the R requests of `rows`, with their queries."""
        R, H, D = newest.shape
        K = key_cache.shape[2]
        keys = key_cache[self._block_ids[rows, :num_blocks]].flatten(1, 2).float()  # [R, L, K, D]
        scores = torch.einsum("rkgd,rlkd->rkgl", newest.view(R, K, H // K, D), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions, lengths = self._positions[: keys.shape[1]], self._lengths[rows, None]
        is_hidden = positions >= lengths
        if window is not None:
            is_hidden |= positions < lengths - window
        weights = scores.masked_fill_(is_hidden[:, None, None], -torch.inf).softmax(dim=-1)
        return weights.view(R, H, num_blocks, self._block_size).sum(dim=-1)

    def mean(self) -> Tensor:
        """Over layers and heads, on the device: [R, blocks of the longest]."""
        assert self._sum is not None, "no layer ran"
        return self._sum / self._num_layers

    def heads(self) -> Tensor:
        """Each layer's and head's own, on the device: [R, layers, H, blocks of the longest]."""
        assert self._layers, "keeps_heads was not asked for"
        return torch.stack(self._layers, dim=1)

    def shares(self) -> list[tuple[float, ...]]:
        """For each request the mean share of each block of its table, in order; they sum to 1."""
        return shares_of(self.mean().cpu().numpy(), self._num_blocks)

    def by_head(self) -> list[NDArray[np.float32]]:
        """For each request [layers, H, its blocks]; only with keeps_heads."""
        return by_head_of(self.heads().cpu().numpy(), self._num_blocks)


def _on(device: torch.device, array: NDArray[np.int64]) -> Tensor:
    """A copy on `device`, for which a GPU is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def shares_of(mean: NDArray[np.float32], num_blocks: NDArray[np.int32]) -> list[tuple[float, ...]]:
    """Row by row what `mean` [R, blocks] says of the blocks that the request has."""
    # Six digits are more than a colour or a table shows, and half the bytes. All at once: number
    # by number it takes longer than the device for what it measures.
    rows = mean.astype(np.float64).round(6).tolist()
    return [tuple(row[:count]) for row, count in zip(rows, num_blocks.tolist(), strict=True)]


def by_head_of(
    heads: NDArray[np.float32], num_blocks: NDArray[np.int32]
) -> list[NDArray[np.float32]]:
    """The same of `heads` [R, layers, H, blocks]."""
    return [row[:, :, :count] for row, count in zip(heads, num_blocks.tolist(), strict=True)]
