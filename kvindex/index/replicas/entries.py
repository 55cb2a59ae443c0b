"""The ring's contents: numbered messages of entries.

A message is one msgpack array: its number, the server's monotonic clock when it was sent, and the
entries in the order in which the server's own index applied them. A message without entries is a
heartbeat.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvindex.shm.ring import Buffer
from kvindex.subscribe import (
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    StreamItem,
)
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

__all__ = [
    "Applied",
    "Entry",
    "Message",
    "Restored",
    "Shown",
    "decode_message",
    "encode_message",
    "follow_names",
    "size_of",
]

_AROUND_BYTES = 64  # of an entry around its payload, and of a name that is not unusual
_OTHER_BYTES = 512


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A batch that was applied, as its publisher sent it."""

    rank: Rank
    payload: bytes


class Shown(msgspec.Struct, frozen=True, tag=True):
    """A rank's status, shown from here on."""

    status: RankStatus


class Restored(msgspec.Struct, frozen=True, tag=True):
    """A rank that is being added begins with its saved section."""

    rank: Rank
    section: bytes


Entry: TypeAlias = (
    Applied | Shown | Restored | RankAdded | RankLost | RankRestarted | RanksRenamed | RankRemoved
)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Entries that are sent together, in order."""

    number: int  # counts the messages from 0
    sent_at: float  # the server's CLOCK_MONOTONIC, which all processes of a machine share
    entries: list[Entry]


encode_message = msgspec.msgpack.Encoder().encode
"""Return a message as bytes."""

_decode = msgspec.msgpack.Decoder(Message).decode


def decode_message(body: Buffer) -> Message:
    """Return the message that `encode_message` encoded; raises DecodeError."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"not a message of a fan-out: {error}", size=len(body)) from error


def size_of(entry: Entry) -> int:
    """Return about how many bytes an entry takes in a message."""
    if isinstance(entry, Applied):
        return len(entry.payload) + _AROUND_BYTES
    if isinstance(entry, Restored):
        return len(entry.section) + _AROUND_BYTES
    return _OTHER_BYTES


def follow_names(names: dict[Rank, Rank], item: StreamItem | Entry) -> None:
    """Update `names`, from the rank of a port to its present name, by an entry.

    The server and its replicas keep the same names.
    """
    if isinstance(item, RankAdded):
        names.setdefault(item.rank, item.rank)
    elif isinstance(item, RanksRenamed):
        renamed = dict(item.names)
        for port, rank in names.items():
            names[port] = renamed.get(rank, rank)
    elif isinstance(item, RankRemoved):
        for port in [port for port, rank in names.items() if rank == item.rank]:
            del names[port]
