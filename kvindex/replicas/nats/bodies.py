"""Bodies of the log: messages of the fan-out, one after the other, each after its length.

A message that is too long for one body is cut, and its pieces are in bodies that follow each other
directly. So a piece is

```
 bit 31      it continues the message of the piece before it
 bit 30      the next piece, the first of the next body, continues this one
 bits 29..0  its length, above 0; all of it big-endian
 then        the piece
```

The first message of an epoch has an empty body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from kvindex.wire.errors import DecodeError

MAX_MESSAGE_BYTES = 64 << 20  # of all pieces of a message
AROUND_BYTES = 4  # of a piece
_HEAD = struct.Struct(">I")
_CONTINUES, _IS_CONTINUED, _LENGTH = 1 << 31, 1 << 30, (1 << 30) - 1


def join_bodies(messages: Iterable[bytes]) -> bytes:
    """Return the body of these messages."""
    return b"".join(part for each in messages for part in (_HEAD.pack(len(each)), each))


def cut_message(message: bytes, room: int) -> list[bytes]:
    """Return a message that is too long for one body as bodies of at most `room` bytes."""
    step = room - AROUND_BYTES
    starts = range(0, len(message), step)
    bodies = []
    for start in starts:
        piece = memoryview(message)[start : start + step]
        flags = _CONTINUES * (start > 0) | _IS_CONTINUED * (start + step < len(message))
        bodies.append(b"".join((_HEAD.pack(flags | len(piece)), piece)))
    return bodies


class BodyReader:
    """Splits bodies that follow each other into their messages. Owner: one thread.

    It may begin at any body: pieces at the start that continue a message from before are left out.

    Args:
        most: bytes of a message; more are refused. Memory grows with the bytes read, up to here.
    """

    def __init__(self, most: int = MAX_MESSAGE_BYTES) -> None:
        self._most = most
        self._pieces: list[memoryview] = []
        self._bytes = 0
        self._is_open = False  # a piece must follow
        self._is_first = True  # nothing was read but pieces that continue a message from before

    def split(self, body: bytes) -> Iterator[memoryview]:
        """Yield the messages that end in the next body; raises DecodeError if it is none."""
        view, at = memoryview(body), 0
        while at < len(view):
            if len(view) - at < AROUND_BYTES:
                raise DecodeError("a body ends within a length", size=len(view))
            (head,) = _HEAD.unpack_from(view, at)
            at += AROUND_BYTES
            piece = view[at : at + (head & _LENGTH)]
            at += len(piece)
            if not piece or len(piece) < head & _LENGTH:
                raise DecodeError(f"a piece of {head & _LENGTH} bytes: {len(piece)} follow")
            is_continued = bool(head & _IS_CONTINUED)
            if is_continued and at < len(view):
                raise DecodeError("a message goes on in the next body, and others follow it here")
            yield from self._add(piece, bool(head & _CONTINUES), is_continued)

    def _add(self, piece: memoryview, continues: bool, is_continued: bool) -> Iterator[memoryview]:
        if self._is_first and continues:
            return
        self._is_first = False
        if continues != self._is_open:
            raise DecodeError("a piece continues nothing" if continues else "a piece is missing")
        self._is_open = is_continued
        self._bytes += len(piece)
        if self._bytes > self._most:
            raise DecodeError(f"a message of over {self._most} bytes", size=self._bytes)
        if is_continued:
            self._pieces.append(piece)
            return
        if continues:
            piece = memoryview(b"".join((*self._pieces, piece)))
            self._pieces.clear()
        self._bytes = 0
        yield piece
