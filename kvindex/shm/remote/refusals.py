"""What strangers send to a writer over TCP: counted by reason, and logged at a limited rate."""

from __future__ import annotations

import logging
from collections import Counter

import zmq

from kvindex.log_rate import LogRate

__all__ = ["Refusals", "descriptor_of"]

logger = logging.getLogger(__name__)

_REASONS = (
    "bad_acknowledgement",
    "cut_off",
    "handshake",
    "malformed",
    "not_joined",
    "oversized",
    "rank_taken",
    "repeated_hello",
    "unknown_rank",
    "version",
    "wrong_token",
)


class Refusals:
    """Counters of what was ignored, and why. Owned by the thread that sends."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._log_rate = LogRate()
        self._unlogged = 0

    def note(self, reason: str, frame: zmq.Frame | None = None) -> None:
        """Count a refusal, of this frame or of a whole connection."""
        self._counts[reason] += 1
        self._unlogged += 1
        if self._log_rate.allows():
            logger.warning(
                "refused from remote readers or strangers: %d since the last such line, now for"
                " %s, from %s",
                self._unlogged,
                reason,
                _peer(frame),
            )
            self._unlogged = 0

    def statistics(self) -> dict[str, int]:
        """Return the counter of each reason, as `refused_<reason>`."""
        return {f"refused_{reason}": self._counts[reason] for reason in _REASONS}


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Return which descriptor a frame was read from.

    None for a peer of ZeroMQ's first protocol, which who speaks HTTP, say, is taken for; it has no
    heartbeats either.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _peer(frame: zmq.Frame | None) -> str:
    if frame is None:
        return "an unknown address"
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
