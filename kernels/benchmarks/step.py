"""Where the time of a decoding step goes, and what the compiled loops of the extra `cpu` save.

    .venv/bin/python kernels/benchmarks/step.py --rounds 20

CPU time of one thread for a step of the demo model, without scheduler and sampler: requests with
one row each behind some keys of their own, in blocks that lie anywhere. Steps with the loops and
steps with torch in their place take turns. The parts are timed in steps of their own, since
looking at the clock costs some of what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from engine_steps import thread_ms

__all__ = ["PARTS", "main", "parts_ms", "table"]

PARTS = ("products", "head", "norms", "attention", "SiLU", "batch")
_BLOCK_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    parser.add_argument("--requests", default="1,4,16,32", help="how many (default: %(default)s)")
    parser.add_argument("--keys", type=int, default=52, help="of each (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    import torch

    from lmscope import LLM

    # Steps run on this thread here; the engine's has a number of its own.
    torch.set_num_threads(1)
    with LLM(options.model, threads=1) as llm:
        body = llm._loop.call(lambda core: core._executor._worker._runner)._body
        if body._lean is None or body._lean._compiled is None:
            print(f"the loops are not used here\n{llm.plan}")
            return 1
        counts = [int(count) for count in options.requests.split(",")]
        results = {}
        for count in counts:
            step = _Step(body, count, options.keys)
            compiled = body._lean._compiled
            took: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(options.rounds + 1):
                for is_compiled, values in took.items():
                    body._lean._compiled = compiled if is_compiled else None
                    values.append(thread_ms(step))
            body._lean._compiled = compiled
            with _timed(body, step) as timed:
                parts = [timed() for _ in range(options.rounds)]
            results[count] = (took[True][1:], took[False][1:], parts_ms(parts))
    print("\n".join(table(results)))
    return 0


def parts_ms(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each of PARTS, in milliseconds, of steps in seconds."""
    return {part: statistics.median(step[part] for step in steps) * 1e3 for part in PARTS}


def table(results: dict[int, tuple[list[float], list[float], dict[str, float]]]) -> list[str]:
    """Lines of a Markdown table: with the loops, with torch, and parts of the former, in ms."""
    lines = [
        f"| ms per step, requests | with numba: min, median | with torch | {' | '.join(PARTS)} "
        "| the rest |",
        "|---|---|---|" + "---|" * (len(PARTS) + 1),
    ]
    for count, (compiled, plain, parts) in results.items():
        whole = statistics.median(compiled)
        shown = [*(parts[name] for name in PARTS), whole - sum(parts.values())]
        lines.append(
            f"| {count} | {min(compiled):.1f}, {whole:.1f} "
            f"| {min(plain):.1f}, {statistics.median(plain):.1f} "
            f"| {' | '.join(f'{value:.2f}' for value in shown)} |"
        )
    return lines


class _Step:
    """A step of some requests; its parts are attributes, so that they can be timed."""

    def __init__(self, body: Any, num_requests: int, num_keys: int) -> None:
        import torch

        from lmscope.models.attention import KVCache

        layout = body._lean.layout
        num_blocks = -(-(num_keys + 1) // _BLOCK_SIZE)
        ids = 1 + np.random.default_rng(0).permutation(num_requests * num_blocks)
        table = ids.astype(np.int32).reshape(num_requests, num_blocks)
        slots = table[:, num_keys // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE
        self.device = torch.device("cpu")
        self.body = body
        self.arrays = {
            "positions": np.full(num_requests, num_keys, np.int64),
            "slot_mapping": slots + num_keys % _BLOCK_SIZE,
            "query_start_loc": np.arange(num_requests + 1, dtype=np.int32),
            "seq_lens": np.full(num_requests, num_keys + 1, np.int32),
            "block_table": table,
        }
        self.windows = {layer.window for layer in layout.layers}
        self.token_ids = torch.arange(num_requests)
        self.rows = np.arange(num_requests)
        shape = layout.num_kv_heads, layout.head_size, torch.float32, self.device
        self.cache = KVCache.allocate(len(layout.layers), len(ids) + 1, _BLOCK_SIZE, *shape)
        for each in (*self.cache.key, *self.cache.value):
            each.normal_()

    def build(self) -> Any:
        from lmscope.models.attention import BatchView

        return BatchView.build(
            **self.arrays, block_size=_BLOCK_SIZE, device=self.device, windows=self.windows
        )

    def __call__(self) -> None:
        self.body(self.token_ids, self.build(), self.cache, self.rows)


@contextmanager
def _timed(body: Any, step: _Step) -> Iterator[Callable[[], dict[str, float]]]:
    """A function that runs a step and says how many seconds each of PARTS took."""
    from lmscope.models import compiled_layers

    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments)
            seconds[part] += time.thread_time() - began
            return result

        return run

    def run_once() -> dict[str, float]:
        seconds.update(dict.fromkeys(PARTS, 0.0))
        step()
        return dict(seconds)

    lean = body._lean
    layers, head, loops = lean._compiled._layers, lean._head, compiled_layers.layer_loops
    lean._compiled._layers = [
        layer._replace(linears=tuple(timed("products", each) for each in layer.linears))
        for layer in layers
    ]
    lean._head = timed("head", head)
    compiled_layers.layer_loops = lambda: type(loops())(
        *map(timed, ("norms", "attention", "attention", "SiLU"), loops())
    )
    step.build = timed("batch", step.build)  # type: ignore[method-assign]  # to time it
    try:
        yield run_once
    finally:
        lean._compiled._layers, lean._head = layers, head
        compiled_layers.layer_loops = loops


if __name__ == "__main__":
    sys.exit(main())
