"""CompiledLayers: the layers of a lean forward with everything between the products compiled.

A layer is four products and four calls of loops, where torch takes some forty. The numbers are
those of the lean forward within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lmscope_kernels.decode_attention_cpu import decode_kernel_choice, num_parts
from lmscope_kernels.layer_rows_cpu import (
    NO_NORM,
    NO_ROTARY,
    NO_SOFTCAP,
    RowsNorm,
    layer_loops,
    prepare_layer_rows,
    rows_norm,
)
from torch import Tensor
from torch.nn import functional as F

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.linear import Linear

if TYPE_CHECKING:
    from lmscope.models.fuse import LeanLayer, LeanLayout

__all__ = ["CompiledLayers", "compiled_layers"]

# Of one layer in order: qkv, o, gate_up, down.
LayerLinears = tuple[Linear, Linear, Linear, Linear]


def compiled_layers(
    layout: LeanLayout, linears: Sequence[LayerLinears], device: torch.device
) -> CompiledLayers | None:
    """The layers of a layout, or None where torch runs them."""
    if decode_kernel_choice(layout.embedding.dtype, device).name != "numba":
        return None
    return CompiledLayers(layout, linears)


class _Layer(NamedTuple):
    """One layer, with its norms as arrays."""

    layer: LeanLayer
    linears: LayerLinears
    before_attention: RowsNorm
    after_attention: RowsNorm
    before_mlp: RowsNorm
    after_mlp: RowsNorm
    head_norms: tuple[Any, ...]
    scale: np.float32
    multiplier: np.float32


class CompiledLayers:
    """The layers of one layout. Making it compiles the loops, or loads them from numba's cache."""

    def __init__(self, layout: LeanLayout, linears: Sequence[LayerLinears]) -> None:
        self._layout = layout
        self._norm = _rows_norm(layout.norm)
        self._layers = [
            _Layer(
                layer,
                each,
                _rows_norm(layer.before_attention),
                _rows_norm(layer.after_attention),
                _rows_norm(layer.before_mlp),
                _rows_norm(layer.after_mlp),
                sum(map(_rows_norm, layer.head_norms or (None, None)), ()),
                np.float32(layer.scale),
                np.float32(layer.residual_multiplier),
            )
            for layer, each in zip(layout.layers, linears, strict=True)
        ]
        prepare_layer_rows()

    def takes(self, batch: BatchView, num_rows: int) -> bool:
        """Whether it can run a step. num_rows: rows of the batch, padding included."""
        has_plan = batch.plan_of(self._layers[0].layer.window) is not None
        return has_plan and num_rows == batch.num_tokens > 0

    def __call__(
        self,
        hidden: Tensor,
        cosine: Tensor,
        sine: Tensor,
        batch: BatchView,
        kv_cache: KVCache,
        rows: Tensor | None,
    ) -> Tensor:
        """Run all layers and the last norm over `hidden` [T, E], which is changed.

        cosine, sine    [T, 1, D]
        rows            the rows that are asked for; None: all of them, in order
        returns         [len(rows), E]
        """
        loops = layer_loops()
        layout = self._layout
        num_heads, head_size = layout.num_query_heads, layout.head_size
        normed = torch.empty_like(hidden)
        hidden_rows, normed_rows = hidden.numpy(), normed.numpy()
        attended = hidden.new_empty(len(hidden), num_heads * head_size)
        attended_rows = attended.numpy()
        activated = activated_rows = None
        rotary = cosine.numpy(), sine.numpy()
        slots = batch.slot_mapping.numpy()
        # What a layer adds to the stream is added, and normed, where the next one begins.
        new, after, multiplier = hidden_rows[:0], NO_NORM, np.float32(1)
        last = len(self._layers) - 1
        for index, each in enumerate(self._layers):
            layer = each.layer
            qkv, o, gate_up, down = each.linears
            before = each.before_attention
            loops.add_norm(hidden_rows, new, *after, multiplier, *before, normed_rows)
            heads = qkv(hidden if before is NO_NORM else normed)
            plan = batch.plan_of(layer.window)
            assert plan is not None
            decoding = plan.decoding
            key_cache, value_cache = kv_cache.key[layer.index], kv_cache.value[layer.index]
            keys, values = key_cache.numpy(), value_cache.numpy()
            loops.store(
                heads.numpy(),
                num_heads,
                *each.head_norms,
                *(rotary if layer.has_positions else (NO_ROTARY, NO_ROTARY)),
                slots,
                keys,
                values,
            )
            if len(decoding.rows):
                loops.attend(
                    num_parts(len(decoding.rows), layout.num_kv_heads),
                    heads.numpy(),
                    num_heads,
                    keys,
                    values,
                    decoding.block_table,
                    decoding.first_keys,
                    decoding.seq_lens,
                    decoding.rows,
                    each.scale,
                    NO_SOFTCAP,
                    attended_rows,
                )
            if len(plan.prefilling.starts) or batch.mass is not None:
                by_head = heads.view(len(heads), -1, head_size)
                query, key = by_head[:, :num_heads], by_head[:, num_heads : -layout.num_kv_heads]
                plan.attend_many_rows(
                    query,
                    key,
                    by_head[:, -layout.num_kv_heads :],
                    key_cache,
                    value_cache,
                    layer.scale,
                    None,
                    output=attended.view_as(query),
                )
                if batch.mass is not None:
                    batch.mass.add(query, key_cache, layer.scale, layer.window, None)
            if index == last and rows is not None:
                # From here on rows do not meet any more, and the others are not asked for.
                attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
                normed = normed[: len(rows)]
                hidden_rows, normed_rows, activated = hidden.numpy(), normed.numpy(), None
            new, before, multiplier = o(attended).numpy(), each.before_mlp, each.multiplier
            loops.add_norm(
                hidden_rows, new, *each.after_attention, multiplier, *before, normed_rows
            )
            both = gate_up(hidden if before is NO_NORM else normed)
            if layer.activation is F.silu:
                if activated is None:
                    activated = both.new_empty(len(both), both.shape[1] // 2)
                    activated_rows = activated.numpy()
                loops.silu_mul(both.numpy(), activated_rows)
                new = down(activated).numpy()
            else:
                gate, up = both.chunk(2, -1)
                new = down(layer.activation(gate) * up).numpy()
            after = each.after_mlp
        loops.add_norm(hidden_rows, new, *after, multiplier, *self._norm, normed_rows)
        return normed


def _rows_norm(norm: Any) -> RowsNorm:
    """That of a layout, which may be None."""
    return NO_NORM if norm is None else rows_norm(norm.weight, float(norm.epsilon))
