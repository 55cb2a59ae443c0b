"""`GET /events`: the fleet's news, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from kvindex.service.http.messages import Stream
from kvindex.service.timeline import Happening, Timeline, parse_id

HEARTBEAT: Final = 10.0
"""Seconds without news after which a comment says that the connection is alive."""

SEND_WITHIN: Final = 10.0
"""Seconds within which a reader must take what was sent; one that does not is cut off."""

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


def event_stream(
    timeline: Timeline,
    present: Callable[[], dict[str, Any]],
    counters: StreamCounters,
    last_event_id: str = "",
) -> Stream:
    """Return a stream: first the present states, then the news, until the reader goes away.

    Nothing is kept for a reader but its place in the timeline, so a slow one costs no memory.

    Args:
        timeline: has the happenings.
        present: returns the present states, as JSON-ready values; called once, in a thread.
        counters: those of all streams.
        last_event_id: the last event that the reader has; "" for news only.
    """

    def cut_off() -> None:
        counters.cut_off += 1

    return Stream(
        _events(timeline, timeline.position, present, counters, last_event_id),
        _HEADERS,
        is_endless=True,
        send_within=SEND_WITHIN,
        on_cut_off=cut_off,
    )


async def _events(
    timeline: Timeline,
    place: int,
    present: Callable[[], dict[str, Any]],
    counters: StreamCounters,
    last_event_id: str,
) -> AsyncGenerator[bytes, None]:
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    stop = timeline.listen(lambda: _ring(loop, news))
    counters.opened += 1
    counters.open_now += 1
    try:
        states = await asyncio.to_thread(present)  # of many ranks it takes long
        missed: int | None = 0
        happenings: list[Happening] = []
        if last_event_id:
            life, number = parse_id(last_event_id) or ("", 0)
            happenings, missed, place = timeline.since(number, life)
            counters.resumed += missed is not None
        start = f"{timeline.life}-{place - len(happenings)}"
        first = sse("fleet", {**states, "missed": missed}, start)
        yield first + b"".join(map(_event, happenings))
        while True:
            news.clear()
            happenings, missed, _ = timeline.since(place)
            if missed:
                counters.cut_off += 1
                return
            if happenings:
                happenings = happenings[:_AT_ONCE]
                place += len(happenings)
                yield b"".join(map(_event, happenings))
                continue
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT)
            except asyncio.TimeoutError:
                yield b": alive\n\n"
    finally:
        counters.open_now -= 1
        stop()


def _event(happening: Happening) -> bytes:
    return sse(happening.kind, happening, happening.id)


def _ring(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(news.set)
    except RuntimeError:
        pass  # the loop is closed: there is no reader
