"""What would have to be different for a request to run: schedule() again, on a copy.

There is one scheduler. What-if does not model it, it runs it: on a copy of its state with
more blocks, more budget, more seats or another place in the queue, and looks whether the
request gets tokens. So an answer is right by construction, on a live engine as on a
recording, from which the state is built again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import msgspec

from lmscope.boundary import EngineSnapshot, RequestSnapshot, SchedulerOutput
from lmscope.decisions import Change, Code, Decision
from lmscope.engine.block_pool import BlockPool, FreeQueue
from lmscope.engine.kv_cache_manager import KVCacheManager
from lmscope.engine.prefix_hash import BlockHasher
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.request_queue import FCFSRequestQueue
from lmscope.engine.scheduler import Scheduler, SchedulerConfig

__all__ = ["WhatIf", "copy_scheduler", "restore_scheduler"]

# Changes up to this size are tried one by one; above it the search halves the range.
_TRIED_ONE_BY_ONE = 64


_UNCHANGED = Change()


class WhatIf:
    """Runs the next schedule() of a scheduler under other conditions.

    The scheduler itself is only read. It must stand between two steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def decide(self, change: Change = _UNCHANGED, request_id: str | None = None) -> SchedulerOutput:
        """What schedule() answers under `change`; a position is that of `request_id`."""
        scheduler = copy_scheduler(
            self._scheduler, blocks=change.blocks, tokens=change.tokens, seats=change.seats
        )
        if change.position:
            assert request_id is not None
            _move(scheduler, request_id, change.position)
        return scheduler.schedule()

    def runs(self, request_id: str, change: Change = _UNCHANGED) -> bool:
        """Whether the request gets tokens under `change`."""
        return request_id in self.decide(change, request_id).num_scheduled_tokens

    def least_change(self, request_id: str) -> Change | None:
        """The smallest single change under which the request runs; None when there is none.

        Several kinds may work. The one is given that the scheduler named as the reason, or
        else blocks, tokens, seats, position in this order. Of a kind it is the smallest:
        with one less, and with anything below, the request does not run; of positions the
        one furthest back.
        """
        baseline = self.decide()
        if request_id in baseline.num_scheduled_tokens:
            return _UNCHANGED
        kinds = {
            "blocks": self._least_blocks,
            "tokens": self._least_tokens,
            "seats": self._least_seats,
            "position": self._least_move,
        }
        first = _REMEDY.get(_code_of(baseline, request_id))
        order = [first, *kinds] if first is not None else list(kinds)
        for kind in dict.fromkeys(order):
            change = kinds[kind](request_id)
            if change is not None:
                return change
        return None

    def binding_limits(self, request_id: str) -> tuple[str, str] | None:
        """Two limits that only together keep a request from running; None if more do.

        Of "blocks", "tokens", "seats" and "position".
        """
        most = self._most()
        plenty = {
            "blocks": Change(blocks=most.blocks),
            "tokens": Change(tokens=most.tokens),
            "seats": Change(seats=most.seats),
            "position": Change(position=1 if self._place(request_id) > 1 else 0),
        }
        names = list(plenty)
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                if self.runs(request_id, _both(plenty[one], plenty[other])):
                    return one, other
        return None

    # -- one kind at a time ------------------------------------------------------

    def _least_blocks(self, request_id: str) -> Change | None:
        return self._least(request_id, self._most().blocks, lambda n: Change(blocks=n))

    def _least_tokens(self, request_id: str) -> Change | None:
        return self._least(request_id, self._most().tokens, lambda n: Change(tokens=n))

    def _least_seats(self, request_id: str) -> Change | None:
        return self._least(request_id, self._most().seats, lambda n: Change(seats=n))

    def _least_move(self, request_id: str) -> Change | None:
        place = self._place(request_id)
        for position in range(place - 1, 0, -1):
            change = Change(position=position)
            if self.runs(request_id, change):
                return change
        return None

    def _least(self, request_id: str, most: int, make: Callable[[int], Change]) -> Change | None:
        """The smallest amount from 1 to `most` that works."""
        if most < 1:
            return None
        if not self.runs(request_id, make(most)):
            # More need not be better: it can let somebody in who takes what was missing.
            candidates = _spread(most)
            most = next((n for n in candidates if self.runs(request_id, make(n))), 0)
            if not most:
                return None
        for amount in range(1, min(most, _TRIED_ONE_BY_ONE) + 1):
            if self.runs(request_id, make(amount)):
                return make(amount)
        low, high = _TRIED_ONE_BY_ONE, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.runs(request_id, make(middle)):
                high = middle
            else:
                low = middle
        return make(high)

    def _most(self) -> Change:
        """As much as all live requests together could use; more changes nothing."""
        scheduler = self._scheduler
        size = scheduler.config.block_size
        requests = scheduler.requests.values()
        tokens = sum(max(0, r.num_tokens_with_spec - r.num_computed_tokens) for r in requests)
        slots = scheduler.num_lookahead_tokens + size - 1
        blocks = sum(-(-(r.num_tokens_with_spec + slots) // size) for r in requests)
        return Change(blocks=blocks, tokens=tokens, seats=len(scheduler.waiting))

    def _place(self, request_id: str) -> int:
        """Place in the waiting queue, from 1; 0 for a request that is not in it."""
        for place, request in enumerate(self._scheduler.waiting, start=1):
            if request.request_id == request_id:
                return place
        return 0


# The change that the reason for waiting suggests.
_REMEDY: dict[Code | None, str] = {
    Code.NO_BLOCKS: "blocks",
    Code.PREEMPTED: "blocks",
    Code.PREEMPTED_SELF: "blocks",
    Code.AFTER_PREEMPTION: "blocks",
    Code.AFTER_SELF_PREEMPTION: "blocks",
    Code.BUDGET: "tokens",
    Code.CHUNKING_OFF: "tokens",
    Code.SEATS: "seats",
    Code.BEHIND: "position",
}


def copy_scheduler(
    scheduler: Scheduler, *, blocks: int = 0, tokens: int = 0, seats: int = 0
) -> Scheduler:
    """A scheduler in the same state that can run a step of its own.

    blocks, tokens, seats   how much larger pool, budget and max_num_seqs are. New blocks
                            are empty and handed out first, so that nothing is evicted
                            earlier than without them.
    """
    config = msgspec.structs.replace(
        scheduler.config,
        num_blocks=scheduler.config.num_blocks + blocks,
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens + tokens,
        max_num_seqs=scheduler.config.max_num_seqs + seats,
    )
    made = Scheduler(config)
    requests = {}
    for request_id, request in scheduler.requests.items():
        requests[request_id] = twin = copy.copy(request)
        # schedule() appends to the events and replaces the drafts; it adds no tokens.
        twin.events = []
    made.requests = requests
    made.running = [requests[r.request_id] for r in scheduler.running]
    for request in scheduler.waiting:
        made.waiting.add(requests[request.request_id])
    made._scheduled_before = set(scheduler._scheduled_before)
    made._step = scheduler._step
    _copy_manager(scheduler.kv_cache_manager, made.kv_cache_manager)
    return made


def restore_scheduler(snapshot: EngineSnapshot, ended: Sequence[str] = ()) -> Scheduler:
    """The scheduler of an engine, built from a snapshot of it.

    ended   requests that have left since, in this order; ids it does not know are ignored

    It can schedule its next step and decides as the engine did; it cannot run on, since
    only the short names of blocks are in a snapshot.
    """
    info = snapshot.info
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            enable_prefix_caching=info.enable_prefix_caching,
            enable_chunked_prefill=info.enable_chunked_prefill,
            long_prefill_token_threshold=info.long_prefill_token_threshold,
            policy=info.scheduling_policy,
        )
    )
    hasher = BlockHasher(info.block_size) if info.enable_prefix_caching else None
    for shot in snapshot.requests:
        request = _restore_request(shot, hasher)
        scheduler.requests[request.request_id] = request
        if request.status is RequestStatus.RUNNING:
            scheduler.running.append(request)
        else:
            scheduler.waiting.add(request)
    scheduler._step = snapshot.step
    _restore_pool(snapshot, scheduler.kv_cache_manager)
    scheduler.finish_requests(ended, RequestStatus.FINISHED_ABORTED)
    return scheduler


