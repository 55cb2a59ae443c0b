"""GET /openapi.json: the requests and answers of each route, as OpenAPI 3.1.

`route` makes a route with its description. A schema in it is a type that msgspec
reads or writes, or a dictionary where there is no such type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

import kvindex
from kvindex.service.http.messages import Handler, Route

COUNT: Final = {"type": "integer", "minimum": 0}

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string"},
        "reason": {"type": "string"},
        "models": {"type": "array", "maxItems": 20, "items": {"type": "string"}},
    },
}
_WHY: Final = {
    400: "The request or its body is malformed, or names what cannot be.",
    401: "The server wants its token, as a bearer token or as the password of Basic.",
    403: "A registration names an endpoint that may not be dialled, or another origin asks.",
    404: "Nobody is registered so.",
    408: "The head or the body did not all come in time.",
    409: "It conflicts with what is registered or configured.",
    413: "The body is too long, or a query has too many tokens.",
    415: "The body has a content type that is not read.",
    421: "The Host header names another host.",
    422: "The body or the query string has not the right form.",
    431: "The head is too long.",
    502: "An engine that was asked does not answer.",
    503: "Not now: too many ask, or what knows the answer is not there. Ask again.",
}
_CONNECTION: Final = (400, 408, 413, 431, 503)  # what any request may get
_GUARD: Final = (401, 403, 421)  # what the guard answers but for probes


def description(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of a server that has these routes."""
    paths: dict[str, dict[str, Any]] = {}
    described = [route for route in routes if route.operation is not None]
    # Sorted, so that the document does not change with the order in which routes are made.
    for route in sorted(described, key=lambda route: route.path):
        name = route.path[1:].replace(".", "_").replace("/", "_") or "page"
        method = route.method.lower()
        operation = {**(route.operation or {}), "operationId": f"{method}_{name}"}
        paths.setdefault(route.path, {})[method] = operation
    # Twice: the types are collected first, since msgspec makes the schemas of all of them at once,
    # so that one which stands in several routes is one component.
    types: dict[Any, None] = {}
    _with_schemas(paths, types)
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvindex",
            "version": kvindex.__version__,
            "description": "Which engine already has the beginning of this prompt, and how far "
            "the answer can be trusted. Queries and registrations come in two dialects. A server "
            "with a token wants it with every request but those to /health and /ready.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _with_schemas(paths, dict(zip(types, schemas, strict=True))),
        "components": {
            "schemas": components,
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


def _with_schemas(value: Any, schemas: dict[Any, Any]) -> Any:
    """Return a description with schemas in the place of types; add the types that have none."""
    if isinstance(value, Mapping):
        return {key: _with_schemas(part, schemas) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_schemas(part, schemas) for part in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return schemas.setdefault(value, None)


def route(
    at: str,
    serve: Handler,
    summary: str,
    answers: Mapping[str, Any],
    *,
    codes: Collection[int] = (),
    body: Mapping[str, Any] | None = None,
    parameters: Sequence[Mapping[str, Any]] = (),
    is_probe: bool = False,
) -> Route:
    """Return a route with its description.

    Args:
        at: method and path, e.g. "GET /workers".
        serve: answers.
        summary: one line.
        answers: one response, for 200; or several by their codes.
        codes: of errors, besides those of any request.
        body: the media types that it takes; None: it has no body.
        parameters: of the query or the head.
        is_probe: whether it wants no token and takes any host.
    """
    errors = {*codes, *_CONNECTION}
    errors |= set() if is_probe else set(_GUARD)
    # Whatever has a body may have one of the wrong form.
    errors |= set() if body is None else {422}
    refusal = {"application/json": {"schema": _ERROR}}
    refusal["text/plain"] = {"schema": {"type": "string"}}
    refusals = {
        str(code): {"description": _WHY[code], "content": refusal} for code in sorted(errors)
    }
    described: dict[str, Any] = {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {**refusals, **({"200": answers} if "description" in answers else answers)},
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": body}
    if is_probe:
        described["security"] = [{}]
    method, _, path = at.partition(" ")
    return Route(method, path, serve, described)


def json(schema: Any, text: str = "Done.") -> dict[str, Any]:
    """Return a response in JSON."""
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def media(kind: str, text: str) -> dict[str, Any]:
    """Return a response of another media type."""
    return {"description": text, "content": {kind: {"schema": str}}}


def binary(text: str) -> dict[str, Any]:
    """Return the schema of bytes."""
    return {"schema": {"type": "string", "format": "binary", "description": text}}


def objects(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


def parameter(name: str, text: str = "", schema: Any = str, where: str = "query") -> dict[str, Any]:
    """Return a parameter of a request."""
    return {"name": name, "in": where, "description": text, "schema": schema}


GROUP: Final = parameter("routing_group", "`default` if not given")
