"""What both ends of a queue over TCP share: their packets, a socket, its one user, and its waits.

A reader sends `Hello`. The writer answers `Welcome` or `Refusal`. Then the writer sends messages,
and the reader acknowledges them. Each packet is a msgpack array in one ZeroMQ part. Only the frames
of a large message follow as parts of their own, so that they are not copied into an array.

The system's TCP keepalive finds a host that vanished. ZMTP heartbeats would also find a process
that stands still, but where a queue of libzmq is full, they give up connections that work, and can
abort the process (zeromq/libzmq#3937): any peer could cause this by filling the writer's queue.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import msgspec
import zmq

from kvindex.shm.ring import Patience, Waiting, check_cancel
from kvindex.wire.curve import Curve
from kvindex.wire.errors import UNREADABLE, ClosedError, ConfigurationError, InUseError

VERSION = 1
MAX_RANK = 2**32 - 1
MAX_WINDOW = 4096  # messages
SMALL_BYTES = 8192  # up to this size, a message and its frames are one part: half the cost
MAX_READER_BYTES = 64  # a reader sends nothing longer

IN_USE = (
    "this end of the queue is in use, by another thread or by a call that this one interrupts: "
    "one at a time"
)
"""The text of an InUseError."""

NOBLOCK = int(zmq.NOBLOCK)

_MAX_FRAMES = 65_537  # of one message: the encoded object, and its buffers
_VANISHED_AFTER = 15  # seconds without an answer, until the system gives a connection up
_KEEPALIVE = 5  # seconds of silence until the system asks for a sign, and between its questions
_OPTIONS = {
    zmq.HANDSHAKE_IVL: 10_000,  # milliseconds
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: _KEEPALIVE,
    zmq.TCP_KEEPALIVE_INTVL: _KEEPALIVE,
    zmq.TCP_KEEPALIVE_CNT: _VANISHED_AFTER // _KEEPALIVE - 1,
    zmq.TCP_MAXRT: 1000 * _VANISHED_AFTER,  # where sent data is unanswered
}
# ZeroMQ holds its handshake, and what CURVE adds to a frame, to the same limit as frames.
_OVERHEAD = 4096


class Packet(msgspec.Struct, array_like=True, tag=True):
    """A message of one end to the other."""


class Hello(Packet):
    """A reader asks to be admitted. Every version of the protocol begins like this."""

    version: int
    rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)] = 0


class Acknowledgement(Packet):
    """A reader has consumed all messages before this seq."""

    next_seq: int


class Bye(Packet):
    """A reader leaves."""


class Welcome(Packet):
    """A reader is admitted: its first message, its window, and whether all readers have joined."""

    next_seq: int
    window: Annotated[int, msgspec.Meta(gt=0)]
    ready: bool


# Tags are names on the wire, and stay those of version 1.
class Refusal(Packet, tag="Refused"):
    """The writer does not admit a reader."""

    reason: Annotated[str, msgspec.Meta(max_length=500)]


class Probe(Packet):
    """Whether all readers have joined. The writer learns whether the connection still exists."""

    ready: bool


class Eviction(Packet, tag="Evicted"):
    """The writer removed this reader from the queue."""


class Closing(Packet, tag="Closed"):
    """The writer closed the queue: the message before this seq was the last."""

    next_seq: int


class Message(Packet):
    """A message of some kind with its frames; without any, they follow as parts."""

    seq: int
    kind: int
    frames: Annotated[list[memoryview], msgspec.Meta(max_length=_MAX_FRAMES)]


encode = msgspec.msgpack.Encoder().encode
"""Return a packet as the bytes of its part."""

_AnyPacket: TypeAlias = (
    Hello | Acknowledgement | Bye | Welcome | Refusal | Probe | Eviction | Closing | Message
)
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(_AnyPacket)


class Malformed(ValueError):  # noqa: N818 - never leaves this package
    """Parts that are no packet of this protocol."""


def decode(part: bytes) -> Packet:
    """Return the packet in a part, and frames as views of it; Malformed if there is none."""
    # Without the part's text in the error: a stranger's bytes do not belong in a log.
    try:
        return _decoder.decode(part)
    except UNREADABLE:
        raise Malformed(f"{len(part)} bytes that are no packet of this protocol") from None


class RemoteEnd(ABC):
    """A socket that refuses a second thread, and forked children; any thread may close it.

    ZeroMQ's sockets break when two threads use them, and in a forked child they wait for ever.
    """

    def __init__(
        self, kind: int, endpoint: str, curve: Curve | None, waiting: Waiting, *, max_bytes: int
    ) -> None:
        self._waiting = waiting
        self._pid = os.getpid()
        # Reentrant: a signal handler may close the end while its own thread waits.
        self._using = threading.RLock()
        self._closing = threading.Event()
        self._closed = False
        # One I/O thread, so that a monitor reports events in the order in which they happened.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"ZeroMQ has no socket for {endpoint!r}: {error}") from error
        # Queues without a limit: a reader's window limits what is in them. If ZeroMQ's thread
        # stopped reading at a slow reader, the system would take this reader for one that vanished.
        self._socket.linger = self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _OVERHEAD)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        if curve is not None:
            curve.configure(self._socket)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def close(self) -> None:
        """End the wait of the thread that uses this end, then close. Idempotent, any thread."""
        if os.getpid() != self._pid:
            return  # it is the parent's
        self._closing.set()  # before the lock: the thread that has it gives it back when it looks
        with self._using:
            if not self._closed:
                self._closed = True
                self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def _close_socket(self, linger: float) -> None:
        """Close the socket; wait at most `linger` seconds until all is sent."""
        self._socket.close(linger=round(1000 * linger))
        self._context.term()

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
        check_cancel(cancel, awaited)
        patience.check(awaited)
        self._poller.poll(math.ceil(1000 * patience.slice()))
