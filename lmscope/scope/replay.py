"""Replay: a recording behind a tap and a gate, as if its engine ran again.

    player = replay("preemption.lmscope")
    player.tap.on(SchedulerOutput, print)
    player.gate.step()            # one struct
    player.play().wait()          # the rest

Whatever reads an engine reads a replay: it has the same tap, the same gate, and emits the
same structs in the same order, from a thread of its own. It needs no model and no torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from lmscope.boundary import Boundary, EngineSnapshot
from lmscope.errors import EngineClosedError
from lmscope.gate import Gate
from lmscope.scope.recording import Recording, open_recording
from lmscope.scope.view import EngineView
from lmscope.tap import Tap

__all__ = ["Replay", "replay"]

# Waits are cut into pieces so that Ctrl-C gets through on every platform.
_PIECE_S = 0.25


def replay(recording: Recording | str | Path, *, speed: float | None = None) -> Replay:
    """A player for a recording or the file of one. It stands before the first struct.

    speed   1.0 is as fast as it was recorded, 2.0 twice as fast; None as fast as possible
    """
    if not isinstance(recording, Recording):
        recording = open_recording(recording)
    return Replay(recording, speed=speed)


class Replay:
    """Plays the structs of a recording through a tap, from its beginning to its end.

    tap, gate   as an engine has them
    recording   what is played; `recording.at(step)` looks at any moment of it
    position    how many structs have been played
    """

    def __init__(self, recording: Recording, *, speed: float | None = None) -> None:
        _check_speed(speed)
        self.recording = recording
        self.position = 0
        self._speed = speed
        self._boundaries = recording.boundaries
        self._end = len(recording)
        self._view = EngineView(recording.snapshot)
        self._changed = threading.Condition()
        self._is_going = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.tap = Tap(recording.info, self._snapshot, self._call)
        self.gate = Gate(
            self.tap,
            is_idle=self._is_idle,
            serve=self._serve,
            is_engine_thread=lambda: threading.current_thread() is self._thread,
            start=self._go,
        )
        self._thread = threading.Thread(target=self._run, name="lmscope-replay", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Replay of {self.recording.info.model}: {self.position} of {self._end} structs>"

    def play(self, speed: float | None = None) -> Replay:
        """Play on from where it stands, and return at once; the gate is opened."""
        _check_speed(speed)
        if speed is not None:
            self._speed = speed
        self.gate.resume()
        return self

    def wait(self, timeout_s: float | None = None) -> Replay:
        """Wait for the end of the recording and return the replay itself.

        TimeoutError after `timeout_s` seconds; GateClosedError when this thread has closed
        the gate; what a strict listener raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if self.position == self._end or self._is_closed:
                    return self
                self._changed.wait(_PIECE_S)
            self.gate.require_open()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"the replay is at struct {self.position} of {self._end} after {timeout_s} s"
                )

    def close(self) -> None:
        """End the thread; twice is fine. The recording stays open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.gate.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_go():
                boundary = self._boundaries[self.position]
                self._keep_pace(boundary)
                # Folded first: who joins while the gate holds this struct must start
                # behind it.
                self._view.apply(boundary)
                self.tap(boundary)
                with self._changed:
                    self.position += 1
                    self._changed.notify_all()
        except BaseException as error:  # a strict listener: nobody may wait for more
            self._error = error
            self.gate.end(error)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._serve()

    def _wait_for_go(self) -> bool:
        """Whether there is a struct to play; serves callers while it waits."""
        while True:
            self._serve()
            with self._changed:
                if self._is_closed:
                    return False
                if self._is_going and self.position < self._end:
                    return True
                if not self._calls:
                    self._changed.notify_all()
                    self._changed.wait(_PIECE_S)
            self.gate.wake()

    def _keep_pace(self, boundary: Boundary) -> None:
        if self._speed is None or self.position == 0:
            return
        pause = (boundary.time - self._boundaries[self.position - 1].time) / self._speed
        deadline = time.monotonic() + pause
        with self._changed:
            while not self._is_closed and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _PIECE_S))

    def _serve(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:  # it belongs to the one who asked
                future.set_exception(error)

    # -- for tap and gate ------------------------------------------------------

    def _go(self) -> None:
        with self._changed:
            self._is_going = True
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        with self._changed:
            return self._is_closed or self.position == self._end or not self._is_going

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run between two structs, also while the gate is closed."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Any] = Future()
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the replay was closed; make a new one with replay()")
            self._calls.append((function, future))
            self._changed.notify_all()
        self.gate.wake()
        return future.result()

    def _snapshot(self) -> EngineSnapshot:
        return self._view.snapshot()


def _check_speed(speed: float | None) -> None:
    if speed is not None and not speed > 0:
        raise ValueError(f"speed is {speed}; it must be above 0, or None for as fast as possible")
