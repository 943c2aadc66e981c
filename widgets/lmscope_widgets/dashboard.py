"""Dashboard: the view that `lmscope.watch` shows."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import traitlets

from lmscope.scope.replay import Replay
from lmscope.tap import Closeable, MeasuresAttention, Source
from lmscope_widgets.base import LiveView, check_rate
from lmscope_widgets.controls import Controls
from lmscope_widgets.feed import Feed
from lmscope_widgets.protocol import Command
from lmscope_widgets.pump import Pump

__all__ = ["COLOURS", "VIEWS", "Dashboard", "check_colour"]

VIEWS = ("timeline", "blocks", "tree", "tokens", "requests", "debugger")
"""Names of the views that a dashboard can show."""

COLOURS = ("owner", "attention")
"""What the ground of a block can say."""

MOST_WINDOW = 1024
"""Blocks of a pool told in bins that a page may see singly at once."""

# Place of the ModelRunnerOutput among the five structs of a step.
_MODEL_HAS_RUN = 2

_STATIC = Path(__file__).with_name("static")


class Dashboard(LiveView):
    """Counts, the block map and a line per request, over one running source.

    source    an LLM or another source of the stream
    views     names of the views to show, in their order; None: all of them
    colour    what the ground of a block says: "owner", or "attention", its share of the
              attention of the last step, which the source measures while the view is open
    rate_hz   frames a second, above 0 and at most 20

    TypeError or ValueError for "attention" where the source has none to measure.
    """

    # The text and not the path: for a path anywidget keeps every widget of the class alive,
    # in case the file changes.
    _esm = (_STATIC / "dashboard_widget.js").read_text(encoding="utf-8")
    _css = (_STATIC / "dashboard.css").read_text(encoding="utf-8")

    views = traitlets.List(traitlets.Unicode()).tag(sync=True)
    commands = traitlets.List(traitlets.Unicode()).tag(sync=True)
    steps = traitlets.List(traitlets.Int()).tag(sync=True)
    colour = traitlets.Enum(COLOURS, "owner").tag(sync=True)

    # A class attribute, because `close` also runs when the constructor has raised.
    _measure: Closeable | None = None

    def __init__(
        self,
        source: Source,
        *,
        views: str | Sequence[str] | None = None,
        colour: str = "owner",
        rate_hz: float = 10.0,
        pump: Pump | None = None,
        **unknown: Any,
    ) -> None:
        check_colour(colour)
        traits: dict[str, Any] = {
            "views": _checked_views(views),
            "colour": colour,
            "commands": list(Controls(source).operations),
        }
        if isinstance(source, Replay):
            # The first and the last that `seek` takes.
            traits["steps"] = [source.recording.steps[0], source.recording.steps[-1]]
        super().__init__(source, rate_hz=rate_hz, pump=pump, traits=traits, **unknown)
        # A replay shows what was measured when it was recorded.
        if colour == "attention" and not isinstance(source, Replay):
            try:
                self._measure = _measure_of(source)
            except BaseException:
                self.close()
                raise

    def close(self, *, keeps_picture: bool = True) -> None:
        """Stop watching, and measuring for this view; twice is fine."""
        super().close(keeps_picture=keeps_picture)
        measure, self._measure = self._measure, None
        if measure is not None:
            measure.close()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._let_go()

    def __del__(self) -> None:
        self._let_go()
        super().__del__()

    def _let_go(self) -> None:
        """End the measurement without waiting for the engine.

        The thread that comes here may be one that the engine waits for.
        """
        measure, self._measure = self._measure, None
        if measure is not None:
            try:
                threading.Thread(target=measure.close, daemon=True).start()
            except RuntimeError:  # the interpreter ends, and the engine with it
                return

    def still_colour(self) -> str:
        return str(self.colour)

    def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None:
        if self.colour == "attention" and message["k"] in ("full", "delta"):
            note = self._why_no_attention(message)
            if note and not message.get("note"):
                message["note"] = note
        super().send_frame(message, buffers)

    def _why_no_attention(self, message: dict[str, Any]) -> str:
        """Why blocks have no share of attention in this frame; "" where they have, or will."""
        if "mass" in message:
            return ""
        if self.steps:
            # Before the model has answered for the first time nobody can know.
            if message["step"] <= self.steps[0] + 1 and message["at"] < _MODEL_HAS_RUN:
                return ""
            return (
                f"nobody measured attention in step {message['step']} of this recording; "
                "record with lmscope.record(llm, attention=True)"
            )
        if self._measure is None:
            return 'attention is not measured; lmscope.watch(llm, colour="attention") does'
        return ""

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


def check_colour(colour: str) -> None:
    """ValueError for a colour that a view cannot have; it names the nearest one."""
    if colour not in COLOURS:
        near = difflib.get_close_matches(str(colour), COLOURS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"there is no colour {colour!r}; did you mean {near!r}? "
            f"Blocks are coloured by {' or by '.join(COLOURS)}"
        )


def _measure_of(source: Source) -> Closeable:
    """Have a source measure attention; TypeError or ValueError where it cannot."""
    if not isinstance(source, MeasuresAttention):
        raise TypeError(
            f"a {type(source).__name__} cannot measure attention; watch an LLM, or leave "
            'colour="attention" out'
        )
    return source.measure_attention()


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
