"""The form of a message in chunks.

A message is one body and its kind, a number that the ring passes on. A body that is longer than a
chunk goes in fragments: the first begins with the body's length (u64, little-endian), all but the
last are marked "more follows", all but the first "continues". A message that was abandoned midway
is followed by a chunk that does not continue it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from kvindex.wire.errors import DecodeError

Buffer = bytes | bytearray | memoryview
"""Bytes that a message is made of."""

RAW = 0
"""The kind of a message that is the caller's bytes as they are; other kinds are up to 15."""

MORE, CONTINUED = 0x10, 0x20
_KIND = 0x0F
_TOTAL = struct.Struct("<Q")
LENGTH_BYTES = _TOTAL.size


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
    """Joins fragments to messages. Belongs to one reader; `given_up` counts unfinished ones."""

    def __init__(self, max_bytes: int) -> None:
        self.given_up = 0
        self._max_bytes = max_bytes
        self._body: bytearray | None = None
        self._kind = 0
        self._filled = 0

    def add(self, kind: int, piece: Buffer) -> tuple[int, Buffer] | None:
        """Add a chunk; return a message's kind and body if the chunk completes it.

        Raises:
            DecodeError: a fragment that cannot belong where it is; the message is dropped.
        """
        if not kind & CONTINUED:
            self.give_up()
            if not kind & MORE:
                return kind, piece
            self._begin(kind & _KIND, memoryview(piece))
            return None
        body = self._body
        if body is None:
            return None  # the rest of a message whose beginning came before this reader
        end = self._filled + len(piece)
        if end > len(body) or kind & _KIND != self._kind or (end < len(body)) != bool(kind & MORE):
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
