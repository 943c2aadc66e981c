"""Random lives of a whole engine without a model: front end, core, taps and readers. No torch.

Requests come in through the input processor, which must refuse what could never end and must
let the rest through. Aborts come between steps and at any boundary inside one; readers join
late, leave, and nobody may be listening for a while. Steps may overlap. Whatever happens, a
request that is not aborted gets the text that it gets alone.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lmscope.boundary import (
    BOUNDARIES,
    EngineCoreOutputs,
    EngineInfo,
    EngineSnapshot,
    SchedulerOutput,
    encode,
)
from lmscope.config import EngineConfig
from lmscope.engine.core import EngineCore
from lmscope.execute.scripted import ScriptedExecutor
from lmscope.frontend.input_processor import InputProcessor
from lmscope.frontend.output_processor import OutputProcessor
from lmscope.frontend.parallel_sampling import Child
from lmscope.frontend.stream import Stream
from lmscope.sampling_params import SamplingParams
from lmscope.scope.view import EngineView, differences
from lmscope.tap import Tap
from lmscope.testing import byte_tokenizer

# `make fuzz` draws forty times as many.
NUM_SEQUENCES = 20_000 if settings.get_current_profile_name() == "fuzz" else 500

MOST_LIVE = 12
TOKENIZER = byte_tokenizer()
SHARED = "You are a patient tutor. You are a careful tutor. "
# What the model writes begins somewhere in this; "~" stands for the end of the text.
WORDS = "a stop and a bad stone~ but no stab at the~step 🌶 of a stair~"


def script_of(start: int) -> list[int | None]:
    rotated = WORDS[start:] + WORDS[:start]
    return [None if byte == ord("~") else byte for byte in rotated.encode()] * 4


class Plan(NamedTuple):
    prompt: str
    params: SamplingParams
    start: int
    priority: int
    salt: str | None


@st.composite
def plans(draw) -> Plan:
    """A request, which the pool may be too small for."""
    prompt = SHARED[: draw(st.integers(0, 50))] + draw(st.text("ab", max_size=3))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 24)))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(draw(st.sampled_from([0, 0, 3, 9])), max_tokens or 9),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([(), (), ("sto",), ("st", "no s"), ("🌶",)])),
        stop_token_ids=draw(st.sampled_from([(), (), (ord("d"),)])),
        skip_reading_prefix_cache=draw(st.sampled_from([None, None, True])),
    )
    return Plan(
        prompt,
        params,
        draw(st.integers(0, len(WORDS) - 1)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([None, None, "x"])),
    )


@st.composite
def engine_configs(draw) -> EngineConfig:
    enable_chunked_prefill = draw(st.sampled_from([True, True, False]))
    max_model_len = draw(st.integers(2, 70))
    budget = draw(st.sampled_from([2, 5, 16, 64]))
    if not enable_chunked_prefill:
        budget = max(budget, max_model_len)
    return config_of(
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        num_kv_blocks=draw(st.integers(3, 16)),
        max_model_len=max_model_len,
        max_num_seqs=min(draw(st.integers(1, 5)), budget),
        max_num_batched_tokens=budget,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=enable_chunked_prefill,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        async_scheduling=draw(st.booleans()),
    )


def config_of(**settings) -> EngineConfig:
    unused = {"dtype": "float32", "device": "cpu", "engine": "thread", "execute": "scripted"}
    return EngineConfig(
        model="scripted", seed=0, threads=1, kv_block_bytes=0, **unused, **settings
    )  # fmt: skip


class Engine:
    """What LLM puts together, with the caller in the place of the engine thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.scripts: dict[str, list[int | None]] = {}
        self.streams: dict[str, Stream] = {}
        self.live: dict[str, Stream] = {}
        self.num_arrivals = 0
        # somebody was ended from outside, which the next SchedulerOutput will tell
        self.has_untold_end = False
        info = EngineInfo(
            model="scripted",
            block_size=config.block_size,
            num_blocks=config.num_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
        )
        self.tap = Tap(info, self.snapshot)
        self.inputs = InputProcessor(
            TOKENIZER,
            vocab_size=TOKENIZER.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_id=TOKENIZER.eos_token_id,
            max_pool_tokens=config.max_pool_tokens,
            block_size=config.block_size,
        )
        self.outputs = OutputProcessor(TOKENIZER, self.tap)
        executor = ScriptedExecutor(lambda i, n: self.scripts[i][n], TOKENIZER.eos_token_id)
        self.core = EngineCore(config, executor, self.tap)

    def submit(self, request_id: str, plan: Plan) -> Stream:
        prompt = {"prompt": plan.prompt, "cache_salt": plan.salt}
        self.num_arrivals += 1
        request = self.inputs.process(
            prompt,
            plan.params,
            request_id=request_id,
            priority=plan.priority,
            arrival_time=float(self.num_arrivals),
            want_text=True,
        )
        stream = Stream(
            request_id, plan.prompt, request.prompt_token_ids, plan.params, abort=self.abort
        )
        self.scripts[request_id] = script_of(plan.start)
        self.streams[request_id] = self.live[request_id] = stream
        self.outputs.add_request(request, Child(request_id, 0, stream), self.live.pop)
        self.core.add_request(request)
        return stream

    def abort(self, request_id: str) -> None:
        child = Child(request_id, 0, self.streams[request_id])
        ended = self.outputs.abort_requests([child], self.core.step_number)
        self.core.abort_requests([*ended, "unknown"])
        self.has_untold_end |= bool(ended)

    def step(self) -> None:
        outputs = self.core.step()
        if outputs is not None:
            self.deliver(outputs)

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        ended = self.outputs.process(outputs)
        if ended:
            self.core.abort_requests(ended)
            self.has_untold_end = True

    def reset_prefix_cache(self, is_forced: bool) -> tuple[bool, bool]:
        """Whether blocks were in use, and the answer."""
        while self.core.steps_in_flight:
            self.deliver(self.core.finish_step())
        pool = self.core.scheduler.kv_cache_manager.block_pool
        in_use = pool.num_free_blocks < pool.num_blocks - 1
        return in_use, self.core.reset_prefix_cache(is_forced)

    def snapshot(self) -> EngineSnapshot:
        blocks, free_queue = self.core.snapshot_blocks()
        return EngineSnapshot(
            info=self.tap.info,
            step=self.core.step_number,
            time=time.monotonic(),
            blocks=blocks,
            free_queue=free_queue,
            requests=self.core.snapshot_requests(self.outputs.text_of),
        )


