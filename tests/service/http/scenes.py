"""A service as tests ask it: in this process, byte by byte at a port, or as users start it."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from kvindex import Client, Rank, State
from kvindex.service.app import app_routes
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.http.connections import Connection
from kvindex.service.http.guards import Guard
from kvindex.service.http.messages import Handler, Reply, Request, Route, Stream, Writer, sending
from kvindex.service.http.server import HttpServer
from kvindex.service.http.site import Site
from kvindex.service.page import Page
from kvindex.service.service import Service
from kvindex.service.traffic import Traffic
from kvindex.testing import FakeEngine
from tests.children import ENVIRONMENT, Program
from tests.live import PATIENCE, worker_of
from tests.service.test_fleet_overview import Source, status_of

BLOCK = 4
MODEL = Partition("llama")


# In this process, without sockets


class Answer(NamedTuple):
    """The response to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    method: str,
    target: str,
    body: Any = b"",
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
) -> Request:
    """Return a request, its body as JSON if it is not bytes."""
    fields = {"host": "localhost", **{k.lower(): v for k, v in (headers or {}).items()}}
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
        fields.setdefault("content-type", "application/json")
    if content_type is not None:
        fields["content-type"] = content_type
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    return Request.of(method, urlsplit(target)._replace(fragment="").geturl().encode(), raw, body)


async def pieces_of(stream: Stream) -> AsyncGenerator[bytes, None]:
    """Yield what a stream writes, as its client reads it; closed, the client has gone."""
    written: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send() -> None:
        try:
            await stream.send(Writer(written.put_nowait, written.empty, written.join))
        finally:
            written.put_nowait(None)

    sending = asyncio.ensure_future(send())
    try:
        while (piece := await written.get()) is not None:
            yield piece
            written.task_done()
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


