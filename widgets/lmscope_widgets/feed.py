"""Feed: from the engine thread to the notebook, coalesced.

    engine thread   listener: append the struct to a deque, a few microseconds
    pump thread     one per process: folds what has come and sends each page what it may get
    any thread      messages from pages: put into a deque, the pump is woken

The engine never waits for a viewer, and what a viewer has not seen is never kept: the pump
folds whether or not anybody has credit. If it cannot keep up, the feed begins anew from a
snapshot.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lmscope.boundary import Boundary, SchedulerOutput
from lmscope.errors import LmscopeError
from lmscope.scope.attention_words import most_attended
from lmscope.scope.engine_words import in_flight_words
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.replay import Replay
from lmscope.scope.run_log import LOG_NAMES
from lmscope.scope.text_picture import text_picture
from lmscope.scope.view import EngineView
from lmscope.tap import Source, Subscription
from lmscope_widgets.controls import Controls
from lmscope_widgets.link import Link, Send
from lmscope_widgets.protocol import Ack, Command, Message, Ready, Resync, reply
from lmscope_widgets.step_log import StepBar, StepLog
from lmscope_widgets.still_map import Bytes

if TYPE_CHECKING:
    from lmscope_widgets.pump import Pump

__all__ = ["Feed", "FrameView", "Picture"]

logger = logging.getLogger(__name__)

# The pump is woken when this many structs wait; at the second number the feed starts anew.
_FOLD_EARLY = 2_000
_MOST_QUEUED = 50_000
# A feed whose views have nothing to get is folded this often.
_FOLD_INTERVAL_S = 1.0
# Messages of one page that may wait; a page sends an ack per frame.
_MOST_MESSAGES = 256
# Finished requests that a live view lists.
_KEEP_FINISHED = 64
# Of a longer recording a page learns the steps as they are played.
_MOST_FORETOLD = 100_000


class FrameView(Protocol):
    """What a feed draws on: a live view."""

    def send_frame(self, message: dict[str, Any], buffers: Sequence[Any]) -> None: ...

    def run_command(self, command: Command) -> None:
        """Do it, or raise ValueError with a sentence for the page."""

    def fail(self, error: Exception) -> None:
        """The view was dropped."""


@dataclass(frozen=True)
class Picture:
    """All that a still picture is drawn from; see docs/picture.md for `frame` and `columns`."""

    frame: dict[str, Any]
    columns: dict[str, Bytes]
    steps: list[StepBar]
    plain: str


class _Page:
    """One view of a feed: its link, its own encoder and the messages that came from it."""

    def __init__(self, view: FrameView, rate_hz: float) -> None:
        self.view = weakref.ref(view)
        self.link = Link(rate_hz)
        self.inbox: deque[Message] = deque(maxlen=_MOST_MESSAGES)
        self.encoder: PictureEncoder | None = None
        self.window: tuple[int, int] | None = None
        self.knows_end = False


class Feed:
    """The stream of one source, folded once for all views of it.

    pump       serves it; `pump.attach` makes feeds as they are needed
    tap        the source's tap
    controls   what the source can be told to do
    view       the engine as far as the stream has been folded; read it under `lock`
    """

    def __init__(self, source: Source, pump: Pump) -> None:
        self.tap = source.tap
        self.lock = threading.RLock()
        self.is_dead = False
        self._pump = pump
        self.controls = Controls(source)
        self._gate = self.controls.gate
        self._replay = self.controls.replay
        self._pages: tuple[_Page, ...] = ()
        self._has_overflowed = False
        self._is_asleep = False
        self._is_open = True
        self._epoch = 0
        self._version = 0
        self._folded_at = self._pump.clock()
        self._note = ""
        self._subscription: Subscription
        # the step that is running, or the last one
        self._bar: StepBar | None
        self._follow()
        self._looks = self._look()
        if self._gate is not None:
            self._gate.watch(self._on_gate)
        self._pump.add(self)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def version(self) -> int:
        """Counts what a page may want to know: structs folded, and changes of phase."""
        return self._version

    @property
    def signature(self) -> tuple[int, ...]:
        """Differs when a run would look different in a still picture.

        An engine may add an empty step after the last output; that alone changes nothing.
        """
        with self.lock:
            view, totals = self.view, self.view.totals
            return (
                self._epoch,
                totals.requests,
                totals.finished,
                totals.output_tokens,
                totals.preemptions,
                view.num_used,
                view.num_kept,
            )

    def attach(self, view: FrameView, rate_hz: float) -> bool:
        """Send frames to a view, at most `rate_hz` a second, once its page is ready.

        The feed does not keep the view alive. False when it has been closed meanwhile.
        """
        with self.lock:
            if self._is_open:
                self._pages = (*self._pages, _Page(view, rate_hz))
            return self._is_open

    def detach(self, view: FrameView) -> None:
        """Send nothing more to a view; the last one closes the feed."""
        with self.lock:
            for page in self._pages:
                if page.view() is view:
                    self._drop(page)

    def set_rate(self, view: FrameView, rate_hz: float) -> None:
        for page in self._pages:
            if page.view() is view:
                page.link.rate_hz = rate_hz
        self._pump.wake.set()

    def set_window(self, view: FrameView, window: tuple[int, int] | None) -> None:
        """Tell a view's page of these blocks singly: first and count; None: of none."""
        with self.lock:
            for page in self._pages:
                if page.view() is view:
                    page.window = window
                    # Its next frame is due although nothing has happened.
                    page.link.hear_ready(self._pump.clock())
        self._pump.wake.set()

    def receive(self, view: FrameView, message: Message) -> None:
        """Take a message from a view's page; called on whatever thread it came in."""
        for page in self._pages:
            if page.view() is view:
                page.inbox.append(message)
        self._pump.wake.set()

    def fail(self, error: Exception) -> None:
        """Close the feed and tell its views why."""
        views = [page.view() for page in self._pages]
        self.close()
        for view in views:
            if view is not None:
                view.fail(error)

    def close(self) -> None:
        """Leave the tap; twice is fine."""
        with self.lock:
            self._is_open = False
            self._pages = ()
            self._subscription.close()
            self._queue.clear()
            if self._gate is not None:
                self._gate.unwatch(self._on_gate)
        self._pump.remove(self)

    @property
    def phase(self) -> str:
        """How the engine stands, in the words of docs/picture.md."""
        gate = self._gate
        if self.is_dead or (self._has_work and gate is not None and gate.has_ended):
            return "dead"
        if self._replay is not None:
            return "replay" if self._replay.is_playing else "paused"
        if gate is not None and gate.is_closed and (gate.at is not None or not self._has_work):
            return "paused"
        if self._has_work:
            return "live"
        return "finished" if self.view.totals.requests else "ready"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to run, with all that has come folded in."""
        with self.lock:
            self._fold()
            if self._replay is not None:
                return not self._replay.is_playing
            return not self._has_work or self.phase == "dead"

    def fold(self) -> None:
        """Bring the view up to date with what the engine has told."""
        with self.lock:
            self._fold()

    def picture(self, views: Collection[str] | None = None, colour: str = "owner") -> Picture:
        """The engine now, for a still picture of these views; None: of all.

        colour   what a block shows: "owner", or "attention" where somebody measures it
        """
        with self.lock:
            self._fold()
            frame = PictureEncoder(self.view, epoch=self._epoch).full(self.phase)
            message, buffers = frame.to_message()
            for row in message["rows"]:
                request = self.view.requests[row["id"]]
                row["most_blocks"] = request.max_blocks
                first = request.first_scheduled_step
                row["waited"] = None if first is None else first - request.arrival_step - 1
            if colour == "attention":
                message["most_attended"] = most_attended(self.view)
            bars = [*self._log.bars, *([self._bar] if self._bar else ())]
            in_flight = in_flight_words(self._in_flight)
            plain = text_picture(self.view, views=views, colour=colour, in_flight=in_flight)
            if in_flight:
                message["in_flight"] = in_flight
        message["note"] = message.get("note") or self._note
        columns = {
            name: np.frombuffer(buffer, np.uint8)
            for name, buffer in zip(("slot", "state", "ref", "fill"), buffers, strict=True)
        }
        return Picture(message, columns, bars, plain)

    # -- on the engine thread ----------------------------------------------------------

    def _on_gate(self) -> None:
        """The gate stopped the engine, or let it go; called under the gate's lock."""
        self._is_asleep = False
        self._pump.wake.set()

    def _listen(self, queue: deque[Boundary | EngineView], boundary: Boundary | EngineView) -> None:
        if len(queue) >= _MOST_QUEUED:
            self._has_overflowed = True
            return
        queue.append(boundary)
        # The pump sets the flag before it looks at the deque for the last time, and here it
        # is read after the append, so no struct is left lying.
        if self._is_asleep or len(queue) >= _FOLD_EARLY:
            self._is_asleep = False
            self._pump.wake.set()

    # -- on the pump thread --------------------------------------------------------------

    def tick(self) -> float | None:
        """Hear the pages, fold what has come, send what is due.

        Returns the seconds until something may be due, or None: when something comes.
        """
        now = self._pump.clock()
        self._is_asleep = False
        with self.lock:
            if not self._is_open:
                return None
            if self._has_overflowed:
                self._start_anew()
            has_folded = self._fold()
            looks = self._look()
            if looks != self._looks:
                # The gate, or the end of the engine, changes it without a struct.
                self._looks = looks
                self._version += 1
            for page in self._pages:
                self._serve(page, now)
            times = [
                page.link.next_time(now, self._version, self._quiet_since()) for page in self._pages
            ]
        waits = [max(0.0, at - now) for at in times if at is not None]
        if has_folded:
            # More is likely to follow at once. It need not wake anybody, it is looked for
            # when a page can take it.
            polls = [page.link.poll_time(now) for page in self._pages]
            waits.extend(max(0.0, at - now) for at in polls if at is not None)
            waits.append(_FOLD_INTERVAL_S)
        if waits:
            return min(waits)
        self._is_asleep = True
        if self._queue:
            return 0.0
        # An engine that dies in the middle of a step tells nobody, so it is looked at even
        # when nothing comes; what does come wakes the pump before that.
        return _FOLD_INTERVAL_S if looks[0] == "live" else None

    def _serve(self, page: _Page, now: float) -> None:
        view = page.view()
        if view is None:
            self._drop(page)
            return
        try:
            self._hear(page, view, now)
            kind = page.link.choose(now, self._version, self._quiet_since())
            if kind is not Send.NOTHING:
                self._send(page, view, kind, now)
        except Exception as error:
            # Whatever a front end or a view does, the other views go on.
            logger.warning("a view failed and was dropped: %r", error)
            self._drop(page)
            view.fail(error)

    def _hear(self, page: _Page, view: FrameView, now: float) -> None:
        messages = [page.inbox.popleft() for _ in range(len(page.inbox))]
        seeks = [m for m in messages if isinstance(m, Command) and m.op == "seek"]
        for message in messages:
            if isinstance(message, (Ready, Resync)):
                page.knows_end = page.knows_end and isinstance(message, Resync)
                page.link.hear_ready(now)
            elif isinstance(message, Ack):
                if message.epoch in (None, self._epoch):
                    page.link.hear_ack(message.seq, message.hidden, now)
            else:
                error = ""
                try:
                    # A slider that moves on wants its last place, not all on the way there.
                    if message not in seeks[:-1]:
                        view.run_command(message)
                except ValueError as refused:
                    error = str(refused)
                view.send_frame(reply(message, error), [])

    def _send(self, page: _Page, view: FrameView, kind: Send, now: float) -> None:
        if self._replay is not None and not page.knows_end:
            self._foretell(page, view, self._replay)
        if page.encoder is None:
            page.encoder = PictureEncoder(self.view, epoch=self._epoch, in_bins=True)
            kind = Send.FULL
        encoder = page.encoder
        encoder.window = page.window
        frame = encoder.full(self.phase) if kind is Send.FULL else encoder.delta(self.phase)
        message, buffers = frame.to_message()
        message["breaks"] = self.controls.breakpoints
        in_flight = in_flight_words(self._in_flight)
        if in_flight:
            message["in_flight"] = in_flight
        if self._replay is not None:
            message["speed"] = self._replay.speed
        if self._note and not message.get("note"):
            message["note"] = self._note
        view.send_frame(message, buffers)
        page.link.sent(kind, message["seq"], self._version, now)

    def _foretell(self, page: _Page, view: FrameView, replay: Replay) -> None:
        """Show a page the end of a recording first, so that its timeline has all steps."""
        page.knows_end = True
        if len(replay.recording) > _MOST_FORETOLD:
            return
        encoder = PictureEncoder(replay.recording.at(), epoch=self._epoch, in_bins=True)
        message, buffers = encoder.full("paused").to_message()
        # Before the first of the frames that count; a page that has had those ignores it.
        view.send_frame({**message, "seq": -1}, buffers)

    def _look(self) -> tuple[str, list[list[Any]], float | None]:
        """What a page shows that no struct tells."""
        speed = None if self._replay is None else self._replay.speed
        return self.phase, self.controls.breakpoints, speed

    @property
    def _in_flight(self) -> tuple[int, ...]:
        """Steps that the device of an engine which stands has run already."""
        return () if self._gate is None else self._gate.in_flight

    def _quiet_since(self) -> float | None:
        return None if self._has_work else self._folded_at

    @property
    def _has_work(self) -> bool:
        return bool(self.view.num_running or self.view.num_waiting)

    def _fold(self) -> bool:
        """Fold what waits now; whether that was anything."""
        count = len(self._queue)
        for _ in range(count):
            self._apply(self._queue.popleft())
        if count:
            self._version += count
            self._folded_at = self._pump.clock()
        return count > 0

    def _apply(self, boundary: Boundary | EngineView) -> None:
        if isinstance(boundary, EngineView):
            self._jump(boundary)
            return
        if not isinstance(boundary, SchedulerOutput):
            self.view.apply(boundary)
            return
        if self._bar is not None:
            self._log.put(self._bar)
        self.view.apply(boundary)
        self._bar = _bar(self.view)

    def _jump(self, view: EngineView) -> None:
        """A replay stands at another place: its pages begin anew from there."""
        self.view = view
        self._read_log()
        self._begin_epoch()

    def _read_log(self) -> None:
        """The bars of the steps that the view has behind it."""
        self._log = StepLog()
        for record in self.view.log.records:
            counts = dict(zip(LOG_NAMES, record.counts, strict=True))
            names = ("decode", "prefill", "recompute", "cached", "evicted")
            self._log.put(
                StepBar(
                    step=record.first_step,
                    count=record.step - record.first_step + 1,
                    preempted=len(record.preempted),
                    used=counts["used"],
                    kept=counts["kept"],
                    waiting=counts["waiting"],
                    **{name: counts[name] for name in names},
                )
            )
        self._bar = _bar(self.view) if self.view.this_step.step else None

    # -- beginning and ending --------------------------------------------------------------

    def _follow(self) -> None:
        # Each subscription has a deque of its own: what still arrives for an earlier one
        # must not be folded into this view.
        self._queue: deque[Boundary | EngineView] = deque()
        listen = partial(self._listen, self._queue)
        if self._replay is not None:
            self.view, self._subscription = self._replay.follow(listen)
        else:
            snapshot, self._subscription = self.tap.follow(listen)
            self.view = EngineView(snapshot, keep_finished=_KEEP_FINISHED)
        self._read_log()

    def _start_anew(self) -> None:
        """The engine was faster than the pump: begin again from a snapshot."""
        skipped_from = self.view.step
        self._subscription.close()
        self._has_overflowed = False
        try:
            self._follow()
        except LmscopeError:
            self.is_dead = True
        else:
            self._note = (
                f"counts and history begin at step {self.view.step}; the engine was faster "
                f"than this view, which had come to step {skipped_from}"
            )
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Nothing that pages have is of use any more."""
        self._epoch += 1
        self._version += 1
        for page in self._pages:
            page.encoder = None
            page.link.restart()

    def _drop(self, page: _Page) -> None:
        self._pages = tuple(other for other in self._pages if other is not page)
        if not self._pages:
            self.close()


def _bar(view: EngineView) -> StepBar:
    """The step that the view shows."""
    counts = view.this_step
    return StepBar(
        step=view.step,
        decode=counts.decode,
        prefill=counts.prefill,
        recompute=counts.recomputed,
        cached=counts.cached,
        evicted=len(view.evicted),
        preempted=counts.preemptions,
        used=view.num_used,
        kept=view.num_kept,
        waiting=view.num_waiting,
    )
