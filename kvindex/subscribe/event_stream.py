"""The ordered events as an iterator, for users who want them instead of an index."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from kvindex.errors import ClosedError, ConfigurationError
from kvindex.subscribe.stream import RankBatch, StreamItem
from kvindex.subscribe.subscriber import Subscriber
from kvindex.subscribe.worker import Worker

__all__ = ["EventStream"]


class EventStream:
    """Iterates over every rank's items in order: batches, and losses and restarts between them.

    Args:
        workers: the engines to subscribe to.
        max_items: how many items may wait for the consumer. With so many waiting, nothing is
            received until there is room; replay brings back what the publishers drop meanwhile,
            as far as their buffers reach.
        options: as for `Subscriber`, except `sink` and `on_batch`. To `Subscriber.cursor` the sink
            is the queue: what waits in there counts as handed over.

    Raises:
        ConfigurationError: a worker or a setting cannot work.

    Thread safety: one consumer; `close` from any thread ends the iteration.
    """

    def __init__(
        self, workers: Iterable[Worker] = (), *, max_items: int = 10_000, **options: Any
    ) -> None:
        if max_items < 1:
            raise ConfigurationError(f"max_items must be at least 1, not {max_items}")
        self._max_items = max_items
        self._items: deque[StreamItem] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.subscriber = Subscriber(sink=self._put, on_stop=self._end, **options)
        try:
            for worker in workers:
                self.subscriber.add(worker)
        except BaseException:
            self.close()
            raise

    def _put(self, item: StreamItem) -> None:
        with self._changed:
            if isinstance(item, RankBatch):  # the few others never wait: calls depend on them
                self._changed.wait_for(lambda: self._closed or len(self._items) < self._max_items)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def get(self, timeout: float | None = None) -> StreamItem:
        """Return the next item, waiting for it at most `timeout` seconds (None: as long as needed).

        Raises:
            TimeoutError: none came in time.
            ClosedError: the stream was closed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._items, timeout):
                raise TimeoutError(f"no item within {timeout} s")
            if self._closed:
                raise ClosedError("the event stream is closed")
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[StreamItem]:
        """Iterate until the stream is closed."""
        while True:
            try:
                yield self.get()
            except ClosedError:
                return

    def close(self) -> None:
        """End the iteration and the subscription; idempotent."""
        self._end()
        self.subscriber.close()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
