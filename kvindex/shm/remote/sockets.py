"""The two kinds of socket of a queue over TCP, and what their monitors tell.

A reader must not come back over a new connection, as what was on the old one is lost: a broken
connection is an error, and never a hole. `ZMQ_RECONNECT_IVL` -1 says so to ZeroMQ, but then it also
throws away what had arrived and was not read yet (libzmq 4.3.5 ends the pipe at once). So the
interval is set to 24 days instead: what arrived stays readable, and the attempt that would follow
is announced at once (CONNECT_RETRIED), after all that had arrived: that is the sign of the end.
Only after an error of protocol (a frame that is too large, say) ZeroMQ does not even try, and all
that tells is DISCONNECTED, which comes a moment too early.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator

import msgspec
import zmq

from kvindex.curve import Curve
from kvindex.errors import ClosedError, ConfigurationError
from kvindex.shm.remote.frames import MAX_CONTROL_BYTES

__all__ = ["MAX_WINDOW", "RemoteLink", "WatchedSocket"]

MAX_WINDOW = 4096  # messages
# Beside the messages of a window, what may lie unread in a pipe. A full one would also stop
# ZeroMQ's answers to heartbeats, and a slow reader would seem dead.
_SPARE = 4096
# ZeroMQ holds its handshake, and what CURVE adds to a frame, to the same limit as frames.
_OVERHEAD = 4096
_HOUR = 3600
_NEVER = 2**31 - 1  # milliseconds
_EVENT = struct.Struct("=Hi")
_NOBLOCK = int(zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class RemoteLink(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the connections to readers on other machines, in seconds.

    Attributes:
        heartbeat: between pings, so that a peer is noticed that went away without closing its
            connection (a machine without power, a cut cable).
        heartbeat_timeout: without any sign from the peer, after which it counts as dead. The
            largest message must take less on the wire.
        handshake_timeout: that ZeroMQ's handshake may take.
        linger: that `close` waits at most for readers to read the rest.

    Raises:
        ConfigurationError: a value is not above 0 (`linger`: is negative), or above an hour.
    """

    heartbeat: float = 5.0
    heartbeat_timeout: float = 15.0
    handshake_timeout: float = 10.0
    linger: float = 5.0

    def __post_init__(self) -> None:
        for name in ("heartbeat", "heartbeat_timeout", "handshake_timeout"):
            if not 0 < getattr(self, name) <= _HOUR:
                raise ConfigurationError(
                    f"{name} must be above 0 and at most {_HOUR} s, not {getattr(self, name)!r}"
                )
        if not 0 <= self.linger <= _HOUR:
            raise ConfigurationError(f"linger must be 0 to {_HOUR} s, not {self.linger!r}")


class WatchedSocket:
    """A socket with its monitor, in a ZeroMQ context of its own.

    Made by `bind` (the writer's) and `connect` (a reader's).

    Attributes:
        socket: a ROUTER or DEALER.
        monitor: tells of its connections.
    """

    def __init__(self, kind: int, events: int, link: RemoteLink, *, ipv6: bool) -> None:
        # One I/O thread, so that the monitor tells what happened in the order in which it did.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self.socket = context.socket(kind)
            self.monitor = self.socket.get_monitor_socket(events)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"no socket can be had: {error}") from error
        _configure(self.socket, link, ipv6=ipv6)
        self.monitor.rcvhwm = 0  # a full monitor would stop ZeroMQ's thread
        self._finish = weakref.finalize(self, _close, self.socket, self.monitor, context, linger=0)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, _POLLIN)
        self._poller.register(self.monitor, _POLLIN)

    @classmethod
    def bind(cls, host: str, link: RemoteLink, curve: Curve | None) -> WatchedSocket:
        """Return the writer's socket, bound to a free port of this host."""
        events = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        watched = cls(zmq.ROUTER, events, link, ipv6=host.startswith("["))
        socket = watched.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES + _OVERHEAD)
        socket.sndhwm = 0  # bounded by the readers' windows
        socket.rcvhwm = MAX_WINDOW + _SPARE  # of each reader
        if curve is not None:
            curve.configure(socket)
        return watched._open(f"tcp://{host}:*", bind=True)

    @classmethod
    def connect(
        cls,
        address: str,
        link: RemoteLink,
        curve: Curve | None,
        *,
        max_part_bytes: int,
    ) -> WatchedSocket:
        """Return a reader's socket, connected to the writer's address."""
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        watched = cls(zmq.DEALER, int(events | _HANDSHAKE_FAILED), link, ipv6="[" in address)
        socket = watched.socket
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER)
        socket.setsockopt(zmq.MAXMSGSIZE, max_part_bytes + _OVERHEAD)
        socket.sndhwm = socket.rcvhwm = MAX_WINDOW + _SPARE
        if curve is not None:
            curve.configure(socket)
        return watched._open(address, bind=False)

    def _open(self, endpoint: str, *, bind: bool) -> WatchedSocket:
        try:
            if bind:
                self.socket.bind(endpoint)
            else:
                self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(0.0)
            verb = "bind to" if bind else "connect to"
            raise ConfigurationError(f"cannot {verb} {endpoint!r}: {error}") from error
        return self

    @property
    def port(self) -> int:
        """The port that the system chose."""
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    def wait(self, milliseconds: int) -> None:
        """Wait until the socket or its monitor has something, or the time is up.

        Raises:
            ClosedError: the ZeroMQ context was terminated.
        """
        try:
            self._poller.poll(milliseconds)
        except zmq.ContextTerminated as error:
            raise ClosedError("the ZeroMQ context was terminated") from error

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield each event that the monitor holds, with its value.

        Raises:
            ClosedError: the ZeroMQ context was terminated.
        """
        try:
            while int(self.monitor.get(zmq.EVENTS)) & _POLLIN:
                event, value = _EVENT.unpack(self.monitor.recv_multipart(_NOBLOCK)[0])
                yield event, value
        except zmq.ContextTerminated as error:
            raise ClosedError("the ZeroMQ context was terminated") from error

    def close(self, linger: float) -> None:
        """Close the sockets; wait at most `linger` seconds for what is to be sent still."""
        if made := self._finish.detach():
            _, close, sockets, _ = made
            close(*sockets, linger=round(linger * 1000))


def _close(
    socket: zmq.Socket[bytes],
    monitor: zmq.Socket[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    linger: int,
) -> None:
    """Close in the order that ends; also done when both were forgotten, or the process exits."""
    try:
        socket.disable_monitor()
    except zmq.ContextTerminated:
        pass
    monitor.close(linger=0)
    socket.close(linger=linger)
    context.term()  # waits for what lingers, and nothing else is open


def is_handshake_failure(event: int) -> bool:
    """Return whether a monitor's event tells of a handshake that failed."""
    return bool(event & int(_HANDSHAKE_FAILED))


def _configure(socket: zmq.Socket[bytes], link: RemoteLink, *, ipv6: bool) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(link.heartbeat))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _milliseconds(link.heartbeat_timeout))
    socket.setsockopt(zmq.HEARTBEAT_TTL, _milliseconds(link.heartbeat_timeout))
    socket.setsockopt(zmq.HANDSHAKE_IVL, _milliseconds(link.handshake_timeout))
    socket.setsockopt(zmq.IPV6, int(ipv6))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
