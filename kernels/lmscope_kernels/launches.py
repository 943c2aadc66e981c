"""What launchers have checked and worked out, kept for tensors of the same layout.

The layers of a step call the same launchers with tensors that differ in their addresses alone.
What is checked of them, and grid, strides and constants of the launch, depends on what
`launch_key` holds and on nothing else, so it is done for the first layer and looked up for the
others. What was refused is not kept: it is checked, and refused, again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["MOST_LAUNCHES", "Launch", "Launches", "launch_key"]

# Prompts have lengths of all kinds, and each is a layout of its own.
MOST_LAUNCHES = 256


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched on tensors of one layout.

    grid         None: the batch is empty, and nothing is launched
    numbers      strides and sizes, in the order of the kernel's arguments
    constants    what it is compiled for
    """

    grid: tuple[int, ...] | None
    numbers: tuple[float, ...]
    constants: dict[str, Any]


_Kept = TypeVar("_Kept")


class Launches(dict[Hashable, _Kept], Generic[_Kept]):
    """By launch_key, at most MOST_LAUNCHES; several threads may use one."""

    def keep(self, key: Hashable, launch: _Kept) -> _Kept:
        """Keep it, and return it."""
        if len(self) >= MOST_LAUNCHES:
            # All of them: those of the step that runs now are back after one layer.
            self.clear()
        self[key] = launch
        return launch


def launch_key(*tensors: Tensor | None) -> Hashable:
    """Everything of tensors that a launcher looks at; the first of them must be there.

    Of an address that is its place between multiples of 16 bytes. Which device is torch's current
    one belongs to it, as Triton launches there.
    """
    key: list[Hashable] = [
        tensor
        if tensor is None
        else (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.data_ptr() % 16,
        )
        for tensor in tensors
    ]
    first = tensors[0]
    if first is not None and first.is_cuda:
        key.append(torch.cuda.current_device())
    return tuple(key)
