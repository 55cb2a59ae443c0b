"""The routes of a `Service`: queries, registrations, and views of workers and blocks.

Each route stands here once, with its description for `/openapi.json`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from kvindex import UnknownRankError
from kvindex.service import dialects
from kvindex.service.http.messages import (
    Reply,
    Request,
    Route,
    Stream,
    in_threads,
    json_reply,
    refused,
    sending,
    text_reply,
)
from kvindex.service.openapi import (
    COUNT,
    GROUP,
    binary,
    description,
    json,
    media,
    objects,
    parameter,
    route,
)
from kvindex.service.service import Service

MOST_CHANGES: Final = 256
"""Registrations that may be carried out, or wait for that, at once."""

MOST_BLOCKS: Final = 10_000
"""Blocks of each rank that `/dump` lists unless asked otherwise."""

_LINES: Final = 500  # of it in one piece
_CHANGERS: Final = 8  # threads that carry registrations out
_LIST: Final = (b"content-type", b"application/x-ndjson")
_DONE: Final = json(objects(status=str))


def app_routes(
    service: Service,
    *,
    routes: Sequence[Route] = (),
    metrics: Callable[..., tuple[bytes, str]] | None = None,
) -> list[Route]:
    """Return the routes that answer for a service.

    `routes` are further ones (the page, `/api/…`, `/events`), to be described with its own;
    `metrics` is `Exposition.write`, for `GET /metrics`.
    """
    whole = [*_requests(service), *_views(_Views(service)), *routes]
    if metrics is not None:
        text = media("text/plain", "As Prometheus reads them.")
        parameters = [
            parameter("worker", "only these; repeatable", list[str]),
            parameter("ranks", "0: no series of single ranks"),
        ]
        serve = partial(_write_metrics, metrics)
        whole.append(
            route("GET /metrics", serve, "Metrics for Prometheus", text, parameters=parameters)
        )
    at, summary = "GET /openapi.json", "This description"
    whole.append(route(at, lambda _: document, summary, json({"type": "object"})))
    # At last, and once: it describes its own route as well, and no route comes later.
    document = json_reply(200, description(whole))
    return whole


class _Changes:
    """Carries registrations out on threads of their own; owned by the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # A registration waits for the subscriber and for DNS. On the loop's own threads it would
        # keep other requests waiting that need one.
        self._threads = ThreadPoolExecutor(_CHANGERS, "kvindex-registering")
        self._changing = 0

    async def carry_out(
        self, change: Callable[[Service, Request], Reply], request: Request
    ) -> Reply:
        # Each one keeps its body until its turn.
        if self._changing >= MOST_CHANGES:
            why = f"{self._changing} registrations are waiting: send it again"
            return refused(503, why, "busy")
        self._changing += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, change, self._service, request)
        finally:
            self._changing -= 1


def _requests(service: Service) -> list[Route]:
    changes = _Changes(service)
    octets = "Tokens as 32-bit little-endian integers, nothing else."
    names = ("model_name", "model", "routing_group", "tenant_id", "lora_name", "cache_salt")
    return [
        route(
            "POST /query",
            partial(dialects.answer, service),
            "What each instance holds of a prompt",
            json({"type": "object"}, "What each instance holds."),
            codes=(404, 415),
            body={
                **_json_of({"anyOf": [dialects.DynamoQuery, dialects.RfcQuery]}),
                "application/octet-stream": binary(octets),
            },
            parameters=[
                parameter(name, "with a body of application/octet-stream") for name in names
            ],
        ),
        route(
            "POST /outcomes",
            partial(dialects.count_outcome, service),
            "Report the cached tokens of a finished request",
            _DONE,
            codes=(404, 415),
            body=_json_of(dialects.Outcome),
        ),
        route(
            "POST /register",
            partial(changes.carry_out, dialects.register),
            "Subscribe to one DP rank of an instance",
            {"200": _DONE, "201": _DONE},
            codes=(409, 415),
            body=_json_of({"anyOf": [dialects.DynamoRegister, dialects.RfcRegister]}),
        ),
        route(
            "POST /unregister",
            partial(changes.carry_out, dialects.unregister),
            "Unsubscribe from an instance or a rank",
            _DONE,
            codes=(404, 409, 415),
            body=_json_of({"anyOf": [dialects.DynamoUnregister, dialects.RfcUnregister]}),
        ),
    ]


def _json_of(kind: Any) -> dict[str, Any]:
    return {"application/json": {"schema": kind}}


