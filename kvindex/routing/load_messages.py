"""What gateways send each other: the load that each has booked, in messages of bounded size.

A message is a msgpack array: version, gateway, number, rows. A row is an array: worker, dp_rank,
queued tokens, open requests, decode blocks, and tokens given lately as of the sending. The first
three numbers are sums of the gateway's own open bookings, not changes, so a lost message is made
good by the next one that has the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvindex.wire.errors import UNREADABLE, DecodeError

VERSION: Final = 1
MAX_ROWS: Final = 1_000
"""Rows of one message."""
MAX_BYTES: Final = 1 << 20
"""Bytes of one message; a server's own limit may be lower."""
MAX_NAME: Final = 256
"""Characters of a worker's name."""
MAX_LOAD: Final = 1 << 40
"""The largest number in a row: doubles add 4,096 of these without an error."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOAD)]
LoadRow: TypeAlias = tuple[
    Annotated[str, Meta(max_length=MAX_NAME)],
    Annotated[int, Meta(ge=0, lt=1 << 32)],
    _Count,
    _Count,
    _Count,
    Annotated[float, Meta(ge=0.0, le=float(MAX_LOAD))],
]


class LoadMessage(msgspec.Struct, array_like=True, frozen=True):
    """A gateway's load on some ranks.

    Attributes:
        version: of this format.
        gateway: the sender, by a name that it has drawn at random.
        number: counts the sender's messages, from 1.
        rows: the ranks' loads.
    """

    version: int
    gateway: Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    number: Annotated[int, Meta(ge=1, le=1 << 53)]
    rows: Annotated[list[LoadRow], Meta(max_length=MAX_ROWS)]


class _Head(msgspec.Struct, array_like=True):
    version: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadMessage).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


def encode_load(
    gateway: str, number: int, rows: Sequence[LoadRow], max_bytes: int = MAX_BYTES
) -> Iterator[bytes]:
    """Yield the messages with these rows, numbered from `number`; one at least.

    A row that is larger than `max_bytes` is left out.
    """
    parts = [rows[first : first + MAX_ROWS] for first in range(0, len(rows), MAX_ROWS)] or [rows]
    parts.reverse()
    while parts:
        part = parts.pop()
        data = _encode(LoadMessage(VERSION, gateway, number, list(part)))
        if len(data) <= max_bytes:
            number += 1
            yield data
        elif len(part) > 1:
            half = len(part) // 2
            parts += [part[half:], part[:half]]


def decode_load(data: bytes) -> LoadMessage:
    """Return a received message, every number of which is within its bounds.

    Raises:
        DecodeError: it is none; its text is the reason: "size", "version" or "malformed".
    """
    if len(data) > MAX_BYTES:
        raise DecodeError("size")
    try:
        message = _decode(data)
    except UNREADABLE:
        raise DecodeError("version" if _is_foreign(data) else "malformed") from None
    if message.version != VERSION:
        raise DecodeError("version")
    return message


def _is_foreign(data: bytes) -> bool:
    """Return whether this is a message of another version."""
    try:
        return _decode_head(data).version != VERSION
    except UNREADABLE:
        return False
