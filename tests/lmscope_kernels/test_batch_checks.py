"""What LMSCOPE_CHECK finds in a batch before a kernel follows it out of the pool."""

from __future__ import annotations

import pytest
import torch
from lmscope_kernels.batch_checks import check_batch, check_slots


def check(block_table, seq_lens, query_start_loc):
    check_batch(
        torch.tensor(block_table),
        torch.tensor(seq_lens),
        None if query_start_loc is None else torch.tensor(query_start_loc),
        num_rows=4,
        num_blocks=8,
        block_size=2,
    )


def test_a_right_batch_passes_with_padding_and_unused_places_of_the_table():
    check([[1, 7], [3, 99], [-5, 0]], [4, 2, 0], [0, 2, 3, 4])
    check([[1, 7], [3, 99]], [3, 1], None)


@pytest.mark.parametrize(
    ("block_table", "seq_lens", "query_start_loc", "message"),
    [
        ([[1], [8]], [2, 1], [0, 1, 2], r"request 1 .* has block 8 at place 0 .* blocks 0 to 7"),
        ([[1], [-1]], [2, 1], None, r"request 1 .* has block -1"),
        ([[1], [2]], [3, 1], [0, 1, 2], r"request 0 .* has 3 tokens, .* room for 2"),
        ([[1], [2]], [-1, 1], [0, 1, 2], r"request 0 .* has -1 tokens"),
        ([[1], [2]], [1, 1], [0, 2, 3], r"request 0 .* has 2 rows and 1 tokens"),
        ([[1], [2]], [2, 1], [0, 2, 1], r"request 1 .* has -1 rows"),
        ([[1], [2]], [1, 1], [1, 2, 3], r"goes from 1 to 3"),
        ([[1], [2]], [1, 1], [0, 1, 5], r"goes from 0 to 5, .* the 4 rows"),
    ],
)
def test_a_wrong_batch_is_refused_with_its_request(block_table, seq_lens, query_start_loc, message):
    with pytest.raises(ValueError, match=message):
        check(block_table, seq_lens, query_start_loc)


def test_slots_outside_of_the_pool_and_slots_used_twice_are_refused():
    check_slots(torch.tensor([3, -1, 0, -1]), num_slots=4)
    with pytest.raises(ValueError, match=r"row 1 .* slot 4, the pool has slots 0 to 3"):
        check_slots(torch.tensor([3, 4]), num_slots=4)
    with pytest.raises(ValueError, match=r"row 0 .* slot -2"):
        check_slots(torch.tensor([-2]), num_slots=4)
    with pytest.raises(ValueError, match=r"rows 0 and 2 .* the same slot 3"):
        check_slots(torch.tensor([3, -1, 3]), num_slots=4)
