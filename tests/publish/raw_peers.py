"""A peer that speaks ZeroMQ's protocol (ZMTP 3.0) byte by byte, and so may break it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from tests.live import PATIENCE


class RawPeer:
    """A TCP connection to a ZeroMQ socket, with the greeting exchanged.

    Args:
        endpoint: where the socket is bound.
        mechanism: of security that the peer says it speaks.
    """

    def __init__(self, endpoint: str, mechanism: bytes = b"NULL") -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE)
        signature = b"\xff" + bytes(8) + b"\x7f"
        self.send(signature + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))

    def ready(self, kind: bytes) -> None:
        """Say which kind of socket this is: with NULL, that is all of the handshake."""
        name = b"Socket-Type"
        value = struct.pack(">I", len(kind)) + kind
        self.command(b"READY", bytes([len(name)]) + name + value)

    def command(self, name: bytes, body: bytes) -> None:
        content = bytes([len(name)]) + name + body
        self.send(bytes([4, len(content)]) + content)

    def frame(self, content: bytes, *, length: int | None = None) -> None:
        """Send a frame, or the beginning of one that is to be as long as this."""
        size = len(content) if length is None else length
        self.send(b"\x02" + struct.pack(">Q", size) + content)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def wait_closed(self) -> None:
        """Return when the other side has closed the connection.

        Raises:
            TimeoutError: it stays open.
        """
        with suppress(ConnectionError):
            while self.socket.recv(65_536):
                pass

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()
