"""Fold: the engine's state, brought up to date struct by struct.

`EngineView` is what people read; this is how it comes about. Each rule here mirrors one of
the engine's, told by what crosses its boundaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import repeat
from weakref import ref

import msgspec

from lmscope.boundary import (
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    BlockTouched,
    Boundary,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVEvent,
    ModelRunnerOutput,
    NewRequestData,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.decisions import Behind, Decision
from lmscope.scope.counts import Changes, Eviction, StepCounts, Totals
from lmscope.scope.pool_view import PoolView
from lmscope.scope.request_view import RequestView, TokenArrival, Work
from lmscope.scope.roster import Roster

__all__ = ["Fold"]

_RATE_STEPS = 32


class Fold:
    """The state after the structs so far; `EngineView` says what its parts mean.

    decided, behind   the last step's decisions, as the scheduler gave them
    num_arrived_when_scheduled   requests that came later were not in that step
    rate              when the last steps ended, and the tokens that they sampled
    preempted         ids of the requests that this step preempted
    last, previous    of each kind of struct, the last one and the one before it
    attention         by block, its share of the last step's attention; empty: nobody measured
    """

    def __init__(self, snapshot: EngineSnapshot, keep_finished: int | None) -> None:
        info = snapshot.info
        self.info = info
        self.step = snapshot.step
        self.time = snapshot.time
        self.boundary = ""
        self.hits: list[BlockTouched] = []
        self.evicted: list[Eviction] = []
        self.written: set[int] = set()
        self.preempted: list[str] = []
        self.attention: dict[int, float] = {}
        self.last: dict[str, Boundary] = {}
        self.previous: dict[str, Boundary] = {}
        self.this_step = StepCounts(snapshot.step)
        self.totals = Totals()
        self.pool = PoolView(info.num_blocks, info.block_size, snapshot.blocks, snapshot.free_queue)
        self.roster = Roster(self.pool, info.scheduling_policy, keep_finished)
        self.decided: dict[str, Decision] = {}
        self.behind: Behind | None = None
        self.num_arrived_when_scheduled = 0
        self.rate: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)
        # who wants to know what changes, for as long as somebody holds it
        self._readers: list[ref[Changes]] = []
        # drafts of the batches that are on their way
        self._drafts: dict[int, Mapping[str, tuple[int, ...]]] = {}
        # when the steps that are on their way were scheduled
        self._started: dict[int, float] = {}
        for request in snapshot.requests:
            self.roster.resume_from(request)

    def copy(self) -> Fold:
        """Another fold of the same moment, which nobody tracks; neither follows the other."""
        other = Fold.__new__(Fold)
        other.__dict__.update(self.__dict__)
        other.pool = self.pool.copy()
        other.roster = self.roster.copy(other.pool)
        other.hits, other.evicted = self.hits.copy(), self.evicted.copy()
        other.written = self.written.copy()
        other.last, other.previous = self.last.copy(), self.previous.copy()
        other.this_step = msgspec.structs.replace(self.this_step)
        other.totals = msgspec.structs.replace(self.totals)
        other._drafts, other.rate = self._drafts.copy(), self.rate.copy()
        other._started = self._started.copy()
        other._readers = []
        return other

    def track(self) -> Changes:
        """A record of what changes from now on, for as long as the caller holds it."""
        changes = Changes()
        self._readers = [*(r for r in self._readers if r() is not None), ref(changes)]
        return changes

    def apply(self, boundary: Boundary) -> None:
        """Fold one struct, the next of the stream."""
        if not isinstance(boundary, Boundary):
            raise TypeError(f"{type(boundary).__name__} is not a boundary struct")
        # With overlapping steps a struct of the step before may follow.
        self.step = max(self.step, boundary.step)
        if isinstance(boundary, SchedulerOutput):
            self._fold_scheduler_output(boundary)
        elif isinstance(boundary, EngineCoreOutputs):
            self._fold_core_outputs(boundary)
        elif isinstance(boundary, RequestOutput):
            self._fold_request_output(boundary)
        elif isinstance(boundary, EngineCoreRequest):
            self.roster.arrive(boundary)
            self.totals.requests += 1
        elif isinstance(boundary, ModelRunnerOutput):
            # Its tokens are taken in with the next struct.
            self.this_step.device_duration_s = boundary.device_duration_s
            self._fold_attention(boundary)
        # A device that ran ahead may have been done before the step after was scheduled.
        self.time = max(self.time, boundary.time)
        self.boundary = name = type(boundary).__name__
        if name in self.last:
            self.previous[name] = self.last[name]
        self.last[name] = boundary
        for reference in self._readers:
            reader = reference()
            if reader is not None:
                reader.blocks |= self.pool.changed
                reader.requests |= self.roster.changed
        self.pool.changed.clear()
        self.roster.changed.clear()

    def _fold_scheduler_output(self, output: SchedulerOutput) -> None:
        self._begin_step(output)
        for request_id in output.finished_req_ids:
            self.totals.finished += self.roster.report(request_id, output)
        # A running request that is left without a block was preempted, listed or not: a
        # forced reset of the prefix cache does it between two steps.
        preempted = self._fold_events(output.kv_events)
        preempted.update(output.preempted_req_ids)
        # From the end, so that the first of several stands first in the queue.
        for request_id in [i for i in reversed(self.roster.running) if i in preempted]:
            self.roster.preempt(self.roster.change(request_id))
            self.totals.preemptions += 1
            self.this_step.preemptions += 1
            self.preempted.append(request_id)
            self.roster.requests[request_id].work.append(Work(output.step, 0, "preempted"))
        self._schedule(output)
        self.decided = {decision.request_id: decision for decision in output.decisions}
        for decision in output.decisions:
            if decision.request_id in self.roster.requests:
                self.roster.change(decision.request_id).decision = decision
        self.behind = output.behind
        self.num_arrived_when_scheduled = self.roster.num_arrived
        if output.scheduled_spec_decode_tokens:
            self._drafts[output.step] = output.scheduled_spec_decode_tokens

    def _fold_attention(self, output: ModelRunnerOutput) -> None:
        """Each block's part in the attention of all requests, which add up to 1."""
        if not output.req_ids:
            return  # a step without tokens
        # Never changed in place: copies of the fold share it.
        attention: dict[int, float] = {}
        self.attention = attention
        holders = self.attended(output)
        for _, block_ids, shares in holders:
            for block_id, share in zip(block_ids, shares, strict=False):
                attention[block_id] = attention.get(block_id, 0.0) + share / len(holders)

    def attended(self, output: ModelRunnerOutput) -> list[tuple[str, list[int], tuple[float, ...]]]:
        """Id, block table and shares of each request whose attention the step measured.

        With overlapping steps the next one is scheduled already: it may have taken the blocks of
        some away, or begun another request with the id of one that is over; those are left out.
        """
        found = []
        for request_id, shares in output.attention_mass.items():
            record = self.roster.requests.get(request_id)
            if record is None or not record.block_ids:
                continue
            if (record.first_scheduled_step or 0) <= output.step:
                found.append((request_id, record.block_ids, shares))
        return found

    def _fold_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        drafts = self._drafts.pop(outputs.step, {})
        sampled = 0
        for output in outputs.outputs:
            if output.request_id not in self.roster.requests:
                continue
            record = self.roster.change(output.request_id)
            if output.new_token_ids:
                sampled += len(output.new_token_ids)
                record.output_token_ids.extend(output.new_token_ids)
                if record.first_token_step is None:
                    record.first_token_step, record.first_token_time = outputs.step, outputs.time
                if output.request_id in drafts:
                    accepted = len(output.new_token_ids) - 1
                    self._reject(record, len(drafts[output.request_id]) - accepted)
            if output.finish_reason is not None:
                self._end(record, output.finish_reason, output.stop_reason, outputs)
                self.roster.leave_engine(record)
        # Whoever lost its last block without an output was aborted while the model ran.
        for request_id in self._fold_events(outputs.kv_events):
            record = self.roster.change(request_id)
            self._end(record, "abort", None, outputs)
            self.roster.leave_engine(record)
        self.totals.output_tokens += sampled
        self.rate.append((outputs.time, sampled))
        started = self._started.pop(outputs.step, None)
        self.this_step.output += sampled
        if started is not None:
            self.this_step.duration_s = max(0.0, outputs.time - started)

    def _fold_request_output(self, output: RequestOutput) -> None:
        if output.request_id not in self.roster.requests:
            return
        record = self.roster.change(output.request_id)
        for completion in output.outputs:
            record.add_text(completion.text, len(completion.token_ids))
            chances = completion.logprobs or repeat(None)
            record.arrivals.extend(
                TokenArrival(output.step, output.time, token_id, chance, record.num_preemptions)
                for token_id, chance in zip(completion.token_ids, chances, strict=False)
            )
            if completion.finish_reason is not None:
                self._end(record, completion.finish_reason, completion.stop_reason, output)
                # What the user is told counts: a stop string may beat the engine's reason.
                record.finish_reason = completion.finish_reason
                record.stop_reason = completion.stop_reason

    # -- one step ----------------------------------------------------------------

    def _begin_step(self, output: SchedulerOutput) -> None:
        # Marks of the step before go.
        self.pool.changed.update(self.written)
        self.pool.changed.update(hit.block_id for hit in self.hits)
        self.pool.changed.update(eviction.block_id for eviction in self.evicted)
        self.hits, self.evicted, self.written, self.preempted = [], [], set(), []
        self._started[output.step] = output.time
        self.this_step = StepCounts(
            output.step, output.total_num_scheduled_tokens, started=output.time
        )
        if not self.roster.running:
            self.rate.clear()  # the pause before this step is no work

    def _schedule(self, output: SchedulerOutput) -> None:
        """Give each request its blocks and tokens, in the order in which it got them.

        That order decides who stands where among the running ones: new requests and those
        that come back from preemption are admitted by turns.
        """
        known = output.scheduled_cached_reqs
        rows = {request_id: row for row, request_id in enumerate(known.req_ids)}
        resumed = set(known.resumed_req_ids)
        new = {request.req_id: request for request in output.scheduled_new_reqs}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            row = rows.get(request_id)
            is_admitted = request_id in new or request_id in resumed
            if request_id in new:
                start = new[request_id].num_computed_tokens
                record = self._admit(new[request_id], output)
            elif row is not None and request_id in self.roster.requests:
                start = known.num_computed_tokens[row]
                groups = known.new_block_ids[row]
                block_ids = groups[0] if groups else ()
                record = self.roster.change(request_id)
                if request_id in resumed:
                    self._seat(record, block_ids, start)
                elif block_ids:
                    self._extend_table(record, block_ids)
            else:
                continue
            self._compute(record, start, num_tokens, start if is_admitted else 0)

    def _admit(self, new: NewRequestData, output: SchedulerOutput) -> RequestView:
        if new.req_id not in self.roster.requests:  # a source that does not tell of arrivals
            self.roster.arrive(
                EngineCoreRequest(
                    step=output.step - 1,
                    time=output.time,
                    request_id=new.req_id,
                    prompt_token_ids=new.prompt_token_ids,
                    sampling_params=new.sampling_params,
                )
            )
            self.totals.requests += 1
        record = self.roster.change(new.req_id)
        record.first_scheduled_step = output.step
        record.first_scheduled_time = output.time
        record.num_cached_tokens = new.num_computed_tokens
        self.totals.prompt_tokens += len(new.prompt_token_ids)
        self.totals.cached_tokens += new.num_computed_tokens
        self._seat(record, new.block_ids[0] if new.block_ids else (), new.num_computed_tokens)
        return record

    def _seat(self, record: RequestView, block_ids: Iterable[int], num_cached: int) -> None:
        """A waiting request joins the running ones, with a whole block table."""
        self.roster.seat(record)
        self.this_step.cached += num_cached
        record.block_ids = []
        self._extend_table(record, block_ids)

    def _extend_table(self, record: RequestView, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.pool.place(block_id, len(record.block_ids))
            record.block_ids.append(block_id)
        record.max_blocks = max(record.max_blocks, len(record.block_ids))

    def _compute(self, record: RequestView, start: int, num_tokens: int, cached: int) -> None:
        """Count `num_tokens` tokens from `start` on as computed, and say what they were."""
        end = start + num_tokens
        again = max(0, min(end, record.num_reached) - start)
        prefill = max(0, min(end, record.num_prompt_tokens) - max(start, record.num_reached))
        self.this_step.recomputed += again
        self.this_step.prefill += prefill
        self.this_step.decode += num_tokens - again - prefill
        self.totals.recomputed_tokens += again
        record.num_recomputed_tokens += again
        kind = "recompute" if again else "prefill" if prefill else "decode"
        record.add_work(self.this_step.step, kind, num_tokens, cached)
        record.num_reached = max(record.num_reached, end)
        record.num_computed_tokens = end
        self.written.update(self._fill(record, start, end))

    def _reject(self, record: RequestView, num_tokens: int) -> None:
        """Drafts that turned out wrong do not count as computed."""
        end = record.num_computed_tokens
        if num_tokens <= 0 or not end:
            return
        if record.num_reached == end:
            record.num_reached -= num_tokens
        record.num_computed_tokens -= num_tokens
        self._fill(record, record.num_computed_tokens, end)

    def _fill(self, record: RequestView, start: int, end: int) -> list[int]:
        """Bring the blocks of these positions up to date; returns them."""
        size = self.info.block_size
        first = start // size
        touched = record.block_ids[first : -(-end // size)]
        for index, block_id in enumerate(touched, first):
            rest = record.num_computed_tokens - index * size
            self.pool.fill(block_id, max(0, min(size, rest)))
        return touched

    def _end(
        self, record: RequestView, reason: str, stop_reason: int | str | None, at: Boundary
    ) -> None:
        self.totals.finished += self.roster.end(record, reason, stop_reason, at)

    # -- KV events -------------------------------------------------------------

    def _fold_events(self, events: Iterable[KVEvent]) -> set[str]:
        """Apply KV events; returns the running requests that lost their last block."""
        pool = self.pool
        emptied: set[str] = set()
        for event in events:
            if isinstance(event, BlockAllocated):
                pool.allocate(event)
                self._hold(event.request_id, 1)
            elif isinstance(event, BlockTouched):
                self._fold_hit(event)
            elif isinstance(event, BlockStored):
                pool.store(event, self.step)
                if event.request_id in self.roster.requests:
                    self.roster.change(event.request_id).stored.append(event.block_id)
            elif isinstance(event, BlockFreed):
                left = pool.free(event.block_id, event.request_id)
                if left is not None and self._let_go(event.request_id, left):
                    emptied.add(event.request_id)
            elif isinstance(event, BlockRemoved):
                self._fold_removal(event)
            else:
                pool.clear()
                self.roster.kept_texts.clear()
        return emptied

    def _fold_hit(self, event: BlockTouched) -> None:
        self.hits.append(event)
        self.totals.hits += 1
        before = self.pool.touch(event)
        if event.request_id in before:
            return
        self._hold(event.request_id, 1)
        if before:
            self._share(event.request_id, 1)
        if len(before) == 1:
            self._share(before[0], 1)

    def _fold_removal(self, event: BlockRemoved) -> None:
        block = self.pool.remove(event)
        self.roster.kept_texts.pop(event.block_id, None)
        if event.for_request_id is None:  # dropped, not evicted: nobody needed the block
            return
        self.totals.evictions += 1
        self.evicted.append(
            Eviction(
                event.block_id,
                event.block_hash,
                block.stored_by,
                block.stored_step,
                event.for_request_id,
            )
        )

    def _let_go(self, request_id: str, left: tuple[str, ...]) -> bool:
        """Count a block less; whether it was the last of a running request."""
        if left:
            self._share(request_id, -1)
        if len(left) == 1:
            self._share(left[0], -1)
        return self._hold(request_id, -1) == 0 and request_id in self.roster.running

    def _hold(self, request_id: str, one: int) -> int:
        if request_id not in self.roster.requests:
            return 0
        record = self.roster.change(request_id)
        record.num_held += one
        return record.num_held

    def _share(self, request_id: str, one: int) -> None:
        if request_id in self.roster.requests:
            self.roster.change(request_id).num_shared_blocks += one
