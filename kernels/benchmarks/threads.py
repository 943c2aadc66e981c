"""What a second torch thread saves of a step, and what threads of others take of that.

    .venv/bin/python kernels/benchmarks/threads.py --rounds 5

Wall time of a decode step of a whole engine, from how much longer 64 output tokens take than one,
in fresh processes that take turns: with one thread, with --threads, and with --threads after the
thread that calls the engine has computed something in parallel. Wants as many quiet cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from start import quartiles

__all__ = ["WAYS", "main", "table"]

WAYS = ("one thread", "more threads", "more threads, beside others")
_OUTPUT_TOKENS = 64

# Arguments: model, threads of the engine, threads of a product on the caller's thread, requests.
STEP = """
import sys, time
import torch
from lmscope import LLM, SamplingParams

model, threads, others, requests = sys.argv[1], *map(int, sys.argv[2:])
if others > 1:
    torch.set_num_threads(others)
    torch.ones(512, 512) @ torch.ones(512, 512)
prompts = [{"prompt_token_ids": list(range(100 + 30 * i, 120 + 30 * i))} for i in range(requests)]

def seconds(llm, count):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began

with LLM(model, threads=threads) as llm:
    seconds(llm, 8)
    print((-seconds(llm, 1) + seconds(llm, OUTPUT_TOKENS)) / (OUTPUT_TOKENS - 1) * 1e3)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="more threads (default: 2)")
    parser.add_argument("--requests", default="1,4", help="how many (default: %(default)s)")
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 2:
        parser.error("--rounds must be at least 1, --threads at least 2")
    numbers = {WAYS[0]: (1, 1), WAYS[1]: (options.threads, 1), WAYS[2]: (options.threads,) * 2}
    results: dict[int, dict[str, list[float]]] = {}
    for count in (int(each) for each in options.requests.split(",")):
        own: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                own[way].append(_step_ms(options.model, *numbers[way], count))
        results[count] = own
    print("\n".join(table(results)))
    return 0


def table(results: dict[int, dict[str, list[float]]]) -> list[str]:
    """Lines of a Markdown table: milliseconds of a step by requests and way, with quartiles."""
    lines = [f"| ms per step, requests | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    for count, own in results.items():
        shown = []
        for way in WAYS:
            low, median, high = quartiles(own[way])
            shown.append(f"{median:.1f}; {low:.1f} to {high:.1f}")
        lines.append(f"| {count} | {' | '.join(shown)} |")
    return lines


def _step_ms(model: str, threads: int, others: int, requests: int) -> float:
    code = STEP.replace("OUTPUT_TOKENS", str(_OUTPUT_TOKENS))
    numbers = [str(threads), str(others), str(requests)]
    result = subprocess.run(
        [sys.executable, "-c", code, model, *numbers],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"a measured process failed:\n{result.stderr[-2000:]}")
    return float(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
