"""The arithmetic of the comparison with other engines, and its tables."""

from __future__ import annotations

import json

import peer_figures
import pytest
from peer_figures import Result, Run


def run(first_s=1.0, total_s=3.0, total_cpu_s=3.0, **fields):
    return Run(first_s, total_s, total_cpu_s, 1 << 20, **fields)


def result(**runs):
    return Result("4x20", 4, 80, 256, {name.replace("_", "-"): own for name, own in runs.items()})


def test_a_spread_is_min_median_and_max():
    assert peer_figures.spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert peer_figures.spread([1.0, 2.0]).text(1) == "1.0/1.5/2.0"


def test_speedups_are_taken_within_a_round():
    # A round on a slow machine is slow for both, and says the same.
    reference = [run(total_s=2.0), run(total_s=40.0)]
    own = [run(total_s=1.0), run(total_s=20.0)]
    assert peer_figures.speedups(reference, own) == [2.0, 2.0]


def test_decode_rate_counts_neither_the_first_tokens_nor_their_time():
    # 256 - 4 tokens in 2 s
    assert peer_figures.decode_rate(result(), run(first_s=1.0, total_s=3.0)) == 126.0
    assert peer_figures.decode_rate(result(), run(first_s=3.0, total_s=3.0)) == float("inf")


def test_equal_share_counts_up_to_the_first_difference_of_each_request():
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert peer_figures.equal_share(expected, expected) == 1.0
    assert peer_figures.equal_share([[1, 2, 9, 4], [9, 6, 7, 8]], expected) == 0.25


def test_busy_share_is_the_time_without_a_core():
    assert peer_figures.busy_share([run(total_s=4.0, total_cpu_s=4.0)], threads=1) == 0.0
    assert peer_figures.busy_share([run(total_s=4.0, total_cpu_s=4.0)], threads=2) == 0.5
    assert peer_figures.busy_share([run(total_s=4.0, total_cpu_s=4.1)], threads=1) == 0.0


def test_results_survive_being_written_down():
    original = result(transformers=[run()], lmscope=[run(equal=0.5, leads=(0.25, 1.0))])
    assert Result.from_data(json.loads(json.dumps(original.as_data()))) == original


def test_the_table_has_a_row_for_each_engine():
    lines = peer_figures.workload_table(
        [result(transformers=[run(total_s=6.0)] * 2, lmscope=[run(equal=0.5), run(total_s=2.0)])]
    )
    assert lines[2].startswith("| 4x20 | transformers | 1.00/1.00/1.00 | 80/80/80 | 50.4/")
    assert lines[3].startswith("|  | lmscope |")
    assert lines[3].endswith("| 2.00/2.50/3.00 | 0.750 | 1 |")


def test_the_table_of_engines_says_what_was_not_there():
    about = {"versions": {"torch": "2.0"}, "load_s": 1.25, "peak_rss_bytes": 3 << 20}
    lines = peer_figures.engine_table({"lmscope": about}, {"vllm": "no interpreter"})
    assert lines[2:] == [
        "| lmscope | torch 2.0 | 1.2 | 3 |",
        "| vllm | skipped: no interpreter | | |",
    ]


def test_the_floor_is_what_takes_longer_of_reading_and_computing():
    floors = {
        "read_gb_per_s": [10.0, 9.0],
        "num_weights": 1_000_000_000,
        "steps": [{"rows": 1, "seconds": [0.1, 0.2], "gflop_per_s": [20.0, 10.0]}],
    }
    # 4 requests, 63 tokens after the first in 126 s: a step takes 2 s. Reading 2 GB takes 0.2 s,
    # 8 GFLOP at 20 GFLOP/s take 0.4 s.
    lines = peer_figures.floor_table([result(lmscope=[run(first_s=0.0, total_s=126.0)])], floors)
    assert lines[-1] == "| 4x20 | lmscope | 200.0 | 400.0 | 2000.0 | 20% |"


def test_a_batch_that_shrinks_has_no_floor():
    floors = {
        "read_gb_per_s": [1.0, 1.0],
        "num_weights": 1,
        "steps": [{"rows": 1, "seconds": [0.1, 0.2], "gflop_per_s": [20.0, 10.0]}],
    }
    mixed = Result("mixed16", 16, 80, 256, {"lmscope": [run()]})
    assert "mixed16" not in "\n".join(peer_figures.floor_table([mixed], floors))


@pytest.mark.parametrize("name", peer_figures._WEIGHT_BYTES)
def test_each_engine_with_a_floor_is_one_that_is_measured(name):
    import peers

    assert name in peers.ENGINES
