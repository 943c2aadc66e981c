"""Keeps the two folders of kernel tests out of processes in which they cannot run.

device/    runs under the interpreter, in a process of its own with TRITON_INTERPRET=1, started by
           test_interpreted.py; and on a GPU, where there is one
compiled/  runs in a process of its own per version of Triton, started by test_compiled.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path == HERE / "device":
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if is_interpreted or torch.cuda.is_available() else True
    if collection_path == HERE / "compiled":
        return None if os.environ.get("LMSCOPE_TEST_COMPILED") == "1" else True
    return None
