"""Whose turn it is at an end that only one thread may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvindex.wire.errors import ClosedError, InUseError, WaitCancelledError

__all__ = ["IN_USE", "Turn"]

IN_USE = (
    "this end of the queue is in use, by another thread or by a call that this one interrupts: "
    "one at a time"
)
"""What InUseError says."""


class Turn:
    """Refuses a second thread, and forked children; lets any thread close.

    ZeroMQ's sockets break when two threads use them, and in a forked child they wait for ever.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: a signal handler may close the end while its own thread waits.
        self._taken = threading.RLock()
        self._closing = threading.Event()

    @contextmanager
    def taken(self, cancel: threading.Event | None = None) -> Iterator[threading.Event]:
        """Give an event that ends a wait: set with `cancel`, and when another thread closes.

        Raises:
            InUseError: another thread has its turn.
            ClosedError: the end was closed, or is a parent process's.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                "this end of the queue belongs to the parent process; attach one by the queue's "
                "handle"
            )
        if not self._taken.acquire(blocking=False):
            self._check_open()  # perhaps by another thread that closes
            raise InUseError(IN_USE)
        try:
            self._check_open()
            yield self._closing if cancel is None else _Either(self._closing, cancel)
        except WaitCancelledError:
            self._check_open()
            raise
        finally:
            self._taken.release()

    def end(self, close: Callable[[], None]) -> None:
        """End the wait of the thread that has the turn, then close. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        with self._taken:
            close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("this end of the queue is closed")


class _Either(threading.Event):
    """Set when one of two events is."""

    def __init__(self, first: threading.Event, second: threading.Event) -> None:
        super().__init__()
        self._events = first, second

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)
