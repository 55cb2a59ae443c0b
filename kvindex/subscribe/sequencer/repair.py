"""Replay: the facts about a publisher's replay endpoint, and the repair that is under way."""

from __future__ import annotations

import enum
import math
from random import Random

import msgspec

from kvindex.subscribe.sequencer.batches import Applied
from kvindex.subscribe.sequencer.values import ReplayPolicy, SequencerConfig

MAX_REPLIES = 1_000_000
"""Replies to one request; a longer replay is cut and asked for again from where it stood."""

MAX_IDLE_REPLIES = 100_000
"""Replies in a row that bring nothing new."""

MAX_IDLE_TIMEOUTS = 10
"""How many replay time-outs may pass with replies that bring nothing new."""

MAX_PROBE_FACTOR = 8
"""A replay endpoint that does not answer probes is probed this much more rarely."""

MAX_DISPUTES = 3
"""How often in a row replay may deny live batches until it counts as another publisher's."""


class Replay:
    """The facts about a publisher's replay endpoint, over all repairs. Owner: one sequencer.

    Attributes:
        exists: whether this publisher has an endpoint.
        foreign: whether the given endpoint is another publisher's, by all that it sent. It is asked
            now and then, and its replies are compared and not applied.
        paired: whether it sent a batch that also arrived live, in this epoch and connection.
        keeps: whether the publisher keeps batches for replay; None while unknown.
        wanted: whether a replay must be asked after the current one, which began too early to show
            the missing batches.
        requests: how many were made; the number of the latest.
        unanswered: how many in a row, up to now, had no reply.
        quiet_since: when the stream last brought a batch, or a replay showed that it is whole.
    """

    def __init__(self, config: SequencerConfig, now: float) -> None:
        self.exists = config.has_replay
        self.foreign = False
        self.paired = False
        self.keeps: bool | None = None
        self.wanted = False
        self.requests = 0
        self.unanswered = 0
        self.quiet_since = now
        self._attempts = config.replay_policy.attempts
        self._probe_interval = config.probe_interval
        self._probe_factor = 1
        self._disputes = 0

    @property
    def usable(self) -> bool:
        """Whether replay can help: there is an endpoint, and it did not prove to be empty."""
        return self.exists and self.keeps is not False

    @property
    def probe_due(self) -> float:
        """When a stream that misses nothing is to be checked for a lost tail; inf if never."""
        if not (self.exists or self.foreign):
            return math.inf
        return self.quiet_since + self._probe_interval * self._probe_factor

    @property
    def trouble(self) -> str:
        """Why replay cannot help at present, for people; empty while it may."""
        if self.foreign:
            return "the replay endpoint is another publisher's, check replay="
        if not self.exists:
            return "no replay endpoint"
        if self.unanswered >= self._attempts:
            return f"the last {self.unanswered} replay requests were not answered"
        return "the publisher keeps no batches for replay" if self.keeps is False else ""

    def ended(self, now: float) -> None:
        """Record a replay that reached its end."""
        self.unanswered = 0
        self.quiet_since = now
        self._probe_factor = 1

    def pair(self, agreed: bool) -> None:
        """Record that replay and live batches agree, or that another publisher may answer now."""
        self.paired = agreed
        self._disputes = 0

    def dispute(self) -> bool:
        """Record that replay denied a live batch; return whether that was once too often."""
        self._disputes += 1
        return self._disputes >= MAX_DISPUTES

    def disown(self, foreign: bool) -> None:
        """Treat the endpoint as another publisher's from now on, or as this one's again."""
        self.foreign = foreign
        self.exists = not foreign
        self.pair(False)

    def probe_rarely(self) -> None:
        """Record that replay did not help: double the time between probes, up to a bound."""
        self._probe_factor = min(MAX_PROBE_FACTOR, 2 * self._probe_factor)


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


class Repair(msgspec.Struct):
    """The state of a repair: tries, back-off, time-outs and the replies to the open request.

    Attributes:
        purpose: why.
        policy, random: the patience with replay, and the jitter of back-off.
        applied: the stream's batches, whose count shows progress.
        asked: requests made in all.
        tries: requests made since the last progress.
        request: the open request; None between tries.
        start_seq: the first seq that the latest request asked for.
        due: when the open request times out, or when the next one is to be made.
        replies: replies to the latest request.
        first_seq, highest_seq: of these replies, the damaged included; None if none yet.
        replied_at: time of its latest reply, or of the request itself.
        until_end: whether only the end of a replay can show that nothing is missing.
        applied_before, advanced_at, idle_replies: batches applied before the latest request, when
            a reply last brought something new, and the replies since.
    """

    purpose: Purpose
    policy: ReplayPolicy
    random: Random
    applied: Applied
    asked: int = 0
    tries: int = 0
    request: int | None = None
    start_seq: int = 0
    due: float = 0.0
    replies: int = 0
    first_seq: int | None = None
    highest_seq: int | None = None
    replied_at: float = 0.0
    until_end: bool = False
    applied_before: int = 0
    advanced_at: float = 0.0
    idle_replies: int = 0

    @property
    def progress(self) -> bool:
        """Whether batches were applied since the latest request."""
        return self.applied.count != self.applied_before

    @property
    def exhausted(self) -> bool:
        """Whether all tries without progress are used up."""
        return self.tries >= self.policy.attempts

    def ask(self, request: int, start_seq: int, now: float) -> None:
        """Begin a try."""
        self.asked += 1
        self.tries += 1
        self.request = request
        self.start_seq = start_seq
        self.due = now + self.policy.timeout
        self.replies = self.idle_replies = 0
        self.first_seq = self.highest_seq = None
        self.applied_before = self.applied.count
        self.replied_at = self.advanced_at = now

    def saw(self, seq: int, now: float) -> None:
        """Note a reply, good or damaged, to the open request."""
        self.replies += 1
        self.replied_at = now
        self.due = now + self.policy.timeout
        if self.first_seq is None:
            self.first_seq = seq
        if self.highest_seq is None or seq > self.highest_seq:
            self.highest_seq = seq

    def judge(self, advanced: bool, now: float) -> bool:
        """Note whether the reply brought something new; return False when it is a flood."""
        if advanced:
            self.advanced_at = now
            self.idle_replies = 0
        else:
            self.idle_replies += 1
        return not (
            self.replies >= MAX_REPLIES
            or self.idle_replies >= MAX_IDLE_REPLIES
            or now - self.advanced_at > MAX_IDLE_TIMEOUTS * self.policy.timeout
        )

    def close_try(self) -> None:
        """End the open request; progress buys a fresh set of tries."""
        self.request = None
        if self.progress:
            self.tries = 0

    def back_off(self, now: float) -> None:
        """Set `due` to the next try: doubling from `backoff`, capped, less up to half of it."""
        # The exponent is bounded too: a float power of thousands of tries would overflow.
        doublings = min(max(self.tries - 1, 0), 60)
        delay = min(self.policy.max_backoff, self.policy.backoff * 2.0**doublings)
        self.due = now + delay * self.random.uniform(0.5, 1.0)
