"""What passes through the gateway of requests and answers, and what is put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvindex.service.http import Headers

# RFC 9110, 7.6.1: they belong to one connection; and those that are written anew.
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"content-length", b"x-request-id"}
)
# `accept-encoding`: usage and events are read from the answer, so engines must not compress it.
_FROM_CLIENTS: Final = _HOP | {b"host", b"expect", b"accept-encoding", b"proxy-authorization"}
_FROM_ENGINES: Final = _HOP | {b"date", b"server"}
# Only a gateway may name ranks and destinations.
FORGED: Final = (
    *(b"x-gateway-", b"x-kvindex-", b"x-data-parallel-", b"x-routed-dp-rank"),
    *(b"x-prefiller-host", b"x-encoder-hosts"),
)


def request_headers(headers: Headers, *, passes_keys: bool) -> list[tuple[bytes, bytes]]:
    """Return the fields of a client's request that its engine receives.

    Args:
        headers: with names in lower case.
        passes_keys: whether `authorization` is among them.
    """
    named: list[bytes] = []  # fields that belong to this connection as well
    for name, value in headers:
        if name == b"connection":
            named += [each.strip().lower() for each in value.split(b",")]
    return [
        (name, value)
        for name, value in headers
        if name not in _FROM_CLIENTS
        and not name.startswith(FORGED)
        and (passes_keys or name != b"authorization")
        and name not in named
    ]


def answer_headers(headers: Headers) -> tuple[list[tuple[bytes, bytes]], int | None]:
    """Return the fields of an engine's answer that the client receives, and the body's length."""
    length = next((value for name, value in headers if name == b"content-length"), None)
    passed = [field for field in headers if field[0] not in _FROM_ENGINES]
    return passed, int(length) if length is not None and length.isdigit() else None


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object with further fields; they stand last, so they win over the client's."""
    if not fields:
        return body
    begun = body.rstrip(b" \t\r\n")[:-1].rstrip(b" \t\r\n")
    comma = b"" if begun.endswith(b"{") else b","
    return begun + comma + msgspec.json.encode(fields)[1:]
