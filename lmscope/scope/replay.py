"""Replay: a recording behind a tap and a gate, as if its engine ran again.

    player = replay("preemption.lmscope")
    player.tap.on(SchedulerOutput, print)
    player.gate.step()            # one struct
    player.seek(12)               # behind the last struct of step 12
    player.play().wait()          # the rest

Whatever reads an engine reads a replay: it has the same tap, the same gate, and emits the
same structs in the same order, from a thread of its own. It needs no model and no torch.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from lmscope.bell import Bell, Reply
from lmscope.boundary import Boundary, EngineSnapshot
from lmscope.errors import EngineClosedError
from lmscope.gate import Gate
from lmscope.scope.recording import Recording, open_recording
from lmscope.scope.view import EngineView
from lmscope.tap import Subscription, Tap

__all__ = ["Replay", "replay"]

Follower = Callable[[Boundary | EngineView], object]

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

    In a notebook it shows itself as the live view of an engine does.

    tap, gate   as an engine has them
    recording   what is played; `recording.at(step)` looks at any moment of it
    position    how many structs have been played; one that stands at the gate is being played
    """

    def __init__(self, recording: Recording, *, speed: float | None = None) -> None:
        _check_speed(speed)
        self.recording = recording
        self.position = 0
        self._speed = speed
        self._boundaries = recording.boundaries
        self._end = len(recording)
        self._view = EngineView(recording.snapshot)
        self._num_folded = 0
        self._followers: tuple[tuple[Subscription, Follower], ...] = ()
        self._bell = Bell()
        self._is_going = False
        self._jumps = 0
        self._is_closed = False
        self._error: BaseException | None = None
        self._calls: deque[tuple[Callable[[], Any], Reply[Any]]] = deque()
        self.tap = Tap(recording.info, self._snapshot, self._call)
        self.gate = Gate(
            self.tap,
            is_idle=self._is_idle,
            serve=self._serve,
            is_engine_thread=lambda: threading.current_thread() is self._thread,
            start=self._go,
        )
        self.gate.watch(self._look_again)
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

    @property
    def speed(self) -> float | None:
        """1.0 is as fast as it was recorded; None is as fast as possible. Can be set."""
        return self._speed

    @speed.setter
    def speed(self, speed: float | None) -> None:
        _check_speed(speed)
        with self._bell.lock:
            self._speed = speed
            self._bell.ring()

    @property
    def is_playing(self) -> bool:
        """Whether it goes on by itself."""
        return not self._is_idle() and not self.gate.is_closed

    @property
    def is_at_end(self) -> bool:
        """Whether all has been played."""
        return self.position == self._end

    @property
    def step(self) -> int:
        """The step of the last struct that was played."""
        return self._view.step

    def seek(self, step: int) -> Replay:
        """Jump behind the last struct of a step, without playing what lies between.

        It plays on from there if it was playing. RecordingError for a step that is not there.
        """
        self._call(lambda: self._jump(self.recording.count_to(step)))
        return self

    def back(self) -> Replay:
        """Jump back by one struct."""
        self._call(lambda: self._jump(max(0, self._num_folded - 1)))
        return self

    def ask_to_seek(self, step: int) -> None:
        """`seek()` for a slider: returns at once, and jumps as soon as it can."""
        count = self.recording.count_to(step)
        self._post(lambda: self._jump(count))

    def ask_to_step_back(self) -> None:
        """`back()` for a button: returns at once."""
        self._post(lambda: self._jump(max(0, self._num_folded - 1)))

    def follow(self, listener: Follower) -> tuple[EngineView, Subscription]:
        """Every struct from now on, and the view before the first of them.

        When the replay jumps, the listener gets a view of the place instead of a struct.
        It is called on the replay's thread, and the views are the listener's.
        """

        def begin() -> tuple[EngineView, Subscription]:
            _, subscription = self.tap.follow(listener)
            self._followers = (*self._open_followers(), (subscription, listener))
            return self._view.copy(), subscription

        made: tuple[EngineView, Subscription] = self._call(begin)
        return made

    def wait(self, timeout_s: float | None = None) -> Replay:
        """Wait for the end of the recording and return the replay itself.

        TimeoutError after `timeout_s` seconds; GateClosedError when this thread has closed
        the gate; what a strict listener raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._bell.lock:
                if self._error is not None:
                    raise self._error
                if self.position == self._end or self._is_closed:
                    return self
                ring = self._bell.listen()
            self._bell.wait(ring, _PIECE_S)
            self.gate.require_open()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"the replay is at struct {self.position} of {self._end} after {timeout_s} s"
                )

    def close(self) -> None:
        """End the thread; twice is fine. The recording stays open."""
        with self._bell.lock:
            self._is_closed = True
            self._bell.ring()
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

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        """Show the view; only a notebook asks for this."""
        # By name, because readers of the stream know nothing of notebooks.
        importlib.import_module("lmscope.notebook").watch(self)
        return {"text/plain": repr(self)}

    # -- the thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_go():
                jumps = self._jumps
                boundary = self._boundaries[self.position]
                self._keep_pace(boundary)
                if self._jumps != jumps:
                    continue
                # Folded first: who joins while the gate holds this struct must start
                # behind it.
                self._view.apply(boundary)
                self._num_folded += 1
                self.tap(boundary)
                with self._bell.lock:
                    if self._jumps == jumps:
                        self.position += 1
                    self._bell.ring()
        except BaseException as error:  # a strict listener: nobody may wait for more
            self._error = error
            self.gate.end(error)
        with self._bell.lock:
            self._is_closed = True
            self._bell.ring()
        self._serve()

    def _wait_for_go(self) -> bool:
        """Whether there is a struct to play; serves callers while it waits."""
        while True:
            self._serve()
            ring = None
            with self._bell.lock:
                if self._is_closed:
                    return False
                if self._is_going and self.position < self._end:
                    return True
                if not self._calls:
                    # Whoever jumps back from the end does not want it to run off.
                    self._is_going = False
                    self._bell.ring()
                    ring = self._bell.listen()
            if ring is not None:
                self._bell.wait(ring, _PIECE_S)
            self.gate.wake()

    def _keep_pace(self, boundary: Boundary) -> None:
        """Wait until the struct is due; a jump, or a gate that closes, ends the wait."""
        if self.position == 0:
            return
        gap_s = boundary.time - self._boundaries[self.position - 1].time
        start, jumps = time.monotonic(), self._jumps
        while True:
            self._serve()
            ring = None
            with self._bell.lock:
                speed = self._speed
                is_over = speed is None or self._is_closed or self._jumps != jumps
                if is_over or self.gate.is_closed:
                    return
                left = start + gap_s / (speed or 1.0) - time.monotonic()
                if left <= 0:
                    return
                if not self._calls:
                    ring = self._bell.listen()
            if ring is not None:
                self._bell.wait(ring, min(left, _PIECE_S))

    def _jump(self, count: int) -> None:
        """Stand behind the first `count` structs. On the replay's thread, between two."""
        self._view = self.recording.after(count)
        self._num_folded = count
        with self._bell.lock:
            self.position = count
            self._jumps += 1
            self._bell.ring()
        self.gate.move(self._boundaries[count - 1] if count else None)
        self._followers = self._open_followers()
        for _, listener in self._followers:
            listener(self._view.copy())
        self.gate.wake()

    def _open_followers(self) -> tuple[tuple[Subscription, Follower], ...]:
        return tuple(entry for entry in self._followers if entry[0].is_open)

    def _serve(self) -> None:
        while self._calls:
            function, reply = self._calls.popleft()
            try:
                reply.set_result(function())
            except BaseException as error:  # it belongs to the one who asked
                reply.set_exception(error)

    # -- for tap and gate ------------------------------------------------------

    def _go(self) -> None:
        with self._bell.lock:
            self._is_going = True
            self._bell.ring()

    def _look_again(self) -> None:
        """The gate has changed: a wait for the next struct may be over."""
        with self._bell.lock:
            self._bell.ring()

    def _is_idle(self) -> bool:
        with self._bell.lock:
            return self._is_closed or self.position == self._end or not self._is_going

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run between two structs, also while the gate is closed."""
        if threading.current_thread() is self._thread:
            return function()
        return self._post(function).result()

    def _post(self, function: Callable[[], Any]) -> Reply[Any]:
        """The same without waiting."""
        reply: Reply[Any] = Reply()
        with self._bell.lock:
            if self._is_closed:
                raise EngineClosedError("the replay was closed; make a new one with replay()")
            self._calls.append((function, reply))
            self._bell.ring()
        self.gate.wake()
        return reply

    def _snapshot(self) -> EngineSnapshot:
        return self._view.snapshot()


def _check_speed(speed: float | None) -> None:
    if speed is not None and not speed > 0:
        raise ValueError(f"speed is {speed}; it must be above 0, or None for as fast as possible")
