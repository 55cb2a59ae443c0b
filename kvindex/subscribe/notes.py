"""What is counted and logged of one feed: each kind of trouble at a limited rate.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvindex.rank import Rank
from kvindex.sequencer import State
from kvindex.subscribe.status import RankStatus

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
    """

    def __init__(self, rank: Rank, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._was_up = self._told_down = self._told_unrepairable = False

    def warn(self, kind: str, text: str, *details: object) -> None:
        """Log a warning, unless there was one of this kind just now."""
        if self._may_log(kind):
            logger.warning(f"%s: {text}", self.rank, *details)

    def note(self, status: RankStatus, unrepairable: str) -> None:
        """Log that the engine is gone or back, and that its replay endpoint is of no use.

        Args:
            status: how the stream stands.
            unrepairable: why the replay endpoint is of no use; "" if it is, or there is none.
        """
        if status.state in (State.CONNECTING, State.STALE) and self._was_up:
            self._was_up = False
            if self._may_log("down"):
                self._told_down = True
                logger.info("%s: %s: %s", status.rank, status.state, status.reason)
        elif status.state is State.LIVE and not self._was_up:
            self._was_up = True
            if self._told_down or self._may_log("up"):
                self._told_down = False
                logger.info("%s: live: %s", status.rank, status.endpoint)
        if unrepairable and not self._told_unrepairable:
            self.warn("unrepairable", "%s", unrepairable)
        self._told_unrepairable = bool(unrepairable)

    def _may_log(self, kind: str) -> bool:
        now = self._clock()
        if now - self._logged_at.get(kind, -_INTERVAL) < _INTERVAL:
            return False
        self._logged_at[kind] = now
        return True
