"""PendingOutput: what a step sampled, while it is still on its way from the device.

A step is over for the runner when all of its work is given to the device. Its tokens, and what
else somebody watches, are copied to pinned memory behind that work; an event says when they are
there. Whoever needs them waits for the event, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmscope.boundary import ModelRunnerOutput
from lmscope.execute.device_inputs import new_event, pinned

__all__ = ["Landing", "PendingOutput", "Ring"]

# One step that runs, one that is taken in, and one that is prepared.
_NUM_LANDINGS = 3


class Landing:
    """Pinned memory for what comes from one step.

    tokens     [max_num_reqs]  int64
    scores     [max_num_reqs]  float32
    watched    what else was copied, by name, in memory of its own
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._start = new_event(is_timed=True) if is_cuda else None
        self._event = new_event(is_timed=True) if is_cuda else None
        self.tokens = pinned(max_num_reqs, torch.int64, device)
        self.scores = pinned(max_num_reqs, torch.float32, device)
        self.watched: dict[str, Tensor] = {}

    def start(self) -> None:
        """The step begins, which will land here."""
        if self._start is not None:
            self._start.record()

    def copy(self, tokens: Tensor, scores: Tensor, watched: dict[str, Tensor]) -> None:
        """Have all of these come here, without waiting for it."""
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        self.scores[: len(scores)].copy_(scores, non_blocking=True)
        self.watched = {}
        for name, tensor in watched.items():
            host = pinned(tuple(tensor.shape), tensor.dtype, self._device)
            self.watched[name] = host.copy_(tensor, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def is_here(self) -> bool:
        if self._event is None:
            return True
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch has no types for it

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def duration_s(self) -> float | None:
        """How long the device had to do with the step, which is here; None for a CPU."""
        if self._start is None or self._event is None:
            return None
        milliseconds: float = self._start.elapsed_time(self._event)
        return milliseconds / 1e3


class Ring:
    """Landings that take turns; the oldest has been read when its turn comes again."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._landings = [Landing(max_num_reqs, device) for _ in range(_NUM_LANDINGS)]
        self._next = 0

    def take(self) -> Landing:
        landing = self._landings[self._next]
        self._next = (self._next + 1) % _NUM_LANDINGS
        return landing


class PendingOutput:
    """Comes from sample_tokens in the place of a ModelRunnerOutput.

    build    makes the output once all is here
    """

    def __init__(self, landing: Landing, build: Callable[[], ModelRunnerOutput]) -> None:
        self._landing = landing
        self._build = build

    def wait(self) -> None:
        """Until the device has run the step."""
        self._landing.wait()

    def get_output(self) -> ModelRunnerOutput:
        """Wait and make the output; once, on any thread."""
        self._landing.wait()
        return self._build()
