"""One repair: a row of replay requests for one purpose, and what they brought."""

from __future__ import annotations

import enum
from random import Random

from kvindex.subscribe.config import ReplayPolicy

__all__ = ["Purpose", "Repair"]

MAX_REPLIES = 1_000_000
"""Replies to one request; a longer replay is cut and asked for again from where it stood."""

MAX_IDLE_REPLIES = 100_000
"""Replies in a row that bring nothing new."""

MAX_IDLE_TIMEOUTS = 10
"""How many replay time-outs may pass with replies that bring nothing new."""


class Purpose(enum.Enum):
    """Why replay is asked."""

    JOIN = "join"
    """Nothing of this epoch was applied: everything that the publisher still has."""
    PROVE = "prove"
    """After a reconnect: is it the same publisher, and what was missed?"""
    GAP = "gap"
    """Batches are missing."""
    PROBE = "probe"
    """Nothing is known to be missing: was the last batch lost?"""


class Repair:
    """The state of a repair: tries, back-off, time-outs and the replies to the open request.

    Attributes:
        purpose: why.
        asked: requests made in all.
        tries: requests made since the last progress.
        request: the open request; None between tries.
        start_seq: the first seq that the latest request asked for.
        due: when the open request times out, or when the next one is to be made.
        replies: replies to the latest request.
        first_seq, highest_seq: what it brought, the damaged included; None if nothing yet.
        replied_at: time of its latest reply, or of the request itself.
        progress: whether the next expected seq has advanced since the latest request.
        until_end: whether only the end of a replay can tell that nothing is missing.
    """

    def __init__(self, purpose: Purpose, settings: ReplayPolicy) -> None:
        self.purpose = purpose
        self.asked = 0
        self.tries = 0
        self.request: int | None = None
        self.start_seq = 0
        self.due = 0.0
        self.replies = 0
        self.first_seq: int | None = None
        self.highest_seq: int | None = None
        self.replied_at = 0.0
        self.progress = False
        self.until_end = False
        self._settings = settings
        self._idle_replies = 0
        self._advanced_at = 0.0

    def ask(self, request: int, start_seq: int, now: float) -> None:
        """Begin a try."""
        self.asked += 1
        self.tries += 1
        self.request = request
        self.start_seq = start_seq
        self.due = now + self._settings.timeout
        self.replies = 0
        self.first_seq = self.highest_seq = None
        self.progress = False
        self.replied_at = self._advanced_at = now
        self._idle_replies = 0

    def saw(self, seq: int, now: float) -> None:
        """Note a reply, good or damaged, to the open request."""
        self.replies += 1
        self.replied_at = now
        self.due = now + self._settings.timeout
        if self.first_seq is None:
            self.first_seq = seq
        if self.highest_seq is None or seq > self.highest_seq:
            self.highest_seq = seq

    def judge(self, advanced: bool, now: float) -> bool:
        """Note whether the reply brought something new; return False when it is a flood."""
        if advanced:
            self._advanced_at = now
            self._idle_replies = 0
        else:
            self._idle_replies += 1
        return not (
            self.replies >= MAX_REPLIES
            or self._idle_replies >= MAX_IDLE_REPLIES
            or now - self._advanced_at > MAX_IDLE_TIMEOUTS * self._settings.timeout
        )

    def close_try(self) -> None:
        """End the open request; progress buys a fresh set of tries."""
        self.request = None
        if self.progress:
            self.tries = 0

    @property
    def exhausted(self) -> bool:
        """Whether all tries without progress are used up."""
        return self.tries >= self._settings.attempts

    def back_off(self, random: Random, now: float) -> None:
        """Set `due` to the next try: doubling from `backoff`, capped, less up to half of it."""
        # The exponent is bounded too: a float power of thousands of tries would overflow.
        doublings = min(max(self.tries - 1, 0), 60)
        delay = min(self._settings.max_backoff, self._settings.backoff * 2.0**doublings)
        self.due = now + delay * random.uniform(0.5, 1.0)
