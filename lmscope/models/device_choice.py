"""Where a model runs and in which dtype, by what is asked for and what is there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from lmscope.checks import nearest
from lmscope.config import are_gpus_hidden

__all__ = ["choose_device", "choose_dtype"]

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Is there where the driver of an NVIDIA GPU is loaded.
_DRIVER = Path("/proc/driver/nvidia/version")


def choose_device(device: str | torch.device) -> torch.device:
    """The device of a model.

    device    "auto": CUDA where torch finds any, else the CPU, with a warning where there is a
              GPU that torch cannot use. Of several GPUs the calling thread's current one

    ValueError for a CUDA device that torch does not find, with the reason.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return _current_gpu()
        if _DRIVER.exists() and not are_gpus_hidden():
            logger.warning("the model runs on the CPU, although there is a GPU: %s", _why_no_cuda())
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it takes 'auto', 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {device!r} and torch finds no CUDA device: {_why_no_cuda()}, "
            "or use device='cpu'"
        )
    return _current_gpu() if chosen.type == "cuda" and chosen.index is None else chosen


def choose_dtype(dtype: str | torch.dtype, stored: Any, device: torch.device) -> torch.dtype:
    """The dtype of a model's weights.

    dtype     "auto": the stored one, but float32 on a CPU, and float16 in the place of a bfloat16
              that the device does not compute in, with a warning
    stored    what the checkpoint says; anything that is none of ours counts as float32

    ValueError for another one, and for a bfloat16 that the device does not compute in.
    """
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; {nearest(dtype, ('auto', *_DTYPES))}")
        dtype = _DTYPES[dtype]
    if isinstance(dtype, torch.dtype):
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype is {dtype}; it takes 'auto', {', '.join(map(repr, _DTYPES))}")
        if dtype == torch.bfloat16 and not _has_bfloat16(device):
            raise ValueError(
                f"dtype is bfloat16, which {torch.cuda.get_device_name(device)} does not compute "
                "in; use dtype='float16', or 'float32'"
            )
        return dtype
    if device.type == "cpu" or stored not in _DTYPES.values():
        return torch.float32
    if stored == torch.bfloat16 and not _has_bfloat16(device):
        logger.warning(
            "the weights are bfloat16, which %s does not compute in; they run in float16, whose "
            "range is smaller: give dtype='float32' if outputs are wrong",
            torch.cuda.get_device_name(device),
        )
        return torch.float16
    chosen: torch.dtype = stored
    return chosen


def _current_gpu() -> torch.device:
    # With its number: which one is current is each thread's own, and an engine has threads.
    return torch.device("cuda", torch.cuda.current_device())


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _why_no_cuda() -> str:
    """What keeps torch from a GPU, and what to do."""
    if not _DRIVER.exists():
        return "there is no NVIDIA driver; install one"
    if are_gpus_hidden():
        return "CUDA_VISIBLE_DEVICES hides all of them; unset it"
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; install a build with it from "
            "pytorch.org"
        )
    return (
        f"torch {torch.__version__} brings the runtime of CUDA {torch.version.cuda}, which the "
        "driver does not serve; update the driver, or install a build for an older CUDA"
    )
