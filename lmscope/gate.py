"""Gate: stop the engine at a boundary, look, and let it go on, one boundary at a time.

The gate stands behind the listeners of a tap. While it is closed the engine thread waits
there, so the struct under the cursor is the last thing that happened and nothing moves
until told. `abort`, snapshots and shutdown pass a closed gate. With async scheduling a batch
may be on the device when the engine gets there: it stops when the device has run what it was
given, and `in_flight` says which steps these are; nothing of them is taken in meanwhile.

    gate = llm.gate
    gate.pause()
    stream = llm.submit("Why is the sky blue?")
    gate.step()                       # -> EngineCoreRequest
    gate.step(ModelRunnerOutput)      # runs on to the next one of this kind
    gate.resume()
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from lmscope.bell import Bell
from lmscope.boundary import BOUNDARIES, Boundary, ModelRunnerOutput
from lmscope.errors import GateClosedError, NothingToRun
from lmscope.tap import Tap

__all__ = ["Breakpoint", "Gate"]

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Boundary)
Predicate = Callable[[Any], object]


class Breakpoint:
    """Closes the gate at a struct of one kind for which the predicate is true.

    name      what it stops at, in a word or two
    hits      how often it has stopped the engine
    enabled   set it to False to keep the breakpoint but pass it
    error     what the predicate raised; the breakpoint is then off
    """

    def __init__(
        self,
        gate: Gate,
        kind: type[Boundary],
        predicate: Predicate,
        once: bool,
        hits: int,
        name: str = "",
    ) -> None:
        self.kind = kind
        self.name = name or getattr(predicate, "__name__", repr(predicate))
        self.predicate = predicate
        self.once = once
        self.enabled = True
        self.hits = 0
        self.error: BaseException | None = None
        self._skip = hits - 1
        self._gate = gate

    def __repr__(self) -> str:
        state = "on" if self.enabled else "off"
        where = self.kind.__name__
        if self.name != where:
            where += f" if {self.name}"
        return f"<Breakpoint {where}: {state}, hit {self.hits} times>"

    def remove(self) -> None:
        """Take it away; twice is fine."""
        self._gate._remove(self)

    def matches(self, boundary: Boundary) -> bool:
        """Whether to stop here. Counts; called on the engine thread, once per struct."""
        if not self.enabled or type(boundary) is not self.kind:
            return False
        try:
            if not self.predicate(boundary):
                return False
        except Exception as error:
            # Like a listener: a wrong predicate must not stop an engine.
            self.error = error
            self.enabled = False
            logger.warning("%r raised at step %d and is off now: %r", self, boundary.step, error)
            return False
        if self._skip > 0:
            self._skip -= 1
            return False
        self.hits += 1
        if self.once:
            self.enabled = False
        return True


class Gate:
    """Pause, step and breakpoints for the one engine behind a tap.

    is_idle            whether the engine waits for requests
    serve              runs what passes a closed gate; called on the engine thread while it
                       stands
    is_engine_thread   whether the caller is the engine itself, which must not wait here
    start              gets the engine going when it is told to step or resume; an engine
                       with requests runs by itself
    settle             waits until the device has run what it was given, and says which steps
                       are in flight; called on the engine thread before it stands
    """

    def __init__(
        self,
        tap: Tap,
        is_idle: Callable[[], bool],
        serve: Callable[[], None],
        is_engine_thread: Callable[[], bool],
        start: Callable[[], None] = lambda: None,
        settle: Callable[[], tuple[int, ...]] = lambda: (),
    ) -> None:
        self._tap = tap
        self._is_idle = is_idle
        self._serve = serve
        self._is_engine_thread = is_engine_thread
        self._start = start
        self._settle = settle
        self._bell = Bell()
        self._is_closed = False
        # Closed, but the engine may run on to a struct of this kind (or any).
        self._running_to: type[Boundary] | None = None
        self._is_running = False
        self._at: Boundary | None = None
        self._in_flight: tuple[int, ...] = ()
        self._arrivals = 0
        # The gate was closed while the engine was idle, so it will stop at the first
        # boundary by itself, and nobody has been told of it yet.
        self._stops_unasked = False
        self._is_untold = False
        self._closed_by: int | None = None
        self._ended: BaseException | bool = False
        self._breakpoints: tuple[Breakpoint, ...] = ()
        self._watchers: tuple[Callable[[], None], ...] = ()
        tap.set_gate(self.arrive)

    def __repr__(self) -> str:
        return f"<Gate: {self.state}, {len(self._breakpoints)} breakpoints>"

    # -- for the user ----------------------------------------------------------

    @property
    def state(self) -> str:
        """Where the engine stands and what is in flight, or that it runs, in a few words."""
        at, in_flight = self._at, self.in_flight
        if at is not None:
            words = [f"stands at {type(at).__name__} of step {at.step}"]
            return ", ".join(words + [f"step {step} in flight" for step in in_flight])
        if self.has_ended:
            return "ended"
        return "paused before the next struct" if self._is_closed else "running"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def at(self) -> Boundary | None:
        """The struct at which the engine stands; None while it runs or is idle."""
        return self._at

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that the device has run, and whose tokens the engine takes in when it goes on.

        The step whose tokens `at` brings is not among them; without async scheduling there are
        none.
        """
        at = self._at
        # A request that enters carries the last step that was begun, which may well be on its way.
        brought = at.step if isinstance(at, ModelRunnerOutput) else None
        return () if at is None else tuple(step for step in self._in_flight if step != brought)

    @property
    def has_ended(self) -> bool:
        """Whether the engine was closed or has died, so that nothing will come any more."""
        return self._ended is not False

    @property
    def breakpoints(self) -> tuple[Breakpoint, ...]:
        return self._breakpoints

    def pause(self) -> Boundary | None:
        """Stop the engine at the next boundary and return it.

        None when the engine is idle: it will stop at the first boundary it reaches.
        """
        with self._bell.lock:
            self._close(None, is_running=False)
        if self._is_engine_thread():
            return None  # the caller is a listener; the engine stops right behind it
        while True:
            with self._bell.lock:
                if self._at is not None or self._is_idle() or self._ended:
                    self._stops_unasked = self._at is None
                    self._is_untold = False
                    return self._at
                ring = self._bell.listen()
            self._bell.wait(ring, _PIECE_S)

    @overload
    def step(self, kind: None = None, *, timeout_s: float = 60) -> Boundary: ...
    @overload
    def step(self, kind: type[B], *, timeout_s: float = 60) -> B: ...
    def step(self, kind: type[Boundary] | None = None, *, timeout_s: float = 60) -> Boundary:
        """Let the engine run to the next boundary, or to the next of one kind.

        Returns the struct at which it then stands, which may be another one if a
        breakpoint comes first. After a pause() that found the engine idle, the boundary at
        which it has stopped by itself counts as the next one. NothingToRun when the engine
        has no request, or runs out of them before; TimeoutError after `timeout_s` seconds,
        the engine keeps running towards the boundary.
        """
        _check_kind(kind)
        deadline = time.monotonic() + timeout_s
        if self._is_engine_thread():
            raise GateClosedError("step() was called by a listener, which the engine awaits")
        with self._bell.lock:
            at = self._at
            if at is not None and self._is_untold and kind in (None, type(at)):
                self._is_untold = False
                return at
            self._stops_unasked = self._is_untold = False
            before = self._arrivals
            self._close(kind, is_running=True)
            self._start()
        while True:
            with self._bell.lock:
                if self._arrivals != before:
                    at = self._at
                    assert at is not None
                    return at
                if self._ended:
                    raise self._nothing(kind)
                # The engine may have been let go and found nothing more to do.
                if self._at is None and self._is_idle():
                    self._is_running = False
                    self._stops_unasked = True
                    raise self._nothing(kind)
                ring = self._bell.listen()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the engine reached no {_name(kind)} within {timeout_s} s; "
                    "wait longer with timeout_s="
                )
            self._bell.wait(ring, _PIECE_S)

    def resume(self) -> None:
        """Open the gate. Breakpoints stay."""
        with self._bell.lock:
            self._is_closed = self._is_running = False
            self._stops_unasked = self._is_untold = False
            self._closed_by = None
            self._tap.arm_gate(bool(self._breakpoints))
            self._start()
            self._tell()

    def ask_to_pause(self) -> None:
        """`pause()` for a button: returns at once, and the engine stops when it gets there."""
        with self._bell.lock:
            self._close(None, is_running=False)

    def ask_to_step(self, kind: type[Boundary] | None = None) -> None:
        """`step()` for a button: returns at once, the engine goes to the boundary meanwhile.

        The gate is closed either way. NothingToRun when the engine has no request.
        """
        _check_kind(kind)
        with self._bell.lock:
            self._stops_unasked = self._is_untold = False
            self._close(kind, is_running=True)
            self._start()
            if self._ended or (self._at is None and self._is_idle()):
                self._is_running = False
                raise self._nothing(kind)

    def break_when(
        self,
        kind: type[B],
        predicate: Callable[[B], object] | None = None,
        *,
        once: bool = False,
        hits: int = 1,
        name: str = "",
    ) -> Any:
        """Stop at each struct of a kind for which `predicate` is true.

        once   only the first time
        hits   from the n-th match on
        name   of the breakpoint; without one that of the function

        Without a predicate it is a decorator:

            @gate.break_when(SchedulerOutput)
            def preempting(output): return bool(output.preempted_req_ids)

        Returns the Breakpoint (as a decorator: puts it in the function's place).
        """
        _check_kind(kind)
        if hits < 1:
            raise ValueError(f"hits is {hits}; it must be at least 1")

        def add(function: Callable[[B], object]) -> Breakpoint:
            made = Breakpoint(self, kind, function, once, hits, name)
            with self._bell.lock:
                self._breakpoints = (*self._breakpoints, made)
                self._tap.arm_gate(True)
                self._tell()
            return made

        return add if predicate is None else add(predicate)

    def watch(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the gate stops the engine, lets it go, opens or closes.

        It is called on whatever thread that happens on, under the gate's lock, so it may
        only set a flag.
        """
        with self._bell.lock:
            self._watchers = (*self._watchers, listener)

    def unwatch(self, listener: Callable[[], None]) -> None:
        """Call it no more; twice is fine."""
        with self._bell.lock:
            self._watchers = tuple(other for other in self._watchers if other != listener)

    def require_open(self) -> None:
        """GateClosedError if this thread closed the gate, so that waiting would never end."""
        if self._is_closed and self._closed_by == threading.get_ident():
            at = self._at
            where = f"at {type(at).__name__} of step {at.step}" if at else "before any boundary"
            raise GateClosedError(
                f"the engine stands {where} at the gate that this thread closed; "
                "use submit() and step(), or resume() first"
            )

    # -- for the engine --------------------------------------------------------

    def arrive(self, boundary: Boundary) -> None:
        """Wait here while the gate is closed. Called on the engine thread by the tap."""
        if self._at is not None:
            return  # something that passes a closed gate has emitted this
        hit = False
        for made in self._breakpoints:
            hit = made.matches(boundary) or hit
        with self._bell.lock:
            if self._ended or not self._stops(boundary, hit):
                return
        in_flight = self._settle()
        with self._bell.lock:
            if self._ended or not self._stops(boundary, hit):  # opened meanwhile
                return
            self._is_closed, self._is_running = True, False
            self._is_untold, self._stops_unasked = self._stops_unasked, False
            self._at, self._in_flight = boundary, in_flight
            self._arrivals += 1
            self._tell()
        while True:
            self._serve()
            with self._bell.lock:
                if not self._is_closed or self._is_running or self._ended:
                    self._at, self._in_flight = None, ()
                    self._tell()
                    return
                ring = self._bell.listen()
            self._bell.wait(ring, _PIECE_S)

    def move(self, boundary: Boundary | None) -> None:
        """Stand at another struct than the one that arrived: a replay has jumped.

        Called on the engine thread while it stands; elsewhere nothing happens.
        """
        with self._bell.lock:
            if self._at is not None:
                self._at = boundary
                self._tell()

    def wake(self) -> None:
        """Look again: the engine became idle, or something waits to pass."""
        with self._bell.lock:
            if self._is_running and self._at is None and self._is_idle():
                # What it was told to run to did not come; the next request stops at once.
                self._is_running = False
            self._bell.ring()

    def end(self, error: BaseException | None = None) -> None:
        """The engine closes or has died: nothing stops any more, nobody waits any more."""
        with self._bell.lock:
            self._ended = error or True
            self._tell()

    def _tell(self) -> None:
        self._bell.ring()
        for listener in self._watchers:
            listener()

    def _stops(self, boundary: Boundary, hit: bool) -> bool:
        if hit or (self._is_closed and not self._is_running):
            return True
        if not self._is_closed:
            return False
        return self._running_to is None or type(boundary) is self._running_to

    def _close(self, kind: type[Boundary] | None, is_running: bool) -> None:
        if not self._is_closed:
            self._closed_by = threading.get_ident()
        self._is_closed, self._is_running, self._running_to = True, is_running, kind
        self._tap.arm_gate(True)
        self._tell()

    def _nothing(self, kind: type[Boundary] | None) -> Exception:
        if self._ended:
            error = NothingToRun("the engine was closed or has died")
            if isinstance(self._ended, BaseException):
                error.__cause__ = self._ended
            return error
        return NothingToRun(
            f"the engine has no request, so no {_name(kind)} will come; submit one first"
        )

    def _remove(self, made: Breakpoint) -> None:
        with self._bell.lock:
            self._breakpoints = tuple(b for b in self._breakpoints if b is not made)
            self._tap.arm_gate(self._is_closed or bool(self._breakpoints))
            self._tell()


# Waits are cut into pieces so that Ctrl-C gets through on every platform.
_PIECE_S = 0.25


def _check_kind(kind: type[Boundary] | None) -> None:
    if kind is not None and kind not in BOUNDARIES:
        names = ", ".join(known.__name__ for known in BOUNDARIES)
        raise TypeError(f"{kind!r} is not a boundary struct; use one of {names}")


def _name(kind: type[Boundary] | None) -> str:
    return "boundary" if kind is None else kind.__name__
