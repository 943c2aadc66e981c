"""The struct under the cursor as plain data, and where the engine stands, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmscope.boundary import (
    BOUNDARIES,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    RequestOutput,
    SchedulerOutput,
)
from lmscope.decisions import Decision
from lmscope.scope import why
from lmscope.scope.view import EngineView

__all__ = ["CUT", "boundary_index", "standing", "struct_tree"]

CUT = "…"
"""Key under which a list or mapping says how many entries were left out."""

_MOST_VALUES = 600
_MOST_ENTRIES = 24
_MOST_DEPTH = 5
_MOST_TEXT = 200
_PLACES = {kind.__name__: place for place, kind in enumerate(BOUNDARIES)}
_MOST_NAMES = 4


def boundary_index(view: EngineView) -> int:
    """Place of the last struct's kind among the five of a step; -1 before the first."""
    return _PLACES.get(view.boundary, -1)


def struct_tree(view: EngineView) -> dict[str, Any] | None:
    """The last struct as JSON of bounded size; None before the first.

    kind      its name
    fields    [name, value] in the struct's order. Structs in it are objects without the
              fields that have their default; a decision has its sentence as `why`
    changed   names of the fields that differ from the struct of this kind before it
    """
    boundary = view.at
    if boundary is None:
        return None
    previous = view.previous
    writer = _Writer(view)
    names = [name for name in boundary.__struct_fields__ if name not in ("step", "time")]
    fields = [["step", boundary.step], ["time", round(boundary.time, 6)]]
    fields += [[name, writer.value(getattr(boundary, name), 0)] for name in names]
    changed = [
        name
        for name in names
        if previous is not None and getattr(previous, name) != getattr(boundary, name)
    ]
    return {"kind": type(boundary).__name__, "fields": fields, "changed": changed}


def standing(view: EngineView) -> str:
    """Where the engine stands, in one sentence of one or two clauses."""
    boundary = view.at
    if isinstance(boundary, EngineCoreRequest):
        return f"{boundary.request_id} has entered the engine; no step has looked at it yet."
    if isinstance(boundary, SchedulerOutput):
        return _decided(view, boundary)
    if isinstance(boundary, ModelRunnerOutput):
        sampled = sum(map(len, boundary.sampled_token_ids))
        return f"The model has run: {_count(sampled, 'token')} sampled, not taken in yet."
    if isinstance(boundary, EngineCoreOutputs):
        over = [o.request_id for o in boundary.outputs if o.finish_reason is not None]
        ended = f"; {_names(over)} finished" if over else ""
        return f"The scheduler has taken the tokens in{ended}."
    if isinstance(boundary, RequestOutput):
        ended = "its last text" if boundary.finished else "the text of this step"
        return f"{boundary.request_id} has got {ended}."
    return "Nothing has crossed a boundary yet."


def _decided(view: EngineView, output: SchedulerOutput) -> str:
    will_run = len(output.num_scheduled_tokens)
    text = "The scheduler has decided; the model has not run. "
    text += f"{_count(will_run, 'request')} will run."
    made_room = [
        (d.request_id, d.other_id)
        for d in output.decisions
        if d.request_id in view.preempted and d.other_id is not None
    ]
    if len(made_room) == 1:
        victim, winner = made_room[0]
        text += f" {victim} made room for {winner}."
    elif view.preempted:
        text += f" {_names(list(view.preempted))} lost their blocks."
    return text


class _Writer:
    """Turns values into JSON until the bound is reached."""

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self._left = _MOST_VALUES

    def value(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return round(value, 6)
        if isinstance(value, str):
            return _text(value)
        if isinstance(value, msgspec.Struct):
            return self._struct(value, depth)
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, tuple | list | set | frozenset):
            return self._list(tuple(value), depth)
        return _text(repr(value))

    def _room(self, length: int, depth: int) -> int:
        """How many of so many entries there is room for."""
        if depth >= _MOST_DEPTH or self._left <= 0:
            return 0
        return min(length, _MOST_ENTRIES, self._left)

    def _list(self, values: tuple[Any, ...], depth: int) -> list[Any]:
        room = self._room(len(values), depth)
        made = [self.value(value, depth + 1) for value in values[:room]]
        return [*made, {CUT: len(values) - room}] if room < len(values) else made

    def _mapping(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        room = self._room(len(values), depth)
        keys = list(values)[:room]
        made = {_text(str(key)): self.value(values[key], depth + 1) for key in keys}
        if room < len(values):
            made[CUT] = len(values) - room
        return made

    def _struct(self, value: msgspec.Struct, depth: int) -> dict[str, Any]:
        fields = {}
        if isinstance(value, Decision):
            fields["why"] = why.sentence(value, info=self._view.info)
        names = value.__struct_fields__
        defaults = dict(zip(reversed(names), reversed(value.__struct_defaults__), strict=False))
        for name in names:
            given = getattr(value, name)
            if name not in defaults or defaults[name] != given:
                fields[name] = given
        tag = value.__struct_config__.tag
        made = self._mapping(fields, depth)
        return {"type": str(tag), **made} if tag is not None else made


def _text(text: str) -> str:
    cut = text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + CUT
    return cut.encode("utf-8", "replace").decode("utf-8")


def _names(ids: list[str]) -> str:
    rest = len(ids) - _MOST_NAMES
    return ", ".join(ids[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
