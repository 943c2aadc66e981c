"""Writes the keys and values of a batch of tokens into their slots of the paged cache.

Slot s is place s % S of block s // S. A step writes the whole batch before any of it is
attended to, so a request may read what another one stored in the same step. The length of each
stored key is kept too, where asked for: the key is at hand, and a map of the cache shows it.

T tokens in the batch, K KV heads, D head size, B blocks in the pool, S tokens per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmscope_kernels.batch_checks import check_slots
from lmscope_kernels.launches import Launch, Launches, launch_key
from lmscope_kernels.triton_support import (
    DTYPES,
    FP_FUSION,
    check_strides,
    check_tensors,
    jit,
    require_triton,
    tl,
    triton,
)

__all__ = ["store_kv", "store_kv_kernel", "store_kv_reference", "store_kv_warps"]

_launches: Launches[Launch] = Launches()


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_norm: Tensor | None = None,
) -> None:
    """Each row goes to its slot; a row whose slot is -1 is padding and goes nowhere.

    key, value                [T, K, D]
    key_cache, value_cache    [B, S, K, D]  changed in place; contiguous
    slot_mapping              [T]           int64; no slot twice
    key_norm                  [B * S, K]    float32; gets the L2 norm of each key as it is stored
    """
    is_token = slot_mapping >= 0
    slots = slot_mapping[is_token]
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = rows[is_token].to(cache.dtype)
    if key_norm is not None:
        stored = key_cache.view(-1, *key_cache.shape[2:])[slots]
        key_norm[slots] = stored.double().norm(dim=-1).to(key_norm.dtype)


@jit
def store_kv_kernel(  # type: ignore[no-untyped-def]  # arguments of kernels have no Python types
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_norm_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_place_stride,
    key_cache_head_stride,
    value_block_stride,
    value_place_stride,
    value_cache_head_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
):
    """One program a token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + row)
    if slot < 0:
        return
    block_id = slot // S
    place = slot % S
    heads = tl.arange(0, BLOCK_K)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_inside = (heads < K) & (dims < D)

    key = tl.load(
        key_ptr + row * key_token_stride + heads * key_head_stride + dims,
        mask=is_inside,
        other=0.0,
    ).to(key_cache_ptr.dtype.element_ty)
    key_place = key_cache_ptr + block_id * key_block_stride + place * key_place_stride
    tl.store(key_place + heads * key_cache_head_stride + dims, key, mask=is_inside)

    value = tl.load(
        value_ptr + row * value_token_stride + heads * value_head_stride + dims,
        mask=is_inside,
        other=0.0,
    ).to(value_cache_ptr.dtype.element_ty)
    value_place = value_cache_ptr + block_id * value_block_stride + place * value_place_stride
    tl.store(value_place + heads * value_cache_head_stride + dims, value, mask=is_inside)

    if HAS_KEY_NORM:
        exact = key.to(tl.float32)
        norm = tl.sqrt(tl.sum(exact * exact, axis=1))
        head = tl.arange(0, BLOCK_K)
        tl.store(key_norm_ptr + slot * K + head, norm, mask=head < K)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_norm: Tensor | None = None,
    *,
    check: bool = False,
) -> None:
    """store_kv_reference on the device of the cache, whose blocks may lie in any order.

    `check` reads the slots on the host first, and raises ValueError for one outside of the pool.
    Raises for rows of keys or of the cache that do not begin at multiples of 16 elements.
    """
    layout = launch_key(key, value, key_cache, value_cache, slot_mapping, key_norm)
    launch = _launches.get(layout)
    if launch is None:
        launch = _launches.keep(
            layout, _launch(key, value, key_cache, value_cache, slot_mapping, key_norm)
        )
    if check:
        check_slots(slot_mapping, num_slots=key_cache.shape[0] * key_cache.shape[1])
    if launch.grid is not None:
        store_kv_kernel[launch.grid](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key_norm,
            *launch.numbers,
            **launch.constants,
        )


def _launch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_norm: Tensor | None,
) -> Launch:
    """Raises as store_kv says."""
    T, K, D = key.shape
    B, S = key_cache.shape[:2]
    if value.shape != key.shape or slot_mapping.shape != (T,):
        raise ValueError(
            f"value is {tuple(value.shape)} and slot_mapping {tuple(slot_mapping.shape)}, must be "
            f"({T}, {K}, {D}) as key is and ({T},)"
        )
    if key_cache.shape != (B, S, K, D) or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"key_cache is {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)}, "
            f"must be (blocks, tokens per block, {K}, {D})"
        )
    require_triton(key)
    check_tensors(
        key.device, DTYPES, key=key, value=value, key_cache=key_cache, value_cache=value_cache
    )
    check_strides(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_tensors(key.device, (torch.int64,), slot_mapping=slot_mapping)
    if key_norm is not None:
        check_tensors(key.device, (torch.float32,), key_norm=key_norm)
        if key_norm.shape != (B * S, K) or not key_norm.is_contiguous():
            raise ValueError(
                f"key_norm is {tuple(key_norm.shape)}, must be ({B * S}, {K}) and contiguous"
            )
    if not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping has gaps, must be contiguous; call contiguous() on it")
    block_k, block_d = triton.next_power_of_2(K), triton.next_power_of_2(D)
    return Launch(
        grid=(T,) if T else None,
        numbers=(
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
        ),
        constants={
            "K": K,
            "D": D,
            "S": S,
            "BLOCK_K": block_k,
            "BLOCK_D": block_d,
            "HAS_KEY_NORM": key_norm is not None,
            "num_warps": store_kv_warps(block_k * block_d),
            "enable_fp_fusion": FP_FUSION,
        },
    )


def store_kv_warps(block: int) -> int:
    """Eight numbers a thread, one 16-byte load of bfloat16, as long as there are warps."""
    return min(max(block // 256, 1), 8)
