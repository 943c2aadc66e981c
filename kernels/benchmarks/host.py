"""What a step costs beside the model: scheduling, preparing, sampling, taking in, text.

    .venv/bin/python kernels/benchmarks/host.py --rounds 10 --out host.json

The demo model is loaded and not run: a function that returns logits, other ones for a request in
every step, is in its place. CPU time of the engine thread per step, with 1, 16, 64 and 256 requests
in the batch, in rounds that rotate, for greedy requests, for random ones, and for greedy ones that
ask for log probabilities or have penalties. The parts are measured in runs of their own, since
looking at the clock costs some of what is measured. One torch thread. The exit status is 1 when a
goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from engine_steps import generate_anew, step_us, steps_of, write_report
from scheduler import in_turn
from start import quartiles

if TYPE_CHECKING:
    from lmscope import LLM, SamplingParams

__all__ = ["GOALS_MS", "PARTS", "Costs", "main", "measure", "table", "verdict"]

# Most milliseconds of a step with so many greedy requests.
GOALS_MS = {1: 0.3, 64: 1.5}
PARTS = ("schedule", "prepare", "sample", "take in", "text")
_NUM_OUTPUT_TOKENS = 64
_NUM_PROMPT_TOKENS = 20
_BLOCK_SIZE = 16
# Steps until a request gets the same logits again.
_NUM_TURNS = 61

# Microseconds per step of one kind of requests, by how many there are: all in all, and by part.
Costs = dict[int, tuple[list[float], dict[str, float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()
    counts = [int(count) for count in options.requests.split(",")]
    results = measure(options.model, counts, options.rounds)
    print("\n".join(table(results)))
    lines, status = verdict(results["greedy"])
    print("\n".join(["", *lines]))
    write_report(
        options.out,
        {name: version(name) for name in ("lmscope", "torch", "numpy")},
        load_before,
        step_us=results,
        verdict=lines,
    )
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    parser.add_argument("--requests", default="1,16,64,256", help="how many (default: %(default)s)")
    parser.add_argument("--out", help="write every measurement to this JSON file")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


# --- measuring -----------------------------------------------------------------------------


def measure(model: str, counts: Sequence[int], rounds: int) -> dict[str, Costs]:
    """What a step costs, by the kind of the requests."""
    from lmscope import LLM, SamplingParams

    most = _NUM_OUTPUT_TOKENS
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=most, ignore_eos=True),
        "random": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=most, ignore_eos=True),
        "logprobs": SamplingParams(temperature=0, logprobs=5, max_tokens=most, ignore_eos=True),
        "penalties": SamplingParams(
            temperature=0,
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            presence_penalty=0.1,
            max_tokens=most,
            ignore_eos=True,
        ),
    }
    results: dict[str, Costs] = {}
    # So that nobody is preempted.
    num_blocks = 1 + max(counts) * -(-(_NUM_PROMPT_TOKENS + most) // _BLOCK_SIZE)
    with LLM(
        model,
        threads=1,
        max_num_seqs=max(counts),
        max_num_batched_tokens=max(counts) * _NUM_PROMPT_TOKENS,
        block_size=_BLOCK_SIZE,
        num_kv_blocks=num_blocks,
    ) as llm:
        _replace_model(llm)
        for kind, params in kinds.items():
            works = {
                count: partial(step_us, llm, partial(_generate, llm, params, count))
                for count in counts
            }
            in_all = in_turn({str(count): work for count, work in works.items()}, rounds)
            results[kind] = {}
            for count, work in works.items():
                with _timed_parts(llm) as parts:
                    num_steps = steps_of(llm, work)
                by_part = {name: seconds / num_steps * 1e6 for name, seconds in parts.items()}
                results[kind][count] = (in_all[str(count)], by_part)
    return results


def _generate(llm: LLM, params: SamplingParams, count: int) -> None:
    # The first token tells them apart, which keeps a prompt from finding another one's blocks.
    prompts = [[1 + index, *range(2, _NUM_PROMPT_TOKENS + 1)] for index in range(count)]
    generate_anew(llm, prompts, params)


def _runner(core: Any) -> Any:
    return core._executor._worker._runner


def _replace_model(llm: LLM) -> None:
    """Put a function in the place of the model that returns logits of the right shape."""
    import torch

    def replace(core: Any) -> None:
        runner = _runner(core)
        generator = torch.Generator().manual_seed(0)
        most = llm.config.max_num_seqs
        # As peaked as those of a language model, so that top-p leaves a few tokens.
        logits = 4 * torch.randn(most + _NUM_TURNS, runner.loaded.vocab_size, generator=generator)
        turns = itertools.cycle(range(_NUM_TURNS))

        def body(_token_ids: Any, _batch: Any, _kv_cache: Any, indices: Any) -> Any:
            first = next(turns)
            return logits[first : first + len(indices)]

        runner._body = body

    llm._loop.call(replace)


@contextmanager
def _timed_parts(llm: LLM) -> Iterator[dict[str, float]]:
    """The seconds of each of PARTS while this is open."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments, **named)
            seconds[part] += time.thread_time() - began
            return result

        return run

    def wrap(core: Any) -> list[tuple[Any, str]]:
        runner = _runner(core)
        places = [
            ("schedule", core.scheduler, "schedule"),
            ("prepare", runner, "execute_model"),
            ("sample", runner, "sample_tokens"),
            ("take in", core.scheduler, "update_from_output"),
            ("text", llm._loop, "_on_outputs"),
        ]
        was_own = [(owner, name) for _, owner, name in places if name in vars(owner)]
        kept.update({(id(owner), name): getattr(owner, name) for owner, name in was_own})
        for part, owner, name in places:
            setattr(owner, name, timed(part, getattr(owner, name)))
        return [(owner, name) for _, owner, name in places]

    def unwrap(_core: Any) -> None:
        for owner, name in wrapped:
            if (id(owner), name) in kept:
                setattr(owner, name, kept[id(owner), name])
            else:
                delattr(owner, name)

    kept: dict[tuple[int, str], Any] = {}
    wrapped = llm._loop.call(wrap)
    try:
        yield seconds
    finally:
        llm._loop.call(unwrap)


# --- arithmetic ----------------------------------------------------------------------------


def table(results: dict[str, Costs]) -> list[str]:
    """Lines of a Markdown table, one for each kind and number of requests."""
    lines = [
        f"| µs of CPU time per step | requests | median, quartiles | {' | '.join(PARTS)} |",
        "|---|---|---|" + "---|" * len(PARTS),
    ]
    for kind, costs in results.items():
        for count, (values, parts) in costs.items():
            low, median, high = quartiles(values)
            shown = " | ".join(f"{parts[name]:.0f}" for name in PARTS)
            lines.append(f"| {kind} | {count} | {median:.0f}, {low:.0f} to {high:.0f} | {shown} |")
    return lines


def verdict(costs: Costs) -> tuple[list[str], int]:
    """A line for each number of requests with a goal, and the exit status."""
    lines, status = [], 0
    for count, goal in GOALS_MS.items():
        if count in costs:
            took = statistics.median(costs[count][0]) / 1e3
            met = took <= goal
            lines.append(
                f"{count} requests: {'met' if met else 'MISSED'}, a step takes {took:.2f} ms "
                f"beside the model, the goal is at most {goal:g}"
            )
            status = status or int(not met)
    return lines, status


if __name__ == "__main__":
    sys.exit(main())
