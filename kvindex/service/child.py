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
from collections.abc import Awaitable, Iterable
from typing import BinaryIO, Final

import msgspec

from kvindex.index.replicas import join
from kvindex.service.catalog import Catalog, Change, Partition
from kvindex.service.http.guards import Guard
from kvindex.service.http.messages import Reply, Request, Route, Stream
from kvindex.service.http.server import HttpServer
from kvindex.service.http.site import Site
from kvindex.service.processes import Registered, Start, Stop, read_order
from kvindex.service.proxy import Proxy
from kvindex.service.query_requests import answer
from kvindex.service.service import Ranks, Service
from kvindex.service.traffic import Traffic

logger = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 60.0
_ORPHAN_SECONDS: Final = 1  # for open requests, once the parent is gone


class NotKnownHereError(Exception):
    """A partition that may be registered with the parent since a moment ago."""


class ReplicaService(Service):
    """A service that leaves unknown partitions to the parent."""

    def ranks_of(self, partition: Partition) -> Ranks:
        """Return the ranks to answer for.

        Raises:
            NotKnownHereError: no registration of this partition has arrived here.
        """
        ranks = super().ranks_of(partition)
        if ranks is None:
            raise NotKnownHereError
        return ranks


def child_site(service: Service, guard: Guard, proxy: Proxy, names: Iterable[str] = ()) -> Site:
    """Return a site that answers `/query` and `/health` from a replica, and passes the rest on.

    `names` are the paths that requests are counted under.
    """

    def query(request: Request) -> Reply | Awaitable[Reply | Stream]:
        try:
            return answer(service, request)
        except NotKnownHereError:
            return proxy(request)

    routes = [
        Route("POST", "/query", query),
        Route("GET", "/health", lambda _: Reply(200, b"", b"")),
    ]
    return Site(routes, guard, service.traffic.request, names=names, otherwise=proxy)


class Orders:
    """Carries out the parent's orders after the first, on a thread of its own, until the pipe ends.

    Attributes:
        are_known: set once the registrations have come.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self.are_known = threading.Event()
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
                self._server.shutdown_within = _ORPHAN_SECONDS
            self._server.stop()

    def _follow(self, catalog: Catalog) -> None:
        with self._lock:
            self._catalog = catalog
            if self._service is not None:
                self._service.follow(catalog)
        self.are_known.set()


def main() -> int:
    """Serve until the order to stop, or until the parent is gone; return the exit code."""
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
    traffic = Traffic(memoryview(mmap.mmap(start.counters_fd, Traffic.SIZE)))
    with join(start.fanout, _JOIN_SECONDS) as replica:
        orders.are_known.wait()
        dialect, max_tokens = start.settings.dialect, start.settings.limits.tokens
        service = ReplicaService(replica, traffic=traffic, dialect=dialect, max_tokens=max_tokens)
        _serve(start, orders, service)
    return 0


def _serve(start: Start, orders: Orders, service: Service) -> None:
    settings = start.settings
    guard = Guard(
        tokens=start.tokens,
        allowed_hosts=settings.allowed_hosts,
        limits=settings.limits,
        counters=service.traffic.refused,
    )
    site = child_site(service, guard, Proxy(start.upstream, guard), start.routes)
    server = HttpServer(
        site,
        shutdown_within=settings.shutdown_within,
        tls=settings.listening.tls,
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    orders.begin(service, server)
    server.run([socket.socket(fileno=start.listen_fd)])


if __name__ == "__main__":
    sys.exit(main())