def alone(plan: Plan, max_model_len: int, max_tokens: int) -> Stream:
    """The same request by itself in an engine with room for everything."""
    engine = Engine(
        config_of(
            block_size=16,
            num_kv_blocks=64,
            max_model_len=max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=256,
            enable_prefix_caching=False,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            scheduling_policy="fcfs",
            async_scheduling=False,
        )
    )
    params = plan.params.replace(max_tokens=max_tokens)
    stream = engine.submit("0", plan._replace(params=params))
    while engine.core.has_work():
        engine.step()
    return stream


class EngineMachine(RuleBasedStateMachine):
    """An engine, its users and its readers."""

    @initialize(config=engine_configs())
    def begin(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self.plans: dict[str, Plan] = {}
        self.aborted: set[str] = set()
        self.stream: list[tuple[object, bytes]] = []
        self.readers: list[tuple[EngineView, object]] = []
        # whom to abort at the next struct of a kind, as somebody at a closed gate would
        self.abort_at: tuple[type, str] | None = None
        self.engine.tap.set_gate(self._arrive)
        self.join()

    # -- what can happen ----------------------------------------------------------------

    @property
    def live(self) -> list[str]:
        return list(self.engine.live)

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(plans=st.lists(plans(), min_size=1, max_size=3), same_id=st.integers(0, 9))
    def submit(self, plans: list[Plan], same_id: int) -> None:
        config = self.engine.config
        for plan in plans:
            num_tokens = len(plan.prompt)
            room = min(config.max_model_len, config.max_pool_tokens + 1) - num_tokens
            # An id is free again as soon as its request has ended.
            free = [i for i in self.plans if i not in self.live]
            request_id = free[same_id] if same_id < len(free) // 3 else f"r{len(self.plans)}"
            try:
                self.engine.submit(request_id, plan)
            except ValueError:
                assert not num_tokens or room < 1 or plan.params.min_tokens > room
                continue
            assert num_tokens
            assert room >= 1
            assert plan.params.min_tokens <= room
            self.plans[request_id] = plan
            self.aborted.discard(request_id)

    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.core.has_work():
                self.engine.step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), place=st.sampled_from([None, *BOUNDARIES[1:]]))
    def abort(self, which: int, place: type | None) -> None:
        victim = self.live[which % len(self.live)]
        if place is None:
            self.aborted.add(victim)
            self.engine.abort(victim)
        else:
            self.abort_at = (place, victim)
            self.engine.tap.arm_gate(True)
            self.engine.step()
            self.abort_at = None
            self.engine.tap.arm_gate(False)

    @rule(is_forced=st.booleans())
    def reset(self, is_forced: bool) -> None:
        in_use, answer = self.engine.reset_prefix_cache(is_forced)
        assert answer == (is_forced or not in_use)

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def join(self) -> None:
        """A reader comes, at a moment when everything that happened was told."""
        scheduler = self.engine.core.scheduler
        if scheduler._finished_req_ids or scheduler.kv_cache_manager.block_pool.events:
            return
        snapshot, subscription = self.engine.tap.follow(
            lambda boundary: self._read(view, boundary), strict=True
        )
        view = EngineView(snapshot)
        self.readers.append((view, subscription))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 2))
    def leave(self, which: int) -> None:
        _, subscription = self.readers.pop(which % len(self.readers))
        subscription.close()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            if sys.exc_info()[0] is None:
                self._check_end()
        finally:
            self.engine.core.shutdown()

    def _check_end(self) -> None:
        for _ in range(self._most_steps()):
            if not self.engine.core.has_work():
                break
            self.engine.step()
        assert not self.engine.core.has_work(), "requests that do not end"
        pool = self.engine.core.scheduler.kv_cache_manager.block_pool
        assert set(pool.ref_cnt) == {0}
        assert self.live == []
        for request_id, plan in self.plans.items():
            self._check_output(request_id, plan)
        for view, _ in self.readers:
            assert view.num_used == 0
            assert view.num_running == view.num_waiting == 0
        for struct, encoded in self.stream:
            assert encode(struct) == encoded, "a struct has changed after it was emitted"

    # -- how it is checked --------------------------------------------------------------

    def _read(self, view: EngineView, boundary: object) -> None:
        view.apply(boundary)
        if view is self.readers[0][0]:
            self.stream.append((boundary, encode(boundary)))
        if isinstance(boundary, SchedulerOutput):
            self.engine.has_untold_end = False
            live = {r.request_id for r in self._requests()}
            assert live <= set(view.decisions), "a request without a decision"
        is_whole = isinstance(boundary, SchedulerOutput | EngineCoreOutputs)
        if is_whole and not self.engine.has_untold_end:
            assert differences(view, self.engine.snapshot()) == []

    def _arrive(self, boundary: object) -> None:
        """The gate, behind all readers: this is where an abort gets into a step."""
        if self.abort_at is not None and type(boundary) is self.abort_at[0]:
            (_, victim), self.abort_at = self.abort_at, None
            if victim in self.live:
                self.aborted.add(victim)
            self.engine.abort(victim)

    def _requests(self):
        scheduler = self.engine.core.scheduler
        return (*scheduler.running, *scheduler.waiting)

    def _check_output(self, request_id: str, plan: Plan) -> None:
        config, stream = self.engine.config, self.engine.streams[request_id]
        got, reason = stream.outputs[0], stream.outputs[0].finish_reason
        room = min(config.max_model_len, config.max_pool_tokens + 1) - len(plan.prompt)
        most = min(plan.params.max_tokens or room, room)
        want = alone(plan, config.max_model_len, most).outputs[0]
        assert (reason == "abort") == (request_id in self.aborted)
        if reason == "abort":
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            # What was held back for a stop string is released when it cannot come any more.
            written = bytes(token_id for token_id in want.token_ids if token_id < 256)
            assert written.decode(errors="ignore").startswith(got.text)
        else:
            assert got == want

    def _most_steps(self) -> int:
        """As for a scheduler by itself, see test_fuzz."""
        live = [self.plans[i] for i in self.live]
        num_tokens = sum(2 + len(plan.prompt) + self.engine.config.max_model_len for plan in live)
        is_fcfs = self.engine.config.scheduling_policy == "fcfs"
        return (num_tokens if is_fcfs else 2 * len(live) * num_tokens) + 4


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=NUM_SEQUENCES, stateful_step_count=25)
