"""The subscribing process's orders to the HTTP processes: lines of JSON through a pipe.

The pipe is the child's stdin. When the parent is gone, however it ended, the pipe closes.
"""

from __future__ import annotations

import msgspec

from kvindex.service.catalog import Change, Registration
from kvindex.service.settings import ServeSettings

__all__ = ["Order", "Registered", "Start", "Stop", "read_order", "write_order"]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first line: how to serve.

    Attributes:
        settings: of the server.
        tokens: any of them admits a request.
        fanout: path of the fan-out to join.
        upstream: path of the unix socket where all else is answered.
        listen_fd: descriptor of the listening socket that all children share.
        counters_fd: descriptor of the memory for this child's counters.
        routes: paths that requests are counted under.
        log_level: of the package's log, as a number.
    """

    settings: ServeSettings
    tokens: tuple[str, ...]
    fanout: str
    upstream: str
    listen_fd: int
    counters_fd: int = -1
    routes: tuple[str, ...]
    log_level: int


class Registered(msgspec.Struct, frozen=True, tag=True):
    """All that is registered, once; a `Change` says what has changed since."""

    registrations: tuple[Registration, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The last line: finish the open requests and end."""


Order = Start | Registered | Change | Stop

_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def write_order(order: Order) -> bytes:
    """Return an order as one line."""
    return msgspec.json.encode(order) + b"\n"


def read_order(line: bytes) -> Order:
    """Return the order in a line.

    Raises:
        msgspec.MsgspecError: there is none in it.
    """
    return _decoder.decode(line)
