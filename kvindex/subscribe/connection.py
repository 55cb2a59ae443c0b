"""One ZeroMQ socket that connects (or binds) to a publisher, and its monitor's reports.

**How much may wait.** ZeroMQ holds at most `hwm` messages of a socket, with no frame longer than
`max_message_bytes`. A socket that is full is not read: over TCP the rest waits in the system's
buffers and in the publisher's own queue, and is lost only when that is full, too. (A ROUTER that
replays drops instead: the replay is asked for again.) It limits no message's number of frames: a
publisher that sends frames without an end fills memory, as docs/guarantees.md says.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import ipaddress
import re
import socket as sockets
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from kvindex.subscribe.watch import Watch
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError

_NOBLOCK = int(zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)
_MONITORED = struct.Struct("=Hi")  # event, value
_STUCK_AFTER = 5.0  # seconds without a sign from a socket that should be reconnecting
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_EVENTS = int(
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | _HANDSHAKE_FAILED
)
_MAX_DRAIN = 256  # messages taken from one socket before others get their turn
_MAX_DRAIN_BYTES = 8 * 1024 * 1024
_RESOLVE_AGAIN_AFTER = 30.0  # seconds: a name may become known later
_HOST = re.compile(r"tcp://(?:[^;]*;)?\[?(.*?)\]?:\d+")


class SocketOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Socket settings for every connection.

    Attributes:
        hwm: messages that may wait in a socket; the rest waits at the publisher, which drops what
            exceeds its own queue.
        max_message_bytes: a larger frame of a message closes the connection. With `hwm` it bounds
            the memory that messages of one large frame can fill.
        keepalive: seconds of silence after which the system asks the other host whether it is
            there (TCP keepalive, in whole seconds), and between two such questions.
        keepalive_timeout: seconds without an answer after which the connection counts as dead.
        reconnect: seconds before the first new try; doubles up to `max_reconnect`.
        max_reconnect: longest wait between tries, in seconds.
        handshake_timeout: seconds that a ZeroMQ handshake may take.

    Raises:
        ConfigurationError: a value is not positive.
    """

    hwm: int = 128
    max_message_bytes: int = 8 * 1024 * 1024
    keepalive: float = 5.0
    keepalive_timeout: float = 15.0
    reconnect: float = 0.1
    max_reconnect: float = 2.0
    handshake_timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ConfigurationError(f"{name} must be positive, not {value!r}")
        for name in ("hwm", "max_message_bytes"):  # ZeroMQ's own refusal would come too late
            if not isinstance(value := getattr(self, name), int):
                raise ConfigurationError(f"{name} must be a whole number, not {value!r}")

    def configure(self, socket: zmq.Socket[bytes], curve: Curve | None) -> None:
        """Apply these settings, and CURVE keys if any, to a socket before it connects."""
        socket.linger = 0
        socket.rcvhwm = self.hwm
        socket.setsockopt(zmq.MAXMSGSIZE, self.max_message_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _milliseconds(self.handshake_timeout))
        socket.setsockopt(zmq.RECONNECT_IVL, _milliseconds(self.reconnect))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _milliseconds(self.max_reconnect))
        # Not ZMTP's heartbeats: a full queue stops libzmq from reading the pong, so it gives up a
        # connection that works, and may then abort the process (zeromq/libzmq#3937).
        pause = max(1, round(self.keepalive))
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, pause)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, pause)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, max(1, round(self.keepalive_timeout / pause) - 1))
        socket.setsockopt(zmq.TCP_MAXRT, _milliseconds(self.keepalive_timeout))  # where data waits
        socket.setsockopt(zmq.IPV6, 1)
        if curve is not None:
            curve.configure(socket)


