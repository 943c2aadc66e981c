"""Errors that users get from lmscope."""

from __future__ import annotations

__all__ = [
    "EngineClosedError",
    "EngineDeadError",
    "GateClosedError",
    "LmscopeError",
    "NothingToRun",
    "RecordingError",
]


class LmscopeError(Exception):
    """Base of all errors that lmscope raises beside ValueError and TypeError."""


class EngineClosedError(LmscopeError):
    """The engine was closed; load a new one."""


class EngineDeadError(LmscopeError):
    """The engine thread ended with an error, which is this error's `__cause__`."""


class GateClosedError(LmscopeError):
    """The call would wait for an engine that stands at a closed gate."""


class NothingToRun(LmscopeError):  # noqa: N818
    """The engine has no request, so it cannot reach another boundary."""


class RecordingError(LmscopeError):
    """A recording cannot be read or does not hold what was asked for."""
