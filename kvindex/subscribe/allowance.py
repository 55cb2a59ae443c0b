"""How long one feed may hold the subscriber's thread before the others get their turn."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Allowance"]

SECONDS = 0.05
"""Of one feed in one turn; what takes longer is done in the next turns."""


class Allowance:
    """The time that is left of a turn.

    Whoever is bounded by it does one thing first and asks then, so that each turn brings progress.

    Args:
        clock: monotonic seconds.

    Thread safety: none.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = clock()

    def begin(self) -> None:
        """Begin a turn."""
        self._until = self._clock() + SECONDS

    def left(self) -> bool:
        """Return whether any time is left."""
        return self._clock() < self._until
