"""Engines with the Triton back end: interpreted on a CPU, in a process of its own, or on a GPU.

test_device_engine.py starts that process with TRITON_INTERPRET=1 and LMSCOPE_CHECK=1.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.parent == HERE and not IS_INTERPRETED and not torch.cuda.is_available():
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside of the interpreter, all of these need a GPU; some need one in any case."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        if not IS_INTERPRETED:
            item.add_marker("gpu")
        elif item.path.name == "test_gpu.py":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