class _Views:
    """Shows what is registered, how it stands, and what it holds; owned by the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # All are O(ranks), so each is made in a thread: queries would wait for thousands of ranks.

    async def services(self, _: Request) -> Reply:
        statuses = await asyncio.to_thread(self._service.with_block_sizes)
        return json_reply(200, dialects.services(registration for registration, _ in statuses))

    async def workers(self, request: Request) -> Reply:
        parameters = request.parameters
        model, group = (
            parameters.get(name, [None])[-1] for name in ("model_name", "routing_group")
        )
        statuses = [
            (registration, status)
            for registration, status in await asyncio.to_thread(self._service.with_block_sizes)
            if model in (None, registration.partition.model)
            and group in (None, registration.partition.routing_group)
        ]
        return json_reply(200, dialects.workers(statuses))

    async def ready(self, request: Request) -> Reply:
        strict = request.parameter("strict") not in ("", "0", "false")
        standing = await asyncio.to_thread(self._service.standing)
        is_ready = standing.live if strict else standing.ready
        reasons = {
            name: {str(rank): why for rank, why in getattr(standing, name).items()}
            for name in ("waiting", "given_up", "behind", "missing")
        }
        body = {"ready": is_ready, "live": standing.live, **reasons}
        return json_reply(200 if is_ready else 503, body)

    async def dump(self, request: Request) -> Reply | Stream:
        blocks = request.parameter("blocks", str(MOST_BLOCKS))
        # `int` takes more than digits: spaces, underscores, and digits of other scripts.
        if not (blocks.isascii() and blocks.isdigit() and len(blocks) < 10):
            return text_reply(422, f"blocks must be 0 or more, not {blocks!r:.40}")
        return Stream(sending(in_threads(_dump(self._service, int(blocks)))), (_LIST,))


def _dump(service: Service, most_blocks: int) -> Iterator[bytes]:
    """Yield pieces of lines: one about each registered rank, then one for each of its blocks."""
    # It is not Dynamo's dump: that names blocks by the hashes of their tokens, which kvindex does
    # not keep. `block_hash` is the engine's own label, an integer or the hex of bytes.

    def line(block: msgspec.Struct) -> bytes:
        fields = msgspec.structs.asdict(block)
        if isinstance(fields["block_hash"], bytes):
            fields["block_hash"] = fields["block_hash"].hex()
        return msgspec.json.encode(fields) + b"\n"

    for partition in service.catalog.partitions:
        ranks = service.ranks_of(partition)
        for rank in () if ranks is None else ranks.rows:
            try:
                # A copy, and only when the rank's turn comes: so one rank at a time is in memory.
                tree = service.source.index.tree(rank)
                blocks = tree.walk()
                about = {
                    "model": partition.model,
                    "routing_group": partition.routing_group,
                    "rank": str(rank),
                    "blocks": len(tree),
                    "listed": min(len(tree), most_blocks),
                }
            except UnknownRankError:  # unregistered just now
                continue
            yield msgspec.json.encode(about) + b"\n"
            lines = map(line, islice(blocks, most_blocks))
            while piece := b"".join(islice(lines, _LINES)):
                yield piece


def _views(views: _Views) -> list[Route]:
    reasons = {"type": "object", "additionalProperties": str}
    names = dict.fromkeys(("waiting", "given_up", "missing", "behind"), reasons)
    standing = objects("ready", "live", ready=bool, live=bool, **names)
    worker = objects(
        *("instance_id", "status", "model_name", "routing_group"),
        instance_id={"type": ["integer", "string"]},
        status={"enum": ["active", "pending", "failed"]},
        model_name=str,
        routing_group=str,
        block_size=COUNT,
        endpoints={"type": "object", "additionalProperties": str},
        listeners={"type": "object", "additionalProperties": {"type": "object"}},
    )
    services = objects(count=COUNT, services={"type": "array", "items": {"type": "object"}})
    return [
        route(
            "GET /workers",
            views.workers,
            "The instances and their listeners",
            json({"type": "array", "items": worker}),
            parameters=[parameter("model_name"), GROUP],
        ),
        route("GET /services", views.services, "The registrations", json(services)),
        # It looks at nothing: who restarts a server because its engines are away loses its index.
        route(
            "GET /health",
            lambda _: Reply(200, b"", b""),
            "Whether the process runs",
            {"description": "It does."},
            is_probe=True,
        ),
        route(
            "GET /ready",
            views.ready,
            "Whether queries are to be sent here; without the token, the code alone",
            {"200": json(standing, "They are."), "503": json(standing, "They are not.")},
            codes=(403,),
            is_probe=True,
            parameters=[parameter("strict", "1: only while every rank is live")],
        ),
        route(
            "GET /dump",
            views.dump,
            "Ranks and blocks, as lines of JSON",
            media("application/x-ndjson", "One line for each rank and block."),
            codes=(422,),
            parameters=[
                parameter("blocks", "most blocks of each rank", COUNT | {"maximum": 10**9 - 1})
            ],
        ),
    ]


async def _write_metrics(write: Callable[..., tuple[bytes, str]], request: Request) -> Reply:
    workers = request.parameters.get("worker")
    per_rank = request.parameter("ranks", "1") not in ("0", "false")
    body, content_type = await asyncio.to_thread(write, workers, per_rank=per_rank)
    return Reply(200, body, content_type.encode())
