"""Linear layers with weights of 8 bits, for few rows on a CPU. Approximate.

    scale[n] = max |weight[n]| / 127,    q[n] = round(weight[n] / scale[n])
    output[m, n] = scale[n] * sum over k of x[m, k] * q[n, k], plus bias[n]

A weight is off by half a scale at most. For up to MAX_ROWS rows loops compiled by numba (the
extra `cpu`) read the 8-bit weights, and round x to at least 9 and up to 16 bits of its largest
number in the row, which adds little to what the weights lost. More rows are multiplied by the
same weights: by q in half precision, which holds it exactly, where half_linear_cpu has loops for
the processor, else by the weights turned back into float32.

    quantize_int8(weight) -> Int8Weight(weight, scales)
    int8_linear(x [M, in], weight, bias=None) -> [M, out], M up to MAX_ROWS
    Int8Linear(weight, bias)(rows [..., in]) -> [..., out]
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmscope_kernels.half_linear_cpu import (
    HalfTiles,
    half_linear,
    pack_half,
    packed_half_bytes,
    why_no_half_loops,
)
from lmscope_kernels.numba_support import use_torch_threads

__all__ = [
    "MAX_ROWS",
    "Int8Linear",
    "Int8Weight",
    "int8_linear",
    "int8_linear_reference",
    "packed_int8_bytes",
    "quantize_int8",
]

# More rows are as quick with weights in half precision.
MAX_ROWS = 4


class Int8Weight(NamedTuple):
    """weight [out, in] int8 and scales [out] float32, both contiguous."""

    weight: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """The weights as numbers, [out, in] float32."""
        return self.weight.float() * self.scales[:, None]


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Round each row of [out, in] to 255 levels, symmetric around zero."""
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1) / 127
    # A row of zeros has no scale, and any will do.
    divisor = torch.where(scales > 0, scales, 1.0)[:, None]
    return Int8Weight((weight / divisor).round_().to(torch.int8).contiguous(), scales)


def int8_linear_reference(rows: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """The definition, in float64.

    rows       [M, in]
    returns    [M, out]  in the dtype of rows
    """
    output = rows.double() @ weight.weight.double().T * weight.scales.double()
    if bias is not None:
        output += bias.double()
    return output.to(rows.dtype)


def int8_linear(rows: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """The compiled loops. Needs numba; runs on as many threads as torch has.

    rows       [M, in]   float32, M at least 1 and at most MAX_ROWS
    bias       [out]
    returns    [M, out]
    """
    kernels: Any = importlib.import_module("lmscope_kernels.int8_numba")
    linear = kernels.linear_parallel if use_torch_threads() else kernels.linear_serial
    output = rows.new_empty(len(rows), len(weight.weight))
    linear(
        rows.contiguous().numpy(),
        weight.weight.numpy(),
        weight.scales.numpy(),
        (rows.new_empty(0) if bias is None else bias.detach()).numpy(),
        output.numpy(),
    )
    return output


class Int8Linear:
    """One quantised linear layer; keeps 8-bit weights, and 16-bit ones where there are loops."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]; both are copied."""
        self.weight = quantize_int8(weight)
        self.bias = None if bias is None else bias.detach().float().contiguous().clone()
        self._tiles: HalfTiles | None = None
        if why_no_half_loops() is None:
            # Without the scales, with which small weights would be lost and large ones infinite.
            self._tiles = pack_half(self.weight.weight.float())

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [..., in] float32 -> [..., out]."""
        flat = rows.reshape(-1, rows.shape[-1])
        if 0 < len(flat) <= MAX_ROWS:
            output = int8_linear(flat, self.weight, self.bias)
        elif self._tiles is not None:
            output = half_linear(flat, self._tiles).mul_(self.weight.scales)
            if self.bias is not None:
                output.add_(self.bias)
        else:
            output = F.linear(flat, self.weight.dequantize(), self.bias)
        return output.view(*rows.shape[:-1], len(self.weight.weight))


def packed_int8_bytes(num_outputs: int, num_inputs: int) -> int:
    """What Int8Linear takes for a matrix, without its bias."""
    halves = packed_half_bytes(num_outputs, num_inputs) if why_no_half_loops() is None else 0
    return num_outputs * num_inputs + 4 * num_outputs + halves
