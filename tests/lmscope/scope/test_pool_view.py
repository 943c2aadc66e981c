"""The free queue that stores what happened instead of what it holds."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lmscope.scope.pool_view import FreeQueue


@given(
    start=st.permutations(range(1, 9)) | st.just(list(range(1, 9))),
    picks=st.lists(st.integers(0, 7), max_size=60),
)
def test_it_is_a_list_from_which_anything_can_be_taken(start, picks):
    queue, expected, taken = FreeQueue(start), list(start), []
    for pick in picks:
        if expected and (pick < 5 or not taken):
            block_id = expected.pop(pick % len(expected))
            queue.remove(block_id)
            taken.append(block_id)
        elif taken:
            block_id = taken.pop(pick % len(taken))
            queue.append(block_id)
            expected.append(block_id)
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert queue.first(3) == expected[:3]
        assert list(queue.copy()) == expected


def test_a_copy_is_its_own_queue():
    queue = FreeQueue(range(1, 5))
    other = queue.copy()
    queue.remove(2)
    queue.append(2)

    assert list(other) == [1, 2, 3, 4]
    assert list(queue) == [1, 3, 4, 2]


@pytest.mark.parametrize("ids", [range(5, 9), (5, 6, 7, 8)])
def test_ids_that_count_up_take_no_memory(ids):
    assert isinstance(FreeQueue(ids)._base, range)
