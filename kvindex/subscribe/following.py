"""The questions that every follower of ranks' streams answers: their statuses, and waiting."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvindex.subscribe.delivery import RankStatus
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import (
    ConfigurationError,
    KVIndexError,
    NotLiveError,
    UnknownRankError,
)
from kvindex.wire.rank import Rank, Trust
from kvindex.wire.rank_lookup import RankName

_Self = TypeVar("_Self", bound="Following")


def checked_timeout(timeout: float | None) -> float:
    """Return a longest wait in seconds as locks accept it; None stands for ever."""
    if timeout is None:
        return threading.TIMEOUT_MAX
    # NaN is a float, too, but no length of time.
    if not isinstance(timeout, (int, float)) or timeout != timeout:
        raise ConfigurationError(f"timeout is {timeout!r:.40}: pass seconds, or None for ever")
    return min(timeout, threading.TIMEOUT_MAX)


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
        """Return once every rank, at least one (or each of those given), is live.

        Args:
            timeout: longest wait, in seconds; None waits for ever.
            ranks: wait for these only.
            complete: insist on every batch since the publisher's first having been applied, which
                takes a replay endpoint whose buffer still has all.

        Raises:
            NotLiveError: time ran out (a TimeoutError); it names the ranks, and for each what is
                wrong and what to try. Of a client, it also names the engines that are not found
                yet: they are waited for unless `ranks` are given.
            UnknownRankError: one of `ranks` is not subscribed to.
            ClosedError: this is closed, or was closed meanwhile.
        """
        timeout = checked_timeout(timeout)
        until = time.monotonic() + timeout
        obstacle = self._obstacles(ranks, complete, timeout)
        # An event of its own, not a lock of the board: Ctrl-C may break off the wait anywhere.
        bell = threading.Event()
        _, stop = self._board.listen(lambda _: bell.set())
        try:
            while (error := obstacle()) is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise error()
                bell.wait(min(left, threading.TIMEOUT_MAX))
                # Before the next look: a change that comes after it rings again.
                bell.clear()
        finally:
            stop()

    async def wait_live_async(
        self,
        timeout: float | None = 5.0,
        *,
        ranks: Iterable[RankName] | str | None = None,
        complete: bool = False,
    ) -> None:
        """Return as `wait_live`, for asyncio: no thread waits, and cancelling leaves nothing."""
        import asyncio

        timeout = checked_timeout(timeout)
        until = time.monotonic() + timeout
        obstacle = self._obstacles(ranks, complete, timeout)
        bell = LoopBell()
        _, stop = self._board.listen(lambda _: bell.ring())
        try:
            while (error := obstacle()) is not None:
                left = until - time.monotonic()
                if left <= 0:
                    raise error()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(bell.wait(), left)
        finally:
            stop()

    def _obstacles(
        self, ranks: Iterable[RankName] | str | None, complete: bool, timeout: float
    ) -> Callable[[], Callable[[], KVIndexError] | None]:
        """Return a function for what `wait_live` raises at a timeout, or None once all is live."""
        names = [ranks] if isinstance(ranks, str) else None if ranks is None else list(ranks)
        wanted: list[Rank] | None = None

        def obstacle() -> Callable[[], KVIndexError] | None:
            nonlocal wanted
            self._board.check_open()
            missing = self._missing()
            if names is not None and wanted is None:
                # Once: a rank that is removed later is one that is not live, not an unknown name.
                try:
                    wanted = self._board.named(names)
                except UnknownRankError as error:
                    if not missing:
                        raise
                    unknown = error  # an engine that is not found yet may have it
                    return lambda: unknown
            if names is not None:
                missing = {}  # a dead engine holds up nobody who waits for another one
            late = self._board.late(wanted, complete)
            if late is None and not missing:
                return None
            # Made on request: this is called at each change of a large fleet.
            return partial(NotLiveError, timeout, late or {}, missing)

        return obstacle

    def _missing(self) -> Mapping[str, str]:
        """Return the engines that are not followed yet, and why; the board rings when they are."""
        return {}

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
        import asyncio

        board, bell, lock = self._board, LoopBell(), threading.Lock()
        latest: dict[Rank, RankStatus] = {}  # the status of each rank that was not yielded yet
        has_ended = False

        def note(changed: Sequence[RankStatus]) -> None:
            nonlocal has_ended
            with lock:
                latest.update((status.rank, status) for status in changed)
                # Asking the board later is wrong: it ends a moment before it calls.
                has_ended = has_ended or board.ended is not None
            bell.ring()

        present, stop = board.listen(note)
        try:
            with lock:
                for status in present:
                    latest.setdefault(status.rank, status)  # what `note` received is later
            while True:
                await asyncio.sleep(0)  # other tasks get their turn, however many statuses wait
                with lock:
                    rank = next(iter(latest), None)
                    unread = None if rank is None else latest.pop(rank)
                    is_over = has_ended
                if unread is not None:
                    yield self._shown(board.aged(unread))
                elif is_over:
                    return
                else:
                    await bell.wait()
        finally:
            stop()

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
