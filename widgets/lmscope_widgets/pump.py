"""Pump: the one thread that takes pictures to the pages of a process."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

from lmscope.tap import Source
from lmscope_widgets.feed import Feed, FrameView

__all__ = ["Pump", "default_pump"]

logger = logging.getLogger(__name__)

# While a view is attached the interpreter switches threads more often, so that a click
# is answered beside a busy engine.
_SWITCH_INTERVAL_S = 0.001


class Pump:
    """The thread that serves all feeds of a process.

    clock    seconds, monotonic
    thread   False: nothing runs by itself, the caller calls `tick`; for tests
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, thread: bool = True) -> None:
        self.clock = clock
        self.wake = threading.Event()
        self._lock = threading.Lock()
        self._feeds: tuple[Feed, ...] = ()
        self._has_thread = thread
        self._thread: threading.Thread | None = None
        self._switch_interval = 0.0

    @property
    def num_feeds(self) -> int:
        return len(self._feeds)

    def attach(self, source: Source, view: FrameView, rate_hz: float) -> Feed:
        """Send a source's frames to a view; the first view of a source opens its feed."""
        while True:
            feed = next((feed for feed in self._feeds if feed.tap is source.tap), None)
            if feed is None:
                feed = Feed(source, self)
            if feed.attach(view, rate_hz):
                return feed

    def add(self, feed: Feed) -> None:
        with self._lock:
            if not self._feeds:
                self._switch_interval = sys.getswitchinterval()
                sys.setswitchinterval(min(self._switch_interval, _SWITCH_INTERVAL_S))
            self._feeds = (*self._feeds, feed)
            if self._has_thread and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmscope-pump", daemon=True)
                self._thread.start()
        self.wake.set()

    def remove(self, feed: Feed) -> None:
        with self._lock:
            if feed not in self._feeds:
                return
            self._feeds = tuple(other for other in self._feeds if other is not feed)
            if not self._feeds:
                sys.setswitchinterval(self._switch_interval)
        self.wake.set()

    def tick(self) -> float | None:
        """Do what is due; returns the seconds until something will be, None: until woken."""
        waits = []
        for feed in self._feeds:
            try:
                wait_s = feed.tick()
            except Exception as error:
                # One source that cannot be read must not end the views of the others.
                logger.exception("a feed failed and was closed")
                feed.fail(error)
                continue
            if wait_s is not None:
                waits.append(wait_s)
        return min(waits, default=None)

    def _run(self) -> None:
        while True:
            self.wake.clear()
            wait_s = self.tick()
            with self._lock:
                if not self._feeds:
                    self._thread = None
                    return
            self.wake.wait(wait_s)


_default_pump: Pump | None = None
_default_lock = threading.Lock()


def default_pump() -> Pump:
    """The process's pump."""
    global _default_pump
    with _default_lock:
        if _default_pump is None:
            _default_pump = Pump()
        return _default_pump
