"""What a worker lets go of, and when, on a device that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmscope.execute.worker import Worker


@pytest.fixture
def worker() -> Any:
    made: Any = Worker(SimpleNamespace(), SimpleNamespace(device=torch.device("cuda", 0)))  # type: ignore[arg-type]  # of both only this is asked
    made._runner = object()
    return made


def test_what_a_gpu_runs_is_waited_for_before_its_graphs_and_memory_go(worker, monkeypatch):
    had = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: had.append(worker._runner))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: had.append(worker._runner))

    worker.shutdown()
    worker.shutdown()

    assert [each is not None for each in had] == [True, False]


def test_a_device_that_answers_no_more_is_let_go_of_too(worker, monkeypatch):
    def fail(_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        worker.shutdown()

    assert worker._runner is None
    assert worker._loaded is None
