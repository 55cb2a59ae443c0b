"""The way from a feed to the sink: items in order, as fast as the sink accepts them.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from kvindex.subscribe.sequencer import RankBatch, RankLost, RankRestarted
from kvindex.subscribe.stream import BatchSink, RankStatus, Sink, StatusSink, StreamItem
from kvindex.wire.rank import Rank

__all__ = ["Allowance", "Delivery", "Outlet"]

logger = logging.getLogger(__name__)

SECONDS = 0.05
"""Of one feed in one turn; what takes longer is done in the next turns."""

Item: TypeAlias = RankBatch[Any] | RankLost | RankRestarted


class Allowance:
    """How long one feed may hold the subscriber's thread before the others get their turn.

    A feed does one thing before it asks what is left, so that each turn makes progress.

    Args:
        clock: monotonic seconds.
        has_room: whether the sink accepts more; if not, no time is left.

    Thread safety: none.
    """

    def __init__(
        self, clock: Callable[[], float], has_room: Callable[[], bool] | None = None
    ) -> None:
        self._clock = clock
        self._has_room = has_room
        self._until = clock()

    def begin(self) -> None:
        """Begin a turn."""
        self._until = self._clock() + SECONDS

    def left(self) -> bool:
        """Return whether any time is left."""
        if self._has_room is not None and not self._has_room():
            return False
        return self._clock() < self._until


class Outlet:
    """Hands items to the sink; an exception in the sink is counted, logged, and not raised.

    Args:
        sink: receives every item.
        on_batch: receives the batches instead, if given.
        counters: where failures are counted.
        on_statuses: receives the statuses that were shown, if given.
        has_room: whether the sink accepts more; None: always.

    Attributes:
        shut: set by any thread; from then on the sink is not called.
        forked: set in a child that a sink has forked; the thread ends there when the sink returns,
            by a SystemExit: its next step would use the parent's sockets.
    """

    def __init__(
        self,
        sink: Sink,
        on_batch: BatchSink | None,
        counters: Counter[str],
        on_statuses: StatusSink | None = None,
        has_room: Callable[[], bool] | None = None,
    ) -> None:
        self.has_room = has_room
        self.shut = False
        self.forked = False
        self._sink = sink
        self._on_batch = on_batch
        self._on_statuses = on_statuses
        self._counters = counters

    def put(self, item: StreamItem) -> None:
        """Hand over one item."""
        if isinstance(item, RankBatch) and self._on_batch is not None:
            self._call(RankBatch, self._on_batch, item.rank, item.batch)
        else:
            self._call(type(item), self._sink, item)

    def put_run(
        self,
        rank: Rank,
        epoch: int,
        first_seq: int,
        batches: Sequence[Any],
        time_left: Callable[[], bool] = lambda: True,
    ) -> int:
        """Hand over live batches of one rank, numbered from `first_seq` on without a hole.

        Returns:
            How many were handed over: one at least, and all if there is time.
        """
        # As `put` for each; an index needs no item. Nearly all batches come this way.
        sink, on_batch = self._sink, self._on_batch
        for count, batch in enumerate(batches):
            if self.shut:
                break
            try:
                if on_batch is None:
                    sink(RankBatch(rank, epoch, first_seq + count, batch, False))
                else:
                    on_batch(rank, batch)
            except Exception as error:
                self._note_failure(RankBatch, error)
            if self.forked:
                raise SystemExit
            if not time_left():
                return count + 1
        return len(batches)

    def put_statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Hand over the statuses that are new on the board, perhaps none."""
        if self._on_statuses is not None:
            self._call(RankStatus, self._on_statuses, statuses)

    def _call(self, kind: type, sink: Callable[..., None], *args: object) -> None:
        if self.shut:
            return
        try:
            sink(*args)
        except Exception as error:
            self._note_failure(kind, error)
        if self.forked:
            raise SystemExit

    def _note_failure(self, kind: type, error: Exception) -> None:
        self._counters["sink_failures"] += 1
        logger.error("the sink failed on %s", kind.__name__, exc_info=error)


class _Row(NamedTuple):
    """Live batches numbered without a hole."""

    first_seq: int
    batches: Sequence[Any]


class Delivery:
    """One feed's items in order, and how far the sink has received them.

    Attributes:
        epoch, seq: of the last batch that was handed over; seq is None before the first.
        batch_at: when it was handed over, None before the first.
    """

    def __init__(self, rank: Rank, outlet: Outlet, time_left: Callable[[], bool]) -> None:
        self.epoch = 0
        self.seq: int | None = None
        self.batch_at: float | None = None
        self._rank = rank
        self._outlet = outlet
        self._time_left = time_left
        self._waiting: deque[Item | _Row] = deque()
        self._handing_over = False

    def __bool__(self) -> bool:
        """Whether anything waits, for want of time."""
        return bool(self._waiting)

    @property
    def lag(self) -> int:
        """How many batches wait."""
        return sum(
            len(item.batches) if isinstance(item, _Row) else isinstance(item, RankBatch)
            for item in self._waiting
        )

    def add(self, item: Item) -> None:
        """Enqueue an item behind all others."""
        self._waiting.append(item)

    def add_run(self, first_seq: int, batches: Sequence[Any]) -> None:
        """Enqueue live batches behind all other items."""
        self._waiting.append(_Row(first_seq, batches))

    def rename(self, rank: Rank) -> None:
        """Rename the items that wait, and all later ones."""
        self._rank = rank
        self._waiting = deque(
            item if isinstance(item, _Row) else replace(item, rank=rank) for item in self._waiting
        )

    def hand_over(self, now: float) -> None:
        """Hand over waiting items: one at least, and all if there is time."""
        if self._handing_over:
            return  # within a call of the sink
        self._handing_over = True
        try:
            while self._waiting:
                self._put(self._waiting.popleft(), now)
                if not self._time_left():
                    break
        finally:
            self._handing_over = False

    def hand_over_all(self, now: float) -> None:
        """Hand over every waiting item, however long it takes."""
        while self._waiting and not self._handing_over:
            self.hand_over(now)

    def close(self) -> None:
        """Drop the waiting items."""
        self._waiting.clear()

    def _put(self, item: Item | _Row, now: float) -> None:
        if isinstance(item, _Row):
            first_seq, batches = item
            self._note(first_seq + len(batches) - 1, now)
            done = self._outlet.put_run(self._rank, self.epoch, first_seq, batches, self._time_left)
            if done < len(batches):
                self.seq = first_seq + done - 1
                self._waiting.appendleft(_Row(first_seq + done, batches[done:]))
            return
        if isinstance(item, RankBatch):
            self._note(item.seq, now)
        elif isinstance(item, RankRestarted):
            self.epoch, self.seq = item.epoch, None
        self._outlet.put(item)

    def _note(self, seq: int, now: float) -> None:
        self.seq, self.batch_at = seq, now
