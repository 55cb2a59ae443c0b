"""Facts about a connection's other side that ZeroMQ does not report.

**An unknown host.** ZeroMQ reports a name that cannot be resolved like a port where nothing
listens. So when a connection fails, the name is resolved once more, on a thread of its own, because
that may take long.

**Unread bytes.** ZeroMQ counts the messages that wait in a socket, not their bytes. The system
counts the bytes that a TCP connection received; those not yet read wait. Linux only, TCP only.

**An endless message.** If every frame announces another one, the message is never whole: it grows
in memory, and ZeroMQ does not report it. A connection that brings more bytes than any message may
have, without a whole message, is shut down, and ZeroMQ drops its part of that message. Linux only,
and TCP only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

_AGAIN_AFTER = 30.0  # seconds: a name may become known later
_HOST = re.compile(r"tcp://(?:[^;]*;)?\[?(.*?)\]?:\d+")
_SLACK = 16 * 1024 * 1024  # bytes that the system and ZeroMQ may have read ahead
_INFO_BYTES = 136  # of Linux's struct tcp_info, up to and with tcpi_bytes_received
_SHORT = 255  # bytes: the head of a longer frame has nine bytes, that of others two
_bytes_received = struct.Struct("=Q")


class HostCheck:
    """Whether the host of an endpoint can be resolved, by a function like `socket.getaddrinfo`.

    Attributes:
        trouble: why its host is unknown; "" if it is known, None before it is resolved.

    Thread safety: `ask` by one thread; `trouble` can be read by any.
    """

    def __init__(
        self, endpoint: str, resolve: Callable[[str, None], Any] = socket.getaddrinfo
    ) -> None:
        match = _HOST.fullmatch(endpoint)
        self._host = "" if match is None else match[1]
        self._resolve = resolve
        self._asked_at: float | None = None
        self._asking: threading.Thread | None = None
        self._is_name = bool(self._host)
        with suppress(ValueError):
            self._is_name = not ipaddress.ip_address(self._host)
        self.trouble: str | None = None if self._is_name else ""

    def ask(self, now: float) -> None:
        """Resolve the host in the background, unless it was resolved just now."""
        asking = self._asking is not None and self._asking.is_alive()
        recent = self._asked_at is not None and now - self._asked_at < _AGAIN_AFTER
        if asking or recent or not self._is_name:
            return
        self._asked_at = now
        self._asking = threading.Thread(target=self._run, name="kvindex-resolve", daemon=True)
        self._asking.start()

    def _run(self) -> None:
        try:
            self._resolve(self._host, None)
        except (OSError, UnicodeError) as error:
            self.trouble = f"the host {self._host!r} is unknown ({error})"
        else:
            self.trouble = ""


class Inflow:
    """Watches what the connections of one socket bring.

    Args:
        max_message_bytes: largest frame. A message may have two such: its topic and its payload.

    Attributes:
        whole: whether a message has become whole since the last look.
        read: bytes of the whole messages; corrected by `cut` when nothing is left to be read.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._limit = 2 * max_message_bytes + _SLACK
        self.whole = False
        self._brought: dict[int, int] = {}  # by descriptor, at the last whole message
        self.read = 0
        self._unseen = 0  # bytes that were brought and are no message's: handshakes, pings

    def note_read(self, sizes: Iterable[int]) -> None:
        """Record that whole messages were received, with frames of these sizes."""
        self.whole = True
        self.read += sum(size + (9 if size > _SHORT else 2) for size in sizes)

    def unread(self, descriptors: Iterable[int]) -> int:
        """Return how many bytes wait to be read, as far as is known."""
        brought = sum(_received(connection) or 0 for _, connection in _opened(descriptors))
        return max(0, brought - self._unseen - self.read)

    def cut(self, descriptors: Collection[int], unchanged: Callable[[], bool]) -> int:
        """Shut down the connections that send an endless message; return how many.

        Call it when nothing is left to be read.

        Args:
            descriptors: of the connections, as the socket's monitor reported them.
            unchanged: whether the monitor has reported nothing new: if it has, a descriptor may
                be another connection's by now.
        """
        brought = {}
        cut = 0
        for descriptor, connection in _opened(descriptors):
            size = _received(connection)
            if size is None or not unchanged():
                continue
            brought[descriptor] = size
            if not self.whole and size - self._brought.get(descriptor, 0) > self._limit:
                cut += _shut_down(connection)
        if self.whole:
            self.whole, self._brought = False, brought
            if len(brought) == len(descriptors):
                self._unseen = sum(brought.values()) - self.read
        return cut

    def hang_up(self, descriptors: Iterable[int]) -> None:
        """Shut down all connections; received bytes can still be read."""
        for _, connection in _opened(descriptors):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _opened(descriptors: Iterable[int]) -> Iterator[tuple[int, socket.socket]]:
    """Yield a socket for each descriptor that is open, and close that socket afterwards."""
    for descriptor in descriptors:
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue  # closed just now
        with connection:
            yield descriptor, connection


def _received(connection: socket.socket) -> int | None:
    """Return how many bytes a TCP connection has brought in all; None where that is not known."""
    if sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _INFO_BYTES:
        return None
    (size,) = _bytes_received.unpack_from(info, _INFO_BYTES - _bytes_received.size)
    return int(size)


def _shut_down(connection: socket.socket) -> bool:
    try:
        # ZeroMQ closes it when it sees the end; the peer is reset then, and does not wait for room.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it broke just now
    return True
