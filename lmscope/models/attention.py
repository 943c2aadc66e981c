"""The attention function that transformers' modules call, and what it reads and writes.

The runner passes two keywords through the module's forward, `lmscope_batch` and
`lmscope_cache`, and every attention layer hands them to `paged_attention` below. Nothing is
global: what a layer attends to is in the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from lmscope.models.attention_mass import AttentionMass
from lmscope.models.attention_plan import AttentionPlan, Decoding
from lmscope.models.free_memory import available_memory_bytes
from lmscope.models.lazy_zeros import lazy_zeros

if TYPE_CHECKING:
    from lmscope.models.kernel_attention import KernelAttention

__all__ = [
    "ATTENTION_NAME",
    "AttentionCall",
    "AttentionProbe",
    "BatchView",
    "KVCache",
    "NoBatchError",
    "paged_attention",
]

ATTENTION_NAME = "lmscope_paged"


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
        """Zeros, so that what is read past the end of a request is finite.

        ValueError, with the number of blocks that would fit, when there is no memory for them.
        A CPU hands memory out when it is written to, and would end the process then.
        """
        block_bytes = 2 * num_layers * block_size * num_kv_heads * head_size * dtype.itemsize

        def tensors(num_blocks: int) -> tuple[Tensor, ...]:
            shape = (num_blocks, block_size, num_kv_heads, head_size)
            return tuple(lazy_zeros(shape, dtype, device) for _ in range(2 * num_layers))

        def fits(num_blocks: int) -> bool:
            try:
                tensors(num_blocks)
            except RuntimeError:
                return False
            return True

        def no_room(most: int) -> ValueError:
            advice = (
                f"use num_kv_blocks={most} or less, or free some memory"
                if most > 1  # block 0 is nobody's
                else "free some memory"
            )
            return ValueError(
                f"the KV cache of {num_blocks} blocks takes {num_blocks * block_bytes / 1e6:.0f} "
                f"MB, and there is room for {most} of them; {advice}"
            )

        available = available_memory_bytes() if device.type == "cpu" else None
        if available is not None and num_blocks * block_bytes > available:
            raise no_room(available // block_bytes)
        try:
            both = tensors(num_blocks)
        except RuntimeError as error:
            most = bisect_left(range(1, num_blocks), True, key=lambda count: not fits(count))
            raise no_room(most) from error
        return cls(key=both[:num_layers], value=both[num_layers:])


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
    max_seq_len        the largest of seq_lens, or more; on the host
    mass               what each block is attended to, for who asked; None: nobody did
    kernels            what attends in the place of torch; None: torch does
    """

    num_tokens: int
    num_reqs: int
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_seq_len: int
    _slots: Tensor
    _plans: Mapping[int | None, AttentionPlan]  # by window
    mass: AttentionMass | None = None
    kernels: KernelAttention | None = None

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
        windows: Collection[int | None] = (None,),
        is_softcapped: bool = False,
        mass: AttentionMass | None = None,
    ) -> BatchView:
        """Copy the arrays to `device` and work out how to attend, once for all layers.

        windows          the sliding windows that layers have; None: a layer without one
        is_softcapped    layers have a soft cap, for which every bias must be written out
        mass             takes in what each layer's newest queries attend to
        """
        num_reqs = int(np.count_nonzero(seq_lens))
        num_tokens = int(query_start_loc[num_reqs])
        longest = int(seq_lens.max())
        plans: dict[int | None, AttentionPlan] = {}
        for window in windows:
            # While every request fits into a window, it hides nothing.
            reach = window if window is not None and window < longest else None
            if reach not in plans:
                plans[reach] = AttentionPlan.build(
                    query_start_loc=query_start_loc[: num_reqs + 1],
                    seq_lens=seq_lens[:num_reqs],
                    block_table=block_table[:num_reqs],
                    block_size=block_size,
                    window=reach,
                    with_bias=is_softcapped,
                    device=device,
                )
            plans[window] = plans[reach]

        def to_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        slot_tensor = to_device(slot_mapping)
        return cls(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            positions=to_device(positions),
            slot_mapping=slot_tensor,
            query_start_loc=to_device(query_start_loc),
            seq_lens=to_device(seq_lens),
            block_table=to_device(block_table),
            max_seq_len=longest,
            _slots=slot_tensor[:num_tokens],
            _plans=plans,
            mass=mass,
        )

    @classmethod
    def of_kernels(
        cls,
        kernels: KernelAttention,
        *,
        positions: Tensor,
        max_seq_len: int,
        mass: AttentionMass | None = None,
    ) -> BatchView:
        """A batch that is on the device already and that `kernels` attend to.

        What of it is padding is known there only, so num_tokens and num_reqs count that too.
        """
        return cls(
            num_tokens=len(kernels.slot_mapping),
            num_reqs=len(kernels.seq_lens),
            positions=positions,
            slot_mapping=kernels.slot_mapping,
            query_start_loc=kernels.query_start_loc,
            seq_lens=kernels.seq_lens,
            block_table=kernels.block_table,
            max_seq_len=max_seq_len,
            _slots=kernels.slot_mapping,
            _plans={},
            mass=mass,
            kernels=kernels,
        )

    def plan_of(self, window: int | None) -> AttentionPlan | None:
        """Who attends to what in layers with this window; None: not worked out on the host."""
        return self._plans.get(window)

    def all_decoding(self, window: int | None) -> Decoding | None:
        """The requests and their keys, when each of them has one row; None otherwise.

        None as well where kernels attend: they read the batch on the device.
        """
        if self.kernels is not None:
            return None
        decoding = self._plans[window].decoding
        return decoding if decoding.is_all else None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store keys and values of the whole batch, then attend.

        query         [T, H, D]
        key, value    [T, K, D]
        returns       [T, H, D]; rows of padding are zero
        """
        if self.kernels is not None:
            output = self.kernels.attend(
                query, key, value, key_cache, value_cache, scale, window, softcap
            )
            if self.mass is not None:
                self.mass.add(query, key_cache, scale, window, softcap)
            return output
        num_rows = query.shape[0]
        if num_rows > self.num_tokens:
            query, key, value = (x[: self.num_tokens] for x in (query, key, value))
        # All of it first: a request may hit a block that another one fills in this step.
        key_cache.flatten(0, 1).index_copy_(0, self._slots, key)
        value_cache.flatten(0, 1).index_copy_(0, self._slots, value)
        output = self._plans[window].attend(
            query, key, value, key_cache, value_cache, scale, softcap
        )
        if self.mass is not None:
            self.mass.add(query, key_cache, scale, window, softcap)
        if num_rows > self.num_tokens:
            padding = output.new_zeros(num_rows - self.num_tokens, *output.shape[1:])
            output = torch.cat((output, padding))
        return output


@dataclass(frozen=True)
class AttentionCall:
    """How one attention layer called: what a probe notes.

    value_size    of a head, where head_size is that of queries and keys
    difference    between the queries or keys of any two tokens, as a part of the largest
    keywords      all but the module, the three tensors and the two of ours
    """

    layer: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    is_causal: bool
    difference: float
    keywords: dict[str, Any]

    @property
    def window(self) -> int | None:
        """Most keys that a token attends to, its own among them; None: all."""
        return self.keywords.get("sliding_window")


class AttentionProbe:
    """Takes the place of a batch in a forward that finds out how a module attends.

    Each token is a request of its own, so what it attends to is its own value.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: dict[str, Any],
    ) -> Tensor:
        """Note the call; tensors as in paged_attention."""
        self.calls.append(
            AttentionCall(
                layer=module.layer_idx,  # type: ignore[arg-type]  # an int on attention modules
                num_query_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=key.shape[3],
                value_size=value.shape[3],
                is_causal=getattr(module, "is_causal", True),
                difference=max(_largest_difference(query), _largest_difference(key)),
                keywords=keywords,
            )
        )
        own_value = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return own_value.transpose(1, 2).contiguous()


