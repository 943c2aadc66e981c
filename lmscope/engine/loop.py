"""EngineLoop: the engine's one thread, its inbox, and what happens when it dies.

The thread alternates between the inbox and engine steps. Everything that changes the
engine goes through the inbox, so nothing in the engine needs a lock, and what is asked
between two steps sees the engine standing still. With async scheduling a batch may be in
flight even then; what cannot have that asks for an idle device. The loop knows nothing of the
front end: after each step it calls `on_outputs` with what the step produced and gets back the
ids of requests that the front end ended (a stop string), which leave before the next step is
scheduled.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from lmscope.bell import Reply
from lmscope.boundary import EngineCoreOutputs
from lmscope.engine.core import EngineCore
from lmscope.errors import EngineClosedError, EngineDeadError, GateClosedError

__all__ = ["EngineLoop"]

T = TypeVar("T")


class _Call(NamedTuple):
    """What somebody asked for, and where its result goes."""

    run: Callable[[], Any]
    reply: Reply[Any]
    needs_idle_device: bool


class EngineLoop:
    """Runs an EngineCore on a thread of its own.

    make_core     builds the core
    on_outputs    called on the engine thread after each step
    on_end        called on the engine thread, once: with the error that killed it, or None
    prepare       called first on the engine thread, for settings that are per thread
    on_change     called when the engine has become idle or something urgent has come
    """

    def __init__(
        self,
        make_core: Callable[[], EngineCore],
        on_outputs: Callable[[EngineCoreOutputs], Sequence[str]],
        on_end: Callable[[BaseException | None], None],
        name: str,
        prepare: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.error: BaseException | None = None
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._prepare = prepare
        self._on_change = on_change
        self._is_waiting = False
        self._inbox: deque[_Call] = deque()
        # What may also run while the engine stands at a closed gate.
        self._urgent: deque[_Call] = deque()
        # `with` takes the lock itself: the condition is entered by Python code, in which Ctrl-C
        # can come when the lock is taken and nobody is going to give it back yet.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._process = os.getpid()
        self._core: EngineCore | None = make_core()
        # A daemon, so that an engine nobody closed does not keep the interpreter alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        # Not the thread's own answer: Ctrl-C inside Thread.is_alive() makes it wrong for good.
        return not self._closing

    @property
    def is_engine_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def is_idle(self) -> bool:
        """Whether the engine waits for something to do."""
        with self._lock:
            return self._closing or (self._is_waiting and not self._inbox and not self._urgent)

    def post(
        self,
        function: Callable[[EngineCore], T],
        *,
        is_urgent: bool = False,
        needs_idle_device: bool = False,
    ) -> Reply[T]:
        """Run `function(core)` between two steps; the reply has its result or error.

        is_urgent           also while the engine stands at a closed gate, before anything that
                            was posted without it
        needs_idle_device   not while a batch is in flight: what is, is taken in first
        """
        assert not (is_urgent and needs_idle_device), "at a closed gate nothing is taken in"
        if os.getpid() != self._process:  # its thread is there, and nobody would ever answer here
            raise EngineClosedError(
                f"the engine runs in process {self._process}, of which this one, {os.getpid()}, is "
                "a fork; load another with LLM(...) here, or ask that process"
            )
        reply: Reply[T] = Reply()
        with self._lock:
            self._require_open()
            (self._urgent if is_urgent else self._inbox).append(
                _Call(lambda: function(self._require_core()), reply, needs_idle_device)
            )
            self._changed.notify_all()
        if is_urgent:
            self._on_change()
        return reply

    def call(
        self,
        function: Callable[[EngineCore], T],
        *,
        is_urgent: bool = False,
        needs_idle_device: bool = False,
    ) -> T:
        """`post` and wait. On the engine thread itself: run it right away.

        GateClosedError there when it needs an idle device and a batch is in flight.
        """
        if not self.is_engine_thread:
            posted = self.post(function, is_urgent=is_urgent, needs_idle_device=needs_idle_device)
            return posted.result()
        core = self._require_core()
        if needs_idle_device and core.steps_in_flight:
            raise GateClosedError(
                f"a listener asked for this while {_named(core.steps_in_flight)} in flight, and "
                "the engine waits for the listener; ask from outside of it"
            )
        return function(core)

    def serve_urgent(self) -> None:
        """Run what passes a closed gate. Called on the engine thread while it stands there."""
        self._empty(self._urgent)

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread after the step that is running; twice is fine."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if not self.is_engine_thread:
            self._thread.join(timeout_s)

    # -- on the engine thread ----------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._prepare()
            self._serve()
        except BaseException as raised:  # whatever it is, nobody may be left waiting for it
            error = self.error = raised
        with self._lock:
            self._closing = True
            left = [*self._urgent, *self._inbox]
            self._urgent.clear()
            self._inbox.clear()
        self._on_end(error)
        for call in left:
            call.reply.set_exception(self._gone())
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()

    def _serve(self) -> None:
        core = self._require_core()
        while True:
            self._wait_for_work(core)
            if self._closing:
                return
            self._empty(self._urgent)
            self._empty(self._inbox)
            if core.has_work():
                outputs = core.step()
                if outputs is not None:
                    self._deliver(core, outputs)

    def _deliver(self, core: EngineCore, outputs: EngineCoreOutputs) -> None:
        ended = self._on_outputs(outputs)
        if ended:
            core.abort_requests(ended)

    def _wait_for_work(self, core: EngineCore) -> None:
        if self._inbox or self._urgent or self._closing or core.has_work():
            return
        with self._lock:
            self._is_waiting = True
        self._on_change()
        with self._lock:
            while not (self._inbox or self._urgent or self._closing):
                self._changed.wait()
            self._is_waiting = False

    def _empty(self, queue: deque[_Call]) -> None:
        while queue:
            if queue[0].needs_idle_device:
                core = self._require_core()
                while core.steps_in_flight:
                    self._deliver(core, core.finish_step())
            run, reply, _ = queue.popleft()
            try:
                result = run()
            except Exception as error:
                # It belongs to the one who asked: the engine goes on.
                reply.set_exception(error)
            else:
                reply.set_result(result)

    # -- shared --------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closing or self.error is not None:
            raise self._gone()

    def _require_core(self) -> EngineCore:
        if self._core is None:
            raise self._gone()
        return self._core

    def _gone(self) -> Exception:
        if self.error is not None:
            return EngineDeadError.of(self.error)
        return EngineClosedError("the engine was closed; load a new one with LLM(...)")


def _named(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]} is"
    return f"steps {steps[0]} to {steps[-1]} are"
