"""EngineCore: one engine step after the other, and the boundaries between its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from lmscope.boundary import (
    BlockSnapshot,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    RequestSnapshot,
    SchedulerOutput,
)
from lmscope.config import EngineConfig
from lmscope.engine.prefix_hash import BlockHasher, short_hash
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.scheduler import Scheduler, SchedulerConfig
from lmscope.tap import Tap

__all__ = ["EngineCore", "ModelExecutor"]


class ModelExecutor(Protocol):
    """What runs a step: a model on a device, or a script.

    `execute_model` may keep its result to itself and return None; `sample_tokens` must
    then follow.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None: ...
    def sample_tokens(self) -> ModelRunnerOutput: ...
    def shutdown(self) -> None: ...


class EngineCore:
    """Scheduler and executor, driven step by step by whoever owns it."""

    def __init__(self, config: EngineConfig, executor: ModelExecutor, tap: Tap) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=config.block_size,
                num_blocks=config.num_kv_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                enable_prefix_caching=config.enable_prefix_caching,
                enable_chunked_prefill=config.enable_chunked_prefill,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                policy=config.scheduling_policy,
                async_scheduling=config.async_scheduling,
            )
        )
        self.tap = tap
        self._executor = executor
        self._hasher = BlockHasher(config.block_size) if config.enable_prefix_caching else None
        self._pool = self.scheduler.kv_cache_manager.block_pool

    @property
    def step_number(self) -> int:
        """The last step that was begun; 0 before the first."""
        return self._pool.step

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request that the front end has checked."""
        request = msgspec.structs.replace(request, step=self.step_number, time=time.monotonic())
        # Queued first: what is asked or aborted while somebody holds the engine at this
        # boundary must find the request.
        self.scheduler.add_request(Request(request, self._hasher))
        self.tap(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests without output; unknown and finished ids are ignored."""
        self._pool.record_events = self.tap.is_live
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached content; False while blocks are in use."""
        self._pool.record_events = self.tap.is_live
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def has_work(self) -> bool:
        """Whether a step has anything to do or to report."""
        return self.scheduler.has_requests() or bool(self._pool.events)

    def step(self) -> EngineCoreOutputs:
        """Schedule, run the model, take the tokens in."""
        self._pool.record_events = self.tap.is_live
        scheduler_output = self.scheduler.schedule()
        self.tap(scheduler_output)
        model_output = self._executor.execute_model(scheduler_output)
        if model_output is None:
            model_output = self._executor.sample_tokens()
        self.tap(model_output)
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        self.tap(outputs)
        return outputs

    def snapshot_blocks(self) -> tuple[tuple[BlockSnapshot, ...], tuple[int, ...]]:
        """Blocks that are in use or keep content, and the free queue in order."""
        pool = self._pool
        owners: dict[int, list[str]] = {}
        for request_id, blocks in self.scheduler.kv_cache_manager.req_to_blocks.items():
            for block_id in blocks:
                owners.setdefault(block_id, []).append(request_id)
        snapshots = []
        order = {block_id: place for place, block_id in enumerate(pool.stored, start=1)}
        for block_id in sorted({*owners, *pool.stored}):
            block_hash = pool.block_hash[block_id]
            stored_by, stored_step, token_ids = pool.stored.get(block_id, (None, 0, ()))
            snapshots.append(
                BlockSnapshot(
                    block_id=block_id,
                    owners=tuple(owners.get(block_id, ())),
                    block_hash=None if block_hash is None else short_hash(block_hash),
                    stored_by=stored_by,
                    stored_step=stored_step,
                    token_ids=token_ids,
                    stored_order=order.get(block_id, 0),
                )
            )
        return tuple(snapshots), tuple(pool.free_queue)

    def snapshot_requests(self, text_of: Callable[[str], str]) -> tuple[RequestSnapshot, ...]:
        """Live requests, running ones first; `text_of` gives a request's text so far."""
        manager = self.scheduler.kv_cache_manager
        return tuple(
            RequestSnapshot(
                request=request.core_request,
                status=_STATUS_WORDS[request.status],
                output_token_ids=request.output_token_ids,
                text=text_of(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
                num_cached_tokens=request.num_cached_tokens,
                block_ids=manager.get_block_ids(request.request_id),
                num_preemptions=request.num_preemptions,
                num_tokens_lost=request.num_tokens_lost,
            )
            for request in (*self.scheduler.running, *self.scheduler.waiting)
        )

    def shutdown(self) -> None:
        """Give the executor's memory back."""
        self._executor.shutdown()


_STATUS_WORDS = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}
