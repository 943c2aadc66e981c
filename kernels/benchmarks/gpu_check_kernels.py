"""Items 1 to 4 of gpu_check.py: ceilings, builds, results and invariance of the kernels."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from gpu_check_report import Check, Measurement
from gpu_check_times import times_s
from torch import Tensor

__all__ = [
    "LIMITS",
    "build_kernels",
    "check_invariance",
    "check_results",
    "device_test_command",
    "measure_ceilings",
]

_TESTS = Path(__file__).resolve().parents[2] / "tests" / "lmscope_kernels"
_DEVICE_TESTS = "tests/lmscope_kernels/device"
_TESTS_S = 150.0
# Of files that are for CPUs only; some of them need numba.
_CPU_FILES = ("_cpu", "_numba", "numba_events", "numba_support", "vector_code")
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
    check.write(item=1, name="ceilings", ceilings=check.ceilings)
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
        check.skipped(3, _DEVICE_TESTS, "a dry run, or pytest is missing")
    elif check.fits(3, _DEVICE_TESTS, 60):
        check.attempt(3, _DEVICE_TESTS, partial(_run_device_tests, check))


def device_test_command() -> list[str]:
    """Runs the kernel tests with what a bare machine has: other tests need other packages."""
    pytest = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "--color=no"]
    return [*pytest, f"--confcutdir={_TESTS}", str(_TESTS / "device")]


def _run_device_tests(check: Check) -> None:
    try:
        result = subprocess.run(
            device_test_command(),
            cwd=_TESTS.parents[1],
            capture_output=True,
            text=True,
            timeout=_TESTS_S,
        )
    except subprocess.TimeoutExpired as ended:
        printed = (ended.stdout or b"").decode(errors="replace")[-300:]
        raise RuntimeError(f"not done after {_TESTS_S:.0f} s: {printed}") from ended
    printed = result.stdout.strip().splitlines() or result.stderr.strip().splitlines()
    for line in printed:
        if line.startswith(("FAILED ", "ERROR ")):
            check.found(3, line[:300], False)
    last = (printed or ["nothing was printed"])[-1]
    check.found(3, _DEVICE_TESTS, result.returncode == 0, last)


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

    def attention(
        decodes: bool = False, window: int | None = None, fixed_tile: bool = False
    ) -> tuple[float, float]:
        lengths = [3, 40] if check.is_dry else [1, 4000, 100, 777]
        query_lens = [1] * len(lengths) if decodes else lengths
        batch = make_batch(shape, lengths, query_lens, dtype, check.device)
        expected = batch.attend(reference, double=True, window=window)
        return _error(batch.attend(kernels, window=window, fixed_tile=fixed_tile), expected), limit

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
    yield "paged_attention, one row a request", partial(attention, decodes=True)
    yield "paged_attention, window", partial(attention, window=8 if check.is_dry else 1000)
    yield "paged_attention, batch-invariant", partial(attention, fixed_tile=True)
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
    for shape in SHAPES[:1] if check.is_dry else SHAPES:
        for part in (_check_decode_rows, _check_chunks):
            name = f"{part.__name__}, {shape.name}"
            check.attempt(4, name, partial(part, check, kernels, shape))


def _check_decode_rows(check: Check, kernels: Kernels, shape: Shape) -> None:
    dtype = torch.float32 if check.is_dry else torch.bfloat16
    sizes = (2, 4) if check.is_dry else (2, 16, 64, 256)
    lengths = [1 + 37 * i % (60 if check.is_dry else 2000) for i in range(sizes[-1])]
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


def _check_chunks(check: Check, kernels: Kernels, shape: Shape) -> None:
    dtype = torch.float32 if check.is_dry else torch.bfloat16
    whole = make_batch(shape, [96], [96], dtype, check.device)
    chunks = [
        whole.chunk(first, end).attend(kernels, fixed_tile=True)
        for first, end in ((0, 40), (40, 96))
    ]
    is_equal = torch.equal(torch.cat(chunks), whole.attend(kernels, fixed_tile=True))
    check.found(4, f"paged_attention, {shape.name}: chunks of 40 and 56 as one of 96", is_equal)
