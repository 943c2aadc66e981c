"""New random numbers for each kernel test, with the seed in what a failure prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside of the interpreter, all of these need a GPU."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    request.node.add_report_section("setup", "seed", f"torch.manual_seed({torch.seed()})")
