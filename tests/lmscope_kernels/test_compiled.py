"""Kernels compiled for GPUs, without one, by the newest and the oldest Triton that is served."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kernel_processes import ROOT, run_folder

_OLDEST = ROOT / ".venv-triton36" / "bin" / "python"  # `make triton36` makes it


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="installed"),
        pytest.param(
            str(_OLDEST),
            id="3.6.0",
            marks=pytest.mark.skipif(
                not _OLDEST.exists(), reason="no Triton 3.6.0: run make triton36"
            ),
        ),
    ],
)
def test_kernels_compile_without_spills_for_each_architecture(python, tmp_path):
    run_folder(
        "compiled",
        python,
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
        LMSCOPE_TEST_COMPILED="1",
    )
