"""LiveView: what all live views of a notebook have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anywidget
from IPython import get_ipython
from IPython.display import display

from lmscope.tap import Source, Tap
from lmscope_widgets.comm import pin_comm
from lmscope_widgets.feed import Feed
from lmscope_widgets.packing import pack
from lmscope_widgets.protocol import Command, decode_message
from lmscope_widgets.pump import Pump, default_pump
from lmscope_widgets.still import still

__all__ = ["MOST_RATE_HZ", "LiveView", "check_rate"]

MOST_RATE_HZ = 20.0

T = TypeVar("T")


class LiveView(anywidget.AnyWidget):
    """A widget that draws the stream of one source while it runs.

    It sends frames, never traits, so nothing of a run lands in saved widget state. Its
    output carries the still picture beside the widget; `freeze()` brings that up to date.

    source    anything with a `.tap`
    rate_hz   frames a second, above 0 and at most 20
    pump      the process's own unless given, for tests
    traits    first values of a subclass's traits
    """

    # Class attributes, because `close` also runs when the constructor has raised.
    _feed: Feed | None = None
    _handle: Any = None

    def __init__(
        self,
        source: Source,
        *,
        rate_hz: float = 10.0,
        pump: Pump | None = None,
        traits: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise TypeError(f"{type(self).__name__} has no option {names}; it takes rate_hz")
        if not isinstance(getattr(source, "tap", None), Tap):
            raise TypeError(
                f"a {type(source).__name__} has no tap, so it cannot be watched; "
                "give an LLM or another source of the stream"
            )
        check_rate(rate_hz)
        super().__init__(**(traits or {}))
        self.error: Exception | None = None
        self._name = source.tap.info.model
        self._is_emitting = False
        self._shown_in: int | None = None
        self._shown_signature: tuple[int, ...] = ()
        pin_comm(self.comm)
        self.on_msg(self._receive)
        self._feed = (pump or default_pump()).attach(source, self, rate_hz)
        self._controls = self._feed.controls

    # -- for the user --------------------------------------------------------------------

    def __repr__(self) -> str:
        feed = self._feed
        if feed is None:
            why = f"failed, {self.error!r}" if self.error else "closed"
            return f"<{type(self).__name__} of {self._name}: {why}>"
        with feed.lock:
            view, phase = feed.view, feed.phase
            counts = f"{view.num_running} running, {view.num_waiting} waiting"
            return f"<{type(self).__name__} of {self._name}: {phase}, step {view.step}, {counts}>"

    @property
    def is_open(self) -> bool:
        return self._feed is not None

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing left to run."""
        return self._feed is None or self._feed.is_idle

    def show(self) -> None:
        """Display the view in the output of the cell that runs."""
        self._shown_in = _execution_count()
        self._handle = self._emit(lambda: display(self, display_id=True))

    def freeze(self) -> None:
        """Bring the still picture in the output up to date, where something has changed.

        The front end draws the whole output anew for that, so this is for the end of a run
        and not for each frame.
        """
        if self._feed is None or self._handle is None:
            return
        self._feed.fold()
        if self._feed.signature != self._shown_signature:
            self._emit(lambda: self._handle.update(self))

    def close(self, *, keeps_picture: bool = True) -> None:
        """Stop watching; twice is fine.

        The output keeps the last picture, unless there is no output any more to keep it.
        """
        feed, self._feed = self._feed, None
        if feed is not None:
            if self._handle is not None and keeps_picture:
                self._handle.update(self._still(feed), raw=True)
            feed.detach(self)
        if self.comm is not None:
            # Each widget has a layout, which is a model too and would stay.
            self.layout.close()
        super().close()

    # -- for IPython -----------------------------------------------------------------------

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live view, and the still picture for where it cannot be shown.

        As the last expression of the cell that shows it already, a view is one line.
        """
        feed = self._feed
        is_shown_here = self._shown_in is not None and self._shown_in == _execution_count()
        if feed is None or (is_shown_here and not self._is_emitting):
            return {"text/plain": repr(self)}
        self._shown_signature = feed.signature
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        return {**data, **self._still(feed)}, metadata

    def still_views(self) -> tuple[str, ...] | None:
        """Names of the views that the still picture is narrowed to; None: it shows everything."""
        return None

    def still_colour(self) -> str:
        """What the ground of a block says in the still picture: "owner" or "attention"."""
        return "owner"

    def _still(self, feed: Feed) -> dict[str, str]:
        views, colour = self.still_views(), self.still_colour()
        picture = feed.picture(views, colour)
        return still(
            picture.frame, picture.columns, picture.steps, picture.plain, views, colour=colour
        )

    def _emit(self, write: Callable[[], T]) -> T:
        self._is_emitting = True
        try:
            return write()
        finally:
            self._is_emitting = False

    # -- for the feed ----------------------------------------------------------------------

    def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None:
        content, parts = pack(message, buffers)
        self.send(content, buffers=parts)

    def run_command(self, command: Command) -> None:
        """Do what a button asked for; ValueError for what this view cannot do."""
        if not self._controls.run(command):
            raise ValueError(f"this view has no command {command.op!r}")

    def fail(self, error: Exception) -> None:
        """Keep why the feed dropped this view."""
        self.error = error
        self._feed = None

    def _receive(self, widget: object, content: object, buffers: Any) -> None:
        # Runs on the main thread or on any subshell's: it only passes the message on.
        feed = self._feed
        message = decode_message(content, buffers)
        if feed is not None and message is not None:
            feed.receive(self, message)


def check_rate(rate_hz: float) -> None:
    """ValueError for a rate that no view can have."""
    if not 0 < rate_hz <= MOST_RATE_HZ:
        raise ValueError(
            f"rate_hz is {rate_hz}; it must be above 0 and at most {MOST_RATE_HZ:g}, "
            "since a page draws no more than that"
        )


def _execution_count() -> int | None:
    """Which cell runs; None outside IPython."""
    shell = get_ipython()
    return None if shell is None else int(shell.execution_count)
