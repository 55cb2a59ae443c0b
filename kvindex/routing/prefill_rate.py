"""How fast the fleet prefills, measured on first tokens."""

from __future__ import annotations

from typing import Final

__all__ = ["PrefillRate"]

_FIRST_GUESS: Final = 16_000.0  # tokens/s, until something is measured
_LEAST_TOKENS: Final = 2_048  # a shorter wait shows latencies rather than the rate
_MEMORY: Final = 2_000_000.0  # tokens after which older measurements have lost most of their weight


class PrefillRate:
    """The tokens per second that a rank prefills, as bookings show it.

    A booking shows how many tokens came before its first token: those queued on its rank, and its
    own. The rate is their sum over the sum of the times, where older ones fade.

    Attributes:
        tokens_per_second: the rate.
    """

    def __init__(self) -> None:
        self.tokens_per_second = _FIRST_GUESS
        self._tokens = 2.0 * _LEAST_TOKENS
        self._seconds = self._tokens / _FIRST_GUESS

    def measure(self, tokens: float, seconds: float) -> None:
        """Add the measurement of one first token, so many seconds after the booking."""
        if tokens < _LEAST_TOKENS or seconds <= 0.0:
            return
        kept = max(0.0, 1.0 - tokens / _MEMORY)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds
        self.tokens_per_second = self._tokens / self._seconds
