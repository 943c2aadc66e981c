"""Scheduler and block pool, decision by decision; no torch. Exact equality with vLLM is in
tests/conformance."""

from __future__ import annotations

import random

import msgspec
import pytest

from lmscope.boundary import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from lmscope.decisions import Code, Outcome
from lmscope.engine.prefix_hash import BlockHasher, root_hash
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.scheduler import Scheduler, SchedulerConfig
from lmscope.sampling_params import SamplingParams


def make_scheduler(num_blocks=10, block_size=4, **changes) -> Scheduler:
    settings = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 1000,
    }
    return Scheduler(SchedulerConfig(**{**settings, **changes}))


def add(scheduler, name, prompt, max_tokens=10, min_tokens=0, **fields) -> Request:
    token_ids = range(prompt) if isinstance(prompt, int) else prompt
    params = SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=min_tokens)
    core_request = EngineCoreRequest(
        request_id=name, prompt_token_ids=tuple(token_ids), sampling_params=params, **fields
    )
    caching = scheduler.config.enable_prefix_caching
    request = Request(core_request, BlockHasher(scheduler.config.block_size) if caching else None)
    scheduler.add_request(request)
    return request


def run_step(scheduler, token=7) -> SchedulerOutput:
    output = scheduler.schedule()
    finish_step(scheduler, output, token)
    return output


def finish_step(scheduler, output, token=7):
    sampled = []
    for name in output.num_scheduled_tokens:
        request = scheduler.requests.get(name)
        done = request is not None and not request.is_prefill_chunk
        sampled.append((token,) if done else ())
    return scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            step=output.step,
            req_ids=tuple(output.num_scheduled_tokens),
            sampled_token_ids=tuple(sampled),
        ),
    )


def decisions_of(output: SchedulerOutput):
    return {d.request_id: (d.outcome, d.code) for d in output.decisions}


def test_preempts_the_newest_request_when_blocks_run_out():
    scheduler = make_scheduler(num_blocks=5, block_size=2)  # block 0 is reserved
    old = add(scheduler, "old", [1, 2, 3, 4])
    new = add(scheduler, "new", [5, 6, 7, 8])
    run_step(scheduler)

    output = scheduler.schedule()

    assert output.preempted_req_ids == (new.request_id,)
    assert output.num_scheduled_tokens == {old.request_id: 1}


def test_what_a_preemption_cost_is_written_down():
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, "old", [1, 2, 3, 4])
    add(scheduler, "new", [5, 6, 7, 8])
    run_step(scheduler)

    decision = {d.request_id: d for d in run_step(scheduler).decisions}["new"]

    assert decision.code is Code.PREEMPTED
    assert (decision.other_id, decision.blocks_needed, decision.blocks_free) == ("old", 1, 0)
    assert (decision.blocks_lost, decision.tokens_lost) == (2, 4)


def test_budget_is_split_between_a_chunk_and_the_next_request():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, "a", 10)
    add(scheduler, "b", range(100, 104))

    steps = [dict(run_step(scheduler).num_scheduled_tokens) for _ in range(4)]

    assert steps == [{"a": 6}, {"a": 4, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 1}]


def test_a_resumed_request_says_how_much_it_computes_again():
    # 12 usable blocks hold a and b until both have grown by a block
    scheduler = make_scheduler(num_blocks=6, block_size=2, enable_prefix_caching=False)
    add(scheduler, "a", [1, 2, 3, 4], max_tokens=3)
    b = add(scheduler, "b", [5, 6, 7, 8], max_tokens=3)
    while b.num_preemptions == 0:
        run_step(scheduler)
    while b.status is RequestStatus.PREEMPTED:
        output = run_step(scheduler)

    decision = {d.request_id: d for d in output.decisions}["b"]

    assert decision.code is Code.RESUMED
    assert decision.tokens_recomputed == decision.tokens_granted - 1 > 0


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_num_seqs": 1}, Code.SEATS),
        ({"max_num_batched_tokens": 8}, Code.BUDGET),
        ({"num_blocks": 4}, Code.NO_BLOCKS),
        ({"max_num_batched_tokens": 10, "enable_chunked_prefill": False}, Code.CHUNKING_OFF),
    ],
)
def test_the_head_of_the_queue_knows_why_it_waits(settings, code):
    scheduler = make_scheduler(**settings)
    add(scheduler, "first", 8)
    add(scheduler, "head", range(100, 108))
    add(scheduler, "behind", range(200, 208))

    output = scheduler.schedule()

    assert decisions_of(output)["head"] == (Outcome.WAITING, code)
    assert output.behind is not None
    assert (output.behind.first, output.behind.last) == ("head", "behind")
    assert (output.behind.count, output.behind.code) == (1, Code.BEHIND)


