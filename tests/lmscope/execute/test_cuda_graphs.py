"""Which graphs are captured and run, and what happens where none can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lmscope.execute import cuda_graphs
from lmscope.execute.cuda_graphs import DecodeGraphs, capture_cuda_graph, graph_sizes


class Work:
    """A forward that counts how it was run."""

    def __init__(self, max_num_reqs: int = 32, error: Exception | None = None) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.replayed: list[tuple[Any, ...]] = []
        self.num_captured = 0
        self._error = error
        self.graphs = DecodeGraphs(self._run, max_num_reqs, 100, self._capture)

    def _run(self, *key: Any) -> str:
        self.ran.append(key)
        return str(key)

    def _capture(self, call: Callable[[], str]) -> Any:
        self.num_captured += 1
        if self._error is not None:
            raise self._error
        result = call()
        key = self.ran.pop()  # a capture only notes what is to be run
        replayed = self.replayed

        class Graph:
            def replay(self) -> None:
                replayed.append(key)

        return Graph(), result


def test_sizes_are_few_and_end_with_the_most_requests():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(1000)[-2:] == (240, 256)


def test_a_batch_is_padded_to_the_next_size():
    graphs = Work().graphs
    assert graphs.padded(1, 1) == (1, 16)
    assert graphs.padded(3, 17) == (4, 32)
    assert graphs.padded(25, 99) == (32, 100)
    assert graphs.padded(33, 1) is None
    assert graphs.most_reqs == 32


def test_a_size_runs_once_by_itself_and_from_then_on_as_a_graph():
    work = Work()
    results = [work.graphs(4, 16), work.graphs(4, 16), work.graphs(4, 32), work.graphs(4, 16, "m")]
    work.graphs(4, 16)

    assert results[0] == results[1] == "(4, 16, None)"
    assert work.ran == [(4, 16, None), (4, 32, None), (4, 16, "m")]
    assert work.replayed == [(4, 16, None), (4, 16, None)]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("capture is not permitted")],
)
def test_where_a_graph_cannot_be_captured_all_steps_run_without(caplog, error):
    work = Work(error=error)
    with caplog.at_level(logging.WARNING):
        assert work.graphs(4, 16) == work.graphs(4, 16) == "(4, 16, None)"
        work.graphs(8, 16)

    (record,) = caplog.records
    assert "without CUDA graphs" in record.getMessage()
    assert str(error) in record.getMessage()
    assert "enforce_eager" in record.getMessage()
    assert work.num_captured == 1
    assert len(work.ran) == 3
    assert work.graphs.padded(4, 16) is None


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_torch_makes_for_a_capture_is_of_no_inference_mode(monkeypatch, is_inference):
    """Its random generator keeps it, and captures of others, outside of one, write to it."""
    modes = []

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        modes.append(torch.is_inference_mode_enabled())
        yield
        modes.append(torch.is_inference_mode_enabled())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda index: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with torch.inference_mode(is_inference):
        _, in_call = capture_cuda_graph(torch.is_inference_mode_enabled, pool=None)
        assert torch.is_inference_mode_enabled() is is_inference

    assert in_call is is_inference
    assert modes == [False, False]
