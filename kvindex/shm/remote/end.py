"""The base of both ends of a queue over TCP: a socket, its one user, and its waits.

The system's TCP keepalive finds a host that vanished. ZMTP heartbeats would also find a process
that stands still, but where a queue of libzmq is full, they give up connections that work, and can
abort the process (zeromq/libzmq#3937): any peer could cause this by filling the writer's queue.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvindex.shm.ring import Patience, Waiting
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ClosedError, ConfigurationError, InUseError, QueueTimeoutError

__all__ = ["IN_USE", "RemoteEnd", "close_socket", "open_socket"]

IN_USE = (
    "this end of the queue is in use, by another thread or by a call that this one interrupts: "
    "one at a time"
)
"""The text of an InUseError."""

_VANISHED_AFTER = 15  # seconds without an answer, until the system gives a connection up
_KEEPALIVE = 5  # seconds of silence until the system asks for a sign, and between its questions
_HANDSHAKE = 10_000  # milliseconds that ZeroMQ's handshake may take
# ZeroMQ holds its handshake, and what CURVE adds to a frame, to the same limit as frames.
_OVERHEAD = 4096


class RemoteEnd:
    """Refuses a second thread, and forked children; lets any thread close.

    ZeroMQ's sockets break when two threads use them, and in a forked child they wait for ever.
    """

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._poller = zmq.Poller()
        self._pid = os.getpid()
        # Reentrant: a signal handler may close the end while its own thread waits.
        self._using = threading.RLock()
        self._closing = threading.Event()
        self._closed = False

    def close(self) -> None:
        """End the wait of the thread that uses this end, then close. Idempotent, any thread."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        self._closing.set()
        with self._using:
            if not self._closed:
                self._closed = True
                self._close()

    def _close(self) -> None:
        raise NotImplementedError

    @contextmanager
    def _one_user(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this end of the queue belongs to the parent process; attach one by the queue's "
                "handle"
            )
        if not self._using.acquire(blocking=False):
            self._check_open()  # perhaps by another thread that closes
            raise InUseError(IN_USE)
        try:
            self._check_open()
            yield
        finally:
            self._using.release()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("this end of the queue is closed")

    def _pause(self, patience: Patience, cancel: threading.Event | None, awaited: str) -> None:
        """Wait a moment for the sockets, unless time is up or the wait is to end."""
        if not self._closed:  # the thread that closes waits, too
            self._check_open()
        patience.check_cancel(cancel, awaited)
        if patience.exhausted:
            raise QueueTimeoutError(
                f"waited {patience.timeout:g} s for {awaited}", timeout=patience.timeout
            )
        patience.warn(awaited)
        self._poller.poll(math.ceil(1000 * patience.slice()))


def open_socket(
    kind: int, endpoint: str, curve: Curve | None, *, max_part_bytes: int
) -> zmq.Socket[bytes]:
    """Return a socket for this endpoint, in a ZeroMQ context of its own; not connected yet.

    Its queues have no limit: a reader's window limits what is in them. If ZeroMQ's thread stopped
    reading at a slow reader, the system would take this reader for one that vanished.
    """
    # One I/O thread, so that a monitor reports events in the order in which they happened.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"ZeroMQ has no socket for {endpoint!r}: {error}") from error
    socket.linger = socket.sndhwm = socket.rcvhwm = 0
    socket.setsockopt(zmq.MAXMSGSIZE, max_part_bytes + _OVERHEAD)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _VANISHED_AFTER // _KEEPALIVE - 1)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * _VANISHED_AFTER)  # where sent data is unanswered
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    if curve is not None:
        curve.configure(socket)
    return socket


def close_socket(socket: zmq.Socket[bytes], linger: float) -> None:
    """Close a socket and its context; wait at most `linger` seconds until all is sent."""
    context = socket.context
    socket.close(linger=round(1000 * linger))
    context.term()
