"""How often one kind of trouble is logged."""

from __future__ import annotations

import time
from collections.abc import Callable

_INTERVAL = 10.0  # seconds between log lines of one kind


class LogRate:
    """Allows one log line of each kind in ten seconds. Thread safety: its owner's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def allows(self, kind: str = "") -> bool:
        """Return whether a line of this kind may be logged now; if so, it counts as logged."""
        now = self._clock()
        if now - self._logged_at.get(kind, -_INTERVAL) < _INTERVAL:
            return False
        self._logged_at[kind] = now
        return True
