"""Causal attention of each request over the keys and values in its own blocks.

A batch is one flat row of query tokens: those of the first request, then those of the
second, and so on. Row i of a request with `query_len` rows stands at position
`seq_len - query_len + i` and attends to positions 0 up to its own. Where the key of a
position lies is in the block table: block `block_table[r, p // S]`, place `p % S`. H query
heads share K key heads: query head h reads key head h // (H // K).

T tokens in the batch, R requests, H query heads, K KV heads, G = H / K, D head size, B blocks
in the pool, S tokens per block, L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["attend_many_rows", "attend_one_row_each", "paged_attention_reference"]


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """The definition, one request after the other, with scores and sums in float64.

    query                     [T, H, D]
    key_cache, value_cache    [B, S, K, D]
    block_table               [R, max_blocks]
    seq_lens                  [R]       tokens of each request, those of this step included
    query_start_loc           [R + 1]   first row of each request in query, and the end
    returns                   [T, H, D] in the dtype of query; rows past the end are zero
    """
    output = torch.zeros_like(query)
    num_groups = query.shape[1] // key_cache.shape[2]
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[request : request + 2].tolist()
        if start == end:
            continue
        key, value = (
            cache[block_table[request].long()].flatten(0, 1)[:seq_len].double()
            for cache in (key_cache, value_cache)
        )
        key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
        scores = torch.einsum("thd,lhd->htl", query[start:end].double(), key) * scale
        position = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        is_later = torch.arange(seq_len, device=query.device) > position[:, None]
        weights = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1)
        output[start:end] = torch.einsum("htl,lhd->thd", weights, value).to(query.dtype)
    return output


def attend_one_row_each(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of R requests that have one query row each, in one call.

    query      [R, H, D]
    slots      [R * L]        where the keys of each request lie; what is past its end may
                              be any slot with finite content
    bias       [R, 1, 1, L]   0 for a key, -inf past the end; None when there is no such
    returns    [R, H, D]
    """
    R, H, D = query.shape
    K = key_cache.shape[2]
    # Selecting whole rows of K * D numbers is a memory copy; indexing [B, S, K, D] by a
    # tensor of slots gives the same and takes half as long again.
    key, value = (
        cache.view(-1, K * D).index_select(0, slots).view(R, -1, K, D).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    # The G heads that read one key head become rows of one query, so keys are read once.
    return F.scaled_dot_product_attention(
        query.view(R, K, H // K, D), key, value, attn_mask=bias, scale=scale
    ).reshape(R, H, D)


def attend_many_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Causal attention of one request with several query rows.

    query         [T, H, D]
    key, value    [L, K, D]   already gathered
    bias          [T, L]      0 or -inf; None means causal and T == L
    returns       [T, H, D]
    """
    return F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )[0].transpose(0, 1)
