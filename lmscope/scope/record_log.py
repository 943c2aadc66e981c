"""RecordLog: encoded structs in order, in memory, and in a file when they are many.

One thread appends; any thread reads.
"""

from __future__ import annotations

import bisect
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

from lmscope.errors import RecordingError
from lmscope.scope.recording_file import Chunk, read_chunk, write_chunk, write_end

__all__ = ["RecordLog"]

# Bytes of encoded structs that make a chunk.
_CHUNK_BYTES = 1 << 17
# A file that is written as it goes gets what there is at least this often.
_FLUSH_S = 1.0


class RecordLog:
    """The structs of one recording, as bytes, and the step and time of each.

    memory_bytes    what may stay in memory; beyond it the oldest go to a temporary file
    steps, times    one entry per struct, never falling: a struct of an earlier step that
                    comes late counts for the step in which it came
    """

    def __init__(self, memory_bytes: int) -> None:
        self.steps = array("q")
        self.times = array("d")
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._is_closed = False
        # sealed chunks, in memory or where in the file they lie, and their first positions
        self._chunks: list[tuple[bytes, ...] | Chunk] = []
        self._starts: list[int] = []
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._kept_bytes = 0
        # of the sealed chunks, the oldest are in the file
        self._num_written = 0
        self._file: BinaryIO | None = None
        self._name = ""
        self._is_spool = True
        self._flushed_at = 0.0
        self._unpacked: tuple[int, tuple[bytes, ...]] = (-1, ())

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, data: bytes, step: int, time: float) -> None:
        """Add one struct. After `close` it is dropped.

        In memory this appends to lists. With a file, now and then a chunk is compressed
        and written, which is where a full disk raises OSError.
        """
        with self._lock:
            if self._is_closed:
                return
            if self.steps:
                step, time = max(step, self.steps[-1]), max(time, self.times[-1])
            self._open.append(data)
            self._open_bytes += len(data)
            # The index comes last: who sees the length can read the struct.
            self.times.append(time)
            self.steps.append(step)
            if self._open_bytes >= _CHUNK_BYTES or (
                not self._is_spool and time - self._flushed_at >= _FLUSH_S
            ):
                self._seal(time)

    def write_to(self, file: BinaryIO, name: str) -> None:
        """Move what there is, and all that follows, to the end of a file."""
        with self._lock:
            self._use(file, name)
            self._is_spool = False
            self._memory_bytes = 0
            self._spill()

    def read_from(self, file: BinaryIO, name: str) -> None:
        """Say in which file the chunks lie that `adopt` will be given."""
        self._use(file, name)

    def adopt(self, chunk: Chunk, heads: list[tuple[int, float]]) -> None:
        """Take a chunk that lies in the file already; `heads` are its steps and times."""
        self._chunks.append(chunk)
        self._num_written += 1
        self._starts.append(len(self.steps))
        for step, time in heads:
            self.times.append(max(time, self.times[-1]) if self.times else time)
            self.steps.append(max(step, self.steps[-1]) if self.steps else step)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Structs `start` to `stop - 1`."""
        position = start
        while position < stop:
            first, structs = self._chunk_with(position)
            yield from structs[position - first : stop - first]
            position = first + len(structs)

    def close(self) -> None:
        """Take no more; a file that is written as it goes gets its rest and its end mark."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._file is not None and not self._is_spool:
                self._seal(0.0)
                self._file.seek(0, 2)
                write_end(self._file)
                self._file.flush()

    def _use(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        # Whoever still reads holds this log, so its file must live as long.
        weakref.finalize(self, file.close)

    # -- below here, the lock is held ------------------------------------------

    def _seal(self, time: float) -> None:
        if self._open:
            self._starts.append(len(self.steps) - len(self._open))
            self._chunks.append(tuple(self._open))
            self._kept_bytes += self._open_bytes
            self._open, self._open_bytes = [], 0
        self._flushed_at = time
        self._spill()

    def _spill(self) -> None:
        """Write the oldest chunks until what stays in memory is within its limit.

        One by one, so that no single step of the engine pays for all.
        """
        while self._kept_bytes > self._memory_bytes:
            if self._file is None:
                # Closed, and so deleted, with the log.
                spool: IO[bytes] = tempfile.TemporaryFile(prefix="lmscope-")  # noqa: SIM115
                self._use(cast(BinaryIO, spool), "the temporary file")
            assert self._file is not None
            structs = self._chunks[self._num_written]
            assert not isinstance(structs, Chunk)
            self._file.seek(0, 2)
            self._chunks[self._num_written] = write_chunk(self._file, structs, level=1)
            self._file.flush()
            self._num_written += 1
            self._kept_bytes -= sum(map(len, structs))

    # -- and here it is not ------------------------------------------------------

    def _chunk_with(self, position: int) -> tuple[int, tuple[bytes, ...]]:
        """First position and structs of the chunk that has this one."""
        with self._lock:
            place = bisect.bisect_right(self._starts, position) - 1
            sealed = self._starts[place] if place >= 0 else 0
            chunk = self._chunks[place] if place >= 0 else ()
            length = chunk.num_structs if isinstance(chunk, Chunk) else len(chunk)
            if position >= sealed + length:
                return len(self.steps) - len(self._open), tuple(self._open)
            if not isinstance(chunk, Chunk):
                return sealed, chunk
            if self._unpacked[0] != place:
                if self._file is None or self._file.closed:
                    raise RecordingError(f"{self._name} is closed")
                structs = tuple(read_chunk(self._file, chunk, self._name))
                self._unpacked = (place, structs)
            return sealed, self._unpacked[1]
