"""DeviceInputs: the batch in buffers that stay where they are, on the host and on the device.

A step writes into pinned memory and copies from there without waiting. Two sets of host buffers
take turns, so a step may be written while the copies of the one before are still on their way.
The block table is too large to be copied in each step: what has changed in it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmscope.execute.input_batch import PreparedInputs

__all__ = [
    "Column",
    "DeviceBatch",
    "DeviceInputs",
    "Turns",
    "make_current",
    "new_event",
    "pinned",
]

_NUM_TURNS = 2


def pinned(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory from and to which `device` copies by itself; plain memory for a CPU."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def new_event(is_timed: bool = False) -> torch.cuda.Event:
    """A mark in the work of a device; between two that are timed, the device says how long."""
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]  # no types


def make_current(device: torch.device) -> None:
    """Have what this thread launches and records go to `device`: each thread has its own."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


class Turns:
    """Says which set of host buffers may be written now, and waits until it may.

    It only waits for a device that is two steps behind, and then for an event and not for all
    that the device has been given.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = [new_event() for _ in range(_NUM_TURNS)] if device.type == "cuda" else None
        self.current = 0

    def begin(self) -> None:
        """The other set's turn."""
        self.current = (self.current + 1) % _NUM_TURNS
        if self._events is not None:
            self._events[self.current].synchronize()

    def end(self) -> None:
        """All copies from the set have been given to the device."""
        if self._events is not None:
            self._events[self.current].record()


class Column:
    """One array of the batch: a device buffer, and host buffers to fill it from."""

    def __init__(
        self, capacity: int, dtype: torch.dtype, device: torch.device, turns: Turns
    ) -> None:
        self._turns = turns
        self._host = [pinned(capacity, dtype, device) for _ in range(_NUM_TURNS)]
        self.device = torch.zeros(capacity, dtype=dtype, device=device)

    def load(self, values: NDArray[Any] | Sequence[Any]) -> Tensor:
        """Copy `values` to the front of the device buffer; returns that part of it."""
        host = self._host[self._turns.current][: len(values)]
        host.numpy()[:] = values
        device = self.device[: len(values)]
        device.copy_(host, non_blocking=True)
        return device


class DeviceBatch(NamedTuple):
    """Parts of the device buffers that hold this step's batch, padding included.

    As in PreparedInputs; the block table has all of its columns.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


class DeviceInputs:
    """Buffers for at most so many tokens and requests; one owner, one step at a time."""

    def __init__(
        self, max_num_tokens: int, max_num_reqs: int, max_blocks: int, device: torch.device
    ) -> None:
        self.turns = Turns(device)

        def column(capacity: int, dtype: torch.dtype) -> Column:
            return Column(capacity, dtype, device, self.turns)

        self._token_ids = column(max_num_tokens, torch.int64)
        self._positions = column(max_num_tokens, torch.int64)
        self._slots = column(max_num_tokens, torch.int64)
        self._starts = column(max_num_reqs + 1, torch.int32)
        self._seq_lens = column(max_num_reqs, torch.int32)
        self._logit_rows = column(max_num_tokens + max_num_reqs, torch.int64)
        # Which input tokens are ones that only the device knows, and where it has them.
        self._places = column(max_num_reqs, torch.int64)
        self._sources = column(max_num_reqs, torch.int64)
        self.block_table = torch.zeros((max_num_reqs, max_blocks), dtype=torch.int32, device=device)
        most_changes = max_num_tokens + max_num_reqs
        self._changed_places = column(most_changes, torch.int64)
        self._changed_ids = column(most_changes, torch.int32)
        self._whole_table = column(max_num_reqs * max_blocks, torch.int32)
        self._most_changes = most_changes

    def load(
        self,
        inputs: PreparedInputs,
        table: NDArray[np.int32],
        changes: Sequence[tuple[int, int, int]],
        unknown: Sequence[tuple[int, int]] = (),
        last_tokens: Tensor | None = None,
    ) -> DeviceBatch:
        """Begin a turn and copy a batch; `end_turn` must follow when the step is launched.

        table          [max_num_reqs, max_blocks]   the block table of all rows
        changes        row, start and end of what is new in it
        unknown        token of the batch, and its place in last_tokens
        last_tokens    [rows]   what the step before sampled, on the device
        """
        self.turns.begin()
        self._load_table(table, changes)
        token_ids = self._token_ids.load(inputs.token_ids)
        if unknown:
            assert last_tokens is not None, "a token is unknown and no step has sampled it"
            places, sources = zip(*unknown, strict=True)
            token_ids.index_copy_(
                0,
                self._places.load(places),
                last_tokens.index_select(0, self._sources.load(sources)),
            )
        return DeviceBatch(
            token_ids=token_ids,
            positions=self._positions.load(inputs.positions),
            slot_mapping=self._slots.load(inputs.slot_mapping),
            query_start_loc=self._starts.load(inputs.query_start_loc),
            seq_lens=self._seq_lens.load(inputs.seq_lens),
            block_table=self.block_table[: len(inputs.seq_lens)],
        )

    def load_logit_rows(self, indices: NDArray[np.int32]) -> Tensor:
        """[len(indices)] int64 on the device, in the same turn."""
        return self._logit_rows.load(indices)

    def buffers(self, num_tokens: int, num_reqs: int, num_blocks: int) -> DeviceBatch:
        """The parts that a batch of this size is loaded into, whatever they hold."""
        return DeviceBatch(
            token_ids=self._token_ids.device[:num_tokens],
            positions=self._positions.device[:num_tokens],
            slot_mapping=self._slots.device[:num_tokens],
            query_start_loc=self._starts.device[: num_reqs + 1],
            seq_lens=self._seq_lens.device[:num_reqs],
            block_table=self.block_table[:num_reqs, :num_blocks],
        )

    def _load_table(
        self, table: NDArray[np.int32], changes: Sequence[tuple[int, int, int]]
    ) -> None:
        if not changes:
            return
        width = self.block_table.shape[1]
        if sum(end - start for _, start, end in changes) > self._most_changes:
            # Long prompts of which most was cached; once, when they come.
            self.block_table.copy_(self._whole_table.load(table.ravel()).view(-1, width))
            return
        places = np.concatenate(
            [np.arange(row * width + a, row * width + b) for row, a, b in changes]
        )
        ids = np.concatenate([table[row, a:b] for row, a, b in changes])
        self.block_table.view(-1).index_copy_(
            0, self._changed_places.load(places), self._changed_ids.load(ids)
        )