class Asker:
    """Sends requests to a site, or to routes."""

    def __init__(self, of: Site | Sequence[Route]) -> None:
        self.site = of if isinstance(of, Site) else Site(of, Guard())

    async def answer(self, question: Request) -> Answer:
        """Return the response to one request; a stream's as a whole."""
        refusal = self.site.admit(question)
        answer: Any = self.site.answer(question) if refusal is None else refusal.reply
        if not isinstance(answer, Reply):
            answer = await answer
        self.site.count(question, answer.status)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        if isinstance(answer, Stream):
            body = b"".join([piece async for piece in pieces_of(answer)])
        else:
            body = answer.body
            if answer.content_type:
                headers["content-type"] = answer.content_type.decode()
        return Answer(answer.status, headers, body)

    def send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the response to one request."""
        body = json if json is not None else content or b""
        return asyncio.run(self.answer(request(method, path, body, headers)))

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and JSON."""
        return _read(self.send("GET", path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON, or text."""
        return _read(self.send("POST", path, json=body))


def _read(answer: Answer) -> tuple[int, Any]:
    is_json = answer.headers.get("content-type") == "application/json"
    return answer.status, answer.json if is_json else answer.text


def body_of(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    """The body of a registration of an engine, in Dynamo's dialect."""
    return {
        "instance_id": 1,
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
        "model_name": "m",
        "block_size": 16,
        **fields,
    }


# Byte by byte


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

    def __init__(self, site: Site, tls: tuple[str, str] | None = None, **options: int) -> None:
        self.guard = site.guard
        listener = socket.create_server(("127.0.0.1", 0))
        for name, value in options.items():
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = HttpServer(site, shutdown_within=1.0, tls=tls)
        self._thread = threading.Thread(target=self.server.run, args=(listener,))
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
def listening_on(of: Site | Sequence[Route], **options: Any) -> Iterator[Listening]:
    """Serve a site, or routes, with TLS or with options of its socket."""
    served = Listening(of if isinstance(of, Site) else Site(of, Guard()), **options)
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def listening(tls: tuple[str, str] | None = None, **settings: Any) -> Iterator[Listening]:
    """Serve a small site behind a guard with these settings."""
    with listening_on(site_of(Guard(**settings)), tls=tls) as served:
        yield served


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


# A page


class ManyRanks(Source):
    """Ranks without engines, for what would take hundreds of sockets."""

    def __init__(self, number: int) -> None:
        states = [State.LIVE] * 12 + [State.STALE, State.REPAIRING, State.CONNECTING, State.SYNCING]
        super().__init__(
            *(
                status_of(
                    Rank(f"vllm-{n // 8}", n % 8),
                    states[n * 7 % 16],
                    reason="" if n * 7 % 16 < 12 else "a reason in words",
                    complete=n % 5 != 0,
                    losses=n % 3,
                )
                for n in range(number)
            )
        )
        self.source = self
        self.traffic = Traffic()
        self.missing: Any = lambda: {"http://vllm-99:8000": "nothing listens there"}
        self.catalog = Catalog(
            Registration(
                instance_id=rank.worker, partition=MODEL, dp_rank=rank.dp_rank, endpoint="tcp://h:1"
            )
            for rank in self.present
        )

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(sorted(self.present))

    def statuses(self) -> dict[Rank, Any]:
        return dict(self.present)

    def on_change(self, callback: object) -> Any:
        return lambda: None

    def explain(self, token_ids: list[int], **options: Any) -> Any:
        return self.index.explain(token_ids, **options)


def page_of(ranks: ManyRanks, **options: Any) -> Page:
    """Return a page of ranks without a service."""
    return Page(ranks, **options)  # type: ignore[arg-type]


def add_to(
    service: Service, *engines: FakeEngine, partition: Partition = MODEL, **details: Any
) -> None:
    for engine in engines:
        service.registry.add(worker_of(engine), partition, **details)


@contextmanager
def paged(*engines: FakeEngine, **details: Any) -> Iterator[tuple[Page, Client, str]]:
    """Serve a page of these engines, all of them registered; give its client and its URL too."""
    with Client(probe_interval=0.3, stale_after=20.0) as client:
        service = Service(client)
        add_to(service, *engines, **details)
        page = Page(service)
        try:
            with listening_on(app_routes(service, routes=page.routes)) as served:
                yield page, client, served.url
        finally:
            page.close()


# A process of its own


class Served(Program):
    """A running `kvindex serve`, at a port that the system chooses."""

    def __init__(self, *argv: object, env: Mapping[str, str] | None = None) -> None:
        command = ("-m", "kvindex", "serve", "--port", "0", *map(str, argv))
        given = {**ENVIRONMENT, **(env or {})}
        super().__init__(*command, stdin=subprocess.DEVNULL, env=given)
        self.said: list[str] = []  # on stderr
        self.errors = threading.Thread(target=self._read_errors, daemon=True)
        self.errors.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in iter(self.process.stderr.readline, ""):
            self.said.append(line)

    @cached_property
    def port(self) -> int:
        line = self.line().strip()
        printed = re.search(r"at (https?)://[^ ]*:(\d+)$", line)
        if printed is None:
            code = self.process.wait(PATIENCE)
            self.errors.join(PATIENCE)
            raise AssertionError(f"{line!r}, exit code {code}: {''.join(self.said)}")
        return int(printed[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        via: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """Return the response to one request, on a connection of its own unless one is given."""
        connection = via or self.connection()
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            if via is None:
                connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask(
            "POST", path, body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(*argv: object, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Run `kvindex serve`."""
    with Served(*argv, env=env) as served:
        try:
            assert served.port
            yield served
        finally:
            served.process.kill()
            served.errors.join(PATIENCE)
            assert not served.errors.is_alive(), "a process that it started has not ended"


@contextmanager
def engine(name: str = "1", **options: Any) -> Iterator[FakeEngine]:
    """Run a fake engine."""
    with FakeEngine(name, block_size=BLOCK, **options) as running:
        yield running


def register(served: Served, fake: FakeEngine, **fields: Any) -> Answer:
    """Register an engine's rank, as Dynamo's clients do."""
    headers = fields.pop("headers", {})
    own = {"instance_id": int(fake.worker), "block_size": BLOCK, **fields}
    return served.ask("POST", "/register", body_of(fake, **own), headers)


def matched(served: Served, tokens: list[int], instance: str = "1", **headers: str) -> int:
    """Return how many tokens of a prompt an instance is said to hold."""
    answer = served.post("/query", {"token_ids": tokens, "model_name": "m"}, **headers)
    if answer.status != 200:
        return -answer.status
    instances = answer.json["instances"]
    return int(instances[instance]["longest_matched"]) if instance in instances else 0


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """Return a new certificate for localhost, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([openssl, *made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
