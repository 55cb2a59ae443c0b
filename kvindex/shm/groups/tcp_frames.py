"""Frames over a TCP connection: four bytes of length, big-endian, then as many bytes.

A reader sets a limit before it reads, so that a stranger cannot make it hold more than that.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Final

__all__ = ["Connection", "ConnectionEnded", "FrameReader", "FrameTooLarge", "frame"]

_LENGTH: Final = struct.Struct(">I")
_READ_BYTES: Final = 256 << 10
_DRAINED_READS: Final = 16


class ConnectionEnded(Exception):  # noqa: N818 -- an event for those that hold the connection
    """The other side closed the connection, died, or cannot be reached any more."""


class FrameTooLarge(Exception):  # noqa: N818 -- as above
    """A frame is announced that is larger than the reader's limit."""


def frame(body: bytes) -> bytes:
    """Return the body with its length before it."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    r"""Takes bytes as they come and gives whole frames.

    Attributes:
        limit: bytes that the body of a frame may have; may be changed between frames.

    Examples:
        >>> reader = FrameReader(limit=16)
        >>> reader.feed(b"\0\0\0\2o")
        >>> reader.next_frame() is None
        True
        >>> reader.feed(b"k")
        >>> reader.next_frame()
        b'ok'
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes that arrived."""
        self._held += data

    def next_frame(self) -> bytes | None:
        """Return the body of the next frame; None while it is not whole.

        Raises:
            FrameTooLarge: its length is beyond the limit; nothing more can be read then.
        """
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self.limit:
            raise FrameTooLarge(f"a frame of {length} bytes, more than the {self.limit} allowed")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        body = bytes(memoryview(self._held)[_LENGTH.size : end])
        del self._held[:end]
        return body


class Connection:
    """One TCP connection's frames; every wait ends at a deadline of `time.monotonic`.

    Args:
        sock: the connected socket, owned from now on.
        limit: bytes that a received frame may have.

    Attributes:
        in_step: whether all that was sent was sent whole, so that more can follow.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self._socket = sock
        self._reader = FrameReader(limit)
        self.in_step = True
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self._socket.fileno()

    def allow(self, limit: int) -> None:
        """Let received frames have as many bytes from now on."""
        self._reader.limit = limit

    def read_frame(self) -> bytes | None:
        """Return the next frame if it has come, reading once from the socket if need be.

        Raises:
            ConnectionEnded: the connection is at its end, and no whole frame is left.
            FrameTooLarge: the frame is larger than allowed.
        """
        body = self._reader.next_frame()
        if body is None and self._read_once():
            body = self._reader.next_frame()
        return body

    def receive(self, deadline: float) -> bytes:
        """Wait for the next frame and return it.

        Raises:
            TimeoutError: it was not whole at the deadline.
            ConnectionEnded, FrameTooLarge: as for `read_frame`.
        """
        while (body := self.read_frame()) is None:
            self._wait(select.POLLIN, deadline)
        return body

    def send(self, body: bytes, deadline: float) -> None:
        """Send a frame, waiting for room.

        Raises:
            TimeoutError: there was no room for all of it at the deadline.
            ConnectionEnded: the other side is gone.
        """
        rest = memoryview(frame(body))
        self.in_step = False
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise ConnectionEnded(_reason(error)) from error
        self.in_step = True

    def close(self) -> None:
        """Close the connection; what was sent still goes out."""
        try:
            # With bytes left unread the kernel would break the connection and drop what we sent.
            for _ in range(_DRAINED_READS):
                if not self._socket.recv(_READ_BYTES):
                    break
        except OSError:
            pass
        self._socket.close()

    def _read_once(self) -> bool:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionEnded(_reason(error)) from error
        if not data:
            raise ConnectionEnded("closed by the other side")
        self._reader.feed(data)
        return True

    def _wait(self, event: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
