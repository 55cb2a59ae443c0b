"""Calls from other threads, carried out by the one thread that owns everything."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvindex.errors import BusyError, ClosedError

__all__ = ["Commands"]

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Commands:
    """A queue of calls with their answers.

    Args:
        wake: makes the owning thread call `run` soon.

    Attributes:
        running: whether the owning thread carries one out at present.

    Thread safety: `call` from any thread, all else by the owning thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.running = False
        self._wake = wake
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def call(self, command: Callable[[], _Result], timeout: float) -> _Result:
        """Have a command run by the owning thread and return its result, or raise what it raises.

        Raises:
            ClosedError: the owner takes no more commands.
            BusyError: it did not come to it in time; the command will not run.
        """
        done = self._put(command)
        try:
            return done.result(timeout)
        except concurrent.futures.TimeoutError:
            if not done.cancel():
                return done.result()  # it has begun after all
            raise BusyError(timeout) from None

    def post(self, command: Callable[[], None]) -> None:
        """Have a command run by the owning thread, from that thread; failures are logged."""
        self._put(command).add_done_callback(_log_failure)

    def _put(self, command: Callable[[], _Result]) -> Future[_Result]:
        done: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the subscriber is closed")
            self._queue.append((command, done))
        self._wake()
        return done

    def run(self) -> None:
        """Run what waits."""
        self.running = True
        while self._queue:
            command, done = self._queue.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                result = command()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)
        self.running = False

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
