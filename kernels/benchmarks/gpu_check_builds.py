"""Compiles the cases of a folder of compile tests for one architecture; a line for each.

Those of the newest architecture that is not newer, where none are for this one.

    python gpu_check_builds.py tests/lmscope_kernels/compiled 90 0

A line has, between tabs: name, registers, bytes spilled, bytes of shared memory, seconds. The last
argument is 1 for the first case of each file only.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"


def main(folder: Path, capability: int, is_short: bool) -> None:
    sys.path.insert(0, str(folder))
    kernels = str(Path(__file__).resolve().parents[1])
    sys.path.append(kernels)  # behind an installed one
    from kernel_compiling import compile_case

    for path in sorted((folder / "cases").glob("*.py")):
        every = runpy.run_path(str(path))["CASES"]
        older = [each for c in every for each in c.capabilities if each <= capability]
        cases = [c for c in every if older and max(older) in c.capabilities]
        for case in cases[:1] if is_short else cases:
            began = time.perf_counter()
            build = compile_case(case, capability)
            spilled = build.stack_bytes + build.local_bytes
            numbers = build.num_registers, spilled, build.shared_bytes
            seconds = time.perf_counter() - began
            print(f"{path.stem} {case.name}", *numbers, seconds, sep="\t", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
