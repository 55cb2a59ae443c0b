"""Recorded frames in a file: what a SUB socket and a replay's DEALER received, message by message.

A recording is a sequence of records without a header. One record: the byte `L` (live), `R` (replay
reply) or `P` (publisher), the number of frames as u32 big-endian, then for each frame its length as
u32 big-endian and its bytes. A `P` record says whose messages follow: its frames are the worker's
name and, as a decimal, the dp_rank of the port.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final, Literal, TypeAlias

import msgspec

from kvindex.wire.errors import DecodeError, EncodeError

MAX_FRAMES: Final = 16
"""Most frames in one recorded message; engines send up to 4."""

MAX_FRAME_BYTES: Final = 256 * 2**20
"""Most bytes in one recorded frame."""

Kind: TypeAlias = Literal["live", "replay", "publisher"]

_KINDS: Final[dict[bytes, Kind]] = {b"L": "live", b"R": "replay", b"P": "publisher"}
_MARKS: Final = {kind: mark for mark, kind in _KINDS.items()}


class RecordedMessage(msgspec.Struct, frozen=True):
    """One message as it was received, on which socket; or the publisher of those that follow."""

    kind: Kind
    frames: list[bytes]


def read_recording(source: str | os.PathLike[str] | BinaryIO) -> Iterator[RecordedMessage]:
    """Yield each message of a recording, in order.

    Args:
        source: a path, or a file opened for reading bytes (left open, at its end).

    Raises:
        DecodeError: the file is cut off inside a record, or no recording; the message has the byte.
        OSError: the path cannot be read.

    Complexity: O(one message) of memory.
    """
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            yield from _Reader(file).messages()
    else:
        yield from _Reader(source).messages()


class _Reader:
    """Reads records from a file and counts its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._offset = 0

    def messages(self) -> Iterator[RecordedMessage]:
        while mark := self._file.read(1):
            self._offset += 1
            kind = _KINDS.get(mark)
            if kind is None:
                raise self._error(f"{mark!r} is no record's first byte (b'L', b'R' or b'P')")
            n_frames = self._number("frames", MAX_FRAMES)
            yield RecordedMessage(kind, [self._frame() for _ in range(n_frames)])

    def _frame(self) -> bytes:
        return self._exactly(self._number("frame bytes", MAX_FRAME_BYTES))

    def _number(self, what: str, limit: int) -> int:
        number = int.from_bytes(self._exactly(4), "big")
        if number > limit:
            raise self._error(f"{number} {what} claimed, at most {limit} allowed")
        return number

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        self._offset += len(data)
        if len(data) < size:
            raise self._error(f"cut off: {size - len(data)} of {size} bytes are missing")
        return data

    def _error(self, message: str) -> DecodeError:
        return DecodeError(f"recording, byte {self._offset}: {message}", size=self._offset)


class RecordingWriter:
    """Writes messages to a file in the format that `read_recording` reads.

    Thread safety: one writer at a time. The file is the caller's to flush and to close.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> RecordingWriter(file).write("live", [b"", bytes(8), b"payload"])
        >>> _ = file.seek(0)
        >>> [message.kind for message in read_recording(file)]
        ['live']
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, kind: Kind, frames: Sequence[bytes]) -> None:
        """Append one message.

        Args:
            kind: "live" for a SUB socket's message, "replay" for a DEALER's, "publisher" for what
                the module's text describes.
            frames: its frames as received.

        Raises:
            EncodeError: another kind, more than MAX_FRAMES frames, or a frame beyond
                MAX_FRAME_BYTES; nothing is written then.
        """
        if kind not in _MARKS:
            raise EncodeError(f"kind is {kind!r}, not 'live', 'replay' or 'publisher'")
        if len(frames) > MAX_FRAMES or any(len(frame) > MAX_FRAME_BYTES for frame in frames):
            largest = max(map(len, frames))
            raise EncodeError(
                f"{len(frames)} frames of up to {largest} bytes; a recording takes {MAX_FRAMES} "
                f"frames of {MAX_FRAME_BYTES} bytes"
            )
        record = [_MARKS[kind], len(frames).to_bytes(4, "big")]
        for frame in frames:
            record += (len(frame).to_bytes(4, "big"), frame)
        self._file.write(b"".join(record))
