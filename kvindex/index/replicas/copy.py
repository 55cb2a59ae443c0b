"""A replica's copy of the server's index, statuses and names. Owned by its thread."""

from __future__ import annotations

import threading

from kvindex.index import Index, read_batch
from kvindex.index.client.client import follow_item
from kvindex.index.replicas.catchup import Catchup
from kvindex.index.replicas.entries import Applied, Entry, Message, Restored, Shown, follow_names
from kvindex.subscribe import RankRemoved, RanksRenamed, RankStatus
from kvindex.wire.rank import Rank

__all__ = ["Copy"]


class Copy:
    """The state after a snapshot and messages: equal to the server's after the same message."""

    def __init__(self, seed: int | None = None, max_blocks_per_rank: int | None = None) -> None:
        self.index = Index(seed=seed, max_blocks_per_rank=max_blocks_per_rank)
        self.statuses: dict[Rank, RankStatus] = {}
        self.names: dict[Rank, Rank] = {}  # by the name that a port tells, the rank's own
        self.changed: set[Rank] = set()  # ranks with a new status since `take_changes`
        self.renewed = True  # ranks came, went or were renamed; the reader resets it
        self.catchup = Catchup()
        self.applied = 0  # batches
        self.sent_at = 0.0  # when the last message was sent, by the monotonic clock
        self.applying = threading.Lock()  # held while a message is applied

    def begin(self, number: int) -> None:
        """Forget all: a snapshot begins, or begins again."""
        self.catchup.begin(number)
        for rank in self.index.ranks:
            self.index.remove(rank)
        self.statuses.clear()

    def restore(
        self, rank: Rank, number: int, section: bytes | bytearray, status: RankStatus | None
    ) -> None:
        """Restore a rank's section; SnapshotError or DecodeError if that is impossible."""
        self.catchup.place(rank, number)
        self.index.restore(rank, section)
        if status is not None:
            self.statuses[rank] = status

    def apply(self, message: Message) -> None:
        """Apply the next message; DecodeError or SnapshotError if that is impossible."""
        with self.applying:
            for entry in self.catchup.due(message):
                self._apply(entry)
            self.sent_at = message.sent_at

    def take_changes(self) -> list[RankStatus]:
        """Return the statuses that are new since the last call."""
        changed, self.changed = self.changed, set()
        return [self.statuses[rank] for rank in changed if rank in self.statuses]

    def _apply(self, entry: Entry) -> None:
        if isinstance(entry, Applied):
            self.index.apply(entry.rank, read_batch(entry.payload))
            self.applied += 1
        elif isinstance(entry, Shown):
            self.statuses[entry.status.rank] = entry.status
            self.changed.add(entry.status.rank)
        elif isinstance(entry, Restored):
            self.index.restore(entry.rank, entry.section)
        else:
            follow_item(self.index, entry)
            follow_names(self.names, entry)
            self.renewed = True
            if isinstance(entry, RankRemoved):
                self.statuses.pop(entry.rank, None)
            elif isinstance(entry, RanksRenamed):
                for old, _ in entry.names:
                    self.statuses.pop(old, None)
