"""Counterfactuals: what they state is checked by running schedule() on a deep copy."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from lmscope.decisions import Change, Outcome
from lmscope.engine.request import RequestStatus
from lmscope.engine.what_if import WhatIf

sys.path.insert(0, str(Path(__file__).parent))
from test_scheduler import add, make_scheduler, run_step


def runs_in_a_deep_copy(scheduler, request_id, change: Change) -> bool:
    """Independent of WhatIf's own copying: everything is deep-copied, then changed."""
    twin = copy.deepcopy(scheduler)
    pool = twin.kv_cache_manager.block_pool
    if change.blocks:
        waiting = list(pool.free_queue)
        queue = type(pool.free_queue)(pool.num_blocks + change.blocks)
        for block_id in list(queue):
            queue.remove(block_id)
        for block_id in range(pool.num_blocks, pool.num_blocks + change.blocks):
            queue.append(block_id)
            pool.ref_cnt.append(0)
            pool.block_hash.append(None)
        for block_id in waiting:
            queue.append(block_id)
        pool.free_queue = queue
        pool.num_blocks += change.blocks
    twin.config = type(twin.config)(
        **{
            **{n: getattr(twin.config, n) for n in twin.config.__struct_fields__},
            "max_num_batched_tokens": twin.config.max_num_batched_tokens + change.tokens,
            "max_num_seqs": twin.config.max_num_seqs + change.seats,
        }
    )
    if change.position:
        order = [r for r in twin.waiting if r.request_id != request_id]
        order.insert(change.position - 1, twin.requests[request_id])

        class Queue(list):
            def peek(self):
                return self[0]

            def peek_last(self):
                return self[-1]

            def pop(self):
                return super().pop(0)

            def prepend(self, request):
                self.insert(0, request)

        twin.waiting = Queue(order)
    return request_id in twin.schedule().num_scheduled_tokens


def workload(seed):
    """A scheduler under pressure, before each of its steps."""
    rng = random.Random(seed)
    chunked = rng.random() < 0.8
    scheduler = make_scheduler(
        num_blocks=rng.choice([8, 12, 20]),
        max_num_seqs=rng.choice([4, 8]),
        # without chunks the longest request must fit the budget in one piece
        max_num_batched_tokens=rng.choice([6, 16, 40] if chunked else [40]),
        policy=rng.choice(["fcfs", "priority"]),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
    )
    longest = 4 * (scheduler.config.num_blocks - 1)
    for number in range(60):
        if rng.random() < 0.35:
            length = rng.randint(1, min(20, longest - 8))
            start = rng.choice([0, 100])
            add(
                scheduler,
                f"r{number}",
                range(start, start + length),
                max_tokens=rng.randint(1, 8),
                priority=rng.randint(0, 2),
                arrival_time=float(number),
            )
        if scheduler.requests and rng.random() < 0.05:
            scheduler.finish_requests(
                [rng.choice(list(scheduler.requests))], RequestStatus.FINISHED_ABORTED
            )
        yield scheduler, rng
        run_step(scheduler, token=rng.randint(0, 3))


def waiting_cases(seeds):
    for seed in seeds:
        for scheduler, rng in workload(seed):
            decided = copy.deepcopy(scheduler).schedule().num_scheduled_tokens
            waiting = [i for i in scheduler.requests if i not in decided]
            if waiting:
                yield scheduler, rng, rng.choice(waiting)


def test_stated_changes_work_and_smaller_ones_do_not():
    counts = {"stated": 0, "none": 0}
    kinds = set()
    for scheduler, rng, request_id in waiting_cases(range(60)):
        change = WhatIf(scheduler).least_change(request_id)
        if change is None:
            counts["none"] += 1
            continue
        counts["stated"] += 1
        assert runs_in_a_deep_copy(scheduler, request_id, change)
        (kind,) = [n for n in change.__struct_fields__ if getattr(change, n)]
        kinds.add(kind)
        amount = getattr(change, kind)
        if kind == "position":
            smaller = range(amount + 1, len(scheduler.waiting) + 1)
        else:
            smaller = range(1, amount)
        tried = {smaller[-1 if kind != "position" else 0]} if len(smaller) else set()
        tried |= set(rng.sample(list(smaller), min(len(smaller), 4)))
        for less in tried:
            assert not runs_in_a_deep_copy(scheduler, request_id, Change(**{kind: less})), (
                request_id,
                change,
                less,
            )
    assert kinds == {"blocks", "tokens", "seats", "position"}
    assert counts["stated"] > 200
    assert counts["none"] <= 0.2 * sum(counts.values()), counts


