"""The ordered events as an iterator, for users who want them instead of an index."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvindex.subscribe.delivery import StreamItem
from kvindex.subscribe.following import Following, LoopBell, checked_timeout
from kvindex.subscribe.sequencer import RankBatch
from kvindex.subscribe.subscriber import StreamOptions, Subscriber
from kvindex.subscribe.worker import Worker
from kvindex.wire.errors import ClosedError, ConfigurationError, check_options
from kvindex.wire.forks import FORKED, disown_in_children
from kvindex.wire.rank import Rank

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

_CLOSED = "the event stream is closed"
_TURN = 0.001  # seconds for which a task may iterate before others get their turn


class _ItemQueue:
    """The items that wait for the consumer; the subscriber's thread holds no more of a stream."""

    def __init__(self, max_items: int) -> None:
        self.closed = ""  # the reason, once it is closed
        self.bell: LoopBell | None = None  # of an iterating task; one consumer has one
        self.on_room: Callable[[], None] = lambda: None
        self._ended = False  # nothing more arrives
        self._max_items = max_items
        self._batches = 0  # of the items; the few others are not counted: calls depend on them
        self._was_full = False  # whether the subscriber waits for `on_room`
        self._items: deque[StreamItem] = deque()
        self._make_lock()

    def _make_lock(self) -> None:
        self._lock = threading.RLock()  # held by its own `with`: see BatchQueue
        self._changed = threading.Condition(self._lock)

    def has_room(self) -> bool:
        """Whether another batch fits; if not, `on_room` is called when half are taken."""
        with self._lock:
            self._was_full = self._batches >= self._max_items
            return not self._was_full

    def put(self, item: StreamItem) -> None:
        """Add an item."""
        with self._lock:
            if not self.closed:
                self._items.append(item)
                self._batches += isinstance(item, RankBatch)
                self._notify()

    def take(self, timeout: float | None) -> StreamItem | None:
        """Return the next item, as `EventStream.get`; None when none is left and it ended."""
        with self._lock:
            if not self._changed.wait_for(self._is_ready, checked_timeout(timeout)):
                raise TimeoutError(f"no item within {timeout} s")
            return self._take()

    async def take_async(self, bell: LoopBell) -> StreamItem | None:
        """Return the next item, as `take`; the bell is rung when there may be one."""
        self.bell = bell
        while True:
            with self._lock:
                if self._is_ready():
                    return self._take()
            await bell.wait()

    def _is_ready(self) -> bool:
        return bool(self.closed or self._ended or self._items)

    def _take(self) -> StreamItem | None:
        if self.closed:
            raise ClosedError(self.closed)
        # What has arrived is returned also after the end.
        if not self._items:
            return None
        item = self._items.popleft()
        self._batches -= isinstance(item, RankBatch)
        # Not at each item: waking the subscriber's thread costs more than taking many of them.
        if self._was_full and 2 * self._batches <= self._max_items:
            self._was_full = False
            self.on_room()
        return item

    def _notify(self) -> None:
        self._changed.notify_all()
        if self.bell is not None:
            self.bell.ring()

    def end(self) -> None:
        """Record that nothing more arrives; waiting items can still be taken."""
        with self._lock:
            self._ended = True
            self._notify()

    def close(self, reason: str = _CLOSED) -> None:
        """Return no more items, and end all waiting."""
        with self._lock:
            self.closed = self.closed or reason
            self._notify()

    def disown(self) -> None:
        """Close the stream in a forked child, whichever thread held the lock."""
        self._make_lock()
        self.bell = None  # the parent's
        self.close(FORKED)


class EventStream(Following):
    """Iterates over every rank's items in order: batches, and losses and restarts between them.

    ```
    for item in stream: ...                          # waits in this thread
    async with EventStream(workers) as stream:
        async for item in stream: ...                # waits in an asyncio task
    ```

    Args:
        workers: the engines to subscribe to.
        max_items: how many batches may wait for the consumer. With so many waiting, nothing is
            received until half of them are taken; replay brings back what the publishers drop
            meanwhile, as far as their buffers reach. Calls are served all the time.
        resume: as for `Subscriber`. For `cursor` the queue is the consumer: waiting items count as
            handed over, and the rank's received batches are queued first, beyond `max_items` if
            need be.
        options: as for `kvindex.connect`. `on_loss` sets `RankLost.reset`: whether the consumer is
            to drop the rank's contents.

    Raises:
        ConfigurationError: a worker or a setting cannot work.

    Attributes:
        subscriber: receives the events. Workers are added and removed there; its `cursor` returns
            how far the stream was delivered.

    Thread safety: one consumer, a thread or a task; every other method from any thread.
    """

    def __init__(
        self,
        workers: Iterable[Worker] | Worker = (),
        *,
        max_items: int = 10_000,
        resume: Mapping[Rank, bytes] | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        check_options("EventStream", options, StreamOptions)
        if max_items < 1:
            raise ConfigurationError(f"max_items must be at least 1, not {max_items}")
        self._waiting = waiting = _ItemQueue(max_items)
        disown_in_children(waiting, _ItemQueue.disown)
        self.subscriber = Subscriber(
            workers,
            sink=waiting.put,
            on_stop=waiting.end,
            has_room=waiting.has_room,
            resume=resume or {},
            **options,
        )
        waiting.on_room = self.subscriber.wake
        self._board = self.subscriber.board

    def get(self, timeout: float | None = None) -> StreamItem:
        """Return the next item, waiting for it at most `timeout` seconds (None: as long as needed).

        Raises:
            TimeoutError: none arrived in time.
            ClosedError: the stream was closed, or belongs to the parent of this forked process; or
                its subscriber ended and every waiting item was taken, then with the reason.
        """
        return self._whole(self._waiting.take(timeout))

    def _whole(self, item: StreamItem | None) -> StreamItem:
        if item is None:
            raise ClosedError(f"the event stream has ended: {self.subscriber.ended}")
        return item

    def __iter__(self) -> Iterator[StreamItem]:
        """Iterate until the stream is closed.

        Raises:
            ClosedError: the subscriber ended in another way, as in `get`.
        """
        while True:
            try:
                yield self.get()
            except ClosedError:
                if self._waiting.closed:
                    return
                raise

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        """Iterate as `__iter__`, in an asyncio task; no thread waits for it.

        Other tasks get their turn every millisecond, also while items wait. A task that is
        cancelled takes no item: the next iteration goes on where it was.
        """
        import asyncio

        bell = LoopBell()
        time_of_loop = asyncio.get_running_loop().time
        turn_ends = time_of_loop() + _TURN
        while True:
            if time_of_loop() >= turn_ends:
                await asyncio.sleep(0)
                turn_ends = time_of_loop() + _TURN
            try:
                item = self._whole(await self._waiting.take_async(bell))
            except ClosedError:
                # Only what the user closed ends quietly: else events would be missed unnoticed.
                if self._waiting.closed:
                    return
                raise
            yield item

    def close(self) -> None:
        """End the iteration and the subscription, and drop the waiting items; idempotent."""
        self._waiting.close()
        self.subscriber.close()
