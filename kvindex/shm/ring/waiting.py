"""How a party of a queue waits: spinning, sleeping, and checking its peers meanwhile."""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from kvindex.wire.errors import ConfigurationError, QueueTimeoutError, WaitCancelledError

logger = logging.getLogger(__name__)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """How a party of a queue waits.

    A party first spins, then sleeps until it is woken (futex). It spins only while its waits have
    lately been shorter than `spin`, and never on more cores than leave one free; so an idle party
    does not spin, and one that is served every millisecond keeps a core busy for a wake-up that
    costs a microsecond and not ten. `Waiting(spin=0)` never spins.

    Attributes:
        spin: longest spinning in one wait, in seconds.
        look: while asleep, seconds between looks at `cancel` and at whether the peers live.
        warn_after: seconds of waiting after which a warning is logged, and again after as many.

    Raises:
        ConfigurationError: a value is out of range.
    """

    spin: float = 0.002
    look: float = 0.1
    warn_after: float = 60.0

    def __post_init__(self) -> None:
        for name, least, most in (("spin", 0.0, 10.0), ("look", 0.001, 10.0)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigurationError(f"{name} must be {least:g} to {most:g} s, not {value!r}")
        if not self.warn_after > 0:
            raise ConfigurationError(f"warn_after must be above 0 s, not {self.warn_after!r}")


class Patience:
    """One call's waiting: how long it may still take, and when to warn (never if `quiet`).

    Attributes:
        timeout: longest wait in seconds, for an error; 0 if there is none.
        spin: longest spinning in one wait, in seconds.
    """

    def __init__(self, waiting: Waiting, timeout: float | None, *, quiet: bool = False) -> None:
        if timeout is not None and timeout != timeout:
            raise ConfigurationError("timeout must be seconds or None, not NaN")
        self.timeout = timeout or 0.0
        self.spin = waiting.spin if timeout is None else min(waiting.spin, timeout)
        self._look = waiting.look
        self._warn_after = waiting.warn_after
        self._started = time.monotonic()
        self._deadline = None if timeout is None else self._started + timeout
        self._warn_at = float("inf") if quiet else self._started + waiting.warn_after

    def slice(self) -> float:
        """Return how long to sleep before the next look, in seconds; 0 if the time is up."""
        # At most a look: a peer that dies wakes nobody.
        until = self._warn_at if self._deadline is None else min(self._deadline, self._warn_at)
        return max(0.0, min(self._look, until - time.monotonic()))

    def remaining(self) -> float | None:
        """Return the seconds left, or None without an end."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def check(self, awaited: str) -> None:
        """Raise QueueTimeoutError if the time is up; log a warning if the wait has become long."""
        # The time-out before the warning: a wait that ends now is not long.
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            raise QueueTimeoutError(
                f"waited {self.timeout:g} s for {awaited}", timeout=self.timeout
            )
        if now >= self._warn_at:
            self._warn_at = now + self._warn_after
            logger.warning("waiting for %s for %s", awaited, _seconds(now - self._started))


def check_cancel(cancel: threading.Event | None, awaited: str) -> None:
    """Raise WaitCancelledError if the event is set; `awaited` is what the wait is for."""
    if cancel is not None and cancel.is_set():
        raise WaitCancelledError(f"the wait for {awaited} was cancelled")


def _seconds(waited: float) -> str:
    """Return a time for people; a short one, too, is never 0."""
    return f"{waited:.0f} s" if waited >= 10 else f"{waited:.2g} s"
