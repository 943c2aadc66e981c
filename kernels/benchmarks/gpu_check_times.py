"""Item 5 of gpu_check.py: how long each kernel takes, and how a call is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from gpu_check_batches import SHAPES, Kernels, Shape, kernels_for, make_batch, make_sampling
from gpu_check_report import Check, Measurement, is_noise
from torch import Tensor

__all__ = ["time_kernels", "times_s"]


def time_kernels(check: Check) -> None:
    """Each kernel beside what its bytes or operations take at the measured ceilings."""
    kernels = kernels_for(check.device)
    shapes = SHAPES[:1] if check.is_dry else SHAPES[1:]
    for shape in shapes:
        for num_reqs in (2,) if check.is_dry else (1, 16, 64, 256):
            name = f"paged_decode, {shape.name}, R={num_reqs}"
            check.attempt(5, name, partial(_time_decode, check, kernels, name, shape, num_reqs))
        for part in (_time_rows, _time_prefill):
            check.attempt(5, f"{part.__name__}, {shape.name}", partial(part, check, kernels, shape))
    check.attempt(5, "sample", partial(_time_sampling, check, kernels))
    check.attempt(5, "block mass", partial(_time_mass, check, kernels, shapes[0]))


def _time_decode(check: Check, kernels: Kernels, name: str, shape: Shape, num_reqs: int) -> None:
    context = 64 if check.is_dry else 1024
    num_bytes = 2 * num_reqs * context * shape.num_kv_heads * shape.head_size * 2
    batches = [
        make_batch(shape, [context] * num_reqs, [1] * num_reqs, torch.bfloat16, check.device)
        for _ in range(_num_copies(check, num_bytes))
    ]
    share = 0.8 if num_reqs >= 64 else 0.6 if num_reqs == 16 else None
    _record(check, name, [partial(batch.decode, kernels) for batch in batches], num_bytes, share)


def _time_rows(check: Check, kernels: Kernels, shape: Shape) -> None:
    num_rows = 8 if check.is_dry else 4096
    sizes = shape.hidden_size, shape.intermediate_size

    def randn(*size: int) -> Tensor:
        return torch.randn(size, device=check.device, dtype=torch.bfloat16)

    num_bytes = 4 * 2 * num_rows * sizes[0]
    weight = randn(sizes[0])
    norms = [
        (randn(num_rows, sizes[0]), randn(num_rows, sizes[0]))
        for _ in range(_num_copies(check, num_bytes))
    ]
    calls = [partial(kernels.rms_norm, x, weight, 1e-5, residual) for x, residual in norms]
    _record(check, f"rms_norm with residual, {shape.name}, T={num_rows}", calls, num_bytes, 0.8)
    num_bytes = 3 * 2 * num_rows * sizes[1]
    gates = [randn(num_rows, 2 * sizes[1]) for _ in range(_num_copies(check, num_bytes))]
    calls = [partial(kernels.silu_mul, each) for each in gates]
    _record(check, f"silu_mul, {shape.name}, T={num_rows}", calls, num_bytes, 0.8)


def _time_prefill(check: Check, kernels: Kernels, shape: Shape) -> None:
    length = 48 if check.is_dry else 8192
    batch = make_batch(shape, [length], [length], torch.bfloat16, check.device)
    flops = 2.0 * shape.num_heads * shape.head_size * length**2
    floor = check.ceilings.get("flops", 0) * 1e-12 or None
    for fixed_tile in (False, True):
        seconds = times_s(check, [partial(batch.attend, kernels, fixed_tile=fixed_tile)])
        # Of the path that engines take unless they are batch-invariant.
        goal = 300.0 if shape.head_size == 128 and not fixed_tile else None
        speeds = (flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12)
        name = f"paged_attention, {shape.name}, prefill of {length}"
        name += ", batch-invariant" if fixed_tile else ""
        check.measured(Measurement(5, name, "TFLOP/s", speeds, floor, goal, is_more_better=True))


def _time_sampling(check: Check, kernels: Kernels) -> None:
    vocab_size = 1000 if check.is_dry else 151_936
    for num_rows in (1, 2) if check.is_dry else (1, 64):
        for has_filters, goal_us in ((False, 20.0), (True, 60.0)):
            arguments = make_sampling(num_rows, vocab_size, has_filters, check.device)
            name = f"sample, {'top-k and top-p' if has_filters else 'no filter'}, R={num_rows}"
            seconds = times_s(check, [partial(kernels.sample, *arguments)])
            check.measured(
                Measurement(
                    5,
                    name,
                    "us",
                    (seconds[0] * 1e6, seconds[1] * 1e6),
                    _floor_us(check, 4 * num_rows * vocab_size),
                    goal_us if num_rows == 1 else None,
                )
            )


def _time_mass(check: Check, kernels: Kernels, shape: Shape) -> None:
    """What block mass adds to attention, per layer and as a part of a whole step's goal."""
    num_reqs, context = (2, 64) if check.is_dry else (64, 1024)
    batch = make_batch(shape, [context] * num_reqs, [1] * num_reqs, torch.bfloat16, check.device)
    without = [each * 1e6 for each in times_s(check, [partial(batch.decode, kernels)])]
    with_mass = [each * 1e6 for each in times_s(check, [partial(batch.mass, kernels)])]
    added = shape.num_layers * (sum(with_mass) - sum(without)) / 2
    parts = tuple(
        shape.num_layers * (b - a) / shape.step_goal_us
        for a, b in zip(without, with_mass, strict=True)
    )
    note = "noise" if is_noise(without, with_mass) else f"{added:.1f} us a step"
    name = f"block mass, {shape.name}, R={num_reqs}, as a part of a step of its goal"
    check.measured(Measurement(5, name, "", (parts[0], parts[1]), goal=0.03, note=note))


def _record(
    check: Check,
    name: str,
    calls: Sequence[Callable[[], object]],
    num_bytes: int,
    share_of_copy: float | None,
) -> None:
    seconds = times_s(check, calls)
    floor = _floor_us(check, num_bytes)
    goal = floor / share_of_copy if floor and share_of_copy else None
    values = (seconds[0] * 1e6, seconds[1] * 1e6)
    check.measured(Measurement(5, name, "us", values, floor, goal))


def _floor_us(check: Check, num_bytes: int) -> float | None:
    bandwidth = check.ceilings.get("bytes")
    return num_bytes / bandwidth * 1e6 if bandwidth else None


def _num_copies(check: Check, num_bytes: int) -> int:
    """Inputs to go through so that none is in the level-two cache when its turn comes."""
    if check.is_dry:
        return 2
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return min(max(2, -(-3 * cache_bytes // num_bytes)), 24)


def times_s(check: Check, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Seconds of one call, twice: each the median of replays of a graph of all calls in turn."""
    for call in calls:
        call()
    if check.is_dry:
        return _wall_s(calls), _wall_s(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    num_rounds = max(1, 16 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    num_calls = num_rounds * len(calls)
    return _replay_s(graph) / num_calls, _replay_s(graph) / num_calls


def _replay_s(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    seconds = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(seconds)


def _wall_s(calls: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)
