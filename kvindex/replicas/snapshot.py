"""The snapshots for joiners: each rank is copied in its turn, on the subscriber's thread.

The thread is blocked for some milliseconds at a time, or for one rank's copy if that takes longer;
the next ranks are copied when the last ones have been sent. Processes that join at the same time
share the copies: a section counts from its own position, so it serves every joiner that began
before the copy and still lacks the rank.

```
taken   A   B   C   D   A   B
first   A   B   C   D
second          C   D   A   B      came when two ranks had been taken
```
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from kvindex.index import Index
from kvindex.replicas.messages import Begin, End
from kvindex.replicas.outflow import StreamTap
from kvindex.subscribe import RankStatus
from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Rank

_HOLD = 0.005  # seconds: a turn of the thread under load takes longer

_Result = TypeVar("_Result")


class Feeding(Protocol):
    """What fills an index: a subscriber, or a follower."""

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function while nothing is applied; raises KVIndexError if that is impossible."""

    def find(self, rank: Rank) -> RankStatus | None:
        """Return a rank's status; within `call` it stands where the index does."""

    def cursor(self, rank: Rank) -> bytes | None:
        """Return up to where a rank's stream was applied, if it can be continued from there."""


class Source(Protocol):
    """An index that others get, and what fills it: a client, or the copy of a follower."""

    @property
    def index(self) -> Index:
        """The index."""

    @property
    def subscriber(self) -> Feeding:
        """What fills it."""


class TakenRank(NamedTuple):
    """A rank as it was just before a message.

    Attributes:
        rank: the rank.
        number: of that message.
        status: the rank's status then, if it was subscribed to.
        section: its contents, of `Index.dump`.
        cursor: up to where its stream was applied; None if it cannot be continued from there.
    """

    rank: Rank
    number: int
    status: RankStatus | None
    section: bytes
    cursor: bytes | None


Part: TypeAlias = Begin | TakenRank | End


class _Order:
    """The ranks that one joiner lacks, and the unsent copies for it."""

    def __init__(self) -> None:
        self.lacks: dict[Rank, None] = {}  # in the order in which they are to be taken
        self.ready: deque[TakenRank] = deque()

    def give(self, rank: Rank, taken: TakenRank | None) -> None:
        if rank in self.lacks:
            del self.lacks[rank]
            if taken is not None:
                self.ready.append(taken)


class Snapshots:
    """Makes a snapshot for each joiner. Owner: one thread, which is not the subscriber's.

    For a slow joiner, the sections taken for faster ones wait: at most one snapshot, each section
    in memory once for all joiners.

    Args:
        source: whose index is sent.
        tap: the tap of its subscriber's thread.
        hold: seconds for which the thread goes on with another rank.
    """

    def __init__(self, source: Source, tap: StreamTap, *, hold: float = _HOLD) -> None:
        self.counters: Counter[str] = Counter()
        self._source = source
        self._tap = tap
        self._hold = hold
        self._orders: list[_Order] = []

    def parts(self) -> Generator[Part, None, None]:
        """Admit the readers that have attached to the ring; then yield the parts of a snapshot."""
        call = self._source.subscriber.call
        order = _Order()
        self._orders.append(order)
        try:
            end: End | None = None
            while end is None:
                number, renames, ranks = call(self._begin)
                order.lacks = dict.fromkeys(ranks)
                yield Begin(number)
                while order.ready or (order.lacks and self._tap.renames == renames):
                    if not order.ready:
                        self._take_for(order)
                    else:
                        yield order.ready.popleft()
                end = call(partial(self._end, renames))
                self.counters["snapshots_begun_again"] += end is None
            yield end
        finally:
            self._orders.remove(order)

    def _take_for(self, order: _Order) -> None:
        """Copy the next ranks that a joiner lacks, for all joiners that lack them."""
        taken = self._source.subscriber.call(partial(self._take, list(order.lacks)))
        for rank, copy in taken:
            self.counters["sections_taken"] += copy is not None
            for each in self._orders:
                each.give(rank, copy)

    # On the subscriber's thread ---------------------------------------------------------------

    def _begin(self) -> tuple[int, int, tuple[Rank, ...]]:
        self._tap.attend()
        return self._tap.number, self._tap.renames, self._source.index.ranks

    def _take(self, ranks: Iterable[Rank]) -> list[tuple[Rank, TakenRank | None]]:
        """Return copies of as many ranks as the time is enough for, at least one; None: gone."""
        self._tap.flush()
        taken: list[tuple[Rank, TakenRank | None]] = []
        subscriber, until = self._source.subscriber, time.monotonic() + self._hold
        for rank in ranks:
            try:
                section = self._source.index.dump(rank)
            except UnknownRankError:  # removed: the messages say so
                taken.append((rank, None))
                continue
            status = subscriber.find(rank)
            cursor = None if status is None else subscriber.cursor(rank)
            taken.append((rank, TakenRank(rank, self._tap.number, status, section, cursor)))
            if time.monotonic() >= until:
                break
        return taken

    def _end(self, renames: int) -> End | None:
        """Return the end; None if ranks were renamed meanwhile, so that all is to begin again."""
        self._tap.flush()
        if self._tap.renames != renames:
            return None
        return End(self._tap.number, list(self._tap.names.items()))
