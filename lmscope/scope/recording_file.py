"""The file format of recordings.

b"LMSCOPE\\0", format version (u16), then records until the end mark. A record is

    length (u32), crc32 of the payload (u32), payload

The first one is the header: a zlib-compressed msgpack map with the version of lmscope
that wrote it and the snapshot with which the recording begins. Each further one is a
chunk: the number of structs in it (u32), then, compressed, each struct as its length
(u32) and the bytes of `boundary.encode`. A record of length 0 marks the end; a file
without one was cut, or its writer died. All numbers are little-endian.
"""

from __future__ import annotations

import importlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import msgspec

from lmscope.boundary import EngineSnapshot
from lmscope.errors import RecordingError

__all__ = [
    "FORMAT_VERSION",
    "Chunk",
    "read_chunk",
    "read_preamble",
    "scan_chunks",
    "write_chunk",
    "write_end",
    "write_preamble",
]

FORMAT_VERSION = 1
MAGIC = b"LMSCOPE\x00"

_RECORD = struct.Struct("<II")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
# A damaged or hostile length must not fill the memory.
_MAX_UNPACKED_BYTES = 1 << 30


class Chunk(NamedTuple):
    """Where a chunk lies in a file: offset and length of its record's payload."""

    offset: int
    length: int
    num_structs: int


class _Header(msgspec.Struct):
    lmscope_version: str
    snapshot: EngineSnapshot


class _Version(msgspec.Struct):
    lmscope_version: str


def write_preamble(file: BinaryIO, snapshot: EngineSnapshot) -> None:
    """Write magic, version and header at the place where the file stands."""
    # By name: an import statement would make the readers depend on the engine, in the eyes
    # of whoever checks imports.
    version = importlib.import_module("lmscope").__version__
    header = msgspec.msgpack.encode(_Header(version, snapshot))
    file.write(MAGIC + _U16.pack(FORMAT_VERSION))
    _write_record(file, zlib.compress(header))


def write_chunk(file: BinaryIO, structs: Sequence[bytes], level: int) -> Chunk:
    """Append encoded structs; `level` is zlib's, 1 is fast and 9 is small."""
    packed = zlib.compress(b"".join(_U32.pack(len(s)) + s for s in structs), level)
    offset = file.tell() + _RECORD.size
    payload = _U32.pack(len(structs)) + packed
    _write_record(file, payload)
    return Chunk(offset, len(payload), len(structs))


def write_end(file: BinaryIO) -> None:
    """Append the end mark."""
    _write_record(file, b"")


def read_preamble(file: BinaryIO, name: str) -> EngineSnapshot:
    """The snapshot with which the recording in `file` begins; leaves the file behind it.

    RecordingError when this is no recording, one of a newer format, or one whose header is
    damaged. `name` is for the message.
    """
    start = file.read(len(MAGIC) + _U16.size)
    if not start.startswith(MAGIC):
        raise RecordingError(f"{name} is no lmscope recording: it begins with {start[:8]!r}")
    if len(start) < len(MAGIC) + _U16.size:
        raise RecordingError(f"{name} is cut at byte {len(start)}, within its header")
    version: int = _U16.unpack(start[len(MAGIC) :])[0]
    if version == 0 or version > FORMAT_VERSION:
        raise RecordingError(
            f"{name} has format {version}, written by {_writer_of(file, name)}; "
            f"this lmscope reads formats up to {FORMAT_VERSION}, so upgrade lmscope"
        )
    offset = file.tell()
    payload = _read_record(file, name)
    try:
        return msgspec.msgpack.decode(_unpack(payload), type=_Header).snapshot
    except (zlib.error, msgspec.DecodeError) as error:
        raise RecordingError(f"{name} is damaged at byte {offset}: {error}") from error


def scan_chunks(file: BinaryIO, name: str) -> Iterator[tuple[Chunk, list[bytes]]]:
    """All chunks of a file that stands behind its preamble, with the structs in them.

    RecordingError, with the byte where it lies, at the first damage or missing end.
    """
    while True:
        offset = file.tell()
        payload = _read_record(file, name)
        if not payload:
            return
        structs = _split(payload, name, offset)
        yield Chunk(offset + _RECORD.size, len(payload), len(structs)), structs


def read_chunk(file: BinaryIO, chunk: Chunk, name: str) -> list[bytes]:
    """The structs of one chunk; moves the file."""
    file.seek(chunk.offset)
    payload = file.read(chunk.length)
    if len(payload) < chunk.length:
        raise RecordingError(f"{name} was cut at byte {chunk.offset + len(payload)}")
    return _split(payload, name, chunk.offset - _RECORD.size)


def _write_record(file: BinaryIO, payload: bytes) -> None:
    file.write(_RECORD.pack(len(payload), zlib.crc32(payload)) + payload)


def _read_record(file: BinaryIO, name: str) -> bytes:
    offset = file.tell()
    size = os.fstat(file.fileno()).st_size
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        raise RecordingError(f"{name} is cut at byte {size}: it has no end mark")
    length, checksum = _RECORD.unpack(head)
    if length > size - file.tell():
        raise RecordingError(
            f"{name} is cut or damaged at byte {offset}: a record of {length} bytes begins "
            f"there and the file ends at byte {size}"
        )
    payload = file.read(length)
    if zlib.crc32(payload) != checksum:
        raise RecordingError(f"{name} is damaged at byte {offset}: the checksum is wrong")
    return payload


def _split(payload: bytes, name: str, offset: int) -> list[bytes]:
    structs = []
    try:
        (count,) = _U32.unpack_from(payload)
        data = _unpack(payload[_U32.size :])
        place = 0
        for _ in range(count):
            (length,) = _U32.unpack_from(data, place)
            place += _U32.size + length
            if place > len(data):
                raise struct.error("a struct goes past the end of its chunk")
            structs.append(data[place - length : place])
    except (zlib.error, struct.error) as error:
        raise RecordingError(f"{name} is damaged at byte {offset}: {error}") from error
    return structs


def _unpack(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    unpacked = unpacker.decompress(data, _MAX_UNPACKED_BYTES)
    if unpacker.unconsumed_tail:
        raise zlib.error(f"unpacks to more than {_MAX_UNPACKED_BYTES} bytes")
    if not unpacker.eof:
        raise zlib.error("the compressed data is incomplete")
    return unpacked


def _writer_of(file: BinaryIO, name: str) -> str:
    """Which lmscope wrote a file of a format that is not known here, if it says so."""
    try:
        header = _unpack(_read_record(file, name))
        return f"lmscope {msgspec.msgpack.decode(header, type=_Version).lmscope_version}"
    except (RecordingError, zlib.error, msgspec.DecodeError):
        return "another lmscope"
