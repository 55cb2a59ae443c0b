"""A reader's end of a queue over TCP."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq

from kvindex.shm.codec import BUFFERS
from kvindex.shm.remote import protocol
from kvindex.shm.remote.protocol import NOBLOCK, Malformed, Message, Packet, RemoteEnd, encode
from kvindex.shm.ring import Buffer, Patience, Waiting
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ConfigurationError,
    KVIndexError,
    QueueClosedError,
    ReaderEvictedError,
    WriterDiedError,
)

_POLLIN = int(zmq.POLLIN)
_EVENT = struct.Struct("=Hi")
_HANDSHAKE_FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_EVENTS = _HANDSHAKE_FAILED | int(
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
)
_NEVER = 2**31 - 1  # milliseconds
_DRAIN = 0.5  # seconds until every packet of a broken connection can be received
_FLUSH = 1.0  # seconds in which ZeroMQ may send the last packets


class RemoteReader(RemoteEnd):
    """Receives each message of a writer on another machine once, in order.

    The constructor sends the hello. The first message is the one that the writer sends next after
    it admitted the reader. An error that ends the queue for this reader is raised after the
    messages that arrived before it, and by each later call. One thread at a time uses it;
    `statistics` and `close` may be called by any.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        max_message_bytes: int,
        curve: Curve | None,
        waiting: Waiting,
    ) -> None:
        if not 0 <= rank <= protocol.MAX_RANK:
            raise ConfigurationError(f"rank must be 0 to {protocol.MAX_RANK}, not {rank!r}")
        if not address.startswith("tcp://"):
            raise ConfigurationError(f"a writer's address is tcp://host:port, not {address!r}")
        limit = max(max_message_bytes, protocol.SMALL_BYTES)
        super().__init__(zmq.DEALER, address, curve, waiting, max_bytes=limit)
        self._address = address
        self._rank = rank
        self._max_message_bytes = max_message_bytes
        self._messages = 0
        self._next_seq: int | None = None  # of the next message; None before the welcome
        self._acknowledged = 0  # all messages before this seq
        self._acknowledge_every = 1  # small messages, while others wait
        self._ready = False
        self._ahead: Packet | None = None  # received, and not applied or returned yet
        self._obstacle = "its connection"  # why the writer has not admitted this reader yet
        self._connected = False
        self._lost_at = math.inf
        self._end: KVIndexError | None = None  # what every call raises from now on
        # It connects once: messages under way on an old connection would be lost. Not by -1: with
        # that, libzmq 4.3.5 drops received messages that are unread.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._monitor.rcvhwm = 0  # a full monitor would stop ZeroMQ's thread
        self._poller.register(self._monitor, _POLLIN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._monitor.close(linger=0)
            self._close_socket(0.0)
            raise ConfigurationError(f"cannot connect to {address!r}: {error}") from error
        # ZeroMQ keeps it until there is a connection: the constructor waits for nothing.
        self._send(protocol.Hello(protocol.VERSION, rank))

    def receive(
        self,
        decode: Callable[[int, Any], Any],
        timeout: float | None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> Any:
        """Return `decode` of the next message's kind and body; `quiet`: warn of no long wait.

        The body of a message with buffers is the list of its frames, whose memory is the caller's.
        """
        kind, frames = self._receive(timeout, cancel, quiet)
        return decode(kind, frames if kind == BUFFERS else _joined(frames))

    @contextmanager
    def message(
        self, timeout: float | None, cancel: threading.Event | None, *, quiet: bool
    ) -> Iterator[memoryview]:
        """Give the next message's bytes, read-only, until the `with` ends."""
        _, frames = self._receive(timeout, cancel, quiet)
        yield memoryview(_joined(frames)).toreadonly()

    def wait_ready(self, timeout: float | None) -> None:
        """Wait until the writer reports that all readers have joined, or sends a message."""
        with self._one_user():
            patience = Patience(self._waiting, timeout)
            self._wait_until(lambda: self._next_message() or self._ready, patience, None)

    def statistics(self) -> dict[str, int]:
        return {"messages": self._messages}

    def _close(self) -> None:
        # Without a connection nothing is to be sent, and waiting for it would take its full time.
        usable = not self._is_lost() and self._connected
        try:
            if usable and self._end is None:
                self._send(protocol.Bye())  # the writer waits for this reader no more
        finally:
            with suppress(zmq.ZMQError):  # the context was terminated, which waits for what follows
                self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._close_socket(_FLUSH if usable else 0.0)

    # Receiving -----------------------------------------------------------------------------------

    def _receive(
        self, timeout: float | None, cancel: threading.Event | None, quiet: bool
    ) -> tuple[int, list[memoryview]]:
        """Return the next message's kind and frames, of which there is at least one."""
        with self._one_user():
            if self._next_message() is None:
                patience = Patience(self._waiting, timeout, quiet=quiet)
                self._wait_until(self._next_message, patience, cancel)
            message = self._consume()
            if not isinstance(self._next_packet(), Message):
                # At once: the caller may never call again, and the writer can close while the
                # caller is busy with this one.
                self._acknowledge()
            self._messages += 1
            return message

    def _next_packet(self) -> Packet | None:
        """Return the next packet, still unread; None if there is none."""
        # Kept unread: whether a message waits behind this one decides when this is acknowledged.
        if self._ahead is None and self._end is None:
            try:
                self._ahead = protocol.decode(self._socket.recv(NOBLOCK))
            except zmq.Again:
                pass
            except Malformed as error:
                self._end = self._broken(error)
        return self._ahead

    def _next_message(self) -> Message | None:
        """Apply the packets before the next message; return this one, still unread, or None."""
        while (packet := self._next_packet()) is not None:
            if isinstance(packet, Message) and self._next_seq is not None:
                return packet
            self._ahead = None
            try:
                self._apply(packet)
            except KVIndexError as error:
                self._end = error  # kept: every later call raises it again
        if self._end is not None:
            raise type(self._end)(*self._end.args)
        return None

    def _apply(self, packet: Packet) -> None:
        """Apply a packet of the writer; raise if it ends the queue for this reader."""
        match packet:
            case protocol.Welcome() if self._next_seq is None:
                self._next_seq = self._acknowledged = packet.next_seq
                self._acknowledge_every = max(1, packet.window // 4)
                self._ready = packet.ready
                self._obstacle = "other readers to join"
            case protocol.Probe():
                self._ready |= packet.ready
            case protocol.Refusal():
                raise ConfigurationError(f"the writer at {self._address} refused: {packet.reason}")
            case protocol.Eviction():
                raise ReaderEvictedError(f"the writer removed reader {self._rank}: attach again")
            case protocol.Closing():
                if self._next_seq not in (None, packet.next_seq):
                    raise self._broken(f"closed, but message {self._next_seq} is missing")
                self._send(protocol.Bye())
                raise QueueClosedError(f"the writer closed the queue at message {packet.next_seq}")
            case _:
                raise self._broken(f"an unexpected {type(packet).__name__}")

    def _consume(self) -> tuple[int, list[memoryview]]:
        """Return the next message's kind and frames, and count it as consumed."""
        message, self._ahead = self._ahead, None
        assert isinstance(message, Message)
        large = False
        try:
            frames = message.frames
            if not frames:  # those of a large message arrived with its header
                while self._socket.getsockopt(zmq.RCVMORE):
                    frames.append(self._socket.recv(NOBLOCK, copy=False).buffer)
                if not frames:
                    raise Malformed("a message without frames")
                large = True
            size = sum(frame.nbytes for frame in frames)
            if size > self._max_message_bytes:
                raise Malformed(
                    f"a message of {size} bytes; max_message_bytes is {self._max_message_bytes}"
                )
            if message.seq != self._next_seq:
                raise Malformed(f"message {message.seq} came, but {self._next_seq} was next")
        except Malformed as error:
            self._end = self._broken(error)
            raise self._end from None
        self._next_seq += 1
        self._ready = True  # the writer sends to nobody before all have joined
        # A large one at once: its bytes, not its number, may be what the writer waits for.
        if large or self._next_seq - self._acknowledged >= self._acknowledge_every:
            self._acknowledge()
        return message.kind, frames

    def _acknowledge(self) -> None:
        if self._next_seq is not None and self._next_seq != self._acknowledged:
            self._acknowledged = self._next_seq
            self._send(protocol.Acknowledgement(self._next_seq))

    def _send(self, packet: Packet) -> None:
        try:
            self._socket.send(encode(packet), NOBLOCK)
        except zmq.Again:
            pass  # the connection has ended, as `_is_lost` will notice

    # Waiting -------------------------------------------------------------------------------------

    def _wait_until(
        self, reached: Callable[[], object], patience: Patience, cancel: threading.Event | None
    ) -> None:
        while True:
            lost = self._is_lost()  # first: packets from before are still read
            if reached():
                return
            if lost:
                self._end = WriterDiedError(
                    f"no connection to {self._address} while waiting for {self._obstacle}"
                    if self._next_seq is None
                    else f"the connection to {self._address} broke before message "
                    f"{self._next_seq}: the writer died, cannot be reached, or sent a message of "
                    f"more than max_message_bytes ({self._max_message_bytes})"
                )
                raise self._end
            # Before it sleeps: the writer may be waiting for just this credit.
            self._acknowledge()
            writer = f"the writer at {self._address}: {self._obstacle}"
            self._pause(patience, cancel, "a message" if self._ready else writer)

    def _is_lost(self) -> bool:
        """Return whether the connection has ended, and every packet from it can be received."""
        while int(self._monitor.get(zmq.EVENTS)) & _POLLIN:
            event, _ = _EVENT.unpack(self._monitor.recv_multipart(NOBLOCK)[0])
            if event == zmq.EVENT_CONNECTED:
                self._connected = True
                self._obstacle = (
                    "connected, and not accepted yet: it admits readers only inside its own calls "
                    "(enqueue, wait_until_ready)"
                )
            elif event == zmq.EVENT_DISCONNECTED:
                # After an error of protocol ZeroMQ announces only this, a moment too early.
                self._lost_at = min(self._lost_at, time.monotonic() + _DRAIN)
            else:  # CONNECT_RETRIED, though it never connects again, or a handshake that failed
                self._lost_at = -math.inf
                if event & _HANDSHAKE_FAILED:
                    self._obstacle = (
                        "a handshake, which failed: do both sides have the right CURVE keys?"
                    )
        return time.monotonic() >= self._lost_at

    def _broken(self, why: object) -> WriterDiedError:
        return WriterDiedError(f"{self._address}: {why}")


def _joined(frames: list[memoryview]) -> Buffer:
    return frames[0] if len(frames) == 1 else b"".join(frames)
