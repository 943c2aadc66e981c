"""The Triton kernel of unified_attention.py, which launches it.

One program takes a tile of query
rows of one request: some of its tokens, times the G heads that read one KV head, so each key and
value is read once for all of them. It goes through the keys in order of position, a tile at a
time, each tile from an offset that depends on the position alone. So what a row gets depends
neither on the batch nor on how the prompt was cut into chunks, as long as the tile is the same.

Which tokens a program takes it finds in query_start_loc: request r has the tiles from
`query_start_loc[r] // tokens + r`, which leaves room for a broken tile at the end of each
request. The grid depends on T and R only.

T tokens in the batch, R requests, H query heads, K KV heads, G = H / K, D head size, S tokens per
block.
"""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from lmscope_kernels.triton_support import dot, jit, tanh, tl

__all__ = ["paged_attention_kernel"]


@jit
def _find_request(query_start_loc_ptr, tile, num_requests, TOKENS: tl.constexpr):
    """The last request whose first tile is not after `tile`; num_requests for padding."""
    low = 0
    high = num_requests + 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def _attend(
    total,
    largest,
    acc,
    query,
    row_position,
    first,
    num_keys,
    block_table_row,
    key_head,
    value_head,
    scale,
    inner_scale,
    key_block_stride,
    key_place_stride,
    value_block_stride,
    value_place_stride,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the keys at positions `first` and on to the sums of a tile of rows.

    total      [BLOCK_M]             sum of exp2(score - largest)
    largest    [BLOCK_M]             greatest score so far, in base 2
    acc        [BLOCK_M, BLOCK_D]    sum of exp2(score - largest) * value
    Without IS_MASKED, each row attends to all BLOCK_N keys.
    """
    position = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if IS_MASKED:
        block_id = tl.load(block_table_row + position // S, mask=position < num_keys, other=0)
    else:
        block_id = tl.load(block_table_row + position // S)
    block_id = block_id.to(tl.int64)
    place = position % S
    keys = key_head + (block_id * key_block_stride + place * key_place_stride)[None, :]
    values = value_head + (block_id * value_block_stride + place * value_place_stride)[:, None]
    # Masked loads only where something is hidden, and a mask on the dims only where they are
    # padded: what the compiler can prove whole it copies asynchronously, 16 bytes at a time.
    if IS_MASKED and D < BLOCK_D:
        is_key = position < num_keys
        key = tl.load(keys + dims[:, None], mask=is_key[None, :] & (dims < D)[:, None], other=0.0)
        value = tl.load(
            values + dims[None, :], mask=is_key[:, None] & (dims < D)[None, :], other=0.0
        )
    elif IS_MASKED:
        is_key = position < num_keys
        key = tl.load(keys + dims[:, None], mask=is_key[None, :], other=0.0)
        value = tl.load(values + dims[None, :], mask=is_key[:, None], other=0.0)
    elif D < BLOCK_D:
        key = tl.load(keys + dims[:, None], mask=(dims < D)[:, None], other=0.0)
        value = tl.load(values + dims[None, :], mask=(dims < D)[None, :], other=0.0)
    else:
        key = tl.load(keys + dims[:, None])
        value = tl.load(values + dims[None, :])

    score = dot(query, key)
    if HAS_SOFTCAP:
        score = tanh(score * inner_scale)
    if IS_MASKED:
        is_seen = position[None, :] <= row_position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (position[None, :] > row_position[:, None] - WINDOW)
        score = tl.where(is_seen, score, float("-inf"))

    new_largest = tl.maximum(largest, tl.max(score, axis=1) * scale)
    base = new_largest
    if IS_MASKED:
        # A row that has seen no key yet: -inf less -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    # One instruction, with the mask before it and not between its two halves: a tile gives a row
    # the same bits whether other rows of the tile need the mask or not.
    weight = tl.exp2(tl.fma(score, scale, -base[:, None]))
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None] + dot(weight.to(value.dtype), value)
    return total, new_largest, acc


@jit(do_not_specialize=["num_requests", "num_rows", "block_table_stride"])
def paged_attention_kernel(
    out_ptr,
    lse_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    num_requests,
    num_rows,
    scale,
    inner_scale,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_table_stride,
    key_block_stride,
    key_place_stride,
    key_head_stride,
    value_block_stride,
    value_place_stride,
    value_head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):
    """One program for TOKENS tokens of one request, and the G heads of one KV head.

    A score in base 2 is `scale * product`, with a soft cap `scale * tanh(inner_scale * product)`.
    With ONE_LOOP all keys go through the instructions that have the mask. Else those that every
    row of the tile sees go through others, which are meant to give the same bits; which keys
    these are depends on what else is in the tile.
    """
    # The last rows of a long prompt have the most keys: they begin first, so that none of them
    # is left over at the end with the device idle around it.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _find_request(query_start_loc_ptr, tile, num_requests, TOKENS)
    start = tl.load(query_start_loc_ptr + request)
    # Rows past the last request are one more of it, without keys: all rows are written.
    is_request = request < num_requests
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=num_rows)
    first_token = (tile - (start // TOKENS + request)) * TOKENS
    if first_token >= end - start:
        return
    seq_len = tl.load(seq_lens_ptr + request, mask=is_request, other=0)
    num_earlier = seq_len - (end - start)

    row = tl.arange(0, BLOCK_M)
    token = first_token + row // G
    head = kv_head * G + row % G
    is_row = (row < TOKENS * G) & (token < end - start)
    dims = tl.arange(0, BLOCK_D)
    token_row = (start + token).to(tl.int64)
    is_inside = is_row[:, None]
    if D < BLOCK_D:
        is_inside = is_inside & (dims < D)[None, :]
    query = tl.load(
        query_ptr
        + (token_row * query_token_stride + head * query_head_stride)[:, None]
        + dims[None, :],
        mask=is_inside,
        other=0.0,
    )
    position = num_earlier + token

    # Keys up to the last row of the tile. Of these, all rows see those up to the first row, less
    # what a window has left behind: only the others need a mask.
    num_keys = tl.minimum(num_earlier + first_token + TOKENS, seq_len)
    num_whole = tl.maximum(num_earlier + first_token + 1, 0) // BLOCK_N
    first_tile = 0
    first_whole = 0
    if WINDOW > 0:
        first_tile = tl.maximum(num_earlier + first_token - WINDOW + 1, 0) // BLOCK_N
        left_behind = tl.maximum(num_earlier + first_token + TOKENS - WINDOW, 0)
        first_whole = tl.minimum(tl.cdiv(left_behind, BLOCK_N), tl.cdiv(num_keys, BLOCK_N))
        num_whole = tl.maximum(num_whole, first_whole)

    block_table_row = block_table_ptr + request.to(tl.int64) * block_table_stride
    key_head = key_cache_ptr + kv_head * key_head_stride
    value_head = value_cache_ptr + kv_head * value_head_stride
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(0, 3):
        # Behind the window's edge, whole, and across the diagonal.
        if ONE_LOOP:
            from_tile, to_tile = first_tile, tl.cdiv(num_keys, BLOCK_N)
        elif part == 0:
            from_tile, to_tile = first_tile, first_whole
        elif part == 1:
            from_tile, to_tile = first_whole, num_whole
        else:
            from_tile, to_tile = num_whole, tl.cdiv(num_keys, BLOCK_N)
        if part == 2 or (not ONE_LOOP and (part == 1 or WINDOW > 0)):
            for index in range(from_tile, to_tile):
                total, largest, acc = _attend(
                    total,
                    largest,
                    acc,
                    query,
                    position,
                    index * BLOCK_N,
                    num_keys,
                    block_table_row,
                    key_head,
                    value_head,
                    scale,
                    inner_scale,
                    key_block_stride,
                    key_place_stride,
                    value_block_stride,
                    value_place_stride,
                    D,
                    S,
                    BLOCK_D,
                    BLOCK_N,
                    WINDOW,
                    HAS_SOFTCAP,
                    IS_MASKED=part != 1,
                )

    has_keys = total > 0.0
    total = tl.where(has_keys, total, 1.0)
    tl.store(
        out_ptr + (token_row * out_token_stride + head * out_head_stride)[:, None] + dims[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_inside,
    )
    if HAS_LSE:
        tl.store(lse_ptr + token_row * H + head, largest + tl.log2(total), mask=is_row)
