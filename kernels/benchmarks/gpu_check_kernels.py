"""Items 1 to 5 of gpu_check.py: ceilings, builds, results, invariance and times of the kernels."""

from __future__ import annotations

import importlib
import pkgutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_check_batches import (
    BLOCK_SIZE,
    SHAPES,
    Kernels,
    Shape,
    kernels_for,
    make_batch,
    make_sampling,
    random_bits,
)
from gpu_check_report import Check, Measurement, is_noise
from torch import Tensor

__all__ = [
    "LIMITS",
    "build_kernels",
    "check_invariance",
    "check_results",
    "measure_ceilings",
    "time_kernels",
    "times_s",
]

_TESTS = Path(__file__).resolve().parents[2] / "tests" / "lmscope_kernels"
# Of files that are for CPUs only; some of them need numba.
_CPU_FILES = ("_cpu", "_numba", "numba_support")
# Of ‖output - reference‖ / ‖reference‖, the latter in float64.
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


# --- 1: ceilings ---------------------------------------------------------------------------


def measure_ceilings(check: Check) -> None:
    """Bandwidth of a copy and speed of a matrix product, both of random numbers."""
    for name in _kernel_files():
        check.attempt(1, f"import {name}", partial(_import, check, name))
    size = 1 << (20 if check.is_dry else 30)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    seconds = times_s(check, [lambda: target.copy_(source)])
    copy = tuple(2 * size / each for each in seconds)
    side = 128 if check.is_dry else 8192
    a, b = (torch.randn(side, side, device=check.device).bfloat16() for _ in range(2))
    product = tuple(2 * side**3 / each for each in times_s(check, [lambda: a @ b]))
    check.ceilings = {"bytes": sum(copy) / 2, "flops": sum(product) / 2}
    for name, unit, values, scale in (
        ("copy, read plus written", "TB/s", copy, 1e-12),
        (f"bf16 product of side {side}", "TFLOP/s", product, 1e-12),
    ):
        check.measured(Measurement(1, name, unit, (values[0] * scale, values[1] * scale)))


def _kernel_files() -> list[str]:
    """Names of all modules of kernels for GPUs, and of what they share."""
    import lmscope_kernels

    names = (module.name for module in pkgutil.iter_modules(lmscope_kernels.__path__))
    return [name for name in names if not name.endswith(_CPU_FILES)]


def _import(check: Check, name: str) -> None:
    importlib.import_module(f"lmscope_kernels.{name}")
    check.found(1, f"import {name}", True)


# --- 2: builds -----------------------------------------------------------------------------


