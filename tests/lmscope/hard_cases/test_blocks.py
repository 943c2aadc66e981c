"""Hard cases of KV blocks and preemption (K)."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import pytest

from lmscope import SamplingParams
from lmscope.boundary import EngineCoreOutputs, EngineCoreRequest, SchedulerOutput
from lmscope.config import EngineOptions, ModelFacts, resolve
from lmscope.decisions import Code, Outcome
from lmscope.engine.prefix_hash import BlockHasher
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.scheduler import Scheduler, SchedulerConfig
from lmscope.scope.view import EngineView

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import invariants
from scripted_worker import ScriptedWorker


class Run:
    """A scheduler and a worker that checks each key it reads; `outputs` by request."""

    def __init__(self, num_blocks, block_size=16, budget=64, **options):
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                max_num_seqs=8,
                max_num_batched_tokens=budget,
                max_model_len=1000,
                **options,
            )
        )
        self.hasher = BlockHasher(block_size)
        self.worker = ScriptedWorker(
            block_size, lambda i, n: sum(map(ord, i)) + n, lambda i, n, k: ()
        )
        self.outputs = {}

    def add(self, name, num_tokens, max_tokens=4, first=0):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=tuple(range(first, first + num_tokens)),
                sampling_params=params,
            ),
            self.hasher,
        )
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def step(self):
        output = self.scheduler.schedule()
        invariants.check_pool(self.scheduler)
        result = self.scheduler.update_from_output(output, self.worker.execute(output))
        for each in result.outputs:
            self.outputs[each.request_id] += each.new_token_ids
        invariants.check_pool(self.scheduler)
        return output

    def finish(self, most_steps=200):
        steps = []
        while self.scheduler.has_requests():
            steps.append(self.step())
            assert len(steps) <= most_steps, "requests that do not end"
        return steps

    def expected(self, name, max_tokens=4):
        return [sum(map(ord, name)) + n for n in range(max_tokens)]


# -- K1: what can never fit -------------------------------------------------------------


def test_k1_a_request_that_can_never_fit_is_refused_and_the_queue_behind_it_runs(scripted):
    llm = scripted("ok", block_size=16, num_kv_blocks=4, max_model_len=100)

    with pytest.raises(ValueError, match=r"49 tokens and needs 4 blocks of 16.* has 3 usable"):
        llm.submit("x" * 49)

    (output,) = llm.generate("x" * 48, SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_k1_a_pool_below_the_longest_request_lowers_the_limit_and_says_so(caplog):
    facts = ModelFacts(max_model_len=2048, kv_block_bytes=1024)
    options = EngineOptions.parse("m", {"num_kv_blocks": 4})

    with caplog.at_level(logging.INFO):
        config = resolve(options, facts, free_bytes=1 << 30)

    assert config.max_model_len == 48
    assert "max_model_len is 48" in caplog.text
    assert "2048" in caplog.text


# -- K2, K3: preemption -----------------------------------------------------------------


def test_k2_two_long_prompts_in_a_small_pool_both_finish():
    run = Run(num_blocks=6, budget=16)
    for name, first in (("a", 0), ("b", 100)):
        run.add(name, 60, max_tokens=4, first=first)

    steps = run.finish()

    assert run.outputs == {name: run.expected(name) for name in "ab"}
    # Both have 60 + 4 tokens, the first is never preempted, and each needs one admission.
    assert len(steps) <= 2 * (60 + 4 + 1)
    preemptions = [d for step in steps for d in step.decisions if d.outcome is Outcome.PREEMPTED]
    assert {d.request_id for d in preemptions} == {"b"}
    # "a" takes at most its own four blocks from it, one by one
    assert 1 <= len(preemptions) <= 4
    for decision in preemptions:
        assert decision.blocks_lost > 0
        assert decision.tokens_lost > 0
        assert decision.blocks_needed > decision.blocks_free


def test_k3_the_last_running_one_goes_first_keeps_its_tokens_and_comes_back_first():
    run = Run(num_blocks=8, block_size=2)
    requests = {name: run.add(name, 3, first=50 * n) for n, name in enumerate("abcd")}
    seen = []
    while run.scheduler.has_requests():
        running = [r.request_id for r in run.scheduler.running]
        tokens = {name: list(request.all_token_ids) for name, request in requests.items()}
        output = run.step()
        if output.preempted_req_ids:
            seen.append(output.preempted_req_ids)
            count = len(output.preempted_req_ids)
            assert list(output.preempted_req_ids) == running[: -count - 1 : -1]
            assert not output.scheduled_new_reqs
            assert not output.scheduled_cached_reqs.resumed_req_ids
            head = [r.request_id for r in run.scheduler.waiting][:count]
            assert head == list(reversed(output.preempted_req_ids))
            for name in output.preempted_req_ids:
                assert requests[name].num_computed_tokens == 0
                assert requests[name].all_token_ids == tokens[name]
                assert name not in run.scheduler.kv_cache_manager.req_to_blocks

    assert seen
    assert run.outputs == {name: run.expected(name) for name in "abcd"}


def test_k3_the_text_is_that_of_a_run_without_preemption(scripted, endless):
    prompts = ["x" * 6, "y" * 7, "z" * 8, "v" * 9]
    params = SamplingParams(max_tokens=20)
    tokens, num_preempted = [], []
    for num_kv_blocks in (200, 9):
        llm = scripted(endless, num_kv_blocks=num_kv_blocks)
        steps = []
        llm.tap.on(SchedulerOutput, steps.append)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([o.outputs[0].token_ids for o in outputs])
        num_preempted.append(sum(len(s.preempted_req_ids) for s in steps))

    assert num_preempted[0] == 0 < num_preempted[1]
    assert tokens[0] == tokens[1]


# -- K4, K5: block edges and resuming ---------------------------------------------------


def preempted_at(length, run=None):
    """ "b" is preempted when it knows `length` tokens, of which all but one are computed.

    "a" fills its first block with its prompt and needs a second one in the next step, when
    "b" holds the rest of the pool.
    """
    run = run or Run(num_blocks=2 + -(-(length - 1) // 16))
    run.add("a", 16, max_tokens=3)
    b = run.add("b", length - 1, max_tokens=6, first=500)
    run.step()
    assert b.num_tokens == length
    output = run.step()
    assert output.preempted_req_ids == ("b",)
    return run, b


@pytest.mark.parametrize("length", [2, 15, 16, 17, 18, 31, 32, 33, 34])
def test_k4_preemption_and_resumption_at_block_edges(length):
    run, b = preempted_at(length)

    run.finish()

    assert b.num_preemptions == 1
    assert run.outputs == {"a": run.expected("a", 3), "b": run.expected("b", 6)}


@pytest.mark.parametrize("length", [16, 17, 32, 33])
def test_k5_after_a_hit_no_more_is_computed_than_remains(length):
    # More blocks than needed, so that those of "b" keep their content.
    run, b = preempted_at(length)
    while b.status is RequestStatus.PREEMPTED:
        output = run.step()

    decision = {d.request_id: d for d in output.decisions}["b"]

    assert decision.code is Code.RESUMED
    assert decision.tokens_granted == length - decision.tokens_cached
    assert decision.tokens_granted >= 1
    assert decision.tokens_cached <= 16 * ((length - 1) // 16)
    if length == 33:
        assert decision.tokens_cached > 0
    run.finish()
    assert run.outputs["b"] == run.expected("b", 6)


# -- K6, K7, K10: the books -------------------------------------------------------------


def test_k6_usage_goes_back_to_zero_and_kept_blocks_are_another_figure(scripted):
    llm = scripted("abcdef", num_kv_blocks=30)
    usages = []
    snapshot, subscription = llm.tap.follow(lambda boundary: view.apply(boundary), strict=True)
    view = EngineView(snapshot)
    llm.tap.on(EngineCoreOutputs, lambda o: usages.append(o.scheduler_stats.kv_cache_usage))

    llm.generate(["x" * 20, "y" * 9], use_tqdm=False)
    subscription.close()

    assert usages[0] == (5 + 3) / 29
    assert usages[-1] == 0.0
    assert view.num_used == 0
    assert len(view.free_queue) == 29
    assert view.num_kept == 6 + 3  # 25 and 14 tokens, the last of each not computed
    assert view.num_empty == 29 - 9


def test_k7_no_block_leaks_in_500_steps_of_random_work():
    rng = random.Random(3)
    run = Run(num_blocks=9, block_size=4, budget=10)
    names = iter(range(10_000))
    for _ in range(500):
        if len(run.scheduler.requests) < 8 and rng.random() < 0.4:
            run.add(f"r{next(names)}", rng.randrange(1, 24), rng.randrange(1, 9))
        if run.scheduler.requests and rng.random() < 0.08:
            victim = rng.choice(list(run.scheduler.requests))
            run.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
            invariants.check_pool(run.scheduler)
        if rng.random() < 0.02:
            run.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        run.step()  # looks at every block, twice
    run.finish()

    assert run.scheduler.kv_cache_manager.block_pool.num_free_blocks == 8


def test_k10_usage_is_that_of_the_tokens_and_says_who_holds_them(scripted, endless):
    llm = scripted(endless, block_size=16, num_kv_blocks=11)
    checked = []

    def check(boundary):
        view.apply(boundary)
        if isinstance(boundary, EngineCoreOutputs) and view.num_running:
            (request,) = (view.requests[i] for i in view.running)
            blocks = -(-request.num_computed_tokens // 16)
            assert boundary.scheduler_stats.kv_cache_usage == pytest.approx(blocks / 10)
            assert view.num_used == len(request.block_ids) == blocks
            assert {view.blocks[b].owners for b in request.block_ids} == {(request.request_id,)}
            checked.append(blocks)

    snapshot, subscription = llm.tap.follow(check, strict=True)
    view = EngineView(snapshot)
    llm.generate("x" * 40, SamplingParams(max_tokens=60), use_tqdm=False)
    subscription.close()

    assert checked == sorted(checked)
    assert set(checked) == {3, 4, 5, 6, 7}


# -- K8: no memory for the cache --------------------------------------------------------


FACTS = ModelFacts(
    max_model_len=2048,
    kv_block_bytes=12_288,
    kv_formula="2 (K and V) x 3 layers x 16 tokens x 2 KV heads x 16 x 4 bytes",
)


def test_k8_a_cache_below_one_block_says_what_it_would_take():
    options = EngineOptions.parse("m", {"kv_cache_bytes": 20_000})

    with pytest.raises(ValueError, match="kv_cache_bytes is 20000") as caught:
        resolve(options, FACTS, free_bytes=1 << 30)

    message = str(caught.value)
    for words in (
        FACTS.kv_formula,
        "= 12288 bytes",
        f"{2 * 12_288}",  # the least, for requests of 16 tokens
        "16 tokens",
        "2048 tokens needs 129 blocks",  # 128 and block 0
        f"{129 * 12_288}",
    ):
        assert words in message, words


def test_k8_so_does_one_that_the_free_memory_is_too_small_for():
    options = EngineOptions.parse("m", {})

    with pytest.raises(ValueError, match="free memory") as caught:
        resolve(options, FACTS, free_bytes=200_000)

    message = str(caught.value)
    for words in ("200000", "20000", "= 12288 bytes", "2048 tokens needs 129 blocks"):
        assert words in message, words


def test_k8_the_formula_stands_in_the_summary():
    config = resolve(EngineOptions.parse("m", {"num_kv_blocks": 10}), FACTS, free_bytes=1 << 30)

    assert f"10 x {FACTS.kv_formula}" in config.describe()
