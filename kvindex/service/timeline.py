"""The fleet's news: state changes, gaps, replays, losses, restarts, ranks come and gone.

Made of the ranks' statuses, each compared with the one before it. Bounded: what is too old for the
history is counted, not kept.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from kvindex import Rank, RankStatus, State
from kvindex.service.catalog import Partition
from kvindex.service.http.messages import Stream, sending
from kvindex.service.overview import PartitionOf

HISTORY: Final = 5_000
"""Happenings that are kept: some hundred bytes each."""

Kind: TypeAlias = Literal["state", "gap", "replay", "loss", "restart", "added", "removed"]


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to one rank.

    Attributes:
        id: "LIFE-NUMBER": which run of the service, and which of its happenings, from 1.
        at: when it was noticed, in seconds since 1970.
        kind: what it is.
        worker, dp_rank: the rank.
        model, routing_group: its partition.
        state: the rank's state after it.
        complete: whether all of the rank's history was applied by then.
        count: how many at once, of what is counted.
        text: the same in words.
    """

    id: str
    at: float
    kind: Kind
    worker: str
    dp_rank: int
    model: str
    routing_group: str
    state: str
    complete: bool
    count: int = 1
    text: str


class Since(NamedTuple):
    """What happened after some happening."""

    happenings: list[Happening]  # oldest first
    # How many are not among them because the history is bounded; None if that is not known, since
    # the one asked after is of another run of the service.
    missed: int | None
    position: int  # number of the last happening so far


class _News(NamedTuple):
    """What has happened by one comparison, without what is the same for all of it."""

    kind: Kind
    text: str
    number: int = 1


