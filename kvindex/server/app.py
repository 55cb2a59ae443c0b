"""The app: routes over a `Service`. Guards, sockets and processes are others' business."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvindex import BusyError, ClosedError
from kvindex.errors import EndpointRefusedError, RegistrationError
from kvindex.server.asking import answer
from kvindex.server.catalog import DEFAULT_GROUP, Partition
from kvindex.server.dialects import dynamo
from kvindex.server.replies import TEXT, Reply, json_reply, refused
from kvindex.server.service import Service

__all__ = ["build_app"]

logger = logging.getLogger(__name__)

_CODES = {"conflict": 409, "unknown": 404, "invalid": 400, "room": 503}
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Body = TypeVar("_Body", bound=msgspec.Struct)
_Handler = Callable[[Request], Awaitable[Response]]


class Metrics(Protocol):
    """What writes the metrics; see `Exposition.write`."""

    def __call__(
        self, workers: Collection[str] | None = None, *, per_rank: bool = True
    ) -> tuple[bytes, str]: ...


def build_app(
    service: Service,
    *,
    routes: Sequence[BaseRoute] = (),
    metrics: Metrics | None = None,
) -> Starlette:
    """Return the ASGI app that answers for a service.

    Args:
        service: what answers.
        routes: further ones (the page, `/api/…`, `/events`), which come after its own.
        metrics: returns the body of `GET /metrics` and its content type, for all workers or some;
            called in a thread.
    """
    endpoints = Endpoints(service, metrics)
    own = [
        Route("/query", endpoints.query, methods=["POST"]),
        Route("/register", endpoints.register, methods=["POST"]),
        Route("/unregister", endpoints.unregister, methods=["POST"]),
        Route("/outcomes", endpoints.outcomes, methods=["POST"]),
        Route("/workers", endpoints.workers, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/ready", endpoints.ready, methods=["GET"]),
    ]
    if metrics is not None:
        own.append(Route("/metrics", endpoints.metrics, methods=["GET"]))
    app = Starlette(
        routes=[*own, *routes],
        exception_handlers={HTTPException: _bare, ClientDisconnect: _gone},
    )
    app.router.redirect_slashes = False
    return app


class Outcome(msgspec.Struct, frozen=True):
    """The body of POST /outcomes: one finished request, in tokens.

    Attributes:
        model_name, routing_group: whose.
        asked: in its prompt.
        attainable: of these, those that the best rank held when it was routed.
        chosen: those that the chosen rank was expected to find cached.
        delivered: those that its engine did find; null if it did not say.
    """

    model_name: str
    asked: _Tokens
    attainable: _Tokens
    chosen: _Tokens
    delivered: _Tokens | None = None
    routing_group: str = DEFAULT_GROUP

    def __post_init__(self) -> None:
        for name in ("attainable", "chosen", "delivered"):
            if (getattr(self, name) or 0) > self.asked:
                raise ValueError(f"{name} must not be more than asked, {self.asked} tokens")

    @property
    def partition(self) -> Partition:
        """Whose it is."""
        return Partition(self.model_name, self.routing_group)


class Endpoints:
    """The handlers of the app's own routes. Owner: the event loop."""

    def __init__(self, service: Service, metrics: Metrics | None = None) -> None:
        self._service = service
        self._metrics = metrics

    async def query(self, request: Request) -> Response:
        """Answer POST /query."""
        content_type = request.headers.get("content-type")
        body = await request.body()
        return _response(
            answer(self._service, body, None if content_type is None else content_type.encode())
        )

    async def register(self, request: Request) -> Response:
        """Answer POST /register."""
        body = await _read(request, dynamo.Register)
        if isinstance(body, Reply):
            return _response(body)
        registry = self._service.registry
        return await _changed(lambda: dynamo.registered(registry.register(body.registration())))

    async def unregister(self, request: Request) -> Response:
        """Answer POST /unregister."""
        body = await _read(request, dynamo.Unregister)
        if isinstance(body, Reply):
            return _response(body)
        registry = self._service.registry

        def leave() -> Reply:
            registry.unregister(**body.which())
            return dynamo.unregistered()

        return await _changed(leave)

    async def outcomes(self, request: Request) -> Response:
        """Answer POST /outcomes: a router reports what became of a finished request."""
        body = await _read(request, Outcome)
        if isinstance(body, Reply):
            return _response(body)
        if body.partition not in self._service.catalog.partitions:
            return _response(refused(404, f"no indexer for {body.partition}"))
        self._service.traffic.outcome(
            body.partition, body.asked, body.attainable, body.chosen, body.delivered
        )
        return _response(Reply(200, b'{"status":"ok"}'))

    async def workers(self, request: Request) -> Response:
        """Answer GET /workers."""
        model = request.query_params.get("model_name")
        group = request.query_params.get("routing_group")
        statuses = [
            (one, status)
            for one, status in await asyncio.to_thread(self._service.statuses)
            if model in (None, one.partition.model) and group in (None, one.partition.routing_group)
        ]
        return _response(json_reply(200, dynamo.workers(statuses)))

    async def health(self, request: Request) -> Response:
        """Answer GET /health: this process runs."""
        return _response(Reply(200, b"", b""))

    async def ready(self, request: Request) -> Response:
        """Answer GET /ready: whether queries are to be sent here."""
        strict = request.query_params.get("strict", "") not in ("", "0", "false")
        standing = await asyncio.to_thread(self._service.standing)
        is_ready = standing.live if strict else standing.ready
        reasons = {
            name: {str(rank): why for rank, why in getattr(standing, name).items()}
            for name in ("waiting", "given_up", "behind")
        }
        return _response(
            json_reply(
                200 if is_ready else 503, {"ready": is_ready, "live": standing.live, **reasons}
            )
        )

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics; `?worker=` (repeatable) and `?ranks=0` make it shorter."""
        assert self._metrics is not None
        workers = request.query_params.getlist("worker") or None
        per_rank = request.query_params.get("ranks", "1") not in ("0", "false")
        body, content_type = await asyncio.to_thread(self._metrics, workers, per_rank=per_rank)
        return _response(Reply(200, body, content_type.encode()))


async def _read(request: Request, form: type[_Body]) -> _Body | Reply:
    """Return a request's JSON body, or why it cannot be read."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        return Reply(415, b"send the body with content-type: application/json", TEXT)
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        return Reply(422, f"the body has not the right form: {error}".encode(), TEXT)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Reply(400, f"the body is no JSON: {error}".encode(), TEXT)


async def _changed(change: Callable[[], Reply]) -> Response:
    """Carry a change out in a thread, since it waits for the subscriber's."""
    try:
        reply = await asyncio.to_thread(change)
    except RegistrationError as error:
        reply = refused(_CODES[error.reason], str(error))
    except EndpointRefusedError as error:
        reply = refused(403, str(error))
    except (BusyError, ClosedError) as error:
        reply = refused(503, str(error))
    return _response(reply)


def _response(reply: Reply) -> Response:
    response = Response(reply.body, reply.status)
    if reply.content_type:
        response.headers["content-type"] = reply.content_type.decode()
    return response


async def _bare(request: Request, error: Exception) -> Response:
    """Answer what has no route: the code, and no words."""
    assert isinstance(error, HTTPException)
    return Response(status_code=error.status_code, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Answer nobody: the client has gone, or its body was found too long."""
    return Response(status_code=400)
