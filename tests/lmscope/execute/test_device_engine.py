"""The engine with the Triton back end on a CPU, under the interpreter, in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Ends a run that hangs; it takes a tenth of it on a quiet machine.
_DEADLINE_S = 600


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_engine_with_triton_gives_what_it_gives_with_torch():
    environment = {
        "TRITON_INTERPRET": "1",
        "LMSCOPE_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # What it skips needs a GPU, which this process is kept from.
        "LMSCOPE_REQUIRE": "",
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/lmscope/execute/device"],
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
