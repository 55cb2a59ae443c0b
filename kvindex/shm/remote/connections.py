"""Connections of queues: how they begin, and when they have ended.

The writer has a ROUTER with many `Callers`; a reader a DEALER with one `Connection`.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterator, Sequence

import zmq

from kvindex.shm.remote.sockets import WatchedSocket, is_handshake_failure

__all__ = ["Callers", "Connection"]

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_STRANGER = b""
_LAST_WORDS = 0.5  # seconds after which a connection that broke brings no more


class Callers:
    """The connections of a ROUTER, by ZeroMQ's names for them. Owned by the thread that uses it.

    The monitor tells which descriptors are connected, in order; a frame tells which descriptor it
    came from. ZeroMQ has read all that a connection said before it announces its end.

    Attributes:
        half_said: whether an exception broke in while a message was handed to ZeroMQ: whatever is
            sent next would be taken for the rest of it.
    """

    def __init__(self, watched: WatchedSocket) -> None:
        self.half_said = False
        self._watched = watched
        self._socket = watched.socket
        self._names: dict[int, bytes] = {}  # of each connected descriptor
        self._failed = False  # the handshake of the connection whose end comes next

    def hear(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """Return who said something, and its frames, at least one; None if nobody did."""
        try:
            while True:
                name, *frames = self._socket.recv_multipart(_NOBLOCK, copy=False)
                if frames:  # else it is the rest of what an exception broke into
                    return name.bytes, frames
        except zmq.Again:
            return None

    def send(self, name: bytes, parts: Sequence[bytes | zmq.Frame]) -> bool:
        """Send a message to one connection, never waiting; return whether it is there."""
        send = self._socket.send
        self.half_said = True
        try:
            send(name, _MORE)
        except zmq.ZMQError as error:
            self.half_said = False
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        last = len(parts) - 1
        for i, part in enumerate(parts):
            send(part, _MORE if i < last else _NOBLOCK, copy=type(part) is bytes)
        self.half_said = False
        return True

    def introduce(self, name: bytes, frame: zmq.Frame) -> bool:
        """Give a connection, from which this frame came, its name; return whether it is there.

        Call `ended` between `hear` and this. A peer of ZeroMQ's first protocol, which who speaks
        HTTP is taken for, is never there: it has no descriptor, nor heartbeats.
        """
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return False
        if descriptor not in self._names:
            return False
        self._names[descriptor] = name
        return True

    def ended(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the name of each connection that has ended, and whether its handshake failed.

        The name of one that was not introduced is empty.
        """
        for event, descriptor in self._watched.events():
            if event == zmq.EVENT_ACCEPTED:
                self._names[descriptor] = _STRANGER
            elif is_handshake_failure(event):
                self._failed = True
            else:
                failed, self._failed = self._failed, False
                yield self._names.pop(descriptor, _STRANGER), failed


class Connection:
    """The one connection of a DEALER, which does not come back. Owned by the thread that uses it.

    Attributes:
        made: whether there was a connection.
        handshake_failure: ZeroMQ's reason (`zmq.PROTOCOL_ERROR_...`), if the handshake failed.
    """

    def __init__(self, watched: WatchedSocket) -> None:
        self.made = False
        self.handshake_failure: int | None = None
        self._watched = watched
        self._lost_at = math.inf

    def is_lost(self) -> bool:
        """Return whether it has ended: then nothing comes but what has come before this call."""
        for event, value in self._watched.events():
            if event == zmq.EVENT_CONNECTED:
                self.made = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._lost_at = min(self._lost_at, time.monotonic() + _LAST_WORDS)
            else:
                self._lost_at = -math.inf
                if is_handshake_failure(event):
                    self.handshake_failure = value
        return time.monotonic() >= self._lost_at

    def wait(self, seconds: float) -> None:
        """Wait until something comes, or it may be lost, or the time is up."""
        left = min(seconds, self._lost_at - time.monotonic())
        self._watched.wait(math.ceil(1000 * max(0.0, left)))

    def close(self, linger: float) -> None:
        """Close; wait at most `linger` seconds for what is to be sent still, if it can be sent."""
        usable = self.made and self._lost_at == math.inf
        self._watched.close(linger if usable else 0.0)
