"""The loops of decode_attention_cpu, compiled by numba; importing this needs the extra `cpu`.

One piece of work is one request and some KV heads: all of them, which reads memory in one run,
or fewer where there are too few requests for all threads. It reads keys and values once for the
G query heads that share them, block after block of the table, in tiles of a fixed number of keys
with a running maximum and sum. What comes out for a head depends on nothing but its request, so a
row has the same bits alone and in any batch, with one thread and with many.

Blocks lie anywhere, and what a processor fetches ahead ends with each of them. So whoever reads the
keys of a tile has its values fetched, and whoever reads the values the keys of what comes next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from lmscope_kernels.numba_support import of_these_sources
from lmscope_kernels.vectors_numba import add_weighted_rows, dot, four_dots, prefetch

__all__ = ["EXACT_ENOUGH", "attend_parallel", "attend_piece", "attend_serial", "exp"]

# Sums may be split and reordered, which vector instructions need; NaN and infinity stay what
# they are, unlike with fastmath=True.
EXACT_ENOUGH = {"reassoc", "contract", "nsz", "arcp"}

_TILE = 64
_FLOAT_BYTES, _LINE_BYTES = 4, 64
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, the first of which times a small integer is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_NO_SCORE = np.float32(-np.inf)
_SMALLEST, _LARGEST = np.float32(-87.0), np.float32(88.0)
_EXPONENT_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)


@njit(fastmath=EXACT_ENOUGH, inline="always")
def exp(x: Any) -> Any:
    """e**x in float32 to 2e-7 of itself, between e**-87 and e**88, in vector instructions.

    It becomes part of what calls it, and is rounded as that is: strictly where that is.
    """
    x = min(max(x, _SMALLEST), _LARGEST)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN_2_HIGH
    r = r - n * _LN_2_LOW
    # Coefficients of the usual minimax polynomial for e**r - 1 - r, r between -ln2/2 and ln2/2.
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return p * np.int32((np.int32(n) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float32)


@njit(fastmath=EXACT_ENOUGH, nogil=True, inline="always")
def _fetch(address: Any, num_bytes: Any) -> None:
    for offset in range(0, num_bytes, _LINE_BYTES):
        prefetch(address + offset)


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _attend(
    query: Any,
    G: Any,
    key_cache: Any,
    value_cache: Any,
    block_ids: Any,
    first_key: Any,
    seq_len: Any,
    first_kv_head: Any,
    num_kv_heads: Any,
    scale: Any,
    softcap: Any,
    output: Any,
    next_block_ids: Any,
    next_first_key: Any,
    next_seq_len: Any,
    next_kv_head: Any,
) -> None:
    """The query heads of some KV heads of one request.

    query      [H D or more]
    softcap    0: none
    output     [H D]
    next_...   the same of the piece of work that comes next, as many KV heads
    """
    S, K, D = key_cache.shape[1], key_cache.shape[2], key_cache.shape[3]
    first_head, num_heads = first_kv_head * G, num_kv_heads * G
    row_bytes, head_bytes = K * D * _FLOAT_BYTES, D * _FLOAT_BYTES
    piece_bytes = num_kv_heads * head_bytes
    first_bytes, next_bytes = first_kv_head * head_bytes, next_kv_head * head_bytes
    queries, all_keys = query.ctypes.data, key_cache.ctypes.data
    all_values = value_cache.ctypes.data
    scores = np.empty((num_heads, _TILE), np.float32)
    result = np.zeros((num_heads, D), np.float32)
    largest = np.full(num_heads, _NO_SCORE)
    total = np.zeros(num_heads, np.float32)
    for start in range(first_key, seq_len, _TILE):
        num_keys = min(_TILE, seq_len - start)
        done, block, place = 0, start // S, start % S
        while done < num_keys:
            num_here = min(S - place, num_keys - done)
            offset = (np.int64(block_ids[block]) * S + place) * row_bytes + first_bytes
            for i in range(0, num_here, 4):
                keys = all_keys + offset + i * row_bytes
                num_rows = min(4, num_here - i)
                for head in range(num_heads):
                    if head % G == 0:
                        for row in range(num_rows):
                            at = all_values + offset + (i + row) * row_bytes
                            _fetch(at + head // G * head_bytes, head_bytes)
                    at = queries + (first_head + head) * head_bytes
                    key, place_of = keys + head // G * head_bytes, scores[head, done + i :]
                    if num_rows == 4:
                        products = four_dots(at, key, K * D, D)
                        place_of[0] = products[0] * scale
                        place_of[1] = products[1] * scale
                        place_of[2] = products[2] * scale
                        place_of[3] = products[3] * scale
                    else:
                        for row in range(num_rows):
                            place_of[row] = dot(at, key + row * row_bytes, D) * scale
            done, block, place = done + num_here, block + 1, 0
        for head in range(num_heads):
            if softcap != _ZERO:
                for i in range(num_keys):
                    scores[head, i] = softcap * np.tanh(scores[head, i] / softcap)
            new_largest = largest[head]
            for i in range(num_keys):
                new_largest = max(new_largest, scores[head, i])
            earlier = exp(largest[head] - new_largest)
            largest[head] = new_largest
            added = _ZERO
            for i in range(num_keys):
                weight = exp(scores[head, i] - new_largest)
                scores[head, i] = weight
                added += weight
            total[head] = total[head] * earlier + added
            for d in range(D):
                result[head, d] *= earlier
        # What comes next: keys of the next tile, or of the first tile of the next piece.
        if start + _TILE < seq_len:
            ahead_ids, ahead, ahead_bytes = block_ids, start + _TILE, first_bytes
            num_ahead = min(_TILE, seq_len - ahead)
        else:
            ahead_ids, ahead, ahead_bytes = next_block_ids, next_first_key, next_bytes
            num_ahead = min(_TILE, next_seq_len - ahead)
        # A few keys beside each head, since the processor waits where it gets many at once.
        share = -(-num_ahead // (num_heads * (num_keys // S + 1)))
        ahead_block, ahead_place = ahead // S, ahead % S
        done, block, place = 0, start // S, start % S
        while done < num_keys:
            num_here = min(S - place, num_keys - done)
            offset = (np.int64(block_ids[block]) * S + place) * row_bytes + first_bytes
            for head in range(num_heads):
                num_fetched = min(share, num_ahead)
                for _ in range(num_fetched):
                    slot = np.int64(ahead_ids[ahead_block]) * S + ahead_place
                    _fetch(all_keys + slot * row_bytes + ahead_bytes, piece_bytes)
                    ahead_place += 1
                    if ahead_place == S:
                        ahead_block, ahead_place = ahead_block + 1, 0
                num_ahead -= num_fetched
                add_weighted_rows(
                    scores.ctypes.data + (head * _TILE + done) * _FLOAT_BYTES,
                    num_here,
                    all_values + offset + head // G * head_bytes,
                    K * D,
                    D,
                    result.ctypes.data + head * head_bytes,
                )
            done, block, place = done + num_here, block + 1, 0
    for head in range(num_heads):
        factor, own = _ONE / total[head], output[(first_head + head) * D :]
        for d in range(D):
            own[d] = result[head, d] * factor


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def attend_piece(
    piece: Any,
    num_parts: Any,
    query: Any,
    num_query_heads: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    first_keys: Any,
    seq_lens: Any,
    rows: Any,
    scale: Any,
    softcap: Any,
    output: Any,
) -> None:
    """One of the len(rows) * num_parts pieces of work; arrays as in decode_attention_cpu.

    query        [T, H D or more]    what lies behind the queries is not looked at
    num_parts    pieces of a request; divides K
    output       [T, H D]
    """
    K = key_cache.shape[2]
    num_kv_heads, last = K // num_parts, len(rows) * num_parts - 1
    request, first = piece // num_parts, piece % num_parts * num_kv_heads
    following = min(piece + 1, last)
    upcoming = following // num_parts
    _attend(
        query[rows[request]],
        num_query_heads // K,
        key_cache,
        value_cache,
        block_table[request],
        first_keys[request],
        seq_lens[request],
        first,
        num_kv_heads,
        scale,
        softcap,
        output[rows[request]],
        block_table[upcoming],
        first_keys[upcoming],
        seq_lens[upcoming],
        following % num_parts * num_kv_heads,
    )


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def attend_serial(
    num_parts: Any,
    query: Any,
    num_query_heads: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    first_keys: Any,
    seq_lens: Any,
    rows: Any,
    scale: Any,
    softcap: Any,
    output: Any,
) -> None:
    """All pieces of work on the calling thread; arrays as in attend_piece."""
    for piece in range(len(rows) * num_parts):
        attend_piece(
            piece,
            num_parts,
            query,
            num_query_heads,
            key_cache,
            value_cache,
            block_table,
            first_keys,
            seq_lens,
            rows,
            scale,
            softcap,
            output,
        )


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def attend_parallel(
    num_parts: Any,
    query: Any,
    num_query_heads: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    first_keys: Any,
    seq_lens: Any,
    rows: Any,
    scale: Any,
    softcap: Any,
    output: Any,
) -> None:
    """The same on numba's threads, as many as numba.set_num_threads said."""
    for piece in prange(len(rows) * num_parts):
        attend_piece(
            # It has no sign by itself, and all would be compiled twice.
            np.int64(piece),
            num_parts,
            query,
            num_query_heads,
            key_cache,
            value_cache,
            block_table,
            first_keys,
            seq_lens,
            rows,
            scale,
            softcap,
            output,
        )
