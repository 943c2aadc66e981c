"""Kernels on the CPU, under Triton's interpreter, against float64 references."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kernel_processes import run_folder


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_their_references_under_the_interpreter():
    run_folder("device", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
