"""The messages through the ring and the frames over the socket between server and replicas.

**The ring** has numbered messages. Each is one msgpack array: its number, the server's monotonic
clock when it was sent, and the entries in the order in which the server's own index applied them. A
message without entries is a heartbeat.

**The socket** has frames. A frame is its length (u32, big-endian) and a msgpack map; the bytes of a
section follow its `RankSection` as they are.

```
joiner                                      server
JoinRequest(protocol, …) ─────────────────►
                                  ◄──────── Admission(place, ring, seed, …) or Refused(reason)
Attached() ───────────────────────────────►   lets it into the ring, then
                                  ◄──────── Begin(number)
                                  ◄──────── RankSection(rank, …), section   for each rank
                                  ◄──────── End(number)
   …                                           the connection stays as long as both live
Leave() ──────────────────────────────────►

ReportRequest() ──────────────────────────►   in place of JoinRequest
                                  ◄──────── ServerReport(json_bytes), the JSON; the connection ends
```
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvindex.shm.ring import Buffer, RingHandle
from kvindex.subscribe import (
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    StreamItem,
)
from kvindex.wire.errors import UNREADABLE, DecodeError
from kvindex.wire.rank import Rank

PROTOCOL = 4
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 20
MAX_SECTION_BYTES = 1 << 34


# Through the ring -----------------------------------------------------------------------------


class BatchApplied(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A batch that was applied, as its publisher sent it."""

    rank: Rank
    payload: bytes


class StatusChanged(msgspec.Struct, frozen=True, tag=True):
    """A rank's status, shown from here on."""

    status: RankStatus


class SectionRestored(msgspec.Struct, frozen=True, tag=True):
    """A rank that is being added begins with its saved section."""

    rank: Rank
    section: bytes


Entry: TypeAlias = (
    BatchApplied
    | StatusChanged
    | SectionRestored
    | RankAdded
    | RankLost
    | RankRestarted
    | RanksRenamed
    | RankRemoved
)


class RingMessage(msgspec.Struct, frozen=True, array_like=True):
    """Entries that are sent together, in order."""

    number: int  # counts the messages from 0
    sent_at: float  # the server's CLOCK_MONOTONIC, which all processes of a machine share
    entries: list[Entry]


class ReceivedMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message whose entries are still encoded: native code applies most of them so."""

    number: int
    sent_at: float
    entries: msgspec.Raw  # refers to the bytes that were decoded


encode_message = msgspec.msgpack.Encoder().encode
_decode_message = msgspec.msgpack.Decoder(ReceivedMessage).decode
_decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode
_decode_entry: Callable[[bytes], Entry] = msgspec.msgpack.Decoder(Entry).decode


def decode_message(body: Buffer) -> ReceivedMessage:
    """Return the message that `encode_message` encoded; raises DecodeError."""
    try:
        return _decode_message(body)
    except UNREADABLE as error:
        raise _no_message(error, len(body)) from error


def decode_entries(entries: Buffer) -> list[Entry]:
    """Return the entries of a received message; raises DecodeError."""
    try:
        return _decode_entries(entries)
    except UNREADABLE as error:
        raise _no_message(error, memoryview(entries).nbytes) from error


def decode_entry(entry: bytes) -> Entry:
    """Return one entry; raises DecodeError."""
    try:
        return _decode_entry(entry)
    except UNREADABLE as error:
        raise _no_message(error, len(entry)) from error


def _no_message(error: Exception, size: int) -> DecodeError:
    return DecodeError(f"not a message of a fan-out: {error}", size=size)


def follow_names(names: dict[Rank, Rank], item: StreamItem | Entry) -> None:
    """Update `names`, from the rank of a port to its present name, by an entry."""
    # The server's tap and every replica's copy do so by the same entries, and keep the same names.
    if isinstance(item, RankAdded):
        names.setdefault(item.rank, item.rank)
    elif isinstance(item, RanksRenamed):
        renamed = dict(item.names)
        for port, rank in names.items():
            names[port] = renamed.get(rank, rank)
    elif isinstance(item, RankRemoved):
        for port in [port for port, rank in names.items() if rank == item.rank]:
            del names[port]


# Over the socket ------------------------------------------------------------------------------


class JoinRequest(msgspec.Struct, frozen=True, tag=True):
    """A process wants to join."""

    protocol: int  # of these frames
    backend: str  # of its index
    pid: int  # for people to read


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The joiner holds its place in the ring."""


class ReportRequest(msgspec.Struct, frozen=True, tag=True):
    """A process asks for the server's report, and does not join."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The joiner leaves in good order."""


class Admission(msgspec.Struct, frozen=True, tag=True):
    """The joiner may attach, and make an index like the server's."""

    place: int
    ring: RingHandle
    seed: bytes  # 16 bytes, little-endian
    max_blocks_per_rank: int | None


# The tag is the frame's name on the wire, and stays as it was.
class JoinRefusal(msgspec.Struct, frozen=True, tag="Refused"):
    """The joiner may not attach: why, what to do, and whether trying again is useless."""

    reason: str
    final: bool


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A snapshot begins, or begins again: sections so far are void."""

    number: int  # of the next message in the ring


class RankSection(msgspec.Struct, frozen=True, tag=True):
    """A rank as it was just before a message; its section, from `Index.dump`, follows."""

    rank: Rank
    number: int  # of that message
    status: RankStatus | None  # then, if it was subscribed to
    section_bytes: int


class End(msgspec.Struct, frozen=True, tag=True):
    """The snapshot is whole."""

    number: int  # of the next message in the ring
    # Pairs: msgpack's maps have no keys that are arrays.
    names: list[tuple[Rank, Rank]]  # the rank of a port, and its present name


class ServerReport(msgspec.Struct, frozen=True, tag=True):
    """The server's report: its counters as JSON follow."""

    json_bytes: int


JoinersFrame: TypeAlias = JoinRequest | Attached | Leave | ReportRequest
ServersFrame: TypeAlias = Admission | JoinRefusal | Begin | RankSection | End | ServerReport
Frame: TypeAlias = JoinersFrame | ServersFrame

_encode = msgspec.msgpack.Encoder().encode
_decode_frame: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(Frame).decode


def encode_frame(frame: Frame) -> bytes:
    """Return a frame as it is sent."""
    body = _encode(frame)
    return LENGTH.pack(len(body)) + body


def decode_frame(body: bytes) -> Frame:
    """Return a frame of either side; raises DecodeError."""
    try:
        return _decode_frame(body)
    except UNREADABLE as error:
        raise DecodeError(f"no frame of a fan-out: {error}", size=len(body)) from error


def frame_bytes(head: bytes | bytearray, most: int) -> int:
    """Return how long the frame is whose head this is; raises DecodeError beyond `most`."""
    # Before any of it is received: a stranger may claim as much as he likes.
    (length,) = LENGTH.unpack(head)
    if length > most:
        raise DecodeError(f"a frame of {length} bytes: at most {most} are read", size=length)
    return int(length)
