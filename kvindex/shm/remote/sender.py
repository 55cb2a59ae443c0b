"""The writer's end of a queue over TCP."""

from __future__ import annotations

import errno
import ipaddress
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import zmq

from kvindex.shm.remote import protocol
from kvindex.shm.remote.protocol import (
    NOBLOCK,
    Acknowledgement,
    Bye,
    Hello,
    Message,
    Refusal,
    RemoteEnd,
    encode,
)
from kvindex.shm.ring import Buffer, Patience, Waiting
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ClosedError, ConfigurationError, QueueTimeoutError
from kvindex.wire.log_rate import LogRate

logger = logging.getLogger(__name__)

_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_TURN = 1000  # packets applied in a row, however many readers and strangers send
_MAX_QUEUED = 2 * protocol.MAX_WINDOW  # packets of one reader that ZeroMQ queues
_PROBE_EVERY = 1.0  # seconds
_HANDOVER = 2.0  # seconds that a reader waits for its rank while another reader has it
_FLUSH = 0.1  # seconds in which ZeroMQ may send the last packets


class RemoteSender(RemoteEnd):
    """Sends each message to every remote reader, and loses none silently.

    `send` waits until each of the `n_remote` readers has joined once, and without credit. There is
    no thread but ZeroMQ's: readers are admitted, and their acknowledgements read, during the calls
    of this class. Without keys everyone is admitted, and messages travel in the clear.

    ROUTER refuses to send to a connection that has ended. So a reader's death is noticed by the
    next message or, where the writer waits, by a probe each second.

    One thread at a time uses it; `statistics`, `connected` and `close` may be called by any.
    """

    def __init__(
        self,
        n_remote: int,
        connect_ip: str,
        *,
        curve: Curve | None,
        waiting: Waiting,
        window: int = 256,
        max_window_bytes: int = 64 * 1024 * 1024,
        linger: float = 5.0,
    ) -> None:
        if not 1 <= window <= protocol.MAX_WINDOW:
            raise ConfigurationError(
                f"window must be 1 to {protocol.MAX_WINDOW} messages, not {window!r}"
            )
        host = _host(connect_ip)
        endpoint = f"tcp://{host}:*"
        limit = protocol.MAX_READER_BYTES
        super().__init__(zmq.ROUTER, endpoint, curve, waiting, max_bytes=limit)
        self._n_remote = n_remote
        self._linger = linger
        self._window = SendWindow(messages=window, size=max_window_bytes)
        self._serve_every = max(1, window // 4)
        self._unserved = 0  # messages sent since `_serve`
        self._ranks: dict[bytes, int] = {}  # by routing id; a new dict at each change
        self._joined: set[int] = set()  # ranks that have joined at any time
        self._hellos: dict[bytes, tuple[Hello, float]] = {}  # with their time
        self._unreachable: set[bytes] = set()  # routing ids, until `_serve` removes them
        self._dead: set[int] = set()  # ranks that are to be returned
        self._ready = False
        self._probe_at = 0.0
        self._interrupted = False  # something is sent in part, or to some readers only
        self._counters = dict.fromkeys(("waits", "joined", "left", "died", "evicted", "refused"), 0)
        self._log_rate = LogRate()
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what is sent to the dead is dropped
        # Against strangers, who have no window.
        self._socket.rcvhwm = _MAX_QUEUED
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._close_socket(0.0)
            raise ConfigurationError(f"cannot bind to {endpoint!r}: {error}") from error
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"tcp://{host}:{port}"

    @property
    def connected(self) -> frozenset[int]:
        """The ranks of the readers that joined and, as far as is known, are still connected."""
        return frozenset(self._ranks.values())

    def wait_ready(self, timeout: float | None) -> frozenset[int]:
        """Wait until all readers are connected, and notify them; return the ranks that died."""
        with self._one_user():
            self._wait_until(lambda: len(self._ranks) == self._n_remote, timeout)
            self._ready = True  # the welcome of those that come later says so
            self._send_to_all(protocol.Probe(ready=True))
            return self._take_dead()

    def send(
        self, kind: int, frames: Sequence[Buffer], timeout: float | None = None
    ) -> frozenset[int]:
        """Send a message, one or more runs of bytes, to every reader; return the ranks found dead.

        The frames are copied. Either every living reader is sent the message or, if an error is
        raised, none is.
        """
        with self._one_user():
            size = sum(map(len, frames))
            # Not at each message: a look at the socket costs more than a small message's sending.
            if len(self._ranks) < self._n_remote or self._unserved >= self._serve_every:
                self._serve()
            if not self._has_credit(size):
                self._counters["waits"] += 1
                self._wait_until(lambda: self._has_credit(size), timeout)
            seq = self._window.next_seq
            parts: list[bytes | zmq.Frame]
            if size + 8 * len(frames) <= protocol.SMALL_BYTES:
                views = cast("list[memoryview]", frames)  # to msgpack all buffers are the same
                parts = [encode(Message(seq, kind, views))]
            else:  # one copy, which the connections of all readers share
                copies = [zmq.Frame(frame, copy=True) for frame in frames]
                parts = [encode(Message(seq, kind, [])), *copies]
            # From here on an interrupt leaves some readers with the message and others without.
            self._interrupted = True
            for routing_id in self._ranks:
                self._transmit_parts(routing_id, parts)
            self._window.record(size)
            self._interrupted = False
            self._unserved += 1
            if self._unreachable:
                self._serve()
            return self._take_dead()

    def serve(self) -> frozenset[int]:
        """Admit readers and apply their packets, without waiting; return the ranks found dead."""
        with self._one_user():
            self._serve()
            return self._take_dead()

    def evict(self, rank: int) -> bool:
        """Remove the reader of this rank, and notify it; return whether there was one."""
        with self._one_user():
            routing_id = {value: key for key, value in self._ranks.items()}.get(rank)
            if routing_id is not None:
                self._transmit(routing_id, protocol.Eviction())
                self._remove(routing_id, "evicted")
            return routing_id is not None

    def statistics(self) -> dict[str, int]:
        """Return the counters since the start, and the state now.

        Messages `sent` and `sent_bytes` (each once, however many readers); `waits` for credit or
        for readers to join; readers that `joined`, `left`, `died`, were `evicted`; `refused`
        packets of readers or strangers. Now: `connected` readers, `unread` messages and
        `unread_bytes` of the reader that has most.
        """
        return self._counters | {
            "sent": self._window.next_seq,
            "sent_bytes": self._window.sent_bytes,
            "connected": len(self._ranks),
            "unread": self._window.unread,
            "unread_bytes": self._window.unread_bytes,
        }

    def _close(self) -> None:
        """Notify the readers of the end, and wait at most `linger` seconds until all is read."""
        try:
            if not self._interrupted:  # else no reader may take what it has for the whole
                self._send_to_all(protocol.Closing(self._window.next_seq))
                self._wait_until(lambda: not self._window.unread, self._linger)
        except QueueTimeoutError:
            for rank in self.connected:
                if unread := self._window.unread_by(rank):
                    logger.warning(
                        "closed while remote reader %d had not read %d messages", rank, unread
                    )
        finally:
            # A slower reader still reads what has reached its machine by then, and gets an error
            # if something is missing.
            self._close_socket(_FLUSH)

    # Sending -------------------------------------------------------------------------------------

    def _has_credit(self, size: int) -> bool:
        return len(self._joined) == self._n_remote and self._window.admits(size)

    def _send_to_all(self, packet: protocol.Packet) -> None:
        for routing_id in self._ranks:
            self._transmit(routing_id, packet)

    def _transmit(self, routing_id: bytes, packet: protocol.Packet) -> bool:
        return self._transmit_parts(routing_id, [encode(packet)])

    def _transmit_parts(self, routing_id: bytes, parts: Sequence[bytes | zmq.Frame]) -> bool:
        """Send to one reader, never waiting; return whether its connection is there."""
        # After an exception, ZeroMQ would append the next part to this message.
        interrupted, self._interrupted = self._interrupted, True
        send = self._socket.send
        try:
            send(routing_id, _MORE)
            for part in parts[:-1]:
                send(part, _MORE, copy=type(part) is bytes)
            send(parts[-1], NOBLOCK, copy=type(parts[-1]) is bytes)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._unreachable.add(routing_id)
        self._interrupted = interrupted
        return routing_id not in self._unreachable

    def _wait_until(self, reached: Callable[[], bool], timeout: float | None) -> None:
        patience = Patience(self._waiting, timeout)
        while True:
            self._serve()
            if reached():
                return
            if len(self._joined) == self._n_remote and self._window.unread:
                awaited = (
                    f"remote reader {self._window.slowest} to read: {self._window.unread} messages "
                    f"of {self._window.unread_bytes} bytes are unread"
                )
            else:
                absent = self._n_remote - len(self._ranks)
                ranks = sorted(self.connected)
                awaited = f"{absent} remote readers to join; connected: ranks {ranks}"
            self._pause(patience, None, awaited)

    def _check_open(self) -> None:
        super()._check_open()
        if self._interrupted:
            raise ClosedError(
                f"message {self._window.next_seq} was interrupted while some readers had it and "
                "others did not: close the queue"
            )

    # Readers -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Apply the packets received, without waiting, and remove the readers that died."""
        self._unserved = 0
        self._receive()
        # A writer that waits sends nothing else by which it would notice that a reader is dead.
        now = time.monotonic()
        if now >= self._probe_at:
            self._probe_at = now + _PROBE_EVERY
            self._send_to_all(protocol.Probe(self._ready))
        if self._unreachable:
            self._receive()  # the last packet of a reader may be a Bye
            unreachable, self._unreachable = self._unreachable, set()
            for routing_id in unreachable & self._ranks.keys():
                rank = self._ranks[routing_id]
                unread = self._window.unread_by(rank)
                # Where nothing is lost, only the caller's policy for dead readers reports it.
                level = logging.WARNING if unread else logging.INFO
                logger.log(level, "remote reader %d died, %d messages unread", rank, unread)
                self._dead.add(rank)
                self._remove(routing_id, "died")
        for routing_id in list(self._hellos):  # last, as other readers may have left by now
            self._answer(routing_id)

    def _receive(self) -> None:
        # Not until it is empty: who sends without end would keep the writer here.
        for _ in range(_TURN):
            try:
                routing_id, *parts = self._socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            try:
                self._apply(routing_id, protocol.decode(b"".join(parts)))
            except protocol.Malformed as error:
                self._refuse(str(error))

    def _apply(self, routing_id: bytes, packet: protocol.Packet) -> None:
        rank = self._ranks.get(routing_id)
        match packet:
            case Hello() if rank is None:
                self._hellos[routing_id] = packet, time.monotonic()
                if packet.rank in self._ranks.values():
                    self._probe_at = 0.0  # perhaps the reader that has this rank is dead
            case Bye() if routing_id in self._hellos:
                del self._hellos[routing_id]
            case Bye() if rank is not None:
                self._remove(routing_id, "left")
            case Acknowledgement() if rank is not None:
                if not self._window.acknowledge(rank, packet.next_seq):
                    self._refuse("an impossible acknowledgement")
            case _:
                self._refuse(f"an unexpected {type(packet).__name__}")

    def _answer(self, routing_id: bytes) -> None:
        """Admit a reader that sent a hello, or refuse it, or let it wait for its rank."""
        hello, received_at = self._hellos[routing_id]
        rank, reason = hello.rank, None
        if hello.version != protocol.VERSION:
            reason = f"the writer speaks version {protocol.VERSION}, the reader {hello.version}"
        elif rank in self._ranks.values() and not self._closed:
            if time.monotonic() < received_at + _HANDOVER:
                return  # the one before it may be about to leave, or to be found dead
            reason = f"rank {rank} has another reader: attach again when it has left or is dead"
        elif rank not in self._joined and len(self._joined) == self._n_remote:
            reason = f"rank {rank} is none of its remote readers': other ranks have joined"
        del self._hellos[routing_id]
        if reason is not None:
            self._refuse(reason)
            self._transmit(routing_id, Refusal(reason))
        elif self._closed:
            self._transmit(routing_id, protocol.Closing(self._window.next_seq))
        else:
            # Sent in part, or sent and not counted, the reader would be in the queue and not in the
            # window: an interrupt here ends the queue.
            window = self._window
            self._interrupted = True
            welcome = protocol.Welcome(window.next_seq, window.messages, self._ready)
            if self._transmit(routing_id, welcome):  # else it has left again
                self._joined.add(rank)
                self._ranks = {**self._ranks, routing_id: rank}
                window.join(rank)
                self._counters["joined"] += 1
                logger.debug("remote reader %d joined at message %d", rank, window.next_seq)
            self._interrupted = False

    def _remove(self, routing_id: bytes, fate: str) -> None:
        self._counters[fate] += 1
        self._window.leave(self._ranks[routing_id])
        # A new dict: a loop that sends to all may be going through the old one.
        self._ranks = {key: rank for key, rank in self._ranks.items() if key != routing_id}

    def _take_dead(self) -> frozenset[int]:
        dead, self._dead = self._dead, set()
        return frozenset(dead)

    def _refuse(self, reason: str) -> None:
        """Count a packet that is ignored, and log it at times."""
        # Strangers send what they like, as often as they like: not a line for each.
        self._counters["refused"] += 1
        if self._log_rate.allows():
            count = self._counters["refused"]
            logger.warning("refused %d packets of readers or strangers; now: %s", count, reason)


class SendWindow:
    """Which messages are unread, and whether another one may be sent.

    A reader acknowledges with the seq of the message that it wants next. So the next one makes up
    for an acknowledgement that was lost or repeated. Each reader may have so many `messages` of so
    many bytes (`size`) unread; a larger message is sent when nothing else is unread.
    """

    def __init__(self, *, messages: int, size: int) -> None:
        self.messages = messages
        self.size = size
        self.next_seq = 0  # of the next message, with which a reader that joins now begins
        self.sent_bytes = 0  # of all messages before it
        self._wanted: dict[int, int] = {}  # rank -> the seq that this reader wants next
        self._starts: deque[int] = deque()  # for each unread message, the bytes sent before it

    @property
    def unread(self) -> int:
        """How many messages the slowest reader has not acknowledged."""
        return len(self._starts)

    @property
    def unread_bytes(self) -> int:
        """The bytes of these messages."""
        try:
            return self.sent_bytes - self._starts[0]
        except IndexError:  # also where another thread empties it meanwhile
            return 0

    @property
    def slowest(self) -> int:
        """The rank of the reader that has most unread; there must be a reader."""
        return min(self._wanted, key=self._wanted.__getitem__)

    def unread_by(self, rank: int) -> int:
        """Return how many messages this reader has not acknowledged."""
        return self.next_seq - self._wanted[rank]

    def join(self, rank: int) -> None:
        """Add a reader, which begins with the next message."""
        self._wanted[rank] = self.next_seq

    def leave(self, rank: int) -> None:
        """Remove a reader."""
        del self._wanted[rank]
        self._forget_read()

    def admits(self, size: int) -> bool:
        """Return whether a message of `size` bytes may be sent now. O(1)."""
        starts = self._starts
        if not starts:  # however large it is: it could never be sent otherwise
            return True
        return len(starts) < self.messages and self.sent_bytes - starts[0] + size <= self.size

    def record(self, size: int) -> None:
        """Count a message of `size` bytes as sent to all readers."""
        if self._wanted:  # without readers nothing is unread
            self._starts.append(self.sent_bytes)
        self.next_seq += 1
        self.sent_bytes += size

    def acknowledge(self, rank: int, next_seq: int) -> bool:
        """Apply a reader's acknowledgement; return False, and change nothing, if it cannot be."""
        if not self._wanted[rank] <= next_seq <= self.next_seq:
            return False
        self._wanted[rank] = next_seq
        self._forget_read()
        return True

    def _forget_read(self) -> None:
        unread = self.next_seq - min(self._wanted.values(), default=self.next_seq)
        while len(self._starts) > unread:
            self._starts.popleft()


def _host(connect_ip: str) -> str:
    """Return an IP address of one interface of this machine, as an endpoint has it."""
    try:
        address = ipaddress.ip_address(str(connect_ip))
    except ValueError:
        raise ConfigurationError(
            f"connect_ip must be an IP address as text, not {connect_ip!r}"
        ) from None
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        raise ConfigurationError(
            f"connect_ip {connect_ip!r} means all interfaces of this machine: give the address of "
            "one of them, which readers connect to and which alone is listened on"
        )
    return f"[{address}]" if address.version == 6 else str(address)
