"""GET /openapi.json: what each route takes and answers, as OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import kvindex
from kvindex.service.openapi_operations import (
    COUNT,
    NAME,
    either,
    get,
    in_json,
    json,
    media,
    objects,
    packed,
    parameter,
    post,
    schema,
)
from kvindex.service.openapi_schemas import schemas
from kvindex.service.trends import WINDOWS

__all__ = ["description"]

_BINARY: Final = {"type": "string", "format": "binary"}
_GROUP: Final = [parameter("routing_group", "whose: `default` unless told")]
_QUERY_FIELDS: Final = (
    *("model_name", "model", "routing_group", "tenant_id"),
    *("lora_name", "cache_salt"),
)


def description(paths: Iterable[str]) -> dict[str, Any]:
    """Return the OpenAPI document of a server that has these routes.

    The files of the page under `/static/` are left out: they change with it, and nobody else
    needs them.
    """
    known = {**_queries(), **_registrations(), **_views(), **_page()}
    for path, item in known.items():
        for method, operation in item.items():
            name = path[1:].replace(".", "_").replace("/", "_") or "page"
            operation["operationId"] = f"{method}_{name}"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvindex",
            "version": kvindex.__version__,
            "description": "Which engine already has the beginning of this prompt, and how far "
            "the answer can be trusted. Queries and registrations come in four dialects. A server "
            "with a token wants it with every request but those to /health and /ready.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {path: known[path] for path in sorted(set(paths)) if path in known},
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {
                    "type": "http",
                    "scheme": "basic",
                    "description": "Any user name, and the token as the password: for browsers.",
                },
            },
        },
        "security": [{}, {"token": []}, {"password": []}],
    }


def _queries() -> dict[str, Any]:
    said = (
        "A map with the fields of RfcQuery or DynamoQuery, or of a query of Mooncake's conductor "
        "(`model`, `block_size`, `token_ids`); `token_ids` is an array, or bin with 32-bit "
        "little-endian integers. The answer is msgpack, too."
    )
    octets = {**_BINARY, "description": "Tokens as 32-bit little-endian integers, nothing else."}
    answer = {**json(schema("Answer"), "What each instance holds.")}
    answer["content"] = {**answer["content"], "application/msgpack": {}}
    return {
        "/query": post(
            "What each instance holds of a prompt",
            {
                **in_json(either("DynamoQuery", "RfcQuery")),
                **packed(said),
                "application/octet-stream": {"schema": octets},
            },
            answer,
            *(404, 415),
            parameters=[
                parameter(name, "with a body of application/octet-stream") for name in _QUERY_FIELDS
            ],
        ),
        "/query_by_hash": post(
            "The same, by the hashes of blocks",
            in_json(schema("HashQuery")),
            json(schema("Answer"), "What each instance holds."),
            *(404, 415, 501),
        ),
        "/outcomes": post(
            "Report what became of a request",
            in_json(schema("Outcome")),
            json(objects(status=NAME)),
            *(404, 415),
        ),
    }


def _registrations() -> dict[str, Any]:
    done = json(objects(status=NAME))
    done["content"] = {**done["content"], "application/msgpack": {}}
    linked = {**done, "links": _links()}
    url = in_json(objects("url", url=NAME))
    return {
        "/register": post(
            "Subscribe to one DP rank of an instance",
            {
                **in_json(either("DynamoRegister", "RfcRegister")),
                **packed("A map with the same fields, or a service of Mooncake's conductor."),
            },
            {"200": linked, "201": linked},
            *(409, 415),
        ),
        "/unregister": post(
            "Unsubscribe from an instance or a rank",
            {
                **in_json(either("DynamoUnregister", "RfcUnregister")),
                **packed("A map with the same fields; the conductor's has no `modelname`."),
            },
            done,
            *(404, 409, 415),
        ),
        "/register_peer": post("Refused: there are no peers", url, {}, 415, 501),
        "/deregister_peer": post("Refused: there are no peers", url, {}, 404, 415),
        "/peers": get("No peers", json({"type": "array", "maxItems": 0})),
        "/workers": get(
            "The instances and their listeners",
            json({"type": "array", "items": schema("Worker")}),
            parameters=[parameter("model_name"), *_GROUP],
        ),
        "/services": get(
            "The registrations",
            json(objects(count=COUNT, services={"type": "array", "items": {"type": "object"}})),
        ),
    }


def _views() -> dict[str, Any]:
    return {
        "/health": get("Whether the process runs", {"description": "It does."}, probe=True),
        "/ready": get(
            "Whether queries are to be sent here; without the token, the code alone",
            {"200": _ready("They are."), "503": _ready("They are not.")},
            403,
            probe=True,
            parameters=[parameter("strict", "1: only while every rank is live")],
        ),
        "/dump": get(
            "Ranks and blocks, as lines of JSON",
            media("application/x-ndjson", "One line for each rank and block."),
            422,
            parameters=[
                parameter("blocks", "most blocks of each rank", COUNT | {"maximum": 10**9 - 1})
            ],
        ),
        "/metrics": get(
            "Metrics for Prometheus",
            media("text/plain", "As Prometheus reads them."),
            parameters=[
                parameter("worker", "only these; repeatable", {"type": "array", "items": {**NAME}}),
                parameter("ranks", "0: no series of single ranks"),
            ],
        ),
        "/snapshot": get(
            "All that is known, for `kvindex serve --warm-from URL`, the secret seed included",
            media("application/octet-stream", "What `Client.save` writes.", _BINARY),
        ),
        "/openapi.json": get("This description", json({"type": "object"})),
    }


def _page() -> dict[str, Any]:
    return {
        "/": get(
            "The page",
            {
                "200": media("text/html", "For a browser."),
                "304": {"description": "It has not changed."},
            },
            parameters=[parameter("If-None-Match", "the ETag of what is there", where="header")],
        ),
        "/api/fleet": get(
            "How every rank stands, and sums", json(schema("Fleet"), "At most 0.5 s old.")
        ),
        "/api/timeline": get("What has happened, oldest first", json(schema("Timeline"))),
        "/api/traffic": get(
            "What was asked over time, of all processes",
            json(schema("Traffic")),
            422,
            parameters=[
                parameter("model", "of which; all by default"),
                *_GROUP,
                parameter("seconds", "how far back, 900 by default", {"enum": list(WINDOWS)}),
            ],
        ),
        "/api/prefixes": get(
            "Which prefixes are held by whom, the most widely held first",
            json(schema("Prefixes")),
            422,
            parameters=[
                parameter("model", "of whose ranks; all by default"),
                *_GROUP,
                parameter("max_nodes", "1000 by default", _from_1(5_000)),
                parameter("min_blocks", "1 by default", _from_1(2**31)),
            ],
        ),
        "/api/explain": post(
            "How far a prompt matches on each rank, and where and why that ends",
            in_json(schema("Question")),
            json(schema("Explained"), "Longest matches first."),
            *(404, 409, 502),
        ),
        "/events": get(
            "What happens, as server-sent events, until either side ends it",
            media(
                "text/event-stream",
                "First `fleet` with the present states, then `state`, `gap`, `replay`, `loss`, "
                "`restart`, `added` and `removed`, each with a Happening as its data.",
            ),
            parameters=[parameter("Last-Event-ID", "the last that was received", where="header")],
        ),
    }


def _from_1(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _links() -> dict[str, Any]:
    """Return what can be done with an instance once it is registered."""
    model = "$request.body#/model_name"
    same = {name: f"$request.body#/{name}" for name in ("instance_id", "model_name")}
    again = ("instance_id", "model_name", "endpoint", "block_size")
    return {
        "query": {
            "operationId": "post_query",
            "requestBody": {"model_name": model, "token_ids": [1, 2, 3, 4]},
        },
        "unregister": {"operationId": "post_unregister", "requestBody": same},
        "register": {
            "operationId": "post_register",
            "requestBody": {name: f"$request.body#/{name}" for name in again},
        },
        "workers": {"operationId": "get_workers", "parameters": {"model_name": model}},
    }


def _ready(said: str) -> dict[str, Any]:
    reasons = {"type": "object", "additionalProperties": NAME}
    told = objects(
        "ready",
        "live",
        ready={"type": "boolean"},
        live={"type": "boolean"},
        waiting=reasons,
        given_up=reasons,
        missing=reasons,
        behind=reasons,
    )
    return json(told, said)
