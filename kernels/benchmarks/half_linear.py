"""Products with weights in half precision: the compiled loops of the extra `cpu` beside fbgemm.

    .venv/bin/python kernels/benchmarks/half_linear.py --pairs 20

CPU time of one thread for all products of a step of the demo model, its layers and its head, each
with weights of its own, so that they come from memory as they do in an engine. Turns alternate;
ratios are taken within a pair. With NUMBA_CPU_NAME=haswell and
NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c the loops are compiled as for a processor without AVX-512.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
from engine_steps import thread_ms, write_report
from lmscope_kernels.half_linear_cpu import why_no_half_loops
from scheduler import in_turn
from watching import spread

from lmscope.models.linear import Fp16PackedLinears, Linear, WeightAndBias

__all__ = ["NUM_LAYERS", "SHAPES", "Products", "main", "table"]

NUM_LAYERS = 30
# [out, in] of a layer, and of the head.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
_HEAD = (49152, 576)


class Products:
    """All matrices of a step, by one way to multiply."""

    def __init__(
        self, in_loops: bool, num_layers: int = NUM_LAYERS, head: tuple[int, int] = _HEAD
    ) -> None:
        method, random = Fp16PackedLinears(in_loops), torch.Generator().manual_seed(0)
        shapes = [*SHAPES * num_layers, head]
        self._linears: list[tuple[int, Linear]] = []
        self.num_weights = 0
        for shape in shapes:
            weight = torch.randn(shape, generator=random) * 0.05
            self._linears.append((shape[1], method.pack([WeightAndBias(weight, None)])))
            self.num_weights += weight.numel()

    @torch.inference_mode()
    def multiply(self, num_rows: int) -> list[torch.Tensor]:
        """The same rows by every matrix that takes as many inputs."""
        random = torch.Generator().manual_seed(1)
        rows = {size: torch.randn(num_rows, size, generator=random) for size in (576, 1536)}
        return [linear(rows[num_inputs]) for num_inputs, linear in self._linears]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rows", default="1,2,4,6,16,32,128,512", help="default: %(default)s")
    parser.add_argument("--out", help="where to write the measured values as JSON")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    reason = why_no_half_loops()
    if reason is not None:
        print(f"the loops cannot run here: {reason}")
        return 1
    load_before = os.getloadavg()
    torch.set_num_threads(1)
    loops, fbgemm = Products(True), Products(False)
    measured = {}
    for num_rows in map(int, options.rows.split(",")):
        ways: dict[str, Callable[[], float]] = {
            "loops": lambda rows=num_rows: thread_ms(lambda: loops.multiply(rows)),
            "fbgemm": lambda rows=num_rows: thread_ms(lambda: fbgemm.multiply(rows)),
        }
        measured[num_rows] = in_turn(ways, options.pairs)
    print("\n".join(table(measured, loops.num_weights)))
    versions = {name: version(name) for name in ("torch", "numba")}
    write_report(options.out, versions, load_before, milliseconds=measured)
    return 0


def table(measured: dict[int, dict[str, list[float]]], num_weights: int) -> list[str]:
    """Lines of a Markdown table; measured: milliseconds by rows, "loops" and "fbgemm"."""
    lines = [
        "| rows | loops, ms, quartiles | fbgemm, ms, quartiles | fbgemm / loops, quartiles "
        "| loops, GFLOP/s | fbgemm, GFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    for num_rows, ways in measured.items():
        ratios = [b / a for a, b in zip(ways["loops"], ways["fbgemm"], strict=True)]
        rates = [2e-6 * num_rows * num_weights / min(ways[name]) for name in ("loops", "fbgemm")]
        cells = [
            spread(ways["loops"], 1),
            spread(ways["fbgemm"], 1),
            spread(ratios, 2),
            *(f"{rate:.0f}" for rate in rates),
        ]
        lines.append(f"| {num_rows} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
