"""From the thread that writes statuses or items to an asyncio task that waits for them.

No thread waits for a task, and nothing is polled: the writing thread rings a bell of the task's
event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvindex.subscribe.status_board import StatusBoard
from kvindex.subscribe.stream import RankStatus
from kvindex.wire.rank import Rank

__all__ = ["Changes", "LoopBell"]


class LoopBell:
    """Wakes one task of the running event loop; ringing twice is as good as once.

    Thread safety: `ring` from any thread, within any lock; `wait` by the task only.
    """

    def __init__(self) -> None:
        # Here, as wherever a task runs: programs without asyncio need not load it.
        import asyncio

        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._rung = False  # so that a loop which is blocked is not called again and again

    def ring(self) -> None:
        """Make the task return from `wait`, now or when it calls that next."""
        if not self._rung:
            self._rung = True
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:
                pass  # the loop is closed: nobody waits

    async def wait(self) -> None:
        """Return once the bell was rung since the last return; then look for what has changed.

        It may return once without a ring.
        """
        await self._event.wait()
        self._event.clear()
        self._rung = False


class Changes:
    """The latest unread status of each rank that has changed; at first, the status of every rank.

    Args:
        board: reports the statuses, until `stop`.

    Thread safety: one task takes; `end` from any thread.
    """

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._bell = LoopBell()
        self._lock = threading.Lock()
        self._latest: dict[Rank, RankStatus] = {}
        self._ended = False
        present, self.stop = board.listen(self._put)
        with self._lock:
            for status in present:
                self._latest.setdefault(status.rank, status)

    def _put(self, changed: Sequence[RankStatus]) -> None:
        with self._lock:
            self._latest.update((status.rank, status) for status in changed)
            # Asking the board later is wrong: it ends a moment before it notifies.
            self._ended = self._ended or self._board.ended is not None
        self._bell.ring()

    def end(self) -> None:
        """End all waiting."""
        self._ended = True
        self._bell.ring()

    async def take(self) -> RankStatus | None:
        """Return the next status; None when none is left and none will come."""
        import asyncio

        await asyncio.sleep(0)  # other tasks get their turn, however many statuses there are
        while True:
            with self._lock:
                for rank in self._latest:
                    return self._latest.pop(rank)
                if self._ended:
                    return None
            await self._bell.wait()
