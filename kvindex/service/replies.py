"""What is answered to an HTTP request: status, body and what the body is."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response

__all__ = ["JSON", "MSGPACK", "TEXT", "Reply", "json_reply", "packed", "refused", "text_reply"]

JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"
TEXT: Final = b"text/plain; charset=utf-8"

_encoder = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()


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

    def response(self) -> Response:
        """Return it as Starlette sends it."""
        response = Response(self.body, self.status)
        if self.content_type:
            response.headers["content-type"] = self.content_type.decode()
        return response


def json_reply(status: int, value: Any) -> Reply:
    """Return a value as JSON."""
    return Reply(status, _encoder.encode(value))


def text_reply(status: int, message: str) -> Reply:
    """Return an error as plain text."""
    return Reply(status, message.encode(), TEXT)


def packed(reply: Reply) -> Reply:
    """Return a JSON reply as msgpack; others as they are."""
    if reply.content_type != JSON:
        return reply
    return Reply(reply.status, _packer.encode(msgspec.json.decode(reply.body)), MSGPACK)


def refused(status: int, message: str, reason: str | None = None) -> Reply:
    """Return an error as `{"error": message}`, with a `reason` for programs if there is one."""
    error = {"error": message}
    return json_reply(status, error if reason is None else {**error, "reason": reason})