def build_kernels(check: Check) -> None:
    """Compile what the compile tests list, for this device: registers, spills and time."""
    compiled = _TESTS / "compiled"
    if find_spec("triton") is None or not compiled.is_dir():
        check.skipped(2, "builds", "Triton or tests/lmscope_kernels/compiled is missing")
        return
    major, minor = (9, 0) if check.is_dry else torch.cuda.get_device_capability()
    # A process of its own: the interpreter, where it is on, would take the compiler's place.
    command = [sys.executable, str(Path(__file__).with_name("gpu_check_builds.py"))]
    command += [str(compiled), str(major * 10 + minor), "1" if check.is_dry else "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, num_registers, spilled_bytes, shared_bytes, seconds = line.split("\t")
            check.found(
                2,
                f"build {name}",
                int(spilled_bytes) == 0,
                f"{num_registers} registers, {spilled_bytes} bytes spilled, "
                f"{shared_bytes} bytes shared, {float(seconds):.2f} s",
            )
    if process.returncode:
        raise RuntimeError(f"the builds ended with status {process.returncode}")


# --- 3: results ----------------------------------------------------------------------------


def check_results(check: Check) -> None:
    """Every kernel against its reference in float64, for each shape and type."""
    kernels = kernels_for(check.device)
    for shape in SHAPES[:1] if check.is_dry else SHAPES:
        for dtype in LIMITS:
            for name, compare in _comparisons(check, kernels, shape, dtype):
                where = f"{name}, {shape.name}, {str(dtype).removeprefix('torch.')}"
                if check.fits(3, where, 0 if check.is_dry else 2):
                    check.attempt(3, where, partial(_judge, check, where, compare))
    device_tests = _TESTS / "device"
    if check.is_dry or find_spec("pytest") is None or not device_tests.is_dir():
        check.skipped(3, "tests/lmscope_kernels/device", "a dry run, or pytest is missing")
    elif check.fits(3, "tests/lmscope_kernels/device", 60):
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", str(device_tests)],
            capture_output=True,
            text=True,
            timeout=max(check.left_s, 60),
        )
        last = (result.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        check.found(3, "tests/lmscope_kernels/device", result.returncode == 0, last)


def _judge(check: Check, name: str, compare: Callable[[], tuple[float, float]]) -> None:
    error, limit = compare()
    check.found(3, name, error < limit, f"error {error:.2g}, limit {limit:.0e}")


def _comparisons(
    check: Check, kernels: Kernels, shape: Shape, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """The name of each comparison, and what gives its error and its limit."""
    limit = LIMITS[dtype]
    reference = kernels_for("cpu")
    num_rows = 6 if check.is_dry else 4096

    def randn(*size: int) -> Tensor:
        return torch.randn(size, device=check.device).to(dtype)

    def norm() -> tuple[float, float]:
        x, weight = randn(num_rows, shape.hidden_size), randn(shape.hidden_size)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5, None)
        return _error(kernels.rms_norm(x, weight, 1e-5, None), expected), limit

    def activation() -> tuple[float, float]:
        gate_up = randn(num_rows, 2 * shape.intermediate_size)
        return _error(kernels.silu_mul(gate_up), reference.silu_mul(gate_up.double())), limit

    def attention() -> tuple[float, float]:
        lengths = [3, 40] if check.is_dry else [1, 4000, 100, 777]
        batch = make_batch(shape, lengths, lengths, dtype, check.device)
        return _error(batch.attend(kernels), batch.attend(reference, double=True)), limit

    def decode() -> tuple[float, float]:
        lengths = [3, 40] if check.is_dry else [1, 1024, 0, 5000] + [1000] * 28
        batch = make_batch(shape, lengths, [1] * len(lengths), dtype, check.device)
        return _error(batch.decode(kernels)[0], batch.decode(reference, double=True)[0]), limit

    def mass() -> tuple[float, float]:
        lengths = [3, 40] if check.is_dry else [1024, 17, 3000]
        batch = make_batch(shape, lengths, [1] * len(lengths), dtype, check.device)
        expected = batch.mass(reference, double=True)
        return float((batch.mass(kernels).double() - expected).abs().max()), limit

    def tokens() -> tuple[float, float]:
        arguments = make_sampling(4 if check.is_dry else 32, shape.vocab_size, True, check.device)
        is_other = kernels.sample(*arguments) != reference.sample(*arguments)
        # Rounding decides between tokens that are equal to six digits; that is rare.
        return float(is_other.double().mean()), 0.07

    def bars() -> tuple[float, float]:
        logits = randn(4, shape.vocab_size)
        expected = logits.clone()
        bitmask = random_bits(4, shape.vocab_size, check.device)
        rows = torch.arange(4, dtype=torch.int32, device=check.device)
        reference.apply_token_bitmask(expected, bitmask, rows)
        kernels.apply_token_bitmask(logits, bitmask, rows)
        return float((logits != expected).sum()), 0.5

    def stored() -> tuple[float, float]:
        rows = shape.num_kv_heads, shape.head_size
        num_blocks = 2 + num_rows // BLOCK_SIZE
        key, value = randn(num_rows, *rows), randn(num_rows, *rows)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=check.device)[:num_rows]
        slots[1] = -1  # padding
        num_other = 0
        results = []
        for each in (kernels, reference):
            # Zeros, which a row of random numbers is not: what goes elsewhere shows.
            caches = [
                torch.zeros(num_blocks, BLOCK_SIZE, *rows, dtype=dtype, device=check.device)
                for _ in range(2)
            ]
            norm = torch.zeros(num_blocks * BLOCK_SIZE, rows[0], device=check.device)
            each.store_kv(key, value, *caches, slots, norm)
            results.append((*caches, norm))
        for mine, other in zip(results[0][:2], results[1][:2], strict=True):
            num_other += int((mine != other).sum())
        return num_other + _error(results[0][2], results[1][2].double()), 1e-5

    yield "store_kv", stored
    yield "rms_norm", norm
    yield "silu_mul", activation
    yield "paged_attention", attention
    yield "paged_decode", decode
    yield "block_attention_mass", mass
    yield "apply_token_bitmask", bars
    if dtype == torch.float32:
        yield "sample", tokens


def _error(output: Tensor, reference: Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())


# --- 4: invariance -------------------------------------------------------------------------


def check_invariance(check: Check) -> None:
    """A row gets the same bits alone, in batches, in chunks, and fifty times over."""
    kernels = kernels_for(check.device)
    dtype = torch.float32 if check.is_dry else torch.bfloat16
    sizes = (2, 4) if check.is_dry else (2, 16, 64, 256)
    lengths = [1 + 37 * i % (60 if check.is_dry else 2000) for i in range(sizes[-1])]
    for shape in SHAPES[:1] if check.is_dry else SHAPES:
        batch = make_batch(shape, lengths, [1] * len(lengths), dtype, check.device)
        alone = [batch.rows(i, i + 1).decode(kernels)[0][0] for i in range(len(lengths))]
        for size in sizes:
            together = batch.rows(0, size).decode(kernels)[0]
            num_equal = sum(torch.equal(together[i], alone[i]) for i in range(size))
            name = f"paged_decode, {shape.name}: rows of a batch of {size} as each alone"
            check.found(4, name, num_equal == size, f"{num_equal} of {size} are equal")
        first = batch.decode(kernels)[0]
        repeats = [torch.equal(batch.decode(kernels)[0], first) for _ in range(50)]
        check.found(4, f"paged_decode, {shape.name}: 50 repeats", all(repeats))
        whole = make_batch(shape, [96], [96], dtype, check.device)
        chunks = [whole.chunk(0, 40).attend(kernels), whole.chunk(40, 96).attend(kernels)]
        is_equal = torch.equal(torch.cat(chunks), whole.attend(kernels))
        check.found(4, f"paged_attention, {shape.name}: chunks of 40 and 56 as one of 96", is_equal)


# --- 5: times ------------------------------------------------------------------------------


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
    seconds = times_s(check, [partial(batch.attend, kernels)])
    goal = 300.0 if shape.head_size == 128 else None
    speeds = (flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12)
    floor = check.ceilings.get("flops", 0) * 1e-12 or None
    name = f"paged_attention, {shape.name}, prefill of {length}"
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