class NoBatchError(TypeError):
    """A module that attends over the paged cache was called like any other."""


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

    query          [1, H, T, D]
    key, value     [1, K, T, D]
    keywords       scaling, sliding_window and softcap are acted on; check_supported made sure
                   that no other means anything
    returns        [1, T, H, D], and None where others return the weights

    Raises NoBatchError without a batch: a plain forward of the module has no cache.
    """
    if isinstance(lmscope_batch, BatchView) and lmscope_cache is not None:
        layer: int = module.layer_idx  # type: ignore[assignment]  # an int on attention modules
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
        output = lmscope_batch.attend(
            queries,
            keys,
            values,
            lmscope_cache.key[layer],
            lmscope_cache.value[layer],
            keywords["scaling"],
            keywords.get("sliding_window"),
            keywords.get("softcap"),
        )
        return output[None], None
    if isinstance(lmscope_batch, AttentionProbe):
        keywords["attention_mask"] = attention_mask
        return lmscope_batch.attend(module, query, key, value, keywords), None
    raise NoBatchError(
        "this module attends over lmscope's paged cache and was called without a batch; "
        "generate with the LLM, or load the folder in llm.model with transformers"
    )


def _largest_difference(heads: Tensor) -> float:
    """Between the tokens of [1, heads, T, D], as a part of the largest number."""
    difference = (heads - heads[:, :, :1]).abs().max() / heads.abs().max().clamp(min=1e-6)
    return float(difference)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
