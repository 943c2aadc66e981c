"""The batch in buffers that stay: what is in them is what was prepared, step after step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lmscope import SamplingParams
from lmscope.execute.device_inputs import DeviceInputs, Turns, make_current
from lmscope.execute.device_sampler import DeviceSampler
from lmscope.execute.input_batch import CachedRequestState, InputBatch
from lmscope.execute.sampling_row import SamplingRow

CPU = torch.device("cpu")


def request(request_id: str, prompt: list[int], block_ids: list[int]) -> CachedRequestState:
    outputs: list[int] = []
    return CachedRequestState(
        SamplingRow(request_id, SamplingParams(), tuple(prompt), outputs, 0, frozenset(), ()),
        outputs,
        block_ids,
        num_computed_tokens=0,
    )


@pytest.mark.parametrize("most_tokens", [64, 5])
def test_the_block_table_follows_by_its_changes(most_tokens):
    """With few tokens a step, a change may be too large for the buffers of changes."""
    rng = random.Random(3)
    batch = InputBatch(max_num_reqs=5, max_model_len=64, block_size=2)
    inputs = DeviceInputs(most_tokens, 5, batch.block_table.shape[1], CPU)
    number = 0
    num_whole = 0
    for _ in range(200):
        for request_id in list(batch.req_id_to_index):
            if rng.random() < 0.2:
                batch.remove_request(request_id)
        while batch.num_reqs < 5 and rng.random() < 0.7:
            number += 1
            batch.add_request(request(str(number), [1], rng.choices(range(1, 99), k=3)))
        batch.condense()
        for row in range(batch.num_reqs):
            if rng.random() < 0.5 and batch.num_blocks[row] < 31:
                batch.append_block_ids(row, [rng.randrange(1, 99)])
        if not batch.num_reqs:
            continue
        prepared = batch.prepare(dict.fromkeys(batch.req_ids, 1))
        changes = batch.take_table_changes()
        num_whole += sum(end - start for _, start, end in changes) > most_tokens + 5
        on_device = inputs.load(prepared, batch.block_table, changes)
        inputs.turns.end()
        for row in range(batch.num_reqs):
            used = int(batch.num_blocks[row])
            got = on_device.block_table[row, :used].tolist()
            assert got == batch.block_table[row, :used].tolist()
        np.testing.assert_array_equal(on_device.slot_mapping.numpy(), prepared.slot_mapping)
    assert (num_whole > 0) == (most_tokens == 5)


def test_tokens_that_only_the_device_knows_are_put_in_there():
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=2)
    batch.add_request(request("a", [7, 8], [1]))
    batch.add_request(request("b", [9, 10], [2]))
    prepared = batch.prepare({"a": 2, "b": 2})
    inputs = DeviceInputs(8, 2, 4, CPU)

    on_device = inputs.load(
        prepared, batch.block_table, [], [(1, 2), (3, 0)], torch.tensor([50, 51, 52])
    )

    assert on_device.token_ids.tolist() == [7, 52, 9, 50]


def test_a_token_that_lands_later_is_written_where_its_request_is_by_then():
    batch = InputBatch(max_num_reqs=3, max_model_len=8, block_size=2)
    first, second = request("a", [7], [1]), request("b", [8], [2])
    batch.add_request(first)
    batch.add_request(second)
    batch.append_tokens([1], [-1])
    batch.remove_request("a")
    batch.condense()  # b moves to the row of a
    batch.fill_token(second, 0, 33)
    batch.fill_token(first, 0, 44)  # has taken it back: it has no such output

    assert second.output_token_ids == [33]
    assert batch.token_ids[0, :2].tolist() == [8, 33]
    assert first.output_token_ids == []


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.0}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, True),
        ({"logprobs": 0}, False),
        ({"min_tokens": 2}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"presence_penalty": 0.5}, False),
        ({"allowed_token_ids": [1]}, False),
    ],
)
def test_rows_that_need_more_than_a_draw_are_not_taken(params, expected):
    plain = SamplingRow("a", SamplingParams(), (1,), [], 0, frozenset(), ())
    row = SamplingRow("b", SamplingParams(**params), (1,), [], 0, frozenset(), ())
    sampler = DeviceSampler(2, 16, CPU, Turns(CPU))

    assert sampler.takes([plain])
    assert sampler.takes([plain, row]) is expected
    assert sampler.takes([plain, row]) is expected  # as it was worked out before
    assert sampler.takes([plain])


def test_tokens_go_to_the_rows_that_have_room():
    batch = InputBatch(max_num_reqs=3, max_model_len=3, block_size=2)
    requests = [request("a", [7], [1]), request("b", [7, 8, 9], [2]), request("c", [5], [3])]
    for each in requests:
        batch.add_request(each)
    batch.append_tokens([0, 1], [-1, -1])

    assert [each.output_token_ids for each in requests] == [[-1], [-1], []]
    assert batch.num_tokens.tolist() == [2, 4, 1]
    # The last token that max_model_len allows is never an input.
    assert batch.token_ids.tolist() == [[7, -1, 0], [7, 8, 9], [5, 0, 0]]


def test_a_thread_goes_to_the_device_of_its_engine_and_stays_there(monkeypatch):
    current, went = [0], []

    def go(device: torch.device) -> None:
        went.append(device)
        current[0] = device.index

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", go)
    for _ in range(2):
        make_current(torch.device("cuda", 1))
    make_current(CPU)

    assert went == [torch.device("cuda", 1)]
