"""The subscribing process's orders to the HTTP processes: lines of JSON through a pipe.

The pipe is the child's stdin. When the parent is gone, however it ended, the pipe closes.
"""

from __future__ import annotations

import msgspec

from kvindex.service.catalog import Change, Registration
from kvindex.service.guards import Limits

__all__ = ["Order", "Registered", "Start", "Stop", "read_order", "write_order"]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first line: how to serve.

    Attributes:
        fanout: path of the fan-out to join.
        upstream: path of the unix socket where all else is answered.
        listen_fd: descriptor of the listening socket that all children share.
        counters_fd: descriptor of the memory for this child's counters.
        routes: paths that requests are counted under.
        dialect: of queries.
        tokens, allowed_hosts, limits, tls_cert, tls_key, shutdown_within: as in `ServeSettings`.
        log_level: of the package's log, as a number.
    """

    fanout: str
    upstream: str
    listen_fd: int
    counters_fd: int
    routes: tuple[str, ...] = ()
    dialect: str = "auto"
    tokens: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    limits: Limits = Limits()
    tls_cert: str | None = None
    tls_key: str | None = None
    shutdown_within: float = 10.0
    log_level: int = 30


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
