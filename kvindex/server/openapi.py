"""GET /openapi.json: what each route takes and answers, as OpenAPI 3.1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

import kvindex
from kvindex.server.dialects import dynamo, rfc
from kvindex.server.outcomes import Outcome

__all__ = ["description"]

_TOKENS: Final = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
_NAME: Final = {"type": "string"}
_MAYBE: Final = {"type": ["string", "null"]}
_TCP: Final = r"^tcp://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:([1-9][0-9]{0,3}|[1-5][0-9]{4})$"
_COUNT: Final = {"type": "integer", "minimum": 0}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "reason": {"type": "string"}},
}
_WHY: Final = {
    400: "The body is malformed, or names what cannot be.",
    401: "The server wants a token.",
    403: "A registration names an endpoint that may not be dialled, or another origin asks.",
    404: "Nobody is registered so.",
    409: "It conflicts with another registration.",
    413: "The body is too long.",
    415: "The body has a content type that is not read.",
    421: "The Host header names another host.",
    422: "The body has not the right form.",
    501: "This server does not do that.",
    503: "Not now.",
}
_GUARD: Final = (400, 401, 403, 421, 503)  # what the front door answers


def description(paths: Iterable[str]) -> dict[str, Any]:
    """Return the OpenAPI document of a server that has these routes."""
    known = _paths()
    for path, item in known.items():
        for method, operation in item.items():
            name = path[1:].replace(".", "_")
            operation["operationId"] = f"{method}_{name}"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvindex",
            "version": kvindex.__version__,
            "description": "Which engine already has the beginning of this prompt, and how far "
            "the answer can be trusted. Queries and registrations come in four dialects.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {path: known[path] for path in sorted(set(paths)) if path in known},
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _paths() -> dict[str, Any]:
    done = _json(_object(status=_NAME))
    return {
        "/query": _post(
            "What each instance holds of a prompt",
            _query_body(),
            _json({"$ref": "#/components/schemas/Answer"}),
            404,
            413,
            parameters=[
                _parameter(name)
                for name in (
                    "model_name",
                    "model",
                    "routing_group",
                    "tenant_id",
                    "lora_name",
                    "cache_salt",
                )
            ],
        ),
        "/query_by_hash": _post(
            "The same, by the hashes of blocks",
            _in_json({"$ref": "#/components/schemas/HashQuery"}),
            _json({"$ref": "#/components/schemas/Answer"}),
            404,
            413,
            501,
        ),
        "/register": _post(
            "Subscribe to one DP rank of an instance",
            _in_json(_either("DynamoRegister", "RfcRegister")),
            {"200": {**done, "links": _links()}, "201": {**done, "links": _links()}},
            409,
            413,
        ),
        "/unregister": _post(
            "Unsubscribe from an instance or a rank",
            _in_json(_either("DynamoUnregister", "RfcUnregister")),
            done,
            404,
            413,
        ),
        "/outcomes": _post(
            "Report what became of a request",
            _in_json({"$ref": "#/components/schemas/Outcome"}),
            done,
            404,
            413,
        ),
        "/register_peer": _peer("Refused: there are no peers", 501),
        "/deregister_peer": _peer("Refused: there are no peers", 404),
        "/peers": _get("No peers", _json({"type": "array", "maxItems": 0})),
        "/workers": _get(
            "The instances and their listeners",
            _json({"type": "array", "items": {"$ref": "#/components/schemas/Worker"}}),
            parameters=[_parameter("model_name"), _parameter("routing_group")],
        ),
        "/services": _get(
            "The registrations",
            _json(_object(count=_COUNT, services={"type": "array", "items": {"type": "object"}})),
        ),
        "/health": _get("Whether the process runs", {"description": "It does."}),
        "/ready": _get(
            "Whether queries are to be sent here",
            {"200": _ready("They are."), "503": _ready("They are not.")},
            parameters=[_parameter("strict", "1: only while every rank is live")],
        ),
        "/dump": _get(
            "Ranks and blocks, as lines of JSON",
            _media("application/x-ndjson", "One line for each rank and block.", _NAME),
            422,
            parameters=[
                _parameter("blocks", "most blocks of each rank", _COUNT | {"maximum": 10**9 - 1})
            ],
        ),
        "/metrics": _get(
            "Metrics for Prometheus",
            _media("text/plain", "As Prometheus reads them.", _NAME),
            parameters=[
                _parameter("worker", "only this one; repeatable"),
                _parameter("ranks", "0: no series of ranks"),
            ],
        ),
        "/openapi.json": _get("This description", _json({"type": "object"})),
    }


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


def _query_body() -> dict[str, Any]:
    tokens = {"type": "string", "format": "binary"}
    return {
        **_in_json(_either("DynamoQuery", "RfcQuery"))["content"],
        "application/msgpack": {"schema": tokens},
        "application/octet-stream": {"schema": tokens},
    }


def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, kinds in (
        ("Dynamo", (dynamo.Register, dynamo.Unregister)),
        ("Rfc", (rfc.Register, rfc.Unregister)),
        ("", (Outcome,)),
    ):
        _, schemas = msgspec.json.schema_components(kinds)
        found.update({f"{prefix}{name}": schema for name, schema in schemas.items()})
    for name in ("DynamoRegister", "DynamoUnregister"):
        found[name]["properties"]["instance_id"]["maximum"] = 2**64 - 1
    for name in ("DynamoRegister", "RfcRegister"):
        found[name]["properties"]["endpoint"] = {"type": "string", "pattern": _TCP}
        found[name]["properties"]["replay_endpoint"] = {
            "anyOf": [{"type": "string", "pattern": _TCP}, {"type": "null"}]
        }
        found[name]["properties"]["block_size"]["minimum"] = 1
    found["RfcRegister"]["required"].append("endpoint")
    asked = {"lora_name": _MAYBE, "cache_salt": _MAYBE}
    found["DynamoQuery"] = _object(
        "token_ids", "model_name", token_ids=_TOKENS, model_name=_NAME, routing_group=_NAME, **asked
    )
    found["RfcQuery"] = _object(
        "token_ids",
        "model",
        token_ids=_TOKENS,
        model=_NAME,
        tenant_id=_MAYBE,
        instance_id=_MAYBE,
        **asked,
    )
    found["RfcQuery"]["properties"]["hit_detail"] = {}
    hashes = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    found["HashQuery"] = _object(
        "block_hashes",
        "model_name",
        block_hashes={"type": "array", "items": hashes},
        model_name=_NAME,
        routing_group=_NAME,
        lora_name=_MAYBE,
        cache_salt={"type": "null"},
    )
    found["Answer"] = {"type": "object"}
    found["Worker"] = _object(
        "instance_id",
        "status",
        "model_name",
        "routing_group",
        instance_id={"type": ["integer", "string"]},
        status={"enum": ["active", "pending", "failed"]},
        model_name=_NAME,
        routing_group=_NAME,
        block_size=_COUNT,
        endpoints={"type": "object", "additionalProperties": _NAME},
        listeners={"type": "object", "additionalProperties": {"type": "object"}},
    )
    return found


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def _either(*names: str) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}


def _in_json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _json(schema: dict[str, Any], said: str = "Done.") -> dict[str, Any]:
    return {"description": said, **_in_json(schema)}


def _media(kind: str, said: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": said, "content": {kind: {"schema": schema}}}


def _ready(said: str) -> dict[str, Any]:
    reasons = {"type": "object", "additionalProperties": _NAME}
    told = _object(
        "ready",
        "live",
        ready={"type": "boolean"},
        live={"type": "boolean"},
        waiting=reasons,
        given_up=reasons,
        behind=reasons,
    )
    return _json(told, said)


def _parameter(name: str, said: str = "", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": said, "schema": schema or _NAME}


def _operation(
    summary: str, answers: dict[str, Any], codes: Iterable[int], **rest: Any
) -> dict[str, Any]:
    by_code = answers if "description" not in answers else {"200": answers}
    errors = {
        str(code): {
            "description": _WHY[code],
            "content": {
                "application/json": {"schema": _ERROR},
                "text/plain": {"schema": _NAME},
                "application/msgpack": {"schema": {}},
            },
        }
        for code in sorted({*codes, *_GUARD})
    }
    return {"summary": summary, "responses": {**errors, **by_code}, **rest}


def _get(summary: str, answers: dict[str, Any], *codes: int, **rest: Any) -> dict[str, Any]:
    return {"get": _operation(summary, answers, codes, **rest)}


def _post(
    summary: str, body: dict[str, Any], answers: dict[str, Any], *codes: int, **rest: Any
) -> dict[str, Any]:
    content = body.get("content", body)
    required = {"required": True, "content": content}
    codes = (*codes, 415, 422)
    return {"post": _operation(summary, answers, codes, requestBody=required, **rest)}


def _peer(summary: str, code: int) -> dict[str, Any]:
    url = _in_json(_object("url", url=_NAME))
    refused = {str(code): {"description": _WHY[code], **_in_json(_ERROR)}}
    return _post(summary, url, refused, 413)
