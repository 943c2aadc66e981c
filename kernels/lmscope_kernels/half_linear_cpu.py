"""Linear layers with weights in half precision and sums in float32, for any number of rows.

    output[m, n] = bias[n] + sum over k of x[m, k] * float16(weight[n, k])

The loops are compiled by numba (the extra `cpu`) for processors of x86 with AVX2, FMA and F16C.
Weights are read as they lie in memory, 16 bits each, and widened in registers; from six rows on
the products run at nearly the rate that a processor multiplies at. A row has the same bits alone
and in any batch.

    pack_half(weight, bias=None) -> HalfTiles
    half_linear(rows [M, in], tiles) -> [M, out]

Stored are tiles of R outputs, as many as suit the processor, in which the weights of one input lie
side by side: then a processor multiplies one number of x with a register of weights, and never
adds up a register.
"""

from __future__ import annotations

import importlib
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lmscope_kernels.numba_support import use_torch_threads, why_not_numba

__all__ = [
    "HalfTiles",
    "half_linear",
    "half_linear_reference",
    "pack_half",
    "packed_half_bytes",
    "prepare_half_loops",
    "why_no_half_loops",
]


class HalfTiles:
    """A matrix [out, in] and its bias; T tiles, the last one filled up with zeros.

    tiles    [T, in, R] float16
    bias     [T * R] float32
    """

    def __init__(self, tiles: Tensor, bias: Tensor, num_outputs: int) -> None:
        self.tiles = tiles
        self.bias = bias
        self.shape = num_outputs, tiles.shape[1]

    @cached_property
    def arrays(self) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        """The tiles, as numbers of 16 bits since numba knows no half precision, and the bias."""
        return self.tiles.numpy().view(np.uint16), self.bias.numpy()


@lru_cache(maxsize=1)
def why_no_half_loops() -> str | None:
    """Why the loops cannot run here; None: they can."""
    reason = why_not_numba()
    if reason is not None:
        return reason
    missing: list[str] = _kernels().MISSING_FEATURES
    return f"this processor has no {missing[0]}" if missing else None


def pack_half(weight: Tensor, bias: Tensor | None = None) -> HalfTiles:
    """weight [out, in] in float32, each number rounded to half precision; bias [out].

    Only where why_no_half_loops says None: how they are stored is for this processor.
    """
    num_outputs, num_inputs = weight.shape
    R: int = _kernels().OUTPUTS_PER_TILE
    num_over = -num_outputs % R
    with torch.no_grad():
        halves = F.pad(weight.detach().half(), (0, 0, 0, num_over))
        tiles = halves.view(-1, R, num_inputs).transpose(1, 2).contiguous()
        filled = weight.new_zeros(num_outputs + num_over)
        if bias is not None:
            filled[:num_outputs] = bias.detach()
    return HalfTiles(tiles, filled, num_outputs)


def packed_half_bytes(num_outputs: int, num_inputs: int) -> int:
    """What pack_half takes for a matrix, without its bias."""
    R: int = _kernels().OUTPUTS_PER_TILE
    return 2 * -(-num_outputs // R) * R * num_inputs


def half_linear_reference(rows: Tensor, tiles: HalfTiles) -> Tensor:
    """The definition, in float64.

    rows       [M, in]
    returns    [M, out]  in the dtype of rows
    """
    weights = tiles.tiles.double().transpose(1, 2).flatten(0, 1)
    output = rows.double() @ weights.T + tiles.bias.double()
    return output[:, : tiles.shape[0]].to(rows.dtype)


def half_linear(rows: Tensor, tiles: HalfTiles) -> Tensor:
    """The compiled loops. Only where why_no_half_loops says None; on as many threads as torch has.

    rows       [M, in]   float32
    returns    [M, out]
    """
    kernels = _kernels()
    linear = kernels.linear_parallel if use_torch_threads() else kernels.linear_serial
    output = torch.empty(len(rows), tiles.shape[0])
    linear(rows.detach().contiguous().numpy(), *tiles.arrays, output.numpy())
    return output


def prepare_half_loops() -> None:
    """Compile, or load what an earlier process compiled, so that no step waits for it."""
    half_linear(torch.zeros(1, 1), pack_half(torch.zeros(1, 1)))


def _kernels() -> Any:
    return importlib.import_module("lmscope_kernels.half_numba")
