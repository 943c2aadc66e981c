"""What watching costs: a tap, recording everything, and writing down why each request runs.

    .venv/bin/python kernels/benchmarks/watching.py --pairs 24 --out watching.json

CPU time per step, always in pairs in turn, and ratios are taken within a pair.

The engine: the demo model generates for 16 requests at once, while everything is recorded, in
memory or to a file, and while nobody listens; the CPU time of the engine thread, where the stream
is made and encoded. Then once more with a script in the place of the model: there the cost is not
lost in the noise of the model, and what it adds, as a share of the model's step, is what the goal
is for. The tap alone: the structs of a step go through one that nobody listens to, and nowhere. The
scheduler alone: with its reasons, and with what writes them down replaced by functions that do
nothing. One torch thread. The exit status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine_steps import generate_anew, step_us, write_report
from scheduler import in_turn
from scheduler_load import LOADS, Load
from scheduler_worker import import_lmscope, run
from start import quartiles
from workloads import make_encoder, make_workload

if TYPE_CHECKING:
    from lmscope import LLM

__all__ = [
    "Comparison",
    "added_us",
    "main",
    "ratios",
    "spread",
    "table",
    "verdict",
    "without_reasons",
]


class Comparison(NamedTuple):
    """The same work with and without something; microseconds of CPU time per step.

    goal      most that `with_it` may cost, as a share of `without`; None to show it only
    most_us   most that it may add, in microseconds; None to show it only
    """

    what: str
    with_it: list[float]
    without: list[float]
    goal: float | None = None
    most_us: float | None = None


GOAL = 1.05
# Of what nobody listens to, over no tap at all.
MOST_TAP_US = 1.0
# Of recording, as a share of a step of the model.
MOST_RECORDING_SHARE = 0.005


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
            *measure_tap(options.pairs),
            *measure_model(options.model, options.workload, options.output_tokens, options.pairs),
            *results,
        ]
    print("\n".join(table(results)))
    lines, status = verdict(results)
    print("\n".join(["", *lines]))
    write_report(
        options.out,
        {name: version(name) for name in ("lmscope", "torch", "msgspec")},
        load_before,
        comparisons=[each._asdict() for each in results],
        verdict=lines,
    )
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


def measure_model(
    model: str, workload_name: str, num_output_tokens: int, pairs: int
) -> list[Comparison]:
    """The engine thread while everything is recorded, and while nobody listens.

    With the model, then with a script in its place. Nobody waits for such steps, so there what
    recording adds must be a small part of the model's step.
    """
    from lmscope import LLM

    with LLM(model, threads=1) as llm:
        prompts = make_workload(workload_name, make_encoder(str(llm.model))).prompts
        what = f"{len(prompts)} requests, {model} model"
        with_model = _measure_recording(llm, prompts, num_output_tokens, pairs, what)
    step_us = statistics.median(with_model[0].without)
    with LLM("script", execute="scripted", script=lambda _request_id, _position: 97) as llm:
        what = f"{len(prompts)} requests, no model"
        # Of the same lengths, and of the bytes that are all a script knows.
        others = [
            [(7 * index + place) % 200 for place in range(len(prompt))]
            for index, prompt in enumerate(prompts)
        ]
        alone = _measure_recording(llm, others, 200, pairs, what)
    most_us = MOST_RECORDING_SHARE * step_us
    return [*with_model, *(each._replace(most_us=most_us) for each in alone)]


def _measure_recording(
    llm: LLM, prompts: list[list[int]], num_output_tokens: int, pairs: int, what: str
) -> list[Comparison]:
    """Recording in memory and to a file, each beside nobody listening."""
    from lmscope import SamplingParams
    from lmscope.scope.recording import record

    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)

    def generate() -> float:
        return step_us(llm, partial(generate_anew, llm, prompts, params))

    def generate_recorded(path: Path | None) -> float:
        with record(llm, path):
            return generate()

    with tempfile.TemporaryDirectory() as folder:
        measures = {
            "recording": partial(generate_recorded, None),
            "to a file": partial(generate_recorded, Path(folder) / "run.lmscope"),
            "nobody": generate,
        }
        measured = in_turn(measures, pairs)
    return [
        Comparison(f"recording, {what}", measured["recording"], measured["nobody"]),
        Comparison(f"recording to a file, {what}", measured["to a file"], measured["nobody"]),
    ]


# --- the tap alone -------------------------------------------------------------------------


def measure_tap(pairs: int, num_steps: int = 20_000) -> list[Comparison]:
    """The structs of a step through a tap that nobody listens to, and nowhere."""
    return [_measure_tap(count, pairs, num_steps) for count in (1, 16)]


def _measure_tap(num_requests: int, pairs: int, num_steps: int) -> Comparison:
    from lmscope import LLM, SamplingParams
    from lmscope.boundary import Boundary, EngineCoreRequest, RequestOutput

    heard: list[Boundary] = []
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("script", execute="scripted", script=lambda _request_id, _position: 97) as llm:
        _, subscription = llm.tap.follow(heard.append)
        prompts = [{"prompt_token_ids": [1 + index, 2, 3]} for index in range(num_requests)]
        llm.generate(prompts, params, use_tqdm=False)
        subscription.close()
        # One in the middle, in which each request gets a token.
        steps = [each.step for each in heard if not isinstance(each, EngineCoreRequest)]
        structs = [each for each in heard if each.step == statistics.median_low(steps)]
        of_requests = [each for each in structs if isinstance(each, RequestOutput)]
        of_the_step = [each for each in structs if not isinstance(each, RequestOutput)]
        tap = llm.tap

        def emit() -> float:
            began = time.thread_time()
            for _ in range(num_steps):
                for struct in of_the_step:
                    tap(struct)
                # As the output processor does, which emits one for each request.
                for struct in of_requests:
                    if tap.is_live:
                        tap(struct)
            return (time.thread_time() - began) / num_steps * 1e6

        def go_over() -> float:
            began = time.thread_time()
            for _ in range(num_steps):
                for _struct in of_the_step:
                    pass
                for _struct in of_requests:
                    pass
            return (time.thread_time() - began) / num_steps * 1e6

        measured = in_turn({"with": emit, "without": go_over}, pairs)
    what = f"a tap nobody listens to, {num_requests} requests, {len(structs)} structs"
    return Comparison(what, measured["with"], measured["without"], most_us=MOST_TAP_US)


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


def added_us(comparison: Comparison) -> list[float]:
    """What a step costs more with it, pair by pair."""
    pairs = zip(comparison.with_it, comparison.without, strict=True)
    return [with_it - without for with_it, without in pairs]


def table(results: Sequence[Comparison]) -> list[str]:
    """Lines of a Markdown table, one for each comparison."""
    lines = [
        "| µs of CPU time per step | pairs | with, quartiles | without, quartiles "
        "| more, quartiles | ratio, quartiles |",
        "|---|---|---|---|---|---|",
    ]
    for each in results:
        cells = [
            spread(each.with_it, 1),
            spread(each.without, 1),
            spread(added_us(each), 2),
            spread(ratios(each), 3),
        ]
        lines.append(f"| {each.what} | {len(each.with_it)} | {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    """Median and quartiles in words."""
    low, median, high = quartiles(values)
    return f"{median:.{digits}f}, {low:.{digits}f} to {high:.{digits}f}"


def verdict(results: Sequence[Comparison]) -> tuple[list[str], int]:
    """A line for each comparison with a goal, and the exit status."""
    lines = []
    status = 0
    for each in results:
        if each.most_us is not None:
            added = statistics.median(added_us(each))
            met = added <= each.most_us
            lines.append(
                f"{each.what}: {'met' if met else 'MISSED'}, {added:.2f} µs a step more, "
                f"the goal is at most {each.most_us:.4g}"
            )
            status = status or int(not met)
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
