"""Scheduler: which requests run in the next step, with how many tokens, in which blocks.

There is no prefill phase and no decode phase. A request has known tokens and computed
tokens, and each step gives it some tokens so that the second number catches up with the
first. It decides what vLLM 0.16 decides, block id for block id; beside that it writes down
for each request why.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from lmscope.boundary import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    SpecDecodingStats,
)
from lmscope.decisions import Behind, Code, Decision, Outcome
from lmscope.engine.kv_cache_manager import KVCacheManager
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.request_queue import make_request_queue
from lmscope.engine.step import DecodeRow, Step

__all__ = ["Scheduler", "SchedulerConfig"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler needs to know; names and meaning are vLLM's.

    num_blocks                     block 0 included
    long_prefill_token_threshold   most tokens of one request in one step; 0: no such limit
    policy                         "fcfs" or "priority"
    spec_method                    None, "ngram", "eagle" or "draft_model"
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    async_scheduling: bool = False
    spec_method: str | None = None
    num_speculative_tokens: int = 0


class Scheduler:
    """Decides each step; owns all live requests and, through its manager, all blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.kv_cache_manager = KVCacheManager(
            config.num_blocks,
            config.block_size,
            config.max_model_len,
            enable_caching=config.enable_prefix_caching,
            drop_last_hit=config.spec_method == "eagle",
        )
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.policy)
        self.running: list[Request] = []
        # n-gram drafts come from the known tokens and need no slots of their own
        drafts_need_slots = config.spec_method in ("eagle", "draft_model")
        self.num_lookahead_tokens = config.num_speculative_tokens if drafts_need_slots else 0
        self._only_plain_decodes = not config.async_scheduling and not self.num_lookahead_tokens
        self._last_row: DecodeRow | None = None
        self._finished_req_ids: list[str] = []
        self._scheduled_before: Collection[str] = frozenset()
        self._step = 0

    # -- requests come and go ----------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.add(request)
        request.record_event(EngineCoreEventType.QUEUED, time.monotonic())

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests from outside, such as an abort. Unknown and finished ids are ignored.

        They produce no output; their ids are in the next SchedulerOutput.
        """
        requests = [
            self.requests[request_id]
            for request_id in dict.fromkeys(request_ids)
            if request_id in self.requests
        ]
        running = {id(r) for r in requests if r.status is RequestStatus.RUNNING}
        waiting = [r for r in requests if r.status is not RequestStatus.RUNNING]
        if running:
            self.running = [r for r in self.running if id(r) not in running]
        if waiting:
            self.waiting.remove_all(waiting)
        for request in requests:
            request.status = status
            self._free_request(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def has_requests(self) -> bool:
        """Whether a step has anything to do, the report of finished requests included."""
        return self.has_unfinished_requests() or bool(self._finished_req_ids)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *, is_any_in_flight: bool = True
    ) -> bool:
        """Forget all cached content. False, and nothing happens, while blocks are in use.

        With reset_running_requests all running requests are preempted first; they compute
        everything again.

        is_any_in_flight   whether a batch may be on its way, with async scheduling. As in
                           vLLM the next token of each running request is then thrown away,
                           also that of one which has none on its way, and so a good one
        """
        if reset_running_requests:
            now = time.monotonic()
            while self.running:  # from the end, so that the queue keeps their order
                request = self.running.pop()
                self._preempt(request, now)
                request.num_output_placeholders = 0
                # a batch in flight holds a token that must not be used any more
                request.discard_latest_async_tokens = (
                    self.config.async_scheduling and is_any_in_flight
                )
            self._scheduled_before = frozenset()
        return self.kv_cache_manager.reset_prefix_cache()

    # -- schedule ----------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide one step: first the running requests, in their order, then admissions."""
        self._step += 1
        self.kv_cache_manager.block_pool.step = self._step
        now = time.monotonic()
        step = Step(self.config.max_num_batched_tokens, self._last_row)
        self._schedule_running(step, now)
        if step.preempted:
            self._keep_waiting(
                step,
                Code.AFTER_PREEMPTION,
                step.preempted[0].request_id,
                num_examined=len(step.preempted),
            )
        else:
            self._schedule_waiting(step, now)
        assert step.token_budget >= 0
        assert len(self.running) <= self.config.max_num_seqs
        output = self._make_output(step, now)
        self._last_row = step.first_row
        self._advance(step)
        return output

    def _schedule_running(self, step: Step, now: float) -> None:
        config = self.config
        running = self.running
        index = 0
        while (index := self._schedule_decodes(step, index)) < len(running):
            request = running[index]
            request_id = request.request_id
            if step.token_budget == 0:
                self._refuse_rest(step, index, Code.BUDGET)
                return
            placeholders = request.num_output_placeholders
            computed = request.num_computed_tokens
            if placeholders and (
                computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
            ):
                # Even if every draft in flight is rejected, max_tokens will be reached.
                step.decide(Decision(request_id, Outcome.WAITING, Code.IN_FLIGHT), request)
                index += 1
                continue

            wanted = request.num_tokens_with_spec + placeholders - computed
            num_tokens = wanted
            if 0 < config.long_prefill_token_threshold < num_tokens:
                num_tokens = config.long_prefill_token_threshold
            num_tokens = min(num_tokens, step.token_budget, self.max_model_len - 1 - computed)
            if num_tokens <= 0:
                # A request without work keeps its place; later ones may overtake it.
                code = Code.LENGTH_LIMIT if wanted > 0 else Code.IN_FLIGHT
                step.decide(
                    Decision(request_id, Outcome.WAITING, code, tokens_wanted=wanted), request
                )
                index += 1
                continue

            blocks, index = self._allocate_or_preempt(step, request, num_tokens, index, now)
            if blocks is None:
                self._refuse_rest(step, index, Code.AFTER_SELF_PREEMPTION, request_id)
                return
            step.decide_granted(request, wanted, num_tokens)
            step.running.append(request)
            step.grant(request, num_tokens, blocks)
            self._schedule_drafts(step, request, num_tokens)
            index += 1

    def _schedule_decodes(self, step: Step, index: int) -> int:
        """Grant a token each to the running requests from `index` on that only decode.

        That is what most requests do in most steps, so it has a short way of its own; the long
        one, which the first of the others takes, would decide the same. Returns its index.
        """
        running = self.running
        first, end = index, min(len(running), index + step.token_budget)
        while index < end:
            request = running[index]
            computed = request.num_computed_tokens
            if len(request.all_token_ids) - computed != 1:
                break
            if computed >= request.steady_until and not self._make_steady(step, request):
                break
            index += 1
        if index > first:
            step.grant_decodes(running[first:index])
        return index

    def _make_steady(self, step: Step, request: Request) -> bool:
        """Find a decode the slots up to the end of its block; False if it needs a closer look.

        Blocks and their names change only where a block begins and where it gets full.
        """
        computed, size = request.num_computed_tokens, self.config.block_size
        if (
            self._only_plain_decodes
            and not request.spec_token_ids
            and not request.num_tokens_lost
            and not request.is_prefill_chunk
            and computed >= request.num_prompt_tokens
            and computed < self.max_model_len - 1
        ):
            blocks = self.kv_cache_manager.allocate_slots(request, 1)
            if blocks is not None:
                if blocks:
                    step.new_blocks[request.request_id] = tuple(blocks)
                end_of_block = (computed // size + 1) * size
                request.steady_until = min(end_of_block, self.max_model_len) - 1
                return True
        return False

    def _allocate_or_preempt(
        self, step: Step, request: Request, num_tokens: int, index: int, now: float
    ) -> tuple[list[int] | None, int]:
        """Blocks for a running request, taken from others if need be.

        Returns the new blocks (None: the request had to give up its own) and the index of
        the request, which moves when a victim stood before it.
        """
        manager = self.kv_cache_manager
        while True:
            blocks = manager.allocate_slots(
                request, num_tokens, num_lookahead_tokens=self.num_lookahead_tokens
            )
            if blocks is not None:
                return blocks, index
            needed, free = manager.blocks_needed, manager.block_pool.num_free_blocks
            was_examined = False
            if self.config.policy == "priority":
                position = _least_important(self.running)
                victim = self.running.pop(position)
                was_examined = position < index
                if victim.request_id in step.num_scheduled_tokens:
                    step.take_back(victim)
                    # Named when they were handed out, and not going to be computed now.
                    # vLLM 0.16 keeps the names, and a later hit reads what was never written.
                    manager.forget_uncomputed(victim)
                if was_examined:
                    index -= 1
            else:
                victim = self.running.pop()
            tokens_lost = victim.num_computed_tokens
            blocks_lost = self._preempt(victim, now)
            step.preempted.append(victim)
            step.decide(
                Decision(
                    victim.request_id,
                    Outcome.PREEMPTED,
                    Code.PREEMPTED_SELF if victim is request else Code.PREEMPTED,
                    blocks_needed=needed,
                    blocks_free=free,
                    other_id=request.request_id,
                    blocks_lost=blocks_lost,
                    tokens_lost=tokens_lost,
                ),
                victim,
                was_examined,
            )
            if victim is request:
                return None, index

    def _schedule_drafts(self, step: Step, request: Request, num_tokens: int) -> None:
        if not request.spec_token_ids:
            return
        num_drafts = (
            num_tokens
            + request.num_computed_tokens
            - request.num_tokens
            - request.num_output_placeholders
        )
        if num_drafts > 0:
            step.spec_decode_tokens[request.request_id] = tuple(request.spec_token_ids[:num_drafts])
        request.spec_token_ids = []

    def _schedule_waiting(self, step: Step, now: float) -> None:
        config = self.config
        manager = self.kv_cache_manager
        while self.waiting:
            request = self.waiting.peek()
            if step.token_budget == 0:
                self._refuse_head(step, request, Code.BUDGET)
                return
            if len(self.running) == config.max_num_seqs:
                self._refuse_head(step, request, Code.SEATS)
                return

            hit_blocks, num_hits = manager.get_computed_blocks(request)
            wanted = request.num_tokens - num_hits
            num_tokens = wanted
            if 0 < config.long_prefill_token_threshold < num_tokens:
                num_tokens = config.long_prefill_token_threshold
            if not config.enable_chunked_prefill and num_tokens > step.token_budget:
                self._refuse_head(step, request, Code.CHUNKING_OFF, wanted)
                return
            num_tokens = min(num_tokens, step.token_budget)
            blocks = manager.allocate_slots(request, num_tokens, num_hits, hit_blocks)
            if blocks is None:
                self._refuse_head(step, request, Code.NO_BLOCKS, wanted)
                return

            self.waiting.pop()
            self.running.append(request)
            request.record_event(EngineCoreEventType.SCHEDULED, now)
            is_new = request.status is RequestStatus.WAITING
            (step.new if is_new else step.resumed).append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_hits
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_hits
            step.decide_granted(request, wanted, num_tokens, num_hits, is_resumed=not is_new)
            step.grant(request, num_tokens, manager.get_block_ids(request.request_id))

    # -- why not -----------------------------------------------------------

    def _refuse_rest(self, step: Step, index: int, code: Code, other_id: str | None = None) -> None:
        """The running requests from `index` on get nothing in this step.

        other_id   because of whom; unless given, of the one that took most of the budget
        """
        amount = 0
        if other_id is None:
            other_id, amount = _largest(step.num_scheduled_tokens)
        for request in self.running[index:]:
            wanted = request.num_tokens_with_spec - request.num_computed_tokens
            step.decide(
                Decision(
                    request.request_id,
                    Outcome.WAITING,
                    code,
                    tokens_wanted=wanted,
                    tokens_left=wanted,
                    other_id=other_id,
                    other_amount=amount,
                ),
                request,
            )

    def _refuse_head(
        self, step: Step, request: Request, code: Code, wanted: int | None = None
    ) -> None:
        """The head of the waiting queue is not admitted, nor is anyone behind it."""
        manager = self.kv_cache_manager
        needed = 0
        if code is Code.NO_BLOCKS:
            needed = manager.blocks_needed
            other_id, amount = manager.largest_holder()
        elif code is Code.SEATS:
            other_id, amount = None, len(self.running)
        else:
            other_id, amount = _largest(step.num_scheduled_tokens)
        if wanted is None:
            wanted = request.num_tokens
        step.decide(
            Decision(
                request.request_id,
                Outcome.WAITING,
                code,
                tokens_wanted=wanted,
                tokens_left=wanted,
                budget_left=step.token_budget,
                blocks_needed=needed,
                blocks_free=manager.block_pool.num_free_blocks,
                other_id=other_id,
                other_amount=amount,
            ),
            request,
        )
        self._keep_waiting(step, Code.BEHIND, request.request_id, num_examined=1)

    def _keep_waiting(self, step: Step, code: Code, other_id: str, num_examined: int) -> None:
        """Cover everyone in the waiting queue but those who have a decision of their own."""
        num_covered = len(self.waiting) - num_examined
        if num_covered > 0:
            step.behind = Behind(
                self.waiting.peek().request_id,
                self.waiting.peek_last().request_id,
                num_covered,
                code,
                other_id,
            )

    # -- the output of a step ----------------------------------------------

    def _make_output(self, step: Step, now: float) -> SchedulerOutput:
        manager = self.kv_cache_manager
        num_common = (
            manager.num_common_prefix_blocks(self.running[0].request_id) if self.running else 0
        )
        output = SchedulerOutput(
            step=self._step,
            time=now,
            scheduled_new_reqs=step.new_requests(),
            scheduled_cached_reqs=step.cached_requests(self._scheduled_before),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(step.num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens=step.spec_decode_tokens,
            num_common_prefix_blocks=(num_common,),
            finished_req_ids=tuple(self._finished_req_ids),
            preempted_req_ids=tuple(r.request_id for r in step.preempted),
            decisions=tuple(step.decisions),
            behind=step.behind,
            kv_events=manager.block_pool.take_events(),
        )
        self._scheduled_before = step.num_scheduled_tokens
        self._finished_req_ids = []
        return output

    def _advance(self, step: Step) -> None:
        """Count the scheduled tokens as computed, so that the next step can be scheduled.

        With async scheduling a request that will produce a token gets a placeholder for
        it, and for each draft, until the model's answer arrives.
        """
        for request in step.decodes:
            request.num_computed_tokens += 1
        drafts = [-1] * self.config.num_speculative_tokens
        for request in step.others:
            request.num_computed_tokens += step.num_scheduled_tokens[request.request_id]
            request.steady_until = 0
            if request.num_computed_tokens >= request.num_tokens_lost:
                request.num_tokens_lost = 0
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
            if self.config.async_scheduling and not request.is_prefill_chunk:
                num_drafts = len(step.spec_decode_tokens.get(request.request_id, ()))
                request.num_output_placeholders += 1 + num_drafts
                request.spec_token_ids = list(drafts)

    # -- the model's answer --------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take the sampled tokens in, end what is finished, and say what is new.

        Requests that were aborted meanwhile are ignored. A prefill that is not finished
        produces no output.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        # The runner may keep an order of its own; usually it is the scheduler's.
        has_same_order = model_runner_output.req_ids == tuple(scheduled)
        rows = None if has_same_order else model_runner_output.req_id_to_index
        sampled = model_runner_output.sampled_token_ids
        logprobs, errors = model_runner_output.logprobs, model_runner_output.errors
        prompt_logprobs = model_runner_output.prompt_logprobs_dict
        drafts = scheduler_output.scheduled_spec_decode_tokens
        spec_stats = _SpecStats(self.config.num_speculative_tokens)
        outputs: list[EngineCoreOutput] = []
        stopped: list[tuple[Request, RequestStatus]] = []

        for row, request_id in enumerate(scheduled):
            request = self.requests.get(request_id)
            if request is None:  # finished while the model ran
                continue
            if rows is not None:
                row = rows[request_id]
            generated = sampled[row] if sampled else ()
            if generated and request_id in drafts:
                num_drafts = len(drafts[request_id])
                self._reject_drafts(request, num_drafts - (len(generated) - 1))
                spec_stats.record(num_drafts, len(generated) - 1)

            status_before = request.status
            kept: tuple[int, ...] = ()
            if request_id in errors:
                request.status = RequestStatus.FINISHED_ERROR
                request.stop_reason = errors[request_id]
                # What made its logits meaningless may be in the blocks that it filled.
                self.kv_cache_manager.forget_stored(request_id)
            else:
                kept = self._append_tokens(request, generated)
            finish_reason = None
            if request.status is not status_before:
                finish_reason = request.status.finish_reason
                stopped.append((request, status_before))
                self._free_request(request)
            elif not kept:
                continue
            new_logprobs = logprobs[row] if logprobs is not None and kept else None
            if new_logprobs is not None and len(kept) < len(generated):
                new_logprobs = type(new_logprobs)(
                    new_logprobs.logprob_token_ids[: len(kept)],
                    new_logprobs.logprobs[: len(kept)],
                    new_logprobs.sampled_token_ranks[: len(kept)],
                )
            outputs.append(
                EngineCoreOutput(
                    request_id,
                    kept,
                    new_logprobs,
                    prompt_logprobs.get(request_id) if prompt_logprobs else None,
                    finish_reason,
                    request.stop_reason,
                    request.take_events() if request.events else (),
                    request.num_cached_tokens,
                )
            )

        self._remove_stopped(stopped)
        return EngineCoreOutputs(
            step=scheduler_output.step,
            time=time.monotonic(),
            outputs=tuple(outputs),
            scheduler_stats=SchedulerStats(
                num_running_reqs=len(self.running),
                num_waiting_reqs=len(self.waiting),
                kv_cache_usage=self.kv_cache_manager.usage,
                prefix_cache_stats=self.kv_cache_manager.take_prefix_cache_stats(),
                spec_decoding_stats=spec_stats.result(),
            ),
            kv_events=self.kv_cache_manager.block_pool.take_events(),
        )

    def update_draft_token_ids(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Set the drafts for the next step; of unfinished prefills and unknown ids: none."""
        for request_id, drafts in draft_token_ids.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.spec_token_ids = [] if request.is_prefill_chunk else list(drafts)
            request.steady_until = 0

    def _reject_drafts(self, request: Request, num_rejected: int) -> None:
        """Take back what was counted for drafts that the model did not accept."""
        # The counters of a request that was preempted by force start anew; drafts of a batch
        # from before are not in them.
        if not request.discard_latest_async_tokens:
            if request.num_computed_tokens > 0:
                request.num_computed_tokens -= num_rejected
            if request.num_output_placeholders > 0:
                request.num_output_placeholders -= num_rejected

    def _append_tokens(self, request: Request, generated: Sequence[int]) -> tuple[int, ...]:
        """Append sampled tokens one by one up to a stop; returns those that were kept."""
        if not generated:
            return ()
        if request.discard_latest_async_tokens:
            # They belong to a batch that ran before a forced preemption. As in vLLM the
            # mark goes with the next token, even if that batch brought none.
            request.discard_latest_async_tokens = False
            return ()
        is_async = self.config.async_scheduling
        was_running = is_async and request.status is RequestStatus.RUNNING
        kept = tuple(generated)
        for count, token_id in enumerate(generated, start=1):
            request.append_output_token_id(token_id)
            if request.check_stop(self.max_model_len):
                kept = kept[:count]
                break
        if is_async:
            request.num_output_placeholders -= len(kept)
            if was_running:
                self.kv_cache_manager.cache_blocks(
                    request, request.num_computed_tokens - request.num_output_placeholders
                )
        return kept

    def _remove_stopped(self, stopped: list[tuple[Request, RequestStatus]]) -> None:
        running = {id(r) for r, before in stopped if before is RequestStatus.RUNNING}
        if running:
            self.running = [r for r in self.running if id(r) not in running]
        waiting = [r for r, before in stopped if before is not RequestStatus.RUNNING]
        if waiting:
            self.waiting.remove_all(waiting)

    # -- shared by the above -------------------------------------------------

    def _preempt(self, request: Request, now: float) -> int:
        """Take all blocks from a running request and queue it again; returns how many.

        Its tokens stay. Nothing is swapped out: coming back means computing again what
        the prefix cache does not have any more.
        """
        assert request.status is RequestStatus.RUNNING
        num_blocks = self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        # Preempted again before it had caught up, it still lost what it lost before.
        request.num_tokens_lost = max(request.num_tokens_lost, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED, now)
        self.waiting.prepend(request)
        return num_blocks

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)


class _SpecStats:
    """Counts drafts and how many of them were accepted, by position."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._counts = [0, 0, 0]
        self._per_position = [0] * num_spec_tokens

    def record(self, num_drafts: int, num_accepted: int) -> None:
        self._counts[0] += 1
        self._counts[1] += num_drafts
        self._counts[2] += num_accepted
        for position in range(num_accepted):
            self._per_position[position] += 1

    def result(self) -> SpecDecodingStats | None:
        if not self._counts[0]:
            return None
        num_drafts, num_draft_tokens, num_accepted_tokens = self._counts
        return SpecDecodingStats(
            num_spec_tokens=len(self._per_position),
            num_drafts=num_drafts,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(self._per_position),
        )


def _least_important(running: Sequence[Request]) -> int:
    """Position of the request with the largest (priority, arrival); of equals the first."""
    return max(
        range(len(running)), key=lambda i: (running[i].priority, running[i].arrival_time, -i)
    )


def _largest(amounts: Mapping[str, int]) -> tuple[str | None, int]:
    if not amounts:
        return None, 0
    request_id = max(amounts, key=amounts.__getitem__)
    return request_id, amounts[request_id]
