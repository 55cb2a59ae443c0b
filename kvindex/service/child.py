"""A process that answers queries from a replica, and passes all else on to its parent.

Started as `python -m kvindex.service.child` by `Children` alone: orders come through stdin.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import threading
from typing import BinaryIO, Final

import msgspec

from kvindex.index.replicas import join
from kvindex.service.asking import answer
from kvindex.service.catalog import Catalog, Change, Partition
from kvindex.service.counters import Counters
from kvindex.service.gate import Gate, Message, Receive, Scope, Send
from kvindex.service.guards import REASONS, Guard
from kvindex.service.http import HttpServer
from kvindex.service.orders import Registered, Start, Stop, read_order
from kvindex.service.protocol import query_protocol
from kvindex.service.proxy import Proxy
from kvindex.service.replies import Reply
from kvindex.service.service import Ranks, Service
from kvindex.service.traffic import Traffic

__all__ = ["COUNTED", "ChildApp", "main"]

logger = logging.getLogger(__name__)

COUNTED: Final = (*REASONS, "passed_on")
"""The counters of a child, besides its `Traffic`, which stands behind them."""

_JOIN_SECONDS: Final = 60.0
_ORPHAN_SECONDS: Final = 1  # for open requests, once the parent is gone


class NotKnownHereError(Exception):
    """A partition that the parent may know, since somebody registered a moment ago."""


class ReplicaService(Service):
    """A service that never says of itself that a partition is unknown."""

    def ranks_of(self, partition: Partition) -> Ranks:
        """Return the ranks to answer for.

        Raises:
            NotKnownHereError: nobody is registered for this partition, as far as is known here.
        """
        ranks = super().ranks_of(partition)
        if ranks is None:
            raise NotKnownHereError
        return ranks


class ChildApp:
    """Answers `/query` and `/health` here; passes on the rest, and unknown partitions.

    Args:
        service: answers from the replica.
        proxy: passes on.
        counters: of COUNTED.

    Owner: the event loop.
    """

    def __init__(self, service: Service, proxy: Proxy, counters: Counters) -> None:
        self._service = service
        self._proxy = proxy
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            await _send(send, Reply(200, b"", b""))
            return
        if scope["path"] == "/query" and scope["method"] == "POST":
            body = await _whole(receive)
            if body is None:
                return  # the client has gone
            reply = self.query(body, _content_type(scope), scope["query_string"])
            if reply is not None:
                await _send(send, reply)
                return
            receive = _again(body, receive)
        self._counters.add("passed_on")
        await self._proxy(scope, receive, send)

    def query(
        self, body: bytes, content_type: bytes | None, query_string: bytes = b""
    ) -> Reply | None:
        """Return the answer to a query, or None if the parent has to be asked.

        A partition that is not known here may have been registered a moment ago.
        """
        try:
            return answer(self._service, body, content_type, query_string)
        except NotKnownHereError:
            return None


class Orders:
    """Carries out the parent's orders, on a thread of its own, until the pipe closes.

    Args:
        pipe: where the orders come from, after the first.

    Attributes:
        told: set once it is known who is registered.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self.told = threading.Event()
        self._pipe = pipe
        self._lock = threading.Lock()
        self._catalog = Catalog()
        self._service: Service | None = None
        self._server: HttpServer | None = None
        threading.Thread(target=self._run, name="kvindex-orders", daemon=True).start()

    def begin(self, service: Service, server: HttpServer) -> None:
        """Pass orders to these from now on."""
        with self._lock:
            self._service, self._server = service, server
            service.follow(self._catalog)

    def _run(self) -> None:
        why = "the parent process is gone"
        try:
            for line in self._pipe:
                order = read_order(line)
                if isinstance(order, Stop):
                    why = ""
                    break
                if isinstance(order, Registered):
                    self._follow(Catalog(order.registrations))
                elif isinstance(order, Change):
                    self._follow(self._catalog.changed(order))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = f"an order could not be read ({error})"
        if why:
            logger.error("%s: this process ends", why)
        with self._lock:
            if self._server is None:
                os._exit(0)  # it answers no requests yet, and may wait for the fan-out for long
            if why:
                self._server.config.timeout_graceful_shutdown = _ORPHAN_SECONDS
            self._server.stop()

    def _follow(self, catalog: Catalog) -> None:
        with self._lock:
            self._catalog = catalog
            if self._service is not None:
                self._service.follow(catalog)
        self.told.set()


def main() -> int:
    """Serve until told to stop, or the parent is gone; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent as well
    pipe = os.fdopen(os.dup(0), "rb")
    line = pipe.readline()
    if not line:
        return 0  # the parent has gone already
    start = read_order(line)
    if not isinstance(start, Start):
        raise TypeError(f"the first order is {type(start).__name__}")
    logging.basicConfig(level=start.log_level, format="%(levelname)s %(name)s: %(message)s")
    orders = Orders(pipe)
    memory = memoryview(mmap.mmap(start.counters_fd, Counters.size(COUNTED) + Traffic.SIZE))
    counters = Counters(COUNTED, memory)
    traffic = Traffic(memory[Counters.size(COUNTED) :])
    with join(start.fanout, _JOIN_SECONDS) as replica:
        orders.told.wait()
        service = ReplicaService(
            replica, traffic=traffic, dialect=start.dialect, max_tokens=start.limits.tokens
        )
        _serve(start, orders, service, counters)
    return 0


def _serve(start: Start, orders: Orders, service: Service, counters: Counters) -> None:
    guard = Guard(
        tokens=start.tokens,
        allowed_hosts=start.allowed_hosts,
        limits=start.limits,
        counters=counters,
    )
    proxy = Proxy(start.upstream, guard)
    app = ChildApp(service, proxy, counters)
    server = HttpServer(
        Gate(app, guard, service.traffic.request, start.routes),
        guard,
        base=query_protocol(app.query, service.traffic),
        shutdown_within=start.shutdown_within,
        tls=None if start.tls_cert is None else (start.tls_cert, start.tls_key),
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    orders.begin(service, server)
    server.run(sockets=[socket.socket(fileno=start.listen_fd)])
    proxy.close()


async def _whole(receive: Receive) -> bytes | None:
    """Return a request's whole body, or None if the client went."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a body once more, and then the messages that follow."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _content_type(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == b"content-type"), None)


async def _send(send: Send, reply: Reply) -> None:
    headers = [(b"content-length", b"%d" % len(reply.body))]
    if reply.content_type:
        headers.append((b"content-type", reply.content_type))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


if __name__ == "__main__":
    sys.exit(main())
