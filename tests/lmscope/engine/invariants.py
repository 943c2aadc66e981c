"""What must hold after every step of a scheduler, whatever was asked of it before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from lmscope.boundary import (
    BlockSnapshot,
    BlockTouched,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    RequestSnapshot,
    SchedulerOutput,
)
from lmscope.decisions import Code, Decision, Outcome
from lmscope.engine.request import RequestStatus
from lmscope.engine.scheduler import Scheduler

__all__ = ["CODES", "check_decisions", "check_hits", "check_pool", "check_stats", "snapshot_of"]

CODES = {
    Outcome.SCHEDULED: {Code.DECODE, Code.PREFILL, Code.PREFILL_CHUNK, Code.RESUMED},
    Outcome.WAITING: {
        Code.NO_BLOCKS,
        Code.BUDGET,
        Code.SEATS,
        Code.AFTER_PREEMPTION,
        Code.CHUNKING_OFF,
        Code.LENGTH_LIMIT,
        Code.IN_FLIGHT,
        Code.AFTER_SELF_PREEMPTION,
        Code.BEHIND,
    },
    Outcome.PREEMPTED: {Code.PREEMPTED, Code.PREEMPTED_SELF},
}

_WORDS = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}


def check_pool(scheduler: Scheduler) -> None:
    """Blocks, names, reference counts, the free queue and the tables tell one story."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    free = list(pool.free_queue)
    holders = Counter(b for blocks in manager.req_to_blocks.values() for b in blocks)
    assert len(free) == len(set(free)) == pool.num_free_blocks, "a block is free twice"
    assert 0 not in {*free, *holders}, "the null block was handed out"
    assert pool.ref_cnt == [holders[i] for i in range(pool.num_blocks)]
    assert set(free) == set(range(1, pool.num_blocks)) - set(holders), "a block is lost"

    named = {i: name for i, name in enumerate(pool.block_hash) if name is not None}
    assert set(pool.stored) == set(named)
    found: dict[int, bytes] = {}
    for name, blocks in pool._blocks_by_hash.items():
        ids = [blocks] if isinstance(blocks, int) else list(blocks)
        assert ids, "a name without a block"
        assert pool.find(name) == ids[0]
        found.update(dict.fromkeys(ids, name))
    assert found == named, "the names and the blocks that carry them differ"

    running = {request.request_id for request in scheduler.running}
    waiting = [request.request_id for request in scheduler.waiting]
    assert len(running) == len(scheduler.running)
    assert not running & set(waiting)
    assert running | set(waiting) == set(scheduler.requests)
    assert len(running) + len(waiting) == len(scheduler.requests)
    assert set(manager.req_to_blocks) <= running, "a request that does not run holds blocks"
    assert set(manager.num_cached_block) <= set(manager.req_to_blocks)
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        _check_table(scheduler, request)
    for request in scheduler.waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert request.num_computed_tokens == 0
    if not scheduler.requests:
        assert manager.usage == 0.0


def _check_table(scheduler, request) -> None:
    pool, size = scheduler.kv_cache_manager.block_pool, scheduler.config.block_size
    blocks = scheduler.kv_cache_manager.req_to_blocks[request.request_id]
    assert len(blocks) == len(set(blocks)), "a block stands twice in a table"
    assert request.num_computed_tokens <= len(blocks) * size, "a token without a block"
    for index, block_id in enumerate(blocks):
        name = pool.block_hash[block_id]
        if name is None:
            continue
        end = (index + 1) * size
        assert end <= request.num_tokens, "a block has a name before its tokens are known"
        assert end <= request.num_computed_tokens, "a block has a name and is not full"
        assert name == request.block_hashes[index]
        assert pool.stored[block_id][2] == tuple(request.all_token_ids[end - size : end])


def check_decisions(
    scheduler: Scheduler,
    output: SchedulerOutput,
    expanded: dict[str, Decision],
    live: Collection[str],
) -> None:
    """Limits, and exactly one true reason for each request that lived when the step began.

    expanded   the decisions after the fold has put one for each in the place of Behind
    """
    config, scheduled = scheduler.config, output.num_scheduled_tokens
    total = sum(scheduled.values())
    assert output.total_num_scheduled_tokens == total <= config.max_num_batched_tokens
    assert len(scheduler.running) <= config.max_num_seqs
    assert all(scheduled.values())

    examined = [d.request_id for d in output.decisions]
    assert len(examined) == len(set(examined)), "two decisions about one request"
    assert set(expanded) == set(live), "a request without a decision, or a decision too many"
    behind = set(live) - set(examined)
    if output.behind is None:
        assert not behind
    else:
        assert output.behind.count == len(behind)
        assert behind <= {request.request_id for request in scheduler.waiting}
    by_outcome: dict[Outcome, list[str]] = {outcome: [] for outcome in Outcome}
    for decision in expanded.values():
        assert decision.code in CODES[decision.outcome]
        by_outcome[decision.outcome].append(decision.request_id)
        _check_reason(scheduler, output, decision, total)
    assert set(by_outcome[Outcome.SCHEDULED]) == set(scheduled)
    assert sorted(by_outcome[Outcome.PREEMPTED]) == sorted(output.preempted_req_ids)
    admitted = {new.req_id for new in output.scheduled_new_reqs}
    admitted.update(output.scheduled_cached_reqs.resumed_req_ids)
    if output.preempted_req_ids:
        assert not admitted, "somebody was admitted in a step that preempted"
    if config.spec_method is None:
        for request in map(scheduler.requests.__getitem__, scheduled):
            # The last token is sampled and not computed.
            most = request.num_prompt_tokens + request.max_tokens - 1
            assert request.num_computed_tokens <= most, "more is computed than can be used"
    threshold = config.long_prefill_token_threshold
    if threshold:
        assert max(scheduled.values(), default=0) <= threshold
    elif not config.enable_chunked_prefill:
        assert all(expanded[i].tokens_left == 0 for i in admitted), "a prompt was cut"


