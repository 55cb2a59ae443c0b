"""The bounded queue between the callers of `publish` and the publisher's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvindex.wire import EventBatch
from kvindex.wire.errors import ClosedError

__all__ = ["BatchQueue"]


class BatchQueue:
    """Batches in the order of their numbers, at most `max_size` of them.

    A batch gets its number here, under the lock, so that the order of the numbers is the order of
    sending. Thread safety: `put` from any thread, `take` from one.

    Args:
        max_size: batches that may wait.
        drop_when_full: drop a batch for which there is no room, after it got its number, so that
            subscribers see the gap; otherwise `put` waits for room.
        wake: called when a batch came into the empty queue, and on closing.
    """

    def __init__(self, max_size: int, *, drop_when_full: bool, wake: Callable[[], None]) -> None:
        self._max_size = max_size
        self._drop_when_full = drop_when_full
        self._wake = wake
        self._batches: deque[tuple[int, EventBatch]] = deque()
        # Reentrant: close may come from a finalizer. Held by its own `with`, never the condition's:
        # a Ctrl-C in `Condition.__enter__`, which is Python, would leave it locked for ever.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._closed_because: str | None = None
        self.next_seq = 0
        self.accepted = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def closed(self) -> bool:
        """Whether `put` refuses batches."""
        return self._closed_because is not None

    def put(self, batch: EventBatch) -> bool:
        """Give the batch its number and queue it; False if it was dropped for want of room.

        Raises:
            ClosedError: the queue is closed, or was closed while waiting for room.
        """
        with self._lock:
            if not self._drop_when_full:
                self._room.wait_for(lambda: self.closed or len(self._batches) < self._max_size)
            if self._closed_because is not None:
                raise ClosedError(self._closed_because)
            seq = self.next_seq
            self.next_seq += 1
            if len(self._batches) >= self._max_size:
                self.dropped += 1
                return False
            self.accepted += 1
            self._batches.append((seq, batch))
            if len(self._batches) == 1:
                self._wake()
        return True

    def take(self, limit: int) -> list[tuple[int, EventBatch]]:
        """Remove and return up to `limit` batches with their numbers, oldest first."""
        with self._lock:
            taken = [self._batches.popleft() for _ in range(min(limit, len(self._batches)))]
            if taken:
                self._room.notify_all()
        return taken

    def close(self, reason: str) -> None:
        """Refuse further batches, with this reason; waiting ones can still be taken. Idempotent."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = reason
            self._room.notify_all()
            self._wake()

    def stop_waking(self) -> None:
        """Never call `wake` again; call this before the woken object is gone."""
        with self._lock:
            self._wake = _nothing


def _nothing() -> None:
    pass
