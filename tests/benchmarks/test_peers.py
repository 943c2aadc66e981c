"""The arithmetic of the comparison with other engines, and how it talks to its workers."""

from __future__ import annotations

import os
import sys

import peers
import pytest
import workloads

ECHO = """
import json, sys
print(json.dumps({"ready": "echo"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["prompts"] == "die":
        sys.exit("out of memory")
    if request["prompts"] == "fail":
        print(json.dumps({"error": "ValueError('no')"}), flush=True)
        continue
    token_ids = [[7] * count for count in request["num_output_tokens"]]
    print(json.dumps(
        {"wall_s": 1.0, "cpu_s": 0.5, "peak_rss_bytes": 1 << 20, "token_ids": token_ids}
    ), flush=True)
"""


def run(first_s=1.0, total_s=3.0, total_cpu_s=3.0, token_ids=((1, 2, 3), (4, 5, 6))):
    return peers.Run(first_s, total_s, total_cpu_s, 1 << 20, [list(ids) for ids in token_ids])


@pytest.fixture
def echo():
    peer = peers.Peer("echo", [sys.executable, "-c", ECHO], dict(os.environ))
    yield peer
    peer.close()


# --- arithmetic ---


def test_a_spread_is_min_median_and_max():
    assert peers.spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert peers.spread([1.0, 2.0]).text(1) == "1.0/1.5/2.0"


def test_each_engine_is_first_in_turn():
    orders = [peers.rotated(["a", "b", "c"], number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_speedups_are_taken_within_a_round():
    # A round on a slow machine is slow for both, and says the same.
    reference = [run(total_s=2.0), run(total_s=40.0)]
    own = [run(total_s=1.0), run(total_s=20.0)]
    assert peers.speedups(reference, own) == [2.0, 2.0]


def test_decode_rate_counts_neither_the_first_tokens_nor_their_time():
    assert peers.decode_rate(run(first_s=1.0, total_s=3.0)) == 2.0  # 4 tokens in 2 s
    assert peers.decode_rate(run(first_s=3.0, total_s=3.0)) == float("inf")


def test_equal_share_counts_up_to_the_first_difference_of_each_request():
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert peers.equal_share(expected, expected) == 1.0
    assert peers.equal_share([[1, 2, 9, 4], [9, 6, 7, 8]], expected) == 0.25


def test_busy_share_is_the_time_without_a_core():
    assert peers.busy_share([run(total_s=4.0, total_cpu_s=4.0)], threads=1) == 0.0
    assert peers.busy_share([run(total_s=4.0, total_cpu_s=4.0)], threads=2) == 0.5
    assert peers.busy_share([run(total_s=4.0, total_cpu_s=4.1)], threads=1) == 0.0


# --- verdict ---


def judge(reference, own):
    return peers.verdict({"4x20": {"transformers": [reference], "lmscope": [own]}}, threads=1)


def test_the_goal_is_met_from_95_percent_on():
    lines, status = judge(run(total_s=0.95, total_cpu_s=0.95), run(total_s=1.0))
    assert status == 0
    assert lines[-1].startswith("4x20: met, lmscope is 0.95 times as fast")


def test_a_missed_goal_is_said_and_changes_the_exit_status():
    lines, status = judge(run(total_s=0.94, total_cpu_s=0.94), run(total_s=1.0))
    assert status == 1
    assert lines[-1].startswith("4x20: MISSED")


def test_there_is_no_verdict_when_the_reference_waited_for_the_machine():
    lines, status = judge(run(total_s=4.0, total_cpu_s=2.8), run(total_s=1.0))
    assert status == 2
    assert "no verdict, transformers waited for a core 30% of its time" in lines[-1]


def test_a_workload_without_a_goal_has_no_verdict_line():
    results = {"1x20": {"transformers": [run()], "lmscope": [run(total_s=9.0)]}}
    assert peers.verdict(results, threads=1) == ([""], 0)


# --- workers ---


def test_rounds_are_measured_after_one_that_does_not_count(echo):
    workload = workloads.Workload("2x3", [[1, 2, 3], [4, 5, 6]], [2, 2])
    runs = peers.measure({"transformers": echo}, workload, rounds=2)
    assert runs == {"transformers": [run(1.0, 1.0, 0.5, ((7, 7), (7, 7)))] * 2}
    assert "transformers" in peers.table(runs, workload, threads=1)


def test_an_error_of_a_worker_is_raised_and_the_worker_goes_on(echo):
    with pytest.raises(peers.PeerError, match=r"echo: ValueError\('no'\)"):
        echo.ask(prompts="fail")
    assert echo.ask(prompts=[[1]], num_output_tokens=[1])["token_ids"] == [[7]]


def test_the_last_words_of_a_dead_worker_are_shown(echo):
    with pytest.raises(peers.PeerError, match=r"(?s)echo died:.*out of memory"):
        echo.ask(prompts="die")
    with pytest.raises(peers.PeerError, match="out of memory"):
        echo.ask(prompts=[])


# --- workloads ---


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_a_workload_is_named_by_requests_and_prompt_tokens():
    workload = workloads.make_workload("4x20", encode)
    assert [len(prompt) for prompt in workload.prompts] == [20] * 4
    assert workload.num_output_tokens == [64] * 4


def test_mixed_is_16_requests_of_all_lengths():
    workload = workloads.make_workload("mixed", encode)
    assert (min(map(len, workload.prompts)), max(map(len, workload.prompts))) == (16, 512)
    assert (min(workload.num_output_tokens), max(workload.num_output_tokens)) == (8, 64)
    assert len(set(workload.num_output_tokens)) == len(workload.prompts) == 16


def test_prompts_are_the_same_each_time_and_share_no_block():
    first = workloads.make_workload("16x20", encode)
    assert first == workloads.make_workload("16x20", encode)
    assert len({tuple(prompt[:16]) for prompt in first.prompts}) == 16


@pytest.mark.parametrize("name", ["", "x20", "4x", "0x20", "4x0", "-1x20", "four", "4x20x1"])
def test_an_unknown_workload_is_refused(name: str):
    with pytest.raises(ValueError, match=r"must be like 4x20, or mixed"):
        workloads.make_workload(name, encode)
