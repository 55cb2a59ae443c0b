"""`GET /events`: the fleet's news, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from kvindex.service.connections import ABORT
from kvindex.service.timeline import Happening, Timeline, parse_id

__all__ = ["HEARTBEAT", "SEND_WITHIN", "EventStreamResponse", "StreamCounters", "sse"]

HEARTBEAT: Final = 10.0
"""Seconds without news after which a comment says that the connection is alive."""

SEND_WITHIN: Final = 10.0
"""Seconds within which a reader must take what was sent; one that does not is cut off."""

_END = {"type": "http.response.body", "body": b"", "more_body": False}
_AT_ONCE = 256  # happenings in one piece
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
    (b"x-content-type-options", b"nosniff"),
]


class StreamCounters(msgspec.Struct):
    """Counters of all streams.

    Attributes:
        opened: streams.
        open_now: those that are open.
        resumed: opened with the id of a happening that this run knows.
        cut_off: readers that did not read the sent events in time, or fell so far behind that the
            history had lost their unread events.
    """

    opened: int = 0
    open_now: int = 0
    resumed: int = 0
    cut_off: int = 0


def sse(event: str, data: Any, event_id: str = "") -> bytes:
    r"""Return one server-sent event; the data as JSON, which has no line breaks.

    Examples:
        >>> sse("gap", {"text": "two\nlines"}, "5c0ffee5-1")
        b'id: 5c0ffee5-1\nevent: gap\ndata: {"text":"two\\nlines"}\n\n'
    """
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {event}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class EventStreamResponse:
    """An ASGI response: first the present states, then the news, until the reader goes away.

    Nothing is kept for a reader but its place in the timeline, so a slow one costs no memory.

    Args:
        timeline: whose happenings these are.
        present: returns the present states, as JSON-ready values; they are asked for once.
        counters: of all streams.
        last_event_id: the last event that the reader has; "" for news only.

    Owner: the server's event loop.
    """

    def __init__(
        self,
        timeline: Timeline,
        present: Callable[[], dict[str, Any]],
        counters: StreamCounters,
        last_event_id: str = "",
    ) -> None:
        self._timeline = timeline
        self._present = present
        self._counters = counters
        self._asked = last_event_id
        self._place = timeline.position

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the reader is gone or cut off."""
        if scope.get("method") == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send(_END)
            return
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda _: news.set())
        stop = self._timeline.listen(lambda: _ring(loop, news))
        self._counters.opened += 1
        self._counters.open_now += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            present = await asyncio.to_thread(self._present)  # of many ranks it takes long
            piece: bytes | None = self._first(present)
            while piece is not None and not gone.done():
                message = {"type": "http.response.body", "body": piece, "more_body": True}
                await asyncio.wait_for(send(message), SEND_WITHIN)
                piece = await self._next(news, gone)
            await asyncio.wait_for(send(_END), SEND_WITHIN)
        except asyncio.TimeoutError:
            self._counters.cut_off += 1
            if ABORT in scope:  # to close it would wait for unread bytes
                scope[ABORT]()
                await gone
        finally:
            self._counters.open_now -= 1
            stop()
            gone.cancel()

    def _first(self, present: dict[str, Any]) -> bytes:
        """Return the event "fleet", and the events that the reader has missed."""
        asked = parse_id(self._asked)
        missed: int | None = 0
        happenings: list[Happening] = []
        if self._asked:
            life, number = asked or ("", 0)
            happenings, missed, self._place = self._timeline.since(number, life)
            self._counters.resumed += missed is not None
        start = self._place - len(happenings)
        first = sse("fleet", {**present, "missed": missed}, f"{self._timeline.life}-{start}")
        return first + b"".join(map(_event, happenings))

    async def _next(self, news: asyncio.Event, gone: asyncio.Future[None]) -> bytes | None:
        """Return what happened, or a comment after a while; None ends the stream."""
        while not gone.done():
            news.clear()
            happenings, missed, _ = self._timeline.since(self._place)
            if missed:
                self._counters.cut_off += 1
                return None
            if happenings:
                happenings = happenings[:_AT_ONCE]
                self._place += len(happenings)
                return b"".join(map(_event, happenings))
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT)
            except asyncio.TimeoutError:
                return b": alive\n\n"
        return None


def _event(happening: Happening) -> bytes:
    return sse(happening.kind, happening, happening.id)


def _ring(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(news.set)
    except RuntimeError:
        pass  # the loop is closed: nobody reads


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
