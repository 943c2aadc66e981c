"""Some of the numbers of each row, picked out of a large table into a narrow one.

Of tens of thousands of logits a handful matters. What is sorted, summed up or given noise is that
handful, for all rows in one go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Picked", "pick"]

# Rows begin at whole vectors of any machine, so how a vectorised loop treats the end of a buffer
# cannot depend on the neighbours.
_WIDTH_STEP = 64


class Picked(NamedTuple):
    """What was picked, row by row in the order of the columns, padded at the end.

    columns    [R, W] int64; 0 in padding
    values     [R, W] float32
    """

    columns: NDArray[np.int64]
    values: NDArray[np.float32]


def pick(table: NDArray[np.float32], is_picked: NDArray[np.bool_], padding: float) -> Picked:
    """The numbers of `table`, [R, V], for which `is_picked`; `padding` behind the last of a row.

    One look at `is_picked` in C, and a few operations on what was found.
    """
    num_rows, num_columns = table.shape
    found = np.flatnonzero(is_picked)
    rows, columns = np.divmod(found, num_columns)
    counts = np.bincount(rows, minlength=num_rows)
    width = -(-max(int(counts.max(initial=0)), 1) // _WIDTH_STEP) * _WIDTH_STEP
    places = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    picked = Picked(
        np.zeros((num_rows, width), dtype=np.int64),
        np.full((num_rows, width), padding, dtype=np.float32),
    )
    picked.columns[rows, places] = columns
    picked.values[rows, places] = table[rows, columns]
    return picked
