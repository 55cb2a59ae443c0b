"""What is answered to an HTTP request: status, body and what the body is."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["JSON", "MSGPACK", "TEXT", "Reply", "json_reply", "refused"]

JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"
TEXT: Final = b"text/plain; charset=utf-8"

_encoder = msgspec.json.Encoder()


class Reply(NamedTuple):
    """A whole answer.

    Attributes:
        status: the HTTP status code.
        body: its bytes.
        content_type: what they are; b"" for an empty body.
    """

    status: int
    body: bytes = b""
    content_type: bytes = JSON


def json_reply(status: int, value: Any) -> Reply:
    """Return a value as JSON."""
    return Reply(status, _encoder.encode(value))


def refused(status: int, message: str) -> Reply:
    """Return an error as `{"error": message}`."""
    return json_reply(status, {"error": message})
