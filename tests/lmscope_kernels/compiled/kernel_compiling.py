"""Compiles kernels for GPUs that are not there, and reads what came out.

Each file of cases/ lists builds as CASES; test_compile.py compiles all of them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
MAX_SHARED_BYTES = 99 * 1024

# Query heads, KV heads, head size, hidden size, intermediate size, vocabulary.
MODELS = {
    "135M": (9, 3, 64, 576, 1536, 49152),
    "Qwen3-0.6B": (16, 8, 128, 1024, 3072, 151936),
    "Llama-3.2-1B": (32, 8, 64, 2048, 8192, 128256),
    "Llama-3.1-8B": (32, 8, 128, 4096, 14336, 128256),
}

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Case:
    """One kernel with one set of constants.

    types      type of each argument that is no constant: "*bf16", "i32", "fp32"; an int with
               ":16" is known to divide by 16, as are the addresses of all pointers
    options    what the launcher passes beside the arguments: num_warps, num_stages, ...
    ptx        instructions that must appear, as regular expressions
    ptx_sm_90  the same, on sm_90 only
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    ptx: tuple[str, ...] = ()
    ptx_sm_90: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = CAPABILITIES
    max_shared_bytes: int = field(default=MAX_SHARED_BYTES)


@dataclass(frozen=True)
class Build:
    """What one compilation gave; bytes, but registers and warps, which are counts."""

    ptx: str
    num_registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def compile_case(case: Case, capability: int) -> Build:
    """Compile for one architecture; needs no driver. Raises for an argument without a type."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(case.kernel.params):
        name = parameter.name
        if parameter.is_constexpr or name in case.constants:
            signature[name] = "constexpr"
            assert name in case.constants, f"{case.name}: constant {name} has no value"
            continue
        kind = case.types[name]
        if kind.startswith("*") or kind.endswith(":16"):
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind.removesuffix(":16")
    constants = {
        (case.kernel.arg_names.index(name),): value for name, value in case.constants.items()
    }
    compiled = triton.compile(
        ASTSource(case.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=case.options,
    )
    registers, stack, local = _resources(compiled.asm["cubin"])
    return Build(compiled.asm["ptx"], registers, stack, local, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack and of local memory, from the compiled binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run(
            [str(_CUOBJDUMP), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:\d+\s+LOCAL:(\d+)", dump)
    assert found is not None, dump
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack, local
