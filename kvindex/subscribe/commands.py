"""Calls from other threads, carried out by the one thread that owns everything."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from kvindex.errors import BusyError, ClosedError

__all__ = ["Commands"]

logger = logging.getLogger(__name__)


class Commands:
    """A queue of calls with their answers.

    Args:
        wake: makes the owning thread call `run` soon.

    Thread safety: `call` from any thread, `run` and `close` by the owning thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def call(self, command: Callable[[], None], timeout: float) -> None:
        """Have a command run by the owning thread and wait for it; what it raises is raised here.

        Raises:
            ClosedError: the owner takes no more commands.
            BusyError: it did not come to it in time; the command will not run.
        """
        done = self._put(command)
        try:
            done.result(timeout)
        except concurrent.futures.TimeoutError:
            if not done.cancel():
                done.result()  # it has begun after all
                return
            raise BusyError(timeout) from None

    def post(self, command: Callable[[], None]) -> None:
        """Have a command run by the owning thread, from that thread; failures are logged."""
        self._put(command).add_done_callback(_log_failure)

    def _put(self, command: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the subscriber is closed")
            self._queue.append((command, done))
        self._wake()
        return done

    def run(self) -> None:
        """Run what waits."""
        while self._queue:
            command, done = self._queue.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                command()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def close(self) -> None:
        """Refuse what waits and what comes."""
        with self._lock:
            self._closed = True
        while self._queue:
            _, done = self._queue.popleft()
            if done.set_running_or_notify_cancel():
                done.set_exception(ClosedError("the subscriber is closed"))


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, ClosedError):
        logger.error("a call from within the sink failed: %s", error)
