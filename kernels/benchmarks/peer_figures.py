"""What `peers.py` measured, and the tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

__all__ = [
    "REFERENCE",
    "Result",
    "Run",
    "Spread",
    "busy_share",
    "decode_rate",
    "engine_table",
    "equal_share",
    "floor_table",
    "speedups",
    "spread",
    "workload_table",
]

# The engine whose float32 tokens the others are compared with, and their time.
REFERENCE = "transformers"


@dataclass(frozen=True)
class Run:
    """One engine, one round: seconds of wall and CPU time, and what came out.

    first_s    all requests with one output token each: the whole batch is prefilled
    total_s    all requests with all output tokens
    equal      share of the reference's tokens, up to the first difference of each request
    leads      for each request that left the reference's tokens, how much more the reference's
               logits speak for its own token than for the other; only where they were asked for
    """

    first_s: float
    total_s: float
    total_cpu_s: float
    peak_rss_bytes: int
    equal: float = 1.0
    leads: tuple[float, ...] = ()


@dataclass(frozen=True)
class Result:
    """One workload: its size, and the runs of each engine, round by round."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Result:
        runs = {
            name: [Run(**{**run, "leads": tuple(run["leads"])}) for run in own]
            for name, own in data["runs"].items()
        }
        return cls(**{**data, "runs": runs})


class Spread(NamedTuple):
    """The least, the middle and the greatest of some measurements."""

    min: float
    median: float
    max: float

    def text(self, digits: int) -> str:
        return "/".join(f"{value:.{digits}f}" for value in self)


def spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


def speedups(theirs: Sequence[Run], ours: Sequence[Run]) -> list[float]:
    """How many times as fast ours are as theirs, round by round."""
    return [their.total_s / our.total_s for their, our in zip(theirs, ours, strict=True)]


def decode_rate(result: Result, run: Run) -> float:
    """Tokens per second after the first of each request.

    The time for all tokens less the time for the first ones; infinite when noise swallowed it.
    """
    seconds = run.total_s - run.first_s
    num_tokens = result.num_output_tokens - result.num_requests
    return num_tokens / seconds if seconds > 0 else float("inf")


def equal_share(token_ids: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Share of `expected` that is the same up to the first difference of each request."""
    equal = sum(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        for ours, theirs in zip(token_ids, expected, strict=True)
    )
    return equal / sum(map(len, expected))


def busy_share(runs: Sequence[Run], threads: int) -> float:
    """Share of the wall time in which the engine wanted a core and had none; 0 when alone.

    The threads of an engine spin while one of them works, so CPU time divided by their number is
    the time that it would have taken on a quiet machine.
    """
    return statistics.median(
        max(0.0, run.total_s - run.total_cpu_s / threads) / run.total_s for run in runs
    )


# --- tables --------------------------------------------------------------------------------


def workload_table(results: Sequence[Result]) -> list[str]:
    """Lines of a Markdown table; three numbers are min/median/max over the rounds."""
    lines = [
        "| workload | engine | first token, s | prefill, tokens/s | decode, tokens/s | total, s "
        f"| CPU, s | times as fast as {REFERENCE} | tokens equal | peak memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        reference = result.runs[REFERENCE]
        for place, (name, own) in enumerate(result.runs.items()):
            cells = [
                result.name if place == 0 else "",
                name,
                spread([run.first_s for run in own]).text(2),
                spread([result.num_prompt_tokens / run.first_s for run in own]).text(0),
                spread([decode_rate(result, run) for run in own]).text(1),
                spread([run.total_s for run in own]).text(2),
                spread([run.total_cpu_s for run in own]).text(2),
                "1" if name == REFERENCE else spread(speedups(reference, own)).text(2),
                f"{statistics.median(run.equal for run in own):.3f}",
                str(max(run.peak_rss_bytes for run in own) >> 20),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def engine_table(engines: dict[str, dict[str, Any]], skipped: dict[str, str]) -> list[str]:
    """Lines of a Markdown table: what was measured, how long it loads, and what was not there."""
    lines = ["| engine | versions | load, s | memory when loaded, MiB |", "|---|---|---|---|"]
    for name, about in engines.items():
        versions = ", ".join(f"{what} {which}" for what, which in about["versions"].items())
        lines.append(
            f"| {name} | {versions} | {about['load_s']:.1f} | {about['peak_rss_bytes'] >> 20} |"
        )
    lines += [f"| {name} | skipped: {reason} | | |" for name, reason in skipped.items()]
    return lines


# Bytes of a weight as an engine reads it in each step.
_WEIGHT_BYTES = {"lmscope-exact": 4, "lmscope": 2, "lmscope-int8": 1, REFERENCE: 4, "vllm": 4}


def floor_table(results: Sequence[Result], floors: dict[str, Any]) -> list[str]:
    """Lines of two Markdown tables: what the machine can do, and how near decoding comes to it.

    A step cannot be shorter than reading its weights, nor than its products at the best rate of
    float32 products.
    """
    best_read, median_read = floors["read_gb_per_s"]
    best_rate = max(step["gflop_per_s"][0] for step in floors["steps"])
    lines = [
        f"Reading memory: {best_read:.1f} GB/s at best, {median_read:.1f} in the median; "
        f"{floors['num_weights'] / 1e6:.1f} million weights a step.",
        "",
        "| float32 products of a step, rows | ms, best | ms, median | GFLOP/s, best |",
        "|---|---|---|---|",
    ]
    for step in floors["steps"]:
        best, median = (seconds * 1e3 for seconds in step["seconds"])
        lines.append(
            f"| {step['rows']} | {best:.1f} | {median:.1f} | {step['gflop_per_s'][0]:.0f} |"
        )
    lines += [
        "",
        "| decode step | engine | floor of reading, ms | floor of products, ms | measured, ms "
        "| share of the floor |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        if not result.name[0].isdecimal():  # its batch shrinks, so there is no one step
            continue
        for name, own in result.runs.items():
            if name in _WEIGHT_BYTES:
                read_s = floors["num_weights"] * _WEIGHT_BYTES[name] / 1e9 / best_read
                rate = statistics.median(decode_rate(result, run) for run in own)
                products = 2 * floors["num_weights"] * result.num_requests
                compute_s, step_s = products / 1e9 / best_rate, result.num_requests / rate
                lines.append(
                    f"| {result.name} | {name} | {read_s * 1e3:.1f} | {compute_s * 1e3:.1f} "
                    f"| {step_s * 1e3:.1f} | {max(read_s, compute_s) / step_s:.0%} |"
                )
    return lines
