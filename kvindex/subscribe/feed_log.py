"""What is logged of one feed: each kind of trouble at a limited rate, and when its engine is gone.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging

from kvindex.sequencer import State
from kvindex.subscribe.status import RankStatus

__all__ = ["FeedLog"]

logger = logging.getLogger(__name__)

_INTERVAL = 10.0  # seconds between log lines of one kind


class FeedLog:
    """Remembers what was logged of a feed, and when."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}
        self._was_up = self._told_down = self._told_unrepairable = False

    def warn(self, kind: str, now: float, text: str, *details: object) -> None:
        """Log a warning, unless there was one of this kind just now."""
        if self._may_log(kind, now):
            logger.warning(text, *details)

    def note(self, status: RankStatus, unrepairable: str, now: float) -> None:
        """Log that the engine is gone or back, and that its replay endpoint is of no use.

        Args:
            status: how the stream stands.
            unrepairable: why the replay endpoint is of no use; "" if it is, or there is none.
            now: the present.
        """
        if status.state in (State.CONNECTING, State.STALE) and self._was_up:
            self._was_up = False
            if self._may_log("down", now):
                self._told_down = True
                logger.info("%s: %s: %s", status.rank, status.state, status.reason)
        elif status.state is State.LIVE and not self._was_up:
            self._was_up = True
            if self._told_down or self._may_log("up", now):
                self._told_down = False
                logger.info("%s: live: %s", status.rank, status.endpoint)
        if unrepairable and not self._told_unrepairable:
            self.warn("unrepairable", now, "%s: %s", status.rank, unrepairable)
        self._told_unrepairable = bool(unrepairable)

    def _may_log(self, kind: str, now: float) -> bool:
        if now - self._logged_at.get(kind, -_INTERVAL) < _INTERVAL:
            return False
        self._logged_at[kind] = now
        return True
