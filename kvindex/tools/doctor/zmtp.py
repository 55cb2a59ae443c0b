"""Which peer answers at a ZeroMQ endpoint: its greeting, byte by byte, without joining its traffic.

A peer of ZMTP 3 greets with its security mechanism, and with NULL sends READY, which names its
kind of socket: one round trip distinguishes a publisher, a replay socket and another server.
Format: https://rfc.zeromq.org/spec/37/
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Final, Literal

import msgspec

from kvindex import Worker

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_VERSIONED: Final = 11  # bytes up to the version: then the peer sends the rest of its greeting
_COMMAND: Final = 4
_LONG: Final = 2
_MAX_COMMAND: Final = 4096

PeerKind = Literal[
    "zmq", "http", "tls", "other", "reset", "silent", "refused", "unreachable", "unseen"
]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The peer at an endpoint.

    Attributes:
        kind: "zmq"; "http", "tls" or "other" for another protocol; "reset" if it hangs up before
            any greeting, "silent" if it accepts the connection and sends nothing; "refused",
            "unreachable"; "unseen" for endpoints that have no socket to look at (inproc).
        socket_type: of a ZeroMQ peer: "PUB", "XPUB", "ROUTER", ...; "" if unknown.
        mechanism: of a ZeroMQ peer: "NULL", "PLAIN" or "CURVE".
        detail: what else is known, for people.
    """

    kind: PeerKind
    socket_type: str = ""
    mechanism: str = ""
    detail: str = ""


def look(endpoint: str, timeout: float) -> Peer:
    """Return which peer answers at an endpoint, within about three times `timeout` seconds.

    At most three connections are made, one after another, and some kB are read.

    Raises:
        ConfigurationError: it is no endpoint.

    Examples:
        >>> look("tcp://127.0.0.1:1", 1.0).kind
        'refused'
        >>> look("inproc://x", 1.0).kind
        'unseen'
    """
    Worker("of this endpoint", endpoint)  # which checks it
    if not endpoint.startswith(("tcp:", "ipc:")):
        return Peer(kind="unseen")
    try:
        with _dialled(endpoint, timeout) as connection:
            peer = greet(connection, timeout)
    except (ConnectionRefusedError, FileNotFoundError) as error:  # the latter for an ipc path
        return Peer(kind="refused", detail=str(error))
    except OSError as error:
        return Peer(kind="unreachable", detail=str(error) or "no answer in time")
    if peer.kind in ("reset", "silent"):
        return _other_protocol(endpoint, timeout) or peer
    return peer


def _dialled(endpoint: str, timeout: float) -> socket.socket:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
        except BaseException:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
    if connection.getsockname() == connection.getpeername():
        connection.close()  # TCP does this on one machine, where nothing listens
        raise ConnectionRefusedError("nobody listens: it connected to itself")
    return connection


def greet(connection: socket.socket, timeout: float) -> Peer:
    """Exchange greetings and read READY, whichever side dialled; the first bytes decide.

    Our mechanism is sent only after the peer's has arrived: one that has another hangs up at once.
    """
    until, began = time.monotonic() + timeout, b""
    try:
        connection.sendall(_GREETING[:_VERSIONED])
        while len(began) < len(_GREETING):
            connection.settimeout(_left(until))
            piece = connection.recv(len(_GREETING) - len(began))
            if not piece:
                return _not_zmtp(began, "reset")
            began += piece
            if not _may_be_zmtp(began):
                return _not_zmtp(began, "other")
        return _ready(connection, began, until)
    except TimeoutError:
        return _not_zmtp(began, "silent")
    except OSError:
        return _not_zmtp(began, "reset")


def _may_be_zmtp(began: bytes) -> bool:
    return began[:1] == b"\xff" and (len(began) < 10 or began[9] & 1 == 1)


def _not_zmtp(began: bytes, nothing: PeerKind) -> Peer:
    if not began:
        return Peer(kind=nothing)
    if began.startswith(b"HTTP/"):
        return Peer(kind="http")
    if began[:2] in (b"\x15\x03", b"\x16\x03"):
        return Peer(kind="tls")
    if _may_be_zmtp(began):  # it began as ZeroMQ does: an old version, or it hung up in between
        return Peer(kind="zmq", detail="it did not finish its greeting")
    return Peer(kind="other", detail=f"it began with {began[:16]!r}")


def _ready(connection: socket.socket, greeting: bytes, until: float) -> Peer:
    if greeting[10] < 3:
        return Peer(kind="zmq", detail=f"ZMTP version {greeting[10]}: too old to report more")
    mechanism = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
    peer = Peer(kind="zmq", mechanism=mechanism)
    if mechanism != "NULL":
        return peer
    try:
        connection.sendall(_GREETING[_VERSIONED:])
        flags, size = _exactly(connection, 2, until)
        if flags & _LONG:
            size = int.from_bytes(bytes([size]) + _exactly(connection, 7, until), "big")
        if not flags & _COMMAND or size > _MAX_COMMAND:
            return peer
        socket_type = _socket_type(_exactly(connection, size, until))
    except OSError:
        return peer
    return Peer(kind="zmq", mechanism=mechanism, socket_type=socket_type)


def _socket_type(command: bytes) -> str:
    """The kind of socket that a READY command names; "" for what is malformed."""
    name_size = command[0] if command else 0
    at = 1 + name_size
    if command[1:at] != b"READY":
        return ""
    while at < len(command):
        value_at = at + 1 + command[at]
        size = int.from_bytes(command[value_at : value_at + 4], "big")
        if command[at + 1 : value_at].lower() == b"socket-type":
            return command[value_at + 4 : value_at + 4 + size][:64].decode("ascii", "replace")
        at = value_at + 4 + size
    return ""


def _other_protocol(endpoint: str, timeout: float) -> Peer | None:
    """Which peer understands no greeting: an HTTP or a TLS server, perhaps."""
    try:
        with _dialled(endpoint, timeout) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            connection.settimeout(timeout)
            began = connection.recv(16)
            if began:
                peer = _not_zmtp(began, "other")
                return peer if peer.kind != "zmq" else None
    except OSError:
        pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only whether it speaks TLS is asked
    try:
        with _dialled(endpoint, timeout) as connection:
            with context.wrap_socket(connection):
                return Peer(kind="tls")
    except OSError:
        return None


def _exactly(connection: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(_left(until))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("it hung up")
        data += piece
    return data


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
