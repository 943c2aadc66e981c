"""KernelForward: the lean forward of a GPU, in the dtype of the weights.

The same steps as LeanForward. Norms, with the addition before them, and the gate of the MLP run in
the Triton kernels, which read each number once and add up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from lmscope_kernels.rms_norm import rms_norm
from lmscope_kernels.silu_mul import silu_mul
from lmscope_kernels.triton_support import is_available
from torch import Tensor
from torch.nn import functional as F

from lmscope.models.attention import BatchView, KVCache
from lmscope.models.fuse import LeanForward, LeanLayout
from lmscope.models.kernel_attention import readable
from lmscope.models.linear import Linear

__all__ = ["LARGEST_ROW", "ROW_STEP", "KernelForward", "Norm", "uses_kernels"]

# Weight, epsilon and size, as a layout has them.
Norm = tuple[Tensor, Tensor, int]

# Numbers of a row that a norm takes, and what lengths of rows must be multiples of.
LARGEST_ROW = 16384
ROW_STEP = 16


def uses_kernels(layout: LeanLayout, device: torch.device) -> bool:
    """Whether this is the forward of a layout on a device: a GPU that runs the kernels."""
    sizes = [layout.embedding.shape[1]]
    for layer in layout.layers:
        sizes += [norm.size for norm in layer.head_norms or ()]
    return (
        device.type == "cuda"
        and is_available(device, layout.embedding.dtype)[0]
        and all(size % ROW_STEP == 0 and size <= LARGEST_ROW for size in sizes)
    )


class KernelForward(LeanForward):
    """As a LeanForward; float32, float16 or bfloat16."""

    def __init__(
        self, layout: LeanLayout, linears: Mapping[tuple[int, ...], Linear], device: torch.device
    ) -> None:
        super().__init__(layout, linears, device)
        self._dtype = layout.embedding.dtype
        self._tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        norms: list[Norm | None] = [layout.norm]
        for layer in layout.layers:
            norms += [
                layer.before_attention,
                layer.after_attention,
                layer.before_mlp,
                layer.after_mlp,
                *(layer.head_norms or ()),
            ]
        # Epsilons as numbers: to ask the device for one is to wait for it. Weights where kernels
        # can read them, which those of a mapped file need not be.
        self._norms = {
            id(norm): (readable(norm[0]), float(norm[1])) for norm in norms if norm is not None
        }

    def __call__(
        self, token_ids: Tensor, batch: BatchView, kv_cache: KVCache, rows: Tensor | None
    ) -> Tensor:
        """Logits of the tokens at `rows`, as in LeanForward."""
        layout = self.layout
        num_query_heads, head_size = layout.num_query_heads, layout.head_size
        num_rotated = num_query_heads + layout.num_kv_heads
        num_heads, width = num_rotated + layout.num_kv_heads, num_query_heads * head_size
        hidden = F.embedding(token_ids, layout.embedding)
        if layout.embedding_multiplier != 1.0:
            hidden.mul_(layout.embedding_multiplier)
        cosines, sines = self.reserve_positions(batch.max_seq_len)
        cosine = cosines.index_select(0, batch.positions)
        sine = sines.index_select(0, batch.positions)
        last = len(self._steps) - 1
        normed = self._normed(hidden, layout.layers[0].before_attention)
        for index, (layer, qkv, o, gate_up, down) in enumerate(self._steps):
            heads = qkv(normed).view(-1, num_heads, head_size)
            query_key = heads[:, :num_rotated]
            if layer.head_norms is not None:
                parts = query_key[:, :num_query_heads], query_key[:, num_query_heads:]
                query_key = torch.cat(
                    [
                        self._normed(part.reshape(-1, norm.size), norm).view(part.shape)
                        for part, norm in zip(parts, layer.head_norms, strict=True)
                    ],
                    dim=1,
                )
            if layer.has_positions:
                query_key = self._rotated(query_key, cosine, sine)
            attended = batch.attend(
                query_key[:, :num_query_heads],
                query_key[:, num_query_heads:],
                heads[:, num_rotated:],
                kv_cache.key[layer.index],
                kv_cache.value[layer.index],
                layer.scale,
                layer.window,
            ).reshape(-1, width)
            if index == last and rows is not None:
                # From here on rows do not meet any more, and the others are not asked for.
                attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
            multiplier = layer.residual_multiplier
            normed = self._add(
                hidden, o(attended), layer.after_attention, multiplier, layer.before_mlp
            )
            mlp = down(_activated(gate_up(normed), layer.activation))
            next_norm = layout.norm if index == last else layout.layers[index + 1].before_attention
            normed = self._add(hidden, mlp, layer.after_mlp, multiplier, next_norm)
        logits = self._head(normed)
        return logits if layout.logits_divisor == 1.0 else logits.div_(layout.logits_divisor)

    def reserve_positions(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Rotary tables for so many positions, in the dtype of the weights."""
        exact = super().reserve_positions(num_positions)
        tables = self._tables
        if tables is None or tables[0] is not exact:
            # In one assignment: another engine may look at the same time.
            self._tables = tables = exact, (exact[0].to(self._dtype), exact[1].to(self._dtype))
        return tables[1]

    def _rotated(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[T, heads, D]; cosine and sine are [T, 1, D], the first half of the sine negative."""
        turned = torch.roll(heads, heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * cosine, turned, sine)

    def _normed(self, rows: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return rows
        return rms_norm(rows, *self._norms[id(norm)])

    def _add(
        self,
        hidden: Tensor,
        new: Tensor,
        after: Norm | None,
        multiplier: float,
        norm: Norm | None,
    ) -> Tensor:
        """Add `new` to `hidden` in place; returns that through `norm`.

        after    norm of what is added, before it is
        """
        if after is None and multiplier == 1.0 and norm is not None:
            return rms_norm(new, *self._norms[id(norm)], residual=hidden)
        hidden.add_(self._normed(new, after), alpha=multiplier)
        return self._normed(hidden, norm)


def _activated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    if activation is F.silu and gate_up.shape[1] % (2 * ROW_STEP) == 0:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return activation(gate) * up
