"""What all Triton kernels share: the import, the dot product, tiles, and the checks of launchers.

Triton exists for Linux only, and importing lmscope must not need it. Kernel files take `triton`,
`tl` and `jit` from here; where Triton is missing they can still be imported for their torch
references, and their launchers raise.

With TRITON_INTERPRET=1 in the environment before the first import of Triton, kernels run on the
CPU under its interpreter, one NumPy call an operation. That is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "FP_FUSION",
    "INTERPRET",
    "Tile",
    "attention_tile",
    "capability",
    "check_contiguous",
    "check_strides",
    "check_tensors",
    "dot",
    "is_available",
    "jit",
    "require_triton",
    "tanh",
    "tl",
    "triton",
]

jit: Any
INTERPRET: Any
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
    INTERPRET = False

    def jit(function: Any = None, **_: Any) -> Any:
        """Leaves a kernel as it is, never to be called."""
        return function if function is not None else jit

else:
    jit = triton.jit
    INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

# What kernels read and write; sums, maxima and norms inside them are float32.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# A product and a sum may become one instruction. Said at each launch: the default is about to
# change from one version of Triton to the next, and last bits with it.
FP_FUSION = True

_OLDEST_CAPABILITY = (8, 0)


@jit
def dot(a, b):  # type: ignore[no-untyped-def]  # arguments of kernels have no Python types
    """The matrix product of two tiles, in float32; of float32 without rounding to tf32."""
    if INTERPRET:
        # The interpreter would multiply the raw bits of bfloat16.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def tanh(x):  # type: ignore[no-untyped-def]  # as above
    """Hyperbolic tangent from exp2, which the interpreter has; right to 1e-7, not relative."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@dataclass(frozen=True)
class Tile:
    """How one program of an attention kernel is laid out.

    num_rows    rows of the query tile: query tokens times the heads that share one KV head
    num_keys    keys of one turn of its loop
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


def attention_tile(
    dtype: torch.dtype, head_size: int, capability: tuple[int, int], has_many_rows: bool
) -> Tile:
    """The tile for one query token a request, or for many.

    A table, not a search at run time: the same shapes must give the same bits in every process.
    """
    is_wide = head_size > 64
    if dtype == torch.float32:
        # IEEE products keep whole tiles in registers. Of wide tiles sm_80 spills with 16 keys, and
        # newer ones with 32.
        return Tile(16, 16 if is_wide and capability >= (9, 0) else 32, num_warps=4, num_stages=2)
    if not has_many_rows:
        # With two stages, wide keys spill on sm_80.
        return Tile(16, 32, num_warps=4, num_stages=3) if is_wide else Tile(16, 64, 4, 2)
    if head_size > 128:
        # 128 rows of these spill, and take more shared memory than sm_86, sm_89 and sm_120 have.
        return Tile(64, 32, num_warps=8, num_stages=2)
    # 64 wide keys spill on sm_80, and 64 narrow ones on sm_100 with Triton 3.6.
    is_small = capability < (9, 0) if is_wide else capability >= (10, 0)
    num_keys = 32 if is_small else 64
    return Tile(128, num_keys, num_warps=8, num_stages=2)


@cache
def is_available(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[bool, str]:
    """Whether the kernels run on `device` with tensors of `dtype`, and if not, why."""
    if triton is None:
        return False, (
            "Triton is not installed; it exists for Linux only, where pip install triton adds it"
        )
    if dtype not in DTYPES:
        return False, f"the Triton kernels know {_names(DTYPES)}, not {dtype}"
    if bool(INTERPRET):
        return True, ""
    if device.type != "cuda":
        return False, f"Triton runs on CUDA devices, and the device is {device}"
    if torch.version.hip is not None:
        return False, "the Triton kernels have been written for NVIDIA GPUs only"
    if not torch.cuda.is_available():
        return False, "torch finds no CUDA device: the driver or its runtime is missing"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _OLDEST_CAPABILITY:
        return False, (
            f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}, and the Triton kernels "
            f"need sm_{_OLDEST_CAPABILITY[0]}{_OLDEST_CAPABILITY[1]} or newer"
        )
    return True, ""


def require_triton(tensor: Tensor) -> None:
    """Raise RuntimeError unless a kernel can run on `tensor`.

    Triton launches on torch's current device, wherever the tensors are.
    """
    # Of the index-free kind of device too, is_available keeps one answer each.
    can_run, why = is_available(tensor.device, tensor.dtype)
    if not can_run:
        raise RuntimeError(f'{why}; use backend="torch"')
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        raise RuntimeError(
            f"the tensors are on {tensor.device}, and the current device is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({tensor.device.index})"
        )


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; the oldest that is served where the CPU interprets."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _OLDEST_CAPABILITY


def check_tensors(
    device: torch.device, dtypes: tuple[torch.dtype, ...], **tensors: Tensor | None
) -> None:
    """Raise unless each tensor that is given is on `device` and has one of `dtypes`."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {device}; move it there")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}, must be {_names(dtypes)}; convert it")


def check_strides(**tensors: Tensor | None) -> None:
    """Raise unless rows are contiguous and begin at multiples of 16 elements.

    Compiled for other strides, a kernel loads element by element, without asynchronous copies.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        *strides, last = tensor.stride()
        if last != 1:
            raise ValueError(
                f"{name} has stride {last} in its last dimension, must have 1; "
                f"call contiguous() on it"
            )
        if any(stride % 16 for stride in strides):
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())}, all but the last must be multiples "
                f'of 16; pad its rows to such a length or use backend="torch"'
            )
        if tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} begins at {tensor.data_ptr():#x}, must begin at a multiple of 16 bytes; "
                f"copy it into a tensor of its own"
            )


def check_contiguous(**tensors: Tensor | None) -> None:
    """Raise unless each tensor that is given lies in memory without gaps, in order."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())}, must be contiguous; "
                f"call contiguous() on it"
            )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
