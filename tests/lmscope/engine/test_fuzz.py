"""Random lives of a scheduler, on a worker that checks each key it reads; no torch.

Two state machines. `SchedulerMachine` drives a Scheduler by itself, with drafts and with two
batches in flight; `EngineMachine` drives an EngineCore with taps, stop strings and readers
that come and go. After every step the invariants hold, the fold of the stream equals the
engine, and no struct that was emitted before has changed. When nobody adds requests any more,
each of them ends within a bound.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lmscope.boundary import EngineCoreRequest, EngineInfo, EngineSnapshot, encode
from lmscope.engine.prefix_hash import BlockHasher
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.scheduler import Scheduler, SchedulerConfig
from lmscope.sampling_params import SamplingParams
from lmscope.scope.view import EngineView, differences

sys.path.insert(0, str(Path(__file__).parent))
import invariants
from scripted_worker import ScriptedWorker, names_of

# `make fuzz` draws forty times as many.
NUM_SEQUENCES = 20_000 if settings.get_current_profile_name() == "fuzz" else 500

MOST_LIVE = 12
EOS, STOP = 0, 1
# Prompts begin with a part of this, so that many share blocks and some differ late.
SHARED = tuple(2 + (i * i + i // 3) % 5 for i in range(60))


def token_at(seed: int, position: int) -> int:
    """What the model says: one token in eight ends a text, one is a stop token."""
    return (seed * 2_654_435_761 + position * 40_503 + (seed * position) % 97) // 7 % 8


class Books:
    """Each request that was ever added, and what must come out of it."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.requests: dict[str, EngineCoreRequest] = {}
        self.seeds: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, object]] = {}
        self.reported: list[str] = []
        self._names: dict[str, list[int]] = {}

    def script(self, request_id: str, position: int) -> int:
        return token_at(self.seeds[request_id], position)

    def draft(self, request_id: str, position: int, num_drafts: int) -> tuple[int, ...]:
        """Proposals, of which the first few are right."""
        seed = self.seeds[request_id]
        num_right = (seed + position) % (num_drafts + 1)
        return tuple(
            token_at(seed, position + i) + (0 if i < num_right else 9) for i in range(num_drafts)
        )

    def names(self, request_id: str) -> list[int]:
        """The content of its blocks when it has run to its end."""
        if request_id not in self._names:
            prompt = self.requests[request_id].prompt_token_ids
            self._names[request_id] = names_of((*prompt, *self.expected(request_id)[0]))
        return self._names[request_id]

    def most_outputs(self, request_id: str) -> int:
        request = self.requests[request_id]
        room = self.max_model_len - len(request.prompt_token_ids)
        return min(request.sampling_params.max_tokens, room)

    def expected(self, request_id: str) -> tuple[list[int], tuple[str, object]]:
        """The tokens of a request that runs alone and undisturbed, and how it ends."""
        params = self.requests[request_id].sampling_params
        tokens: list[int] = []
        while True:
            tokens.append(self.script(request_id, len(tokens)))
            if len(tokens) < params.min_tokens:
                continue
            if tokens[-1] == EOS and not params.ignore_eos:
                return tokens, ("stop", None)
            if tokens[-1] in params.stop_token_ids:
                return tokens, ("stop", tokens[-1])
            if len(tokens) == self.most_outputs(request_id):
                return tokens, ("length", None)


@st.composite
def scheduler_configs(draw) -> SchedulerConfig:
    """Small pools, all policies, with and without drafts and two batches in flight.

    Half of them are a crowd: several requests read their prompts side by side, piece by
    piece, in a pool that holds few of them.
    """
    is_crowd = draw(st.booleans())
    block_size = draw(st.sampled_from([1, 2] if is_crowd else [1, 2, 3, 4, 8, 16]))
    num_usable = draw(st.integers(6 if is_crowd else 2, 12))
    spec_method = draw(st.sampled_from([None, None, "ngram", "eagle", "draft_model"]))
    max_model_len = draw(st.integers(4, 80))
    if spec_method:
        # Drafts, and what their method looks ahead, need slots beyond those of the tokens.
        max_model_len = min(max_model_len, num_usable * block_size)
    enable_chunked_prefill = draw(st.sampled_from([True, True, False]))
    budget = draw(st.sampled_from([8, 16] if is_crowd else [1, 2, 3, 5, 8, 16, 64]))
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=num_usable + 1,
        max_num_seqs=draw(st.integers(3 if is_crowd else 1, 6)),
        # Without chunking a budget below the longest request would be refused in front.
        max_num_batched_tokens=budget if enable_chunked_prefill else max(budget, max_model_len),
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=draw(st.sampled_from([2, 3, 5] if is_crowd else [0, 0, 1, 7])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        async_scheduling=draw(st.booleans()),
        spec_method=spec_method,
        num_speculative_tokens=draw(st.integers(1, 4)) if spec_method else 0,
    )


