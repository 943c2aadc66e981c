"""Phases: what each request of a recording did from its arrival to its end, as lanes of spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from lmscope.boundary import (
    Boundary,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    RequestOutput,
    SchedulerOutput,
)

__all__ = ["KINDS", "Lane", "Phase", "lanes"]

KINDS = ("waiting", "prefill", "decode", "preempted", "recompute")


class Phase(msgspec.Struct, frozen=True, gc=False):
    """A span of a request's life.

    kind          'waiting' until it is first scheduled; 'prefill' until its first token;
                  'decode'; 'preempted' until it is scheduled again; 'recompute' until it has
                  a token after that
    start, end    seconds on the engine's clock
    first_step, last_step   the steps in it; the last is before the first when there is none
    tokens        scheduled in it
    """

    kind: str
    start: float
    end: float
    first_step: int
    last_step: int
    tokens: int


@dataclass(slots=True)
class Lane:
    """The life of one request; an id that comes again begins another lane.

    phases    one after another, without gaps
    outcome   'stop', 'length', 'abort' or 'error'; None when it lives at the end
    """

    request_id: str
    phases: list[Phase] = field(default_factory=list)
    outcome: str | None = None


@dataclass(slots=True)
class _Open:
    lane: Lane
    kind: str
    start: float
    first_step: int
    tokens: int = 0

    def turn(self, boundary: Boundary, kind: str) -> None:
        """What it does now ends, and `kind` begins."""
        # A scheduler's output begins a step; whatever comes later belongs to it.
        last = boundary.step - isinstance(boundary, SchedulerOutput)
        self.close(boundary.time, last)
        self.kind, self.start, self.first_step, self.tokens = kind, boundary.time, last + 1, 0

    def close(self, time: float, last_step: int) -> None:
        self.lane.phases.append(
            Phase(self.kind, self.start, time, self.first_step, last_step, self.tokens)
        )


def lanes(snapshot: EngineSnapshot, boundaries: Iterable[Boundary]) -> list[Lane]:
    """A lane for each request, in the order of arrival; those that live end with the last struct.

    Requests that were live when the recording began, begin with it.
    """
    made: list[Lane] = []
    live: dict[str, _Open] = {}
    time, step = snapshot.time, snapshot.step

    def begin(request_id: str, kind: str, at: float, first_step: int) -> None:
        lane = Lane(request_id)
        made.append(lane)
        live[request_id] = _Open(lane, kind, at, first_step)

    for known in snapshot.requests:
        kind = known.status
        if kind == "running":
            kind = "decode" if known.output_token_ids else "prefill"
        begin(known.request.request_id, kind, time, step + 1)
    for boundary in boundaries:
        time, step = boundary.time, boundary.step
        if isinstance(boundary, EngineCoreRequest):
            begin(boundary.request_id, "waiting", time, step + 1)
        elif isinstance(boundary, SchedulerOutput):
            for request_id in boundary.preempted_req_ids:
                if request_id in live:
                    live[request_id].turn(boundary, "preempted")
            for request_id, num_tokens in boundary.num_scheduled_tokens.items():
                request = live.get(request_id)
                if request is None:
                    continue
                if request.kind in ("waiting", "preempted"):
                    again = request.kind == "preempted"
                    request.turn(boundary, "recompute" if again else "prefill")
                request.tokens += num_tokens
        elif isinstance(boundary, EngineCoreOutputs):
            for output in boundary.outputs:
                request = live.get(output.request_id)
                if request is None:
                    continue
                if output.new_token_ids and request.kind in ("prefill", "recompute"):
                    request.turn(boundary, "decode")
                if output.finish_reason is not None:
                    _end(live, output.request_id, boundary, output.finish_reason)
        elif isinstance(boundary, RequestOutput) and boundary.finished:
            # Ended by the front end: aborted, or by a stop string.
            reasons = [output.finish_reason for output in boundary.outputs]
            _end(live, boundary.request_id, boundary, next(filter(None, reasons), "stop"))
    for request in live.values():
        request.close(max(time, request.start), step)
    return made


def _end(live: dict[str, _Open], request_id: str, boundary: Boundary, outcome: str) -> None:
    request = live.pop(request_id, None)
    if request is not None:
        request.close(boundary.time, boundary.step)
        request.lane.outcome = outcome
