"""Counters that a process adds to and another one may read: numbers in a row of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["OTHER", "Counters"]

OTHER: Final = "(other)"
"""Stands for methods and paths that nobody has a route for, and for names without room."""


class Counters:
    """Named counters of 64 bits in one buffer.

    One process writes; others map the same memory and read. A number is written whole, so a reader
    sees the one before or the one after.

    Args:
        names: of the counters, the same in all processes that share the buffer.
        buffer: at least `Counters.size(names)` writable bytes, zero at first; own memory if None.

    Thread safety: `add` on one thread of one process; the rest anywhere.

    Examples:
        >>> counters = Counters(["host", "token"])
        >>> counters.add("token")
        >>> counters.values()
        {'host': 0, 'token': 1}
    """

    def __init__(self, names: Sequence[str], buffer: memoryview | None = None) -> None:
        size = self.size(names)
        self._numbers = (memoryview(bytearray(size)) if buffer is None else buffer)[:size].cast("Q")
        self._places = {name: place for place, name in enumerate(names)}

    @staticmethod
    def size(names: Sequence[str]) -> int:
        """Return how many bytes these counters take."""
        return 8 * len(names)

    def add(self, name: str, number: int = 1) -> None:
        """Add to a counter. KeyError: there is none of that name."""
        self._numbers[self._places[name]] += number

    def values(self) -> dict[str, int]:
        """Return every counter, by name."""
        return dict(zip(self._places, self._numbers, strict=True))

    def close(self) -> None:
        """Let go of the buffer, so that its owner can close it."""
        self._numbers.release()
