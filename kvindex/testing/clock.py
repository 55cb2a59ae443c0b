"""A clock that tests move by hand."""

from __future__ import annotations

import math
import threading

from kvindex.wire.errors import ConfigurationError


class ManualClock:
    """Return the time that a test has set: pass it wherever a `clock` callable is accepted.

    Args:
        time: where it starts, in seconds.

    Thread safety: all methods.

    Examples:
        >>> clock = ManualClock(100.0)
        >>> clock.advance(2.5)
        102.5
        >>> clock()
        102.5
    """

    def __init__(self, time: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._time = float(time)

    def __call__(self) -> float:
        """Return the time in seconds."""
        with self._lock:
            return self._time

    @property
    def time(self) -> float:
        """The time in seconds."""
        return self()

    def advance(self, seconds: float) -> float:
        """Move the clock forward and return the new time in seconds.

        Raises:
            ConfigurationError: `seconds` is negative or not finite: this clock is monotonic.
        """
        if not math.isfinite(seconds) or seconds < 0:
            raise ConfigurationError(f"seconds is {seconds!r}; a clock goes forward only")
        with self._lock:
            self._time += seconds
            return self._time
