"""Controls: what the buttons of a view do to an engine, or to a replay.

Nothing here waits: a command sets the gate and returns, and the frames that follow show what
came of it.
"""

from __future__ import annotations

from typing import Any

from lmscope.boundary import BOUNDARIES
from lmscope.errors import LmscopeError
from lmscope.gate import Gate
from lmscope.scope.breakpoints import EVENTS, break_at, break_on, kind_named
from lmscope.scope.replay import Replay
from lmscope.tap import Source
from lmscope_widgets.protocol import Command

__all__ = ["Controls"]

_GATE = ("pause", "resume", "step", "break", "unbreak")
_REPLAY = ("seek", "back", "speed")
# Breakpoints that buttons may set on one gate; a page asks for a handful.
_MOST_BREAKPOINTS = 64


class Controls:
    """The commands that one source takes.

    operations   their names, as the page gets them; none for a source without a gate
    """

    def __init__(self, source: Source) -> None:
        gate = getattr(source, "gate", None)
        self.gate = gate if isinstance(gate, Gate) else None
        self.replay = source if isinstance(source, Replay) else None
        names = _GATE if self.gate is not None else ()
        self.operations = (*names, *(_REPLAY if self.replay is not None else ()))

    def run(self, command: Command) -> bool:
        """Do it; False when it is not one of these, ValueError when it cannot be done."""
        if command.op not in self.operations:
            return False
        try:
            getattr(self, f"_{command.op}")(command.arg)
        except (LmscopeError, TypeError) as error:
            raise ValueError(str(error)) from error
        return True

    @property
    def breakpoints(self) -> list[list[Any]]:
        """Of each breakpoint: its name, the place of its struct among the five, is it on."""
        if self.gate is None:
            return []
        return [
            [made.name, BOUNDARIES.index(made.kind), made.enabled] for made in self.gate.breakpoints
        ]

    # -- one method for each operation ---------------------------------------------------

    def _pause(self, argument: object) -> None:
        assert self.gate is not None
        self.gate.ask_to_pause()

    def _resume(self, argument: object) -> None:
        assert self.gate is not None
        replay = self.replay
        if replay is None:
            self.gate.resume()
            return
        if replay.speed is None:
            # As fast as possible is for readers of the stream; a person wants to see it.
            replay.speed = 1.0
        if replay.is_at_end:
            replay.ask_to_seek(replay.recording.steps[0])
        replay.play()

    def _step(self, argument: object) -> None:
        assert self.gate is not None
        kind = None if argument is None else kind_named(_word("step", argument))
        if self.replay is not None and self.replay.is_at_end:
            raise ValueError("the recording ends here; step back, or play it again")
        self.gate.ask_to_step(kind)

    def _break(self, argument: object) -> None:
        assert self.gate is not None
        name = _word("break", argument)
        if any(made.name == name for made in self.gate.breakpoints):
            return
        if len(self.gate.breakpoints) >= _MOST_BREAKPOINTS:
            raise ValueError(f"there are {_MOST_BREAKPOINTS} breakpoints; remove one first")
        event, colon, request = name.partition(":")
        if event in EVENTS:
            break_on(self.gate, event, request if colon else None)
        else:
            break_at(self.gate, kind_named(name))

    def _unbreak(self, argument: object) -> None:
        assert self.gate is not None
        name = _word("unbreak", argument)
        for made in self.gate.breakpoints:
            if made.name == name:
                made.remove()

    def _seek(self, argument: object) -> None:
        assert self.replay is not None
        if isinstance(argument, float) and argument.is_integer():
            argument = int(argument)
        if isinstance(argument, bool) or not isinstance(argument, int):
            raise ValueError(f"seek is {argument!r}; it takes the number of a step")
        self.replay.ask_to_seek(argument)

    def _back(self, argument: object) -> None:
        assert self.replay is not None
        self.replay.ask_to_step_back()

    def _speed(self, argument: object) -> None:
        assert self.replay is not None
        if isinstance(argument, bool) or not isinstance(argument, int | float):
            raise ValueError(f"speed is {argument!r}; it takes a number, 1 is as recorded")
        self.replay.speed = float(argument)


def _word(operation: str, argument: object) -> str:
    if not isinstance(argument, str):
        raise ValueError(f"{operation} is {argument!r}; it takes the name of a struct or event")
    return argument
