"""The goals of `peers.py` as data, and whether they are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peer_figures import REFERENCE, Result, busy_share, speedups

__all__ = ["GOALS", "MAX_BUSY_SHARE", "Cell", "Goal", "goal_table", "judge", "verdict"]


class Goal(NamedTuple):
    """How many times as fast lmscope must be, and what it aims at; no aim of its own: None."""

    must: float
    aim: float | None = None


# By what of lmscope is compared with whom; then by workload.
GOALS: dict[tuple[str, str], dict[str, Goal]] = {
    ("lmscope", "transformers"): {
        "1x20": Goal(2.3, 2.7),
        "4x20": Goal(3.2, 3.8),
        "16x20": Goal(1.8, 2.1),
        "32x20": Goal(1.65, 2.0),
        "mixed16": Goal(2.7, 3.3),
    },
    ("lmscope", "transformers-cb"): {
        "1x20": Goal(2.7, 3.2),
        "4x20": Goal(3.8, 4.5),
        "16x20": Goal(2.4, 3.0),
        "32x20": Goal(2.2, 2.6),
        "mixed16": Goal(3.2, 3.9),
    },
    ("lmscope", "vllm"): {
        "1x20": Goal(1.8, 2.2),
        "4x20": Goal(1.8, 2.1),
        "16x20": Goal(1.35, 1.6),
        "32x20": Goal(1.15, 1.3),
        "mixed16": Goal(1.05, 1.2),
        "shared16": Goal(3.0),
    },
    ("lmscope", "vllm-caching"): {"shared16": Goal(1.0)},
    ("lmscope", "llama.cpp"): {
        "4x20": Goal(1.0, 1.2),
        "16x20": Goal(1.3, 1.7),
        "32x20": Goal(1.6, 1.9),
        "mixed16": Goal(1.6, 1.9),
    },
    # Quantised weights on both sides.
    ("lmscope-int8", "llama.cpp"): {
        "1x20": Goal(0.9, 1.1),
        "4x20": Goal(1.0, 1.3),
        "16x20": Goal(1.3, 1.7),
    },
}

# Share of its wall time that the reference may spend waiting for a core.
MAX_BUSY_SHARE = 0.25
# Least share of tokens that are those of float32.
LEAST_EQUAL = {"lmscope": 0.98}
# Exact arithmetic may part from the reference only where the logits are as close as this: rounding
# in another order moves them by less.
NEAR_TIE = 1e-3
EXACT = "lmscope-exact"


@dataclass(frozen=True)
class Cell:
    """One comparison on one workload; `word` is "aim met", "met", "MISSED" or "no verdict"."""

    ours: str
    theirs: str
    workload: str
    goal: Goal
    ratio: float
    word: str


def judge(results: Sequence[Result], threads: int) -> list[Cell]:
    """The goals that were measured, in their order."""
    cells = []
    for (ours, theirs), goals in GOALS.items():
        for result in results:
            goal = goals.get(result.name)
            if goal is None or not {ours, theirs} <= result.runs.keys():
                continue
            ratio = statistics.median(speedups(result.runs[theirs], result.runs[ours]))
            if busy_share(result.runs[REFERENCE], threads) > MAX_BUSY_SHARE:
                word = "no verdict"
            elif ratio < goal.must:
                word = "MISSED"
            else:
                word = "met" if goal.aim is None or ratio < goal.aim else "aim met"
            cells.append(Cell(ours, theirs, result.name, goal, ratio, word))
    return cells


def goal_table(results: Sequence[Result], threads: int) -> list[str]:
    """Lines of a Markdown table: a row for each comparison, a column for each workload."""
    cells = {(cell.ours, cell.theirs, cell.workload): cell for cell in judge(results, threads)}
    names = [r.name for r in results if any(r.name in goals for goals in GOALS.values())]
    lines = [
        f"| times as fast (must / aim) | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for (ours, theirs), goals in GOALS.items():
        row = []
        for name in names:
            cell, goal = cells.get((ours, theirs, name)), goals.get(name)
            if goal is None:
                row.append("")
            elif cell is None:
                row.append(f"not measured ({_text(goal)})")
            else:
                row.append(f"**{cell.ratio:.2f}** ({_text(goal)}), {cell.word}")
        lines.append(f"| {ours} against {theirs} | {' | '.join(row)} |")
    return lines


def verdict(results: Sequence[Result], threads: int) -> tuple[list[str], int]:
    """A line for each goal that was measured, and the exit status.

    0 when every goal is met, 1 when one is missed, 2 when there is no verdict on some and none
    is missed.
    """
    lines, words = [], []
    for cell in judge(results, threads):
        line = (
            f"{cell.workload}: {cell.word}, {cell.ours} is {cell.ratio:.2f} times as fast as "
            f"{cell.theirs}, the goal is {_text(cell.goal)}"
        )
        if cell.word == "no verdict":
            reference = next(r for r in results if r.name == cell.workload).runs[REFERENCE]
            line += (
                f"; {REFERENCE} waited for a core {busy_share(reference, threads):.0%} of its time "
                f"(at most {MAX_BUSY_SHARE:.0%}), so run again on a quiet machine"
            )
        lines.append(line)
        words.append(cell.word)
    for what, is_met in (*_judge_tokens(results), *_judge_memory(results)):
        words.append("met" if is_met else "MISSED")
        lines.append(f"{words[-1]}: {what}")
    return lines, 1 if "MISSED" in words else 2 if "no verdict" in words else 0


def _judge_tokens(results: Sequence[Result]) -> list[tuple[str, bool]]:
    judged = []
    for name, least in LEAST_EQUAL.items():
        measured = [result for result in results if name in result.runs]
        total = sum(result.num_output_tokens for result in measured)
        if total:
            share = sum(
                statistics.median(run.equal for run in result.runs[name])
                * (result.num_output_tokens / total)
                for result in measured
            )
            judged.append(
                (
                    f"{share:.3f} of the tokens of {name} are those of float32, "
                    f"at least {least} must be",
                    share >= least,
                )
            )
    measured = [result for result in results if EXACT in result.runs]
    if measured:
        leads = [abs(x) for result in measured for run in result.runs[EXACT] for x in run.leads]
        judged.append(
            (
                f"{len(leads)} requests of {EXACT} part from float32, the logits there are at most "
                f"{max(leads, default=0):.2g} apart; {NEAR_TIE:g} is a near tie",
                max(leads, default=0) <= NEAR_TIE,
            )
        )
    return judged


def _judge_memory(results: Sequence[Result]) -> list[tuple[str, bool]]:
    peaks: Mapping[str, int] = {
        name: max((run.peak_rss_bytes for r in results for run in r.runs.get(name, ())), default=0)
        for name in ("lmscope", "vllm")
    }
    if not all(peaks.values()):
        return []
    ours, theirs = (peaks[name] >> 20 for name in ("lmscope", "vllm"))
    return [
        (f"peak memory of lmscope is {ours} MiB, at most vLLM's {theirs}", ours <= theirs),
    ]


def _text(goal: Goal) -> str:
    return f"{goal.must:g}" if goal.aim is None else f"{goal.must:g} / {goal.aim:g}"
