"""A wait with a limit in time, which an event may end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from kvindex.errors import ConfigurationError, QueueTimeoutError, WaitCancelledError

__all__ = ["Wait"]

_LOOK = 0.1  # seconds between looks at `cancel`, and at what only a look can tell


class Wait:
    """One wait of a call, of `timeout` seconds at most (None: no limit), ended by `cancel`."""

    def __init__(self, timeout: float | None, cancel: threading.Event | None) -> None:
        if timeout is not None and not timeout >= 0:
            raise ConfigurationError(f"timeout must be 0 or more seconds or None, not {timeout!r}")
        self.timeout = timeout
        self._cancel = cancel
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    def slice(self, what: Callable[[], str]) -> int:
        """Return how many milliseconds to wait before the next look.

        Raises:
            WaitCancelledError: `cancel` is set.
            QueueTimeoutError: the time is up; the message says `what` was awaited.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise WaitCancelledError(f"cancelled while waiting for {what()}")
        left = self._end - time.monotonic()
        if left <= 0:
            waited = self.timeout or 0.0
            raise QueueTimeoutError(f"waited {waited:g} s for {what()}", timeout=waited)
        return math.ceil(min(left, _LOOK) * 1000)
