"""The loops of prompt_attention_cpu, compiled by numba; importing this needs the extra `cpu`.

One piece of work is some rows of one request and one KV head: the rows of the G query heads that
share it become the columns of one matrix, since then scores are columns too, and their maximum,
their weights and their sums are taken for many rows at once, without a sum across a vector. Keys
and values are read where they lie.

Keys go by in tiles with a running maximum and sum, as in decode_attention_numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from lmscope_kernels.decode_attention_numba import EXACT_ENOUGH, exp
from lmscope_kernels.numba_support import of_these_sources
from lmscope_kernels.vectors_numba import LANES, ROWS, product

__all__ = ["attend_prompts_parallel", "attend_prompts_serial"]

_TILE = 64
_FLOAT_BYTES = 4
_ZERO, _ONE = np.float32(0), np.float32(1)
_NO_SCORE = np.float32(-np.inf)
# Before the first score: not infinity, since a tile in which all is hidden would give infinity
# minus infinity.
_LOWEST = np.float32(np.finfo(np.float32).min)


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _weigh(
    scores: Any,
    num_keys: Any,
    num_columns: Any,
    largest: Any,
    earlier: Any,
    added: Any,
    total: Any,
) -> None:
    """Make weights of the scores of a tile.

    scores     [keys, columns]    scores, then weights
    largest    [columns]          the largest score so far
    earlier    [columns]          what weights before this tile are to be multiplied by
    added      [columns]          sum of weights of the tile
    total      [columns]          sum of weights so far
    """
    for m in range(num_columns):
        earlier[m] = largest[m]
    for key in range(num_keys):
        row = scores[key]
        for m in range(num_columns):
            score = row[m]
            largest[m] = score if score > largest[m] else largest[m]
    for m in range(num_columns):
        earlier[m] = exp(earlier[m] - largest[m])
        added[m] = _ZERO
    for key in range(num_keys):
        row = scores[key]
        for m in range(num_columns):
            weight = exp(row[m] - largest[m])
            row[m] = weight
            added[m] += weight
    for m in range(num_columns):
        total[m] = total[m] * earlier[m] + added[m]


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _attend(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_ids: Any,
    first_row: Any,
    num_rows: Any,
    first_position: Any,
    kv_head: Any,
    G: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    output: Any,
    transposed: Any,
    scores: Any,
    result: Any,
    sums: Any,
) -> Any:
    """Some rows of one request, for the query heads of one KV head; whether all came out numbers.

    query               [T, H D or more]    what lies behind the queries is not looked at
    output              [T, H D]
    window              0: none
    transposed          [D, columns]       room for the queries
    scores              [_TILE, columns]
    result              [columns, D up to a multiple of LANES]
    sums                [4, columns]
    """
    S, K, D = key_cache.shape[1], key_cache.shape[2], key_cache.shape[3]
    num_used = num_rows * G
    num_columns = -(-num_used // LANES) * LANES
    width, result_width = transposed.shape[1], result.shape[1]
    row_stride = K * D
    head_offset = kv_head * D * _FLOAT_BYTES
    all_keys, all_values = key_cache.ctypes.data, value_cache.ctypes.data
    transposed_at, scores_at, result_at = (
        transposed.ctypes.data,
        scores.ctypes.data,
        result.ctypes.data,
    )
    largest, earlier, added, total = sums[0], sums[1], sums[2], sums[3]
    for row in range(num_rows):
        for g in range(G):
            own = query[first_row + row, (kv_head * G + g) * D :]
            for d in range(D):
                transposed[d, row * G + g] = own[d] * scale
    for d in range(D):
        transposed[d, num_used:num_columns] = _ZERO
    largest[:num_columns] = _LOWEST
    total[:num_columns] = _ZERO
    result[:num_columns] = _ZERO

    end = first_position + num_rows
    first_key = max(first_position - window + 1, 0) if window > 0 else 0
    for start in range(first_key, end, _TILE):
        num_keys = min(_TILE, end - start)
        done, block, place = 0, start // S, start % S
        while done < num_keys:
            num_here = min(S - place, num_keys - done)
            keys = (
                all_keys
                + (np.int64(block_ids[block]) * S + place) * row_stride * _FLOAT_BYTES
                + head_offset
            )
            # The last four overlap those before them where they are no multiple of four, and where
            # there are fewer each is taken four times, into the same place.
            step, are_apart = (ROWS, 1) if num_here >= ROWS else (1, 0)
            for column in range(0, num_columns, LANES):
                for i in range(0, num_here, step):
                    key = min(i, num_here - step)
                    product(
                        keys + key * row_stride * _FLOAT_BYTES,
                        row_stride * are_apart,
                        1,
                        transposed_at + column * _FLOAT_BYTES,
                        width,
                        D,
                        LANES,
                        scores_at + ((done + key) * width + column) * _FLOAT_BYTES,
                        width * are_apart,
                        0,
                    )
            done, block, place = done + num_here, block + 1, 0
        if softcap != _ZERO:
            for key in range(num_keys):
                for m in range(num_columns):
                    scores[key, m] = softcap * np.tanh(scores[key, m] / softcap)
        # Columns are in the order of positions: those before a key's own are the first ones.
        for key in range(max(first_position - start + 1, 0), num_keys):
            scores[key, : (start + key - first_position) * G] = _NO_SCORE
        if window > 0:
            for key in range(num_keys):
                first_beyond = max(start + key + window - first_position, 0) * G
                scores[key, first_beyond:num_used] = _NO_SCORE
        _weigh(scores, num_keys, num_columns, largest, earlier, added, total)
        for m in range(num_columns):
            for d in range(result_width):
                result[m, d] *= earlier[m]
        done, block, place = 0, start // S, start % S
        while done < num_keys:
            num_here = min(S - place, num_keys - done)
            values = (
                all_values
                + (np.int64(block_ids[block]) * S + place) * row_stride * _FLOAT_BYTES
                + head_offset
            )
            for d in range(0, D, LANES):
                num_lanes = min(LANES, D - d)
                for column in range(0, num_columns, ROWS):
                    product(
                        scores_at + (done * width + column) * _FLOAT_BYTES,
                        1,
                        width,
                        values + d * _FLOAT_BYTES,
                        row_stride,
                        num_here,
                        num_lanes,
                        result_at + (column * result_width + d) * _FLOAT_BYTES,
                        result_width,
                        1,
                    )
            done, block, place = done + num_here, block + 1, 0
    zero = _ZERO
    for row in range(num_rows):
        for g in range(G):
            share = _ONE / total[row * G + g]
            own = output[first_row + row, (kv_head * G + g) * D :]
            for d in range(D):
                own[d] = result[row * G + g, d] * share
                zero += own[d] * _ZERO
    return zero == _ZERO


@njit(fastmath=EXACT_ENOUGH, nogil=True)
def _attend_pieces(
    worker: Any,
    num_workers: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    pieces: Any,
    G: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    output: Any,
    are_numbers: Any,
) -> None:
    """Every num_workers-th piece of work, in memory that all of these share."""
    most_rows = 0
    for index in range(worker, len(pieces), num_workers):
        most_rows = max(most_rows, pieces[index, 3])
    D, num_columns = key_cache.shape[3], -(-most_rows * G // LANES) * LANES
    transposed = np.empty((D, num_columns), np.float32)
    scores = np.empty((_TILE, num_columns), np.float32)
    result = np.empty((num_columns, -(-D // LANES) * LANES), np.float32)
    sums = np.empty((4, num_columns), np.float32)
    for index in range(worker, len(pieces), num_workers):
        request, kv_head, first_row, num_rows, first_position = pieces[index]
        are_numbers[index] = _attend(
            query,
            key_cache,
            value_cache,
            block_table[request],
            first_row,
            num_rows,
            first_position,
            kv_head,
            G,
            window,
            scale,
            softcap,
            output,
            transposed,
            scores,
            result,
            sums,
        )


@njit(fastmath=EXACT_ENOUGH, nogil=True, cache=True)
@of_these_sources
def attend_prompts_serial(
    num_workers: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    pieces: Any,
    G: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    output: Any,
    are_numbers: Any,
) -> None:
    """All pieces of work on the calling thread; arrays as in prompt_attention_cpu.

    pieces         [pieces, 5]    request, KV head, first row, number of rows, position of the first
    are_numbers    [pieces]       whether all that came out of a piece is
    """
    for worker in range(num_workers):
        _attend_pieces(
            worker,
            num_workers,
            query,
            key_cache,
            value_cache,
            block_table,
            pieces,
            G,
            window,
            scale,
            softcap,
            output,
            are_numbers,
        )


@njit(fastmath=EXACT_ENOUGH, nogil=True, parallel=True, cache=True)
@of_these_sources
def attend_prompts_parallel(
    num_workers: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_table: Any,
    pieces: Any,
    G: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    output: Any,
    are_numbers: Any,
) -> None:
    """The same on numba's threads, as many as numba.set_num_threads said."""
    for worker in prange(num_workers):
        _attend_pieces(
            # It has no sign by itself, and all would be compiled twice.
            np.int64(worker),
            num_workers,
            query,
            key_cache,
            value_cache,
            block_table,
            pieces,
            G,
            window,
            scale,
            softcap,
            output,
            are_numbers,
        )
