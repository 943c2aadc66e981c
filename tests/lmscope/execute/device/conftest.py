"""Engines with the Triton back end: interpreted on a CPU, in a process of its own, or on a GPU.

test_device_engine.py starts that process with TRITON_INTERPRET=1 and LMSCOPE_CHECK=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmscope.execute import device_runner
from lmscope.execute.cuda_graphs import DecodeGraphs
from lmscope.execute.pending_output import Landing

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
        elif item.path.name.startswith("test_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are nowhere to be seen until somebody waits for them, as on a busy device."""
    has_waited: set[int] = set()
    copy, wait = Landing.copy, Landing.wait

    def copy_unseen(self: Landing, *args: Any) -> None:
        has_waited.discard(id(self))
        copy(self, *args)

    def wait_and_see(self: Landing) -> None:
        wait(self)
        has_waited.add(id(self))

    monkeypatch.setattr(Landing, "copy", copy_unseen)
    monkeypatch.setattr(Landing, "wait", wait_and_see)
    monkeypatch.setattr(Landing, "is_here", lambda self: id(self) in has_waited)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Graphs on a CPU, which run again what they were captured from; the sizes that ran."""
    replayed = []

    class Again:
        def __init__(self, call: Callable[[], Any], result: Any) -> None:
            self.call, self.result = call, result

        def replay(self) -> None:
            replayed.append(tuple(self.result.logits.shape[:1]))
            again = self.call()
            self.result.logits.copy_(again.logits)
            if again.mass is not None:
                self.result.mass.share.copy_(again.mass.share)
                for mine, new in zip(self.result.mass.layers, again.mass.layers, strict=True):
                    mine.copy_(new)

    def capture(call: Callable[[], Any]) -> Any:
        result = call()
        return Again(call, result), result

    init = device_runner.DeviceRunner.__init__

    def with_graphs(self: Any, *args: Any) -> None:
        init(self, *args)
        self._graphs = DecodeGraphs(self._run_decode, 4, self._max_blocks, capture)

    monkeypatch.setattr(device_runner.DeviceRunner, "__init__", with_graphs)
    return replayed
