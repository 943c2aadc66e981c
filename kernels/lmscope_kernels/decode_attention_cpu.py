"""Attention of requests that have one query row each, on a CPU, straight over the block table.

The definition is `paged_attention_reference`. The loops are compiled by numba, which is optional
(the extra `cpu`): they copy no keys, need no padding, and read nothing past the end of a
request, so what lies there may be anything. Float32 only; for bfloat16 and float16, and where
numba is missing, torch does it.

    decode_kernel_choice(dtype, device) -> DecodeKernelChoice(name, why)
    prepare_decode_kernel()             compiles, once for all shapes
    paged_decode_cpu(query, key_cache, value_cache, block_table, first_keys, seq_lens, rows,
                     scale, softcap=None, output=...)

T rows in the batch, R requests, H query heads, K KV heads, D head size, B blocks in the pool,
S tokens per block.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope_kernels.numba_support import use_torch_threads, why_not_numba

__all__ = [
    "DecodeKernelChoice",
    "decode_kernel_choice",
    "num_parts",
    "paged_decode_cpu",
    "prepare_decode_kernel",
    "rows_of",
]


class DecodeKernelChoice(NamedTuple):
    """name: "numba" or "torch". why: what decided it."""

    name: str
    why: str


def decode_kernel_choice(dtype: torch.dtype, device: torch.device) -> DecodeKernelChoice:
    """What attends for requests with one row each, over a cache of `dtype` on `device`."""
    if device.type != "cpu":
        return DecodeKernelChoice("torch", f"the compiled loops are for a CPU, not {device.type}")
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        return DecodeKernelChoice("torch", f"the compiled loops are for float32, not {name}")
    reason = why_not_numba()
    if reason is not None:
        return DecodeKernelChoice("torch", reason)
    return DecodeKernelChoice("numba", "float32 on a CPU, and numba is installed")


def prepare_decode_kernel() -> None:
    """Compile, or load what an earlier process compiled.

    Some 3 seconds the first time, a second later; what is compiled does not depend on shapes.
    Without this, the first step with a decoding request waits for it.
    """
    rows = torch.zeros(2, 1, 1)
    cache = torch.zeros(1, 1, 1, 1)
    table = np.zeros((2, 1), np.int32)
    zeros, ones = np.zeros(2, np.int32), np.ones(2, np.int32)
    paged_decode_cpu(
        rows, cache, cache, table, zeros, ones, np.arange(2), 1.0, output=torch.empty_like(rows)
    )


def paged_decode_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: NDArray[np.int32],
    first_keys: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    rows: NDArray[np.int64],
    scale: float,
    softcap: float | None = None,
    *,
    output: Tensor,
) -> None:
    """Attend for R rows of `query` and write them into the same rows of `output`.

    query, output             [T, H, D]        float32; output contiguous, its other rows stay
    key_cache, value_cache    [B, S, K, D]     float32, contiguous; H a multiple of K
    block_table               [R, max_blocks]  contiguous
    first_keys, seq_lens      [R]              request r attends to positions first_keys[r] up to
                                               seq_lens[r] - 1, of which there is at least one
    rows                      [R]              where in query each request's row is
    softcap                   None: none

    Runs on as many of numba's threads as torch has, with the same bits for any number. Only when
    decode_kernel_choice says "numba".
    """
    kernels = _kernels()
    attend = kernels.attend_parallel if use_torch_threads() else kernels.attend_serial
    attend(
        num_parts(len(rows), key_cache.shape[2]),
        rows_of(query).numpy(),
        query.shape[1],
        key_cache.numpy(),
        value_cache.numpy(),
        block_table,
        first_keys,
        seq_lens,
        rows,
        np.float32(scale),
        np.float32(softcap or 0.0),
        output.view(len(output), -1).numpy(),
    )


def rows_of(query: Tensor) -> Tensor:
    """[T, H, D] as [T, H D or more], contiguous.

    Without a copy where it is contiguous, and where queries stand at the begin of longer rows.
    """
    T, H, D = query.shape
    width = query.stride(0)
    is_begin = query.storage_offset() == 0 and query.stride()[1:] == (D, 1) and width >= H * D
    if is_begin and T * width * query.element_size() <= query.untyped_storage().nbytes():
        return query.as_strided((T, width), (width, 1))
    return query.reshape(T, H * D)


def num_parts(num_requests: int, num_kv_heads: int) -> int:
    """In how many pieces each request is attended to, which changes no bits.

    Whole requests read memory in one run; where they are too few for all threads, each KV head
    goes by itself.
    """
    return num_kv_heads if num_requests < torch.get_num_threads() else 1


def _kernels() -> Any:
    return importlib.import_module("lmscope_kernels.decode_attention_numba")
