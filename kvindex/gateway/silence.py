"""How long an engine may send nothing."""

from __future__ import annotations

import asyncio
from typing import Any


class Silence:
    """Cancels the task that awaits a piece of an answer for too long.

    One timer for a request, none for a piece. Owner: the task that calls `begin`.

    Args:
        within: seconds that a piece may take.

    Attributes:
        is_over: whether the task was cancelled because the time is over.
        since: when it began to wait, in seconds of the loop; None while it does not.
    """

    def __init__(self, within: float) -> None:
        self.is_over = False
        self._within = within
        self.since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None

    def begin(self, now: float) -> None:
        """Begin to wait for a piece."""
        self.since = now
        if self._timer is None:
            self.is_over = False
            self._task = asyncio.current_task()
            self._timer = self._loop.call_later(self._within, self._check)

    def pause(self) -> None:
        """Note that a piece has arrived. What the client takes to read it does not count."""
        self.since = None

    def end(self) -> None:
        """Cancel nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        waited = 0.0 if self.since is None else self._loop.time() - self.since
        if waited >= self._within and self._task is not None:
            self.is_over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._within - waited, self._check)
