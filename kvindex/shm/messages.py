"""What a message looks like in chunks.

A message is one body of a kind: the caller's bytes as they are, an encoded object, or an encoded
object with out-of-band buffers. One that is longer than a chunk goes through the ring in
fragments: the first begins with the message's length, all but the last say that more follows, all
but the first that they continue. A message that was given up midway is followed by one that does
not continue it.

A body with buffers: count of them (u32), length of the encoded object and of each buffer (u64),
little-endian, then the object and the buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from kvindex.errors import DecodeError, EncodeError
from kvindex.shm.codec import Buffer, Codec

__all__ = [
    "BUFFERS",
    "CONTINUED",
    "ENCODED",
    "LENGTH_BYTES",
    "MORE",
    "RAW",
    "Assembly",
    "body_of",
    "decode",
    "fragments",
]

RAW, ENCODED, BUFFERS = 0, 1, 2
MORE, CONTINUED = 0x10, 0x20
_BODY = 0x0F
_COUNT = struct.Struct("<I")
_TOTAL = struct.Struct("<Q")
LENGTH_BYTES = _TOTAL.size
_MAX_BUFFERS = 1 << 16


def body_of(obj: Any, codec: Codec) -> tuple[int, Buffer | list[Buffer], int]:
    """Return an object's kind, its body as a buffer or as several, and the body's length.

    Raises:
        EncodeError: the codec cannot carry the object.
    """
    if type(obj) is bytes:
        return RAW, obj, len(obj)
    data, buffers = codec.encode(obj)
    if not buffers:
        return ENCODED, data, len(data)
    if len(buffers) > _MAX_BUFFERS:
        raise EncodeError(f"{len(buffers)} buffers in a message: at most {_MAX_BUFFERS}")
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = [len(data), *map(len, views)]
    head = _COUNT.pack(len(views)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    parts: list[Buffer] = [head, data, *views]
    return BUFFERS, parts, len(head) + sum(lengths)


def decode(kind: int, body: Buffer, codec: Codec) -> Any:
    """Return the object of a body; nothing of it is kept.

    Raises:
        DecodeError: the body is not what its kind says.
    """
    if kind == ENCODED:
        return codec.decode(body, ())
    if kind == RAW:
        return body if type(body) is bytes else bytes(body)
    if kind == BUFFERS:
        return _decode_with_buffers(memoryview(body), codec)
    raise DecodeError(f"a message of unknown kind {kind}", size=len(body))


def _decode_with_buffers(body: memoryview, codec: Codec) -> Any:
    size = len(body)
    if size < _COUNT.size:
        raise DecodeError("a message with buffers that does not say how many", size=size)
    (count,) = _COUNT.unpack_from(body)
    start = _COUNT.size + 8 * (count + 1)
    if count > _MAX_BUFFERS or start > size:
        raise DecodeError(f"a message of {size} bytes with {count} buffers", size=size)
    lengths = struct.unpack_from(f"<{count + 1}Q", body, _COUNT.size)
    if start + sum(lengths) != size:
        raise DecodeError(f"buffers of {sum(lengths)} bytes in a message of {size}", size=size)
    parts: list[memoryview] = []
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return codec.decode(parts[0], [bytearray(part) for part in parts[1:]])


def fragments(
    kind: int, parts: Sequence[Buffer], size: int, chunk_bytes: int
) -> Iterator[tuple[int, list[Buffer]]]:
    """Return a long body in pieces of at most `chunk_bytes`, each with its kind."""
    piece: list[Buffer] = [_TOTAL.pack(size)]
    room = chunk_bytes - LENGTH_BYTES
    left = size
    flags = MORE
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            taken, view = view[:room], view[room:]
            piece.append(taken)
            room -= len(taken)
            left -= len(taken)
            if room == 0 and left:
                yield kind | flags, piece
                flags = MORE | CONTINUED
                piece, room = [], chunk_bytes
    yield kind | CONTINUED, piece


class Assembly:
    """Fragments becoming a message again. Belongs to one reader.

    Args:
        max_bytes: longest message that is accepted, in bytes.

    Attributes:
        given_up: messages whose end never came.
    """

    def __init__(self, max_bytes: int) -> None:
        self.given_up = 0
        self._max_bytes = max_bytes
        self._body: bytearray | None = None
        self._kind = 0
        self._filled = 0

    def add(self, kind: int, piece: Buffer) -> tuple[int, Buffer] | None:
        """Take a chunk; return a message's kind and body when that made it whole.

        Raises:
            DecodeError: a fragment that cannot belong where it is; the message is given up.
        """
        if not kind & CONTINUED:
            self.give_up()
            if not kind & MORE:
                return kind, piece
            self._begin(kind & _BODY, memoryview(piece))
            return None
        body = self._body
        if body is None:
            return None  # the rest of a message whose beginning came before this reader
        end = self._filled + len(piece)
        if end > len(body) or kind & _BODY != self._kind or (end < len(body)) != bool(kind & MORE):
            size = len(body)
            self.give_up()
            raise DecodeError(f"a fragment to byte {end} of a message of {size}", size=size)
        body[self._filled : end] = piece
        self._filled = end
        if kind & MORE:
            return None
        self._body = None
        return self._kind, body

    @property
    def begun(self) -> bool:
        """Whether there are fragments of a message that is not whole."""
        return self._body is not None

    def give_up(self) -> None:
        """Drop a message that was begun."""
        if self._body is not None:
            self._body = None
            self.given_up += 1

    def _begin(self, kind: int, piece: memoryview) -> None:
        if len(piece) < LENGTH_BYTES:
            raise DecodeError("a first fragment without a length", size=len(piece))
        (total,) = _TOTAL.unpack_from(piece)
        first = len(piece) - LENGTH_BYTES
        if not first < total <= self._max_bytes:
            raise DecodeError(
                f"a message of {total} bytes that begins with {first}; at most {self._max_bytes} "
                "are accepted (max_message_bytes)",
                size=total,
            )
        self._body = bytearray(total)
        self._body[:first] = piece[LENGTH_BYTES:]
        self._kind = kind
        self._filled = first
