"""What it costs to measure attention by block: `lmscope.watch(llm, colour="attention")`.

    .venv/bin/python kernels/benchmarks/attention.py --pairs 6 --out attention.json

CPU time of the engine thread per step while somebody measures and while nobody does, in pairs in
turn; ratios are taken within a pair. The measurement reads the keys of all requests once more in
each layer, so it grows with their tokens: one request and sixteen, of short and of long prompts.
One torch thread. No goal is set for the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from engine_steps import generate_anew, step_us, write_report
from scheduler import in_turn
from watching import Comparison, table
from workloads import make_encoder, make_workload

if TYPE_CHECKING:
    from lmscope import LLM

__all__ = ["main", "measure_attention"]

WORKLOADS = ("1x20", "1x400", "16x20", "16x100")


def main(arguments: Sequence[str] | None = None) -> int:
    from lmscope import LLM

    options = _parse(arguments)
    load_before = os.getloadavg()
    with LLM(options.model, threads=1) as llm:
        encode = make_encoder(str(llm.model))
        results = [
            measure_attention(
                llm,
                make_workload(name, encode).prompts,
                options.output_tokens,
                options.pairs,
                f"measuring, {name} tokens",
            )
            for name in options.workloads
        ]
    print("\n".join(table(results)))
    write_report(
        options.out,
        {name: version(name) for name in ("lmscope", "torch")},
        load_before,
        comparisons=[each._asdict() for each in results],
    )
    return 0


def measure_attention(
    llm: LLM, prompts: Sequence[list[int]], num_output_tokens: int, pairs: int, what: str
) -> Comparison:
    """The engine thread generating for all prompts at once, measured and not."""
    from lmscope import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)

    def generate() -> float:
        return step_us(llm, partial(generate_anew, llm, prompts, params))

    def generate_measured() -> float:
        with llm.measure_attention():
            return generate()

    measured = in_turn({"measured": generate_measured, "nobody": generate}, pairs)
    return Comparison(what, measured["measured"], measured["nobody"])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=WORKLOADS,
        metavar="REQUESTSxPROMPT_TOKENS",
        help="(default: %(default)s)",
    )
    parser.add_argument("--output-tokens", type=int, default=16, help="of each request")
    parser.add_argument("--out", help="write every measurement to this JSON file")
    options = parser.parse_args(arguments)
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
