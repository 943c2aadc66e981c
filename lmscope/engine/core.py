"""EngineCore: one engine step after the other, and the boundaries between its parts.

A step is scheduled, run and taken in, and three structs cross the tap on the way. Without
async scheduling one step is over before the next begins:

    SchedulerOutput 1   ModelRunnerOutput 1   EngineCoreOutputs 1   SchedulerOutput 2   ...

With it the next step is scheduled and handed over while the device still runs the one before,
always one ahead and never two:

    SchedulerOutput 1
    SchedulerOutput 2   ModelRunnerOutput 1   EngineCoreOutputs 1
    SchedulerOutput 3   ModelRunnerOutput 2   EngineCoreOutputs 2   ...

Each struct carries the step that it belongs to, and all of them cross the tap on the engine
thread, in this order, which no timing changes. A step is handed to the device when the tap has
let its SchedulerOutput go. docs/decisions/async_scheduling.md says more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from lmscope.execute.device_thread import DeviceThread
from lmscope.tap import Tap

__all__ = ["EngineCore", "ModelExecutor"]


class OnItsWay(Protocol):
    """The output of a step that a device has been given, and may be running."""

    def wait(self) -> None: ...
    def get_output(self) -> ModelRunnerOutput: ...


class ModelExecutor(Protocol):
    """What runs a step: a model on a device, or a script.

    `execute_model` may keep its result to itself and return None; `sample_tokens` must
    then follow. With async scheduling both are called on a thread that is theirs, for one
    step after the other, and a SchedulerOutput may come before the tokens of the step before
    are known outside: who runs the steps has sampled them and knows them. What `sample_tokens`
    returns may still be on its way from a device; `get_output` waits for it.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None: ...
    def sample_tokens(self) -> ModelRunnerOutput | OnItsWay: ...
    def shutdown(self) -> None: ...


# The batches that are scheduled and not taken in, with async scheduling.
_MOST_IN_FLIGHT = 2


@dataclass(slots=True)
class _Batch:
    """A step that the device has or will have run.

    ended_ids   requests of it that are over, and whose ids have come again since
    """

    scheduler_output: SchedulerOutput
    result: Future[ModelRunnerOutput | OnItsWay]
    ended_ids: set[str] = field(default_factory=set)


class EngineCore:
    """Scheduler and executor, driven step by step by whoever owns it.

    prepare_device   with async scheduling called first on the thread that runs the batches,
                     for settings that are per thread
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: ModelExecutor,
        tap: Tap,
        prepare_device: Callable[[], None] = lambda: None,
    ) -> None:
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
        # Oldest first; empty between two steps without async scheduling.
        self._batches: deque[_Batch] = deque()
        self._device: DeviceThread | None = None
        if config.async_scheduling:
            self._device = DeviceThread("lmscope-device", prepare_device)

    @property
    def step_number(self) -> int:
        """The last step that was begun; 0 before the first."""
        return self._pool.step

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request that the front end has checked."""
        for batch in self._batches:
            if request.request_id in batch.scheduler_output.num_scheduled_tokens:
                # Only an id that is over can come again: what is on its way was meant for
                # the request that had it before.
                batch.ended_ids.add(request.request_id)
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
        """Forget all cached content; False while blocks are in use.

        Not while a batch is in flight: `finish_step` until none is.
        """
        assert not self._batches, "a batch in flight would write what is forgotten here"
        self._pool.record_events = self.tap.is_live
        return self.scheduler.reset_prefix_cache(reset_running_requests, is_any_in_flight=False)

    def has_work(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._batches) or self._has_something_to_schedule()

    @property
    def steps_in_flight(self) -> tuple[int, ...]:
        """Steps that are scheduled, and whose tokens are not taken in, oldest first."""
        return tuple(batch.scheduler_output.step for batch in self._batches)

    def step(self) -> EngineCoreOutputs | None:
        """Schedule a step, run the model, take the tokens in.

        With async scheduling what is taken in is the step before the one that is scheduled;
        None when there is none yet.
        """
        if self._device is None:
            scheduler_output = self._schedule()
            model_output = _landed(self._run(scheduler_output))
            self.tap(model_output)
            return self._take_in(scheduler_output, model_output)
        if self._has_something_to_schedule():
            scheduler_output = self._schedule()
            result = self._device.submit(lambda: self._run(scheduler_output))
            self._batches.append(_Batch(scheduler_output, result))
            if len(self._batches) < _MOST_IN_FLIGHT:
                return None
        return self.finish_step()

    def finish_step(self) -> EngineCoreOutputs:
        """Wait for the oldest batch in flight and take its tokens in."""
        batch = self._batches[0]
        model_output = _landed(batch.result.result())
        self.tap(model_output)
        self._batches.popleft()
        scheduler_output = batch.scheduler_output
        if batch.ended_ids:
            scheduled = scheduler_output.num_scheduled_tokens
            scheduler_output = msgspec.structs.replace(
                scheduler_output,
                num_scheduled_tokens={
                    request_id: num_tokens
                    for request_id, num_tokens in scheduled.items()
                    if request_id not in batch.ended_ids
                },
            )
        return self._take_in(scheduler_output, model_output)

    def wait_for_device(self) -> tuple[int, ...]:
        """Wait until the device has run all it was given; returns `steps_in_flight`.

        Nothing is taken in, and a batch that failed says so only when it is.
        """
        wait([batch.result for batch in self._batches])
        for batch in self._batches:
            if not batch.result.cancelled() and batch.result.exception() is None:
                result = batch.result.result()
                if not isinstance(result, ModelRunnerOutput):
                    result.wait()
        return self.steps_in_flight

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

    def call_worker(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, between two steps, and return what it gives.

        ValueError when there is none, as behind a script.
        """
        collective_rpc = getattr(self._executor, "collective_rpc", None)
        if collective_rpc is None:
            raise ValueError(
                "this engine runs a script and no model, so there is no attention; use "
                "execute='model'"
            )
        if self._device is None:
            return collective_rpc(method, args=args)[0]
        # The worker belongs to that thread, and is asked behind what it was given to run.
        return self._device.submit(lambda: collective_rpc(method, args=args)[0]).result()

    def shutdown(self) -> None:
        """Give the executor's memory back, after the batch that the device is running."""
        if self._device is not None:
            self._device.close()
        self._batches.clear()
        self._executor.shutdown()

    def _has_something_to_schedule(self) -> bool:
        return self.scheduler.has_requests() or bool(self._pool.events)

    def _schedule(self) -> SchedulerOutput:
        self._pool.record_events = self.tap.is_live
        scheduler_output = self.scheduler.schedule()
        self.tap(scheduler_output)
        return scheduler_output

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | OnItsWay:
        model_output = self._executor.execute_model(scheduler_output)
        return self._executor.sample_tokens() if model_output is None else model_output

    def _take_in(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        self.tap(outputs)
        return outputs


def _landed(result: ModelRunnerOutput | OnItsWay) -> ModelRunnerOutput:
    return result if isinstance(result, ModelRunnerOutput) else result.get_output()


_STATUS_WORDS = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}