class Timeline:
    """The history of a fleet, fed with statuses; `most` happenings are kept.

    Thread safety: every method may be called from any thread.

    Examples:
        >>> timeline = Timeline()
        >>> timeline.since(0)
        Since(happenings=[], missed=0, position=0)
    """

    def __init__(
        self,
        partition_of: PartitionOf = lambda _: Partition(""),
        *,
        most: int = HISTORY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.life = secrets.token_hex(4)  # names this run of the service in ids
        self._partition_of = partition_of
        self._clock = clock
        self.began = clock()
        self._lock = threading.Lock()
        self._history: deque[Happening] = deque(maxlen=most)
        self._position = 0
        self._ranks: dict[Rank, _RankNews] = {}
        self._bells: dict[object, Callable[[], None]] = {}

    def observe(self, status: RankStatus) -> None:
        """Receive a status from `Client.on_change`: in order, each change once."""
        with self._noting():
            self._follow(status)

    def begin(self, statuses: Iterable[RankStatus]) -> None:
        """Add the present ranks; call it after `observe` is listening."""
        with self._noting():
            for status in statuses:
                if status.rank not in self._ranks and status.state is not State.CLOSED:
                    self._follow(status)

    def sweep(self, statuses: Iterable[RankStatus]) -> None:
        """Take what all ranks' statuses count, which may rise while their states do not change."""
        # They may have been read before a change that was reported already, so their states do not
        # count: a rank would seem to go back, and forth again.
        with self._noting():
            for status in statuses:
                known = self._ranks.get(status.rank)
                if known is not None:
                    for news in known.count(status):
                        self._add(status.rank, known.status, news)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Hold the lock, then ring the bells if something was added."""
        # After the lock: who is rung may ask for the news at once, on this thread.
        with self._lock:
            before = self._position
            yield
            bells = tuple(self._bells.values()) if self._position != before else ()
        for ring in bells:
            ring()

    def _follow(self, status: RankStatus) -> None:
        known = self._ranks.get(status.rank)
        if status.state is State.CLOSED:
            if self._ranks.pop(status.rank, None) is not None:
                text = f"removed: {status.reason}" if status.reason else "removed"
                self._add(status.rank, status, _News("removed", text))
            return
        if known is None:
            self._ranks[status.rank] = _RankNews(status)
            self._add(status.rank, status, _News("added", f"added: {_state_text(status)}"))
            return
        for news in (*known.count(status), *known.stand(status)):
            self._add(status.rank, status, news)

    def _add(self, rank: Rank, status: RankStatus, news: _News) -> None:
        self._position += 1
        happening = Happening(
            id=f"{self.life}-{self._position}",
            at=self._clock(),
            worker=rank.worker,
            dp_rank=rank.dp_rank,
            **self._partition_of(rank.worker)._asdict(),
            state=status.state.value,
            complete=status.complete,
            kind=news.kind,
            count=news.number,
            text=news.text,
        )
        self._history.append(happening)

    @property
    def position(self) -> int:
        """Number of the last happening; 0 before the first."""
        return self._position

    def since(self, position: int, life: str | None = None) -> Since:
        """Return what happened after the happening of this number, of a run of the service."""
        with self._lock:
            # Of another run nothing is known, so all that is kept comes.
            if life not in (None, self.life) or position > self._position:
                return Since(list(self._history), None, self._position)
            new = min(self._position - position, len(self._history))
            missed = self._position - position - new
            skip = len(self._history) - new
            news = [happening for i, happening in enumerate(self._history) if i >= skip]
            return Since(news, missed, self._position)

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Call a function after something happened, on the thread that noticed it.

        It must return at once. Returns a function that ends this.
        """
        key = object()
        with self._lock:
            self._bells[key] = ring

        def stop() -> None:
            with self._lock:
                self._bells.pop(key, None)

        return stop


def parse_id(text: str) -> tuple[str, int] | None:
    """Return the life and number of a happening's id, or None if it is no such id.

    Examples:
        >>> parse_id("5c0ffee5-12"), parse_id("12")
        (('5c0ffee5', 12), None)
    """
    life, dash, number = text.rpartition("-")
    if not (dash and life and number.isascii() and number.isdigit() and len(number) < 19):
        return None
    return life, int(number)


class _RankNews:
    """A rank's last status, and the highest of what it counts, under the timeline's lock."""

    __slots__ = ("_counts", "_failing", "status")

    def __init__(self, status: RankStatus) -> None:
        self.status = status
        self._counts = _counts(status)
        self._failing = False  # so that a replay endpoint that stays away is reported once

    def stand(self, status: RankStatus) -> Iterator[_News]:
        """Take a status; yield how the rank stands now, if that is new."""
        last, self.status = self.status, status
        if status.state is not last.state:
            yield _News("state", _state_text(status))
        elif status.complete and not last.complete:
            yield _News("state", "complete: every batch since the engine's first was applied")

    def count(self, status: RankStatus) -> Iterator[_News]:
        """Take what a status counts; yield what is new in it, in the order it must have had."""
        before = self._counts
        self._counts = _Counts(*map(max, before, _counts(status)))
        # A gap comes before the replay that fills it, and a loss after the replay that failed.
        new = _Counts(*(now - then for now, then in zip(self._counts, before, strict=True)))
        if new.gaps:
            text = "a gap: batches are missing" if new.gaps == 1 else f"{new.gaps} gaps"
            yield _News("gap", text, new.gaps)
        if new.failed and not self._failing:
            self._failing = True
            yield _News("replay", "a replay failed: gaps cannot be repaired", new.failed)
        if new.filled:
            was_failing, self._failing = self._failing, False
            # A live rank's replays only ask whether its last batches were lost.
            if was_failing or self.status.state in (State.SYNCING, State.REPAIRING):
                yield _News("replay", "a replay was read to its end", new.filled)
        if new.losses:
            text = "a loss" if new.losses == 1 else f"{new.losses} losses"
            yield _News("loss", f"{text}: batches that no replay can bring back", new.losses)
        if new.restarts:
            yield _News("restart", "the engine restarted with an empty cache", new.restarts)


class _Counts(NamedTuple):
    gaps: int
    failed: int
    filled: int
    losses: int
    restarts: int


def _counts(status: RankStatus) -> _Counts:
    failed, filled = status.replays_failed, status.replays_filled
    return _Counts(status.gaps, failed, filled, status.losses, status.restarts)


def _state_text(status: RankStatus) -> str:
    text = status.state.value
    if status.state is State.LIVE and not status.complete:
        text += ", not complete"
    return f"{text}: {status.reason}" if status.reason else text


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
    """Counters of all streams."""

    opened: int = 0
    open_now: int = 0
    resumed: int = 0  # opened with the id of a happening that this run knows
    # Readers that did not read what was sent in time, or fell so far behind that the history had
    # lost their unread events.
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

    `present` returns the states, as JSON-ready values: once, in a thread. `last_event_id` is that
    of the last event that the reader has; "" for news only.
    """

    def cut_off() -> None:
        counters.cut_off += 1

    # The place in the timeline is taken now: what happens while the states are read is news.
    return Stream(
        sending(_events(timeline, timeline.position, present, counters, last_event_id)),
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

    def ring() -> None:
        try:
            loop.call_soon_threadsafe(news.set)
        except RuntimeError:
            pass  # the loop is closed: there is no reader

    # Nothing is kept for a reader but its place, so a slow one costs no memory.
    stop = timeline.listen(ring)
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
            news.clear()  # before the look, so that what comes after it rings again
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
