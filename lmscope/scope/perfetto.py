"""A recording as a trace in Chrome's JSON format, which the Perfetto UI opens.

    recording.to_perfetto("run.json")      # then: Open trace file

Two processes: the engine, with a track of steps and counters for blocks and the queue, and
the requests, with a track for each. It holds ids and counts, and no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lmscope.boundary import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from lmscope.scope.engine_words import engine_words
from lmscope.scope.phases import lanes
from lmscope.scope.view import EngineView
from lmscope.scope.write_file import replace_file

if TYPE_CHECKING:
    from lmscope.scope.recording import Recording

__all__ = ["trace_events", "write_perfetto"]

_ENGINE, _REQUESTS = 1, 2
# Tracks of the engine; steps that overlap get further ones.
_STEPS = 1

Event = dict[str, Any]


def write_perfetto(recording: Recording, path: str | Path) -> None:
    """Write the trace of a recording; the file appears whole or not at all."""
    events = trace_events(recording)

    def write(file: BinaryIO) -> None:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for place, event in enumerate(events):
            line = json.dumps(event, separators=(",", ":"))
            file.write((",\n" if place else "").encode() + line.encode())
        file.write(b"\n]}\n")

    replace_file(path, write)


def trace_events(recording: Recording) -> list[Event]:
    """The events: names of tracks first, then all others by their time.

    Times are whole microseconds since the recording began, so that spans of one track which
    follow each other also do so after rounding.
    """
    clock = _Clock(recording.start_time)
    timed = [*_steps_and_counters(recording, clock), *_lanes(recording, clock)]
    # A span comes before what it contains: of two that begin together the longer one.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    tracks = sorted(
        {
            (event["pid"], event["tid"]): event["track"] for event in timed if "track" in event
        }.items()
    )
    engine = ", ".join(filter(None, (recording.info.model, engine_words(recording.info))))
    names: list[Event] = [
        _meta("process_name", _ENGINE, 0, name=f"engine {engine}"),
        _meta("process_name", _REQUESTS, 0, name="requests"),
        _meta("process_sort_index", _ENGINE, 0, sort_index=0),
        _meta("process_sort_index", _REQUESTS, 0, sort_index=1),
    ]
    for (process, track), name in tracks:
        names.append(_meta("thread_name", process, track, name=name))
        names.append(_meta("thread_sort_index", process, track, sort_index=track))
    for event in timed:
        event.pop("track", None)
    return [*names, *timed]


class _Clock:
    """Microseconds since the recording began."""

    def __init__(self, start: float) -> None:
        self._start = start

    def __call__(self, time: float) -> int:
        return max(0, round((time - self._start) * 1e6))


def _steps_and_counters(recording: Recording, clock: _Clock) -> Iterable[Event]:
    view = EngineView(recording.snapshot)
    running: dict[int, Event] = {}
    # When each track of steps is free again.
    ends: list[int] = []

    def end(step: Event) -> Event:
        start = step["ts"]
        place = next((k for k, other in enumerate(ends) if other <= start), len(ends))
        ends[place : place + 1] = [now]
        return {**step, "dur": now - start, "tid": _STEPS + place, "track": "steps"}

    now = 0
    for boundary in recording.boundaries:
        view.apply(boundary)
        now = clock(boundary.time)
        if isinstance(boundary, SchedulerOutput):
            running[boundary.step] = {
                "name": f"step {boundary.step}",
                "ph": "X",
                "cat": "step",
                "pid": _ENGINE,
                "ts": now,
                "args": _step_arguments(view),
            }
            for eviction in view.evicted:
                yield _instant("eviction", now, {
                    "block": eviction.block_id,
                    "was": eviction.stored_by,
                    "for": eviction.for_request_id,
                })  # fmt: skip
        elif isinstance(boundary, ModelRunnerOutput):
            known = running.get(boundary.step)
            if known is not None and boundary.device_duration_s is not None:
                known["args"]["device ms"] = round(boundary.device_duration_s * 1e3, 3)
            continue
        elif isinstance(boundary, EngineCoreOutputs):
            step = running.pop(boundary.step, None)
            if step is not None:
                yield end(step)
        else:
            continue
        yield _counter("KV blocks", now, used=view.num_used, kept=view.num_kept)
        yield _counter("requests", now, running=view.num_running, waiting=view.num_waiting)
    yield from map(end, running.values())


def _step_arguments(view: EngineView) -> dict[str, Any]:
    counts = view.this_step
    return {
        "scheduled tokens": counts.scheduled,
        "prefill": counts.prefill,
        "decode": counts.decode,
        "recomputed": counts.recomputed,
        "from cache": counts.cached,
        "preempted": list(view.preempted),
        "evicted blocks": len(view.evicted),
    }


def _lanes(recording: Recording, clock: _Clock) -> Iterable[Event]:
    for track, lane in enumerate(lanes(recording.snapshot, recording.boundaries), 1):
        where = {"pid": _REQUESTS, "tid": track, "track": f"request {lane.request_id}"}
        for phase in lane.phases:
            start, end = clock(phase.start), clock(phase.end)
            if end == start:
                continue  # shorter than the clock of the format
            arguments: dict[str, Any] = {"tokens": phase.tokens}
            if phase.last_step >= phase.first_step:
                arguments["steps"] = f"{phase.first_step} to {phase.last_step}"
            yield {
                **where,
                "name": phase.kind,
                "ph": "X",
                "cat": "request",
                "ts": start,
                "dur": end - start,
                "args": arguments,
            }
        if lane.outcome is not None and lane.phases:
            yield {
                **where,
                "name": f"finished: {lane.outcome}",
                "ph": "i",
                "s": "t",
                "cat": "request",
                "ts": clock(lane.phases[-1].end),
            }


def _instant(name: str, time: int, arguments: dict[str, Any]) -> Event:
    return {
        "name": name,
        "ph": "i",
        "s": "p",
        "cat": "blocks",
        "pid": _ENGINE,
        "tid": _STEPS,
        "track": "steps",
        "ts": time,
        "args": arguments,
    }


def _counter(name: str, time: int, **values: int) -> Event:
    return {"name": name, "ph": "C", "pid": _ENGINE, "tid": 0, "ts": time, "args": values}


def _meta(kind: str, process: int, track: int, **arguments: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "ts": 0, "args": arguments}
