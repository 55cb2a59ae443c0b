"""The lock of an index, which is free in every forked child: the thread that held it is not there.

Signal handlers and finalizers run in the middle of any call of their thread, and the lock does not
keep them out: they must not use an index.
"""

from __future__ import annotations

import threading
import time
from itertools import starmap
from typing import Final, Protocol

from kvindex.wire.forks import Fork, guard_forks

_PATIENCE: Final = 5.0  # seconds for which a fork waits for a change under way


class HeldInForks(Protocol):
    """An object with a lock of its own that must be held while its process forks."""

    def hold_for_fork(self) -> bool:
        """Wait until nothing is half changed, and keep it so; True."""

    def end_fork(self, in_child: bool) -> None:
        """Release the lock; in a child it is made anew, held or not."""


class Guard:
    """An index's lock, and what forks do with it.

    Use it as `with guard.lock:`. A Ctrl-C at any moment releases the lock.

    Args:
        core: an object with a lock of its own, held during forks too.

    Attributes:
        lock: reentrant; another object in a child.
        torn: whether this is a child whose parent could not get the lock before the fork.
    """

    def __init__(self, core: HeldInForks | None = None) -> None:
        self.lock = threading.RLock()
        self.torn = False
        self._core = core
        guard_forks(self)

    def prepare_fork(self, fork: Fork) -> None:
        """Acquire the locks, this guard's own one if possible in time, until the fork is over."""
        fork.do_in_child(self._renew)
        fork.hold(self.lock, max(0.0, fork.prepared_at + _PATIENCE - time.monotonic()))
        core = self._core
        if core is not None:
            held: list[bool] = []
            fork.then(lambda in_child: core.end_fork(in_child) if in_child or held else None)
            # In one C call: if a signal handler raises, the lock is not held, or noted.
            held.extend(starmap(core.hold_for_fork, ((),)))

    def miss_fork(self) -> None:
        """In a child: the forking thread acquired no lock, but another thread may have held it."""
        if self._core is not None:
            self._core.end_fork(True)
        self._renew()

    def _renew(self) -> None:
        """Make the lock anew in a child, where nobody releases it if another thread held it."""
        free = self.lock.acquire(blocking=False)
        self.torn = self.torn or not free
        self.lock = threading.RLock()
