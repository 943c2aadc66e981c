"""Tells that numba begins to compile the loops of this package; importing this needs numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.event import Listener, register

__all__ = ["call_before_compiling"]

_PACKAGE = __name__.rpartition(".")[0] + "."


class _FirstLoop(Listener):
    """Listens to functions that numba compiles; other libraries have some too."""

    def __init__(self) -> None:
        self.tell: Callable[[], object] | None = None

    def on_start(self, event: Any) -> None:
        is_ours = event.data["dispatcher"].py_func.__module__.startswith(_PACKAGE)
        if is_ours and self.tell is not None:
            tell, self.tell = self.tell, None
            tell()

    def on_end(self, event: Any) -> None:
        pass


_first_loop = _FirstLoop()
register("numba:compile", _first_loop)


def call_before_compiling(tell: Callable[[], object]) -> None:
    """Call `tell` before the next loop is compiled, once, and on the thread that compiles.

    A loop that an earlier process compiled is not: it is read from where numba keeps it.
    """
    _first_loop.tell = tell
