"""Int8Step: all layers of a lean forward with 8-bit weights, one call a layer.

For steps in which one to four requests have one row each, and nobody measures attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lmscope_kernels.int8_linear_cpu import MAX_ROWS, Int8Linear
from lmscope_kernels.int8_step_cpu import Int8Layer, why_no_int8_step
from torch import Tensor
from torch.nn import functional as F

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.linear import Linear

if TYPE_CHECKING:
    from lmscope.models.fuse import LeanLayer, LeanLayout

__all__ = ["Int8Step", "int8_step"]

# Of one layer in order: qkv, o, gate_up, down.
LayerLinears = tuple[Linear, Linear, Linear, Linear]


def int8_step(layout: LeanLayout, linears: Sequence[LayerLinears]) -> Int8Step | None:
    """The step of a layout, or None where a layer is none that it knows."""
    if why_no_int8_step() is not None:
        return None
    layers = []
    for layer, (qkv, o, gate_up, down) in zip(layout.layers, linears, strict=True):
        if not (
            isinstance(qkv, Int8Linear)
            and isinstance(o, Int8Linear)
            and isinstance(gate_up, Int8Linear)
            and isinstance(down, Int8Linear)
            and layer.before_attention is not None
            and layer.before_mlp is not None
            and layer.after_attention is None
            and layer.after_mlp is None
            and layer.head_norms is None
            and layer.has_positions
            and layer.activation is F.silu
        ):
            return None
        layers.append(
            Int8Layer(
                layer.before_attention.weight,
                float(layer.before_attention.epsilon),
                qkv,
                o,
                layer.before_mlp.weight,
                float(layer.before_mlp.epsilon),
                gate_up,
                down,
            )
        )
    return Int8Step(layout, layers)


class Int8Step:
    """The layers of one layout. Making it compiles the loops, or loads them from numba's cache.

    That is some 15 seconds the first time, and a second later.
    """

    def __init__(self, layout: LeanLayout, layers: Sequence[Int8Layer]) -> None:
        self._layers: tuple[tuple[LeanLayer, Int8Layer], ...] = tuple(
            zip(layout.layers, layers, strict=True)
        )
        self._compile(layout)

    def takes(self, batch: BatchView, num_rows: int) -> bool:
        """Whether this step is one for it. num_rows: rows of the batch, padding included."""
        return (
            # Not in a process that was forked since.
            why_no_int8_step() is None
            and 0 < num_rows <= MAX_ROWS
            and num_rows == batch.num_tokens
            and batch.mass is None
            # Who has how many rows is the same for every window.
            and batch.all_decoding(self._layers[0][0].window) is not None
        )

    def __call__(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, batch: BatchView, kv_cache: KVCache
    ) -> None:
        """Change `hidden` [M, E] into the output of the last layer.

        cosine, sine    [M, 1, D]
        """
        cosine, sine = cosine[:, 0], sine[:, 0]
        slots = batch.slot_mapping.numpy()
        for layer, weights in self._layers:
            decoding = batch.all_decoding(layer.window)
            assert decoding is not None, "takes() was not asked"
            weights(
                hidden,
                cosine,
                sine,
                kv_cache.key[layer.index],
                kv_cache.value[layer.index],
                slots,
                decoding.block_table,
                decoding.first_keys,
                decoding.seq_lens,
                layer.scale,
                layer.residual_multiplier,
            )

    def _compile(self, layout: LeanLayout) -> None:
        """Run the first layer over a cache of one token, so that no step waits for a compiler."""
        layer, weights = self._layers[0]
        D = layout.head_size
        cache = torch.zeros(1, 1, layout.num_kv_heads, D)
        zeros = torch.zeros(1, dtype=torch.int32)
        angle = torch.zeros(1, D)
        weights(
            torch.zeros(1, layout.embedding.shape[1]),
            angle,
            angle,
            cache,
            cache.clone(),
            zeros.long().numpy(),
            zeros[None].numpy(),
            zeros.numpy(),
            (zeros + 1).numpy(),
            layer.scale,
            layer.residual_multiplier,
        )
