"""The batch-invariant forward of a GPU: one path of kernels, with one tile for each, for every row.

    products     batch_invariant_matmul: tiles of fixed size, no split over the inner dimension
    attention    unified_attention with one tile, of prompts and of decoding rows
    norms        rms_norm: one program a row
    gate         silu_mul: a program for some columns of one row
    the rest     torch, one IEEE 754 operation a call: a product and a sum in one call may be
                 rounded once or twice, as it is compiled for whole buffers and for their ends

Nothing is chosen by the number of rows, so those that fill up the batch of a graph change nothing.
docs/decisions/batch_invariant.md says the rest; batch_invariant.py is the forward of a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lmscope_kernels.batch_invariant_matmul import batch_invariant_matmul
from torch import Tensor
from torch.nn import functional as F

from lmscope.models.batch_invariant import POSITIONS_PER_PAGE
from lmscope.models.fuse import LeanLayout, NotLean, RotaryTable
from lmscope.models.kernel_attention import readable
from lmscope.models.kernel_forward import LARGEST_ROW, ROW_STEP, KernelForward, Norm
from lmscope.models.linear import ChosenMethod, Linear, WeightAndBias, adjoined
from lmscope.models.swap import weight_and_bias

__all__ = ["KernelInvariantForward", "KernelInvariantLinears", "kernel_invariant_method"]


def kernel_invariant_method() -> ChosenMethod:
    """How a GPU multiplies so that a row does not notice the others."""
    return ChosenMethod(
        KernelInvariantLinears(),
        "batch_invariant=True, tiles of one size whatever the number of rows",
    )


class KernelInvariantLinears:
    """The module's own weights, side by side, in tiles of one size; for a GPU."""

    name = "Triton in fixed tiles, batch-invariant"

    def refusal(self, weight: Tensor) -> str | None:
        """None: a forward that runs them says what it cannot run."""
        return None

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        weight, bias = adjoined(parts)
        # A GPU's begin there already; weights of a mapped file, which the interpreter sees, do not.
        weight, bias = readable(weight), None if bias is None else readable(bias)

        def multiply(rows: Tensor) -> Tensor:
            flat = readable(rows.reshape(-1, rows.shape[-1]))
            return batch_invariant_matmul(flat, weight, bias).view(*rows.shape[:-1], len(weight))

        return multiply

    def packed_bytes(self, weight: Tensor) -> int:
        return 0 if readable(weight) is weight else weight.numel() * weight.element_size()


class KernelInvariantForward(KernelForward):
    """As a KernelForward, and a row has the same bits alone and in any batch.

    linears    those of KernelInvariantLinears, by the ids of their modules
    """

    def __init__(
        self, layout: LeanLayout, linears: Mapping[tuple[int, ...], Linear], device: torch.device
    ) -> None:
        _require_sizes(layout)
        super().__init__(layout, linears, device)
        self._rotary = RotaryTable(
            layout.rotary, layout.head_size, device, positions_per_page=POSITIONS_PER_PAGE
        )

    @property
    def runs_layers_in_one_call(self) -> bool:
        return False

    @property
    def is_compiled_between_products(self) -> bool:
        return False

    def _rotated(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        turned = torch.roll(heads, heads.shape[-1] // 2, -1)
        return (heads * cosine).add_(turned.mul_(sine))

    def _add(
        self,
        hidden: Tensor,
        new: Tensor,
        after: Norm | None,
        multiplier: float,
        norm: Norm | None,
    ) -> Tensor:
        new = self._normed(new, after)
        if multiplier != 1.0:
            new = new * multiplier
        return super()._add(hidden, new, None, 1.0, norm)


def _require_sizes(layout: LeanLayout) -> None:
    """NotLean, with what of the layout the kernels do not run."""
    if any(layer.activation is not F.silu for layer in layout.layers):
        raise NotLean("its activation is not SiLU")
    normed = {"its hidden size": layout.embedding.shape[1]}
    multiplied = {}
    for layer in layout.layers:
        for name, norm in zip(("queries", "keys"), layer.head_norms or (), strict=False):
            normed[f"the norm of its {name}"] = norm.size
        multiplied["the size of its heads together"] = weight_and_bias(layer.o).weight.shape[1]
        multiplied["its intermediate size"] = weight_and_bias(layer.down).weight.shape[1]
    for name, size in (normed | multiplied).items():
        if size % ROW_STEP:
            raise NotLean(f"{name} is {size}, and the kernels take multiples of {ROW_STEP}")
        if name in normed and size > LARGEST_ROW:
            raise NotLean(f"{name} is {size}, and the kernels norm up to {LARGEST_ROW} numbers")
