"""What watching costs: recording everything, and writing down why each request runs or waits.

    .venv/bin/python kernels/benchmarks/watching.py --pairs 24 --out watching.json

CPU time per step, always in pairs in turn, and ratios are taken within a pair.

The engine: the demo model generates for 16 requests at once, while everything is recorded and while
nobody listens; the CPU time of the engine thread, where the stream is made and encoded. Then once
more with a script in the place of the model, which shows how much it is in microseconds. The
scheduler alone: with its reasons, and with what writes them down replaced by functions that do
nothing. One torch thread. The exit status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scheduler import in_turn
from scheduler_load import LOADS, Load
from scheduler_worker import import_lmscope, run
from start import quartiles
from workloads import make_encoder, make_workload

if TYPE_CHECKING:
    from lmscope import LLM

__all__ = ["Comparison", "main", "ratios", "table", "verdict", "without_reasons"]


class Comparison(NamedTuple):
    """The same work with and without something; microseconds of CPU time per step.

    goal   most that `with_it` may cost, as a share of `without`; None to show it only
    """

    what: str
    with_it: list[float]
    without: list[float]
    goal: float | None


GOAL = 1.05


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()
    results = [
        measure_reasons(LOADS["16 requests"], options.pairs, GOAL),
        # As many as no notebook has: here a decision costs more than in a small batch, where
        # most are the same as in the step before.
        measure_reasons(LOADS["decode"], options.pairs, None),
    ]
    if not options.scheduler_only:
        results = [
            measure_model(options.model, options.workload, options.output_tokens, options.pairs),
            measure_script(options.pairs),
            *results,
        ]
    print("\n".join(table(results)))
    lines, status = verdict(results)
    print("\n".join(["", *lines]))
    if options.out:
        report = {
            "date": datetime.date.today().isoformat(),
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("lmscope", "torch", "msgspec")},
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "comparisons": [each._asdict() for each in results],
            "verdict": lines,
        }
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    parser.add_argument(
        "--workload", default="16x20", help="REQUESTSxPROMPT_TOKENS (default: %(default)s)"
    )
    parser.add_argument("--output-tokens", type=int, default=32, help="of each request")
    parser.add_argument("--scheduler-only", action="store_true", help="load no model")
    parser.add_argument("--out", help="write every measurement to this JSON file")
    options = parser.parse_args(arguments)
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    return options


# --- the engine ----------------------------------------------------------------------------


def measure_model(model: str, workload_name: str, num_output_tokens: int, pairs: int) -> Comparison:
    """The engine thread while everything is recorded, and while nobody listens."""
    from lmscope import LLM

    with LLM(model, threads=1) as llm:
        prompts = make_workload(workload_name, make_encoder(str(llm.model))).prompts
        what = f"recording, {len(prompts)} requests, {model} model"
        return _measure_recording(llm, prompts, num_output_tokens, pairs, what, GOAL)


def measure_script(pairs: int) -> Comparison:
    """The same with a script in the place of the model: what recording costs, without the noise.

    Nobody waits for such steps, so a share of them means little, and there is no goal.
    """
    from lmscope import LLM

    prompts = [[(7 * index + place) % 200 for place in range(20)] for index in range(16)]
    with LLM("script", execute="scripted", script=lambda _request_id, _position: 97) as llm:
        what = f"recording, {len(prompts)} requests, no model"
        return _measure_recording(llm, prompts, 200, pairs, what, None)


def _measure_recording(
    llm: LLM,
    prompts: list[list[int]],
    num_output_tokens: int,
    pairs: int,
    what: str,
    goal: float | None,
) -> Comparison:
    from lmscope import SamplingParams
    from lmscope.scope.recording import record

    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    given = [{"prompt_token_ids": token_ids} for token_ids in prompts]

    def generate() -> float:
        # Prompts come again in each run: with their blocks kept there would be no prefill.
        if not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        return _step_us(llm, lambda: llm.generate(given, params, use_tqdm=False))

    def generate_recorded() -> float:
        with record(llm):
            return generate()

    measured = in_turn({"with": generate_recorded, "without": generate}, pairs)
    return Comparison(what, measured["with"], measured["without"], goal)


def _step_us(llm: LLM, work: Callable[[], object]) -> float:
    """CPU time of the engine thread per step that `work` made it do, in microseconds."""

    def now() -> tuple[float, int]:
        # On the engine thread, whose clock this is; there is no way to ask from outside.
        result: tuple[float, int] = llm._loop.call(
            lambda core: (time.thread_time(), core.step_number)
        )
        return result

    began, first = now()
    work()
    ended, last = now()
    return (ended - began) / (last - first) * 1e6


# --- the scheduler alone -------------------------------------------------------------------


def measure_reasons(load: Load, pairs: int, goal: float | None) -> Comparison:
    """The scheduler with its reasons and without, on a load, in this process."""
    make_engine, _ = import_lmscope()

    def measure(with_reasons: bool) -> float:
        if with_reasons:
            result = run(make_engine(load), load)
        else:
            with without_reasons():
                result = run(make_engine(load), load)
        return (result["schedule_s"] + result["update_s"]) / load.num_steps * 1e6

    measured = in_turn({"with": partial(measure, True), "without": partial(measure, False)}, pairs)
    what = f"reasons, {load.num_live:,} requests, scheduler alone"
    return Comparison(what, measured["with"], measured["without"], goal)


@contextmanager
def without_reasons() -> Iterator[None]:
    """Let schedulers decide the same and write nothing down."""
    from lmscope.engine.scheduler import Scheduler
    from lmscope.engine.step import Step

    # What these do changes no decision.
    writers = {
        Step: ("decide", "decide_decodes", "decide_granted"),
        Scheduler: ("_refuse_rest", "_refuse_head", "_keep_waiting"),
    }
    kept = [(owner, name, getattr(owner, name)) for owner in writers for name in writers[owner]]
    try:
        for owner, name, _ in kept:
            setattr(owner, name, _nothing)
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _nothing(*_arguments: object, **_named: object) -> None:
    pass


# --- arithmetic ----------------------------------------------------------------------------


def ratios(comparison: Comparison) -> list[float]:
    """What a step costs with it as a share of without, pair by pair."""
    pairs = zip(comparison.with_it, comparison.without, strict=True)
    return [with_it / without for with_it, without in pairs]


def table(results: Sequence[Comparison]) -> list[str]:
    """Lines of a Markdown table, one for each comparison."""
    lines = [
        "| µs of CPU time per step | pairs | with, quartiles | without, quartiles "
        "| ratio, quartiles |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        cells = [
            _spread(each.with_it, 1),
            _spread(each.without, 1),
            _spread(ratios(each), 3),
        ]
        lines.append(f"| {each.what} | {len(each.with_it)} | {' | '.join(cells)} |")
    return lines


def _spread(values: Sequence[float], digits: int) -> str:
    low, median, high = quartiles(values)
    return f"{median:.{digits}f}, {low:.{digits}f} to {high:.{digits}f}"


def verdict(results: Sequence[Comparison]) -> tuple[list[str], int]:
    """A line for each comparison with a goal, and the exit status."""
    lines = []
    status = 0
    for each in results:
        if each.goal is not None:
            ratio = statistics.median(ratios(each))
            met = ratio <= each.goal
            lines.append(
                f"{each.what}: {'met' if met else 'MISSED'}, {ratio:.3f} times the cost without, "
                f"the goal is at most {each.goal:g}"
            )
            status = status or int(not met)
    return lines, status


if __name__ == "__main__":
    sys.exit(main())
