"""What lmscope is in a notebook: `watch`, `debug`, and the %lmscope magic."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from IPython import get_ipython
from lmscope_widgets.base import LiveView
from lmscope_widgets.dashboard import Dashboard, check_colour

from lmscope.debugger import Debugger, gate_of
from lmscope.tap import Source

__all__ = ["debug", "load_ipython_extension", "unload_ipython_extension", "watch"]


def watch(
    source: Source,
    *,
    views: str | Sequence[str] | None = None,
    colour: str = "owner",
    rate_hz: float = 10,
) -> Dashboard:
    """Show a running engine: its blocks, its requests, its counts.

    source    an LLM, a replay or another source of the stream
    views     names of the views to show; None: all of them
    colour    what the ground of a block says: "owner", the request that holds it, or
              "attention", its share of the attention of the last step: measured while the
              view is open, of a replay when it was recorded
    rate_hz   pictures a second, above 0 and at most 20

    The view displays itself once and is live from then on; the cell returns at once. When
    a cell ends and a run has ended in it, the output gets that run's final picture, which
    is what a saved notebook shows. Running the cell again closes the view it made before.
    Outside IPython nothing is displayed.
    """
    view = Dashboard(source, views=views, colour=colour, rate_hz=rate_hz)
    shell = get_ipython()
    if shell is not None:
        _Shown.of(shell).show(view, shell)
    return view


def debug(
    source: Source,
    *,
    views: str | Sequence[str] | None = None,
    colour: str = "owner",
    rate_hz: float = 10,
) -> Debugger:
    """Close the gate of an engine or a replay, and show it with the buttons of its gate.

    The options are those of `watch`. From here on nothing moves until it is told to: with
    the buttons, or with the methods of what this returns, which do the same. Outside IPython
    nothing is displayed and everything else is the same. TypeError for a source that cannot
    be stopped.
    """
    check_colour(colour)
    gate = gate_of(source)
    view = None
    if get_ipython() is not None:
        view = watch(source, views=views, colour=colour, rate_hz=rate_hz)
    gate.pause()
    return Debugger(source, view)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext lmscope`: register the %lmscope magic."""
    from lmscope.magic import LMScope

    LMScope.install(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext lmscope`: remove the magic, close its views and the engines it loaded."""
    from lmscope.magic import LMScope

    LMScope.uninstall(shell)
    _Shown.of(shell).close_all(shell)


class _Shown:
    """The views that one shell displays, by the cell that shows them."""

    @classmethod
    def of(cls, shell: Any) -> _Shown:
        shown = _shown_by.get(shell)
        if shown is None:
            shown = _shown_by[shell] = cls()
            shell.events.register("post_run_cell", shown._after_cell)
        return shown

    def __init__(self) -> None:
        # (cell id or None, execution count of the run that made it, view)
        self._views: list[tuple[str | None, int, LiveView]] = []

    def show(self, view: LiveView, shell: Any) -> None:
        cell_id, count = _cell_id(shell), int(shell.execution_count)
        for earlier_id, earlier_count, earlier in self._views:
            if cell_id is not None and earlier_id == cell_id and earlier_count != count:
                # This run of the cell has cleared the output that showed it.
                earlier.close(keeps_picture=False)
        self._views = [entry for entry in self._views if entry[2].is_open]
        self._views.append((cell_id, count, view))
        view.show()

    def close_all(self, shell: Any) -> None:
        for _, _, view in self._views:
            view.close()
        self._views = []
        shell.events.unregister("post_run_cell", self._after_cell)
        del _shown_by[shell]

    def _after_cell(self, result: object = None) -> None:
        """A cell has ended: what it ran to its end gets its final picture."""
        self._views = [entry for entry in self._views if entry[2].is_open]
        for _, _, view in self._views:
            if view.is_idle:
                view.freeze()


_shown_by: weakref.WeakKeyDictionary[Any, _Shown] = weakref.WeakKeyDictionary()


def _cell_id(shell: Any) -> str | None:
    """The id of the cell that runs, where the front end tells it."""
    get_parent = getattr(shell, "get_parent", None)
    parent = get_parent() if get_parent is not None else None
    metadata = parent.get("metadata") if isinstance(parent, dict) else None
    cell_id = metadata.get("cellId") if isinstance(metadata, dict) else None
    return cell_id if isinstance(cell_id, str) and cell_id else None
