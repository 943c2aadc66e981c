"""What batch_invariant=True costs: CPU time of a step beside the default mode, on one torch thread.

    .venv/bin/python kernels/benchmarks/invariant.py --pairs 5

Both engines are in one process and share the demo model. Decode steps are those of requests that
all generate, the median of a run; a prefill is one step with 512 tokens. The runs of the two modes
alternate, who is first changes from pair to pair, and ratios are taken within a pair. CPU time is
that of the process, so a busy machine does not count, but it must not be busy with this process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lmscope import LLM

__all__ = ["WORKLOADS", "Workload", "main", "measure", "table"]


class Workload(NamedTuple):
    """num_requests prompts of prompt_len tokens, each of which generates num_tokens."""

    name: str
    num_requests: int
    prompt_len: int
    num_tokens: int


WORKLOADS = (
    Workload("decode step, 1 request", 1, 16, 33),
    Workload("decode step, 4 requests", 4, 16, 33),
    Workload("decode step, 16 requests", 16, 16, 33),
    Workload("prefill of 512 tokens", 1, 512, 1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs for each workload")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")

    from lmscope import LLM

    with (
        LLM(options.model, threads=1, enable_prefix_caching=False) as default,
        default.like(batch_invariant=True) as invariant,
    ):
        print(invariant.plan, file=sys.stderr)
        for llm in (default, invariant):
            _step_s(llm, WORKLOADS[0])
        runs = [
            (lambda workload: _step_s(default, workload)),
            (lambda workload: _step_s(invariant, workload)),
        ]
        print("\n".join(table({each: measure(each, runs, options.pairs) for each in WORKLOADS})))
    return 0


def measure(
    workload: Workload, runs: Sequence[Callable[[Workload], float]], pairs: int
) -> list[tuple[float, float]]:
    """Seconds of the default and of the invariant mode, pair by pair."""
    seconds = []
    for pair in range(pairs):
        took = {index: runs[index](workload) for index in ((0, 1) if pair % 2 else (1, 0))}
        seconds.append((took[0], took[1]))
    return seconds


def table(seconds: dict[Workload, list[tuple[float, float]]]) -> list[str]:
    """Lines of markdown: medians in milliseconds, and the ratio within pairs with its range."""
    lines = [
        "| CPU time, one thread | default | batch-invariant | ratio | range |",
        "|---|---|---|---|---|",
    ]
    for workload, pairs in seconds.items():
        default, invariant = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = [ours / theirs for theirs, ours in pairs]
        lines.append(
            f"| {workload.name} | {default:.1f} ms | {invariant:.1f} ms "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return lines


def _step_s(llm: LLM, workload: Workload) -> float:
    """CPU seconds of one step: the median of those that only generate, or the only one."""
    from lmscope import SamplingParams
    from lmscope.boundary import ModelRunnerOutput

    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(256, 40_000) for _ in range(workload.prompt_len)]}
        for _ in range(workload.num_requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=workload.num_tokens, ignore_eos=True)
    ends = [time.process_time()]
    listening = llm.tap.on(ModelRunnerOutput, lambda _: ends.append(time.process_time()))
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        listening.close()
    steps = [after - before for before, after in pairwise(ends)]
    # The first brings the prompts in, and a request more may come with the second.
    return statistics.median(steps[2:] or steps)


if __name__ == "__main__":
    raise SystemExit(main())
