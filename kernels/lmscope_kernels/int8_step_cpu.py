"""A decoder layer of a Llama-shaped model with 8-bit weights, in one call, for one to four rows.

For each of M requests with one row: norm, queries, keys and values, rotary positions, keys and
values into the cache, attention over it, output projection, norm, SiLU MLP. A step of a model is
one call a layer and an `int8_linear` for the head; with so few rows, what torch's calls cost
around the products is as much as the products.

    layer = Int8Layer(input_norm, input_epsilon, qkv, o, mlp_norm, mlp_epsilon, gate_up, down)
    layer(hidden, cosine, sine, key_cache, value_cache, slots, block_table, first_keys, seq_lens,
          scale, residual_multiplier=1.0)

M rows, E hidden size, H query heads, K KV heads, D head size, I size of the MLP.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lmscope_kernels.int8_linear_cpu import Int8Linear, int8_linear_reference
from lmscope_kernels.numba_support import has_safe_threads, use_torch_threads
from lmscope_kernels.paged_attention import paged_attention_reference
from lmscope_kernels.store_kv import store_kv_reference

__all__ = ["Int8Layer", "int8_layer_reference", "why_no_int8_step"]


class Int8Layer:
    """Weights of one layer, which share memory with what they are made of.

    input_norm, mlp_norm    [E] float32, of the norms before attention and before the MLP
    qkv                     [(H + 2 K) D, E]   queries, then keys, then values
    o                       [E, H D]
    gate_up                 [2 I, E]
    down                    [E, I]
    """

    def __init__(
        self,
        input_norm: Tensor,
        input_epsilon: float,
        qkv: Int8Linear,
        o: Int8Linear,
        mlp_norm: Tensor,
        mlp_epsilon: float,
        gate_up: Int8Linear,
        down: Int8Linear,
    ) -> None:
        self.norms = (input_norm.detach(), mlp_norm.detach())
        self.epsilons = (input_epsilon, mlp_epsilon)
        self.linears = (qkv, o, gate_up, down)
        self._arguments = (
            tuple(norm.numpy() for norm in self.norms),
            np.array(self.epsilons, dtype=np.float32),
            *(_arrays(each) for each in self.linears),
        )

    def __call__(
        self,
        hidden: Tensor,
        cosine: Tensor,
        sine: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: NDArray[np.int64],
        block_table: NDArray[np.int32],
        first_keys: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        scale: float,
        residual_multiplier: float = 1.0,
    ) -> None:
        """Change `hidden` into the output of the layer, and store the rows' keys and values.

        hidden                    [M, E]         float32, contiguous
        cosine, sine              [M, D]         of the rows' positions; the sine of the first
                                                 half of a head negative
        key_cache, value_cache    [B, S, K, D]   float32, contiguous
        slots                     [M]            where the rows' keys and values go
        block_table               [M, max_blocks]
        first_keys, seq_lens      [M]            row m attends to positions first_keys[m] up to
                                                 seq_lens[m] - 1, the last of which is its own
        """
        use_torch_threads()
        kernels: Any = importlib.import_module("lmscope_kernels.int8_numba")
        kernels.layer_step(
            hidden.numpy(),
            *self._arguments,
            cosine.numpy(),
            sine.numpy(),
            key_cache.numpy(),
            value_cache.numpy(),
            slots,
            block_table,
            first_keys,
            seq_lens,
            np.float32(scale),
            np.float32(residual_multiplier),
        )


def why_no_int8_step() -> str | None:
    """Why layers cannot run in one call here, where numba can be imported; None: they can."""
    if not has_safe_threads():
        return "numba has no threads here that two engines may share"
    return None


def int8_layer_reference(
    layer: Int8Layer,
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: NDArray[np.int64],
    block_table: NDArray[np.int32],
    first_keys: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    scale: float,
    residual_multiplier: float = 1.0,
) -> None:
    """The definition, in torch; arguments as in Int8Layer.__call__."""
    M = len(hidden)
    K, D = key_cache.shape[2:]
    qkv, o, gate_up, down = layer.linears

    def norm(rows: Tensor, index: int) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], layer.norms[index], layer.epsilons[index])

    def linear(rows: Tensor, weights: Int8Linear) -> Tensor:
        return int8_linear_reference(rows, weights.weight, weights.bias)

    heads = linear(norm(hidden, 0), qkv).view(M, -1, D)
    rotated = heads[:, :-K]
    rotated = rotated * cosine[:, None] + torch.roll(rotated, D // 2, -1) * sine[:, None]
    query, key, value = rotated[:, :-K], rotated[:, -K:], heads[:, -K:]
    store_kv_reference(key, value, key_cache, value_cache, torch.from_numpy(slots))
    attended = torch.cat(
        [
            paged_attention_reference(
                query[m : m + 1],
                key_cache,
                value_cache,
                torch.from_numpy(block_table[m : m + 1]),
                torch.from_numpy(seq_lens[m : m + 1]),
                torch.tensor([0, 1]),
                scale,
                window=int(seq_lens[m] - first_keys[m]),
            )
            for m in range(M)
        ]
    )
    hidden += linear(attended.reshape(M, -1), o) * residual_multiplier
    gate, up = linear(norm(hidden, 1), gate_up).chunk(2, dim=-1)
    hidden += linear(F.silu(gate) * up, down) * residual_multiplier


def _arrays(linear: Int8Linear) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    weight, scales = linear.weight
    bias = torch.empty(0) if linear.bias is None else linear.bias
    return weight.numpy(), scales.numpy(), bias.numpy()
