"""The attention function that transformers' modules call, and what it reads and writes.

The runner passes two keywords through the module's forward, `lmscope_batch` and
`lmscope_cache`, and every attention layer hands them to `paged_attention` below. Nothing is
global: what a layer attends to is in the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lmscope_kernels.paged_attention import attend_many_rows, attend_one_row_each
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

__all__ = [
    "ATTENTION_NAME",
    "AttentionCall",
    "AttentionProbe",
    "BatchView",
    "KVCache",
    "paged_attention",
]

ATTENTION_NAME = "lmscope_paged"

# Rows times tokens of padding that cost as much as one more call per layer.
_PADDING_PER_CALL = 512


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, in blocks. Block 0 is the null block: nobody's.

    key, value    one tensor per layer, [B, S, K, D]
    """

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Zeros, so that what is read past the end of a request is finite."""

        def tensors() -> tuple[Tensor, ...]:
            shape = (num_blocks, block_size, num_kv_heads, head_size)
            return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers))

        return cls(key=tensors(), value=tensors())


@dataclass(frozen=True)
class _OneRowEach:
    """Requests that have one query row and are attended to together.

    rows     [R]            their rows in the batch; None when they are all of it, in order
    slots    [R * L]        where their keys lie; slot 0, in the null block, past the end
    bias     [R, 1, 1, L]   0 or -inf; None when all have L tokens
    """

    rows: Tensor | None
    slots: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _ManyRows:
    """One request with several query rows.

    start, end    its rows in the batch
    slots         [L]          where its keys lie; None when all of them are rows of this step
    bias          [rows, L]    0 or -inf; None exactly when slots is None
    """

    start: int
    end: int
    slots: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class BatchView:
    """One step's batch as the layers see it; built once, read by all of them.

    T counts padding too: rows from num_tokens on have slot -1 and belong to nobody, as do
    requests from num_reqs on, whose seq_len is 0.

    positions          [T]       int64, of each token in its request
    slot_mapping       [T]       int64, where its key and value are written
    query_start_loc    [R + 1]   int32, first row of each request, and the end
    seq_lens           [R]       int32, tokens of each request, those of this step included
    block_table        [R, max_blocks]   int32
    """

    num_tokens: int
    num_reqs: int
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    _slots: Tensor
    _one_row_each: tuple[_OneRowEach, ...]
    _many_rows: tuple[_ManyRows, ...]

    @classmethod
    def build(
        cls,
        *,
        positions: NDArray[np.int64],
        slot_mapping: NDArray[np.int64],
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        block_size: int,
        device: torch.device,
    ) -> BatchView:
        """Copy the arrays to `device` and work out how to attend, once for all layers."""
        num_reqs = int(np.count_nonzero(seq_lens))
        num_tokens = int(query_start_loc[num_reqs])
        query_lens = np.diff(query_start_loc[: num_reqs + 1])

        def to_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        one_row_each = []
        for requests in _groups_of_like_length(np.flatnonzero(query_lens == 1), seq_lens):
            slots, bias = _padded_slots(block_table[requests], seq_lens[requests], block_size)
            is_all = len(requests) == num_tokens
            one_row_each.append(
                _OneRowEach(
                    rows=None if is_all else to_device(query_start_loc[requests].astype(np.int64)),
                    slots=to_device(slots),
                    bias=None if bias is None else to_device(bias),
                )
            )
        many_rows = []
        for request in np.flatnonzero(query_lens > 1).tolist():
            start, end = query_start_loc[request : request + 2].tolist()
            seq_len = int(seq_lens[request])
            if end - start == seq_len:
                many_rows.append(_ManyRows(start, end, slots=None, bias=None))
            else:
                only = [request]
                slots, _ = _padded_slots(block_table[only], seq_lens[only], block_size)
                bias = _causal_bias(end - start, seq_len)
                many_rows.append(_ManyRows(start, end, to_device(slots), to_device(bias)))

        slot_tensor = to_device(slot_mapping)
        return cls(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            positions=to_device(positions),
            slot_mapping=slot_tensor,
            query_start_loc=to_device(query_start_loc),
            seq_lens=to_device(seq_lens),
            block_table=to_device(block_table),
            _slots=slot_tensor[:num_tokens],
            _one_row_each=tuple(one_row_each),
            _many_rows=tuple(many_rows),
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
    ) -> Tensor:
        """Store keys and values of the whole batch, then attend.

        query         [T, H, D]
        key, value    [T, K, D]
        returns       [T, H, D]; rows of padding are zero
        """
        num_rows = query.shape[0]
        if num_rows > self.num_tokens:
            query, key, value = (x[: self.num_tokens] for x in (query, key, value))
        # All of it first: a request may hit a block that another one fills in this step.
        key_cache.flatten(0, 1).index_copy_(0, self._slots, key)
        value_cache.flatten(0, 1).index_copy_(0, self._slots, value)

        if len(self._one_row_each) == 1 and self._one_row_each[0].rows is None:
            group = self._one_row_each[0]
            output = attend_one_row_each(
                query, key_cache, value_cache, group.slots, group.bias, scale
            )
        else:
            output = torch.empty_like(query)
            for group in self._one_row_each:
                assert group.rows is not None
                result = attend_one_row_each(
                    query.index_select(0, group.rows),
                    key_cache,
                    value_cache,
                    group.slots,
                    group.bias,
                    scale,
                )
                output.index_copy_(0, group.rows, result)
            for segment in self._many_rows:
                rows = slice(segment.start, segment.end)
                if segment.slots is None:
                    keys, values = key[rows], value[rows]
                else:
                    keys = key_cache.flatten(0, 1).index_select(0, segment.slots)
                    values = value_cache.flatten(0, 1).index_select(0, segment.slots)
                output[rows] = attend_many_rows(query[rows], keys, values, segment.bias, scale)
        if num_rows > self.num_tokens:
            padding = output.new_zeros(num_rows - self.num_tokens, *output.shape[1:])
            output = torch.cat((output, padding))
        return output


@dataclass(frozen=True)
class AttentionCall:
    """How one attention layer called: what a probe notes.

    keywords    all but the module, the three tensors and the two of ours
    """

    layer: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    is_causal: bool
    keywords: dict[str, Any]


class AttentionProbe:
    """Takes the place of a batch in a forward that finds out how a module attends.

    Each token is a request of its own, so what it attends to is its own value.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lmscope_batch: BatchView | AttentionProbe | None = None,
    lmscope_cache: KVCache | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer in place of its own attention.

    query         [1, H, T, D]
    key, value    [1, K, T, D]
    returns       [1, T, H, D], and None where others return the weights

    Raises TypeError without a batch: a plain forward of the module has no cache.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]  # an int on attention modules
    if isinstance(lmscope_batch, BatchView) and lmscope_cache is not None:
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
        caches = lmscope_cache.key[layer], lmscope_cache.value[layer]
        return lmscope_batch.attend(queries, keys, values, *caches, keywords["scaling"])[None], None
    if isinstance(lmscope_batch, AttentionProbe):
        num_query_heads, num_kv_heads = query.shape[1], key.shape[1]
        is_causal = getattr(module, "is_causal", True)
        keywords["attention_mask"] = attention_mask
        lmscope_batch.calls.append(
            AttentionCall(layer, num_query_heads, num_kv_heads, key.shape[3], is_causal, keywords)
        )
        own_value = value.repeat_interleave(num_query_heads // num_kv_heads, dim=1)
        return own_value.transpose(1, 2), None
    raise TypeError(
        "this module attends over lmscope's paged cache and was called without a batch; "
        "generate with the LLM, or load the folder in llm.model with transformers"
    )


def _groups_of_like_length(
    requests: NDArray[np.intp], seq_lens: NDArray[np.int32]
) -> list[NDArray[np.intp]]:
    """`requests` in groups, so that padding each to its longest wastes little.

    One call costs as much as some padding; a new group begins where the padding that it
    saves is more.
    """
    if len(requests) == 0:
        return []
    lengths = seq_lens[requests]
    if (int(lengths.max()) - int(lengths.min())) * len(requests) <= _PADDING_PER_CALL:
        return [requests]
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    borders = []
    longest = longest_first[0]
    for index, length in enumerate(longest_first):
        if (longest - length) * (len(longest_first) - index) > _PADDING_PER_CALL:
            borders.append(index)
            longest = length
    return [requests[np.sort(part)] for part in np.split(order, borders)]


def _padded_slots(
    block_table: NDArray[np.int32], seq_lens: NDArray[np.int32], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Slots [R * L] of the first seq_lens tokens, and the bias [R, 1, 1, L] that hides the rest.

    Past its end a request reads slot 0, which is in the null block: stale content of a block
    could be NaN, and NaN times a weight of zero is NaN.
    """
    position = np.arange(int(seq_lens.max()))
    slots = block_table[:, position // block_size].astype(np.int64)
    slots *= block_size
    slots += position % block_size
    is_past = position >= seq_lens[:, None]
    if not is_past.any():
        return slots.ravel(), None
    slots[is_past] = 0
    bias = np.where(is_past, np.float32(-np.inf), np.float32(0))
    return slots.ravel(), bias[:, None, None, :]


def _causal_bias(num_rows: int, num_keys: int) -> NDArray[np.float32]:
    """[num_rows, num_keys]: -inf where a key is later than the row, the last being the newest."""
    position = np.arange(num_keys - num_rows, num_keys)
    return np.where(np.arange(num_keys) > position[:, None], np.float32(-np.inf), np.float32(0))


AttentionInterface.register(ATTENTION_NAME, paged_attention)
