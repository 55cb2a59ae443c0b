"""The ZeroMQ frames around a payload, and recordings of them.

Live (PUB to SUB): `[topic, seq, payload]`, seq as 8 bytes big-endian.
Request (DEALER to ROUTER): `[b"", start_seq]`; the ROUTER sees the identity before them.
Reply, one message for each batch from start_seq: `[b"", seq, payload]` up to vLLM 0.25 and SGLang
0.5.21, `[b"", topic, seq, payload]` since; the last has the seq END_SEQ and an empty payload.

A recording is a file of what a SUB socket and a replay's DEALER received: records without a header.
One record: the byte `L` (live), `R` (replay reply) or `P` (publisher), the number of frames as u32
big-endian, then for each frame its length as u32 big-endian and its bytes. A `P` record says whose
messages follow: its frames are the worker's name and, as a decimal, the dp_rank of the port.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Final, Literal, TypeAlias

import msgspec

from kvindex.wire.errors import DecodeError, EncodeError

END_SEQ: Final = 2**64 - 1
"""The seq of the message that ends a replay."""

_SEQ_BYTES: Final = 8
_MAX_START_BYTES: Final = 64


class LiveFrame(msgspec.Struct, frozen=True):
    """One live message: its topic, its number, and the event batch as bytes."""

    topic: bytes
    seq: int
    payload: bytes


class ReplayReply(msgspec.Struct, frozen=True):
    """One message of a replay.

    Attributes:
        topic: the topic frame, or None from engines that send none.
        seq: the batch's number; END_SEQ at the end.
        payload: the event batch as bytes; empty at the end.
        end: True if the publisher has no more to send. That is no proof that nothing was
            lost on the way: check that the numbers have no hole.
    """

    topic: bytes | None
    seq: int
    payload: bytes
    end: bool


def parse_live(frames: Sequence[bytes]) -> LiveFrame:
    r"""Return the parts of a message received on a SUB socket.

    Raises:
        DecodeError: not 3 frames, or a seq that is not 8 bytes.

    Examples:
        >>> parse_live([b"kv", b"\x00" * 7 + b"\x05", b"..."]).seq
        5
    """
    if len(frames) != 3:
        raise _refused("live message", frames, "3 frames: topic, seq, payload")
    return LiveFrame(frames[0], _seq(frames), frames[2])


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames that a publisher sends for one batch.

    Raises:
        EncodeError: seq is not in 0 to 2**64 - 1.
    """
    return [topic, _seq_bytes(seq), payload]


def parse_replay(frames: Sequence[bytes]) -> ReplayReply:
    r"""Return the parts of a reply received on a DEALER socket, in either shape.

    Raises:
        DecodeError: not 3 or 4 frames, the first not empty, or a seq that is not 8 bytes.

    Examples:
        >>> parse_replay([b"", b"kv", b"\x00" * 8, b"..."]).topic
        b'kv'
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise _refused("replay reply", frames, "an empty frame, a topic or none, seq, payload")
    seq, payload = _seq(frames), frames[-1]
    # vLLM 0.26 and SGLang 0.5.22 began to repeat the topic.
    topic = frames[1] if len(frames) == 4 else None
    return ReplayReply(topic, seq, payload, seq == END_SEQ and not payload)


def replay_request(start_seq: int) -> list[bytes]:
    """Return the frames with which a DEALER asks for every batch from start_seq.

    END_SEQ asks for none: the publisher replies with the end only, which proves that it lives.

    Raises:
        EncodeError: start_seq is not in 0 to 2**64 - 1.
    """
    return [b"", _seq_bytes(start_seq)]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the asker's identity and start_seq from a message received on a ROUTER socket.

    The number may have any length up to 64 bytes, as the engines accept it.

    Raises:
        DecodeError: not `[identity, b"", start_seq]`.
    """
    if len(frames) != 3 or frames[1] or len(frames[2]) > _MAX_START_BYTES:
        raise _refused("replay request", frames, "identity, an empty frame, start_seq")
    return frames[0], int.from_bytes(frames[2], "big")


def replay_frames(
    identity: bytes, topic: bytes, seq: int, payload: bytes, *, with_topic: bool
) -> list[bytes]:
    """Return the frames with which a ROUTER sends one batch of a replay.

    Raises:
        EncodeError: seq is not in 0 to 2**64 - 1.
    """
    head = [identity, b"", topic] if with_topic else [identity, b""]
    return [*head, _seq_bytes(seq), payload]


def replay_end(identity: bytes, *, with_topic: bool) -> list[bytes]:
    """Return the frames with which a ROUTER ends a replay; a topic, if any, is empty."""
    return replay_frames(identity, b"", END_SEQ, b"", with_topic=with_topic)


def _seq(frames: Sequence[bytes]) -> int:
    frame = frames[-2]
    if len(frame) != _SEQ_BYTES:
        raise DecodeError(
            f"seq has {len(frame)} bytes, not {_SEQ_BYTES} (payload of {len(frames[-1])} bytes)",
            size=len(frames[-1]),
        )
    return int.from_bytes(frame, "big")


def _seq_bytes(seq: int) -> bytes:
    try:
        return seq.to_bytes(_SEQ_BYTES, "big")
    # AttributeError: a program's float or None. To ask for the type first would cost each message.
    except (OverflowError, AttributeError):
        raise EncodeError(f"seq is {seq!r}, not an int from 0 to 2**64 - 1") from None


def _refused(what: str, frames: Sequence[bytes], expected: str) -> DecodeError:
    lengths = ", ".join(str(len(frame)) for frame in frames[:8])
    message = f"{what} of {len(frames)} frames (bytes: {lengths or 'none'}); expected {expected}"
    return DecodeError(message, size=sum(map(len, frames)))


# Recordings -------------------------------------------------------------------------------------

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
            frames = []
            for _ in range(self._number("frames", MAX_FRAMES)):
                frames.append(self._exactly(self._number("frame bytes", MAX_FRAME_BYTES)))
            yield RecordedMessage(kind, frames)

    def _number(self, what: str, limit: int) -> int:
        number = int.from_bytes(self._exactly(4), "big")
        # Before so much is read: of a damaged file any number may stand here.
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
