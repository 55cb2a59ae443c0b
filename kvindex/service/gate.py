"""The app's front door: every request is held against the guard before the app sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

from kvindex.service.counters import OTHER
from kvindex.service.guards import Guard, Refusal

__all__ = ["ASGIApp", "Gate", "Message", "Receive", "Scope", "Send", "answer"]

Scope: TypeAlias = "MutableMapping[str, Any]"
Message: TypeAlias = "MutableMapping[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[Message]]"
Send: TypeAlias = "Callable[[Message], Awaitable[None]]"
Count: TypeAlias = "Callable[[str, str, int], None]"
ASGIApp: TypeAlias = "Callable[[Scope, Receive, Send], Awaitable[None]]"

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STREAM: Final = "/events"
_ALIVE: Final = "/health"  # says nothing, so anybody may ask
_READY: Final = "/ready"  # anybody learns the status code; the reasons are for those let in
_DRAINED = 4  # times the limit that is read of a long body, so that its sender sees the answer


class Gate:
    """An ASGI app that lets requests through to another one, or refuses them.

    It also ends a body that is too long, counts event streams, and ends those for a shutdown.

    Args:
        app: whose requests are guarded.
        guard: decides.
        count: called with method, route and status code of each request, refused ones too.
        routes: the paths that it is told by name; others are OTHER.

    Owner: the server's event loop.
    """

    def __init__(
        self,
        app: ASGIApp,
        guard: Guard,
        count: Count | None = None,
        routes: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._guard = guard
        self._count = count
        self._routes = frozenset(routes)
        self._streams: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the app's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if self._count is not None:
            route = path if path in self._routes else OTHER
            send = _counted(send, self._count, scope["method"], route)
        if path != _ALIVE:
            refusal = self._guard.admit(scope["headers"])
            if refusal is not None:
                if path != _READY or refusal.status not in (401, 421):
                    await answer(send, refusal)
                    return
                send = _status_only(send)
        if path == _STREAM:
            await self._stream(scope, receive, send)
        else:
            await self._limited(scope, receive, send)

    def end_streams(self) -> None:
        """End the event streams, so that a shutdown need not wait for their readers."""
        for task in self._streams:
            task.cancel()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._streams) >= self._guard.limits.streams:
            await answer(
                send,
                self._guard.refuse(
                    Refusal(
                        503,
                        "streams",
                        f"{len(self._streams)} event streams are open, the most that are served",
                    )
                ),
            )
            return
        sent = _Sent(send)
        task = asyncio.ensure_future(self._app(scope, receive, sent))
        self._streams.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():  # it is this one that is cancelled
                task.cancel()
                raise
            if sent.started and not sent.ended:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.discard(task)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._guard.limits.body_bytes)
        length = _content_length(scope)
        if length is not None and length > body.limit:
            if length <= _DRAINED * body.limit and not _waits(scope):
                await body.drain()
            await answer(send, self._guard.refuse(_too_long(body.limit)))
            return
        sent = _Sent(send, body)
        try:
            await self._app(scope, body, sent)
        except Exception:
            if not body.exceeded or sent.started:
                raise
        if body.exceeded and not sent.started:
            await body.drain()
            await answer(send, self._guard.refuse(_too_long(body.limit)))


class _Body:
    """An app's input, up to a limit; beyond it, the client counts as gone."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._size = 0
        self._more = True
        self.limit = limit
        self.exceeded = False

    async def __call__(self) -> Message:
        if self.exceeded:
            return {"type": "http.disconnect"}
        message = await self._next()
        if self._size > self.limit:
            self.exceeded = True
            return {"type": "http.disconnect"}
        return message

    async def drain(self) -> None:
        """Read on, up to a few times the limit, and forget it."""
        while self._more and self._size <= _DRAINED * self.limit:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        return message


class _Sent:
    """An app's output; nothing is sent once the request's body was found too long."""

    def __init__(self, send: Send, body: _Body | None = None) -> None:
        self._send = send
        self._body = body
        self.started = False
        self.ended = False

    async def __call__(self, message: Message) -> None:
        if self._body is not None and self._body.exceeded and not self.started:
            return
        self.started = True
        self.ended = not message.get("more_body", False) and message["type"].endswith("body")
        await self._send(message)


async def answer(send: Send, refusal: Refusal) -> None:
    """Send a refusal as the whole response."""
    await send(
        {"type": "http.response.start", "status": refusal.status, "headers": refusal.headers}
    )
    await send({"type": "http.response.body", "body": refusal.body})


def _counted(send: Send, count: Count, method: str, route: str) -> Send:
    """Count a request when its response begins."""

    async def counting(message: Message) -> None:
        if message["type"] == "http.response.start":
            count(method if method in _METHODS else OTHER, route, message["status"])
        await send(message)

    return counting


def _status_only(send: Send) -> Send:
    """Send a response's status code, without its body."""

    async def bare(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(
                {
                    "type": "http.response.start",
                    "status": message["status"],
                    "headers": [(b"content-length", b"0")],
                }
            )
        elif not message.get("more_body", False):
            await send({"type": "http.response.body", "body": b""})

    return bare


def _too_long(limit: int) -> Refusal:
    return Refusal(413, "body", f"the body is longer than {limit} bytes: see --max-body")


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def _waits(scope: Scope) -> bool:
    """Return whether the client sends its body only after a 100 Continue."""
    return any(name == b"expect" for name, _ in scope["headers"])
