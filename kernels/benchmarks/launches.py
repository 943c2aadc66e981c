"""What the host does before a Triton kernel of a layer is launched; wants no GPU, launches nothing.

    .venv/bin/python kernels/benchmarks/launches.py --rounds 300

A stand-in that does nothing takes the place of each kernel, and tensors lie on the CPU, so what is
left is Python: checks, arguments, and the memory of results. What Triton and the driver add to a
launch, and what torch takes for its own operations between them, is not in it. A layer of the
Qwen3-0.6B shape with the tensors of a step: 16 tokens of one request, as the number of tokens is
nothing that the host notices. Time of a call is the least over all rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from engine_steps import write_report
from lmscope_kernels import (
    paged_decode,
    rms_norm,
    silu_mul,
    store_kv,
    triton_support,
    unified_attention,
)
from lmscope_kernels.launches import Launches

from lmscope.models.kernel_attention import KernelAttention

__all__ = ["NUM_LAYERS", "Layer", "least_us", "main", "nothing_launched", "table"]

NUM_LAYERS = 28
_HIDDEN, _INTERMEDIATE = 1024, 3072
_NUM_QUERY_HEADS, _NUM_KV_HEADS, _HEAD_SIZE = 16, 8, 128
_BLOCK_SIZE, _NUM_BLOCKS = 16, 4
_SCALE, _EPSILON = _HEAD_SIZE**-0.5, 1e-6
_CALLS = 20  # of a round

_KERNELS = (
    (paged_decode, "merge_kernel"),
    (paged_decode, "split_kernel"),
    (rms_norm, "rms_norm_kernel"),
    (silu_mul, "silu_mul_kernel"),
    (store_kv, "store_kv_kernel"),
    (unified_attention, "paged_attention_kernel"),
)


class Layer:
    """The tensors of a layer in one step, and what is launched on them."""

    def __init__(self, num_tokens: int = 16) -> None:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        num_rotated = _NUM_QUERY_HEADS + _NUM_KV_HEADS
        # Queries and keys have been turned, and lie apart; values are where the product left them.
        heads = numbers(num_tokens, num_rotated + _NUM_KV_HEADS, _HEAD_SIZE)
        turned = numbers(num_tokens, num_rotated, _HEAD_SIZE)
        self.query, self.key = turned[:, :_NUM_QUERY_HEADS], turned[:, _NUM_QUERY_HEADS:]
        self.value = heads[:, num_rotated:]
        pool = (_NUM_BLOCKS, _BLOCK_SIZE, _NUM_KV_HEADS, _HEAD_SIZE)
        self.key_cache, self.value_cache = numbers(*pool), numbers(*pool)
        self.hidden, self.new = numbers(num_tokens, _HIDDEN), numbers(num_tokens, _HIDDEN)
        self.weight, self.head_weight = numbers(_HIDDEN), numbers(_HEAD_SIZE)
        self.query_rows = numbers(num_tokens * _NUM_QUERY_HEADS, _HEAD_SIZE)
        self.key_rows = numbers(num_tokens * _NUM_KV_HEADS, _HEAD_SIZE)
        self.gate_up = numbers(num_tokens, 2 * _INTERMEDIATE)
        self.prefill = KernelAttention(
            slot_mapping=torch.arange(num_tokens),
            query_start_loc=ints(0, num_tokens),
            seq_lens=ints(num_tokens),
            block_table=ints(*range(_NUM_BLOCKS))[None],
            workspace=None,
        )
        # The same tokens, one of each request.
        self.decode_lens = ints(*[1] * num_tokens)
        self.decode_table = self.prefill.block_table.repeat(num_tokens, 1)
        self.workspace = paged_decode.DecodeWorkspace.allocate(
            num_tokens, _NUM_QUERY_HEADS, _HEAD_SIZE, _NUM_BLOCKS * _BLOCK_SIZE, "cpu"
        )

    def launchers(self) -> dict[str, Callable[[], object]]:
        """By name, what is measured; the last is all that a layer of a prefill launches."""
        return {
            "rms_norm": lambda: rms_norm.rms_norm(self.new, self.weight, _EPSILON),
            "rms_norm with a residual": self._add,
            "silu_mul": lambda: silu_mul.silu_mul(self.gate_up),
            "store_kv": lambda: store_kv.store_kv(
                self.key,
                self.value,
                self.key_cache,
                self.value_cache,
                self.prefill.slot_mapping,
            ),
            "unified_attention": lambda: unified_attention.paged_attention(
                self.query,
                self.key_cache,
                self.value_cache,
                self.prefill.block_table,
                self.prefill.seq_lens,
                self.prefill.query_start_loc,
                _SCALE,
            ),
            "paged_decode, two kernels": lambda: paged_decode.paged_decode(
                self.query,
                self.key_cache,
                self.value_cache,
                self.decode_table,
                self.decode_lens,
                _SCALE,
                workspace=self.workspace,
            ),
            "a layer of a prefill, seven kernels": self.run,
        }

    def run(self) -> None:
        """As a KernelForward: norms of heads, attention, and norms around the MLP."""
        rms_norm.rms_norm(self.query_rows, self.head_weight, _EPSILON)
        rms_norm.rms_norm(self.key_rows, self.head_weight, _EPSILON)
        self.prefill.attend(
            self.query,
            self.key,
            self.value,
            self.key_cache,
            self.value_cache,
            _SCALE,
            None,
            None,
        )
        self._add()
        silu_mul.silu_mul(self.gate_up)
        self._add()

    def _add(self) -> None:
        rms_norm.rms_norm(self.new, self.weight, _EPSILON, self.hidden)


class _NoKernel:
    """In the place of a kernel: says that it was launched, and does nothing."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        self._launched.append(self._name)


@contextmanager
def nothing_launched() -> Iterator[list[str]]:
    """Launchers take tensors of a CPU, and launch nothing; the names of what they would have.

    What launchers keep of it is gone afterwards.
    """
    launched: list[str] = []
    with ExitStack() as stack:
        for module, name in _KERNELS:
            stack.enter_context(patch.object(module, "_launches", Launches()))
            stack.enter_context(patch.object(module, name, _NoKernel(name, launched)))
        stack.enter_context(patch.object(triton_support, "is_available", lambda *_: (True, "")))
        yield launched


def least_us(work: Callable[[], object], rounds: int) -> float:
    """Wall time of one call in microseconds, in the best of so many rounds."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(_CALLS):
            work()
        times.append(time.perf_counter() - began)
    return min(times) / _CALLS * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", help="where to write the measured values as JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if triton_support.triton is None:
        print("Triton is not installed, and the launchers work with it; pip install triton")
        return 1
    load_before = os.getloadavg()
    torch.set_num_threads(1)
    measured = {}
    with torch.inference_mode(), nothing_launched() as launched:
        for name, work in Layer().launchers().items():
            measured[name] = least_us(work, options.rounds)
            launched.clear()
    print("\n".join(table(measured)))
    versions = {name: version(name) for name in ("torch", "triton")}
    write_report(options.out, versions, load_before, microseconds=measured)
    return 0


def table(measured: Mapping[str, float]) -> list[str]:
    """Lines of a Markdown table; measured: microseconds by name, those of a layer at the end."""
    lines = ["| nothing launched | µs of a call |", "|---|---|"]
    lines += [f"| {name} | {time_us:.1f} |" for name, time_us in measured.items()]
    *_, layer_us = measured.values()
    return [*lines, f"| {NUM_LAYERS} such layers | {NUM_LAYERS * layer_us:.0f} |"]


if __name__ == "__main__":
    sys.exit(main())
