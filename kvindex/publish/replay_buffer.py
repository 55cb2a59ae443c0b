"""The last batches that were published, for replay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """A ring of `(seq, payload)`, seq ascending, perhaps with holes; the oldest leave first.

    Each entry has a position, counted from the first ever appended, so that a replay can go on
    where it was although the ring turned meanwhile.

    Examples:
        >>> buffer = ReplayBuffer(2)
        >>> for seq in (0, 1, 3):
        ...     buffer.append(seq, b"...")
        >>> [seq for seq, _ in buffer.held_from(buffer.position(0))]
        [1, 3]
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ring: list[tuple[int, bytes]] = []
        self._appended = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def oldest_position(self) -> int:
        """The position of the oldest entry held."""
        return self._appended - len(self._ring)

    def append(self, seq: int, payload: bytes) -> None:
        """Hold one more batch; the oldest leaves if `steps` are held. O(1)."""
        if len(self._ring) < self._steps:
            self._ring.append((seq, payload))
        elif self._steps:
            self._ring[self._appended % self._steps] = (seq, payload)
        self._appended += 1

    def position(self, start_seq: int) -> int:
        """Return the position of the first entry held with a seq from start_seq. O(log n)."""
        held = range(self.oldest_position, self._appended)
        return self.oldest_position + bisect_left(held, start_seq, key=lambda p: self._at(p)[0])

    def held_from(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over the entries held from this position on; do not append meanwhile."""
        for held in range(max(position, self.oldest_position), self._appended):
            yield self._at(held)

    def _at(self, position: int) -> tuple[int, bytes]:
        return self._ring[position % self._steps]