def _check_reason(scheduler, output, decision: Decision, total: int) -> None:
    """The quantities of a decision agree with its code, and with what the step did."""
    config, code = scheduler.config, decision.code
    if decision.outcome is Outcome.SCHEDULED:
        granted = output.num_scheduled_tokens[decision.request_id]
        assert decision.tokens_granted == granted <= decision.budget_left
        assert decision.tokens_left == max(0, decision.tokens_wanted - granted)
        assert decision.tokens_recomputed <= granted
        if code in (Code.PREFILL, Code.PREFILL_CHUNK):
            assert (code is Code.PREFILL_CHUNK) == (decision.tokens_left > 0)
    elif code in (Code.NO_BLOCKS, Code.PREEMPTED, Code.PREEMPTED_SELF):
        assert decision.blocks_needed > decision.blocks_free
        assert (decision.other_id == decision.request_id) == (code is Code.PREEMPTED_SELF)
    elif code is Code.BUDGET:
        assert total == config.max_num_batched_tokens
    elif code is Code.SEATS:
        assert len(scheduler.running) == config.max_num_seqs
    elif code is Code.CHUNKING_OFF:
        assert not config.enable_chunked_prefill
        assert decision.tokens_wanted > decision.budget_left
    elif code in (Code.AFTER_PREEMPTION, Code.AFTER_SELF_PREEMPTION):
        assert output.preempted_req_ids
    elif code is Code.IN_FLIGHT:
        assert config.async_scheduling


def check_hits(output: SchedulerOutput, requests: Mapping[str, EngineCoreRequest]) -> None:
    """A request hits blocks of its own salt only, and none when it must not read them."""
    for event in output.kv_events:
        if isinstance(event, BlockTouched):
            taker, giver = requests[event.request_id], requests[event.stored_by]
            assert taker.cache_salt == giver.cache_salt, "a hit across salts"
            assert not taker.sampling_params.skip_reading_prefix_cache


def check_stats(scheduler: Scheduler, outputs: EngineCoreOutputs) -> None:
    """The counts after a step are those of the scheduler."""
    stats, pool = outputs.scheduler_stats, scheduler.kv_cache_manager.block_pool
    held = {b for blocks in scheduler.kv_cache_manager.req_to_blocks.values() for b in blocks}
    assert stats.num_running_reqs == len(scheduler.running)
    assert stats.num_waiting_reqs == len(scheduler.waiting)
    assert stats.kv_cache_usage == 1.0 - (pool.num_blocks - 1 - len(held)) / (pool.num_blocks - 1)


def snapshot_of(scheduler: Scheduler, info: EngineInfo, step: int) -> EngineSnapshot:
    """The state of a scheduler and of its pool, for comparing a fold with."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    owners: dict[int, list[str]] = {}
    for request_id, blocks in manager.req_to_blocks.items():
        for block_id in blocks:
            owners.setdefault(block_id, []).append(request_id)
    order = {block_id: place for place, block_id in enumerate(pool.stored, start=1)}
    blocks = []
    for block_id in range(1, pool.num_blocks):
        name = pool.block_hash[block_id]
        if name is None and block_id not in owners:
            continue
        stored_by, stored_step, token_ids = pool.stored.get(block_id, (None, 0, ()))
        blocks.append(
            BlockSnapshot(
                block_id,
                tuple(owners.get(block_id, ())),
                None if name is None else int.from_bytes(name[-8:], "big"),
                stored_by,
                stored_step,
                token_ids,
                order.get(block_id, 0),
            )
        )
    return EngineSnapshot(
        info=info,
        step=step,
        blocks=tuple(blocks),
        free_queue=tuple(pool.free_queue),
        requests=tuple(
            RequestSnapshot(
                request=request.core_request,
                status=_WORDS[request.status],
                output_token_ids=request.output_token_ids,
                num_computed_tokens=request.num_computed_tokens,
                num_cached_tokens=request.num_cached_tokens,
                block_ids=tuple(manager.req_to_blocks.get(request.request_id, ())),
                num_preemptions=request.num_preemptions,
                num_tokens_lost=request.num_tokens_lost,
            )
            for request in (*scheduler.running, *scheduler.waiting)
        ),
    )
