"""EngineView: the fold of the stream into a picture of the engine.

    view = EngineView(snapshot)
    for boundary in boundaries:
        view.apply(boundary)
    view.blocks[7], view.requests["0"], view.why("0")

It needs no engine. What a struct costs grows with what it changes, not with the number of
blocks or of waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType

import msgspec

from lmscope.boundary import (
    BlockSnapshot,
    BlockTouched,
    Boundary,
    EngineInfo,
    EngineSnapshot,
    ModelRunnerOutput,
    RequestSnapshot,
    SchedulerOutput,
)
from lmscope.decisions import Code, Decision, Outcome
from lmscope.scope import why
from lmscope.scope.counts import Changes, Eviction, StepCounts, Totals
from lmscope.scope.fold import Fold
from lmscope.scope.pool_view import Blocks, BlockView, FreeQueue
from lmscope.scope.request_view import NEUTRAL_SLOT, NO_SLOT, RequestView
from lmscope.scope.run_log import RunLog

__all__ = ["BlockView", "EngineView", "RequestView", "differences"]


class EngineView:
    """The engine at one moment of its stream.

    snapshot        where the stream begins
    keep_finished   how many finished requests stay listed, the newest; None: all
    """

    def __init__(self, snapshot: EngineSnapshot, *, keep_finished: int | None = None) -> None:
        self._fold = Fold(snapshot, keep_finished)
        self._log = RunLog()

    def apply(self, boundary: Boundary) -> None:
        """Fold one struct, the next of the stream."""
        if not isinstance(boundary, SchedulerOutput):
            self._fold.apply(boundary)
            return
        self._log.close_step(self)
        self._fold.apply(boundary)
        self._log.begin_step(self, boundary)

    def copy(self) -> EngineView:
        """Another view of the same moment; neither follows the other."""
        other = EngineView.__new__(EngineView)
        other._fold = self._fold.copy()
        other._log = self._log.copy()
        return other

    def track(self) -> Changes:
        """A record of what changes from now on, for as long as the caller holds it."""
        return self._fold.track()

    # -- the moment ------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Settings of the engine."""
        return self._fold.info

    @property
    def step(self) -> int:
        """Engine step of the last struct."""
        return self._fold.step

    @property
    def time(self) -> float:
        """Seconds on the engine's clock at the last struct."""
        return self._fold.time

    @property
    def boundary(self) -> str:
        """Name of the last struct, "" before the first."""
        return self._fold.boundary

    @property
    def at(self) -> Boundary | None:
        """The last struct, at which the picture stands; None before the first."""
        return self._fold.last.get(self._fold.boundary)

    @property
    def previous(self) -> Boundary | None:
        """The struct of the same kind before `at`, if there was one."""
        return self._fold.previous.get(self._fold.boundary)

    @property
    def log(self) -> RunLog:
        """What the steps before this one did."""
        return self._log

    @property
    def preempted(self) -> Sequence[str]:
        """Ids of the requests that this step preempted."""
        return self._fold.preempted

    @property
    def this_step(self) -> StepCounts:
        """Tokens of this step."""
        return self._fold.this_step

    @property
    def totals(self) -> Totals:
        """Counts since the view began."""
        return self._fold.totals

    # -- requests --------------------------------------------------------------

    @property
    def requests(self) -> Mapping[str, RequestView]:
        """Requests by id in the order of arrival, finished ones included."""
        return MappingProxyType(self._fold.roster.requests)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of running requests in the scheduler's order."""
        return tuple(i for i in self._fold.roster.running if i not in self._fold.roster.leaving)

    @property
    def holding(self) -> tuple[str, ...]:
        """`running`, and requests that are over for their user while the engine holds them."""
        return tuple(self._fold.roster.running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of waiting and preempted requests, next to be admitted first."""
        return tuple(self.queue())

    def queue(self) -> Iterator[str]:
        """`waiting`, one by one; for a look at the head of a long queue."""
        return (i for i in self._fold.roster.queue() if i not in self._fold.roster.leaving)

    @property
    def finished(self) -> tuple[str, ...]:
        """Ids of finished requests that are still listed, oldest end first."""
        return tuple(self._fold.roster.finished)

    def newest_finished(self) -> Iterator[str]:
        """`finished` from its end, one by one."""
        return reversed(self._fold.roster.finished)

    @property
    def num_running(self) -> int:
        return self._fold.roster.num_running

    @property
    def num_waiting(self) -> int:
        return self._fold.roster.num_waiting

    def token_texts(self, request_id: str) -> list[str]:
        """The text of each token of prompt and output; RequestView.token_texts says more."""
        return self._fold.roster.requests[request_id].token_texts()

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second over the last steps; None when unknown."""
        if len(self._fold.rate) < 2:
            return None
        elapsed = self._fold.rate[-1][0] - self._fold.rate[0][0]
        sampled = sum(count for _, count in self._fold.rate) - self._fold.rate[0][1]
        return sampled / elapsed if elapsed > 0 else None

    # -- blocks ----------------------------------------------------------------

    @property
    def blocks(self) -> Blocks:
        """All blocks by id; `.not_empty()` goes through those in use or kept."""
        return self._fold.pool.blocks

    @property
    def free_queue(self) -> FreeQueue:
        """Ids of free blocks, next to be handed out first: `len`, iteration, `.first(n)`."""
        return self._fold.pool.free_queue

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self._fold.pool.num_used

    @property
    def num_kept(self) -> int:
        """Free blocks whose content can still be hit."""
        return self._fold.pool.num_kept

    @property
    def num_empty(self) -> int:
        """Free blocks without content, the null block not counted."""
        return self._fold.pool.num_empty

    @property
    def num_shared(self) -> int:
        """Blocks that more than one request holds."""
        return self._fold.pool.num_shared

    @property
    def hits(self) -> Sequence[BlockTouched]:
        """Prefix hits of this step, in the order of happening."""
        return self._fold.hits

    @property
    def evicted(self) -> Sequence[Eviction]:
        """Blocks that lost their content in this step, in the order of happening."""
        return self._fold.evicted

    @property
    def written(self) -> Set[int]:
        """Ids of the blocks that this step's tokens are computed into."""
        return self._fold.written

    @property
    def attention(self) -> Mapping[int, float]:
        """Share of the last step's attention by block id; they add up to 1.

        Mean over requests (the query of the newest token of each), layers and heads. Empty
        unless somebody measured it: LLM.measure_attention.
        """
        return MappingProxyType(self._fold.attention)

    def attended(self, output: ModelRunnerOutput) -> list[tuple[str, list[int], tuple[float, ...]]]:
        """Id, block table and shares of each request in an output that says them.

        Without those whose blocks the next step has taken, where it is scheduled already.
        """
        return self._fold.attended(output)

    def block_text(self, block_id: int) -> str:
        """The text in a block, or its token ids where nobody told the text."""
        block = self.blocks[block_id]
        if not block.num_filled:
            return ""
        holder = block.owners[0] if block.owners else block.stored_by
        record = self._fold.roster.requests.get(holder) if holder is not None else None
        if record is not None and block.index >= 0:
            start = block.index * self.info.block_size
            end = start + block.num_filled
            token_ids = record.token_ids(start, end)
            if not block.token_ids or block.token_ids == token_ids:
                text = "".join(record.token_texts(start, end))
                return text or " ".join(map(str, token_ids))
        text = self._fold.roster.kept_texts.get(block_id, "")
        return text or " ".join(map(str, block.token_ids))

    def block_slot(self, block: BlockView) -> int:
        """Owner slot of a block's oldest holder, or of its storer when it is only kept.

        254 when that request has no slot (any more), 255 for a block without content.
        """
        holder = block.owners[0] if block.owners else block.stored_by
        if holder is None:
            return NO_SLOT if block.block_hash is None else NEUTRAL_SLOT
        record = self._fold.roster.requests.get(holder)
        return NEUTRAL_SLOT if record is None else record.slot

    # -- reasons ---------------------------------------------------------------

    @property
    def decisions(self) -> dict[str, Decision]:
        """The last step's decision about each request that lived in it, exactly one each."""
        decisions = dict(self._fold.decided)
        decisions.update((d.request_id, d) for d in self._expand_behind())
        return decisions

    def decision(self, request_id: str) -> Decision | None:
        """The last decision about one request; None before its first."""
        last = self._fold.roster.requests[request_id].decision
        return next((d for d in self._expand_behind({request_id})), last)

    def why(self, request_id: str) -> str:
        """One sentence: why the request ran, waited, was preempted or ended."""
        if request_id not in self._fold.roster.requests:
            raise KeyError(request_id)
        return self.sentences((request_id,))[request_id]

    def sentences(self, request_ids: Iterable[str]) -> dict[str, str]:
        """`why` of several requests, at the cost of one look through the queue."""
        wanted = [i for i in request_ids if i in self._fold.roster.requests]
        behind = {d.request_id: d for d in self._expand_behind(set(wanted))}
        return {i: self._sentence(i, behind.get(i)) for i in wanted}

    # -- the whole -------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        """The state as an engine would give it; folding on from it gives the same picture."""
        roster = self._fold.roster
        known = sorted(self.blocks.not_empty(), key=lambda block: block.stored_order)
        stored = (block.block_id for block in known if block.block_hash is not None)
        order = {block_id: place for place, block_id in enumerate(stored, start=1)}
        return EngineSnapshot(
            info=self.info,
            step=self.step,
            time=self.time,
            blocks=tuple(
                BlockSnapshot(
                    block.block_id,
                    block.owners,
                    block.block_hash,
                    block.stored_by,
                    block.stored_step,
                    block.token_ids,
                    order.get(block.block_id, 0),
                )
                for block in sorted(known, key=lambda block: block.block_id)
            ),
            free_queue=tuple(self.free_queue),
            requests=tuple(
                self._snapshot_of(roster.requests[i]) for i in (*roster.running, *roster.queue())
            ),
        )

    # -- for the readers above ---------------------------------------------------

    def _expand_behind(self, wanted: set[str] | None = None) -> Iterator[Decision]:
        """One decision for each request that the last step never looked at.

        A Behind covers all of the waiting queue that has no decision of its own. `wanted`
        names the requests of interest; without any in the queue nothing is gone through.
        """
        fold, roster = self._fold, self._fold.roster
        behind = fold.behind
        if behind is None:
            return
        if wanted is not None:
            wanted = {i for i in wanted if roster.is_waiting(i) and i not in fold.decided}
            if not wanted:
                return
        for ahead, request_id in enumerate(roster.queue()):
            if request_id in fold.decided or (wanted is not None and request_id not in wanted):
                continue
            if roster.requests[request_id].arrival_order <= fold.num_arrived_when_scheduled:
                yield Decision(
                    request_id,
                    Outcome.WAITING,
                    behind.code,
                    other_id=behind.other_id,
                    other_amount=ahead if behind.code is Code.BEHIND else 0,
                )

    def _sentence(self, request_id: str, behind: Decision | None) -> str:
        record = self._fold.roster.requests[request_id]
        if record.is_finished:
            return why.ending(
                record.finish_step,
                record.finish_reason,
                record.stop_reason,
                num_output_tokens=record.num_output_tokens,
                num_tokens=record.num_tokens,
                max_tokens=record.max_tokens,
                max_model_len=self.info.max_model_len,
                eos_token_id=record.request.eos_token_id,
            )
        decision = behind or record.decision
        if decision is None:
            return why.NOT_DECIDED
        return why.sentence(
            decision,
            info=self.info,
            num_computed_tokens=record.num_computed_tokens,
            max_tokens=record.max_tokens,
        )

    def _snapshot_of(self, record: RequestView) -> RequestSnapshot:
        status = record.status
        if status == "finished":  # the engine does not know it yet
            status = "running" if record.request_id in self._fold.roster.running else "waiting"
        return RequestSnapshot(
            request=record.request,
            status=status,
            output_token_ids=tuple(record.output_token_ids),
            text=record.text,
            num_computed_tokens=record.num_computed_tokens,
            num_cached_tokens=record.num_cached_tokens,
            block_ids=tuple(record.block_ids),
            num_preemptions=record.num_preemptions,
            num_tokens_lost=(
                record.num_reached if record.num_computed_tokens < record.num_reached else 0
            ),
        )


def differences(view: EngineView, snapshot: EngineSnapshot) -> list[str]:
    """Where a fold and an engine's own state differ, in words; empty when they agree.

    A snapshot need not carry what only readers know: the tokens in a block and the text.
    """
    mine = view.snapshot()
    found: list[str] = []
    if mine.free_queue != snapshot.free_queue:
        found.append(f"free queue: {mine.free_queue} in the view, {snapshot.free_queue}")
    my_blocks = {b.block_id: b for b in mine.blocks}
    their_blocks = {b.block_id: b for b in snapshot.blocks}
    for block_id in sorted({*my_blocks, *their_blocks}):
        found += _fields_that_differ(
            f"block {block_id}",
            my_blocks.get(block_id, BlockSnapshot(block_id)),
            their_blocks.get(block_id, BlockSnapshot(block_id)),
            optional="token_ids",
        )
    my_order = tuple(r.request.request_id for r in mine.requests)
    their_order = tuple(r.request.request_id for r in snapshot.requests)
    if my_order != their_order:
        found.append(f"requests: {my_order} in the view, {their_order}")
    my_requests = {r.request.request_id: r for r in mine.requests}
    for request in snapshot.requests:
        name = request.request.request_id
        if name in my_requests:
            found += _fields_that_differ(
                f"request {name}", my_requests[name], request, optional="text"
            )
    return found


def _fields_that_differ(
    name: str, mine: msgspec.Struct, theirs: msgspec.Struct, optional: str
) -> list[str]:
    return [
        f"{name}: {field} is {getattr(mine, field)!r} in the view, {getattr(theirs, field)!r}"
        for field in mine.__struct_fields__
        if getattr(mine, field) != getattr(theirs, field)
        and not (field == optional and not getattr(theirs, field))
    ]
