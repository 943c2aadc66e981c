"""History: a recording gone through once, so that questions about its past cost little.

It collects, for each request, its admissions with what the prefix cache gave it; for each name
of content the blocks that carried it; and for each block where its events are. A recording that
has grown is gone on with from where it was left.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmscope.boundary import (
    AllBlocksCleared,
    AnyBoundary,
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    BlockTouched,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVEvent,
    RequestOutput,
    RequestSnapshot,
    SchedulerOutput,
    decode,
)
from lmscope.scope.content_history import ContentHistory
from lmscope.scope.lives import Copy, Life, Seating
from lmscope.scope.prompt_tree import PromptTree
from lmscope.scope.record_log import RecordLog
from lmscope.scope.request_view import RequestView

__all__ = ["History"]


class History:
    """What questions about the prefix cache and the pool need of a recording.

    lives        of each request id, oldest first
    content      what blocks carried
    prompts      the prompts of all requests that were admitted, with the output of those
                 that have ended
    since_step   the first step of a recording that began late; 0 when it has all
    """

    def __init__(self, snapshot: EngineSnapshot, log: RecordLog) -> None:
        self.snapshot = snapshot
        self.info = snapshot.info
        self.since_step = snapshot.step + 1 if snapshot.step else 0
        self.lives: dict[str, list[Life]] = {}
        self.content = ContentHistory(snapshot.info.block_size)
        self.prompts: PromptTree[Life] = PromptTree()
        self._log = log
        self._lock = threading.Lock()
        self._num_read = 0
        self._step = snapshot.step
        # counts events and look-ups: the moments that lives.py speaks of
        self._now = 0
        # positions of the structs with events of a block, and of those with a reset
        self._of_block: dict[int, array[int]] = {}
        self._resets = array("q")
        self._begin(snapshot)

    @contextmanager
    def caught_up(self) -> Iterator[History]:
        """This history with all that the recording has; for one question at a time."""
        with self._lock:
            count = len(self._log)
            for data in self._log.read(self._num_read, count):
                self._read(decode(data), self._num_read)
                self._num_read += 1
            yield self

    def events_of(self, block_id: int) -> Iterator[tuple[int, float, KVEvent]]:
        """All that happened to a block, resets included, with the step and time of each."""
        mine = self._of_block.get(block_id, ())
        for position in sorted({*mine, *self._resets}):
            boundary = decode(next(self._log.read(position, position + 1)))
            assert isinstance(boundary, SchedulerOutput | EngineCoreOutputs)
            step, time = self._log.steps[position], self._log.times[position]
            for event in boundary.kv_events:
                if isinstance(event, AllBlocksCleared) or event.block_id == block_id:
                    yield step, time, event

    # -- where it begins -------------------------------------------------------------

    def _begin(self, snapshot: EngineSnapshot) -> None:
        for block in sorted(snapshot.blocks, key=lambda block: block.stored_order):
            if block.block_hash is not None:
                copy = Copy(block.block_hash, block.block_id, block.stored_by, block.stored_step, 0)
                self.content.inherit(copy, block.token_ids)
        for shot in snapshot.requests:
            record = RequestView(
                shot.request,
                output_token_ids=list(shot.output_token_ids),
                # How the text so far falls to the tokens is not known.
                pieces=[""] * len(shot.output_token_ids),
            )
            life = Life(record, was_admitted=shot.status != "waiting")
            self.lives.setdefault(record.request_id, []).append(life)
            held = [self.content.of_block(block_id) for block_id in shot.block_ids]
            for index, content in enumerate(held):
                if content is not None:
                    self.content.learn(life, index, content.name)
            if shot.status == "running" and not shot.num_preemptions:
                life.seatings.append(self._earlier_seating(shot, held))
            if life.was_admitted:
                self.prompts.add(record.prompt_token_ids, life, 0)

    def _earlier_seating(self, shot: RequestSnapshot, held: Sequence[Copy | None]) -> Seating:
        """The admission of a request that runs since then, as far as its blocks tell."""
        size, num_tokens = self.info.block_size, len(shot.request.prompt_token_ids)
        num_hits = max(0, shot.num_cached_tokens) // size
        seating = Seating(None, is_resumed=False, num_tokens=num_tokens)
        seating.hits = [(c.block_id, c.stored_by, c.stored_step) for c in held[:num_hits] if c]
        start, end = len(seating.hits) * size, min(shot.num_computed_tokens, num_tokens)
        if start < end:
            seating.chunks.append((None, start, end))
        return seating

    # -- struct by struct --------------------------------------------------------------

    def _read(self, boundary: AnyBoundary, position: int) -> None:
        self._step = max(self._step, boundary.step)
        if isinstance(boundary, EngineCoreRequest):
            self._arrive(boundary)
        elif isinstance(boundary, SchedulerOutput):
            self._read_schedule(boundary, position)
        elif isinstance(boundary, EngineCoreOutputs):
            for output in boundary.outputs:
                life = self._latest(output.request_id)
                if life is not None:
                    life.record.output_token_ids.extend(output.new_token_ids)
            for event in boundary.kv_events:
                self._read_event(event, position)
        elif isinstance(boundary, RequestOutput):
            life = self._latest(boundary.request_id)
            if life is not None:
                for completion in boundary.outputs:
                    life.record.add_text(completion.text, len(completion.token_ids))

    def _read_schedule(self, output: SchedulerOutput, position: int) -> None:
        for request_id in output.finished_req_ids:
            self._end(request_id)
        admitted = self._admit(output)
        for event in output.kv_events:
            # What an admission does to the pool first comes right after its look-up.
            taker = None
            if isinstance(event, BlockRemoved):
                taker = event.for_request_id
            elif isinstance(event, BlockTouched | BlockAllocated):
                taker = event.request_id
            if taker in admitted:
                self._look_up(admitted.pop(taker))
            self._read_event(event, position)
        for life in admitted.values():  # a source that tells nothing of blocks
            self._look_up(life)
        self._compute(output)

    def _admit(self, output: SchedulerOutput) -> dict[str | None, Life]:
        """Begin the admissions of a step; their look-ups are still to come."""
        admitted: dict[str | None, Life] = {}
        new = {request.req_id: request for request in output.scheduled_new_reqs}
        for request_id in (*new, *output.scheduled_cached_reqs.resumed_req_ids):
            life = self._latest(request_id)
            if life is None and request_id in new:  # a source that does not tell of arrivals
                life = self._arrive(
                    EngineCoreRequest(
                        step=output.step - 1,
                        time=output.time,
                        request_id=request_id,
                        prompt_token_ids=new[request_id].prompt_token_ids,
                        sampling_params=new[request_id].sampling_params,
                    )
                )
            if life is not None:
                is_resumed = request_id not in new
                num_tokens = life.record.num_tokens
                life.seatings.append(Seating(output.step, is_resumed, num_tokens))
                admitted[request_id] = life
        return admitted

    def _look_up(self, life: Life) -> None:
        self._now += 1
        seating = life.seatings[-1]
        seating.at = self._now
        if not seating.is_resumed:
            self.prompts.add(life.record.prompt_token_ids, life, self._now)

    def _compute(self, output: SchedulerOutput) -> None:
        """Note what the step computes of the tokens that an admission came with."""
        known = output.scheduled_cached_reqs
        starts = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        starts.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            life = self._latest(request_id)
            if life is None or not life.seatings or request_id not in starts:
                continue
            seating, start = life.seatings[-1], starts[request_id]
            if start < seating.num_tokens:
                end = min(start + num_tokens, seating.num_tokens)
                seating.chunks.append((output.step, start, end))

    # -- event by event ------------------------------------------------------------------

    def _read_event(self, event: KVEvent, position: int) -> None:
        self._now += 1
        if isinstance(event, AllBlocksCleared):
            self._resets.append(position)
            self.content.clear(at=self._now, step=self._step)
            return
        positions = self._of_block.setdefault(event.block_id, array("q"))
        if not positions or positions[-1] != position:
            positions.append(position)
        if isinstance(event, BlockTouched):
            self._hit(event)
        elif isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            self._lose(
                event.block_id,
                "dropped" if event.for_request_id is None else "evicted",
                event.for_request_id,
            )
        elif isinstance(event, BlockAllocated):
            # Our engine has told of it before; not every source does.
            self._lose(event.block_id, "evicted", event.request_id)
        else:
            assert isinstance(event, BlockFreed)  # content and name stay

    def _hit(self, event: BlockTouched) -> None:
        life = self._latest(event.request_id)
        if life is None or not life.seatings:
            return
        hits = life.seatings[-1].hits
        copy = self.content.of_block(event.block_id)
        if copy is not None:
            self.content.learn(life, len(hits), copy.name)
        hits.append((event.block_id, event.stored_by, event.stored_step))

    def _store(self, event: BlockStored) -> None:
        self._lose(event.block_id, "dropped", None)
        self.content.keep(
            Copy(event.block_hash, event.block_id, event.request_id, self._step, self._now)
        )
        start = event.index * self.info.block_size
        end = start + self.info.block_size
        for life in reversed(self.lives.get(event.request_id, [])):
            # An id that came again may still store blocks of its earlier life.
            if life.record.token_ids(start, end) == event.token_ids:
                self.content.learn(life, event.index, event.block_hash)
                return

    def _lose(self, block_id: int, how: str, for_request_id: str | None) -> None:
        self.content.lose(
            block_id, at=self._now, step=self._step, how=how, for_request_id=for_request_id
        )

    # -- requests ------------------------------------------------------------------------

    def _arrive(self, request: EngineCoreRequest) -> Life:
        life = Life(RequestView(request))
        self.lives.setdefault(request.request_id, []).append(life)
        return life

    def _end(self, request_id: str) -> None:
        """A request is over: from now on others may go on where its output ended."""
        for life in self.lives.get(request_id, ()):
            if life.ended_at is None:
                self._now += 1
                life.ended_at = self._now
                if life.seatings or life.was_admitted:
                    tokens = life.record.token_ids(0, life.record.num_tokens)
                    self.prompts.add(tokens, life, self._now)
                return

    def _latest(self, request_id: str) -> Life | None:
        lives = self.lives.get(request_id)
        return lives[-1] if lives else None
