"""The operations of the OpenAPI document: what each takes, and every code that it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

__all__ = [
    "COUNT",
    "NAME",
    "either",
    "get",
    "in_json",
    "json",
    "media",
    "objects",
    "packed",
    "parameter",
    "post",
    "schema",
]

NAME: Final = {"type": "string"}
COUNT: Final = {"type": "integer", "minimum": 0}

_MSGPACK: Final = "application/msgpack"
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": NAME,
        "reason": NAME,
        "models": {"type": "array", "maxItems": 20, "items": NAME},
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
    501: "This server does not do that.",
    502: "An engine that was asked does not answer.",
    503: "Not now: too many ask, or what knows the answer is not there. Ask again.",
}
_CONNECTION: Final = (400, 408, 413, 431, 503)  # what any request may get
_GUARD: Final = (401, 403, 421)  # what the front door answers but for probes


def schema(name: str) -> dict[str, Any]:
    """Return a reference to one of the document's schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def either(*names: str) -> dict[str, Any]:
    """Return what is of one of several schemas."""
    return {"anyOf": [schema(name) for name in names]}


def objects(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object."""
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def in_json(of: dict[str, Any]) -> dict[str, Any]:
    """Return the media types of a JSON body."""
    return {"application/json": {"schema": of}}


def packed(said: str) -> dict[str, Any]:
    """Return the media types of a msgpack body; JSON schemas do not reach into it."""
    return {_MSGPACK: {"schema": {"type": "string", "format": "binary", "description": said}}}


def json(of: dict[str, Any], said: str = "Done.") -> dict[str, Any]:
    """Return a response in JSON."""
    return {"description": said, "content": in_json(of)}


def media(kind: str, said: str, of: dict[str, Any] = NAME) -> dict[str, Any]:
    """Return a response of another media type."""
    return {"description": said, "content": {kind: {"schema": of}}}


def parameter(
    name: str, said: str = "", of: dict[str, Any] | None = None, where: str = "query"
) -> dict[str, Any]:
    """Return a parameter of a request."""
    return {"name": name, "in": where, "description": said, "schema": of or NAME}


def get(
    summary: str, answers: dict[str, Any], *codes: int, probe: bool = False, **rest: Any
) -> dict[str, Any]:
    """Return a path that is read.

    Args:
        summary: in one line.
        answers: one response, for 200; or by their codes.
        codes: of errors, besides those of any request.
        probe: whether it wants no token and takes any host.
        rest: further fields of the operation.
    """
    if probe:
        rest["security"] = [{}]
    return {"get": _operation(summary, answers, (*codes, *(() if probe else _GUARD)), **rest)}


def post(
    summary: str, body: dict[str, Any], answers: dict[str, Any], *codes: int, **rest: Any
) -> dict[str, Any]:
    """Return a path that takes a body, by its media types; the rest as `get`."""
    codes = (*codes, *_GUARD, 422)
    required = {"required": True, "content": body}
    return {"post": _operation(summary, answers, codes, requestBody=required, **rest)}


def _operation(
    summary: str, answers: dict[str, Any], codes: Iterable[int], **rest: Any
) -> dict[str, Any]:
    by_code = answers if "description" not in answers else {"200": answers}
    errors = {
        str(code): {
            "description": _WHY[code],
            "content": {**in_json(_ERROR), "text/plain": {"schema": NAME}, _MSGPACK: {}},
        }
        for code in sorted({*codes, *_CONNECTION})
    }
    return {"summary": summary, "responses": {**errors, **by_code}, **rest}