def test_two_equal_prompts_share_blocks_in_the_step_in_which_they_arrive():
    scheduler = make_scheduler()
    add(scheduler, "a", 9)
    add(scheduler, "b", 9)

    new = {r.req_id: r for r in run_step(scheduler).scheduled_new_reqs}

    assert new["a"].block_ids == ((1, 2, 3),)
    assert new["b"].block_ids == ((1, 2, 4),)
    assert new["b"].num_computed_tokens == 8


@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length, hits):
    scheduler = make_scheduler(num_blocks=20)
    add(scheduler, "a", length, max_tokens=1)
    run_step(scheduler)
    add(scheduler, "b", length, max_tokens=1)

    output = scheduler.schedule()

    assert output.scheduled_new_reqs[0].num_computed_tokens == hits


def test_blocks_are_freed_from_the_end_and_evicted_oldest_first():
    scheduler = make_scheduler()
    pool = scheduler.kv_cache_manager.block_pool
    add(scheduler, "a", 12, max_tokens=1)
    run_step(scheduler)
    assert list(pool.free_queue) == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    add(scheduler, "b", range(100, 108), max_tokens=1)
    run_step(scheduler)
    assert list(pool.free_queue) == [6, 7, 8, 9, 3, 2, 1, 5, 4]
    add(scheduler, "c", range(200, 220), max_tokens=1)
    assert run_step(scheduler).scheduled_new_reqs[0].block_ids == ((6, 7, 8, 9, 3),)

    add(scheduler, "again", 12)
    again = scheduler.schedule().scheduled_new_reqs[0]

    assert again.block_ids == ((1, 2, 5),)
    assert again.num_computed_tokens == 8


def test_a_salt_keeps_requests_apart_and_cannot_pass_for_another_field():
    scheduler = make_scheduler(num_blocks=20)
    add(scheduler, "a", 9, max_tokens=1, cache_salt="x")
    add(scheduler, "b", 9, max_tokens=1, cache_salt="y")
    add(scheduler, "c", 9, max_tokens=1)
    add(scheduler, "d", 9, max_tokens=1, cache_salt="x")

    hits = [r.num_computed_tokens for r in run_step(scheduler).scheduled_new_reqs]

    assert hits == [0, 0, 0, 8]
    assert len({root_hash(None), root_hash(""), root_hash("x")}) == 3


def test_a_victim_that_stands_earlier_makes_nobody_miss_the_step():
    # vLLM 0.16 skips one request here when the victim itself had not been scheduled.
    scheduler = make_scheduler(
        num_blocks=9, block_size=2, policy="priority", max_model_len=6, enable_prefix_caching=False
    )
    for name, priority in (("z", 9), ("h", 0), ("m", 1), ("n", 2)):
        add(scheduler, name, 3, max_tokens=100, priority=priority)
    run_step(scheduler)
    z = scheduler.requests["z"]
    scheduler.running.sort(key=lambda r: "zhmn".index(r.request_id))
    z.all_token_ids = z.all_token_ids[:3] + [7] * 2
    z.num_computed_tokens = 5  # at its length limit: no work, but it holds its blocks
    for name in ("h", "m", "n"):
        scheduler.requests[name].num_computed_tokens = 3
    scheduler.requests["h"].all_token_ids += [7]
    scheduler.requests["h"].num_computed_tokens = 4

    output = scheduler.schedule()

    assert output.preempted_req_ids == ("z",)
    assert list(output.num_scheduled_tokens) == ["h", "m", "n"]


def test_an_abort_frees_blocks_and_is_reported_once():
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    add(scheduler, "b", range(100, 108))
    run_step(scheduler)

    scheduler.finish_requests(["a", "a", "unknown"], RequestStatus.FINISHED_ABORTED)

    output = run_step(scheduler)
    assert output.finished_req_ids == ("a",)
    assert run_step(scheduler).finished_req_ids == ()
    assert set(scheduler.kv_cache_manager.req_to_blocks) == {"b"}


def test_an_abort_while_the_model_runs_drops_its_token():
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    output = scheduler.schedule()
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)

    assert finish_step(scheduler, output).outputs == ()


