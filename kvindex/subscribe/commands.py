"""Calls from other threads, carried out by the one thread that owns everything."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvindex.wire.errors import BusyError, ClosedError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class _Call:
    """A command, its answer, and when it began (by `time.monotonic`)."""

    def __init__(self, command: Callable[[], Any]) -> None:
        self.command = command
        self.done: Future[Any] = Future()
        self.begun_at = 0.0


class Commands:
    """A queue of calls with their answers.

    Args:
        wake: makes the owning thread call `run` soon.

    Attributes:
        running: whether the owning thread carries one out at present.
        waiting: the calls that it has not begun.

    Thread safety: `call` from any thread, all else by the owning thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.running = False
        self._wake = wake
        self.waiting: deque[_Call] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def call(self, command: Callable[[], _Result], timeout: float) -> _Result:
        """Run a command on the owning thread; return its result, or raise its exception.

        Raises:
            ClosedError: the owner accepts no more commands.
            BusyError: the command was not begun in time, and will not run; or it was begun, and
                has been running for as long.
        """
        call = self._put(command)
        concurrent.futures.wait([call.done], timeout)
        if not call.done.done():
            if call.done.cancel():
                raise BusyError(timeout)
            left = call.begun_at + timeout - time.monotonic()
            concurrent.futures.wait([call.done], max(0.0, left))
            if not call.done.done():
                raise BusyError(timeout, begun=True)
        result: _Result = call.done.result()
        return result

    def post(self, command: Callable[[], None]) -> None:
        """Enqueue a command from the owning thread itself; failures are logged."""
        self._put(command).done.add_done_callback(_log_failure)

    def _put(self, command: Callable[[], Any]) -> _Call:
        call = _Call(command)
        with self._lock:
            if self._closed:
                raise ClosedError("the subscriber is closed")
            self.waiting.append(call)
        self._wake()
        return call

    def run(self) -> None:
        """Run the queued commands; SystemExit, CancelledError and the like also reach the owner.

        The caller of the command gets every exception.
        """
        self.running = True
        try:
            while self.waiting:
                call = self.waiting.popleft()
                call.begun_at = time.monotonic()
                if call.done.set_running_or_notify_cancel():
                    self._run(call)
        finally:
            self.running = False

    @staticmethod
    def _run(call: _Call) -> None:
        try:
            call.done.set_result(call.command())
        except BaseException as error:
            call.done.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def close(self) -> None:
        """Refuse the queued commands and all later ones."""
        with self._lock:
            self._closed = True
        while self.waiting:
            done = self.waiting.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(ClosedError("the subscriber is closed"))


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, ClosedError):
        logger.error("a call from within the sink failed: %s", error)
