"""Recording: a stream that was kept, and the engine at any moment of it.

    with record(llm) as recording:
        llm.generate(prompts)
    recording.save("run.lmscope")

    recording = open_recording("run.lmscope")
    recording.at(step=42).why("3")

A recording holds prompts and outputs in plain text; `redact()` makes one that does not.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, overload

import msgspec

from lmscope.boundary import (
    BOUNDARIES,
    AnyBoundary,
    Boundary,
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    decode,
    encode,
)
from lmscope.errors import RecordingError
from lmscope.scope.frames import Frames
from lmscope.scope.record_log import RecordLog
from lmscope.scope.recording_file import (
    read_preamble,
    scan_chunks,
    write_chunk,
    write_end,
    write_preamble,
)
from lmscope.scope.timetable import Timetable
from lmscope.scope.view import EngineView
from lmscope.scope.write_file import replace_file
from lmscope.tap import Closeable, MeasuresAttention, Source, Subscription, Tap

if TYPE_CHECKING:
    from lmscope.scope.block_story import BlockStory
    from lmscope.scope.history import History
    from lmscope.scope.plots import Plots
    from lmscope.scope.provenance import Provenance
    from lmscope.scope.questions import Why

__all__ = ["Boundaries", "Recording", "open_recording", "record"]

_MEMORY_BYTES = 256 << 20
_SAVED_CHUNK_STRUCTS = 1024


def record(
    source: Source,
    path: str | Path | None = None,
    *,
    attention: bool = False,
    memory_bytes: int = _MEMORY_BYTES,
) -> Recording:
    """Keep the stream of an engine, or of anything else with a tap, from now on.

    Recording ends with the `with` block, with `close()`, or when nobody holds the recording
    any more. With `path` it is written there as it goes, so that it survives a crash up to
    the last second. With `attention` the engine measures how much attention each block
    receives, for as long as it is recorded. `memory_bytes` bounds what stays in memory; what is
    older lies in a temporary file.
    """
    log = RecordLog(memory_bytes)
    requests = [0]

    def listen(boundary: Boundary) -> None:
        log.append(encode(boundary), boundary.step, boundary.time)
        requests[0] += isinstance(boundary, EngineCoreRequest)

    tap = getattr(source, "tap", None)
    if not isinstance(tap, Tap):
        raise TypeError(f"{source!r} has no tap; record an LLM, a replay or an attached engine")
    if attention and not isinstance(source, MeasuresAttention):
        raise TypeError(
            f"{source!r} cannot measure attention; record an LLM, or leave attention=True out"
        )
    # Opened before anything is recorded, so that a bad path is an error here.
    file: BinaryIO | None = None if path is None else open(path, "w+b")  # noqa: SIM115
    subscription: Subscription | None = None
    measure: Closeable | None = None
    try:
        if attention:
            assert isinstance(source, MeasuresAttention)
            measure = source.measure_attention()
        snapshot, subscription = tap.follow(listen)
        if file is not None:
            write_preamble(file, snapshot)
            log.write_to(file, str(path))
    except BaseException:
        if subscription is not None:
            subscription.close()
        if measure is not None:
            measure.close()
        if file is not None:
            file.close()
        raise
    return Recording(log, snapshot, requests, subscription, measure=measure)


def open_recording(path: str | Path, *, partial: bool = False) -> Recording:
    """A saved recording. Needs no torch, whatever engine it comes from.

    RecordingError when the file is none, is of a newer format, or is damaged or cut, with
    the byte at which it is. With partial=True what lies before that byte is kept;
    `Recording.damage` says what was wrong.
    """
    name = str(path)
    file = open(path, "rb")  # noqa: SIM115  the recording reads from it later
    try:
        snapshot = read_preamble(file, name)
        log = RecordLog(0)
        log.read_from(file, name)
        requests, damage = [0], None
        try:
            for chunk, structs in scan_chunks(file, name):
                heads = [_read_head(data, name, chunk.offset) for data in structs]
                requests[0] += sum(head.type == EngineCoreRequest.__name__ for head in heads)
                log.adopt(chunk, [(head.step, head.time) for head in heads])
        except RecordingError as error:
            if not partial:
                raise RecordingError(
                    f"{error}; open_recording(path, partial=True) keeps the {len(log)} structs "
                    "before it"
                ) from error
            damage = str(error)
    except BaseException:
        file.close()
        raise
    log.close()
    return Recording(log, snapshot, requests, damage=damage)


class Recording:
    """Structs of a stream in order, and the snapshot with which it begins.

    Made by `record` and `open_recording`. It grows while it is open, and can be read all
    the time, from any thread.

    snapshot   the engine before the first struct
    damage     what was wrong with the file, when it was opened with partial=True
    """

    def __init__(
        self,
        log: RecordLog,
        snapshot: EngineSnapshot,
        num_requests: Sequence[int],
        subscription: Subscription | None = None,
        damage: str | None = None,
        measure: Closeable | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.damage = damage
        self._log = log
        self._num_requests = num_requests
        self._subscription = subscription
        self._frames = Frames(snapshot, self.boundaries)
        self._views = Timetable(snapshot, log)
        # Not a method of this object, or nobody could ever let go of it.
        self._finalizer = weakref.finalize(self, _end, subscription, log, measure)

    # -- its life --------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it still grows."""
        return self._subscription is not None and self._subscription.is_open

    @property
    def error(self) -> BaseException | None:
        """What ended it early, such as a full disk; None when nothing did."""
        return None if self._subscription is None else self._subscription.error

    def close(self) -> None:
        """Record no more; what there is can still be read. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- reading ---------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Settings of the engine."""
        return self.snapshot.info

    @property
    def start_time(self) -> float:
        """Seconds on the engine's clock from which `at(time=)` and `frames` count.

        The time of the snapshot, or of the first struct when the engine had not run.
        """
        times = self._log.times
        return self.snapshot.time or (times[0] if times else 0.0)

    @property
    def steps(self) -> range:
        """What `at(step=)` takes. The first is the state in which the recording began."""
        first, steps = self.snapshot.step, self._log.steps
        return range(first, max(first, steps[-1] if steps else first) + 1)

    @property
    def boundaries(self) -> Boundaries:
        """The structs in order, each decoded when it is asked for."""
        return Boundaries(self._log)

    def __len__(self) -> int:
        """Structs so far."""
        return len(self._log)

    def at(self, step: int | None = None, *, time: float | None = None) -> EngineView:
        """The engine after a step, or at a time, in seconds since the recording began.

        A step ends before the first struct of the next one, so requests that came in
        between belong to it. With neither argument: at the end. The view is the caller's;
        nothing changes it later. RecordingError for a moment that was not recorded.
        """
        if step is not None and time is not None:
            raise TypeError("at() takes a step or a time, not both")
        if time is not None:
            if time < 0:
                raise RecordingError(
                    f"time is {time}; this recording has {self._span()}, counted from its start"
                )
            return self._views.at(bisect.bisect_right(self._log.times, self.start_time + time))
        return self._views.at(len(self) if step is None else self.count_to(step))

    def count_to(self, step: int) -> int:
        """How many structs there are up to the end of a step; RecordingError as in `at`."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step is {step!r}; it takes an integer")
        if step not in self.steps:
            raise RecordingError(
                f"step is {step}; this recording has the steps {self.steps[0]} to {self.steps[-1]}"
            )
        return bisect.bisect_right(self._log.steps, step)

    def after(self, count: int) -> EngineView:
        """The engine after the first `count` structs; the view is the caller's."""
        if not 0 <= count <= len(self):
            raise RecordingError(f"count is {count}; this recording has {len(self)} structs")
        return self._views.at(count)

    def structs_of(self, step: int) -> list[AnyBoundary]:
        """The structs of one step in order, requests that came in after it included."""
        steps = self._log.steps
        first = bisect.bisect_left(steps, step)
        return self.boundaries[first : bisect.bisect_right(steps, step)]

    def why(self, request_id: str, step: int | None = None) -> Why:
        """Why a request ran, waited or lost its place in a step, and what it would have needed.

        Without a step: the last one in which it was live. RecordingError for a step or a
        request that is not there, naming those that are.
        """
        from lmscope.scope.questions import why_in_recording

        return why_in_recording(self, request_id, step)

    def provenance(self, request_id: str) -> Provenance:
        """Where each token of a request came from, and why the prefix cache missed the rest.

        The first question goes through the whole recording once, later ones through what is
        new. RecordingError for a request that is not there, naming those that are.
        """
        from lmscope.scope.provenance import provenance_of

        with self._history.caught_up() as history:
            return provenance_of(history, request_id)

    def block(self, block_id: int, step: int | None = None) -> BlockStory:
        """All that happened to a block, and its state after a step; without one: at the end.

        RecordingError for a block or a step that is not there, naming those that are.
        """
        from lmscope.scope.block_story import block_story

        view = self.at(step)
        with self._history.caught_up() as history:
            return block_story(history, view, block_id, self.start_time)

    @cached_property
    def _history(self) -> History:
        from lmscope.scope.history import History

        return History(self.snapshot, self._log)

    @property
    def frames(self) -> Frames:
        """The recording as pandas data frames: .steps .requests .blocks .tokens .decisions"""
        return self._frames

    @property
    def plot(self) -> Plots:
        """plotly figures of the run: .timeline() .latency() .blocks_over_time() .hit_rate()"""
        from lmscope.scope.plots import Plots

        return Plots(self)

    # -- keeping and sharing -----------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all there is to a file, which appears whole or not at all."""
        replace_file(path, self._write)

    def to_html(self, path: str | Path) -> None:
        """Write one page with the whole run: no network, no kernel, a slider over the steps.

        It holds prompts and outputs in plain text.
        """
        from lmscope.scope.html import write_html

        write_html(self, path)

    def to_perfetto(self, path: str | Path) -> None:
        """Write a trace that the Perfetto UI opens: requests, steps, and counters.

        It holds ids and counts, and no text.
        """
        from lmscope.scope.perfetto import write_perfetto

        write_perfetto(self, path)

    def redact(self) -> Recording:
        """A copy that can be shown to others: without text, and with other numbers for tokens.

        Equal tokens keep equal numbers, so that shared prefixes stay visible; block hashes
        are replaced the same way. Request ids, counts, times and log probabilities stay.
        Somebody who sees many tokens may guess frequent ones by their frequency.
        """
        from lmscope.scope.redact import Redactor

        redactor = Redactor()
        snapshot = redactor.snapshot(self.snapshot)
        log = RecordLog(_MEMORY_BYTES)
        for boundary in self.boundaries:
            log.append(encode(redactor.boundary(boundary)), boundary.step, boundary.time)
        log.close()
        return Recording(log, snapshot, self._num_requests[:], damage=self.damage)

    def __repr__(self) -> str:
        steps = self.steps
        state = "open" if self.is_open else "closed"
        if self.error is not None:
            state = f"ended by {self.error!r}"
        elif self.damage is not None:
            state = "partial"
        return (
            f"<Recording of {self.info.model}: steps {steps[0]} to {steps[-1]}, "
            f"{self._num_requests[0]} requests, {len(self)} structs, {state}>"
        )

    def _write(self, file: BinaryIO) -> None:
        write_preamble(file, self.snapshot)
        count = len(self)
        for start in range(0, count, _SAVED_CHUNK_STRUCTS):
            stop = min(count, start + _SAVED_CHUNK_STRUCTS)
            write_chunk(file, list(self._log.read(start, stop)), level=6)
        write_end(file)

    def _span(self) -> str:
        times = self._log.times
        return f"{times[-1] - self.start_time:.3f} s" if times else "no structs"