class Plan(NamedTuple):
    """What hypothesis draws of a request; the rest depends on the pool."""

    num_shared: int
    tail: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    seed: int
    priority: int
    salt: str | None
    flag: str
    # which earlier request it continues, as the next turn of a conversation
    after: int | None


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        num_shared=st.integers(0, 50),
        tail=st.tuples(st.integers(2, 4), st.integers(2, 4)),
        max_tokens=st.integers(1, 16),
        min_tokens=st.sampled_from([0, 0, 0, 2, 5]),
        seed=st.integers(0, 5),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "x", "y"]),
        flag=st.sampled_from(["", "", "", "ignore_eos", "stop", "skip_reading"]),
        after=st.sampled_from([None, None, None, 0, 1, 5]),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler by itself."""

    @initialize(config=scheduler_configs())
    def begin(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.scheduler.kv_cache_manager.block_pool.record_events = True
        self.hasher = BlockHasher(config.block_size) if config.enable_prefix_caching else None
        self.books = Books(config.max_model_len)
        self.worker = ScriptedWorker(config.block_size, self.books.script, self.books.draft)
        self.info = EngineInfo(
            model="scripted",
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.policy,
        )
        free_queue = tuple(range(1, config.num_blocks))
        self.view = EngineView(EngineSnapshot(info=self.info, free_queue=free_queue))
        self.stream: list[tuple[object, bytes]] = []
        # batches on their way: what was scheduled, and the worker's answer
        self.batches: deque = deque()
        self.aborted_meanwhile = False
        self.num_turns = 0

    # -- what can happen ----------------------------------------------------------------

    @precondition(lambda self: len(self.scheduler.requests) < MOST_LIVE)
    @rule(plans=st.lists(plans(), min_size=1, max_size=3))
    def add(self, plans: list[Plan]) -> None:
        for plan in plans:
            self._add(plan)

    @rule(num_turns=st.integers(1, 6), is_slow=st.booleans())
    def run(self, num_turns: int, is_slow: bool) -> None:
        for _ in range(num_turns):
            self._turn(is_slow)

    @precondition(lambda self: self.scheduler.requests)
    @rule(
        trouble=st.sampled_from(
            ["run", "abort", "abort", "abort mid-step", "reset", "forced reset"]
        ),
        which=st.integers(0, 9),
        is_slow=st.booleans(),
    )
    def disturb(self, trouble: str, which: int, is_slow: bool) -> None:
        victim = list(self.scheduler.requests)[which % len(self.scheduler.requests)]
        if trouble == "abort":
            self._abort(victim)
        elif "reset" in trouble:
            self._reset(is_forced=trouble == "forced reset")
        else:
            self._turn(is_slow, abort=None if trouble == "run" else victim)

    def teardown(self):
        if not hasattr(self, "scheduler") or sys.exc_info()[0] is not None:
            return
        bound = self._most_turns()
        for _ in range(bound):
            if not (self.scheduler.has_requests() or self.batches):
                break
            self._turn(is_slow=True)
        left = [(i, r.decision) for i, r in self.scheduler.requests.items()]
        assert not left, f"not over after {bound} turns: {left}"
        assert self.view.num_used == 0
        assert sorted(self.books.reported) == sorted(self.books.requests)
        for request_id in self.books.requests:
            tokens, end = self.books.outputs[request_id], self.books.ended[request_id]
            expected, expected_end = self.books.expected(request_id)
            if end[0] == "abort":
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, end) == (expected, expected_end)
        for struct, encoded in self.stream:
            assert encode(struct) == encoded, "a struct has changed after it was emitted"

    # -- how it happens -----------------------------------------------------------------

    def _reset(self, is_forced: bool) -> None:
        scheduler = self.scheduler
        are_on_their_way = all(r.num_output_placeholders for r in scheduler.running)
        if is_forced and self.config.async_scheduling and not are_on_their_way:
            # vLLM 0.16 drops the next token of each request, on the assumption that it was
            # on its way. Where it was not, the request loses a token and, one short of
            # max_tokens, waits for it for ever; the recorded traces pin that.
            return
        pool = scheduler.kv_cache_manager.block_pool
        in_use = pool.num_free_blocks < pool.num_blocks - 1
        order = [r.request_id for r in (*scheduler.running, *scheduler.waiting)]
        done = scheduler.reset_prefix_cache(reset_running_requests=is_forced)
        assert done == (is_forced or not in_use)
        if done:
            assert not pool.stored
        if done and self.config.policy == "fcfs":
            assert [r.request_id for r in scheduler.waiting] == order
        invariants.check_pool(scheduler)

    def _add(self, plan: Plan) -> None:
        """Queue a request that can end, as the input processor would let it through.

        A scheduler alone would preempt one that outgrows the pool for ever. The last token is
        sampled and never computed.
        """
        config, books = self.config, self.books
        room_in_pool = 1 + (config.num_blocks - 1) * config.block_size
        room = min(config.max_model_len, room_in_pool)
        prompt = (*SHARED[: plan.num_shared], *plan.tail)
        if plan.after is not None and books.requests:
            earlier = list(books.requests)[plan.after % len(books.requests)]
            outputs = books.expected(earlier)[0]
            prompt = (*books.requests[earlier].prompt_token_ids, *outputs, *plan.tail)
        prompt = prompt[: room - 1]
        max_tokens = plan.max_tokens
        if room_in_pool < config.max_model_len:
            max_tokens = min(max_tokens, room - len(prompt))
        number = len(books.requests)
        # Ids whose order as text is not that of arrival.
        request_id = f"r{number * 7 % 10}-{number}"
        request = EngineCoreRequest(
            step=self.scheduler._step,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=max_tokens,
                min_tokens=min(plan.min_tokens, max_tokens, room - len(prompt)),
                ignore_eos=plan.flag == "ignore_eos",
                stop_token_ids=(STOP,) if plan.flag == "stop" else (),
                skip_reading_prefix_cache=plan.flag == "skip_reading",
            ),
            eos_token_id=EOS,
            arrival_time=float(number),
            cache_salt=plan.salt,
            # Later ones tend to be more important, so that victims stand anywhere in the list.
            priority=plan.priority - number // 3,
        )
        books.requests[request_id] = request
        books.seeds[request_id] = plan.seed
        books.outputs[request_id] = []
        self.scheduler.add_request(Request(request, self.hasher))
        self._emit(request)

    def _turn(self, is_slow: bool, abort: str | None = None) -> None:
        """One step; with async scheduling and a slow device it schedules one batch ahead."""
        self.num_turns += 1
        scheduler = self.scheduler
        if scheduler.has_requests():
            live = set(scheduler.requests)
            output = scheduler.schedule()
            self._emit(output)
            self.aborted_meanwhile = False
            self.books.reported += output.finished_req_ids
            invariants.check_decisions(scheduler, output, self.view.decisions, live)
            invariants.check_hits(output, self.books.requests)
            self._check(is_settled=True)
            self.batches.append((output, self.worker.execute(output, bool(self.batches))))
            self._check_content()
            if abort is not None:
                self._abort(abort)
            may_wait = self.config.async_scheduling and is_slow
            if may_wait and len(self.batches) < 2 and output.total_num_scheduled_tokens:
                return
        if self.batches:
            self._take_in(*self.batches.popleft())

    def _take_in(self, output, answer) -> None:
        self._emit(answer)
        outputs = self.scheduler.update_from_output(output, answer)
        for each in outputs.outputs:
            self.books.outputs[each.request_id] += each.new_token_ids
            assert each.request_id not in self.books.ended, "an output after the end"
            if each.finish_reason is not None:
                self.books.ended[each.request_id] = (each.finish_reason, each.stop_reason)
        invariants.check_stats(self.scheduler, outputs)
        self._emit(outputs)
        self._check(is_settled=not self.aborted_meanwhile)
        if self.config.spec_method and not self.config.async_scheduling:
            self.scheduler.update_draft_token_ids(
                {
                    request_id: self.books.draft(
                        request_id,
                        len(self.books.outputs[request_id]),
                        self.config.num_speculative_tokens,
                    )
                    for request_id in output.num_scheduled_tokens
                }
            )

    def _abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id, "unknown"], RequestStatus.FINISHED_ABORTED)
        self.books.ended[request_id] = ("abort", None)
        self.aborted_meanwhile = True
        invariants.check_pool(self.scheduler)

    def _emit(self, struct) -> None:
        self.view.apply(struct)
        self.stream.append((struct, encode(struct)))

    def _check(self, is_settled: bool) -> None:
        """`is_settled`: everything that has happened was told."""
        invariants.check_pool(self.scheduler)
        if is_settled:
            truth = invariants.snapshot_of(self.scheduler, self.info, self.view.step)
            assert differences(self.view, truth) == []

    def _check_content(self) -> None:
        """What can be hit was computed, whoever may come to hit it."""
        size = self.config.block_size
        for block in self.view.blocks.not_empty():
            if block.block_hash is not None:
                names = self.books.names(block.stored_by)
                start = block.index * size
                assert self.worker.content(block.block_id) == names[start : start + size], (
                    f"block {block.block_id} has a name and other tokens in it"
                )

    def _most_turns(self) -> int:
        """How many turns the rest may take.

        FCFS: the first running request gets a token in each step, and is never preempted
        while another runs. So it is over after as many steps as it has tokens, before which
        one step admits it. Then the next is the first.

        Priority: the most important running request is never preempted while another runs.
        Before it stand requests that were admitted earlier; a step in which they leave it no
        token takes each of them further, or one of them preempts itself and comes back
        behind it. So it is over after no more steps than all have tokens, unless a more
        important one is admitted. That one is then the most important of all, because the
        queue is sorted, so this happens once for each end.

        Two batches in flight: a step may have to wait for the answer of the one before.
        """
        live = [self.books.requests[i] for i in self.scheduler.requests]
        num_tokens = sum(
            1 + len(r.prompt_token_ids) + self.books.most_outputs(r.request_id) for r in live
        )
        bound = num_tokens if self.config.policy == "fcfs" else 2 * len(live) * num_tokens
        return (2 if self.config.async_scheduling else 1) * bound + 4


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=NUM_SEQUENCES, stateful_step_count=30)
