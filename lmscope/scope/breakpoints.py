"""Breakpoints by what happens to a request: preemption, eviction, prefix hit, and so on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmscope.boundary import (
    BOUNDARIES,
    BlockRemoved,
    BlockTouched,
    Boundary,
    EngineCoreEventType,
    EngineCoreOutputs,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.checks import nearest
from lmscope.gate import Breakpoint, Gate

__all__ = ["EVENTS", "break_at", "break_on", "kind_named"]

# request id, or None for any -> whether a struct has the event
Test = Callable[[Any, str | None], bool]


def break_on(
    gate: Gate, event: str, request: str | None = None, *, once: bool = False
) -> Breakpoint:
    """Stop where something happens to a request, or to any request.

    event     "preemption", "eviction" (kept content had to go, for the request), "prefix_hit",
              "first_token" or "finish"
    request   its id
    once      only the first time

    ValueError for another event, naming the nearest.
    """
    if event not in EVENTS:
        raise ValueError(f"there is no event {event!r}; {nearest(str(event), list(EVENTS))}")
    if request is not None and not isinstance(request, str):
        raise TypeError(f"request is {request!r}; it takes the id of a request, a string")
    kind, has_event = EVENTS[event]
    name = event if request is None else f"{event}:{request}"
    made: Breakpoint = gate.break_when(
        kind, lambda boundary: has_event(boundary, request), once=once, name=name
    )
    return made


def break_at(gate: Gate, kind: type[Boundary]) -> Breakpoint:
    """Stop at each struct of a kind."""
    made: Breakpoint = gate.break_when(kind, lambda boundary: True, name=kind.__name__)
    return made


def kind_named(name: str) -> type[Boundary]:
    """The kind of struct with this name, or with this in its name if it is the only one.

    ValueError for any other name.
    """
    kinds = [kind for kind in BOUNDARIES if name and name.lower() in kind.__name__.lower()]
    exact = [kind for kind in kinds if kind.__name__.lower() == name.lower()]
    if len(exact or kinds) == 1:
        return (exact or kinds)[0]
    near = nearest(name, [kind.__name__ for kind in kinds or BOUNDARIES])
    raise ValueError(f"there is no one struct {name!r}; {near}")


def _preempts(output: SchedulerOutput, request: str | None) -> bool:
    return (
        bool(output.preempted_req_ids) if request is None else request in output.preempted_req_ids
    )


def _evicts(output: SchedulerOutput, request: str | None) -> bool:
    return any(
        isinstance(event, BlockRemoved)
        and event.for_request_id is not None
        and request in (None, event.for_request_id)
        for event in output.kv_events
    )


def _hits(output: SchedulerOutput, request: str | None) -> bool:
    return any(
        isinstance(event, BlockTouched) and request in (None, event.request_id)
        for event in output.kv_events
    )


def _has_first_token(outputs: EngineCoreOutputs, request: str | None) -> bool:
    # The first output of a request tells when it was queued, and no later one does.
    return any(
        bool(output.new_token_ids)
        and request in (None, output.request_id)
        and any(event.type is EngineCoreEventType.QUEUED for event in output.events)
        for output in outputs.outputs
    )


def _finishes(output: RequestOutput, request: str | None) -> bool:
    return output.finished and request in (None, output.request_id)


EVENTS: dict[str, tuple[type[Boundary], Test]] = {
    "preemption": (SchedulerOutput, _preempts),
    "eviction": (SchedulerOutput, _evicts),
    "prefix_hit": (SchedulerOutput, _hits),
    "first_token": (EngineCoreOutputs, _has_first_token),
    "finish": (RequestOutput, _finishes),
}
"""By name: the kind of struct that shows the event, and the test for it."""