def test_a_request_whose_logits_mean_nothing_ends_alone():
    scheduler = make_scheduler()
    add(scheduler, "bad", 8)
    add(scheduler, "good", range(100, 108))
    output = scheduler.schedule()

    result = scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            step=output.step,
            req_ids=("bad", "good"),
            sampled_token_ids=((7,), (7,)),
            errors={"bad": "logits are NaN"},
        ),
    )

    bad, good = result.outputs
    assert (bad.finish_reason, bad.stop_reason, bad.new_token_ids) == (
        "error",
        "logits are NaN",
        (),
    )
    assert (good.finish_reason, good.new_token_ids) == (None, (7,))
    assert [r.request_id for r in scheduler.running] == ["good"]
    check_pool(scheduler)
    # What it had computed is not offered to a second try.
    add(scheduler, "again", 8)
    assert scheduler.schedule().scheduled_new_reqs[0].num_computed_tokens == 0


def test_one_more_empty_step_reports_what_has_finished():
    scheduler = make_scheduler()
    add(scheduler, "a", 4, max_tokens=1)
    run_step(scheduler)
    assert scheduler.has_requests()
    assert not scheduler.has_unfinished_requests()

    output = run_step(scheduler)

    assert output.finished_req_ids == ("a",)
    assert output.total_num_scheduled_tokens == 0
    assert not scheduler.has_requests()


def test_reset_is_refused_while_blocks_are_in_use():
    scheduler = make_scheduler()
    add(scheduler, "a", 9)
    run_step(scheduler)

    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.kv_cache_manager.block_pool.stored == {}


def test_a_struct_kept_from_the_first_step_does_not_change():
    scheduler = make_scheduler()
    add(scheduler, "a", 9)
    first = run_step(scheduler)
    before = repr(first)
    for _ in range(8):
        run_step(scheduler)

    assert repr(first) == before


def test_blocks_that_a_victim_will_not_compute_cannot_be_hit():
    # vLLM 0.16 leaves them their names, and "long" would read keys that nobody wrote.
    scheduler = make_scheduler(
        num_blocks=9,
        block_size=2,
        max_num_batched_tokens=8,
        long_prefill_token_threshold=4,
        policy="priority",
    )
    add(scheduler, "long", 14, max_tokens=1, priority=1)
    run_step(scheduler)
    add(scheduler, "short", range(100, 104), max_tokens=3, arrival_time=1.0)
    run_step(scheduler)

    output = run_step(scheduler)  # "long" gets its third piece, and "short" the block of it

    assert output.preempted_req_ids == ("long",)
    assert dict(output.num_scheduled_tokens) == {"short": 1}
    while "short" in scheduler.requests:
        run_step(scheduler)
    while "long" not in output.num_scheduled_tokens:
        output = run_step(scheduler)
    decision = {d.request_id: d for d in output.decisions}["long"]
    assert (decision.code, decision.tokens_cached) == (Code.RESUMED, 8)


def test_drafts_of_a_batch_from_before_a_forced_preemption_do_not_count():
    scheduler = make_scheduler(async_scheduling=True, spec_method="ngram", num_speculative_tokens=2)
    request = add(scheduler, "a", 5)
    first = scheduler.schedule()
    second = scheduler.schedule()  # with two drafts
    finish_step(scheduler, first)
    assert second.scheduled_spec_decode_tokens == {"a": (-1, -1)}
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.schedule()
    assert (request.num_computed_tokens, request.num_output_placeholders) == (6, 1)

    finish_step(scheduler, second)  # both were rejected

    assert (request.num_computed_tokens, request.num_output_placeholders) == (6, 1)
    assert request.output_token_ids == (7,)


