"""A server of a small site at a port, and its clients, byte by byte."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from kvindex.service.http.connections import Connection
from kvindex.service.http.guards import Guard
from kvindex.service.http.messages import Handler, Reply, Request, Route, Stream, sending
from kvindex.service.http.server import HttpServer
from kvindex.service.http.site import Site
from kvindex.service.traffic import Traffic
from tests.live import PATIENCE


async def later(request: Request) -> Reply | Stream:
    """Answer after a while: with the path, and how long the body is."""
    if request.path == "/never":
        await asyncio.Event().wait()
    if request.path == "/pieces":
        return Stream(sending(pieces(int(request.query or 3))), ())
    if request.path == "/endless":
        return Stream(sending(endless()), (), is_endless=True)
    await asyncio.sleep(0)
    return Reply(200, f"app {request.path} {len(request.body)}".encode(), b"")


async def pieces(number: int) -> AsyncGenerator[bytes, None]:
    for _ in range(number):
        yield b"piece"
    if number > 3:
        raise RuntimeError("this is a bug")


async def endless() -> AsyncGenerator[bytes, None]:
    yield b": hello"
    await asyncio.Event().wait()


def echo(request: Request) -> Reply | Awaitable[Reply | Stream]:
    body = request.body
    if body == b"unknown":
        return later(request)
    if body == b"broken":
        raise RuntimeError("this is a bug")
    if body == b"long":
        return Reply(200, bytes(1 << 20), b"")
    kind = request.header(b"content-type") or b"none"
    return Reply(200, b"%b %b %d" % (kind, request.query, len(body)), b"text/plain")


def site_of(guard: Guard, traffic: Traffic | None = None, serve: Handler = echo) -> Site:
    count = (traffic or Traffic()).request
    return Site([Route("POST", "/query", serve)], guard, count, otherwise=later)


class Listening:
    """A server of one site, in a thread."""

    def __init__(self, guard: Guard, **options: Any) -> None:
        self.traffic = Traffic()
        self.guard = guard
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.server = HttpServer(site_of(guard, self.traffic), shutdown_within=1.0, **options)
        self._thread = threading.Thread(target=self.server.run, args=(listening,))
        self._thread.start()

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def raw(self, *parts: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        for part in parts:
            connection.sendall(part)
        return connection

    def ask(self, body: bytes, path: str = "/query", **headers: str) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def listening(*, tls: tuple[str, str] | None = None, **settings: Any) -> Iterator[Listening]:
    served = Listening(Guard(**settings), tls=tls)
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def listening_on(site: Site, **options: int) -> Iterator[int]:
    """Serve a site from a thread, with socket options; give its port."""
    server = HttpServer(site, shutdown_within=1.0)
    listening = socket.create_server(("127.0.0.1", 0))
    for name, value in options.items():
        listening.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=(listening,), daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.stop()
        thread.join(PATIENCE)


def post(path: bytes, *headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    length = [b"content-length: %d" % len(body)] if body or not headers else []
    lines = [b"POST %b HTTP/%b" % (path, version), b"host: localhost", *length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def responses(connection: socket.socket, number: int) -> list[tuple[int, bytes]]:
    """Read so many responses from one connection."""
    read = []
    file = connection.makefile("rb")
    for _ in range(number):
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline()) != b"\r\n":
            name, _, value = line.lower().partition(b":")
            length = int(value) if name == b"content-length" else length
        read.append((status, file.read(length)))
    return read


class Transport(asyncio.Transport):
    """A connection whose client does not read."""

    paused = False
    closed = False
    unread = 0

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return self.unread


def connection_on(
    transport: Transport, serve: Handler = echo, tokens: Sequence[str] = ()
) -> Connection:
    """Return a connection of a server on a transport. To be called in an event loop."""
    connection = Connection(site_of(Guard(tokens=tokens), serve=serve))
    connection.connection_made(transport)
    return connection


def read_until(connection: socket.socket, end: bytes | None) -> tuple[bytes, bytes, bytes]:
    """Read up to some bytes, or to the end; return the head, what parts it, and the body."""
    read = b""
    while (end is None or not read.endswith(end)) and (piece := connection.recv(1 << 16)):
        read += piece
    return read.partition(b"\r\n\r\n") if read.startswith(b"HTTP") else (read, b"", b"")
