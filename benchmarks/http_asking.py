"""HTTP clients that cost next to nothing: sockets, and requests that were written beforehand."""

from __future__ import annotations

import gc
import selectors
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from time import perf_counter, perf_counter_ns, sleep
from typing import Final

_BUFFER: Final = 1 << 20  # bytes: of a response, and that a socket takes at once
_WARMING: Final = 20  # requests before those that count
_TIMEOUT: Final = 30.0


def request(path: str, content_type: str, body: bytes) -> bytes:
    """Return a POST as it is on the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """A kept connection; one request at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=_TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._filled = self._wanted = 0

    def send(self, message: bytes) -> None:
        """Send a request."""
        self._filled = self._wanted = 0
        self.socket.sendall(message)

    def receive(self) -> bool:
        """Read what is there; return whether the response is whole.

        Raises:
            RuntimeError: it is no 200.
        """
        count = self.socket.recv_into(self._view[self._filled :])
        if count == 0:
            raise RuntimeError("the service closed the connection")
        self._filled += count
        if self._wanted == 0:
            end = self._buffer.find(b"\r\n\r\n", 0, self._filled)
            if end < 0:
                return False
            head = bytes(self._view[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(f"the service said {bytes(self._view[: self._filled])!r}")
            length = head.partition(b"content-length:")[2].partition(b"\r")[0]
            self._wanted = end + 4 + int(length)
        return self._filled >= self._wanted

    def ask(self, message: bytes) -> bytes:
        """Send a request and return the body of the response."""
        self.send(message)
        while not self.receive():
            pass
        start = self._buffer.find(b"\r\n\r\n") + 4
        return bytes(self._view[start : self._wanted])

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def ask_in_turn(
    address: tuple[str, int],
    requests: Sequence[bytes],
    *,
    count: int = 0,
    seconds: float = 0.0,
    pause: float = 0.0,
) -> list[int]:
    """Return the nanoseconds of each request on one connection: so many, or for so long."""
    samples: list[int] = []
    with Connection(address) as connection, _undisturbed():
        messages = cycle(requests)
        for _ in range(_WARMING):
            connection.ask(next(messages))
        until = perf_counter() + seconds
        while len(samples) < count or perf_counter() < until:
            message = next(messages)
            started = perf_counter_ns()
            connection.send(message)
            while not connection.receive():
                pass
            samples.append(perf_counter_ns() - started)
            if pause:
                sleep(pause)
    return samples


def ask_together(
    address: tuple[str, int], requests: Sequence[bytes], connections: int, seconds: float
) -> float:
    """Return the answers a second to so many connections, each with one request at a time."""
    with ExitStack() as stack, selectors.DefaultSelector() as selector, _undisturbed():
        messages = cycle(requests)
        for _ in range(connections):
            connection = stack.enter_context(Connection(address))
            connection.ask(next(messages))
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        for key in selector.get_map().values():
            key.data.send(next(messages))
        answered, started = 0, perf_counter()
        until = started + seconds
        while (now := perf_counter()) < until:
            for key, _ in selector.select(_TIMEOUT):
                if key.data.receive():
                    answered += 1
                    key.data.send(next(messages))
        return answered / (now - started)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without garbage collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
