"""Counters and log lines of one feed: each kind of trouble at a limited rate.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvindex.wire.log_rate import LogRate
from kvindex.wire.rank import Rank

__all__ = ["Notes"]

logger = logging.getLogger(__name__)


class Notes:
    """Counts, and remembers what was logged, and when.

    Attributes:
        rank: the rank's present name.
        counters: what happened how often, by name.
        shown_live: whether the status shown last was LIVE.
        was_up: whether the engine was live since it was last gone.
        told_down: whether its loss was logged, and its return not yet.
        told_unrepairable: whether it was logged that its replay endpoint is useless.
        overflowed_at: when more bytes waited than may, None if never.
        may_log: returns whether a line of a kind may be logged now.
    """

    def __init__(self, rank: Rank, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.counters: Counter[str] = Counter()
        self.shown_live = False
        self.was_up = self.told_down = self.told_unrepairable = False
        self.overflowed_at: float | None = None
        self.may_log = LogRate(clock).allows

    def warn(self, kind: str, text: str, *details: object) -> None:
        """Log a warning, unless one of this kind was logged just now."""
        if self.may_log(kind):
            logger.warning(f"%s: {text}", self.rank, *details)
