"""PictureEncoder: an EngineView as frames, in the form that docs/picture.md lays down.

A full frame has everything, a delta what changed since the frame before. The encoder
keeps the columns that its reader has, and learns from the view what to look at again, so
a delta costs what changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from lmscope.scope.pool_view import BlockView
from lmscope.scope.request_view import NO_SLOT, RequestView
from lmscope.scope.view import EngineView

__all__ = ["COLUMNS", "VERSION", "Frame", "PictureEncoder"]

VERSION = 1
COLUMNS = ("slot", "state", "ref", "fill")

_STATES = {"empty": 0, "in_use": 1, "kept": 2, "null": 3}
_HIT, _EVICTED, _WRITTEN = 0x10, 0x20, 0x40
_MAX_CELLS = 2048
_MAX_CELL_TEXT = 40
_MAX_PROMPT_TEXT = 120
_MAX_TEXT = 4000
_NUM_NEXT = 10
# Rows beyond these are not drawn anyway; all that run are always listed.
_MAX_WAITING_ROWS = 100
_MAX_FINISHED_ROWS = 100

Bytes = npt.NDArray[np.uint8]
Row = dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """One frame of the picture.

    header    everything but the columns, ready for JSON
    columns   of a full frame: slot, state, ref, fill, one u8 per block; of a delta: before
              them the block ids, u32 and ascending
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
        names = COLUMNS if self.is_full else ("i", *COLUMNS)
        columns = {name: column.tolist() for name, column in zip(names, self.columns, strict=True)}
        return {**self.header, "columns": columns}


