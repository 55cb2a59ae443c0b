"""Where a subscriber's items leave it: the sink, guarded.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvindex.rank import Rank
from kvindex.sequencer import RankBatch
from kvindex.subscribe.status import RankStatus
from kvindex.subscribe.stream import BatchSink, Sink, StatusSink, StreamItem

__all__ = ["Outlet"]

logger = logging.getLogger(__name__)


class Outlet:
    """Hands items to the sink; what fails in there is counted and logged, and goes no further.

    Args:
        sink: takes every item.
        on_batch: takes the batches instead, if given.
        counters: where failures are counted.
        on_statuses: takes the statuses that were shown, if given.

    Attributes:
        shut: set, by any thread, when the sink is to be called no more.
        forked: set in a child that a sink has forked; the thread ends there when the sink returns,
            by a SystemExit: whatever comes next in it would use the parent's sockets.
    """

    def __init__(
        self,
        sink: Sink,
        on_batch: BatchSink | None,
        counters: Counter[str],
        on_statuses: StatusSink | None = None,
    ) -> None:
        self.shut = False
        self.forked = False
        self._sink = sink
        self._on_batch = on_batch
        self._on_statuses = on_statuses
        self._counters = counters

    def put(self, item: StreamItem) -> None:
        """Hand over one item."""
        if self.shut:
            return
        try:
            self._sink(item)
        except Exception as error:
            self._note_failure(type(item).__name__, error)
        if self.forked:
            raise SystemExit

    def put_batches(
        self,
        rank: Rank,
        epoch: int,
        first_seq: int,
        batches: Sequence[Any],
        *,
        replayed: bool,
        time_left: Callable[[], bool] = lambda: True,
    ) -> int:
        """Hand over batches of one rank, numbered from `first_seq` on without a hole.

        Returns:
            How many of them: one at least, and all if there is time.
        """
        on_batch = self._on_batch
        for count, batch in enumerate(batches):
            if self.shut:
                break
            if on_batch is None:
                self.put(RankBatch(rank, epoch, first_seq + count, batch, replayed))
            else:
                try:
                    on_batch(rank, batch)
                except Exception as error:
                    self._note_failure(RankBatch.__name__, error)
                if self.forked:
                    raise SystemExit
            if not time_left():
                return count + 1
        return len(batches)

    def put_statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Hand over what the board shows anew, perhaps nothing."""
        if self._on_statuses is None or self.shut:
            return
        try:
            self._on_statuses(statuses)
        except Exception as error:
            self._note_failure(RankStatus.__name__, error)
        if self.forked:
            raise SystemExit

    def _note_failure(self, item: str, error: Exception) -> None:
        self._counters["sink_failures"] += 1
        logger.error("the sink failed on %s", item, exc_info=error)
