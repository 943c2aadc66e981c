"""Tap: where the stream leaves the engine.

In the engine a boundary is one line, `self.tap(scheduler_output)`. With no listener that
tests one attribute and returns. A listener runs on the engine thread, in the order of
subscription, and must be quick; it usually appends to a deque.

    with llm.tap.on(SchedulerOutput, print):
        llm.generate("Hello")
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

from lmscope.boundary import BOUNDARIES, Boundary, EngineInfo, EngineSnapshot

__all__ = ["Closeable", "MeasuresAttention", "Source", "Subscription", "Tap"]

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Boundary)


class Source(Protocol):
    """Anything that emits the stream: an engine, a replayed recording, an attached vLLM."""

    @property
    def tap(self) -> Tap: ...


class Closeable(Protocol):
    """What is on until it is closed; closing it twice is fine."""

    def close(self) -> None: ...


@runtime_checkable
class MeasuresAttention(Protocol):
    """A source that can say how much attention each block receives: an LLM."""

    def measure_attention(self) -> Closeable: ...


class Subscription:
    """One listener on a tap; closing it twice is fine, and it is a context manager.

    `error` keeps the exception that a listener raised. Such a listener is dropped and the
    run goes on, unless it was subscribed with strict=True.
    """

    def __init__(
        self,
        tap: Tap,
        kinds: tuple[type[Boundary], ...],
        listener: Callable[[Any], object],
        strict: bool,
    ) -> None:
        self.kinds = kinds
        self.listener = listener
        self.strict = strict
        self.error: BaseException | None = None
        self._tap = tap

    @property
    def is_open(self) -> bool:
        return self._tap._has(self)

    def close(self) -> None:
        """Hear nothing more; structs on their way to this listener may still arrive."""
        self._tap._remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Tap:
    """The one way out of an engine: typed subscriptions to its boundary structs.

    info      settings of the emitting engine
    is_live   whether anybody listens or may stop here; what only they need is not built else
    snapshot  takes the state of the engine; must be called between two structs
    run       runs a function at such a moment and returns what it returned. An engine
              with a thread of its own hands the function over to that thread.
    """

    def __init__(
        self,
        info: EngineInfo,
        snapshot: Callable[[], EngineSnapshot] | None = None,
        run: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        self.info = info
        self._snapshot = snapshot or (lambda: _fresh(info))
        self._run = run or (lambda function: function())
        self._lock = threading.Lock()
        self._gate: Callable[[Boundary], None] | None = None
        self._is_gate_armed = False
        self._subscriptions: tuple[Subscription, ...] = ()
        # By type, rebuilt on each change and replaced as a whole, so that emitting needs
        # no lock. None is the fast path: nobody is listening and no gate is armed.
        self._live: dict[type[Boundary], tuple[Subscription, ...]] | None = None
        # A plain attribute: reading it costs a quarter of a call, which tells where a struct
        # is emitted for each request.
        self.is_live = False

    def __call__(self, boundary: Boundary) -> None:
        """Emit one struct. Only the engine calls this."""
        if self.is_live:
            self._emit(boundary)

    def on(
        self, kind: type[B], listener: Callable[[B], object], *, strict: bool = False
    ) -> Subscription:
        """Call `listener` with each struct of exactly this kind.

        What it returns is ignored. If it raises it is dropped, the error is kept on the
        subscription and logged once; with strict=True the error ends the engine instead,
        which is for tests.
        """
        if kind not in BOUNDARIES:
            names = ", ".join(known.__name__ for known in BOUNDARIES)
            raise TypeError(f"{kind!r} is not a boundary struct; subscribe to one of {names}")
        return self._add(Subscription(self, (kind,), listener, strict))

    def follow(
        self, listener: Callable[[Boundary], object], *, strict: bool = False
    ) -> tuple[EngineSnapshot, Subscription]:
        """Subscribe to every struct, and take the state before the first one to come.

        Folding what the listener gets onto the snapshot misses nothing and counts nothing
        twice, however busy the engine is.
        """

        def begin() -> tuple[EngineSnapshot, Subscription]:
            snapshot = self._snapshot()
            return snapshot, self._add(Subscription(self, BOUNDARIES, listener, strict))

        result: tuple[EngineSnapshot, Subscription] = self._run(begin)
        return result

    def set_gate(self, arrive: Callable[[Boundary], None]) -> None:
        """Put a gate behind the listeners. While it is armed it sees every struct."""
        self._gate = arrive

    def arm_gate(self, is_armed: bool) -> None:
        """Whether the gate wants to see structs now."""
        with self._lock:
            self._is_gate_armed = is_armed
            self._rebuild()

    def _emit(self, boundary: Boundary) -> None:
        live = self._live
        if live is None:  # the last listener left between the test and here
            return
        for subscription in live.get(type(boundary), ()):
            try:
                subscription.listener(boundary)
            except Exception as error:
                subscription.error = error
                self._remove(subscription)
                if subscription.strict:
                    raise
                # A viewer must not stop an engine, so any error ends only the listener.
                logger.warning(
                    "listener %r raised at %s of step %d and was dropped: %r",
                    subscription.listener,
                    type(boundary).__name__,
                    boundary.step,
                    error,
                )
        if self._is_gate_armed and self._gate is not None:
            self._gate(boundary)

    def _add(self, subscription: Subscription) -> Subscription:
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
            self._rebuild()
        return subscription

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)
            self._rebuild()

    def _has(self, subscription: Subscription) -> bool:
        return any(s is subscription for s in self._subscriptions)

    def _rebuild(self) -> None:
        live = {
            kind: tuple(s for s in self._subscriptions if kind in s.kinds) for kind in BOUNDARIES
        }
        self._live = live if self._subscriptions or self._is_gate_armed else None
        self.is_live = self._live is not None


def _fresh(info: EngineInfo) -> EngineSnapshot:
    """An engine that has not run yet: all blocks free, in the order of their ids."""
    return EngineSnapshot(info=info, free_queue=tuple(range(1, info.num_blocks)))
