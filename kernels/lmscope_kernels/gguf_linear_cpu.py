"""Linear layers with the 4- and 8-bit blocks of a GGUF file as weights, for one or two rows.

A block is 32 weights of one row of the matrix, [out, in], with a scale and perhaps an offset:

    Q4_0    scale * (q - 8)         q in 0 .. 15
    Q4_1    scale * q + minimum     q in 0 .. 15
    Q8_0    scale * q               q in -127 .. 127

    output[m, n] = sum over blocks b of scale[n, b] * sum over k of q[n, b, k] * x[m, b, k]
                                      + minimum[n, b] * sum over k of x[m, b, k]

The weights are those of the file to the last bit, and x is not rounded, so this is as exact as a
product of float32 numbers; only the sums are in another order. A step of one request reads 5 or 8.5
bits a weight and not 16 or 32. The loops are compiled by numba (the extra `cpu`).

    pack_blocks(data, quantization) -> GgufBlocks
    gguf_linear(rows [M, in], blocks, bias=None) -> [M, out], M up to MAX_ROWS

Stored are tiles of ROWS_PER_TILE rows, in which what belongs to one place of a block lies side by
side for all rows of the tile: then a processor multiplies one number of x with a register of
weights, and adds up many outputs at a time without ever adding up a register.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope_kernels.numba_support import use_torch_threads

__all__ = [
    "BLOCK_SIZE",
    "MAX_ROWS",
    "QUANTIZATIONS",
    "ROWS_PER_TILE",
    "GgufBlocks",
    "dequantize",
    "gguf_linear",
    "gguf_linear_reference",
    "pack_blocks",
    "prepare_gguf_loops",
    "side_by_side",
    "why_not_packed",
]

BLOCK_SIZE = 32
ROWS_PER_TILE = 64
# More rows are as quick with weights in half precision.
MAX_ROWS = 2
# Bytes of a block in the file: scale, minimum, and quanta of 4 or 8 bits.
QUANTIZATIONS = {"Q4_0": 2 + 16, "Q4_1": 2 + 2 + 16, "Q8_0": 2 + 32}

_NO_MINIMA = torch.empty(0, 0, 0)


class GgufBlocks(NamedTuple):
    """A matrix [out, in]; T = out / 64 tiles of B = in / 32 blocks, R = 64 rows in a tile.

    quanta    [T, B, 16 R] uint8, two a byte: of places k (low) and k + 16 (high) of a block,
              at k R + row; or [T, B, 32 R] int8, of place k at k R + row
    scales    [T, B, R] float32
    minima    [T, B, R] float32, or [0, 0, 0] for none
    """

    quanta: Tensor
    scales: Tensor
    minima: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, [out, in]."""
        tiles, blocks, rows = self.scales.shape
        return tiles * rows, blocks * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self)


def why_not_packed(shape: Sequence[int], quantization: str) -> str | None:
    """Why a matrix [out, in] of the file cannot be used as it is; None: it can."""
    if quantization not in QUANTIZATIONS:
        return f"it is {quantization}, and the loops know {', '.join(QUANTIZATIONS)}"
    if len(shape) != 2 or shape[0] % ROWS_PER_TILE or shape[1] % BLOCK_SIZE:
        return f"its shape {tuple(shape)} is no multiple of {(ROWS_PER_TILE, BLOCK_SIZE)}"
    return None


def pack_blocks(data: NDArray[np.uint8], quantization: str) -> GgufBlocks:
    """From the bytes of the file, [out, bytes of a row].

    ValueError for what why_not_packed names.
    """
    num_outputs, row_bytes = data.shape
    block_bytes = QUANTIZATIONS.get(quantization, 1)
    reason = why_not_packed((num_outputs, row_bytes // block_bytes * BLOCK_SIZE), quantization)
    if reason is not None or row_bytes % block_bytes:
        raise ValueError(f"a matrix cannot be packed: {reason or 'its rows end inside a block'}")
    blocks = data.reshape(num_outputs // ROWS_PER_TILE, ROWS_PER_TILE, -1, block_bytes)

    def in_tiles(part: NDArray[Any]) -> Tensor:
        """[T, R, B, n] -> [T, B, n R]"""
        tiles = part.transpose(0, 2, 3, 1)
        return torch.from_numpy(np.ascontiguousarray(tiles).reshape(*tiles.shape[:2], -1))

    def halves(start: int) -> NDArray[np.float32]:
        numbers = np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)
        return numbers.astype(np.float32)

    scales = halves(0)
    if quantization == "Q8_0":
        return GgufBlocks(in_tiles(blocks[..., 2:].view(np.int8)), in_tiles(scales), _NO_MINIMA)
    minima = -8 * scales if quantization == "Q4_0" else halves(2)
    return GgufBlocks(in_tiles(blocks[..., block_bytes - 16 :]), in_tiles(scales), in_tiles(minima))


def side_by_side(parts: Sequence[GgufBlocks]) -> GgufBlocks | None:
    """One matrix with the outputs of all parts; None where they are stored differently."""
    if len(parts) == 1:
        return parts[0]
    if len({part.quanta.dtype for part in parts}) > 1:
        return None
    return GgufBlocks(*(torch.cat(each) for each in zip(*parts, strict=True)))


def dequantize(blocks: GgufBlocks) -> Tensor:
    """The weights as numbers, [out, in] float32; bit for bit what the file stands for."""
    tiles, num_blocks, num_rows = blocks.scales.shape
    quanta = blocks.quanta
    if quanta.dtype == torch.uint8:
        quanta = torch.cat((quanta & 15, quanta >> 4), dim=-1)
    numbers = quanta.view(tiles, num_blocks, BLOCK_SIZE, num_rows).float()
    numbers *= blocks.scales[:, :, None]
    if len(blocks.minima):
        numbers += blocks.minima[:, :, None]
    return numbers.permute(0, 3, 1, 2).reshape(blocks.shape)


def gguf_linear_reference(rows: Tensor, blocks: GgufBlocks, bias: Tensor | None = None) -> Tensor:
    """The definition, in float64.

    rows       [M, in]
    returns    [M, out]  in the dtype of rows
    """
    output = rows.double() @ dequantize(blocks).double().T
    if bias is not None:
        output += bias.double()
    return output.to(rows.dtype)


def gguf_linear(rows: Tensor, blocks: GgufBlocks, bias: Tensor | None = None) -> Tensor:
    """The compiled loops. Needs numba; runs on as many threads as torch has.

    rows       [M, in]   float32, M at least 1 and at most MAX_ROWS
    bias       [out]     float32
    returns    [M, out]
    """
    kernels: Any = importlib.import_module("lmscope_kernels.gguf_numba")
    linear = kernels.linear_parallel if use_torch_threads() else kernels.linear_serial
    output = rows.new_empty(len(rows), blocks.shape[0])
    linear(
        rows.contiguous().numpy(),
        blocks.quanta.numpy(),
        blocks.scales.numpy(),
        blocks.minima.numpy(),
        (rows.new_empty(0) if bias is None else bias.detach()).numpy(),
        output.numpy(),
    )
    return output


def prepare_gguf_loops() -> None:
    """Compile, or load what an earlier process compiled, so that no step waits for it.

    That is some 10 seconds the first time.
    """
    for quantization, block_bytes in QUANTIZATIONS.items():
        blocks = pack_blocks(np.zeros((ROWS_PER_TILE, block_bytes), np.uint8), quantization)
        gguf_linear(torch.zeros(1, BLOCK_SIZE), blocks)
