"""The index's lock as a long change holds it: given back every thousand blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["HOLD_BLOCKS", "Hold", "WholeHold"]

HOLD_BLOCKS: Final = 1024
"""How many blocks, or as much other work, others wait for at most."""

_MOMENT = 1e-5  # seconds without the lock: whoever waits for it needs some to wake up


class Hold:
    """The lock of an index, held by a change of one rank.

    Args:
        lock: held already.
        on_pause: called with the lock held, before it is given back for the first time.
    """

    def __init__(self, lock: threading.Lock, on_pause: Callable[[], None]) -> None:
        self._lock = lock
        self._on_pause = on_pause
        self._done = 0
        self.paused = False

    def did(self, blocks: int) -> None:
        """Say that so many blocks are done, at a moment when everything shared is whole.

        Others may go first then. They may change what other ranks hold; they see a part of this
        rank's change.
        """
        self._done += blocks
        if self._done < HOLD_BLOCKS:
            return
        self._done = 0
        if not self.paused:
            self.paused = True
            self._on_pause()
        self._lock.release()
        try:
            time.sleep(_MOMENT)
        finally:
            self._lock.acquire()


class WholeHold(Hold):
    """Keeps the lock to the end."""

    def __init__(self) -> None:
        """Need no lock: it is never given back."""

    def did(self, blocks: int) -> None:
        """Go on."""
