"""The benchmark of the scheduler: its loads, its arithmetic, and that it skips vLLM aloud."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import islice

import pytest
import scheduler
import scheduler_load
import scheduler_worker


def cost(step_us=10.0, num_tokens=100, num_preemptions=0):
    return scheduler.Cost(step_us, 0.0, num_tokens, 3, num_preemptions)


SMALL = scheduler_load.Load(
    "small", num_live=6, num_blocks=200, num_warm_steps=5, num_steps=60, num_finished=4
)


@pytest.fixture(scope="module")
def make_engine():
    make, _version = scheduler_worker.import_lmscope()
    return make


# --- loads ---


def test_a_load_has_the_same_requests_each_time():
    first, again = (list(islice(SMALL.plans(), 20)) for _ in range(2))
    assert first == again
    assert len({plan.request_id for plan in first}) == 20


def test_requests_share_prefixes_and_end_in_both_ways():
    plans = list(islice(scheduler_load.LOADS["decode"].plans(), 1000))
    assert len({plan.prompt_token_ids[:128] for plan in plans}) == 20
    ends = {plan.ends_with_eos for plan in plans}
    assert ends == {False, True}
    # Decode-heavy: in the long run requests have more outputs than tokens of their own.
    assert sum(p.num_output_tokens for p in plans) > sum(
        len(p.prompt_token_ids) - 128 for p in plans
    )


def test_a_request_that_ends_with_eos_says_it_where_it_is_planned():
    plan = scheduler_load.Plan("r", (5, 6), num_output_tokens=3, ends_with_eos=True)
    tokens = [scheduler_load.token_at(plan, position) for position in range(3)]
    assert tokens[-1] == scheduler_load.EOS
    assert scheduler_load.EOS not in tokens[:-1]


# --- one engine ---


def test_a_run_keeps_as_many_requests_live_and_counts_only_measured_steps(make_engine):
    result = scheduler_worker.run(make_engine(SMALL), SMALL)
    # Six requests at any time; a new one is prefilled in the step after the end of another.
    assert 5 * 60 < result["num_tokens"] < 6 * 60 + result["num_finished"] * 300
    assert result["num_finished"] > 0
    assert result["num_preemptions"] == 0
    assert result["schedule_s"] > 0
    assert result["update_s"] > 0


def test_a_pool_that_is_too_small_preempts(make_engine):
    load = scheduler_load.Load("tight", num_live=6, num_blocks=70, num_warm_steps=5, num_steps=200)
    assert scheduler_worker.run(make_engine(load), load)["num_preemptions"] > 0


def test_kept_blocks_are_kept_when_the_measuring_begins(make_engine):
    load = scheduler_load.Load(
        "kept", num_live=2, num_blocks=500, num_warm_steps=1, num_steps=1, num_kept_blocks=499
    )
    engine = make_engine(load)
    scheduler_worker.run(engine, load)
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = pool.num_blocks - 1 - pool.num_free_blocks
    assert len(pool.stored) > 499 - held - 2


# --- arithmetic ---


def test_ratios_are_taken_within_pairs():
    each = scheduler.GROWTH[0]
    costs = {each.first: [cost(2.0), cost(40.0)], each.second: [cost(1.0), cost(20.0)]}
    assert scheduler.ratios(each, costs) == [2.0, 2.0]


def test_each_is_first_in_turn_and_the_first_pair_does_not_count():
    order = []
    measures = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    measured = scheduler.in_turn(measures, 2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert measured == {"a": [3, 6], "b": [4, 5]}


@pytest.mark.parametrize(
    ("ours", "theirs", "words", "status"),
    [
        (cost(6.0), cost(10.0), "decode: met, decode, lmscope costs 0.60 times", 0),
        (cost(6.1), cost(10.0), "decode: MISSED, decode, lmscope costs 0.61 times", 1),
        (cost(1.0), cost(10.0, num_tokens=99), "decode: MISSED, tokens are 100 and 99", 1),
    ],
)
def test_the_goal_is_judged_only_where_both_did_the_same(ours, theirs, words, status):
    each = scheduler.BESIDE_VLLM[0]
    lines, given = scheduler.verdict([(each, {each.first: [ours], each.second: [theirs]})])
    assert lines[0].startswith(words)
    assert given == status


def test_the_table_has_a_line_for_each_measurement_and_each_comparison():
    each = scheduler.BESIDE_VLLM[1]
    costs = {each.first: [cost(3.0)] * 2, each.second: [cost(10.0, num_preemptions=2)] * 2}
    lines = scheduler.table([(each, costs)])
    assert "| pressure, lmscope | 2 | 3 | 0 | 3, 3 to 3 | 100 | 3 | 0 |" in lines
    assert "| pressure, lmscope / pressure, vLLM | 2 | 0.300 | 0.300 to 0.300 |" in lines


# --- without vLLM ---


@pytest.mark.parametrize(
    ("python", "words"),
    [
        (None, "no interpreter is named; give --vllm-python"),
        ("/nowhere/python", "No such file or directory"),
        (sys.executable, "ModuleNotFoundError: No module named 'vllm'"),
    ],
)
def test_vllm_is_skipped_with_the_reason(python, words):
    if python == sys.executable and importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed beside lmscope")
    peer, reason = scheduler._start_vllm(python)
    assert peer is None
    assert words in reason


def test_a_run_without_vllm_says_so_and_measures_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scheduler, "GROWTH", scheduler.GROWTH[:1])
    answers = {"schedule_s": 1.0, "update_s": 1.0, "num_tokens": 5, "num_finished": 1}

    class Echo:
        def __init__(self):
            self.ready = {"version": "0"}

        def ask(self, load):
            return {**answers, "num_preemptions": 0}

        def close(self):
            pass

    monkeypatch.setattr(scheduler, "_start", lambda name, python: Echo())
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    out = tmp_path / "scheduler.json"

    assert scheduler.main(["--pairs", "2", "--out", str(out)]) == 0

    assert "vLLM is skipped: no interpreter is named" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["skipped"].startswith("no interpreter")
    assert [len(costs) for costs in report["costs"]["finished requests"].values()] == [2, 2]
