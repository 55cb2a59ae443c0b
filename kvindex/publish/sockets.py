"""The publisher's two ZeroMQ sockets: where they listen, and how they open and close.

The engines' rules: rank r of a deployment uses port + r on tcp and the suffix `_dp{r}` on inproc,
for the live and the replay endpoint alike.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

import zmq

from kvindex.publish.publisher import KVEventsConfig
from kvindex.publish.replay import SendResult
from kvindex.wire import Dialect
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError

logger = logging.getLogger(__name__)

_SCHEMES: Final = ("tcp", "ipc", "inproc")
_MAX_PORT: Final = 65_535
_OS_CHOSEN: Final = ("0", "*")
_SGLANG_BINDS_ANY_ADDRESS: Final = (0, 5, 13)

# Peers send only subscriptions (a topic each) and requests for replay. ZeroMQ holds its handshake
# to the same limit.
_MAX_INBOUND_BYTES = 4096
_MAX_REQUEST_FRAMES = 4
_ZERO_COPY_BYTES = 64 * 1024
_LINGER_MARGIN = 50  # ms that libzmq tries on after our wait, to tell "gave up" from "done"


class PublisherSockets:
    """A PUB socket and perhaps a ROUTER, and where ZeroMQ bound them; one thread at a time."""

    def __init__(self, pub: zmq.Socket[bytes], router: zmq.Socket[bytes] | None) -> None:
        self.pub = pub
        self.router = router
        self.bound_endpoint = _last_endpoint(pub)
        self.bound_replay_endpoint = _last_endpoint(router) if router is not None else None

    def send_live(self, frames: Sequence[bytes]) -> None:
        """Send one live message, or raise zmq.ZMQError; a PUB socket drops and never waits."""
        copy = len(frames[-1]) < _ZERO_COPY_BYTES
        self.pub.send_multipart(frames, flags=zmq.NOBLOCK, copy=copy)

    def send_reply(self, frames: Sequence[bytes]) -> SendResult:
        """Send one reply of a replay without waiting, and return the result."""
        if self.router is None:
            return SendResult.UNREACHABLE
        copy = len(frames[-1]) < _ZERO_COPY_BYTES
        try:
            self.router.send_multipart(frames, flags=zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            return SendResult.NO_ROOM
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:
            logger.debug("a replay reply cannot be sent: %s", error)
            return SendResult.UNREACHABLE
        return SendResult.SENT

    def receive_request(self) -> list[bytes] | None:
        """Return the first frames of the next replay request; None if none waits."""
        if self.router is None:
            return None
        try:
            # Frame by frame: a message of a million frames must not become a list of as many.
            frames = [self.router.recv(zmq.NOBLOCK)]
            while self.router.getsockopt(zmq.RCVMORE):
                frame = self.router.recv(zmq.NOBLOCK)
                if len(frames) < _MAX_REQUEST_FRAMES:
                    frames.append(frame)
        except zmq.Again:
            return None
        return frames

    def close(self, linger: float) -> bool:
        """Close both and return whether all was handed to the network within `linger` seconds.

        An inproc peer's unread messages lie in its own queue: this does not wait for them.
        """
        milliseconds = max(0, int(linger * 1000))
        if self.router is not None:
            self.router.close(linger=milliseconds)
        is_local = self.bound_endpoint.startswith("inproc:")
        if is_local or milliseconds == 0:
            self.pub.close(linger=milliseconds)
            return is_local
        # close() returns at once, and a process that ends then loses the unsent data. libzmq stops
        # the monitor when the socket has handed all of it to the kernel.
        name = f"inproc://kvindex-publisher-closing-{id(self.pub)}"
        try:
            with self.pub.context.socket(zmq.PAIR) as monitor:
                monitor.linger = 0
                self.pub.monitor(name, zmq.EVENT_MONITOR_STOPPED)
                monitor.connect(name)
                self.pub.close(linger=milliseconds + _LINGER_MARGIN)
                return bool(monitor.poll(milliseconds))
        except zmq.ZMQError as error:  # the context was terminated meanwhile
            logger.debug("the live socket is closed without waiting: %s", error)
            self.pub.close(linger=0)
            return False


def open_sockets(
    context: zmq.Context[zmq.Socket[bytes]],
    config: KVEventsConfig,
    rank: int,
    dialect: Dialect,
    curve: Curve | None,
) -> PublisherSockets:
    """Open a rank's PUB socket and, if it has an endpoint, the ROUTER.

    Raises:
        ConfigurationError: an endpoint cannot be bound or connected to, or the keys do not fit;
            nothing stays open then.
    """
    endpoint = offset_endpoint(config.endpoint, rank)
    bind = binds_endpoint(config.endpoint, dialect) if config.bind is None else config.bind
    opened: list[zmq.Socket[bytes]] = []
    try:
        pub = _open(context, zmq.PUB, endpoint, curve, opened)
        pub.set_hwm(config.hwm)  # before it is bound: a subscriber gets the limit that holds then
        _attach(pub, endpoint, bind, "live", rank)
        if not config.replay_endpoint:
            return PublisherSockets(pub, None)
        replay_endpoint = offset_endpoint(config.replay_endpoint, rank)
        router = _open(context, zmq.ROUTER, replay_endpoint, curve, opened)
        # Without it a reply for which there is no room, or no peer, would be dropped silently.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        _attach(router, replay_endpoint, True, "replay", rank)
        return PublisherSockets(pub, router)
    except BaseException:
        for socket in opened:
            socket.close(linger=0)
        raise


def _open(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    curve: Curve | None,
    opened: list[zmq.Socket[bytes]],
) -> zmq.Socket[bytes]:
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"no socket for {endpoint}: {error}") from error
    opened.append(socket)
    # Before it is bound: it holds for connections made later only.
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_INBOUND_BYTES)
    if "[" in endpoint or "::" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if curve is not None:
        try:
            curve.configure(socket)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"this libzmq has no CURVE: {error}") from error
    return socket


def _attach(socket: zmq.Socket[bytes], endpoint: str, bind: bool, purpose: str, rank: int) -> None:
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        what = f"cannot {verb} {endpoint}, the {purpose} endpoint of rank {rank}: {error.strerror}"
        if error.errno == zmq.EADDRINUSE:
            port = port_of(endpoint)
            what += (
                ". Another publisher has it; give each its own"
                if port is None
                else f". Something listens on port {port} already. Rank r uses port + r on both "
                "endpoints, so bases one apart (5557 and 5558) collide from the second rank on: "
                "rank 1's live port is rank 0's replay port. Put the bases further apart than "
                "there are ranks"
            )
        raise ConfigurationError(what) from error


def _last_endpoint(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else str(endpoint)


# Endpoints ---------------------------------------------------------------------------------------


def offset_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """Return the endpoint of a rank, given that of rank 0.

    A port chosen by the operating system (`:0` or `:*`) stays so for every rank.

    Raises:
        ConfigurationError: not a tcp, ipc or inproc endpoint, a port that is missing or beyond
            65535 for this rank, or ipc with a rank above 0 (the engines have no rule for it).

    Examples:
        >>> offset_endpoint("tcp://*:5557", 2)
        'tcp://*:5559'
    """
    scheme, address = _split(endpoint)
    if scheme == "inproc":
        return f"{endpoint}_dp{data_parallel_rank}" if data_parallel_rank else endpoint
    if scheme == "ipc":
        if data_parallel_rank:
            raise ConfigurationError(
                f"endpoint {endpoint!r} cannot serve data_parallel_rank {data_parallel_rank}: ipc "
                "has no port to offset; use tcp:// or inproc://, or a path for each rank with "
                "rank 0"
            )
        return endpoint
    host, _, port = address.rpartition(":")
    if port in _OS_CHOSEN and host:
        return endpoint
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        raise ConfigurationError(f"endpoint {endpoint!r} needs a port, as in tcp://*:5557")
    offset = int(port) + data_parallel_rank
    if offset > _MAX_PORT:
        raise ConfigurationError(
            f"endpoint {endpoint!r} has no room for data_parallel_rank {data_parallel_rank}: "
            f"port {offset} is beyond {_MAX_PORT}"
        )
    return f"tcp://{host}:{offset}"


def binds_endpoint(endpoint: str, dialect: Dialect) -> bool:
    """Return whether the engine's live socket binds this endpoint; else it connects to it.

    ipc, inproc and wildcards (`*`, `::`) are bound, a concrete host is connected to; SGLang binds
    0.0.0.0 too since 0.5.13. A port that the operating system chooses can only be bound.

    Examples:
        >>> from kvindex.wire import dialect
        >>> binds_endpoint("tcp://0.0.0.0:5557", dialect("sglang-0.5.22"))
        True
    """
    scheme, address = _split(endpoint)
    # The engines look for these characters in the whole endpoint, a `::` of IPv6 among them.
    if scheme != "tcp" or "*" in endpoint or "::" in endpoint:
        return True
    host, _, port = address.rpartition(":")
    if port in _OS_CHOSEN:
        return True
    version = tuple(map(int, re.findall(r"\d+", dialect.name)))  # none: the newest
    binds_any_address = not version or version >= _SGLANG_BINDS_ANY_ADDRESS
    return host == "0.0.0.0" and dialect.engine == "sglang" and binds_any_address


def local_endpoint(bound: str) -> str:
    """Return an endpoint at which this machine reaches a bound endpoint.

    Examples:
        >>> local_endpoint("tcp://0.0.0.0:5557")
        'tcp://127.0.0.1:5557'
    """
    for wildcard, loopback in (("0.0.0.0", "127.0.0.1"), ("*", "127.0.0.1"), ("[::]", "[::1]")):
        prefix = f"tcp://{wildcard}:"
        if bound.startswith(prefix):
            return f"tcp://{loopback}:{bound[len(prefix) :]}"
    return bound


def port_of(endpoint: str) -> int | None:
    """Return the tcp port of an endpoint; None if it has none or the operating system chooses."""
    scheme, address = _split(endpoint)
    port = address.rpartition(":")[2]
    return int(port) if scheme == "tcp" and port not in _OS_CHOSEN else None


def _split(endpoint: str) -> tuple[str, str]:
    scheme, separator, address = endpoint.partition("://")
    if not separator or not address or scheme not in _SCHEMES:
        raise ConfigurationError(
            f"endpoint {endpoint!r} is none of tcp://host:port, ipc://path, inproc://name"
        )
    return scheme, address
