"""Proves the GPU kernels and the engine on one device, in a few minutes, and writes it down.

    python kernels/benchmarks/gpu_check.py --budget-s 480 --out gpu_check
    python kernels/benchmarks/gpu_check.py --dry-run

In order: the device's ceilings; every kernel built, with registers and spills; every kernel
against float64 at real sizes; results of kernels and of a batch-invariant engine bit for bit equal
alone and in batches; kernel times; decode steps of the engine with models of random weights; a
workload of 256 requests; a trace. Each item writes a line as soon as it knows something and starts
only while its estimate fits what is left of the budget, so a run that is cut keeps what it had. It
reads no network, and needs torch; what else is missing (triton, transformers, msgspec) is said
where an item needs it. The items run in a process of their own: where the device is lost to it, or
nothing is heard of it for minutes, another one goes on with what is left.

Writes env.json, results.jsonl, summary.md (printed at the end too) and trace.json.gz into --out.
--dry-run goes through the same items on a CPU with tiny sizes and the torch references. The exit
status is 1 when something is wrong or fails; a goal that is missed is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
for _name, _folder in (("lmscope", _ROOT), ("lmscope_kernels", _ROOT / "kernels")):
    # On a borrowed machine nothing of ours is installed.
    if find_spec(_name) is None:
        sys.path.insert(0, str(_folder))

import gpu_check_engine  # noqa: E402  # after the path is set
import gpu_check_invariance  # noqa: E402
import gpu_check_kernels  # noqa: E402
import gpu_check_models  # noqa: E402
import gpu_check_times  # noqa: E402
import torch  # noqa: E402
from gpu_check_processes import LOST_STATUS, run_in_processes  # noqa: E402
from gpu_check_report import Check, DeviceLost, summary  # noqa: E402

__all__ = ["ITEMS", "main"]

_MAX_FILE_BYTES = 16 << 20
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "msgspec")


class Item(NamedTuple):
    number: int
    name: str
    estimate_s: float
    run: Callable[[Check], None]


def _in_turn(*parts: Callable[[Check], None]) -> Callable[[Check], None]:
    """One after the other, as one item."""

    def run(check: Check) -> None:
        for part in parts:
            part(check)

    return run


ITEMS = (
    Item(1, "ceilings and imports", 20, gpu_check_kernels.measure_ceilings),
    Item(2, "builds", 60, gpu_check_kernels.build_kernels),
    Item(3, "right at real sizes", 90, gpu_check_kernels.check_results),
    Item(4, "invariance", 40, gpu_check_invariance.check_invariance),
    Item(
        5,
        "kernel times",
        95,
        _in_turn(gpu_check_times.time_kernels, gpu_check_invariance.time_matmul),
    ),
    Item(
        6,
        "engine steps",
        60,
        _in_turn(gpu_check_engine.time_steps, gpu_check_invariance.time_engine),
    ),
    Item(7, "256 requests", 30, gpu_check_engine.run_workload),
    Item(8, "trace", 20, gpu_check_engine.take_trace),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    items = [each for each in ITEMS if not options.items or each.number in options.items]
    if options.goes_on:
        return _run(items, Check(out, "cuda", options.budget_s), goes_on=True)
    for name in ("results.jsonl", "env.json"):
        (out / name).unlink(missing_ok=True)
    check = Check(out, "cpu" if options.dry_run else "cuda", options.budget_s)
    try:
        if check.is_dry:
            _run(items, check)
        else:
            command = [sys.executable, str(Path(__file__).resolve()), "--goes-on"]
            command += ["--out", str(out), "--items", *(str(each.number) for each in items)]
            run_in_processes(command, [(each.number, each.name) for each in items], check)
    finally:
        file = out / "env.json"
        text = summary(check, json.loads(file.read_text()) if file.exists() else {})
        (out / "summary.md").write_text(text)
    for file in out.iterdir():
        if file.is_file() and file.stat().st_size > _MAX_FILE_BYTES:
            print(f"{file.name} is {file.stat().st_size} bytes, over the limit; it is removed")
            file.unlink()
    print(text)
    return int(check.num_failed > 0)


def _run(items: Sequence[Item], check: Check, goes_on: bool = False) -> int:
    """Run the items in this process, but those that are done; the status of the process.

    goes_on    where another process may have begun
    """
    torch.manual_seed(0)
    if goes_on:
        check.take_up()
        check.is_lost = _is_device_lost
    if not (check.out / "env.json").exists():
        environment = json.dumps(_environment(check), indent=1)
        (check.out / "env.json").write_text(environment + "\n")
    try:
        for number, name, estimate_s, run in items:
            if check.knows(number, name):
                continue
            if check.fits(number, name, 0 if check.is_dry else estimate_s):
                left_s = check.left_s
                check.attempt(number, name, partial(run, check))
                check.write(item=number, name=name, took_s=round(left_s - check.left_s, 1))
    except DeviceLost:
        return LOST_STATUS
    finally:
        gpu_check_models.remove_models()
    return 0


def _is_device_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--out", default="gpu_check")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with tiny sizes")
    parser.add_argument("--items", type=int, nargs="*", help="only these, by number")
    parser.add_argument("--goes-on", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --dry-run goes through the items without one")
    return options


def _environment(check: Check) -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    environment: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
        "budget_s": check.budget_s,
        "device": f"CPU, dry run ({platform.machine()})",
    }
    if not check.is_dry:
        properties = torch.cuda.get_device_properties(0)
        environment |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return environment


if __name__ == "__main__":
    sys.exit(main())
