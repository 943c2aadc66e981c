"""Runs a folder of kernel tests in a pytest process of its own.

Triton reads its environment when it is first imported and keeps it, so the interpreter and the
compiler cannot be tested in one process, and the process that runs all other tests is neither.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Ends a run that hangs. It takes a tenth of it on a quiet machine.
_DEADLINE_S = 900


def run_folder(folder: str, python: str = sys.executable, **environment: str) -> None:
    """Fail with what pytest printed unless all of tests/lmscope_kernels/`folder` passed."""
    command = [python, "-m", "pytest", "-q", f"tests/lmscope_kernels/{folder}"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    summary = printed.strip().splitlines()[-1]
    assert re.search(r"\b\d+ passed", summary), printed
    assert not re.search("skipped|failed|error|xfailed", summary), printed
