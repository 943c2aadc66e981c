"""Bell and Reply: a condition and a future that survive Ctrl-C.

`threading.Condition` is Python code. Ctrl-C can come when `with condition:` has taken the lock
and not yet entered, which leaves it taken for good, or inside `wait()` when the lock is given
up, which makes the end of the `with` raise another error. Here the lock is taken and given up
by C code only, and nobody waits while holding it.

    with bell.lock:
        if ready:
            return
        ring = bell.listen()
    bell.wait(ring, timeout_s)      # and look again

A `concurrent.futures.Future` has such a condition inside: whoever waits for it and is
interrupted may take the thread with him that is to give the result.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

__all__ = ["Bell", "Reply", "Ring"]

T = TypeVar("T")

# Waits are cut into pieces so that Ctrl-C gets through on every platform.
_PIECE_S = 0.25


class Ring:
    """One wait: from `Bell.listen` to the next `Bell.ring`."""

    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


class Bell:
    """A lock around what is waited for, and a way to wake those who wait.

    The lock is re-entrant: a finalizer may come at any line.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._rings: set[Ring] = set()

    def listen(self) -> Ring:
        """From here on a `ring()` is not missed. Called with the lock held."""
        ring = Ring()
        self._rings.add(ring)
        return ring

    def ring(self) -> None:
        """Wake all who listen. Called with the lock held."""
        rings, self._rings = self._rings, set()
        for ring in rings:
            ring.lock.release()

    def wait(self, ring: Ring, timeout_s: float) -> bool:
        """Wait for the first `ring()` since `listen()`, without the lock; False: time is up."""
        if ring.lock.acquire(timeout=timeout_s):
            return True
        with self.lock:
            self._rings.discard(ring)
        return False


class Reply(Generic[T]):
    """What one thread will answer to another, which may be interrupted while it waits."""

    __slots__ = ("_error", "_is_pending", "_result")

    def __init__(self) -> None:
        self._is_pending = threading.Lock()
        self._is_pending.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """Answer; once, and nothing after it."""
        self._result = result
        self._is_pending.release()

    def set_exception(self, error: BaseException) -> None:
        """Answer with an error, which `result` raises."""
        self._error = error
        self._is_pending.release()

    def result(self) -> T:
        """Wait for the answer; called by one thread."""
        while not self._is_pending.acquire(timeout=_PIECE_S):
            pass
        self._is_pending.release()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # it was set
