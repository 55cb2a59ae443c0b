"""Bytes that a client has not read yet: whether it reads, and fast enough."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from contextlib import suppress
from typing import Any, Final

_LONG: Final = 64 << 10  # bytes that wait for a client: more are a long answer
_LEAST_RATE: Final = 4096  # bytes a second that a client reads of a long answer


class Unread:
    """The bytes that wait for the client of one transport. Owner: the event loop."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._waited = 0  # bytes that waited when this was last noted,
        self._since = 0.0  # and when that was

    def note_progress(self) -> None:
        """Note that the client has read enough for more to be written."""
        self._waited = 0

    def is_overdue(self, now: float, limit: float) -> bool:
        """Return whether the client has read nothing, or too little of a long answer, for long.

        What is left of a long answer shows how much was read, since no more is written before
        `note_progress`; of a short one only whether anything was.
        """
        unread = self._unsent()
        if unread > self._waited or (unread != self._waited and unread < _LONG):
            self._waited, self._since = unread, now
        seconds = now - self._since
        is_slow = self._waited - unread < _LEAST_RATE * seconds
        return unread > 0 and is_slow and seconds > limit

    def forget(self) -> None:
        """Make the system drop its unsent buffer, once the connection is aborted."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _unsent(self) -> int:
        """Return how many bytes wait for the client, in the system's buffer as well."""
        waiting: int = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sys.platform == "linux":
            with suppress(OSError):
                queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
                waiting += int.from_bytes(queued, sys.byteorder)
        return waiting
