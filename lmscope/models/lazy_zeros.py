"""Zeros that take memory only where something is written."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["lazy_zeros"]

_ALIGNMENT = 64  # bytes of a cache line, as torch's own tensors


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros; on a CPU the system hands each page out when it is first written.

    torch writes all of its zeros. For a pool of 512 MiB that takes half a second of each start,
    and the memory of blocks that may never be used. RuntimeError when there is no room.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    except (MemoryError, ValueError) as error:  # numpy has no array of more than 2**63 bytes
        raise RuntimeError(f"not enough memory: {num_bytes} bytes of zeros") from error
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).reshape(shape)
