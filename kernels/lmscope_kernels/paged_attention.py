"""Causal attention of each request over the keys and values in its own blocks.

A batch is one flat row of query tokens: those of the first request, then those of the
second, and so on. Row i of a request with `query_len` rows stands at position
`seq_len - query_len + i` and attends to positions 0 up to its own; with a window of W, to the
last W of these, its own among them. Where the key of a position lies is in the block table:
block `block_table[r, p // S]`, place `p % S`. H query heads share K key heads: query head h
reads key head h // (H // K). A soft cap c makes c * tanh(score / c) of each score, so that none
is beyond c.

T tokens in the batch, R requests, H query heads, K KV heads, G = H / K, D head size, B blocks
in the pool, S tokens per block, L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["attend_many_rows", "attend_one_row_each", "paged_attention_reference"]

# Scores of so many rows are in memory at a time where they are written out.
_ROWS_OF_SCORES = 256


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
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
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        key_position = torch.arange(seq_len, device=query.device)
        is_hidden = key_position > position
        if window is not None:
            is_hidden |= key_position <= position - window
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(dim=-1)
        output[start:end] = torch.einsum("htl,lhd->thd", weights, value).to(query.dtype)
    return output


def attend_one_row_each(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
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
    query = query.view(R, K, H // K, D)
    if softcap is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:
        output = _softcapped(query[:, :, None], key, value, bias, scale, softcap)
    return output.reshape(R, H, D)


def attend_many_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of one request with several query rows.

    query         [T, H, D]
    key, value    [L, K, D]   already gathered
    bias          [T, L]      0 or -inf; None means causal and T == L, without a soft cap only
    returns       [T, H, D]
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )[0].transpose(0, 1)
    assert bias is not None, "a soft cap needs the bias written out"
    T, H = query.shape[:2]
    K = key.shape[1]
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    output = torch.empty_like(query)
    for start in range(0, T, _ROWS_OF_SCORES):
        rows = slice(start, start + _ROWS_OF_SCORES)
        by_kv_head = query[rows].view(-1, K, H // K, query.shape[2]).transpose(0, 1)
        result = _softcapped(by_kv_head, keys, values, bias[rows], scale, softcap)
        output[rows] = result.transpose(0, 1).flatten(1, 2)
    return output


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention with scores written out, since the fused kind has no place for the cap.

    query         [..., N, G, D]   N rows of the G heads that read one key head
    key, value    [..., L, D]
    bias          broadcasts to [..., N, L]
    returns       [..., N, G, D]
    """
    N, G = query.shape[-3:-1]
    L = key.shape[-2]
    scores = torch.matmul(query.flatten(-3, -2), key.transpose(-1, -2)).float()
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.view(*scores.shape[:-2], N, G, L).add_(bias.unsqueeze(-2))
    return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value).view(query.shape)