def _copy_manager(source: KVCacheManager, target: KVCacheManager) -> None:
    target.req_to_blocks = {i: list(blocks) for i, blocks in source.req_to_blocks.items()}
    target.num_cached_block = dict(source.num_cached_block)
    old, new = source.block_pool, target.block_pool
    num_old, num_new = old.num_blocks, new.num_blocks
    new.ref_cnt[:num_old] = old.ref_cnt
    new.block_hash[:num_old] = old.block_hash
    new.stored = dict(old.stored)
    new._blocks_by_hash = {
        name: blocks if isinstance(blocks, int) else dict(blocks)
        for name, blocks in old._blocks_by_hash.items()
    }
    new.free_queue = _queue_of(num_new, [*range(num_old, num_new), *old.free_queue])


def _queue_of(num_blocks: int, block_ids: list[int]) -> FreeQueue:
    queue = FreeQueue(num_blocks)
    for block_id in range(1, num_blocks):
        queue.remove(block_id)
    for block_id in block_ids:
        queue.append(block_id)
    return queue


def _restore_request(shot: RequestSnapshot, hasher: BlockHasher | None) -> Request:
    request = Request(shot.request, hasher)
    for token_id in shot.output_token_ids:
        request.append_output_token_id(token_id)
    # A snapshot names its blocks by the last eight bytes.
    request.block_hashes = [name[-8:] for name in request.block_hashes]
    request.block_hasher = None
    request.status = _STATUS[shot.status]
    request.num_computed_tokens = shot.num_computed_tokens
    # The last known token is computed with the next step, unless that is on its way.
    request.num_output_placeholders = max(0, shot.num_computed_tokens + 1 - request.num_tokens)
    request.num_cached_tokens = shot.num_cached_tokens
    request.num_preemptions = shot.num_preemptions
    request.num_tokens_lost = shot.num_tokens_lost
    return request


