"""InputBatch: rows against a plain model of them, over random schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lmscope import SamplingParams
from lmscope.execute.input_batch import CachedRequestState, InputBatch
from lmscope.execute.sampling_row import SamplingRow


def make_request(request_id, prompt, output=(), block_ids=(), num_computed_tokens=0):
    output_token_ids = list(output)
    row = SamplingRow(
        request_id=request_id,
        params=SamplingParams(),
        prompt_token_ids=tuple(prompt),
        output_token_ids=output_token_ids,
        seed=0,
    )
    return CachedRequestState(row, output_token_ids, list(block_ids), num_computed_tokens)


def make_batch(*requests, max_num_reqs=4, block_size=4):
    batch = InputBatch(max_num_reqs, max_model_len=32, block_size=block_size)
    for request in requests:
        batch.add_request(request)
    batch.condense()
    return batch


def test_prepares_positions_slots_and_inputs_of_a_flat_batch():
    batch = make_batch(
        make_request("a", range(10, 20), block_ids=[7, 2, 9], num_computed_tokens=6),
        make_request("b", [30, 31], [32], block_ids=[4], num_computed_tokens=2),
        make_request("c", range(40, 46), block_ids=[5, 8]),
    )

    inputs = batch.prepare({"b": 1, "a": 4, "c": 3})  # the order of rows counts, not this one

    assert inputs.num_tokens == 8
    assert inputs.token_ids.tolist() == [16, 17, 18, 19, 32, 40, 41, 42]
    assert inputs.positions.tolist() == [6, 7, 8, 9, 2, 0, 1, 2]
    assert inputs.slot_mapping.tolist() == [10, 11, 36, 37, 18, 20, 21, 22]
    assert inputs.query_start_loc.tolist() == [0, 4, 5, 8]
    assert inputs.seq_lens.tolist() == [10, 3, 3]
    assert inputs.block_table.tolist() == [[7, 2, 9], [4, 0, 0], [5, 8, 0]]
    assert inputs.is_sampled.tolist() == [True, True, False]


def test_pads_with_rows_that_belong_to_nobody():
    batch = make_batch(make_request("a", [1, 2, 3], block_ids=[6]))

    inputs = batch.prepare({"a": 3}, num_padded_tokens=5, num_padded_reqs=3)

    assert inputs.num_tokens == 3
    assert inputs.token_ids.tolist() == [1, 2, 3, 0, 0]
    assert inputs.positions.tolist() == [0, 1, 2, 0, 0]
    assert inputs.slot_mapping.tolist() == [24, 25, 26, -1, -1]
    assert inputs.query_start_loc.tolist() == [0, 3, 3, 3]
    assert inputs.seq_lens.tolist() == [3, 0, 0]
    assert inputs.block_table.tolist() == [[6], [0], [0]]
    assert inputs.is_sampled.tolist() == [True]


def test_padding_to_less_than_the_batch_changes_nothing():
    batch = make_batch(make_request("a", [1, 2, 3], block_ids=[6]))

    inputs = batch.prepare({"a": 3}, num_padded_tokens=2, num_padded_reqs=1)

    assert inputs.token_ids.tolist() == [1, 2, 3]
    assert inputs.query_start_loc.tolist() == [0, 3]


def test_what_was_prepared_does_not_change_with_the_batch():
    request = make_request("a", [1, 2, 3], block_ids=[6])
    batch = make_batch(request)
    inputs = batch.prepare({"a": 3})

    batch.append_tokens([0], [9])
    batch.num_computed_tokens[0] = 3
    batch.remove_request("a")

    assert inputs.block_table.tolist() == [[6]]
    assert inputs.token_ids.tolist() == [1, 2, 3]
    assert inputs.seq_lens.tolist() == [3]


def test_a_new_request_takes_the_lowest_freed_row():
    batch = make_batch(*(make_request(name, [1]) for name in "abcd"))
    for name in "dac":
        batch.remove_request(name)

    rows = [batch.add_request(make_request(name, [1])) for name in "xyz"]

    assert rows == [0, 2, 3]


def test_condensing_moves_the_last_row_into_the_lowest_hole():
    batch = make_batch(*(make_request(name, [1]) for name in "abcd"))
    batch.remove_request("c")
    batch.remove_request("a")
    batch.condense()

    assert batch.req_ids == ("d", "b")


def test_condensing_drops_holes_at_the_end():
    batch = make_batch(*(make_request(name, [1]) for name in "abcd"))
    for name in "bdc":
        batch.remove_request(name)
    batch.condense()

    assert batch.req_ids == ("a",)
    assert batch.add_request(make_request("e", [1])) == 1


def test_removing_a_request_without_a_row_is_fine():
    batch = make_batch(make_request("a", [1]))
    batch.remove_request("z")

    assert batch.req_ids == ("a",)


def test_more_requests_than_rows_is_a_bug():
    with pytest.raises(AssertionError, match="more than 1 requests"):
        make_batch(make_request("a", [1]), make_request("b", [1]), max_num_reqs=1)


def test_the_last_token_that_max_model_len_allows_needs_no_column():
    batch = InputBatch(1, max_model_len=4, block_size=4)
    request = make_request("a", [1, 2, 3, 4], block_ids=[1])
    batch.add_request(request)
    batch.append_tokens([0], [5])

    assert request.output_token_ids == [5]
    assert batch.num_tokens[0] == 5
    assert batch.token_ids.tolist() == [[1, 2, 3, 4]]


# What a step does to a plain list of requests; the batch must agree with that list.
OPERATIONS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 9), max_size=4),  # requests that leave
        st.lists(st.integers(1, 9), max_size=4),  # prompt lengths of those that come
        st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


@given(operations=OPERATIONS, block_size=st.sampled_from([1, 2, 16]))
def test_rows_say_what_a_plain_list_of_requests_says(operations, block_size):
    batch = InputBatch(8, max_model_len=64, block_size=block_size)
    live: dict[str, CachedRequestState] = {}
    next_id, next_block = 0, 1
    for leaving, prompt_lens, seed in operations:
        random = np.random.default_rng(seed)
        names = list(live)
        for index in leaving:
            if index < len(names):
                batch.remove_request(names[index])
                del live[names[index]]
        for prompt_len in prompt_lens[: 8 - len(live)]:
            request = make_request(
                str(next_id),
                random.integers(0, 1000, prompt_len).tolist(),
                random.integers(0, 1000, random.integers(0, 3)).tolist(),
            )
            next_id += 1
            live[request.req_id] = request
            batch.add_request(request)
        batch.condense()
        assert sorted(batch.req_ids) == sorted(live)
        assert batch.req_id_to_index == {name: row for row, name in enumerate(batch.req_ids)}
        if not live:
            continue
        scheduled = {}
        for name, request in live.items():
            row = batch.req_id_to_index[name]
            request.num_computed_tokens = int(random.integers(0, request.num_tokens))
            batch.num_computed_tokens[row] = request.num_computed_tokens
            scheduled[name] = int(
                random.integers(1, request.num_tokens - request.num_computed_tokens + 1)
            )
            end = request.num_computed_tokens + scheduled[name]
            missing = -(-end // block_size) - len(request.block_ids)
            added = list(range(next_block, next_block + max(0, missing)))
            next_block += len(added)
            request.block_ids += added
            batch.append_block_ids(row, added)

        check_prepared(batch.prepare(scheduled), batch, live, scheduled, block_size)
        for row, name in enumerate(batch.req_ids):
            if live[name].num_tokens < 60 and random.integers(0, 2):
                batch.append_tokens([row], [int(random.integers(0, 1000))])


def check_prepared(inputs, batch, live, scheduled, block_size):
    """Compare with the same numbers worked out request by request and token by token."""
    token_ids, positions, slots, starts = [], [], [], [0]
    for row, name in enumerate(batch.req_ids):
        request = live[name]
        tokens = [*request.sampling.prompt_token_ids, *request.output_token_ids]
        end = request.num_computed_tokens + scheduled[name]
        for position in range(request.num_computed_tokens, end):
            token_ids.append(tokens[position])
            positions.append(position)
            block_id = request.block_ids[position // block_size]
            slots.append(block_id * block_size + position % block_size)
        starts.append(len(positions))
        assert inputs.seq_lens[row] == end
        assert inputs.is_sampled[row] == (end == len(tokens))
        width = inputs.block_table.shape[1]
        padded = [*request.block_ids, *[0] * width][:width]
        assert inputs.block_table[row].tolist() == padded
    assert inputs.token_ids.tolist() == token_ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.query_start_loc.tolist() == starts
