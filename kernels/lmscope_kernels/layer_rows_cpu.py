"""What a decoder layer does to rows between its matrix products, on a CPU, each in one pass.

    add_norm     hidden += multiplier * norm(new), output = norm(hidden)
    store        norms of queries and keys, rotary positions, keys and values into the cache
    attend       attention of the rows that are alone in their request
    silu_mul     output = SiLU(gate) * up

Every norm is optional. Torch takes about ten calls for each, which at few rows cost more than what
they compute. The loops are compiled by numba (the extra `cpu`). Float32 only.

    layer_loops() -> LayerLoops(add_norm, store, attend, silu_mul)
    prepare_layer_rows()    compiles, once for all shapes

The loops take arrays, whose making from tensors would be a large part of a call: the caller keeps
those of weights and cache. T rows, E hidden size, H query
heads, K KV heads, D head size, B blocks in the pool, S tokens per block, I size of the MLP.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lmscope_kernels.numba_support import use_torch_threads
from lmscope_kernels.store_kv import store_kv_reference

__all__ = [
    "NO_NORM",
    "NO_ROTARY",
    "NO_SOFTCAP",
    "LayerLoops",
    "RowsNorm",
    "add_norm_reference",
    "layer_loops",
    "prepare_layer_rows",
    "rotate_and_store_reference",
    "rows_norm",
    "silu_mul_reference",
]

Floats = NDArray[np.float32]
NO_ROTARY = np.zeros((0, 1, 1), np.float32)
NO_SOFTCAP = np.float32(0)


class RowsNorm(NamedTuple):
    """RMSNorm over stretches of len(weight) numbers; none where weight is empty."""

    weight: Floats
    epsilon: np.float32


NO_NORM = RowsNorm(np.zeros(0, np.float32), np.float32(0))


def rows_norm(weight: Tensor, epsilon: float) -> RowsNorm:
    """A norm over `weight`'s own memory."""
    return RowsNorm(weight.detach().numpy(), np.float32(epsilon))


def add_norm_reference(
    hidden: Tensor, new: Tensor | None, new_norm: RowsNorm, multiplier: float, norm: RowsNorm
) -> Tensor:
    """Change `hidden` [T, E] by `new` [T, E], and return it normed, or itself without a norm."""
    if new is not None:
        hidden += _norm_reference(new, new_norm) * multiplier
    return _norm_reference(hidden, norm)


def rotate_and_store_reference(
    heads: Tensor,
    num_query_heads: int,
    head_norms: tuple[RowsNorm, RowsNorm],
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """What `attend` makes of its `heads`, which stay here; it fills the cache."""
    K, D = key_cache.shape[2:]
    keys, values = num_query_heads * D, (num_query_heads + K) * D
    query = _norm_reference(heads[:, :keys], head_norms[0])
    key = _norm_reference(heads[:, keys:values], head_norms[1])
    both = torch.cat((query, key), dim=1).view(len(heads), -1, D)
    if rotary is not None:
        both = both * rotary[0] + torch.roll(both, D // 2, -1) * rotary[1]
    value = heads[:, values:].view(-1, K, D)
    store_kv_reference(both[:, num_query_heads:], value, key_cache, value_cache, slots)
    return torch.cat((both.flatten(1), heads[:, values:]), dim=1)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _norm_reference(rows: Tensor, norm: RowsNorm) -> Tensor:
    if len(norm.weight) == 0:
        return rows
    weight = torch.from_numpy(norm.weight)
    groups = rows.reshape(len(rows), -1, len(weight))
    return F.rms_norm(groups, weight.shape, weight, float(norm.epsilon)).view(rows.shape)


class LayerLoops(NamedTuple):
    """The compiled loops.

    add_norm(hidden, new, *new_norm, multiplier, *norm, output)
        hidden [T, E] is changed by new [T, E], or [0, E] for nothing; output [T, E] is hidden
        normed, and stays as it is without a norm
    store(heads, num_query_heads, *query_norm, *key_norm, cosine, sine, slots, key_cache,
          value_cache)
        heads [T, (H + 2 K) D], queries, keys and values: queries and keys are normed and rotated
        where they are, and keys and values stored; cosine and sine [T, 1, D], the sine of the
        first half of a head negative, or NO_ROTARY; slots [T]
    attend(num_parts, heads, num_query_heads, key_cache, value_cache, block_table, first_keys,
           seq_lens, rows, scale, softcap, output)
        the requests with one row are attended to as in paged_decode_cpu, into their rows of
        output [T, H D]; softcap 0: none
    silu_mul(gate_up [T, 2 I], output [T, I])
    """

    add_norm: Callable[..., None]
    store: Callable[..., None]
    attend: Callable[..., None]
    silu_mul: Callable[..., None]


def layer_loops() -> LayerLoops:
    """For what the calling thread runs next, on as many of numba's threads as torch has.

    Only where decode_kernel_choice says "numba".
    """
    kernels: Any = importlib.import_module("lmscope_kernels.layer_rows_numba")
    attention: Any = importlib.import_module("lmscope_kernels.decode_attention_numba")
    is_parallel = use_torch_threads()
    return LayerLoops(
        kernels.add_norm,
        kernels.rotate_and_store,
        attention.attend_parallel if is_parallel else attention.attend_serial,
        kernels.silu_mul_parallel if is_parallel else kernels.silu_mul_serial,
    )


def prepare_layer_rows() -> None:
    """Compile, or load what an earlier process compiled; it does not depend on shapes.

    Without what attends, which prepare_decode_kernel prepares.
    """
    loops = layer_loops()
    cache, row = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 2), np.float32)
    loops.add_norm(row, row, *NO_NORM, np.float32(1), *NO_NORM, row)
    loops.store(
        np.zeros((1, 6), np.float32),
        1,
        *NO_NORM,
        *NO_NORM,
        NO_ROTARY,
        NO_ROTARY,
        np.zeros(1, np.int64),
        cache,
        cache,
    )
    loops.silu_mul(np.zeros((1, 4), np.float32), row)
