"""What a queue's writer and its remote readers send to each other, and the sockets they use.

A reader sends `Hello`. The writer answers `Welcome` or `Refused`. Then the writer sends messages,
and the reader acknowledges them. Each packet is a msgpack array in one ZeroMQ part. Only the frames
of a large message follow as parts of their own, so that they are not copied into an array.

The system's TCP keepalive finds a host that vanished. ZMTP heartbeats would also find a process
that stands still, but where a queue of libzmq is full, they give up connections that work, and can
abort the process (zeromq/libzmq#3937): any peer could cause this by filling the writer's queue.
"""

from __future__ import annotations

import math
import threading
from typing import Annotated, TypeAlias

import msgspec
import zmq

from kvindex.shm.ring import Patience
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError, QueueTimeoutError

VERSION = 1
MAX_RANK = 2**32 - 1
MAX_WINDOW = 4096  # messages
SMALL_BYTES = 8192  # up to this size, a message and its frames are one part: half the cost
MAX_READER_BYTES = 64  # a reader sends nothing longer
VANISHED_AFTER = 15  # seconds without an answer, until the system gives a connection up

_KEEPALIVE = 5  # seconds of silence until the system asks for a sign, and between its questions
_HANDSHAKE = 10_000  # milliseconds that ZeroMQ's handshake may take
# ZeroMQ holds its handshake, and what CURVE adds to a frame, to the same limit as frames.
_OVERHEAD = 4096
_MAX_FRAMES = 65_538  # of one message: its kind, the encoded object, and its buffers


class Packet(msgspec.Struct, array_like=True, tag=True):
    """What one end sends to the other."""


class Hello(Packet):
    """A reader asks to be admitted. Every version of the protocol begins like this."""

    version: int
    rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)] = 0
    token: bytes = b""


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


class Refused(Packet):
    """The writer does not admit a reader."""

    reason: Annotated[str, msgspec.Meta(max_length=500)]


class Ready(Packet):
    """All readers have joined."""


class Probe(Packet):
    """Wants no answer: the writer finds out whether ZeroMQ still has the connection."""


class Evicted(Packet):
    """The writer removed this reader from the queue."""


class Closed(Packet):
    """The writer closed the queue: the message before this seq was the last."""

    next_seq: int


class Message(Packet):
    """A message with its frames."""

    seq: int
    frames: Annotated[list[memoryview], msgspec.Meta(min_length=1, max_length=_MAX_FRAMES)]


class LargeMessage(Packet):
    """The header of a message whose frames follow as parts."""

    seq: int
    count: Annotated[int, msgspec.Meta(ge=1, le=_MAX_FRAMES)]


encode = msgspec.msgpack.Encoder().encode
"""Return a packet as the bytes of its part."""

_FromReader: TypeAlias = Hello | Acknowledgement | Bye
_FromWriter: TypeAlias = (
    Welcome | Refused | Ready | Probe | Evicted | Closed | Message | LargeMessage
)
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(_FromReader | _FromWriter)


class Malformed(ValueError):  # noqa: N818 - never leaves this package
    """Parts that are no packet of this protocol."""


def decode(part: bytes) -> Packet:
    """Return the packet in a part, and frames as views of it; Malformed if there is none."""
    try:
        return _decoder.decode(part)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Malformed(f"{len(part)} bytes that are no packet of this protocol") from None


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
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, VANISHED_AFTER // _KEEPALIVE - 1)
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * VANISHED_AFTER)  # where sent data is unanswered
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    if curve is not None:
        curve.configure(socket)
    return socket


def pause(
    patience: Patience, cancel: threading.Event | None, awaited: str, poller: zmq.Poller
) -> None:
    """Wait a moment for the sockets of `poller`, unless time is up or `cancel` is set."""
    patience.check_cancel(cancel, awaited)
    if patience.exhausted:
        raise QueueTimeoutError(
            f"waited {patience.timeout:g} s for {awaited}", timeout=patience.timeout
        )
    patience.warn(awaited)
    poller.poll(math.ceil(1000 * patience.slice()))


def close_socket(socket: zmq.Socket[bytes], linger: float) -> None:
    """Close a socket and its context; wait at most `linger` seconds until all is sent."""
    context = socket.context
    socket.close(linger=round(1000 * linger))
    context.term()
