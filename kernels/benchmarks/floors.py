"""How fast this machine can be at best: reading memory, and the matrix products of a model.

    .venv/bin/python kernels/benchmarks/floors.py FOLDER --threads 1

Prints one JSON line. No engine that reads its weights once a step can be faster than that reading,
and none that computes in float32 faster than these products, whatever it does beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Shapes", "main", "measure"]

_READ_BYTES = 256 << 20
# Rows of the layers and of the head: decode steps of so many requests, and a prompt of 512.
ROWS = ((1, 1), (4, 4), (16, 16), (32, 32), (512, 1))


class Shapes(NamedTuple):
    """The matrices of a Llama-shaped model, inputs and outputs of each; fused as they can be."""

    layer: tuple[tuple[int, int], ...]
    num_layers: int
    head: tuple[int, int]

    @classmethod
    def of(cls, folder: str) -> Shapes:
        config = json.loads((Path(folder) / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        queries, pairs = heads * size, config.get("num_key_value_heads", heads) * size
        inner = config["intermediate_size"]
        layer = (
            (hidden, queries + 2 * pairs),
            (queries, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
        )
        return cls(layer, config["num_hidden_layers"], (hidden, config["vocab_size"]))

    def num_weights(self) -> int:
        return self.num_layers * sum(i * o for i, o in self.layer) + self.head[0] * self.head[1]

    def num_products(self, layer_rows: int, head_rows: int) -> int:
        """Multiplications and additions of a step, two for each weight and row."""
        in_layers = self.num_layers * sum(i * o for i, o in self.layer)
        return 2 * (layer_rows * in_layers + head_rows * self.head[0] * self.head[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="a model's folder, with its config.json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    print(json.dumps(measure(Shapes.of(options.folder), options.threads)))
    return 0


def measure(shapes: Shapes, threads: int, times: int = 5) -> dict[str, object]:
    """Medians and bests of some times.

    read_gb_per_s   [best, median] of summing 256 MB
    num_weights     of all matrices that a step reads
    steps           for each of ROWS: the seconds of all products, and GFLOP/s, [best, median]
    """
    import torch

    torch.set_num_threads(threads)
    table = torch.ones(_READ_BYTES // 4)
    seconds = _seconds(table.sum, times)
    # Its own copy for each layer, so that no cache holds what a step has to read.
    layers = [[torch.full((o, i), 0.5) for i, o in shapes.layer] for _ in range(shapes.num_layers)]
    head = torch.full(shapes.head[::-1], 0.5)
    steps = []
    for layer_rows, head_rows in ROWS:
        inputs = {i: torch.ones(layer_rows, i) for i, _ in shapes.layer}
        last = torch.ones(head_rows, shapes.head[0])

        def multiply(inputs: dict[int, torch.Tensor] = inputs, last: torch.Tensor = last) -> None:
            for matrices in layers:
                for matrix in matrices:
                    torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)
            torch.nn.functional.linear(last, head)

        took = _seconds(multiply, times)
        operations = shapes.num_products(layer_rows, head_rows) / 1e9
        steps.append(
            {
                "rows": layer_rows,
                "seconds": [min(took), statistics.median(took)],
                "gflop_per_s": [operations / min(took), operations / statistics.median(took)],
            }
        )
    return {
        "threads": threads,
        "read_gb_per_s": [
            _READ_BYTES / 1e9 / min(seconds),
            _READ_BYTES / 1e9 / statistics.median(seconds),
        ],
        "num_weights": shapes.num_weights(),
        "steps": steps,
    }


def _seconds(work: Callable[[], object], times: int) -> list[float]:
    """Of each of some times, after one that does not count."""
    took = []
    for number in range(times + 1):
        began = time.perf_counter()
        work()
        if number:
            took.append(time.perf_counter() - began)
    return took


if __name__ == "__main__":
    raise SystemExit(main())