class Boundaries(Sequence[AnyBoundary]):
    """The structs of a recording, decoded one at a time."""

    def __init__(self, log: RecordLog) -> None:
        self._log = log

    def __len__(self) -> int:
        return len(self._log)

    def __iter__(self) -> Iterator[AnyBoundary]:
        """Those that there are when the loop begins."""
        return map(decode, self._log.read(0, len(self._log)))

    @overload
    def __getitem__(self, key: int) -> AnyBoundary: ...
    @overload
    def __getitem__(self, key: slice) -> list[AnyBoundary]: ...
    def __getitem__(self, key: int | slice) -> AnyBoundary | list[AnyBoundary]:
        count = len(self._log)
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(count))]
        position = key + count if key < 0 else key
        if not 0 <= position < count:
            raise IndexError(f"index is {key}; the recording has {count} structs")
        return decode(next(self._log.read(position, position + 1)))


class _Head(msgspec.Struct):
    """What every struct begins with."""

    type: str
    step: int = 0
    time: float = 0.0


_KINDS = frozenset(kind.__name__ for kind in BOUNDARIES)


def _read_head(data: bytes, name: str, offset: int) -> _Head:
    try:
        head = msgspec.msgpack.decode(data, type=_Head)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{name} is damaged at byte {offset}: {error}") from error
    if head.type not in _KINDS:
        raise RecordingError(f"{name} has an unknown struct {head.type!r} at byte {offset}")
    return head


def _end(subscription: Subscription | None, log: RecordLog, measure: Closeable | None) -> None:
    if subscription is not None:
        subscription.close()
    if measure is not None:
        measure.close()
    log.close()
