"""From the thread that writes statuses or items to an asyncio task that waits for them.

No thread waits on behalf of a task, and nothing is polled: the writing thread rings a bell of the
task's event loop.
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
        """Return when it was rung since this returned last; look at what it stands for afterwards.

        It may return once without a reason.
        """
        await self._event.wait()
        self._event.clear()
        self._rung = False


class Changes:
    """The latest status of each rank that has changed and was not taken yet; at first of all.

    Args:
        board: whose statuses; they are listened to until `stop`.

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
            # Not asked for later: the board has ended a moment before it tells so.
            self._ended = self._ended or self._board.ended is not None
        self._bell.ring()

    def end(self) -> None:
        """Have nothing waited for any more."""
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