def check_pool(scheduler: Scheduler) -> None:
    """Every usable block is free or held, exactly once each; counts equal owners."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    free = list(pool.free_queue)
    owners = [b for blocks in manager.req_to_blocks.values() for b in blocks]
    assert len(free) == len(set(free)) == pool.num_free_blocks
    assert {*free, *owners} == set(range(1, pool.num_blocks))
    assert not set(free) & set(owners)
    for block_id in range(1, pool.num_blocks):
        assert pool.ref_cnt[block_id] == owners.count(block_id)
        assert (pool.block_hash[block_id] is None) == (block_id not in pool.stored)
    for blocks in manager.req_to_blocks.values():
        assert len(blocks) == len(set(blocks))
    for request in scheduler.running:
        held = len(manager.req_to_blocks.get(request.request_id, ()))
        assert held * pool.block_size >= request.num_computed_tokens


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(10))
def test_random_work_leaks_no_block_and_every_request_gets_one_decision_a_step(seed, policy):
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=12, max_num_seqs=4, max_num_batched_tokens=16, policy=policy
    )
    for number in range(500):
        if rng.random() < 0.25:
            start = rng.choice([0, 100, 200])
            name = f"r{number}"
            length = rng.randint(1, 20)
            add(
                scheduler,
                name,
                range(start, start + length),
                max_tokens=rng.randint(1, 20),
                priority=rng.randint(0, 2),
                arrival_time=float(number),
            )
        if scheduler.requests and rng.random() < 0.05:
            victim = rng.choice(list(scheduler.requests))
            scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
        live = set(scheduler.requests)
        output = scheduler.schedule()
        covered = {d.request_id for d in output.decisions}
        assert len(covered) == len(output.decisions)
        behind = output.behind.count if output.behind else 0
        waiting = {r.request_id for r in scheduler.waiting}
        assert live - covered <= waiting
        assert len(live - covered) == behind
        assert output.total_num_scheduled_tokens <= 16
        scheduled = {d.request_id for d in output.decisions if d.outcome is Outcome.SCHEDULED}
        assert scheduled == set(output.num_scheduled_tokens)
        check_pool(scheduler)
        finish_step(scheduler, output, token=rng.randint(0, 3))
        check_pool(scheduler)
    for _ in range(2000):
        if not scheduler.has_requests():
            break
        run_step(scheduler)
    assert not scheduler.has_requests()
    assert scheduler.kv_cache_manager.usage == 0.0


def run_random_work(scheduler: Scheduler, seed: int, num_steps: int) -> list[object]:
    """Requests come, end, are aborted and forced out at random; everything that was said."""
    rng = random.Random(seed)
    said: list[object] = []
    # What has no room left and is not allowed to end cannot come back, so it is not forced out.
    forced = 0.02 if scheduler.config.max_model_len == 1000 else 0.0
    for number in range(num_steps):
        if rng.random() < 0.3:
            start, max_tokens = rng.choice([0, 0, 100]), rng.randint(1, 40)
            add(
                scheduler,
                f"r{number}",
                range(start, start + rng.randint(1, 30)),
                max_tokens=max_tokens,
                # beyond max_model_len it makes a request wait until somebody aborts it
                min_tokens=rng.choice([0, 0, max_tokens]),
                eos_token_id=rng.choice([None, 3]),
                priority=rng.randint(0, 2),
                arrival_time=float(rng.randint(0, 5)),
            )
        if scheduler.requests and rng.random() < 0.05:
            victim = rng.choice(list(scheduler.requests))
            scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
        if rng.random() < forced:
            said.append(scheduler.reset_prefix_cache(reset_running_requests=True))
        output = scheduler.schedule()
        if rng.random() < forced:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        answers = {i: rng.randint(2, 9) for i in output.num_scheduled_tokens}
        rows = list(answers)
        if rng.random() < 0.5:
            rng.shuffle(rows)  # the order of rows is the runner's
        sampled = tuple(
            () if scheduler.requests[i].is_prefill_chunk else (answers[i],) for i in rows
        )
        outputs = scheduler.update_from_output(
            output,
            ModelRunnerOutput(step=output.step, req_ids=tuple(rows), sampled_token_ids=sampled),
        )
        said.append(msgspec.structs.replace(output, time=0.0))
        said.append([(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs.outputs])
        said.append([r.decision for r in scheduler.running])
        said.append(list(scheduler.kv_cache_manager.block_pool.free_queue))
        if scheduler.config.spec_method is not None:
            drafts = {i: [rng.randint(2, 9)] * rng.randint(0, 2) for i in rows}
            scheduler.update_draft_token_ids(drafts)
    return said


@pytest.mark.parametrize("spec_method", [None, "ngram"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(10))
def test_the_short_way_of_a_decode_decides_what_the_long_one_does(seed, policy, spec_method):
    rng = random.Random(seed)
    settings = {
        "num_blocks": rng.choice([14, 40]),
        "block_size": rng.choice([1, 2, 4, 16]),
        "max_num_seqs": 6,
        "max_num_batched_tokens": rng.choice([6, 40]),
        "max_model_len": rng.choice([31, 1000]),
        "policy": policy,
        "spec_method": spec_method,
        "num_speculative_tokens": 2,
    }
    short, long = make_scheduler(**settings), make_scheduler(**settings)
    long._only_plain_decodes = False

    for ours, theirs in zip(
        run_random_work(short, seed, 200), run_random_work(long, seed, 200), strict=True
    ):
        assert ours == theirs
