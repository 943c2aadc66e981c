"""Timetable: the engine at any moment of a recording, a bounded number of folds away."""

from __future__ import annotations

import bisect
import threading

from lmscope.boundary import EngineSnapshot, decode
from lmscope.scope.record_log import RecordLog
from lmscope.scope.view import EngineView

__all__ = ["Timetable"]

_STEPS_BETWEEN_STOPS = 64
_MAX_STOPS = 128


class Timetable:
    """Views of a recording by position, that is, by how many structs they have folded.

    Folding leaves a copy behind every 64 steps, so that a second look near there is cheap.
    In long recordings the copies are made to stand further apart, so that there are never
    more than 128. The last view asked for is kept as well: going forward step by step
    folds each struct once.
    """

    def __init__(self, snapshot: EngineSnapshot, log: RecordLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._distance = _STEPS_BETWEEN_STOPS
        self._stops: list[tuple[int, EngineView]] = [(0, EngineView(snapshot))]
        self._cursor: tuple[int, EngineView] | None = None

    def at(self, position: int) -> EngineView:
        """The view after the first `position` structs; it is the caller's."""
        with self._lock:
            start, view = self._nearest(position)
            step = view.step
            for place, data in enumerate(self._log.read(start, position), start):
                boundary = decode(data)
                if boundary.step > step:
                    self._leave_stop(place, view)
                    step = boundary.step
                view.apply(boundary)
            self._cursor = (position, view)
            return view.copy()

    def _nearest(self, position: int) -> tuple[int, EngineView]:
        """The closest view at or before a position, free to be folded on."""
        place = bisect.bisect_right(self._stops, position, key=lambda stop: stop[0]) - 1
        start, stop = self._stops[place]
        if self._cursor is not None and start <= self._cursor[0] <= position:
            cursor, self._cursor = self._cursor, None
            return cursor
        return start, stop.copy()

    def _leave_stop(self, position: int, view: EngineView) -> None:
        """Keep a copy of a view that stands at the end of a step, if none is near."""
        place = bisect.bisect_right(self._stops, position, key=lambda stop: stop[0])
        if view.step - self._stops[place - 1][1].step < self._distance:
            return
        self._stops.insert(place, (position, view.copy()))
        if len(self._stops) > _MAX_STOPS:
            del self._stops[1::2]
            self._distance *= 2
