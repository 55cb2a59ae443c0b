"""Requests and answers as plain values, between the server and its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from kvindex.wire.errors import UNREADABLE

JSON: Final = b"application/json"
TEXT: Final = b"text/plain; charset=utf-8"

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

_T = TypeVar("_T")
PEER: Final = b"x-kvindex-peer"
"""The field in which a proxy of ours says who asks, on a socket that only it reaches."""

_encoder = msgspec.json.Encoder()


def has_room(size: int) -> bool:
    """Hold bytes for a request that no server bounds."""
    return True


@dataclass(slots=True, eq=False)
class Request:
    """A request with its whole body."""

    method: str
    path: str  # without the query, and decoded
    headers: Headers = ()  # in the order received, names in lower case
    body: bytes = b""  # until it has arrived
    query: bytes = b""  # what stands behind the "?", as received
    is_local: bool = False  # it comes from this machine
    is_bare: bool = False  # the answer shows its status only
    cancels: bool = False  # as its route
    # Counts bytes that a handler holds for it beside its body; returns whether there is room.
    hold: Callable[[int], bool] = has_room

    @classmethod
    def of(cls, method: str, target: bytes, headers: Headers = (), body: bytes = b"") -> Request:
        """Return a request for a target as it stands in a request line."""
        if target.startswith(b"/"):
            path, _, query = target.partition(b"?")
        elif b"://" in target:  # as a proxy is asked
            parsed = urlsplit(target)
            path, query = parsed.path or b"/", parsed.query
        else:
            path, query = target, b""
        # Any bytes are a path: one that is no UTF-8 is no route's, and must not be an error.
        text = path.decode("latin-1")
        if "%" in text:
            text = unquote(text)
        return cls(method, text, headers, body, query)

    def header(self, name: bytes) -> bytes | None:
        """Return a header field; the first of several."""
        for field, value in self.headers:
            if field == name:
                return value
        return None

    @property
    def media_type(self) -> bytes:
        """The media type of the body, without parameters; b"" if none is named."""
        field = self.header(b"content-type")
        if field == JSON or field is None:  # nearly all, and a query counts in microseconds
            return field or b""
        return field.partition(b";")[0].strip().lower()

    @property
    def parameters(self) -> Mapping[str, list[str]]:
        """The parameters of the query."""
        return parse_qs(self.query.decode("latin-1"), keep_blank_values=True)

    def parameter(self, name: str, default: str = "") -> str:
        """Return a parameter of the query; the last of several."""
        return self.parameters.get(name, [default])[-1]


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON  # b"" for an empty body
    headers: Headers = ()  # further ones


class Writer(NamedTuple):
    """Writes the pieces of one stream."""

    write: Callable[[bytes], None]  # a piece that is not empty
    # Whether a further piece should be written now: not while the client does not read what was
    # written, nor once it has gone.
    is_ready: Callable[[], bool]
    drain: Callable[[], Awaitable[None]]  # until it is ready; ConnectionAbortedError: it has gone


class Stream(NamedTuple):
    """An answer in pieces."""

    # Writes the pieces of the body, and returns at their end. Called once, also if the client has
    # gone meanwhile, but not for a HEAD; cancelled once the client goes.
    send: Callable[[Writer], Awaitable[None]]
    headers: Headers  # all but those about the connection
    status: int = 200
    length: int | None = None  # bytes of the body, if that is known
    is_endless: bool = False  # it lasts until the client goes or the server ends
    send_within: float | None = None  # seconds to read a piece in; as `Limits` by default
    on_cut_off: Callable[[], None] = lambda: None  # called if it is not read in time


Handler: TypeAlias = Callable[[Request], "Reply | Awaitable[Reply | Stream]"]


class Route(NamedTuple):
    """A path that is served."""

    method: str  # GET stands for HEAD, too
    path: str
    serve: Handler
    operation: Mapping[str, Any] | None = None  # its description, as `openapi.route` makes it
    # Whether the handler is cancelled once the client has gone. By default only a stream ends with
    # its client: a change that was asked for is carried out to its end.
    cancels: bool = False
    is_operators: bool = False  # not for each client: see `Guard`


class BrokenOffError(Exception):
    """Raised by the `send` of a `Stream` that cannot go on.

    The client receives the pieces before it, then the end of the connection amid the answer: it
    does not take a part for the whole. Any other exception drops what was not sent yet.
    """


class RefusedError(Exception):
    """A request that is refused, with the answer to it."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


def json_reply(status: int, value: Any) -> Reply:
    """Return a value as JSON."""
    return Reply(status, _encoder.encode(value))


def text_reply(status: int, message: str) -> Reply:
    """Return an error as plain text."""
    return Reply(status, message.encode(), TEXT)


def refused(status: int, message: str, reason: str | None = None) -> Reply:
    """Return an error as `{"error": message}`, with a `reason` for programs if there is one."""
    error = {"error": message}
    return json_reply(status, error if reason is None else {**error, "reason": reason})


def refusal(status: int, message: str, reason: str | None = None) -> RefusedError:
    """Return `refused` as an error to raise; a 503 says when to ask again."""
    headers: Headers = ((b"retry-after", b"1"),) if status == 503 else ()
    return RefusedError(refused(status, message, reason)._replace(headers=headers))


def read_json(request: Request, kind: type[_T]) -> _T:
    """Return the value of a JSON body, or raise RefusedError."""
    # A page of another origin can send other media types without a preflight.
    if request.media_type != JSON:
        raise RefusedError(text_reply(415, "send the body with content-type: application/json"))
    try:
        return msgspec.json.decode(request.body, type=kind)
    except msgspec.ValidationError as error:
        raise RefusedError(text_reply(422, f"the body has not the right form: {error}")) from None
    except UNREADABLE as error:
        raise RefusedError(text_reply(400, f"the body is no JSON: {error}")) from None


async def in_threads(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield pieces that take long to make, each made in a thread."""
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


def sending(pieces: AsyncGenerator[bytes, None]) -> Callable[[Writer], Awaitable[None]]:
    """Return a `Stream.send` that writes pieces as they are made, and closes them at the end."""

    async def send(writer: Writer) -> None:
        # Not before the loop: if the client has gone, the pieces would be closed before they began,
        # and a generator that never began lets go of nothing.
        try:
            async for piece in pieces:
                await writer.drain()
                writer.write(piece)
                await writer.drain()
        finally:
            await pieces.aclose()

    return send
