"""Whether a subscription's topic fits what the publisher sends at all.

A topic that matches nothing looks like an idle engine. So until the first message with the wanted
topic, the subscriber also listens to all topics, and this check notes what it hears.
"""

from __future__ import annotations

__all__ = ["TopicCheck"]

_GRACE = 1.0  # seconds after connecting in which a wrong topic may still show
_MAX_SEEN = 8
_MAX_SHOWN = 64  # bytes of a topic; it is the network's to choose


class TopicCheck:
    """Decides whether a wanted topic is confirmed, open, or contradicted.

    Args:
        topic: the prefix that messages must have; b"" fits all.

    Attributes:
        filtered: messages that other topics carried.
        confirmed: whether a message with the wanted topic was seen (or all topics are wanted).
    """

    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self.confirmed = not topic
        self.filtered = 0
        self._seen: dict[bytes, None] = {}
        self._decide_at: float | None = None
        self._decided = False

    def connected(self, now: float) -> None:
        """Start the time in which a wrong topic may show."""
        if self.open:
            self._decide_at = now + _GRACE

    def fits(self, topic: bytes) -> bool:
        """Note a message's topic; return whether the message is wanted."""
        if topic.startswith(self.topic):
            self.confirmed = True
            return True
        self.filtered += 1
        if len(self._seen) < _MAX_SEEN:
            self._seen[topic[:_MAX_SHOWN]] = None
        return False

    @property
    def contradicted(self) -> bool:
        """Whether only other topics were seen so far."""
        return not self.confirmed and bool(self._seen)

    @property
    def open(self) -> bool:
        """Whether nothing has shown yet, either way, and it is too early to conclude."""
        return not self.confirmed and not self._decided

    @property
    def deadline(self) -> float | None:
        """When `decide` wants to be called."""
        return self._decide_at if self.open else None

    def decide(self, now: float) -> None:
        """Take silence for consent once the time in which a wrong topic may show is over."""
        if self._decide_at is not None and now >= self._decide_at:
            self._decided = True

    def trouble(self) -> str:
        """Return what is wrong, for a person; "" while nothing is known."""
        if not self.contradicted:
            return ""
        seen = ", ".join(repr(topic.decode("utf-8", "replace")) for topic in self._seen)
        return (
            f"the topic {self.topic.decode('utf-8', 'replace')!r} filters out everything: "
            f"{self.filtered} messages came with topic {seen}; engines send '' unless configured"
        )
