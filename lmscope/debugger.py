"""Debugger: the gate of a source and the view of it, in one handle.

    dbg = lmscope.debug(llm)          # shows the buttons; the gate is closed
    stream = llm.submit("Why is the sky blue?")
    dbg.step()                        # -> the struct now under the cursor
    dbg.step(ModelRunnerOutput)
    dbg.break_on("preemption")
    dbg.resume()

Without a notebook it is the same without a view. The buttons and the methods set the same
gate, so either may be used at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

from lmscope.boundary import Boundary
from lmscope.gate import Breakpoint, Gate
from lmscope.scope.breakpoints import break_on
from lmscope.scope.replay import Replay
from lmscope.tap import Source

__all__ = ["Debugger"]

B = TypeVar("B", bound=Boundary)


class View(Protocol):
    """What shows the source; closing it twice is fine."""

    def close(self) -> None: ...


class Debugger:
    """Pause, step, resume and breakpoints over one source.

    source   what is debugged: an LLM, a replay, or another source with a gate
    view     what shows it; None where nothing is shown

    TypeError for a source without a gate, which cannot be stopped.
    """

    def __init__(self, source: Source, view: View | None = None) -> None:
        self.source = source
        self.view = view
        self._gate = gate_of(source)
        self._made: list[Breakpoint] = []

    def __repr__(self) -> str:
        name = self.source.tap.info.model
        return f"<Debugger of {name}: {self._gate.state}, {len(self.breakpoints)} breakpoints>"

    @property
    def at(self) -> Boundary | None:
        """The struct under the cursor; None while the engine runs or is idle."""
        return self._gate.at

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps that the device has run, and whose tokens come next; Gate.in_flight says more."""
        return self._gate.in_flight

    @property
    def is_closed(self) -> bool:
        """Whether the gate is closed."""
        return self._gate.is_closed

    @property
    def breakpoints(self) -> tuple[Breakpoint, ...]:
        """All breakpoints of the source, those of buttons included."""
        return self._gate.breakpoints

    def pause(self) -> Boundary | None:
        """Stop at the next boundary and return it; None when the engine is idle."""
        return self._gate.pause()

    @overload
    def step(self, kind: None = None, *, timeout_s: float = 60) -> Boundary: ...
    @overload
    def step(self, kind: type[B], *, timeout_s: float = 60) -> B: ...
    def step(self, kind: type[Boundary] | None = None, *, timeout_s: float = 60) -> Boundary:
        """Run to the next boundary, or to the next of one kind; Gate.step says more."""
        return self._gate.step(kind, timeout_s=timeout_s)

    def resume(self) -> None:
        """Let the engine run; breakpoints stay."""
        self._gate.resume()

    def break_when(
        self,
        kind: type[B],
        predicate: Callable[[B], object] | None = None,
        *,
        once: bool = False,
        hits: int = 1,
        name: str = "",
    ) -> Any:
        """Stop where `predicate` is true; without one a decorator. Gate.break_when says more."""

        def add(function: Callable[[B], object]) -> Breakpoint:
            made: Breakpoint = self._gate.break_when(
                kind, function, once=once, hits=hits, name=name
            )
            return self._keep(made)

        return add if predicate is None else add(predicate)

    def break_on(self, event: str, request: str | None = None, *, once: bool = False) -> Breakpoint:
        """Stop where something happens to a request, or to any.

        event   "preemption", "eviction", "prefix_hit", "first_token" or "finish"
        """
        return self._keep(break_on(self._gate, event, request, once=once))

    def close(self) -> None:
        """Take its breakpoints away, let the engine run, close the view; twice is fine.

        A replay stays where it stands: nobody waits for it.
        """
        for made in self._made:
            made.remove()
        self._made.clear()
        if not isinstance(self.source, Replay):
            self._gate.resume()
        if self.view is not None:
            self.view.close()

    def __enter__(self) -> Debugger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keep(self, made: Breakpoint) -> Breakpoint:
        self._made.append(made)
        return made


def gate_of(source: object) -> Gate:
    """The gate of a source; TypeError for what cannot be stopped."""
    gate = getattr(source, "gate", None)
    if not isinstance(gate, Gate):
        raise TypeError(
            f"a {type(source).__name__} has no gate, so it cannot be stopped; "
            "give an LLM or a replay"
        )
    return gate
