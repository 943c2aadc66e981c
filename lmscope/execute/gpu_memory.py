"""How much of a GPU's memory is left for the KV cache: measured, by running the largest step.

    room = total * gpu_memory_utilization - what others hold - weights - one step

where one step is the most that a step of max_num_batched_tokens tokens takes beside the weights
and the cache.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch

from lmscope.config import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineOptions,
)
from lmscope.models.attention import BatchView, KVCache
from lmscope.models.loader import LoadedModel

__all__ = ["GpuRoom", "gpu_room", "room_for_cache"]

logger = logging.getLogger(__name__)

_GB = 1e9
# What an engine allocates beside: partial results of decode splits, logits of graphs, buffers of a
# batch and of sampling, and what allocators keep between tensors.
_SPARE_BYTES = 768 << 20


class GpuRoom(NamedTuple):
    """Bytes for the KV cache, and the arithmetic that gave them."""

    num_bytes: int
    why: str


def gpu_room(options: EngineOptions, loaded: LoadedModel, attention_backend: str) -> GpuRoom | None:
    """What a GPU has left for the cache of an engine; None where the user has said how much.

    attention_backend    the one that was chosen

    Runs one step. ValueError, with the numbers, where it finds no room, or leaves none.
    """
    if options.num_kv_blocks is not None or options.kv_cache_bytes is not None:
        return None
    device = loaded.device
    torch.cuda.empty_cache()
    try:
        step_bytes = _largest_step_bytes(options, loaded, attention_backend)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        raise ValueError(no_room_for_a_step(total=total, free=free, own=own)) from error
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    room = room_for_cache(
        total=total,
        free=free,
        own=reserved,
        step=step_bytes,
        utilization=options.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION,
    )
    logger.info("%s", room.why)
    return room


def room_for_cache(*, total: int, free: int, own: int, step: int, utilization: float) -> GpuRoom:
    """The arithmetic; all in bytes.

    free           of the device now
    own            what this process holds: weights, other engines
    step           what the largest step takes beside it
    utilization    part of the total that may be in use

    ValueError where less than nothing is left, with who holds what and what to do.
    """
    others = total - free - own
    spare = step + _SPARE_BYTES
    left = int(total * utilization) - others - own - spare
    # A driver and contexts hold a little of any GPU; that another process does is worth saying.
    why = (
        f"gpu_memory_utilization is {utilization:g}: of {total / _GB:.2f} GB this process holds "
        f"{own / _GB:.2f}, other processes and the driver {others / _GB:.2f}, a step takes "
        f"{spare / _GB:.2f}, which leaves {max(left, 0) / _GB:.2f} GB for the KV cache"
    )
    if left <= 0:
        advice = (
            "end the other process, "
            if others > own + spare
            else "close other engines, lower max_num_batched_tokens, "
        )
        raise ValueError(f"{why}; {advice}raise gpu_memory_utilization or load a smaller model")
    return GpuRoom(left, why)


def no_room_for_a_step(*, total: int, free: int, own: int) -> str:
    """Why an engine cannot begin whose largest step has run out of memory, and what to do."""
    others = total - free - own
    advice = "end the other process, or " if others > own else ""
    return (
        f"the largest step does not fit beside the weights: of {total / _GB:.2f} GB this process "
        f"holds {own / _GB:.2f}, other processes and the driver {others / _GB:.2f}, "
        f"{free / _GB:.2f} GB are free; {advice}lower max_num_batched_tokens and max_num_seqs, "
        "close other engines or load a smaller model"
    )


@torch.inference_mode()
def _largest_step_bytes(options: EngineOptions, loaded: LoadedModel, attention_backend: str) -> int:
    """The most memory that a step takes beside weights and cache, by running one.

    Requests of one token fill it up: what attention keeps for itself is allocated once, and the
    logits of as many requests as there may be are the largest tensor of a small model.
    """
    device = loaded.device
    num_tokens = options.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    if options.max_num_batched_tokens is None and not options.enable_chunked_prefill:
        num_tokens = max(num_tokens, options.max_model_len or loaded.max_model_len)
    num_reqs = min(options.max_num_seqs or DEFAULT_MAX_NUM_SEQS["cuda"], num_tokens)
    body = loaded.body(
        exact=options.exact,
        quantization=options.quantization,
        batch_invariant=options.batch_invariant,
        attention_backend=attention_backend,
    )
    block_size = options.block_size
    query_lens = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)
    query_lens[: num_tokens % num_reqs] += 1
    # All of them read and write the one block that is there: what they compute is thrown away.
    positions = np.concatenate([np.arange(length) for length in query_lens.tolist()])
    slots = np.arange(num_tokens, dtype=np.int64) % (2 * block_size)
    max_blocks = -(-int(query_lens.max()) // block_size)
    cache = KVCache.allocate(
        loaded.num_layers,
        2,
        block_size,
        loaded.num_kv_heads,
        loaded.head_size,
        loaded.dtype,
        device,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    batch = BatchView.build(
        positions=positions.astype(np.int64),
        slot_mapping=slots,
        query_start_loc=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        seq_lens=query_lens,
        block_table=np.ones((num_reqs, max_blocks), dtype=np.int32),
        block_size=block_size,
        device=device,
        windows=loaded.windows,
        is_softcapped=loaded.is_softcapped,
    )
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    rows = np.cumsum(query_lens) - 1
    logits = body(token_ids, batch, cache, rows)
    # A draw looks at them in float32, with filters and noise beside.
    logits.float().softmax(dim=-1).add_(1.0)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