_STATUS = {
    "waiting": RequestStatus.WAITING,
    "running": RequestStatus.RUNNING,
    "preempted": RequestStatus.PREEMPTED,
}


def _restore_pool(snapshot: EngineSnapshot, manager: KVCacheManager) -> None:
    pool: BlockPool = manager.block_pool
    for shot in sorted(snapshot.blocks, key=lambda block: block.stored_order):
        pool.ref_cnt[shot.block_id] = len(shot.owners)
        if shot.block_hash is None:
            continue
        name = shot.block_hash.to_bytes(8, "big")
        pool.block_hash[shot.block_id] = name
        pool.stored[shot.block_id] = (shot.stored_by or "", shot.stored_step, shot.token_ids)
        found = pool._blocks_by_hash.get(name)
        if found is None:
            pool._blocks_by_hash[name] = shot.block_id
        elif isinstance(found, int):
            pool._blocks_by_hash[name] = {found: None, shot.block_id: None}
        else:
            found[shot.block_id] = None
    pool.free_queue = _queue_of(pool.num_blocks, list(snapshot.free_queue))
    for request in snapshot.requests:
        if request.block_ids:
            request_id = request.request.request_id
            manager.req_to_blocks[request_id] = list(request.block_ids)
            manager.num_cached_block[request_id] = _num_named(pool, request.block_ids)


def _num_named(pool: BlockPool, block_ids: tuple[int, ...]) -> int:
    """Leading blocks that have their names; names are given from the front on."""
    count = 0
    for block_id in block_ids:
        if pool.block_hash[block_id] is None:
            break
        count += 1
    return count


def _move(scheduler: Scheduler, request_id: str, position: int) -> None:
    """Put a waiting request at a place of the queue, whatever the policy says."""
    others = [r for r in scheduler.waiting if r.request_id != request_id]
    others.insert(position - 1, scheduler.requests[request_id])
    queue = FCFSRequestQueue()
    for request in others:
        queue.add(request)
    scheduler.waiting = queue


def _both(one: Change, other: Change) -> Change:
    return Change(
        blocks=max(one.blocks, other.blocks),
        tokens=max(one.tokens, other.tokens),
        seats=max(one.seats, other.seats),
        position=max(one.position, other.position),
    )


def _code_of(output: SchedulerOutput, request_id: str) -> Code | None:
    decision: Decision
    for decision in output.decisions:
        if decision.request_id == request_id:
            return decision.code
    return None if output.behind is None else output.behind.code


def _spread(most: int) -> Iterator[int]:
    """Some amounts between 1 and `most`, the small ones close together."""
    seen = 0
    amount = 1
    while amount < most:
        yield amount
        seen += 1
        amount += 1 if seen < _TRIED_ONE_BY_ONE else max(1, amount // 8)
