"""quantization="gguf": the 4- and 8-bit blocks of a GGUF file as they are, for one or two rows.

A model that was loaded from a GGUF file has float32 weights that were made of such blocks. For few
rows it is quicker to read the blocks; the numbers they stand for are the same to the last bit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lmscope_kernels.gguf_linear_cpu import (
    MAX_ROWS,
    GgufBlocks,
    gguf_linear,
    prepare_gguf_loops,
    side_by_side,
)
from safetensors.torch import load_file
from torch import Tensor

from lmscope.models.cache import locked_cache, scratch_folder
from lmscope.models.fuse import NotLean, lean_layout
from lmscope.models.linear import (
    GGUF_NAME,
    ChosenMethod,
    Linear,
    LinearMethod,
    WeightAndBias,
    biases_of,
    choose_linear_method,
    why_no_loops,
)

__all__ = ["GgufLinear", "GgufLinears", "choose_gguf_method"]

# Beside the folder: others, who load the model from it, take every such file in it for weights.
_SUFFIX = ".blocks.safetensors"


@dataclass(frozen=True)
class GgufLinear:
    """One matrix in blocks, and what multiplies more rows by the same weights."""

    blocks: GgufBlocks
    bias: Tensor | None
    more_rows: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [..., in] float32 -> [..., out]."""
        num_rows = rows.numel() // rows.shape[-1]
        if not 0 < num_rows <= MAX_ROWS:
            return self.more_rows(rows)
        output = gguf_linear(rows.reshape(num_rows, -1), self.blocks, self.bias)
        return output.view(*rows.shape[:-1], -1)


class GgufLinears:
    """A matrix that the file has in blocks is multiplied as it is there, for one or two rows.

    More rows, and matrices that the file has otherwise, are multiplied as without it.
    """

    name = GGUF_NAME

    def __init__(self, blocks: Mapping[int, GgufBlocks], method: LinearMethod) -> None:
        """blocks: by the id of the parameter. method: for all else."""
        self._blocks = blocks
        self._method = method

    def refusal(self, weight: Tensor) -> str | None:
        return self._method.refusal(weight)

    def pack(self, parts: Sequence[WeightAndBias]) -> Linear:
        packed = self._method.pack(parts)
        found = [self._blocks[id(part.weight)] for part in parts if id(part.weight) in self._blocks]
        blocks = side_by_side(found) if len(found) == len(parts) else None
        if blocks is None:
            return packed
        return GgufLinear(blocks, biases_of(parts), packed)

    def packed_bytes(self, weight: Tensor) -> int:
        blocks = self._blocks.get(id(weight))
        num_bytes = 0 if blocks is None else blocks.num_bytes
        return num_bytes + self._method.packed_bytes(weight)


def choose_gguf_method(
    module: torch.nn.Module, folder: Path, file: Path | None, device: torch.device
) -> ChosenMethod:
    """The method for a module that was loaded from `folder`, which was made of `file`.

    Reads the blocks, which it writes beside the folder at the first time, in a layout of their own.
    ValueError when there is no such file, or where the loops cannot run.
    """
    asked = f"quantization is {GGUF_NAME!r}"
    parameter = next(module.parameters())
    reason = why_no_loops(parameter.dtype, device)
    if reason is not None:
        raise ValueError(f"{asked}, which {reason}, or leave quantization out")
    if file is None:
        raise ValueError(
            f"{asked}, which takes the blocks of a .gguf file, and this model was loaded from "
            "safetensors; load a .gguf file, or use quantization='int8'"
        )
    stored = folder.with_name(folder.name + _SUFFIX)
    if not stored.is_file():
        _store(module, file, folder, stored)
    tensors = load_file(stored)
    blocks = {
        id(weight): GgufBlocks(*(tensors[f"{name}.{part}"] for part in GgufBlocks._fields))
        for name, weight in module.named_parameters()
        if f"{name}.quanta" in tensors
    }
    _leave_out_what_is_not_multiplied(blocks, module)
    if not blocks:
        raise ValueError(
            f"{asked}, and no matrix of {file.name} is in blocks that the loops know; "
            "leave quantization out"
        )
    prepare_gguf_loops()
    more = choose_linear_method(
        exact=False, quantization=None, dtype=parameter.dtype, device=device
    )
    num_matrices = sum(parameter.dim() == 2 for parameter in module.parameters())
    return ChosenMethod(
        GgufLinears(blocks, more.method),
        f"quantization='gguf', {len(blocks)} of {num_matrices} matrices as {file.name} has them, "
        f"for one or two rows; more rows {more.method.name}, {more.why}",
        more.warning,
    )


def _leave_out_what_is_not_multiplied(
    blocks: dict[int, GgufBlocks], module: torch.nn.Module
) -> None:
    """Matrices that are multiplied as one must all be in blocks, and in blocks of one kind."""
    try:
        groups = lean_layout(module).groups()
    except NotLean:
        return
    for group in groups:
        ids = [id(layer.weight) for layer in group]
        if len({blocks[each].quanta.dtype if each in blocks else None for each in ids}) > 1:
            for each in ids:
                blocks.pop(each, None)


def _store(module: torch.nn.Module, file: Path, folder: Path, target: Path) -> None:
    """Write the blocks of `file`, of which `folder` was made, under the module's names for them."""
    if not file.is_file():
        raise ValueError(
            f"quantization is {GGUF_NAME!r}, and {file} is gone, of which this model was made; "
            "put it back, or leave quantization out"
        )
    # Here, not above: other loads need not read gguf.
    from lmscope.models.gguf_file import write_blocks

    with locked_cache() as cache:
        if target.is_file():  # another process wrote it while this one waited
            return
        with scratch_folder(cache) as scratch:
            write_blocks(file, module, scratch / target.name)
            # safetensors writes for the owner only; a cache may be shared like any other file.
            shutil.copymode(folder / "config.json", scratch / target.name)
            os.replace(scratch / target.name, target)