class Contexts:
    """The ZeroMQ contexts of one subscriber: the user's, or its own beside the process's."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
        # The process's own for inproc endpoints: those meet within one context only.
        self._shared = context or zmq.Context.instance()
        self._own: zmq.Context[zmq.Socket[bytes]] | None = None
        if context is None:
            # With room for thousands of ranks: each takes three to six sockets.
            self._own = zmq.Context()
            self._own.set(zmq.MAX_SOCKETS, min(65_535, self._own.get(zmq.SOCKET_LIMIT)))

    def of(self, *endpoints: str | None) -> zmq.Context[zmq.Socket[bytes]]:
        """Return the context for a publisher at these endpoints."""
        inproc = any(e is not None and e.startswith("inproc://") for e in endpoints)
        return self._shared if self._own is None or inproc else self._own

    def close(self) -> None:
        """End the contexts that are not shared, with every socket in them."""
        if self._own is not None:
            self._own.destroy(linger=0)


class HostCheck:
    """Whether the host of an endpoint can be resolved, by a function like `socket.getaddrinfo`.

    ZeroMQ reports a name that cannot be resolved like a port where nothing listens. So when a
    connection fails, the name is resolved once more, on a thread of its own: that may take long.

    Thread safety: `ask` by one thread; `trouble` can be read by any.
    """

    def __init__(
        self, endpoint: str, resolve: Callable[[str, None], Any] = sockets.getaddrinfo
    ) -> None:
        match = _HOST.fullmatch(endpoint)
        self._host = "" if match is None else match[1]
        self._resolve = resolve
        self._asked_at: float | None = None
        self._asking: threading.Thread | None = None
        self._is_name = bool(self._host)
        with suppress(ValueError):
            self._is_name = not ipaddress.ip_address(self._host)
        # Why its host is unknown; "" if it is known, None before it is resolved.
        self.trouble: str | None = None if self._is_name else ""

    def ask(self, now: float) -> None:
        """Resolve the host in the background, unless it was resolved just now."""
        asking = self._asking is not None and self._asking.is_alive()
        recent = self._asked_at is not None and now - self._asked_at < _RESOLVE_AGAIN_AFTER
        if asking or recent or not self._is_name:
            return
        self._asked_at = now

        def resolve() -> None:
            try:
                self._resolve(self._host, None)
            except (OSError, UnicodeError) as error:
                self.trouble = f"the host {self._host!r} is unknown ({error})"
            else:
                self.trouble = ""

        # A daemon: a resolver that hangs must not hold the end of the process.
        self._asking = threading.Thread(target=resolve, name="kvindex-resolve", daemon=True)
        self._asking.start()


class Connection:
    """A socket with its monitor: reports whether a peer is connected, and if not, why.

    ConfigurationError is raised where ZeroMQ refuses the endpoint.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,  # zmq.SUB or zmq.DEALER
        endpoint: str,
        socket_options: SocketOptions,
        curve: Curve | None = None,
        *,
        bind: bool = False,
        subscriptions: tuple[bytes, ...] = (),
        host: HostCheck | None = None,
        watch: Watch | None = None,  # waits for its sockets
        owner: object = None,  # what `watch` returns for them
    ) -> None:
        self.endpoint = endpoint
        self.host = HostCheck(endpoint) if host is None else host
        self.retries = 0  # attempts that failed since the last success
        self._retries_in_row = 0
        self.refused_handshakes = 0  # peers that accepted the connection and failed the handshake
        self.drained = False  # whether the last `receive` left nothing behind
        self._watch = watch
        self._owner = owner
        self._open: set[int] = set()  # descriptors of TCP or ipc connections
        self._handshakes = 0  # how many of them have shaken hands
        self._inproc = endpoint.startswith("inproc://")
        self._bound = bind
        self._changed_at: float | None = None
        self._retrying = True  # whether ZeroMQ goes on trying to connect, by its reports
        self.monitor: zmq.Socket[bytes] | None = None
        try:
            self.socket: zmq.Socket[bytes] = context.socket(kind)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"no socket for {endpoint!r} can be had: {error}") from error
        try:
            socket_options.configure(self.socket, curve)
            for topic in subscriptions:
                self.socket.subscribe(topic)
            if not self._inproc:  # inproc pipes cannot break, and report nothing
                self.monitor = self.socket.get_monitor_socket(_EVENTS)
                # A full monitor would block ZeroMQ's thread, and then whoever closes the socket.
                self.monitor.rcvhwm = 0
            if bind:
                self.socket.bind(endpoint)
            else:
                self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            verb = "bind to" if bind else "connect to"
            raise ConfigurationError(f"cannot {verb} {endpoint!r}: {error}") from error
        if watch is not None:
            # Last, for a socket that could not be set up is closed, and not watched.
            for socket in self._sockets:
                watch.add(socket, owner)

    @property
    def _sockets(self) -> list[zmq.Socket[bytes]]:
        """The socket and its monitor."""
        return [self.socket] if self.monitor is None else [self.socket, self.monitor]

    def look_again(self) -> None:
        """Have its owner read it soon; call this after leaving something unread."""
        if self._watch is not None:
            self._watch.look_again(self._owner)

    def receive(self) -> list[list[bytes]]:
        """Return the messages that are ready, up to a bound, without waiting."""
        # As `recv_multipart`, in two thirds of its time: a frame taken without copying shows by
        # itself whether more follow, so that the socket need not be asked after each.
        receive = self.socket.recv
        messages: list[list[bytes]] = []
        size = 0
        self.drained = False
        try:
            while len(messages) < _MAX_DRAIN and size < _MAX_DRAIN_BYTES:
                frame = receive(_NOBLOCK, copy=False)
                content = frame.bytes
                frames = [content]
                size += len(content)
                while frame.more:
                    frame = receive(_NOBLOCK, copy=False)
                    content = frame.bytes
                    frames.append(content)
                    size += len(content)
                messages.append(frames)
        except zmq.Again:
            self.drained = True
        return messages

    def postpone(self, now: float) -> None:
        """Count as changed now: look only later whether the socket gave up."""
        self._changed_at = now

    def changes(self, now: float) -> Iterator[bool]:
        """Yield True for each new connection and False for each lost one, as they happened."""
        while self.monitor is not None and int(self.monitor.get(zmq.EVENTS)) & _POLLIN:
            # As `zmq.utils.monitor` reads it, which loads asyncio.
            event, value = _MONITORED.unpack(self.monitor.recv_multipart(_NOBLOCK)[0])
            self._changed_at = now
            change = self._note(event, value)
            if self.retries and not self._bound:
                # Perhaps because its name is unknown, which ZeroMQ does not report.
                self.host.ask(now)
            if change is not None:
                yield change

    def _note(self, event: int, value: int) -> bool | None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            # Never more than there are connections: the event of one that has gone may come late.
            self._handshakes = min(self._handshakes + 1, max(1, len(self._open)))
            self.retries = self.refused_handshakes = 0
            return True
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            self._open.add(value)
            self._retries_in_row = 0
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._retrying = True
            self.retries += 1
            self._retries_in_row += 1
            # The first one after a connection only announces the next attempt; the second one says
            # that it was refused: whatever answered there before is gone.
            if self._retries_in_row >= 2:
                self.refused_handshakes = 0
        elif event & _HANDSHAKE_FAILED:
            self.refused_handshakes += 1
        elif event == zmq.EVENT_DISCONNECTED:
            was_connected = self.connected
            self._retrying = False  # it reports at once if it does
            # The handshake event does not say whose it was: a connection that ends while others are
            # open that never shook hands is taken for one of those (port scans, health checks).
            self.refused_handshakes += len(self._open) > self._handshakes
            self._open.discard(value)
            self._handshakes = min(self._handshakes, len(self._open))
            return False if was_connected and not self.connected else None
        return None

    @property
    def connected(self) -> bool:
        """Whether a peer's ZeroMQ handshake has succeeded and its connection stands."""
        return self._inproc or self._handshakes > 0

    @property
    def mute(self) -> bool:
        """Whether something accepted the connection but has not shaken hands yet."""
        return bool(self._open) and not self.connected

    @property
    def stuck_at(self) -> float | None:
        """When the socket counts as having given up; None while it goes on trying.

        ZeroMQ does not reconnect after a refused handshake, nor after a message that breaks its
        protocol or is too large.
        """
        if self._bound or self.connected or self.mute or self._retrying:
            return None
        return None if self._changed_at is None else self._changed_at + _STUCK_AFTER

    def trouble(self) -> str:
        """Return what is wrong with the connection, for a person; "" while nothing is known."""
        if self.connected:
            return ""
        if self.refused_handshakes:
            return (
                f"something answers at {self.endpoint}, but not as the expected ZeroMQ socket "
                f"(failed handshakes: {self.refused_handshakes})"
            )
        if self.mute:
            return f"{self.endpoint} accepts connections, but has not shaken hands as ZeroMQ does"
        if self.retries:
            trouble = self.host.trouble
            why = trouble or f"nothing listens at {self.endpoint}"
            if trouble is None:
                why += ", or its host is unknown"
            return f"{why} (failed attempts: {self.retries})"
        return f"no connection to {self.endpoint} yet"

    def close(self) -> None:
        """Close the socket and its monitor; idempotent."""
        # First: a descriptor that is closed while it is watched may be another socket's by then.
        if self._watch is not None:
            for socket in self._sockets:
                self._watch.remove(socket)
        if self.monitor is not None:
            # It fails where the context was terminated, which waits for what follows.
            with suppress(zmq.ZMQError):
                self.socket.disable_monitor()
            self.monitor.close(0)
            self.monitor = None
        self.socket.close(0)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
