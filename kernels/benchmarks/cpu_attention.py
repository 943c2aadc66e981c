"""Attention on a CPU: the compiled loops of the extra `cpu` beside torch, out of memory.

    .venv/bin/python kernels/benchmarks/cpu_attention.py --pairs 20

CPU time of one thread for the attention of a step, all layers of the demo model's shape, each with
a cache of its own, so that keys and values come from memory as they do in an engine. Blocks lie
anywhere. Turns alternate; ratios are taken within a pair. What torch needs beside its own
attention, gathering keys and adding biases, is part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import torch
from engine_steps import thread_ms, write_report
from scheduler import in_turn
from watching import spread

from lmscope.models import attention_plan
from lmscope.models.attention_plan import AttentionPlan

__all__ = ["CASES", "Case", "Layers", "main", "table"]

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_SIZE, _BLOCK_SIZE = 9, 3, 64, 16


class Case(NamedTuple):
    """Requests that are alike: how many, rows of each in the step, tokens of each after it."""

    num_requests: int
    num_rows: int
    seq_len: int


CASES = {
    "1 request, 53 tokens": Case(1, 1, 53),
    "1 request, 1,024 tokens": Case(1, 1, 1024),
    "16 requests, 512 tokens": Case(16, 1, 512),
    "32 requests, 53 tokens": Case(32, 1, 53),
    "32 prompts of 20": Case(32, 20, 20),
    "8 prompts of 128": Case(8, 128, 128),
    "a prompt of 512": Case(1, 512, 512),
    "256 rows behind 768 tokens": Case(1, 256, 1024),
}


class Layers:
    """The attention of one step, layer after layer, each over its own cache."""

    def __init__(self, case: Case, num_layers: int = 30) -> None:
        R, N, seq_len = case
        num_blocks = -(-seq_len // _BLOCK_SIZE)
        ids = 1 + np.random.default_rng(0).permutation(R * num_blocks)
        self._plan_arguments = {
            "query_start_loc": np.arange(R + 1, dtype=np.int32) * N,
            "seq_lens": np.full(R, seq_len, np.int32),
            "block_table": ids.astype(np.int32).reshape(R, num_blocks),
        }
        torch.manual_seed(0)
        rows = torch.randn(R * N, _NUM_HEADS + 2 * _NUM_KV_HEADS, _HEAD_SIZE)
        self._query, self._key, self._value = rows.split(
            [_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS], dim=1
        )
        shape = (len(ids) + 1, _BLOCK_SIZE, _NUM_KV_HEADS, _HEAD_SIZE)
        self._caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]
        # A whole prompt is attended to out of its rows by torch, out of the cache by the loops.
        position = np.arange(seq_len - N, seq_len)
        table = self._plan_arguments["block_table"]
        slots = table[:, position // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE
        places = torch.from_numpy((slots + position % _BLOCK_SIZE).ravel())
        for keys, values in self._caches:
            keys.flatten(0, 1)[places] = self._key
            values.flatten(0, 1)[places] = self._value

    def attend(self, is_compiled: bool) -> list[torch.Tensor]:
        """The output of each layer, by the loops or by torch; the plan is part of the work."""
        choose = attention_plan._is_compiled
        if not is_compiled:
            attention_plan._is_compiled = lambda query, key_cache: False
        try:
            plan = AttentionPlan.build(
                **self._plan_arguments,
                block_size=_BLOCK_SIZE,
                window=None,
                with_bias=False,
                device=torch.device("cpu"),
            )
            return [
                plan.attend(
                    self._query, self._key, self._value, keys, values, _HEAD_SIZE**-0.5, None
                )
                for keys, values in self._caches
            ]
        finally:
            attention_plan._is_compiled = choose


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", help="where to write the measured values as JSON")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    load_before = os.getloadavg()
    torch.set_num_threads(1)
    measured = {}
    for name, case in CASES.items():
        layers = Layers(case)
        ways = {
            "compiled": lambda layers=layers: thread_ms(lambda: layers.attend(True)),
            "torch": lambda layers=layers: thread_ms(lambda: layers.attend(False)),
        }
        measured[name] = in_turn(ways, options.pairs)
    print("\n".join(table(measured)))
    versions = {name: version(name) for name in ("torch", "numba", "numpy")}
    write_report(options.out, versions, load_before, milliseconds=measured)
    return 0


def table(measured: dict[str, dict[str, list[float]]]) -> list[str]:
    """Lines of a Markdown table; measured: milliseconds of each case, "compiled" and "torch"."""
    lines = [
        "| ms per step, all layers | compiled, quartiles | torch, quartiles "
        "| torch / compiled, quartiles |",
        "|---|---|---|---|",
    ]
    for name, ways in measured.items():
        ratios = [b / a for a, b in zip(ways["compiled"], ways["torch"], strict=True)]
        cells = [spread(values, 2) for values in (ways["compiled"], ways["torch"], ratios)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
