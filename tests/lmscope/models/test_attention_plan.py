"""AttentionPlan: who is attended to together, and over which keys."""

from __future__ import annotations

import numpy as np
import torch

from lmscope.models.attention_keys import groups_of_like_length
from lmscope.models.attention_plan import AttentionPlan

CPU = torch.device("cpu")


def build(seq_lens, query_lens, window=None, with_bias=False):
    """A plan over blocks of 4 tokens; request r has the blocks 10 r + 1, 10 r + 2, ..."""
    num_reqs = len(seq_lens)
    return AttentionPlan.build(
        query_start_loc=np.cumsum([0, *query_lens]).astype(np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=10 * np.arange(num_reqs, dtype=np.int32)[:, None] + np.arange(1, 6, dtype="i4"),
        block_size=4,
        window=window,
        with_bias=with_bias,
        device=CPU,
    )


def no_run(request):
    return None


def visible(bias):
    """0 and 1 in place of -inf and 0."""
    return (bias == 0).int().tolist()


def test_groups_hold_every_request_once_in_order():
    num_keys = np.array([600, 20, 9, 580, 1, 25, 0, 130], dtype=np.int32)
    requests = np.array([0, 1, 3, 4, 5, 7])

    groups = groups_of_like_length(requests, num_keys, no_run)

    assert [group.tolist() for group in groups] == [[0, 3], [1, 4, 5, 7]]
    assert groups_of_like_length(requests[:0], num_keys, no_run) == []
    alike = groups_of_like_length(np.array([1, 4, 5]), num_keys, no_run)
    assert [group.tolist() for group in alike] == [[1, 4, 5]]


def test_requests_of_one_row_are_padded_to_the_longest():
    (group,) = build([6, 2], [1, 1]).one_row_each

    assert group.rows is None
    assert group.keys.slots.view(2, 6).tolist() == [[4, 5, 6, 7, 8, 9], [44, 45, 0, 0, 0, 0]]
    assert visible(group.bias[:, 0, 0]) == [[1] * 6, [1, 1, 0, 0, 0, 0]]


def test_long_requests_in_consecutive_blocks_go_alone_and_are_not_copied():
    num_keys = np.array([300, 300, 20, 300], dtype=np.int32)
    runs = {0: slice(4, 304), 2: slice(400, 420)}

    groups = groups_of_like_length(np.array([0, 1, 2, 3]), num_keys, runs.get)

    assert [group.tolist() for group in groups] == [[0], [1, 2, 3]]


def test_one_request_in_consecutive_blocks_is_a_view():
    (group,) = build([6], [1]).one_row_each

    assert group.keys.slots == slice(4, 10)
    assert group.bias is None
    cache = torch.arange(40.0).view(10, 4, 1, 1)
    key, _ = group.keys.of(cache, cache)
    assert key.data_ptr() == cache[1].data_ptr()


def test_scattered_blocks_are_gathered_into_the_same_memory_by_each_layer():
    plan = AttentionPlan.build(
        query_start_loc=np.array([0, 1], dtype=np.int32),
        seq_lens=np.array([6], dtype=np.int32),
        block_table=np.array([[3, 1]], dtype=np.int32),
        block_size=4,
        window=None,
        with_bias=False,
        device=CPU,
    )
    first_layer = torch.arange(16.0).view(4, 4, 1, 1)
    second_layer = first_layer + 100

    key, _ = plan.one_row_each[0].keys.of(first_layer, first_layer)
    assert key.flatten().tolist() == [12, 13, 14, 15, 4, 5]
    again, _ = plan.one_row_each[0].keys.of(second_layer, second_layer)

    assert again.flatten().tolist() == [112, 113, 114, 115, 104, 105]
    assert again.data_ptr() == key.data_ptr()


def test_a_window_in_consecutive_blocks_is_a_view_of_its_last_keys():
    (group,) = build([9], [1], window=3).one_row_each

    assert group.keys.slots == slice(10, 13)


def test_a_long_prompt_has_a_bias_so_that_tiles_of_rows_read_only_their_keys():
    (long,) = build([130], [130]).many_rows
    (longer,) = build([800], [800]).many_rows

    assert long.keys is None
    assert visible(long.bias) == np.tri(130, dtype=int).tolist()
    assert longer.bias is None  # torch passes over the keys by itself


def test_a_window_leaves_the_last_keys_of_a_request():
    (group,) = build([6, 2], [1, 1], window=3).one_row_each

    assert group.keys.slots.view(2, 3).tolist() == [[7, 8, 9], [44, 45, 0]]
    assert visible(group.bias[:, 0, 0]) == [[1, 1, 1], [1, 1, 0]]


def test_requests_longer_than_the_window_need_no_bias_and_no_grouping():
    (group,) = build([9, 19, 5], [1, 1, 1], window=2).one_row_each

    assert group.bias is None
    assert group.keys.slots.view(3, 2).tolist() == [[11, 12], [61, 62], [87, 88]]


def test_a_chunk_reads_what_its_first_row_attends_to():
    (segment,) = build([9], [3], window=4).many_rows

    # Rows at positions 6, 7 and 8; the first attends to 3, 4, 5 and itself.
    assert segment.keys.slots == slice(7, 13)
    assert visible(segment.bias) == [[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]


def test_a_whole_prompt_needs_no_slots_and_a_bias_only_beyond_the_window():
    (inside,) = build([3], [3], window=3).many_rows
    (beyond,) = build([3], [3], window=2).many_rows
    (written_out,) = build([3], [3], with_bias=True).many_rows

    assert inside.keys is beyond.keys is written_out.keys is None
    assert inside.bias is None
    assert visible(beyond.bias) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visible(written_out.bias) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
