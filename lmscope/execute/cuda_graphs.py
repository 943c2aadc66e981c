"""DecodeGraphs: decode batches run from captured CUDA graphs, so that the host starts one thing.

A graph is captured for padded sizes: the next of 1, 2, 4, 8, 16, 32, 48, ... requests, and the next
power of two of blocks in a table, since the kernel that attends has a program for each part of
the longest table. It is captured when a batch of its size first comes, after that batch has run
once by itself, which compiles kernels.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch

__all__ = ["CapturedGraph", "DecodeGraphs", "capture_cuda_graph", "graph_sizes"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_one_capture_at_a_time = threading.Lock()  # which is torch's rule for a process

_LARGEST_BATCH = 256
_ALL_SIZES = (1, 2, 4, 8, *range(16, _LARGEST_BATCH + 1, 16))
_FEWEST_BLOCKS = 16


class CapturedGraph(Protocol):
    """What can be run again: the same work on what its buffers hold by then."""

    def replay(self) -> None: ...


def graph_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """Numbers of requests that graphs are captured for: 1, 2, 4, 8, then every 16, up to 256."""
    most = min(max_num_reqs, _LARGEST_BATCH)
    return (*(size for size in _ALL_SIZES if size < most), most)


class DecodeGraphs(Generic[T]):
    """The graphs of one engine.

    run        does the work of a batch of so many requests and blocks a table, on buffers that
               hold it, and gives its results, which stay where they are when it runs again
    capture    makes a graph of a call

    Where a graph cannot be captured, for want of memory or because the model does something on
    the host, one warning says so, and this batch and all that come later run without.
    """

    def __init__(
        self,
        run: Callable[[int, int, Hashable], T],
        max_num_reqs: int,
        max_blocks: int,
        capture: Callable[[Callable[[], T]], tuple[CapturedGraph, T]],
    ) -> None:
        self._run = run
        self._sizes = graph_sizes(max_num_reqs)
        self._max_blocks = max_blocks
        self._capture = capture
        self._graphs: dict[tuple[int, int, Hashable], tuple[CapturedGraph, T]] = {}
        self._is_off = False

    @property
    def most_reqs(self) -> int:
        """Of the largest batch that runs from a graph."""
        return self._sizes[-1]

    def padded(self, num_reqs: int, num_blocks: int) -> tuple[int, int] | None:
        """Requests and blocks that such a batch must be padded to; None: it runs without."""
        if self._is_off or num_reqs > self._sizes[-1]:
            return None
        blocks = _FEWEST_BLOCKS
        while blocks < num_blocks:
            blocks *= 2
        return self._sizes[bisect_left(self._sizes, num_reqs)], min(blocks, self._max_blocks)

    def __call__(self, num_reqs: int, num_blocks: int, kind: Hashable = None) -> T:
        """Run a batch of padded sizes, which its buffers hold.

        kind    what else differs between graphs, for `run`
        """
        key = num_reqs, num_blocks, kind
        known = self._graphs.get(key)
        if known is not None:
            graph, result = known
            graph.replay()
            return result
        result = self._run(num_reqs, num_blocks, kind)
        if self._is_off:
            return result
        try:
            self._graphs[key] = self._capture(lambda: self._run(num_reqs, num_blocks, kind))
        except RuntimeError as error:
            self._is_off = True
            self._graphs.clear()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning(
                "decode steps run without CUDA graphs, which is slower: the graph of %d requests "
                "cannot be captured (%s); lower gpu_memory_utilization or max_num_seqs if memory "
                "is short, or give enforce_eager=True to capture none",
                num_reqs,
                reason,
            )
        return result


def capture_cuda_graph(call: Callable[[], T], pool: Any) -> tuple[CapturedGraph, T]:
    """A CUDA graph of `call`, and what it returns, in the memory of `pool`."""
    graph = torch.cuda.CUDAGraph()
    is_inference = torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream()
    try:
        # Other engines, and the notebook, may use the device meanwhile, on threads of their own.
        # A capture writes to tensors of torch's random generator, which the first one makes: were
        # they of an inference mode, no capture outside of one could write to them.
        with (
            _one_capture_at_a_time,
            torch.inference_mode(False),
            torch.cuda.graph(
                graph,
                pool=pool,
                stream=_capture_stream(torch.cuda.current_device()),
                capture_error_mode="thread_local",
            ),
            torch.inference_mode(is_inference),
        ):
            result = call()
    except RuntimeError:
        # A capture that fails leaves its own stream as the thread's.
        torch.cuda.set_stream(stream)
        raise
    return graph, result


@cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """One for all captures on a device; torch's own is on that of the first of them."""
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]  # torch has no types
