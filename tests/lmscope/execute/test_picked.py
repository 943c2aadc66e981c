"""What is picked out of a table, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from lmscope.execute.picked import pick


def test_rows_keep_the_order_of_their_columns_and_are_padded():
    table = np.array([[5, 6, 7, 8], [1, 2, 3, 4], [9, 9, 9, 9]], dtype=np.float32)
    is_picked = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=np.bool_)

    columns, values = pick(table, is_picked, padding=-1.0)

    assert columns[:, :3].tolist() == [[0, 3, 0], [1, 0, 0], [0, 0, 0]]
    assert values[:, :3].tolist() == [[5, 8, -1], [2, -1, -1], [-1, -1, -1]]
    assert (values[:, 3:] == -1).all()


@pytest.mark.parametrize(("num_picked", "width"), [(0, 64), (1, 64), (64, 64), (65, 128)])
def test_a_row_begins_at_whole_vectors(num_picked: int, width: int):
    is_picked = np.zeros((2, 200), dtype=np.bool_)
    is_picked[1, :num_picked] = True

    picked = pick(np.ones((2, 200), dtype=np.float32), is_picked, padding=0.0)

    assert picked.columns.shape == picked.values.shape == (2, width)
    assert picked.values.sum() == num_picked
