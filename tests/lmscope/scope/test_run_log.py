"""The log of steps: complete where it is short, bounded where it is long, and why hits ended."""

from __future__ import annotations

import itertools

import pytest

from lmscope import LLM
from lmscope.boundary import (
    BlockAllocated,
    BlockStored,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    NewRequestData,
    SchedulerOutput,
)
from lmscope.sampling_params import SamplingParams
from lmscope.scope.run_log import LOG_NAMES, RunLog
from lmscope.scope.view import EngineView


def follow(engine):
    """A view that follows an engine."""
    holder = []
    snapshot, _ = engine.tap.follow(lambda boundary: holder[0].apply(boundary), strict=True)
    holder.append(EngineView(snapshot))
    return holder[0]


def counts(record):
    return dict(zip(LOG_NAMES, record.counts, strict=True))


def test_each_step_that_is_over_has_one_record(tiny_engine):
    engine = tiny_engine(num_blocks=60)
    view = follow(engine)
    engine.add("abcabc", max_tokens=4)
    engine.run()
    records = view.log.records

    assert [record.step for record in records] == list(range(view.step))
    assert [counts(r)["scheduled"] for r in records] == [0, 6, 1, 1][: len(records)]
    assert [r.step for r in view.log.since(2)] == list(range(2, view.step))
    assert list(view.log.since(99)) == []


def test_preempted_requests_are_named(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    for boundary in structs:
        view.apply(boundary)
    named = [name for record in view.log.records for name in record.preempted]

    assert len(named) == view.totals.preemptions > 3


def test_a_long_run_is_joined_at_its_old_end_and_loses_no_event(tiny_engine):
    engine = tiny_engine(num_blocks=12, seed=4)
    view = follow(engine)
    view._log = RunLog(limit=16)
    evicted = 0
    for number in range(80):
        if number % 3 == 0:
            engine.add("abcab" + "cab"[: number % 4], max_tokens=5)
        engine.step()
        evicted += len(view.evicted)
    records = view.log.records

    assert len(records) <= 16
    assert records[0].first_step == 0
    for before, after in itertools.pairwise(records):
        assert after.first_step == before.step + 1
    assert records[-1].first_step == records[-1].step
    assert sum(counts(r)["evicted"] for r in records) + len(view.evicted) == evicted > 20


def test_a_copy_goes_its_own_way(tiny_engine):
    engine = tiny_engine()
    view = follow(engine)
    engine.add("abc")
    engine.step()
    other = view.copy()
    engine.step()

    assert len(other.log.records) + 1 == len(view.log.records)


def misses(tiny_engine, *prompts, **settings):
    """What the cache missed of the last of these prompts, each run to its end."""
    engine = tiny_engine(block_size=2, **settings)
    view = follow(engine)
    told = {}
    for prompt in prompts:
        engine.add(prompt, max_tokens=1)
        engine.step()
        told = dict(view.log.misses)
        engine.run()
    (words,) = told.values()
    return words


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["abcd"], "missed from token 0: never seen"),
        (["abcd", "abca"], "missed from token 2: last token is always computed"),
        (["abcd", "abcda"], "missed from token 4: shorter than a block"),
        (["a"], "missed from token 0: shorter than a block"),
        (["abcd", "abccc"], "missed from token 2: never seen"),
    ],
)
def test_it_says_where_the_reuse_of_a_prefix_ended_and_why(tiny_engine, prompts, expected):
    assert misses(tiny_engine, *prompts, num_blocks=40) == expected


def test_it_says_when_the_cache_was_not_asked():
    told = []
    params = SamplingParams(max_tokens=2, skip_reading_prefix_cache=True, temperature=0)
    with LLM("script", execute="scripted", script=lambda _id, _position: 97) as llm:
        view = follow(llm)
        with llm.tap.on(SchedulerOutput, lambda _: told.extend(view.log.misses.values())):
            for _ in range(2):
                llm.generate([{"prompt_token_ids": list(range(40))}], params, use_tqdm=False)

    assert len(told) == 2
    assert all(each.startswith("missed from token 0: not looked up; ") for each in told)


def test_it_says_when_the_content_was_evicted_and_for_whom(tiny_engine):
    words = misses(tiny_engine, "abcdef", "ghghghghgh", "abcdef", num_blocks=7)

    assert words == "missed from token 2: evicted at 2 for r2"


def test_it_says_when_the_tokens_are_there_under_another_salt():
    info = EngineInfo(
        model="m",
        block_size=2,
        num_blocks=8,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1024,
    )
    view = EngineView(EngineSnapshot(info=info, free_queue=range(1, 8)))
    for step, salt in enumerate(["mine", "yours"], start=1):
        name = f"r{step}"
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=(1, 2, 3),
            sampling_params=SamplingParams(),
            cache_salt=salt,
        )
        first, second = 2 * step, 2 * step + 1
        new = NewRequestData(name, (1, 2, 3), SamplingParams(), ((first, second),), 0)
        events = (
            BlockAllocated(first, name),
            BlockAllocated(second, name),
            BlockStored(first, name, 100 + step, None, (1, 2), 0),
        )
        view.apply(request)
        view.apply(
            SchedulerOutput(
                step=step,
                scheduled_new_reqs=(new,),
                num_scheduled_tokens={name: 3},
                kv_events=events,
            )
        )

    assert view.log.misses == {"r2": "missed from token 0: other salt"}


def test_without_a_prefix_cache_nothing_is_missed(tiny_engine):
    engine = tiny_engine(caching=False)
    view = follow(engine)
    engine.add("abc")
    engine.step()

    assert view.log.misses == {}
