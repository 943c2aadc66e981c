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

    @classmethod
    def of(cls, error: BaseException) -> EngineDeadError:
        """That of an engine which `error` has ended, with what to do."""
        advice = "load a new one"
        # Torch's, told by its name: nothing here loads torch.
        if type(error).__name__ == "OutOfMemoryError":
            advice += (
                " that takes less, with a lower gpu_memory_utilization, num_kv_blocks or "
                "max_num_batched_tokens, or end what else holds the memory"
            )
        dead = cls(f"the engine died with {type(error).__name__}: {error}; {advice}")
        dead.__cause__ = error
        return dead


class GateClosedError(LmscopeError):
    """The call would wait for an engine that stands at a closed gate."""


class NothingToRun(LmscopeError):  # noqa: N818
    """The engine has no request, so it cannot reach another boundary."""


class RecordingError(LmscopeError):
    """A recording cannot be read or does not hold what was asked for."""
