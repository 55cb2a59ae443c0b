"""The routes of a server behind its guard: from a request to its answer, without sockets."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from typing import Any, Final, TypeAlias

from kvindex.service.http.guards import Guard, Refusal
from kvindex.service.http.messages import (
    Handler,
    RefusedError,
    Reply,
    Request,
    Route,
    Stream,
)

logger = logging.getLogger(__name__)

Count: TypeAlias = Callable[[str, str, int], None]

OTHER: Final = "(other)"
"""The name of all methods and paths without a name of their own, where requests are counted."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SPARE: Final = 16  # descriptors for all else, such as to follow engines
_ALIVE: Final = "/health"  # shows nothing, so every client may ask
_READY: Final = "/ready"  # the status code is for every client, the reasons for admitted ones
_FAILED: Final = Refusal(500, "failed", "this request failed: the server's log says how")


class Site:
    """What the connections of one server share.

    Args:
        routes: each path and method at most once. A path that ends with "/*" stands for all below
            it that have no route of their own.
        guard: decides which requests are admitted.
        count: called with method, route and status code of each request, refused ones too.
        otherwise: answers for paths without a route; 404 by default.

    Owner: the server's event loop.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        guard: Guard,
        count: Count | None = None,
        *,
        otherwise: Handler | None = None,
    ) -> None:
        self.guard = guard
        self.connections: set[Any] = set()  # those that are open
        self.most_descriptors = math.inf  # that this process may have open
        self.others = 0  # of those that are open, counted once a second: not of `connections`
        self.held_bytes = 0  # of bodies of requests that have not ended
        self.is_ending = False  # each connection ends with its last answer
        self._count = count
        self._otherwise = otherwise
        self._routes: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._below = [path[:-1] for path in self._routes if path.endswith("/*")]
        self._operators = frozenset(route.path for route in routes if route.is_operators)
        self.note_time()

    def note_time(self) -> None:
        """Set the time that answers have in their heads: made once a second, not for each."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def has_room(self, connections: int) -> bool:
        """Return whether so many connections can be served."""
        # An admitted request may need one more, to an engine.
        wanted = self.others + 2 * connections + _SPARE
        return connections <= self.guard.limits.connections and wanted <= self.most_descriptors

    def admit(self, request: Request) -> Refusal | None:
        """Return why a request is refused, by its head; None if it is not."""
        if request.path == _ALIVE:
            return None
        if is_preflight(request):
            return self.guard.admit_preflight(request.headers)
        is_operators = self._route_of(request.path) in self._operators
        refusal = self.guard.admit(
            request.headers, is_operators=is_operators, is_local=request.is_local
        )
        # A probe of Kubernetes or of a balancer has neither the token nor a name of ours.
        if refusal is not None and request.path == _READY and refusal.status in (401, 421):
            request.is_bare = True
            return None
        return refusal

    def answer(self, request: Request) -> Reply | Awaitable[Reply | Stream]:
        """Return the answer to an admitted request, or what it is awaited from."""
        if is_preflight(request):
            return Reply(204, b"", b"", _PREFLIGHT)
        served = self._routes.get(self._route_of(request.path))
        if served is None:
            if self._otherwise is None:
                return Reply(404, b"", b"")
            serve = self._otherwise
        else:
            route = served.get("GET" if request.method == "HEAD" else request.method)
            if route is None:
                allowed = [*served, "HEAD"] if "GET" in served else served
                return Reply(405, b"", b"", ((b"allow", ", ".join(allowed).encode()),))
            serve, request.cancels = route.serve, route.cancels
        try:
            answer = serve(request)
        # A bug in one route ends neither its connection nor the server.
        except Exception as error:
            return self._failed(request, error)
        return answer if isinstance(answer, Reply) else self._await(request, answer)

    async def _await(
        self, request: Request, answering: Awaitable[Reply | Stream]
    ) -> Reply | Stream:
        try:
            answer = await answering
        except Exception as error:
            answer = self._failed(request, error)
        return Reply(answer.status, b"", b"") if request.is_bare else answer

    def _failed(self, request: Request, error: Exception) -> Reply:
        if isinstance(error, RefusedError):
            return error.reply
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return self.guard.form(_FAILED, request.path)

    def count(self, request: Request, status: int) -> None:
        """Count an answer."""
        if self._count is not None:
            # Strangers send any words: each would be a series of its own.
            method = request.method if request.method in _METHODS else OTHER
            route = self._route_of(request.path)
            self._count(method, route if route in self._routes else OTHER, status)

    def _route_of(self, path: str) -> str:
        if path in self._routes:
            return path
        return next((f"{below}*" for below in self._below if path.startswith(below)), path)


_PREFLIGHT: Final = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"*, authorization"),
    (b"access-control-max-age", b"600"),
)


def is_preflight(request: Request) -> bool:
    """Return whether a browser asks if a page of another site may send a request (Fetch, 3.3)."""
    is_asked = request.header(b"access-control-request-method") is not None
    return request.method == "OPTIONS" and is_asked
