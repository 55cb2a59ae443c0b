"""The frames that server and joiner exchange over the socket.

A frame is its length (u32, big-endian) and a msgpack map; the bytes of a section follow its `Taken`
as they are.

```
joiner                                      server
Hello(protocol, backend, pid) ────────────►
                                  ◄──────── Welcome(place, ring, seed, …)   or Refused(reason)
Attached() ───────────────────────────────►   lets it into the ring, then
                                  ◄──────── Begin(number)
                                  ◄──────── Taken(rank, number, …), section     for each rank
                                  ◄──────── End(number)
   …                                           the connection stays as long as both live
Leave() ──────────────────────────────────►

Ask() ────────────────────────────────────►   in place of Hello, for the report only
                                  ◄──────── Report(json_bytes), the JSON; the connection ends
```
"""

from __future__ import annotations

import struct
from typing import TypeAlias, TypeVar

import msgspec

from kvindex.shm.ring import RingHandle
from kvindex.subscribe import RankStatus
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

__all__ = [
    "LENGTH",
    "MAX_FRAME_BYTES",
    "MAX_SECTION_BYTES",
    "PROTOCOL",
    "Ask",
    "Attached",
    "Begin",
    "End",
    "Hello",
    "JoinersFrame",
    "Leave",
    "Refused",
    "Report",
    "ServersFrame",
    "Taken",
    "Welcome",
    "decode_joiners",
    "decode_servers",
    "encode_frame",
    "frame_bytes",
]

PROTOCOL = 2
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 20
MAX_SECTION_BYTES = 1 << 34


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A process wants to join."""

    protocol: int  # of these frames
    backend: str  # of its index
    pid: int  # for people to read


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The joiner holds its place in the ring."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A process asks for the server's report, and does not join."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The joiner leaves in good order."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The joiner may attach, and make an index like the server's."""

    place: int
    ring: RingHandle
    seed: bytes  # 16 bytes, little-endian
    max_blocks_per_rank: int | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The joiner may not attach: why, what to do, and whether trying again is useless."""

    reason: str
    final: bool


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A snapshot begins, or begins again: sections so far are void."""

    number: int  # of the next message in the ring


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A rank as it was just before a message; its section, from `Index.dump`, follows."""

    rank: Rank
    number: int  # of that message
    status: RankStatus | None  # then, if it was subscribed to
    section_bytes: int


class End(msgspec.Struct, frozen=True, tag=True):
    """The snapshot is whole."""

    number: int  # of the next message in the ring
    names: list[tuple[Rank, Rank]]  # the rank of a port, and its present name


class Report(msgspec.Struct, frozen=True, tag=True):
    """The server's report: its counters as JSON follow."""

    json_bytes: int


JoinersFrame: TypeAlias = Hello | Attached | Leave | Ask
ServersFrame: TypeAlias = Welcome | Refused | Begin | Taken | End | Report

_Frame = TypeVar("_Frame")

_encode = msgspec.msgpack.Encoder().encode
_joiners: msgspec.msgpack.Decoder[JoinersFrame] = msgspec.msgpack.Decoder(JoinersFrame)
_servers: msgspec.msgpack.Decoder[ServersFrame] = msgspec.msgpack.Decoder(ServersFrame)


def encode_frame(frame: JoinersFrame | ServersFrame) -> bytes:
    """Return a frame as it is sent."""
    body = _encode(frame)
    return LENGTH.pack(len(body)) + body


def decode_joiners(body: bytes) -> JoinersFrame:
    """Return a joiner's frame; raises DecodeError."""
    return _decoded(_joiners, body)


def decode_servers(body: bytes) -> ServersFrame:
    """Return a server's frame; raises DecodeError."""
    return _decoded(_servers, body)


def frame_bytes(head: bytes | bytearray, most: int) -> int:
    """Return how long the frame is whose head this is; raises DecodeError beyond `most`."""
    (length,) = LENGTH.unpack(head)
    if length > most:
        raise DecodeError(f"a frame of {length} bytes: at most {most} are read", size=length)
    return int(length)


def _decoded(decoder: msgspec.msgpack.Decoder[_Frame], body: bytes) -> _Frame:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"no frame of a fan-out: {error}", size=len(body)) from error
