"""A replica's copy of the server's index, and which messages it must still apply.

A joiner reads the ring from some message on, and meanwhile, over a socket, each rank's contents in
the server's index. The server takes these sections one after the other while events go on, each
between two messages: the section of a rank holds all that was in messages below its position, and
nothing of those from there on. So, with ring messages `0 1 2 …`:

```
             begin          A           B       end
messages  …    │   3   4    │  5   6    │  7  8  │  9 …
rank A         │ · · · · ·  ├── applied ─────────┼────     · in the section, passed over
rank B         │ · · · · · · · · · · · ·├ applied ┼────
```

A rank without a section was added after `begin`, or removed before its turn came (or both): it
holds nothing until the messages add it, so all its later entries count.

Renaming in between would move positions from name to name: the server then begins again instead.
"""

from __future__ import annotations

from collections.abc import Callable

from kvindex.client.client import follow_item
from kvindex.index import Index, read_batch
from kvindex.replicas.messages import (
    BatchApplied,
    Entry,
    ReceivedMessage,
    SectionRestored,
    StatusChanged,
    decode_entries,
    decode_entry,
    follow_names,
)
from kvindex.subscribe import RankAdded, RankRemoved, RanksRenamed, RankStatus, StreamItem
from kvindex.subscribe.status_board import under_new_name
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank


class Catchup:
    """The positions of one joiner. Owner: one thread at a time."""

    def __init__(self) -> None:
        self.passed = 0  # entries that were in a section already
        self._begin = 0
        self._end: int | None = None
        self._positions: dict[Rank, int] = {}
        self._next: int | None = None

    def begin(self, number: int) -> None:
        """Begin, or begin again, with nothing; the next message sent has this number."""
        self._begin = number
        self._end = None
        self._positions.clear()

    def place(self, rank: Rank, number: int) -> None:
        """Note that a rank's section was taken before the message of this number."""
        if self._end is not None or number < self._begin:
            raise DecodeError(f"a section of {rank} at message {number}, where none can be")
        self._positions[rank] = number

    def end(self, number: int) -> None:
        """Note that every entry from this message on must be applied."""
        if number < max([self._begin, *self._positions.values()]):
            raise DecodeError(f"a snapshot that ends at message {number}, before its sections")
        self._end = number

    def follow(self, number: int) -> bool:
        """Return whether all entries of the next message count; DecodeError if it is another."""
        end = self._end
        assert end is not None
        # The first one may come before `begin`: the joiner was in the ring a little earlier.
        if number != self._next if self._next is not None else number > self._begin:
            expected = self._begin if self._next is None else self._next
            raise DecodeError(f"message {number} came where {expected} should follow")
        self._next = number + 1
        return number >= end

    def due(self, number: int, entries: list[Entry]) -> list[Entry]:
        """Return those of a message's entries that count, if not all do; raises DecodeError."""
        positions, end = self._positions, self._end
        assert end is not None
        due: list[Entry] = []
        for entry in entries if number >= self._begin else ():
            if isinstance(entry, RanksRenamed):
                raise DecodeError(f"ranks were renamed in message {number}, within a snapshot")
            rank = entry.status.rank if isinstance(entry, StatusChanged) else entry.rank
            if isinstance(entry, (RankAdded, SectionRestored)):
                # Unless it has a section: that was taken later, and holds what came from here on.
                positions.setdefault(rank, number)
            if positions.get(rank, end) <= number:
                due.append(entry)
        self.passed += len(entries) - len(due)
        return due


class Copy:
    """The state after a snapshot and messages: equal to the server's after the same message."""

    def __init__(self, seed: int | None = None, max_blocks_per_rank: int | None = None) -> None:
        self.index = Index(seed=seed, max_blocks_per_rank=max_blocks_per_rank)
        self.statuses: dict[Rank, RankStatus] = {}
        self.names: dict[Rank, Rank] = {}  # by the rank of a port, its present name
        self.changed: set[Rank] = set()  # ranks with a new status since `take_changes`
        self.renewed = True  # ranks came, went or were renamed; the reader resets it
        self.catchup = Catchup()
        self.applied = 0  # batches
        self.sent_at = 0.0  # when the last message was sent, by the monotonic clock
        self.to_local: Callable[[RankStatus], RankStatus] | None = None  # by this machine's clock

    def begin(self, number: int) -> None:
        """Forget all: a snapshot begins, or begins again."""
        self.catchup.begin(number)
        # Emptied, not replaced: the relay's seed and limit stay.
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

    def apply(self, message: ReceivedMessage) -> None:
        """Apply the next message; DecodeError or SnapshotError if that is impossible."""
        number, encoded = message.number, memoryview(message.entries)
        is_whole = self.catchup.follow(number)
        applied = None
        if is_whole and self.index.backend == "native":
            # Batches, up to the first entry that needs Python, without an object for each.
            applied = self.index.apply_entries(encoded)
        if applied is None:
            entries = decode_entries(encoded)
        else:
            self.applied += applied[0]
            entries = [decode_entry(entry) for entry in applied[1]]
        if not is_whole:
            entries = self.catchup.due(number, entries)
        for entry in entries:
            if isinstance(entry, BatchApplied):
                self.index.apply(entry.rank, read_batch(entry.payload))
                self.applied += 1
            elif isinstance(entry, StatusChanged):
                status = entry.status if self.to_local is None else self.to_local(entry.status)
                self.statuses[status.rank] = status
                self.changed.add(status.rank)
            elif isinstance(entry, SectionRestored):
                self.index.restore(entry.rank, entry.section)
            else:
                self._follow(entry)
        self.sent_at = message.sent_at

    def _follow(self, item: StreamItem) -> None:
        """Follow an item between batches, as the server's index and board did."""
        follow_item(self.index, item)
        follow_names(self.names, item)
        self.renewed = True
        statuses = self.statuses
        if isinstance(item, RankRemoved):
            statuses.pop(item.rank, None)
        elif isinstance(item, RanksRenamed):
            # All are taken before any is placed: two ranks may change names with each other.
            moved = [(new, statuses.pop(old)) for old, new in item.names if old in statuses]
            for rank, status in moved:  # not live until the server has sent them anew
                statuses[rank] = under_new_name(status, rank)
                self.changed.add(rank)

    def take_changes(self) -> list[RankStatus]:
        """Return the statuses that are new since the last call."""
        changed, self.changed = self.changed, set()
        return [self.statuses[rank] for rank in changed if rank in self.statuses]
