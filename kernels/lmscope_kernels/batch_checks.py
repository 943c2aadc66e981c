"""Finds block tables and slots that would make a kernel read or write beyond the pool.

Kernels follow them without looking: on a GPU, a wrong one is an illegal memory access or, worse,
somebody else's keys. These checks copy them to the host, which waits for the device, so they are
for debugging and for tests.

R requests, B blocks in the pool, S tokens per block.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_batch", "check_slots"]


def check_batch(
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    *,
    num_rows: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Raise ValueError, with the request, unless every key that a row attends to is in the pool.

    block_table        [R, max_blocks]
    seq_lens           [R]              0 for padding
    query_start_loc    [R + 1]          None means one row a request
    num_rows           rows of the query, those of padding included
    """
    max_blocks = block_table.shape[1]
    lengths = seq_lens.tolist()
    starts = list(range(len(lengths) + 1)) if query_start_loc is None else query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] > num_rows:
        raise ValueError(
            f"query_start_loc goes from {starts[0]} to {starts[-1]}, must begin at 0 and end by "
            f"the {num_rows} rows of the query; rebuild it from the lengths of the batch"
        )
    for request, (seq_len, row_ids) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        query_len = starts[request + 1] - starts[request]
        if query_len < 0:
            raise ValueError(
                f"request {request} of the batch has {query_len} rows; "
                f"query_start_loc must not fall"
            )
        if not 0 <= seq_len <= max_blocks * block_size:
            raise ValueError(
                f"request {request} of the batch has {seq_len} tokens, its block table has room "
                f"for {max_blocks * block_size}; widen the table or end the request"
            )
        if 0 < seq_len < query_len:
            raise ValueError(
                f"request {request} of the batch has {query_len} rows and {seq_len} tokens; "
                f"seq_lens must count the rows of this step too"
            )
        for index, block_id in enumerate(row_ids[: -(-seq_len // block_size)]):
            if not 0 <= block_id < num_blocks:
                raise ValueError(
                    f"request {request} of the batch has block {block_id} at place {index} of its "
                    f"table, the pool has blocks 0 to {num_blocks - 1}; allocate it there first"
                )


def check_slots(slot_mapping: Tensor, *, num_slots: int) -> None:
    """Raise ValueError, with the row, for a slot outside of the pool or one that two rows share.

    slot_mapping    [T]    -1 for padding
    num_slots       B * S
    """
    row_of: dict[int, int] = {}
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        if not 0 <= slot < num_slots:
            raise ValueError(
                f"row {row} of the batch goes to slot {slot}, the pool has slots 0 to "
                f"{num_slots - 1}; slots are block id times block size plus place"
            )
        if slot in row_of:
            raise ValueError(
                f"rows {row_of[slot]} and {row} of the batch go to the same slot {slot}; "
                f"two requests must not write to one block"
            )
        row_of[slot] = row
