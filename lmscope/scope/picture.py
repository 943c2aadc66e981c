"""PictureEncoder: an EngineView as frames, in the form that docs/picture.md lays down.

A full frame has everything, a delta what changed since the frame before. The encoder
keeps the columns that its reader has, and learns from the view what to look at again, so
a delta costs what changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from lmscope.boundary import Boundary
from lmscope.scope.engine_words import engine_words
from lmscope.scope.picture_bins import BIN_COLUMNS, Bins
from lmscope.scope.picture_rows import Row, Rows, clean
from lmscope.scope.picture_tree import SentTree
from lmscope.scope.pool_view import BlockView
from lmscope.scope.request_view import NO_SLOT
from lmscope.scope.run_log import StepRecord, record_step, step_stat
from lmscope.scope.struct_tree import boundary_index, standing, struct_tree
from lmscope.scope.view import EngineView

__all__ = ["COLUMNS", "VERSION", "Frame", "PictureEncoder"]

VERSION = 1
COLUMNS = ("slot", "state", "ref", "fill")

_STATES = {"empty": 0, "in_use": 1, "kept": 2, "null": 3}
_HIT, _EVICTED, _WRITTEN = 0x10, 0x20, 0x40
_MAX_CELLS = 2048
# Of a window in a pool told in bins: with more blocks, cells are too small for words.
_MAX_WINDOW_CELLS = 256
# A larger pool is told in bins.
_MAX_SINGLE = 150_000
_MAX_CELL_TEXT = 40
_NUM_NEXT = 10
# So many levels are 32 KB; the rest get next to nothing.
_MAX_MASS = 4096
# Rows beyond these are not drawn anyway; all that run are always listed.
_MAX_WAITING_ROWS = 100
_MAX_FINISHED_ROWS = 100

_NO_BINS = np.zeros(0, "<u4")

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Frame:
    """One frame of the picture.

    header    everything but the columns, ready for JSON
    columns   of a full frame: slot, state, ref, fill, one u8 per block; of a delta: before
              them the block ids, u32 and ascending. With `bin` in the header they are
              those of bins, see BIN_COLUMNS
    """

    header: dict[str, Any]
    columns: tuple[npt.NDArray[Any], ...]

    @property
    def is_full(self) -> bool:
        return bool(self.header["k"] == "full")

    def to_message(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Header and little-endian buffers, for a widget's message."""
        return self.header, [column.data.cast("B") for column in self.columns]

    def to_page(self) -> dict[str, Any]:
        """One object with the columns as lists, for a page."""
        own = BIN_COLUMNS if "bin" in self.header else COLUMNS
        names = own if self.is_full else ("i", *own)
        columns = {name: column.tolist() for name, column in zip(names, self.columns, strict=True)}
        return {**self.header, "columns": columns}


