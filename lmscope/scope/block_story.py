"""BlockStory: everything that happened to one block, and how long its content has to live.

`recording.block(7, step=22)` tells who took, filled, hit, freed and lost the block and when,
what state it is in after that step, and how many allocations away its eviction is. The answer
is data; printed it is two or three sentences, in a notebook a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from lmscope.boundary import (
    AllBlocksCleared,
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    BlockTouched,
)
from lmscope.errors import RecordingError
from lmscope.scope.history import History
from lmscope.scope.plain_table import plain_table
from lmscope.scope.pool_view import FreeQueue
from lmscope.scope.view import EngineView
from lmscope.scope.visible import quoted

__all__ = ["BlockMoment", "BlockStory", "block_story"]

_MOST_TEXT = 60


class BlockMoment(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, repr_omit_defaults=True
):
    """One thing that happened to a block.

    time_s       seconds since the recording began
    event        "allocated", "touched" (a hit), "stored" (can be found from now on), "freed",
                 "evicted" (for `request_id`), "dropped" (nobody needed it) or "cleared" (the
                 prefix cache was reset)
    request_id   who took, hit, filled or freed it, or for whom its content had to go
    block_hash   of the content that was stored, hit or lost
    stored_by, stored_step   who had filled it, and when; touched, evicted, dropped, cleared
    """

    step: int
    time_s: float
    event: str
    request_id: str | None = None
    block_hash: int | None = None
    stored_by: str | None = None
    stored_step: int = 0


class BlockStory(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The answer to: what happened to this block, and what comes next?

    step          the moment of all that follows up to `history`
    state         "null", "in_use", "kept" (free, with content that can be hit) or "empty"
    owners        the requests that hold it, oldest holder first
    block_hash, stored_by, stored_step, token_ids, text   of content that can be hit
    queue_place   in the free queue, 1 is handed out next; None when it is not in it
    num_free      blocks in the free queue
    allocations_to_eviction   the allocation, counted from now, that takes its content if it is
                  not hit before; None when it is in use or empty
    since_step    the first step of the recording, when it began late; else 0
    history       all that was recorded, what came after `step` included
    """

    block_id: int
    step: int
    state: str
    owners: tuple[str, ...] = ()
    block_hash: int | None = None
    stored_by: str | None = None
    stored_step: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    queue_place: int | None = None
    num_free: int = 0
    allocations_to_eviction: int | None = None
    since_step: int = 0
    history: tuple[BlockMoment, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in two or three sentences."""
        told = (f"Block {self.block_id}, step {self.step}: {self._state()}.", self._queue())
        return tuple(sentence for sentence in (*told, self._past()) if sentence)

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def _repr_html_(self) -> str:
        columns = ("step", "time, s", "event", "request", "content", "stored by", "in step")
        rows = [
            (
                moment.step,
                f"{moment.time_s:.3f}",
                moment.event,
                moment.request_id,
                None if moment.block_hash is None else f"{moment.block_hash:016x}",
                moment.stored_by,
                moment.stored_step if moment.stored_by is not None else None,
            )
            for moment in self.history
        ]
        return plain_table(self.sentences, columns, rows)

    def _state(self) -> str:
        if self.state == "null":
            return "the null block, which is never handed out"
        if self.state == "empty":
            return "free and empty"
        holders = ", ".join(self.owners)
        state = f"in use by {holders}" if self.owners else "free, content kept"
        if self.block_hash is None:
            return state
        short = self.text if len(self.text) <= _MOST_TEXT else self.text[:_MOST_TEXT] + "…"
        text = f" {quoted(short)}" if self.text else ""
        return f"{state}; {self.stored_by} filled it in step {self.stored_step}{text}"

    def _queue(self) -> str:
        if self.queue_place is None:
            return ""
        place = f"Place {self.queue_place} of {self.num_free} in the free queue"
        away = self.allocations_to_eviction
        if away is None:
            return f"{place}."
        which = "the next allocation" if away == 1 else f"allocation {away} from now"
        return f"{place}: {which} evicts it, unless it is hit before."

    def _past(self) -> str:
        if self.state == "null":
            return ""
        since = f"Since step {self.since_step}" if self.since_step else "So far"
        past = [moment for moment in self.history if moment.step <= self.step]
        if not past:
            return f"{since}: nothing happened to it."
        counts = Counter(moment.event for moment in past)
        told = ", ".join(f"{_word(event)} {_times(count)}" for event, count in counts.items())
        last = past[-1]
        by = "for" if last.event == "evicted" else "by"
        who = "" if last.request_id is None else f" {by} {last.request_id}"
        return f"{since}: {told}; last {_word(last.event)}{who} in step {last.step}."


def block_story(history: History, view: EngineView, block_id: int, start_time: float) -> BlockStory:
    """The story of a block, told after the last struct of a view.

    start_time   of the recording, in seconds on the engine's clock

    RecordingError for a block that the pool does not have.
    """
    if isinstance(block_id, bool) or not isinstance(block_id, int):
        raise TypeError(f"block id is {block_id!r}; it takes an integer")
    if not 0 <= block_id < len(view.blocks):
        raise RecordingError(
            f"block id is {block_id}; the pool has the blocks 0 to {len(view.blocks) - 1}"
        )
    block = view.blocks[block_id]
    place = _place(view.free_queue, block_id) if block.state in ("kept", "empty") else None
    return BlockStory(
        block_id=block_id,
        step=view.step,
        state=block.state,
        owners=block.owners,
        block_hash=block.block_hash,
        stored_by=block.stored_by,
        stored_step=block.stored_step,
        token_ids=block.token_ids,
        text=view.block_text(block_id),
        queue_place=place,
        num_free=len(view.free_queue),
        allocations_to_eviction=place if block.state == "kept" else None,
        since_step=history.since_step,
        history=tuple(_moments(history, block_id, start_time)),
    )


def _place(free_queue: FreeQueue, block_id: int) -> int | None:
    return next((place for place, i in enumerate(free_queue, start=1) if i == block_id), None)


def _moments(history: History, block_id: int, start_time: float) -> Iterator[BlockMoment]:
    """Its events, each with the content that it is about."""
    content: tuple[int, str | None, int] | None = None
    for block in history.snapshot.blocks:
        if block.block_id == block_id and block.block_hash is not None:
            content = block.block_hash, block.stored_by, block.stored_step
    for step, time, event in history.events_of(block_id):
        time_s = time - start_time
        if isinstance(event, BlockStored):
            content = event.block_hash, event.request_id, step
            yield BlockMoment(step, time_s, "stored", event.request_id, event.block_hash)
        elif isinstance(event, BlockTouched):
            yield BlockMoment(
                step,
                time_s,
                "touched",
                event.request_id,
                None if content is None else content[0],
                event.stored_by,
                event.stored_step,
            )
        elif isinstance(event, BlockFreed):
            yield BlockMoment(step, time_s, "freed", event.request_id)
        else:
            if content is not None:
                how, taker = _loss(event)
                yield BlockMoment(step, time_s, how, taker, *content)
                content = None
            if isinstance(event, BlockAllocated):
                yield BlockMoment(step, time_s, "allocated", event.request_id)


def _loss(event: BlockAllocated | BlockRemoved | AllBlocksCleared) -> tuple[str, str | None]:
    """How content is lost, and for whom."""
    if isinstance(event, AllBlocksCleared):
        return "cleared", None
    # Our engine tells of the loss before it hands the block out; not every source does.
    taker = event.request_id if isinstance(event, BlockAllocated) else event.for_request_id
    return ("dropped", None) if taker is None else ("evicted", taker)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _word(event: str) -> str:
    return _WORDS.get(event, event)


_WORDS = {
    "allocated": "handed out",
    "touched": "hit",
    "stored": "filled",
    "cleared": "lost to a reset",
}
