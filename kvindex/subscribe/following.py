"""The questions that every follower of ranks' streams answers: their statuses, and waiting."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvindex.subscribe.delivery import RankStatus
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import ConfigurationError, NotLiveError
from kvindex.wire.rank import Rank, Trust
from kvindex.wire.rank_lookup import RankName

_Self = TypeVar("_Self", bound="Following")


_LONGEST = threading.TIMEOUT_MAX / 2  # centuries: half, so that no sum of times overflows


def seconds_of(timeout: float | None) -> float:
    """Return a longest wait in seconds: None and what no clock can count stand for ever.

    Raises:
        ConfigurationError: it is no number of seconds.
    """
    if timeout is None:
        return _LONGEST
    if not isinstance(timeout, int | float) or timeout != timeout:
        raise ConfigurationError(
            f"timeout must be a number of seconds, or None to wait for ever, not {timeout!r}"
        )
    return min(timeout, _LONGEST)


class LoopBell:
    """Wakes one task of the running event loop, so that no thread waits and nothing is polled.

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
        """Return once the bell was rung since the last return, or once more without a ring."""
        await self._event.wait()
        self._event.clear()
        self._rung = False


async def wait_until(
    condition: Callable[[], bool],
    timeout: float,
    listen: Callable[[Callable[[], None]], Callable[[], None]],
) -> None:
    """Wait in an asyncio task until a condition holds, or for `timeout` seconds.

    `listen` registers a function to be called, on any thread, whenever the condition may hold, and
    returns a function that ends the calls.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    until = loop.time() + timeout
    bell = LoopBell()
    stop = listen(bell.ring)
    try:
        while not condition():
            try:
                await asyncio.wait_for(bell.wait(), until - loop.time())
            except asyncio.TimeoutError:
                return
    finally:
        stop()


class Changes:
    """The latest unread status of each rank that has changed; at first, the status of every rank.

    The board reports them until `stop`. One task takes.
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

    async def take(self) -> RankStatus | None:
        """Return the next status; None when none is left and none will arrive."""
        import asyncio

        await asyncio.sleep(0)  # other tasks get their turn, however many statuses there are
        while True:
            with self._lock:
                for rank in self._latest:
                    return self._latest.pop(rank)
                if self._ended:
                    return None
            await self._bell.wait()


class Following(ABC):
    """Base of whatever has a board of ranks' statuses, which another thread writes.

    A context manager, for `with` and `async with`: leaving it calls `close`.

    Thread safety: every method may be called from any thread.
    """

    _board: StatusBoard

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks subscribed to, sorted."""
        return self._board.ranks

    def status(self, rank: RankName) -> RankStatus:
        """Return how a rank's stream stands.

        Args:
            rank: a `Rank`, or its text "a/0", or "a" if that worker has one rank only. A rank whose
                batches name another dp_rank than its port is found under both.

        Raises:
            UnknownRankError: the rank is not subscribed to (a KeyError).
        """
        return self._shown(self._board.get(rank))

    def statuses(self) -> dict[Rank, RankStatus]:
        """Return how every rank's stream stands, sorted by rank."""
        return {rank: self._shown(status) for rank, status in self._board.all().items()}

    def trusts(self) -> Mapping[Rank, Trust]:
        """Return how far each rank's answers can be trusted, as a snapshot that never changes.

        The same object is returned until a rank's state, completeness or lag changes, or ranks are
        added or removed: O(1) then, else O(ranks).
        """
        return self._board.trusts()

    def wait_live(
        self,
        timeout: float | None = 5.0,
        *,
        ranks: Iterable[RankName] | str | None = None,
        complete: bool = False,
    ) -> None:
        """Return once every rank (or each of those given) is live.

        Args:
            timeout: longest wait, in seconds; None to wait for ever.
            ranks: wait for these only.
            complete: insist on every batch since the publisher's first having been applied, which
                takes a replay endpoint whose buffer still has all.

        Raises:
            NotLiveError: time ran out (a TimeoutError); it names the ranks, and for each what is
                wrong and what to try.
            UnknownRankError: one of `ranks` is not subscribed to.
            ClosedError: this is closed, or was closed meanwhile.
        """
        self._board.wait_live(ranks, seconds_of(timeout), complete=complete)

    def wait_for(
        self, condition: Callable[[Mapping[Rank, RankStatus]], bool], timeout: float | None
    ) -> bool:
        """Wait until the ranks' statuses meet a condition; return whether they did in time.

        Args:
            condition: called with the latest statuses, whenever one has changed; it must not
                call this object.
            timeout: longest wait, in seconds; None to wait for ever.

        Raises:
            ClosedError: this is closed, or was closed meanwhile.
        """
        return self._board.wait_for(condition, seconds_of(timeout))

    async def wait_live_async(
        self,
        timeout: float | None = 5.0,
        *,
        ranks: Iterable[RankName] | str | None = None,
        complete: bool = False,
    ) -> None:
        """Return as `wait_live`, for asyncio: no thread waits, and cancelling leaves nothing."""
        board, seconds = self._board, seconds_of(timeout)
        wanted = board.named(ranks)

        def is_over() -> bool:
            return board.ended is not None or not board.late(wanted, complete)

        await wait_until(is_over, seconds, lambda ring: board.listen(lambda _: ring())[1])
        board.check_open()
        if late := board.late(wanted, complete):
            raise NotLiveError(seconds, late)

    async def watch(self) -> AsyncGenerator[RankStatus, None]:
        """Yield every rank's status, and again whenever its state, completeness or epoch changes.

        ```
        async for status in client.watch():
            print(status.rank, status.state, status.reason)
        ```

        It starts with the ranks as they are. A rank that is removed, or gets another name, is
        yielded once more, as closed. The iteration ends when this is closed.

        A slow consumer gets the latest status of each rank that has changed, and misses those in
        between: no more than one status of each rank waits. There may be any number of consumers,
        on any number of event loops. Cancelling the task leaves nothing behind.
        """
        changes = Changes(self._board)
        try:
            while (status := await changes.take()) is not None:
                yield self._shown(self._board.aged(status))
        finally:
            changes.stop()

    def on_change(self, callback: Callable[[RankStatus], object]) -> Callable[[], None]:
        """Register a function that is called with each status change that `watch` would yield.

        It is called on the thread that receives the events, and delays that thread while it runs.
        Its exceptions are logged.

        Returns:
            A function that unregisters it; a call that is under way may still follow.
        """
        # No reference: the thread would keep an object that was dropped without `close`.
        shown = weakref.WeakMethod(self._shown)
        aged = self._board.aged

        def notify(changed: Sequence[RankStatus]) -> None:
            show = shown()
            if show is not None:
                for status in changed:
                    callback(show(aged(status)))

        _, stop = self._board.listen(notify)
        return stop

    @abstractmethod
    def close(self) -> None:
        """Stop following. Idempotent."""

    def _shown(self, status: RankStatus) -> RankStatus:
        """Return a status with further facts about its rank."""
        return status

    def __enter__(self: _Self) -> _Self:
        self._board.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self: _Self) -> _Self:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        import asyncio

        await asyncio.to_thread(self.close)  # which waits for the receiving thread to end
