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

# Rows at a time where later keys are hidden by a bias: each time reads only the keys up to its
# last row, and no scores of keys beyond are computed to be thrown away.
_ROWS_AT_A_TIME = 128


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
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of R requests that have one query row each, in one call.

    query         [R, H, D]
    key, value    [R, L, K, D]   a view of the cache, or gathered; finite also past the end
    bias          [R, 1, 1, L]   0 for a key, -inf past the end; None when there is no such
    returns       [R, H, D]
    """
    R, H, D = query.shape
    K = key.shape[2]
    # The G heads that read one key head become rows of one query, so keys are read once.
    query = query.view(R, K, H // K, D)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if softcap is None:
        bias = _like(bias, query)
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
    key, value    [L, K, D]   a view of the cache, gathered, or the rows' own; the last T are
                              those of the rows
    bias          [T, L]      0 or -inf, the latter for all keys later than the row; None means
                              causal and T == L, without a soft cap only
    returns       [T, H, D]
    """
    T = query.shape[0]
    if bias is None:
        assert softcap is None, "a soft cap needs the bias written out"
        return _fused(query, key, value, None, scale)
    if T <= _ROWS_AT_A_TIME:
        return _biased(query, key, value, bias, scale, softcap)
    output = torch.empty_like(query)
    num_earlier = key.shape[0] - T
    for start in range(0, T, _ROWS_AT_A_TIME):
        rows = slice(start, min(start + _ROWS_AT_A_TIME, T))
        end = num_earlier + rows.stop
        output[rows] = _biased(
            query[rows], key[:end], value[:end], bias[rows, :end], scale, softcap
        )
    return output


def _biased(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """attend_many_rows with a bias, all rows at once."""
    if softcap is None:
        return _fused(query, key, value, bias, scale)
    T, H, D = query.shape
    K = key.shape[1]
    by_kv_head = query.reshape(T, K, H // K, D).transpose(0, 1)
    result = _softcapped(
        by_kv_head, key.transpose(0, 1), value.transpose(0, 1), bias, scale, softcap
    )
    return result.transpose(0, 1).flatten(1, 2)


def _fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """attend_many_rows in one call of torch's own attention."""
    bias = _like(bias, query)
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        # Views of grouped heads were measured to be no quicker for several rows.
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


def _like(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """A bias that torch's attention takes: on a GPU, one in the dtype of the query."""
    return bias.to(query.dtype) if bias is not None and query.is_cuda else bias


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