class PictureEncoder:
    """Makes the frames of one stream from the view that folds it.

    epoch     tells this stream from an earlier one of the same reader
    has_log   whether the steps between two frames are told, too
    in_bins   whether a pool of more than 150,000 blocks is told in bins
    """

    def __init__(
        self,
        view: EngineView,
        *,
        epoch: int = 0,
        has_log: bool = True,
        in_bins: bool = False,
    ) -> None:
        self.view = view
        self.epoch = epoch
        self._has_log = has_log
        self._changes = view.track()
        self._seq = -1
        self._start_time = 0.0
        num_blocks = view.info.num_blocks
        self._columns: dict[str, Bytes] = {
            name: np.zeros(num_blocks, dtype=np.uint8) for name in COLUMNS
        }
        self._columns["slot"][:] = NO_SLOT
        self._columns["state"][:1] = _STATES["null"]
        self._has_cells = num_blocks <= _MAX_CELLS
        is_large = in_bins and num_blocks > _MAX_SINGLE
        self._bins = Bins(self._columns) if is_large else None
        # first block and number of those that the reader of bins wants to see singly
        self.window: tuple[int, int] | None = None
        self._window_sent: dict[str, Any] | None = None
        self._rows = Rows()
        self._tree = SentTree(view)
        # the struct that the reader has, and the step as the last frame showed it
        self._struct_sent: Boundary | None = None
        self._step_sent = -1
        self._record_sent: StepRecord | None = None
        self._put(
            {block.block_id for block in view.blocks.not_empty()} | self._marked() | view.written
        )

    def full(self, phase: str) -> Frame:
        """Everything, whatever was sent before."""
        self._put(self._changes.blocks)
        listed, note = self._listed()
        sentences = self.view.sentences(listed)
        self._rows.clear()
        rows = [self._rows.whole(self.view.requests[i], sentences[i]) for i in listed]
        log = self._log(everything=True)
        header = self._header("full", phase, rows, note)
        if log:
            header["log"] = log
        header["struct"] = self._struct()
        header["tree"] = self._tree.whole()
        info = self.view.info
        header["info"] = {
            "model": info.model,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_model_len": info.max_model_len,
            "engine": engine_words(info),
        }
        known = {block.block_id for block in self.view.blocks.not_empty()}
        header["cells"] = self._cells(sorted(known | self._marked()))
        self._window_sent = None
        self._add_window(header)
        self._changes.clear()
        if self._bins is not None:
            return Frame(header, self._bins.columns())
        return Frame(header, tuple(self._columns[name].copy() for name in COLUMNS))

    def delta(self, phase: str) -> Frame:
        """What changed since the last frame; a full one if that is much, or the first."""
        changed = self._changes.blocks
        is_much = self._bins is None and 5 * len(changed) >= self.view.info.num_blocks
        if self._seq < 0 or is_much:
            return self.full(phase)
        bins = self._put(changed)
        listed, note = self._listed()
        gone = sorted(self._rows.ids - set(listed))
        for request_id in gone:
            self._rows.forget(request_id)
        # Among waiting ones a sentence may change without the request: somebody in front
        # of it is gone.
        looked_at = [
            i
            for i in listed
            if i in self._changes.requests
            or i not in self._rows
            or self._rows.state(i) in ("waiting", "preempted")
        ]
        sentences = self.view.sentences(looked_at)
        requests, step = self.view.requests, self.view.step
        made = (self._rows.changed(requests[i], sentences[i], step) for i in looked_at)
        log = self._log(everything=False)
        header = self._header("delta", phase, [row for row in made if row is not None], note)
        header["gone"] = gone
        if log:
            header["log"] = log
        if self.view.at is not self._struct_sent:
            header["struct"] = self._struct()
        tree = self._tree.changed()
        if tree is not None:
            header["tree"] = tree
        block_ids = np.array(sorted(changed), dtype="<u4")
        header["cells"] = self._cells(block_ids.tolist())
        self._add_window(header)
        self._changes.clear()
        if self._bins is not None:
            return Frame(header, (bins, *self._bins.columns(bins)))
        columns = (self._columns[name][block_ids] for name in COLUMNS)
        return Frame(header, (block_ids, *columns))

    # -- blocks ----------------------------------------------------------------

    def _put(self, block_ids: Iterable[int]) -> npt.NDArray[Any]:
        """Bring the columns of these blocks up to date, and the tree; returns their bins."""
        block_ids = list(block_ids)
        self._tree.update(block_ids)
        view = self.view
        hits = {hit.block_id for hit in view.hits}
        evicted = {eviction.block_id for eviction in view.evicted}
        slot, state, ref, fill = (self._columns[name] for name in COLUMNS)
        blocks, written = view.blocks, view.written
        for block_id in block_ids:
            block = blocks[block_id]
            slot[block_id] = view.block_slot(block)
            ref[block_id] = min(255, block.ref_cnt)
            fill[block_id] = min(255, block.num_filled)
            state[block_id] = (
                _STATES[block.state]
                | (_HIT if block_id in hits else 0)
                | (_EVICTED if block_id in evicted else 0)
                | (_WRITTEN if block_id in written else 0)
            )
        return _NO_BINS if self._bins is None else self._bins.update(block_ids)

    def _add_window(self, header: dict[str, Any]) -> None:
        """The blocks that the reader of bins wants to see singly, where they have changed."""
        if self._bins is None or self.window is None:
            return
        first, count = self.window
        last = min(first + count, self.view.info.num_blocks)
        columns = [self._columns[name][first:last].tolist() for name in COLUMNS]
        # A block that nothing ever happened to is what a reader takes for granted.
        blocks = [
            [first + place, *values]
            for place, values in enumerate(zip(*columns, strict=True))
            if values[1]
        ]
        known = [block_id for block_id, *_ in blocks if block_id]
        evicted = {eviction.block_id: eviction.stored_by for eviction in self.view.evicted}
        has_cells = count <= _MAX_WINDOW_CELLS
        cells = [self._cell(self.view.blocks[i], evicted.get(i)) for i in known if has_cells]
        window = {"first": first, "count": last - first, "blocks": blocks, "cells": cells}
        if self.view.attention:
            window["mass"] = self._window_mass(first, last)
        if window != self._window_sent:
            header["window"] = self._window_sent = window

    def _marked(self) -> set[int]:
        """Blocks that something happened to in this step, empty now or not."""
        view = self.view
        return {hit.block_id for hit in view.hits} | {gone.block_id for gone in view.evicted}

    def _cells(self, block_ids: Iterable[int]) -> list[list[Any]]:
        if not self._has_cells:
            return []
        blocks = self.view.blocks
        evicted = {eviction.block_id: eviction.stored_by for eviction in self.view.evicted}
        return [self._cell(blocks[i], evicted.get(i)) for i in block_ids]

    def _cell(self, block: BlockView, was: str | None) -> list[Any]:
        return [
            block.block_id,
            list(block.owners),
            clean(self.view.block_text(block.block_id)[:_MAX_CELL_TEXT]),
            block.stored_by,
            was,
            None if block.block_hash is None else f"{block.block_hash:016x}",
        ]

    # -- requests ----------------------------------------------------------------

    def _listed(self) -> tuple[list[str], str]:
        """Ids of the requests that get a row, in a steady order, and a note on the rest."""
        view = self.view
        waiting = list(islice(view.queue(), _MAX_WAITING_ROWS))
        finished = list(islice(view.newest_finished(), _MAX_FINISHED_ROWS))
        listed = sorted(
            (*finished, *view.running, *waiting), key=lambda i: view.requests[i].arrival_order
        )
        rest = []
        if view.num_waiting > len(waiting):
            rest.append(f"{view.num_waiting - len(waiting):,} more wait")
        if view.totals.finished > len(finished):
            rest.append(f"{view.totals.finished - len(finished):,} more are finished")
        note = f"{len(listed):,} requests are listed; {', '.join(rest)}" if rest else ""
        return listed, note

    # -- the rest of the header ----------------------------------------------------

    def _header(self, kind: str, phase: str, rows: list[Row], note: str) -> dict[str, Any]:
        view = self.view
        if self._seq < 0:
            self._start_time = view.time
        self._seq += 1
        self._step_sent = view.step
        self._record_sent = record_step(view)
        header = {
            "v": VERSION,
            "k": kind,
            "seq": self._seq,
            "epoch": self.epoch,
            "step": view.step,
            "boundary": view.boundary,
            "at": boundary_index(view),
            "where": clean(standing(view)),
            "time": round(view.time - self._start_time, 6),
            "phase": phase,
            "stat": step_stat(view),
            "next": view.free_queue.first(_NUM_NEXT),
            "rows": rows,
            "note": note,
        }
        if self._bins is not None:
            header["bin"] = self._bins.size
        if view.attention:
            header["mass"] = self._mass()
        if view.preempted:
            header["preempted"] = list(view.preempted)
        if view.log.misses:
            header["misses"] = dict(view.log.misses)
        return header

    def _window_mass(self, first: int, last: int) -> list[int]:
        """Levels of single blocks where `mass` has those of bins."""
        shares = self.view.attention
        top = max(shares.values())
        levels = ((i, round(255 * shares.get(i, 0.0) / top)) for i in range(first, last))
        return [each for pair in levels if pair[1] for each in pair]

    def _mass(self) -> dict[str, Any]:
        """The blocks, or bins, that get most attention, as parts of the largest share."""
        shares = self.view.attention
        size = 1 if self._bins is None else self._bins.size
        largest: dict[int, float] = {}
        for block_id, share in shares.items():
            place = block_id // size
            largest[place] = max(share, largest.get(place, 0.0))
        top = max(largest.values())
        listed = heapq.nlargest(_MAX_MASS, largest.items(), key=itemgetter(1))
        levels = [[place, round(255 * share / top)] for place, share in sorted(listed)]
        return {
            "top": round(top, 6),
            "of": [each for pair in levels if pair[1] for each in pair],
        }

    def _struct(self) -> dict[str, Any] | None:
        self._struct_sent = self.view.at
        return struct_tree(self.view)

    def _log(self, everything: bool) -> list[list[Any]]:
        """The steps that ended since the last frame, or all that the view remembers.

        The step that the last frame showed is among them when it ended otherwise.
        """
        if not self._has_log:
            return []
        log = self.view.log
        records = log.records if everything else list(log.since(self._step_sent))
        if not everything and records and records[0] == self._record_sent:
            records = records[1:]
        return [
            [
                record.first_step,
                record.step,
                round(record.time - self._start_time, 6),
                *record.counts,
                list(record.preempted),
            ]
            for record in records
        ]
