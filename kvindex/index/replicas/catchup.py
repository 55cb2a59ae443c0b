"""Decides which messages a joiner must still apply: pure bookkeeping.

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

from collections.abc import Iterable, Iterator

from kvindex.index.replicas.entries import Entry, Message, Restored, Shown
from kvindex.subscribe import RankAdded, RanksRenamed
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

__all__ = ["Catchup"]


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

    def due(self, message: Message) -> Iterable[Entry]:
        """Return the entries to apply of the next message; DecodeError if it is another one."""
        number, end = message.number, self._end
        assert end is not None
        if number != self._next if self._next is not None else number > self._begin:
            expected = self._begin if self._next is None else self._next
            raise DecodeError(f"message {number} came where {expected} should follow")
        self._next = number + 1
        if number >= end:
            return message.entries
        due = [] if number < self._begin else list(self._select(message, end))
        self.passed += len(message.entries) - len(due)
        return due

    def _select(self, message: Message, end: int) -> Iterator[Entry]:
        number, positions = message.number, self._positions
        for entry in message.entries:
            if isinstance(entry, RanksRenamed):
                raise DecodeError(f"ranks were renamed in message {number}, within a snapshot")
            rank = entry.status.rank if isinstance(entry, Shown) else entry.rank
            if isinstance(entry, (RankAdded, Restored)):
                positions.setdefault(rank, number)
            if positions.get(rank, end) <= number:
                yield entry
