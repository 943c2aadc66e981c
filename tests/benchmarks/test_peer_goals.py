"""What the comparison with other engines calls met, missed and open."""

from __future__ import annotations

import peer_goals
import peers
import pytest
import workloads
from peer_figures import Result, Run


def run(total_s=1.0, total_cpu_s=None, rss=1 << 20, **fields):
    return Run(0.1, total_s, total_s if total_cpu_s is None else total_cpu_s, rss, **fields)


def results(name="4x20", **runs):
    return [Result(name, 4, 80, 256, {key.replace("_", "-"): [own] for key, own in runs.items()})]


@pytest.mark.parametrize(
    ("times", "word", "status"), [(3.1, "MISSED", 1), (3.2, "met", 0), (3.8, "aim met", 0)]
)
def test_a_goal_has_a_floor_and_an_aim(times, word, status):
    lines, given = peer_goals.verdict(results(transformers=run(times), lmscope=run()), 1)
    assert lines[0] == (
        f"4x20: {word}, lmscope is {times:.2f} times as fast as transformers, the goal is 3.2 / 3.8"
    )
    assert given == status


def test_a_goal_without_an_aim_is_met():
    measured = results("shared16", transformers=run(), lmscope=run(), vllm=run(9.0))
    (cell,) = peer_goals.judge(measured, 1)
    assert (cell.theirs, cell.word) == ("vllm", "met")


def test_there_is_no_verdict_when_the_reference_waited_for_the_machine():
    measured = results(transformers=run(4.0, total_cpu_s=2.8), lmscope=run())
    lines, status = peer_goals.verdict(measured, 1)
    assert status == 2
    assert "4x20: no verdict" in lines[0]
    assert "transformers waited for a core 30% of its time (at most 25%)" in lines[0]


def test_what_was_not_measured_is_not_judged_and_the_table_says_so():
    measured = results(transformers=run(4.0), lmscope=run())
    assert [cell.theirs for cell in peer_goals.judge(measured, 1)] == ["transformers"]
    table = peer_goals.goal_table(measured, 1)
    assert "| lmscope against transformers | **4.00** (3.2 / 3.8), aim met |" in table
    assert "| lmscope against vllm | not measured (1.8 / 2.1) |" in table
    # A cell that the goals leave open stays empty.
    assert "| lmscope against vllm-caching |  |" in table


@pytest.mark.parametrize(("equal", "status"), [(0.979, 1), (0.98, 0)])
def test_most_tokens_must_be_those_of_float32(equal, status):
    measured = results(transformers=run(9.0), lmscope=run(equal=equal))
    lines, given = peer_goals.verdict(measured, 1)
    assert any("of the tokens of lmscope are those of float32" in line for line in lines)
    assert given == status


@pytest.mark.parametrize(("lead", "word"), [(-5e-4, "met"), (2e-3, "MISSED")])
def test_exact_tokens_part_at_near_ties_only(lead, word):
    exact = run(equal=0.9, leads=(1e-4, lead))
    lines, _ = peer_goals.verdict(results(transformers=run(9.0), lmscope_exact=exact), 1)
    assert lines[-1].startswith(f"{word}: 2 requests of lmscope-exact part from float32")


def test_memory_is_compared_with_vllm():
    measured = results(transformers=run(9.0), lmscope=run(rss=3 << 20), vllm=run(9.0, rss=2 << 20))
    assert peer_goals.verdict(measured, 1)[0][-1] == (
        "MISSED: peak memory of lmscope is 3 MiB, at most vLLM's 2"
    )


def test_goals_name_engines_and_workloads_that_there_are():
    for pair, goals in peer_goals.GOALS.items():
        assert set(pair) <= set(peers.ENGINES)
        for name, goal in goals.items():
            assert name in peers.WORKLOADS.split(",")
            assert workloads.workload_shape(name)
            assert goal.aim is None or goal.must < goal.aim
