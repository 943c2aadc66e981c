"""A pause of Python's search for garbage, for while much is made that stays."""

from __future__ import annotations

import gc
import threading
from types import TracebackType

__all__ = ["paused_collection"]


class _Pause:
    """Several threads may be inside; the last one out ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside or not self._was_enabled:
                return
            # Both together make everything old without looking at it; as new it would all be
            # gone through at once. What somebody else has frozen must stay so.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


paused_collection = _Pause()
"""`with paused_collection:` inside, Python does not look for garbage in cycles, in any thread.

Importing torch and transformers makes some 700,000 objects, and Python goes through all that there
are again and again while they grow: a second of each start, with nothing to be found.
"""
