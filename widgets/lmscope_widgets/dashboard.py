"""Dashboard: the view that `lmscope.watch` shows."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import traitlets

from lmscope.scope.replay import Replay
from lmscope.tap import Source
from lmscope_widgets.base import LiveView, check_rate
from lmscope_widgets.controls import Controls
from lmscope_widgets.feed import Feed
from lmscope_widgets.protocol import Command
from lmscope_widgets.pump import Pump

__all__ = ["VIEWS", "Dashboard"]

VIEWS = ("timeline", "blocks", "tree", "tokens", "requests", "debugger")
"""Names of the views that a dashboard can show."""

MOST_WINDOW = 1024
"""Blocks of a pool told in bins that a page may see singly at once."""

_STATIC = Path(__file__).with_name("static")


class Dashboard(LiveView):
    """Counts, the block map and a line per request, over one running source.

    source    an LLM or another source of the stream
    views     names of the views to show, in their order; None: all of them
    rate_hz   frames a second, above 0 and at most 20
    """

    # The text and not the path: for a path anywidget keeps every widget of the class alive,
    # in case the file changes.
    _esm = (_STATIC / "dashboard_widget.js").read_text(encoding="utf-8")
    _css = (_STATIC / "dashboard.css").read_text(encoding="utf-8")

    views = traitlets.List(traitlets.Unicode()).tag(sync=True)
    commands = traitlets.List(traitlets.Unicode()).tag(sync=True)
    steps = traitlets.List(traitlets.Int()).tag(sync=True)

    def __init__(
        self,
        source: Source,
        *,
        views: str | Sequence[str] | None = None,
        rate_hz: float = 10.0,
        pump: Pump | None = None,
        **unknown: Any,
    ) -> None:
        traits: dict[str, Any] = {
            "views": _checked_views(views),
            "commands": list(Controls(source).operations),
        }
        if isinstance(source, Replay):
            # The first and the last that `seek` takes.
            traits["steps"] = [source.recording.steps[0], source.recording.steps[-1]]
        super().__init__(source, rate_hz=rate_hz, pump=pump, traits=traits, **unknown)

    def still_views(self) -> tuple[str, ...] | None:
        named = tuple(self.views)
        return None if set(named) >= set(VIEWS) else named or None

    def run_command(self, command: Command) -> None:
        if command.op == "window":
            if self._feed is not None:
                self._feed.set_window(self, _checked_window(command.arg, self._feed))
            return
        if command.op != "rate":
            super().run_command(command)
            return
        if isinstance(command.arg, bool) or not isinstance(command.arg, int | float):
            raise ValueError(f"rate is {command.arg!r}; it takes a number of frames a second")
        check_rate(command.arg)
        if self._feed is not None:
            self._feed.set_rate(self, command.arg)


def _checked_window(asked: object, feed: Feed) -> tuple[int, int] | None:
    """First block and number of blocks of `"first:count"`; None for None."""
    if asked is None:
        return None
    first, _, count = str(asked).partition(":")
    if not (first.isdecimal() and count.isdecimal() and len(str(asked)) < 40):
        raise ValueError(f'window is {asked!r}; it takes "first:count", for example "4096:256"')
    num_blocks = feed.tap.info.num_blocks
    if not 1 <= int(count) <= MOST_WINDOW or int(first) >= num_blocks:
        raise ValueError(
            f"window is {asked!r}; it takes 1 to {MOST_WINDOW} of the {num_blocks} blocks"
        )
    return int(first), int(count)


def _checked_views(views: str | Sequence[str] | None) -> list[str]:
    """The names of the views to show; ValueError names the nearest one that there is."""
    if views is None:
        return list(VIEWS)
    names = [views] if isinstance(views, str) else list(views)
    for name in names:
        if name not in VIEWS:
            near = difflib.get_close_matches(str(name), VIEWS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"there is no view {name!r}; did you mean {near!r}? "
                f"The views are {', '.join(VIEWS)}"
            )
    return names or list(VIEWS)
