"""How fast lmscope generates beside transformers' batched `generate`.

    .venv/bin/python kernels/benchmarks/peers.py --rounds 5 --threads 1 --out peers.json

Each engine lives in a worker process of its own for the whole run and gets its work as JSON
lines, so nothing is loaded twice and only one engine works at a time. In every round each engine
runs the same token ids, in an order that rotates; ratios are taken within a round, where the
machine is the same for both, and then min, median and max over the rounds. No verdict is given
when the reference waited for the machine. The exit status is 0 when every goal is met, 1 when one
is missed and 2 when there is no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from workloads import Workload, make_encoder, make_workload, workload_shape

__all__ = [
    "Peer",
    "PeerError",
    "Run",
    "Spread",
    "busy_share",
    "decode_rate",
    "equal_share",
    "main",
    "rotated",
    "speedups",
    "spread",
    "verdict",
]

# The engine that the others are measured against.
REFERENCE = "transformers"
# Least ratio of transformers' total time to lmscope's, by workload.
GOALS = {"4x20": 0.95, "16x20": 0.95}
# Share of its wall time that the reference may spend waiting for a core.
MAX_BUSY_SHARE = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()
    peers: dict[str, Peer] = {}
    try:
        # lmscope comes first: it knows the demo model, and names a folder that both can load.
        peers["lmscope"] = _start("lmscope", options.model, options.threads)
        folder = str(peers["lmscope"].ready["model"])
        peers[REFERENCE] = _start(REFERENCE, folder, options.threads)
        results = {}
        for name in options.workloads.split(","):
            workload = make_workload(name, make_encoder(folder))
            results[name] = measure(peers, workload, options.rounds)
            print(table(results[name], workload, options.threads), flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    lines, status = verdict(results, options.threads)
    print("\n".join(lines))
    if options.out:
        report = {
            "threads": options.threads,
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "lmscope")},
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "engines": {name: peer.ready for name, peer in peers.items()},
            "workloads": {name: _as_data(by_engine) for name, by_engine in results.items()},
            "verdict": lines,
        }
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    return status


def _as_data(runs: dict[str, list[Run]]) -> dict[str, list[dict[str, object]]]:
    """Every measurement; of the generated tokens only how many are the reference's."""
    return {
        name: [
            {
                "first_s": run.first_s,
                "total_s": run.total_s,
                "total_cpu_s": run.total_cpu_s,
                "peak_rss_bytes": run.peak_rss_bytes,
                "equal": equal_share(run.token_ids, theirs.token_ids),
            }
            for run, theirs in zip(own, runs[REFERENCE], strict=True)
        ]
        for name, own in runs.items()
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every engine")
    parser.add_argument(
        "--workloads",
        default="1x20,4x20,16x20,mixed",
        help="REQUESTSxPROMPT_TOKENS, or mixed, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--out", help="write every measurement to this JSON file")
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    for name in options.workloads.split(","):
        try:
            workload_shape(name)
        except ValueError as error:
            parser.error(str(error))
    return options


# --- the driver ----------------------------------------------------------------------------


class PeerError(RuntimeError):
    """A worker answered with an error, or died."""


class Peer:
    """One engine in a process of its own, which answers one JSON line with one JSON line."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        # What libraries print goes here, and is shown when the worker dies.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  close() ends it
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.ready = self._read()

    def ask(self, **request: object) -> dict[str, Any]:
        """What the worker answers; raises PeerError with its words when it failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead, and reading says what its last words were
        return self._read()

    def close(self) -> None:
        """End the worker: it stops by itself at the end of its input."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise PeerError(f"{self.name} died:\n{self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer


def _start(name: str, model: str, threads: int) -> Peer:
    worker = str(Path(__file__).with_name("peer_worker.py"))
    command = [sys.executable, worker, name, model, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    peer = Peer(name, command, environment)
    print(f"{name}: ready in {peer.ready['load_s']:.1f} s", file=sys.stderr)
    return peer


@dataclass(frozen=True)
class Run:
    """One engine, one round: seconds of wall and CPU time, and what came out.

    first_s    all requests with one output token each: the whole batch is prefilled
    total_s    all requests with all output tokens
    """

    first_s: float
    total_s: float
    total_cpu_s: float
    peak_rss_bytes: int
    token_ids: list[list[int]]


def measure(peers: dict[str, Peer], workload: Workload, rounds: int) -> dict[str, list[Run]]:
    """`rounds` runs of each engine, after one that does not count."""
    for peer in peers.values():
        _run(peer, workload)
    runs: dict[str, list[Run]] = {name: [] for name in peers}
    for number in range(rounds):
        for name in rotated(list(peers), number):
            runs[name].append(_run(peers[name], workload))
    return runs


def _run(peer: Peer, workload: Workload) -> Run:
    ones = [1] * len(workload.prompts)
    first = peer.ask(prompts=workload.prompts, num_output_tokens=ones)
    whole = peer.ask(prompts=workload.prompts, num_output_tokens=workload.num_output_tokens)
    lengths = [len(token_ids) for token_ids in whole["token_ids"]]
    if lengths != workload.num_output_tokens:
        raise PeerError(
            f"{peer.name} generated {lengths} tokens for {workload.name}; "
            f"asked were {workload.num_output_tokens}"
        )
    return Run(
        first_s=first["wall_s"],
        total_s=whole["wall_s"],
        total_cpu_s=whole["cpu_s"],
        peak_rss_bytes=whole["peak_rss_bytes"],
        token_ids=whole["token_ids"],
    )


# --- arithmetic ----------------------------------------------------------------------------


class Spread(NamedTuple):
    """The least, the middle and the greatest of some measurements."""

    min: float
    median: float
    max: float

    def text(self, digits: int) -> str:
        return "/".join(f"{value:.{digits}f}" for value in self)


def spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


def rotated(names: Sequence[str], number: int) -> list[str]:
    """`names` from a place that moves on with each round, so that each is first in turn."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def speedups(reference: Sequence[Run], own: Sequence[Run]) -> list[float]:
    """How many times as fast as the reference, round by round."""
    return [theirs.total_s / ours.total_s for theirs, ours in zip(reference, own, strict=True)]


def decode_rate(run: Run) -> float:
    """Tokens per second after the first of each request.

    The time for all tokens less the time for the first ones; infinite when noise swallowed it.
    """
    num_tokens = sum(map(len, run.token_ids)) - len(run.token_ids)
    seconds = run.total_s - run.first_s
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


def table(runs: dict[str, list[Run]], workload: Workload, threads: int) -> str:
    """One line per engine; three numbers are min/median/max over the rounds."""
    reference = runs[REFERENCE]
    num_prompt_tokens = sum(map(len, workload.prompts))
    lines = [
        f"\n{workload.name}: {len(workload.prompts)} requests, {num_prompt_tokens} prompt tokens, "
        f"{sum(workload.num_output_tokens)} output tokens, {threads} threads, "
        f"{len(reference)} rounds",
        f"{'engine':14}{'first token s':>18}{'decode tokens/s':>24}{'total s':>18}"
        f"{'CPU s':>8}{'times faster':>18}{'equal':>8}{'MiB':>7}",
    ]
    for name, own in runs.items():
        lines.append(
            f"{name:14}{spread([run.first_s for run in own]).text(2):>18}"
            f"{spread([decode_rate(run) for run in own]).text(1):>24}"
            f"{spread([run.total_s for run in own]).text(2):>18}"
            f"{statistics.median(run.total_cpu_s for run in own):8.2f}"
            f"{spread(speedups(reference, own)).text(2):>18}"
            f"{equal_share(own[0].token_ids, reference[0].token_ids):8.3f}"
            f"{max(run.peak_rss_bytes for run in own) >> 20:7}"
        )
    return "\n".join(lines)


def verdict(results: dict[str, dict[str, list[Run]]], threads: int) -> tuple[list[str], int]:
    """A line for each workload that has a goal, and the exit status."""
    lines = [""]
    status = 0
    for name in sorted(GOALS.keys() & results.keys()):
        reference, own = results[name][REFERENCE], results[name]["lmscope"]
        busy = busy_share(reference, threads)
        if busy > MAX_BUSY_SHARE:
            lines.append(
                f"{name}: no verdict, {REFERENCE} waited for a core {busy:.0%} of its time "
                f"(at most {MAX_BUSY_SHARE:.0%}); run again on a quiet machine"
            )
            status = 2
            continue
        ratio = statistics.median(speedups(reference, own))
        met = ratio >= GOALS[name]
        lines.append(
            f"{name}: {'met' if met else 'MISSED'}, lmscope is {ratio:.2f} times as fast as "
            f"{REFERENCE}, the goal is {GOALS[name]:.2f}"
        )
        status = status or (0 if met else 1)
    return lines, status


if __name__ == "__main__":
    sys.exit(main())
