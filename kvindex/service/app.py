"""The app: routes over a `Service`. Guards, sockets and processes are others' business."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from kvindex.service.asking import answer
from kvindex.service.asking_by_hash import HashQueries, no_hashes
from kvindex.service.dialects import dynamo, rfc
from kvindex.service.dumping import MOST_BLOCKS, dump
from kvindex.service.openapi import description
from kvindex.service.outcomes import take_outcome
from kvindex.service.peers import peer_routes
from kvindex.service.registering import register, unregister
from kvindex.service.replies import Reply, json_reply, refused, text_reply
from kvindex.service.service import Service

__all__ = ["MOST_CHANGES", "build_app"]

logger = logging.getLogger(__name__)

MOST_CHANGES: Final = 256
"""Registrations that may be carried out, or wait for that, at once."""

_CHANGERS: Final = 8  # threads that carry them out


class Metrics(Protocol):
    """Writes the metrics; see `Exposition.write`."""

    def __call__(
        self, workers: Collection[str] | None = None, *, per_rank: bool = True
    ) -> tuple[bytes, str]: ...


def build_app(
    service: Service,
    *,
    routes: Sequence[BaseRoute] = (),
    metrics: Metrics | None = None,
    by_hash: HashQueries | None = None,
) -> Starlette:
    """Return the ASGI app that answers for a service.

    Args:
        service: the answering service.
        routes: further ones (the page, `/api/…`, `/events`), which come after its own.
        metrics: returns the body of `GET /metrics` and its content type, for all workers or some;
            called in a thread.
        by_hash: answers `/query_by_hash`; None: there is no such route.
    """
    endpoints = Endpoints(service, metrics, by_hash)
    own = [
        Route("/query", endpoints.query, methods=["POST"]),
        Route("/register", endpoints.register, methods=["POST"]),
        Route("/unregister", endpoints.unregister, methods=["POST"]),
        Route("/outcomes", endpoints.outcomes, methods=["POST"]),
        Route("/workers", endpoints.workers, methods=["GET"]),
        Route("/services", endpoints.services, methods=["GET"]),
        Route("/query_by_hash", endpoints.query_by_hash, methods=["POST"]),
        Route("/dump", endpoints.dump, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/ready", endpoints.ready, methods=["GET"]),
    ]
    if metrics is not None:
        own.append(Route("/metrics", endpoints.metrics, methods=["GET"]))
    whole = [*own, *peer_routes(), *routes]
    paths = [getattr(route, "path", "") for route in whole]
    described = json_reply(200, description([*paths, "/openapi.json"]))

    async def openapi(request: Request) -> Response:
        return described.response()

    app = Starlette(
        routes=[*whole, Route("/openapi.json", openapi, methods=["GET"])],
        exception_handlers={HTTPException: _bare, ClientDisconnect: _gone},
    )
    app.router.redirect_slashes = False
    return app


class Endpoints:
    """The handlers of the app's own routes. Owner: the event loop."""

    def __init__(
        self, service: Service, metrics: Metrics | None, by_hash: HashQueries | None
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._by_hash = by_hash
        # Threads of their own: they wait for the subscriber and for names, and no other call may.
        self._changers = ThreadPoolExecutor(_CHANGERS, "kvindex-registering")
        self._changing = 0

    async def query(self, request: Request) -> Response:
        """Answer POST /query."""
        body = await request.body()
        query_string: bytes = request.scope["query_string"]
        reply = answer(self._service, body, _content_type(request), query_string)
        return reply.response()

    async def query_by_hash(self, request: Request) -> Response:
        """Answer POST /query_by_hash."""
        by_hash = self._by_hash
        if by_hash is None:
            return no_hashes().response()
        return by_hash.answer(await request.body(), _content_type(request)).response()

    async def register(self, request: Request) -> Response:
        """Answer POST /register."""
        return await self._change(register, request)

    async def unregister(self, request: Request) -> Response:
        """Answer POST /unregister."""
        return await self._change(unregister, request)

    async def _change(
        self, change: Callable[[Service, bytes, bytes | None], Reply], request: Request
    ) -> Response:
        """Carry a change out in a thread, since it waits for the subscriber's."""
        body = await request.body()
        if self._changing >= MOST_CHANGES:
            return refused(
                503, f"{self._changing} registrations are waiting: send it again", "busy"
            ).response()
        self._changing += 1
        try:
            loop = asyncio.get_running_loop()
            kind = _content_type(request)
            reply = await loop.run_in_executor(self._changers, change, self._service, body, kind)
        finally:
            self._changing -= 1
        return reply.response()

    async def services(self, request: Request) -> Response:
        """Answer GET /services."""
        shown = await asyncio.to_thread(self._service.shown)
        return json_reply(200, rfc.services(one for one, _ in shown)).response()

    async def outcomes(self, request: Request) -> Response:
        """Answer POST /outcomes: a router reports the outcome of a finished request."""
        body = await request.body()
        return take_outcome(self._service, body, _content_type(request)).response()

    async def workers(self, request: Request) -> Response:
        """Answer GET /workers."""
        model = request.query_params.get("model_name")
        group = request.query_params.get("routing_group")
        statuses = [
            (one, status)
            for one, status in await asyncio.to_thread(self._service.shown)
            if model in (None, one.partition.model) and group in (None, one.partition.routing_group)
        ]
        return json_reply(200, dynamo.workers(statuses)).response()

    async def health(self, request: Request) -> Response:
        """Answer GET /health: this process runs."""
        return Reply(200, b"", b"").response()

    async def ready(self, request: Request) -> Response:
        """Answer GET /ready: whether queries are to be sent here."""
        strict = request.query_params.get("strict", "") not in ("", "0", "false")
        standing = await asyncio.to_thread(self._service.standing)
        is_ready = standing.live if strict else standing.ready
        reasons = {
            name: {str(rank): why for rank, why in getattr(standing, name).items()}
            for name in ("waiting", "given_up", "behind")
        }
        told = {
            "ready": is_ready,
            "live": standing.live,
            **reasons,
            "missing": dict(standing.missing),
        }
        return json_reply(200 if is_ready else 503, told).response()

    async def dump(self, request: Request) -> Response:
        """Answer GET /dump?blocks=N."""
        asked = request.query_params.get("blocks", str(MOST_BLOCKS))
        if not (asked.isascii() and asked.isdigit() and len(asked) < 10):
            return text_reply(422, f"blocks must be 0 or more, not {asked!r:.40}").response()
        lines = dump(self._service, int(asked))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics; `?worker=` (repeatable) and `?ranks=0` make it shorter."""
        assert self._metrics is not None
        workers = request.query_params.getlist("worker") or None
        per_rank = request.query_params.get("ranks", "1") not in ("0", "false")
        body, content_type = await asyncio.to_thread(self._metrics, workers, per_rank=per_rank)
        return Reply(200, body, content_type.encode()).response()


def _content_type(request: Request) -> bytes | None:
    content_type = request.headers.get("content-type")
    return None if content_type is None else content_type.encode("latin-1")


async def _bare(request: Request, error: Exception) -> Response:
    """Answer a request without a route: the code, and no text."""
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Send no answer: the client has gone, or its body was found too long."""
    return Response(status_code=400)
