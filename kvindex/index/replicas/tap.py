"""The tap of the subscriber's thread: packs entries into numbered messages.

Owned by that thread, `failure` and `statistics` apart.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvindex.index.replicas.entries import (
    Applied,
    Entry,
    Message,
    Restored,
    Shown,
    encode_message,
    follow_names,
    size_of,
)
from kvindex.index.replicas.outflow import Outflow
from kvindex.subscribe import RanksRenamed, RankStatus, StreamItem
from kvindex.wire.errors import ClosedError
from kvindex.wire.rank import Rank

__all__ = ["StreamTap"]

logger = logging.getLogger(__name__)

_MAX_COUNT = 2**63 - 1  # the largest number that every reader of msgpack reads
_NEEDED = [
    "rank",
    "state",
    "complete",
    "connected",
    "endpoint",
    "replay_endpoint",
    "last_event_age",
]
"""What an answer needs of a status, beside its reason and numbers."""


class StreamTap:
    """Forwards all that the client's index receives, in the same order, while there are readers.

    At the end of each turn of the subscriber's thread a message goes out, empty if nothing
    happened: the thread turns at least once a second, and so replicas see that it lives.

    Args:
        outflow: where messages go.
        on_failure: called once, when nothing more can be sent.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        outflow: Outflow,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = 0  # of the next message
        self.renames = 0  # how often ranks were renamed
        self.names: dict[Rank, Rank] = {}  # by the rank of a port, its present name
        self.failure: str | None = None  # why nothing more is sent
        self._outflow = outflow
        self._on_failure = on_failure
        self._clock = clock
        self._attended = False
        self._entries: list[Entry] = []
        self._bytes = 0
        self._room = outflow.chunk_bytes
        self._counters: Counter[str] = Counter()

    def batch(self, rank: Rank, payload: bytes) -> None:
        """Receive a batch that was applied."""
        if self._attended:
            self._add(Applied(rank, payload))

    def item(self, item: StreamItem) -> None:
        """Receive an item between two batches."""
        follow_names(self.names, item)
        if isinstance(item, RanksRenamed):
            self.renames += 1
        if self._attended:
            self._add(item)  # type: ignore[arg-type]  # no RankBatch comes here

    def restored(self, rank: Rank, section: bytes) -> None:
        """Receive the contents that an added rank begins with."""
        if self._attended:
            self._add(Restored(rank, section))

    def statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Receive new statuses, and send this turn's entries."""
        if self._attended:
            for status in statuses:
                self._add(Shown(status))
            self._send()

    def stop(self) -> None:
        """Send the rest and notify readers of the end, as the thread ends."""
        self.flush()
        self._attended = False
        self._outflow.close()

    def attend(self) -> None:
        """Admit the readers that have attached to the ring: they get every message from now on."""
        if self.failure is not None:
            raise ClosedError(self.failure)
        self.flush()
        self._outflow.admit()
        self._attended = True

    def recount(self) -> None:
        """Note that readers have gone: without any, nothing is packed."""
        if self._attended:
            self._attended = self._outflow.count_readers() > 0

    def flush(self) -> None:
        """Send the entries so far, so that all of them have numbers below `number`."""
        if self._entries:
            self._send()

    def statistics(self) -> dict[str, int]:
        """Return how many entries were sent, by kind."""
        return {"entries": 0, "heartbeats": 0, **self._counters}

    def _add(self, entry: Entry) -> None:
        size = size_of(entry)
        if self._bytes + size > self._room:
            self.flush()
        self._entries.append(entry)
        self._bytes += size

    def _send(self) -> None:
        entries, self._entries = self._entries, []
        self._bytes = 0
        try:
            self._outflow.send(self._encoded(entries))
        except Exception as error:
            self._fail(error)
            return
        self.number += 1
        self._counters["entries"] += len(entries)
        self._counters["heartbeats"] += not entries

    def _encoded(self, entries: list[Entry]) -> bytes:
        message = Message(self.number, self._clock(), entries)
        try:
            return encode_message(message)
        except Exception:  # one rank's status must not end the fan-out for all
            entries = [self._encodable(e) if isinstance(e, Shown) else e for e in entries]
            return encode_message(msgspec.structs.replace(message, entries=entries))

    def _encodable(self, shown: Shown) -> Shown:
        """Return a status as it is; if it cannot be encoded, only what an answer needs of it."""
        try:
            msgspec.msgpack.encode(shown)
            return shown
        except Exception as error:
            status = shown.status
            if not self._counters["statuses_cut"]:
                logger.error("%s: its status cannot be encoded: %r", status.rank, error)
            self._counters["statuses_cut"] += 1
            kept = {name: getattr(status, name) for name in _NEEDED}
            reason = f"the rest of its status could not be sent on: {type(error).__name__}"
            epoch, lag = min(status.epoch, _MAX_COUNT), min(status.lag, _MAX_COUNT)
            return Shown(RankStatus(**kept, reason=reason, epoch=epoch, seq=None, lag=lag))

    def _fail(self, error: Exception) -> None:
        """End the fan-out, rather than leave a hole in it; the client goes on."""
        logger.error("the fan-out failed and ends; its client goes on", exc_info=error)
        self._attended = False
        self.failure = f"the fan-out failed: {error!r}"
        self._counters["failures"] += 1
        self._outflow.close()
        self._on_failure()
