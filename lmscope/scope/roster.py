"""Roster: all requests of a view, and the queues they stand in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lmscope.boundary import Boundary, EngineCoreRequest, RequestSnapshot
from lmscope.scope.pool_view import PoolView
from lmscope.scope.request_view import NEUTRAL_SLOT, OwnerSlots, RequestView

__all__ = ["Roster"]


class Roster:
    """Requests by id in the order of arrival, and the engine's two queues.

    A request may be over for its user while the engine still holds it: after a stop string
    or an abort, until the engine's next word. It is finished then, but stands in its queue
    until the engine lets go; `leaving` has the ids of these.

    keep_finished   how many finished requests stay listed, the newest; None: all
    changed         ids of requests that changed since the owner of this set emptied it
    finished        ids of finished requests, oldest end first
    kept_texts      text of kept blocks whose request is not listed any more
    """

    def __init__(self, pool: PoolView, policy: str, keep_finished: int | None) -> None:
        self.requests: dict[str, RequestView] = {}
        self.running: dict[str, None] = {}
        self.leaving: set[str] = set()
        self.finished: OrderedDict[str, None] = OrderedDict()
        self.kept_texts: dict[int, str] = {}
        self.changed: set[str] = set()
        self.num_arrived = 0
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._pool = pool
        self._policy = policy
        self._keep_finished = keep_finished
        self._num_ended = 0
        self._slots = OwnerSlots()
        # ids that came back before the end of their earlier life was reported
        self._reused: set[str] = set()
        self._token: object = object()

    def copy(self, pool: PoolView) -> Roster:
        """Another roster in the same state; the requests are shared until one changes."""
        other = Roster(pool, self._policy, self._keep_finished)
        other.requests, other.running = self.requests.copy(), self.running.copy()
        other.leaving, other.finished = self.leaving.copy(), self.finished.copy()
        other.kept_texts, other.num_arrived = self.kept_texts.copy(), self.num_arrived
        other._waiting, other._num_ended = self._waiting.copy(), self._num_ended
        other._slots, other._reused = self._slots.copy(), self._reused.copy()
        # Neither side may change a shared object now: see change().
        self._token = object()
        return other

    def queue(self) -> Iterator[str]:
        """Ids in the waiting queue, leaving ones included, in the order of admission."""
        if self._policy != "priority":
            return iter(self._waiting)
        requests = (self.requests[i].request for i in self._waiting)
        ordered = sorted(requests, key=lambda r: (r.priority, r.arrival_time, r.request_id))
        return (request.request_id for request in ordered)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_waiting(self) -> int:
        """Waiting requests that are not over for their user."""
        return len(self._waiting) - sum(i in self._waiting for i in self.leaving)

    @property
    def num_running(self) -> int:
        """Running requests that are not over for their user."""
        return len(self.running) - sum(i in self.running for i in self.leaving)

    def change(self, request_id: str) -> RequestView:
        """A request as an object that this roster may change; it counts as changed."""
        record = self.requests[request_id]
        if record.owner is not self._token:
            record = self.requests[request_id] = record.copy_for(self._token)
        self.changed.add(request_id)
        return record

    def arrive(self, request: EngineCoreRequest) -> None:
        """A new request queues up, under an id that a finished one may have had."""
        record = RequestView(request)
        earlier = self.requests.pop(request.request_id, None)
        if earlier is not None:
            self._unlist(earlier)
            # The blocks of its earlier life are let go of under the same id, in events
            # that may still come.
            record.num_held = earlier.num_held
            record.num_shared_blocks = earlier.num_shared_blocks
            record.stored = earlier.stored.copy()
        elif request.request_id in self._pool.kept_by:
            # One that was not listed any more had the same id: its blocks show this one now.
            record.stored = [
                block.block_id
                for block in self._pool.blocks.not_empty()
                if block.stored_by == request.request_id
            ]
            self._pool.changed.update(record.stored)
        self._add(record)
        self._waiting[request.request_id] = None

    def resume_from(self, snapshot: RequestSnapshot) -> None:
        """List a request in the middle of its life."""
        record = RequestView(
            snapshot.request,
            status=snapshot.status,
            output_token_ids=list(snapshot.output_token_ids),
            text=snapshot.text,
            num_computed_tokens=snapshot.num_computed_tokens,
            num_cached_tokens=snapshot.num_cached_tokens,
            num_preemptions=snapshot.num_preemptions,
            block_ids=list(snapshot.block_ids),
            max_blocks=len(snapshot.block_ids),
            num_held=len(snapshot.block_ids),
            num_reached=max(snapshot.num_computed_tokens, snapshot.num_tokens_lost),
        )
        if record.output_token_ids:
            # How the text so far falls to the tokens is not known: the first has it all.
            record.pieces = [snapshot.text] + [""] * (len(record.output_token_ids) - 1)
        size = self._pool.block_size
        for index, block_id in enumerate(record.block_ids):
            self._pool.place(block_id, index)
            rest = record.num_computed_tokens - index * size
            self._pool.fill(block_id, max(0, min(size, rest)))
            record.num_shared_blocks += self._pool.get(block_id).ref_cnt > 1
        self._add(record)
        queue = self.running if snapshot.status == "running" else self._waiting
        queue[record.request_id] = None

    def seat(self, record: RequestView) -> None:
        """Move a request from the waiting queue to the end of the running ones."""
        if not record.is_finished:
            record.status = "running"
        self._waiting.pop(record.request_id, None)
        self.running[record.request_id] = None

    def preempt(self, record: RequestView) -> None:
        """Move a running request to the head of the waiting queue."""
        if not record.is_finished:
            record.status = "preempted"
        record.num_preemptions += 1
        record.num_lost_tokens += record.num_computed_tokens
        record.num_computed_tokens = 0
        record.block_ids = []
        del self.running[record.request_id]
        self._waiting[record.request_id] = None
        self._waiting.move_to_end(record.request_id, last=False)

    def end(
        self, record: RequestView, reason: str, stop_reason: int | str | None, at: Boundary
    ) -> bool:
        """End a request for its user; whether it had not ended before."""
        if record.is_finished:
            return False
        self._num_ended += 1
        record.status = "finished"
        record.finish_reason, record.stop_reason = reason, stop_reason
        record.finish_step, record.finish_time = at.step, at.time
        record.finish_order = self._num_ended
        if record.is_in_engine:
            self.leaving.add(record.request_id)
        self.finished[record.request_id] = None
        return True

    def leave_engine(self, record: RequestView) -> None:
        """The engine has let go of a request and of its blocks."""
        record.is_in_engine = False
        record.block_ids = []
        self._unqueue(record.request_id)

    def report(self, request_id: str, at: Boundary) -> bool:
        """The engine says that a request is over; whether that is news."""
        if request_id in self._reused:
            self._reused.discard(request_id)
            return False
        if request_id not in self.requests:
            return False
        record = self.change(request_id)
        record.is_reported = True
        is_news = self.end(record, "abort", None, at)
        self.leave_engine(record)
        self._drop_oldest()
        return is_news

    def _add(self, record: RequestView) -> None:
        request_id = record.request_id
        record.owner = self._token
        record.slot, previous = self._slots.take(request_id, self._rest)
        if previous in self.requests:
            loser = self.change(previous)
            loser.slot = NEUTRAL_SLOT
            self._pool.changed.update(loser.stored)
            self._pool.changed.update(loser.block_ids)
        self.num_arrived += 1
        record.arrival_order = self.num_arrived
        self.requests[request_id] = record
        self.changed.add(request_id)

    def _rest(self, request_id: str) -> tuple[int, int] | None:
        record = self.requests.get(request_id)
        if record is None or not record.is_finished:
            return None
        return (1 if request_id in self._pool.kept_by else 0), record.finish_order

    def _drop_oldest(self) -> None:
        if self._keep_finished is None:
            return
        while len(self.finished) > self._keep_finished:
            request_id = next(iter(self.finished))
            # Until it is reported, its id may still come up in the stream.
            if not self.requests[request_id].is_reported:
                return
            self._unlist(self.requests.pop(request_id))
            self._slots.release(request_id)
            self.changed.add(request_id)

    def _unlist(self, record: RequestView) -> None:
        """Forget a request, but not the text in the blocks that it leaves behind."""
        request_id = record.request_id
        if not record.is_reported:
            self._reused.add(request_id)
        self.finished.pop(request_id, None)
        self._unqueue(request_id)
        size = self._pool.block_size
        for block_id in record.stored:
            block = self._pool.get(block_id)
            if block.stored_by == request_id and block.index >= 0:
                start = block.index * size
                self.kept_texts[block_id] = "".join(record.token_texts(start, start + size))
                self._pool.changed.add(block_id)

    def _unqueue(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self.leaving.discard(request_id)