@pytest.mark.hypothesis
def test_many_sampled_questions():
    """In `make fuzz` 10,000 of them; each smaller change is tried on a copy of its own."""
    wanted = 10_000 if settings.default.max_examples > 1000 else 500
    seen, none = 0, 0
    for scheduler, rng, request_id in waiting_cases(range(1000, 10_000)):
        what_if = WhatIf(scheduler)
        change = what_if.least_change(request_id)
        seen += 1
        if change is None:
            none += 1
        else:
            assert runs_in_a_deep_copy(scheduler, request_id, change)
            (kind,) = [n for n in change.__struct_fields__ if getattr(change, n)]
            amount = getattr(change, kind)
            last = len(scheduler.waiting)
            smaller = range(amount + 1, last + 1) if kind == "position" else range(1, amount)
            nearest = {amount + 1 if kind == "position" else amount - 1} & set(smaller)
            for less in nearest | set(rng.sample(smaller, min(len(smaller), 32))):
                assert not what_if.runs(request_id, Change(**{kind: less})), (change, less)
        if seen == wanted:
            break
    assert seen == wanted
    assert none <= 0.2 * seen, none


@pytest.mark.hypothesis
def test_where_none_is_stated_no_single_change_works():
    """A dozen cases on deep copies; in `make fuzz` 500, on the scheduler's own copies."""
    wanted = 500 if settings.default.max_examples > 1000 else 12
    seen = 0
    for scheduler, _, request_id in waiting_cases(range(60, 10_000)):
        what_if = WhatIf(scheduler)
        if what_if.least_change(request_id) is not None:
            continue
        seen += 1

        def works(change, scheduler=scheduler, what_if=what_if, request_id=request_id):
            if wanted == 500:
                return what_if.runs(request_id, change)
            return runs_in_a_deep_copy(scheduler, request_id, change)

        for kind, most in (("blocks", 60), ("tokens", 120), ("seats", 20)):
            for amount in range(1, most, 3):
                assert not works(Change(**{kind: amount}))
        for position in range(1, len(scheduler.waiting) + 1):
            if request_id in [r.request_id for r in scheduler.waiting]:
                assert not works(Change(position=position))
        limits = what_if.binding_limits(request_id)
        if limits is not None:
            assert limits[0] != limits[1]
        if seen == wanted:
            break
    assert seen == wanted


def test_looking_changes_nothing():
    for scheduler, _, request_id in waiting_cases([3]):
        before = copy.deepcopy(scheduler)
        WhatIf(scheduler).least_change(request_id)
        one, other = before.schedule(), copy.deepcopy(scheduler).schedule()
        assert one.num_scheduled_tokens == other.num_scheduled_tokens
        assert one.kv_events == other.kv_events
        assert list(before.kv_cache_manager.block_pool.free_queue) == list(
            copy.deepcopy(before).kv_cache_manager.block_pool.free_queue
        )


def test_a_request_that_runs_needs_no_change():
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    assert WhatIf(scheduler).least_change("a") == Change()


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"max_num_seqs": 1}, Change(seats=1)),
        ({"max_num_batched_tokens": 8}, Change(tokens=1)),
        ({"num_blocks": 4}, Change(blocks=1)),
        ({"max_num_batched_tokens": 10, "enable_chunked_prefill": False}, Change(tokens=6)),
    ],
)
def test_the_reason_names_its_remedy(settings, change):
    scheduler = make_scheduler(**settings)
    add(scheduler, "first", 8)
    add(scheduler, "head", range(100, 108))

    assert WhatIf(scheduler).least_change("head") == change


def test_a_request_behind_a_big_one_would_run_at_the_head():
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "first", 8)
    add(scheduler, "big", range(100, 120))
    add(scheduler, "small", range(200, 204))

    assert WhatIf(scheduler).least_change("small") == Change(position=2)
    decisions = {d.request_id: d.outcome for d in scheduler.schedule().decisions}
    assert decisions == {"first": Outcome.SCHEDULED, "big": Outcome.WAITING}
