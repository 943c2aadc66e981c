"""EngineLoop: the engine's one thread, its inbox, and what happens when it dies.

The thread alternates between the inbox and engine steps. Everything that changes the
engine goes through the inbox, so nothing in the engine needs a lock, and what is asked
between two steps sees the engine standing still. The loop knows nothing of the front end:
after each step it calls `on_outputs` with what the step produced and gets back the ids of
requests that the front end ended (a stop string), which leave before the next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from lmscope.boundary import EngineCoreOutputs
from lmscope.engine.core import EngineCore
from lmscope.errors import EngineClosedError, EngineDeadError

__all__ = ["EngineLoop"]

T = TypeVar("T")


class EngineLoop:
    """Runs an EngineCore on a thread of its own.

    make_core     builds the core; given the function that hands over aborts which arrive
                  while the model runs
    on_outputs    called on the engine thread after each step
    on_end        called on the engine thread, once: with the error that killed it, or None
    prepare       called first on the engine thread, for settings that are per thread
    """

    def __init__(
        self,
        make_core: Callable[[Callable[[], Sequence[str]]], EngineCore],
        on_outputs: Callable[[EngineCoreOutputs], Sequence[str]],
        on_end: Callable[[BaseException | None], None],
        name: str,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.error: BaseException | None = None
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._prepare = prepare
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        # Also here, so that they end a request while the model still runs.
        self._aborts: deque[str] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._core: EngineCore | None = make_core(self._take_aborts)
        # A daemon, so that an engine nobody closed does not keep the interpreter alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def is_engine_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function(core)` between two steps; the future has its result or error."""
        future: Future[T] = Future()
        with self._changed:
            self._require_open()
            self._inbox.append((lambda: function(self._require_core()), future))
            self._changed.notify_all()
        return future

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """`post` and wait. On the engine thread itself: run it right away."""
        if self.is_engine_thread:
            return function(self._require_core())
        return self.post(function).result()

    def abort(self, request_ids: Sequence[str], function: Callable[[EngineCore], T]) -> Future[T]:
        """`post`, and also end these requests as soon as the step that is running allows."""
        self._aborts.extend(request_ids)
        return self.post(function)

    def close(self, timeout_s: float = 60.0) -> None:
        """End the thread after the step that is running; twice is fine."""
        with self._changed:
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
        with self._changed:
            self._closing = True
            left = list(self._inbox)
            self._inbox.clear()
        self._on_end(error)
        for _, future in left:
            future.set_exception(self._gone())
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()

    def _serve(self) -> None:
        core = self._require_core()
        while True:
            with self._changed:
                while not (self._inbox or self._closing or core.has_work()):
                    self._changed.wait()
                if self._closing:
                    return
            self._empty_inbox()
            if core.has_work():
                ended = self._on_outputs(core.step())
                if ended:
                    core.abort_requests(ended)

    def _empty_inbox(self) -> None:
        # What is here is in the inbox as well. Left behind, it would end the next request
        # that takes the same id.
        self._aborts.clear()
        while self._inbox:
            run, future = self._inbox.popleft()
            try:
                result = run()
            except Exception as error:
                # It belongs to the one who asked: the engine goes on.
                future.set_exception(error)
            else:
                future.set_result(result)

    def _take_aborts(self) -> list[str]:
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        return aborts

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
            dead = EngineDeadError(
                f"the engine died with {type(self.error).__name__}: {self.error}; load a new one"
            )
            dead.__cause__ = self.error
            return dead
        return EngineClosedError("the engine was closed; load a new one with LLM(...)")
