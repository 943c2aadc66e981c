"""DeviceThread: the one thread that runs batches while the engine goes on without them.

Batches run one after the other, in the order in which they were given, so what a batch needs
of the one before, its sampled tokens and its keys and values, is there when it begins. Nothing
else touches the model while there is such a thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["DeviceThread"]

T = TypeVar("T")


class DeviceThread:
    """Runs functions in order on a thread of its own, which begins with the first of them.

    Called from one thread. Nobody needs to close one that was never given anything.

    name      of the thread
    prepare   called first on it, for settings that are per thread

    After a function has raised nothing more is run: what came behind it in the queue would
    find the model in the middle of a step. Its future, and each one behind it, has the error.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._prepare = prepare
        self._error: BaseException | None = None
        self._is_closed = False
        # A daemon, and no pool of concurrent.futures, which the interpreter waits for at its end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_started = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function()` after all that was given before; the future has its result or error."""
        future: Future[T] = Future()

        def run() -> None:
            if self._is_closed:
                future.cancel()
                return
            if self._error is None:
                try:
                    result = function()
                except BaseException as error:  # whatever it is, somebody waits for the future
                    self._error = error
                else:
                    future.set_result(result)
                    return
            future.set_exception(self._error)

        if not self._is_started:
            self._is_started = True
            self._thread.start()
        self._calls.put(run)
        return future

    def close(self) -> None:
        """End the thread after the function that runs; what waits behind it is cancelled."""
        self._is_closed = True
        self._calls.put(None)
        if self._is_started:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:  # the first to wait for a batch hears of it
            self._error = error
        while (run := self._calls.get()) is not None:
            run()
            # What it holds, the tensors of a step perhaps, must not outlive it here.
            del run
