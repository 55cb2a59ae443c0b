"""What is counted and logged of one feed: each kind of trouble at a limited rate.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvindex.rank import Rank

__all__ = ["Notes"]

logger = logging.getLogger(__name__)

_INTERVAL = 10.0  # seconds between log lines of one kind


class Notes:
    """Counts, and remembers what was logged, and when.

    Args:
        rank: whose feed it is; log lines begin with it.
        clock: monotonic seconds.

    Attributes:
        rank: the name that the rank goes by now.
        counters: what happened how often, by name.
        shown_live: whether the status shown last was LIVE.
        was_up: whether the engine was live since it was last gone.
        told_down: whether its being gone was logged, and its return was not yet.
        told_unrepairable: whether it was logged that its replay endpoint is of no use.
    """

    def __init__(self, rank: Rank, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.counters: Counter[str] = Counter()
        self.shown_live = False
        self.was_up = self.told_down = self.told_unrepairable = False
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def warn(self, kind: str, text: str, *details: object) -> None:
        """Log a warning, unless there was one of this kind just now."""
        if self.may_log(kind):
            logger.warning(f"%s: {text}", self.rank, *details)

    def may_log(self, kind: str) -> bool:
        """Return whether a line of this kind may be logged now; then it is taken as logged."""
        now = self._clock()
        if now - self._logged_at.get(kind, -_INTERVAL) < _INTERVAL:
            return False
        self._logged_at[kind] = now
        return True
