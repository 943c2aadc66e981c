"""Which attention back end an engine has, decided once when it is built, and why.

torch     gathers keys block by block, or loops over them on a CPU; runs everywhere
triton    the kernels of lmscope_kernels: CUDA devices from sm_80 on, and under Triton's
          interpreter (TRITON_INTERPRET=1), which is for tests, a CPU

Batch-invariant engines are of kernels on a GPU and of torch and numba on a CPU; there is no third.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from lmscope_kernels.triton_support import INTERPRET, is_available

from lmscope.models.plan import PlanLine

__all__ = ["AttentionBackend", "choose_attention_backend"]

logger = logging.getLogger(__name__)

# What the kernels serve: sizes of a head, and query heads that read one key head.
_HEAD_SIZE_STEP = 16
_LARGEST_HEAD_SIZE = 256
_MOST_HEADS_PER_KV_HEAD = 128


class AttentionBackend(NamedTuple):
    """A back end, and why it is this one.

    name            "torch" or "triton"
    warning         what runs in the place of what was to be expected; "": nothing else was
    is_invariant    of a batch-invariant engine
    """

    name: str
    why: str
    warning: str = ""
    is_invariant: bool = False

    def line(self) -> PlanLine:
        """As `llm.plan` shows it, where the kernels run."""
        rows = (
            "all rows in one Triton kernel, in one tile"
            if self.is_invariant
            else ("all rows in Triton")
        )
        return PlanLine(f"over the paged cache, {rows}", self.why)

    def warn(self) -> None:
        if self.warning:
            logger.warning("%s", self.warning)


def choose_attention_backend(
    asked: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """The back end of an engine.

    asked    "auto": Triton on a CUDA device that can run it, else torch; or one of the names

    ValueError, with what to do, when Triton was asked for by name and cannot run, and for a
    batch-invariant engine on a GPU without it.
    """
    must_be_kernels = batch_invariant and device.type == "cuda"
    if asked == "torch":
        if must_be_kernels:
            raise ValueError(
                f"batch_invariant is True and attention_backend is 'torch'; on {device} only the "
                "Triton kernels are batch-invariant, so use attention_backend='triton', or "
                "device='cpu'"
            )
        return AttentionBackend("torch", "attention_backend='torch'")
    reason = _why_not_triton(device, dtype, head_size, num_query_heads // num_kv_heads)
    if must_be_kernels and reason is not None:
        raise ValueError(
            f"batch_invariant is True, and on {device} that takes the Triton kernels, which cannot "
            f"run: {reason}; use device='cpu', or leave batch_invariant out"
        )
    if asked == "triton":
        if reason is None:
            return AttentionBackend(
                "triton",
                "attention_backend='triton'" + _interpreted(),
                is_invariant=batch_invariant,
            )
        raise ValueError(
            f"attention_backend is 'triton' and cannot be: {reason}; use attention_backend='torch'"
            + (
                ", or set TRITON_INTERPRET=1 before Python starts, which is slow and for tests"
                if device.type == "cpu" and not bool(INTERPRET)
                else ""
            )
        )
    if device.type != "cuda":
        return AttentionBackend("torch", f"the device is {device}")
    if reason is None:
        return AttentionBackend("triton", f"the device is {device}", is_invariant=batch_invariant)
    return AttentionBackend(
        "torch",
        reason,
        f"attention runs in torch and not in the Triton kernels, without CUDA graphs, which is "
        f"several times slower: {reason}",
    )


def _why_not_triton(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    heads_per_kv_head: int,
) -> str | None:
    """Why the kernels cannot run; None: they can."""
    can_run, why = is_available(device, dtype)
    if not can_run:
        return why
    if head_size % _HEAD_SIZE_STEP or not 0 < head_size <= _LARGEST_HEAD_SIZE:
        return (
            f"heads have {head_size} numbers, and the kernels take multiples of "
            f"{_HEAD_SIZE_STEP} up to {_LARGEST_HEAD_SIZE}"
        )
    if heads_per_kv_head > _MOST_HEADS_PER_KV_HEAD:
        return (
            f"{heads_per_kv_head} query heads share a KV head, and the kernels take up to "
            f"{_MOST_HEADS_PER_KV_HEAD}"
        )
    return None


def _interpreted() -> str:
    return ", interpreted on the CPU (TRITON_INTERPRET=1)" if bool(INTERPRET) else ""
