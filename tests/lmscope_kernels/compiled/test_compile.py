"""Each kernel, for each model shape and architecture: it fits, and it copies as it should."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kernel_compiling import Case, compile_case

_CASES = Path(__file__).parent / "cases"


def cases_in(path: Path) -> list[Case]:
    spec = importlib.util.spec_from_file_location(f"compile_cases_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


BUILDS = [
    pytest.param(case, capability, id=f"{path.stem}-{case.name}-sm_{capability}")
    for path in sorted(_CASES.glob("*.py"))
    for case in cases_in(path)
    for capability in case.capabilities
]


@pytest.mark.parametrize(("case", "capability"), BUILDS)
def test_kernel_fits_and_copies_as_it_should(case: Case, capability: int) -> None:
    build = compile_case(case, capability)

    spilled = build.stack_bytes, build.local_bytes
    assert spilled == (0, 0), f"spills, with {build.num_registers} registers"
    assert build.shared_bytes <= case.max_shared_bytes
    for instruction in case.ptx + (case.ptx_sm_90 if capability == 90 else ()):
        assert re.search(instruction, build.ptx), instruction