class PictureEncoder:
    """Makes the frames of one stream from the view that folds it.

    epoch   tells this stream from an earlier one of the same reader
    """

    def __init__(self, view: EngineView, *, epoch: int = 0) -> None:
        self.view = view
        self.epoch = epoch
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
        # the rows that the reader has, without their text; which request each is, since an
        # id may come again; and how much of its text the reader has
        self._rows: dict[str, Row] = {}
        self._texts: dict[str, tuple[int, int]] = {}
        self._put(
            {block.block_id for block in view.blocks.not_empty()} | self._marked() | view.written
        )

    def full(self, phase: str) -> Frame:
        """Everything, whatever was sent before."""
        self._put(self._changes.blocks)
        listed, note = self._listed()
        sentences = self.view.sentences(listed)
        self._rows, self._texts = {}, {}
        rows = []
        for request_id in listed:
            record = self.view.requests[request_id]
            row = self._rows[request_id] = _row(record, sentences[request_id])
            rows.append({**row, "text": _tail(record.text, _MAX_TEXT)})
            self._texts[request_id] = (record.arrival_order, len(record.text))
        header = self._header("full", phase, rows, note)
        info = self.view.info
        header["info"] = {
            "model": info.model,
            "block_size": info.block_size,
            "num_blocks": info.num_blocks,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_model_len": info.max_model_len,
        }
        known = {block.block_id for block in self.view.blocks.not_empty()}
        header["cells"] = self._cells(sorted(known | self._marked()))
        self._changes.clear()
        return Frame(header, tuple(self._columns[name].copy() for name in COLUMNS))

    def delta(self, phase: str) -> Frame:
        """What changed since the last frame; a full one if that is much, or the first."""
        changed = self._changes.blocks
        if self._seq < 0 or 5 * len(changed) >= self.view.info.num_blocks:
            return self.full(phase)
        self._put(changed)
        listed, note = self._listed()
        gone = sorted(self._rows.keys() - set(listed))
        for request_id in gone:
            del self._rows[request_id], self._texts[request_id]
        # Among waiting ones a sentence may change without the request: somebody in front
        # of it is gone.
        looked_at = [
            i
            for i in listed
            if i in self._changes.requests
            or i not in self._rows
            or self._rows[i]["state"] in ("waiting", "preempted")
        ]
        sentences = self.view.sentences(looked_at)
        rows = [row for i in looked_at if (row := self._changed_row(i, sentences[i])) is not None]
        header = self._header("delta", phase, rows, note)
        header["gone"] = gone
        block_ids = np.array(sorted(changed), dtype="<u4")
        header["cells"] = self._cells(block_ids.tolist())
        self._changes.clear()
        columns = (self._columns[name][block_ids] for name in COLUMNS)
        return Frame(header, (block_ids, *columns))

    # -- blocks ----------------------------------------------------------------

    def _put(self, block_ids: Iterable[int]) -> None:
        """Bring the columns of these blocks up to date."""
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
            _clean(self.view.block_text(block.block_id)[:_MAX_CELL_TEXT]),
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

    def _changed_row(self, request_id: str, sentence: str) -> Row | None:
        """A row with what the reader lacks; None when it lacks nothing."""
        record = self.view.requests[request_id]
        row = _row(record, sentence)
        order, length = self._texts.get(request_id, (0, 0))
        added = record.text[length:]
        is_new = order != record.arrival_order
        before = self._rows.get(request_id)
        self._rows[request_id] = row
        self._texts[request_id] = (record.arrival_order, len(record.text))
        if is_new or before is None:
            return {**row, "text": _tail(record.text, _MAX_TEXT)}
        changed = {name: value for name, value in row.items() if value != before[name]}
        if len(added) > _MAX_TEXT:
            changed["text"] = _tail(record.text, _MAX_TEXT)
        elif added:
            changed["add"] = _clean(added)
        return {"id": request_id, **changed} if changed else None

    # -- the rest of the header ----------------------------------------------------

    def _header(self, kind: str, phase: str, rows: list[Row], note: str) -> dict[str, Any]:
        view = self.view
        if self._seq < 0:
            self._start_time = view.time
        self._seq += 1
        return {
            "v": VERSION,
            "k": kind,
            "seq": self._seq,
            "epoch": self.epoch,
            "step": view.step,
            "boundary": view.boundary,
            "time": round(view.time - self._start_time, 6),
            "phase": phase,
            "stat": self._stat(),
            "next": view.free_queue.first(_NUM_NEXT),
            "rows": rows,
            "note": note,
        }

    def _stat(self) -> dict[str, Any]:
        view = self.view
        step, totals = view.this_step, view.totals
        rate = view.tokens_per_s
        return {
            "used": view.num_used,
            "kept": view.num_kept,
            "empty": view.num_empty,
            "shared": view.num_shared,
            "hits": len(view.hits),
            "evicted": len(view.evicted),
            "running": view.num_running,
            "waiting": view.num_waiting,
            "finished": totals.finished,
            "scheduled": step.scheduled,
            "decode": step.decode,
            "prefill": step.prefill,
            "recompute": step.recomputed,
            "cached": step.cached,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "output_tokens": totals.output_tokens,
            "preemptions": totals.preemptions,
            "evictions": totals.evictions,
            "step_ms": None if step.duration_s is None else round(step.duration_s * 1000, 3),
            "tokens_per_s": None if rate is None else round(rate, 1),
        }


def _row(record: RequestView, sentence: str) -> Row:
    return {
        "id": record.request_id,
        "slot": record.slot,
        "state": record.status,
        "why": _clean(sentence),
        "prompt": record.num_prompt_tokens,
        "cached": max(0, record.num_cached_tokens),
        "computed": record.num_computed_tokens,
        "output": record.num_output_tokens,
        "lost": record.num_lost_tokens,
        "max": record.max_tokens,
        "blocks": len(record.block_ids),
        "shared": record.num_shared_blocks,
        "preemptions": record.num_preemptions,
        "arrived": record.arrival_step,
        "ended": record.finish_step,
        "prompt_text": _tail(record.prompt or "", _MAX_PROMPT_TEXT),
    }


def _tail(text: str, length: int) -> str:
    return _clean(text[-length:])


def _clean(text: str) -> str:
    """The same text, without halves of characters, which no message can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
