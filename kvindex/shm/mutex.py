"""The lock between all mappings of a segment: its waits end, and nothing leaves it taken.

It is an open-file-description lock (fcntl(2)) on a byte beyond the segment's memory.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import NoReturn

from kvindex.errors import ClosedError, QueueTimeoutError

try:
    import fcntl

    _SET = fcntl.F_OFD_SETLK
except (ImportError, AttributeError):  # not Linux: `check_platform` of the segments says so
    _SET = -1

__all__ = ["CLOSING", "FLOCK", "Mutex", "flock", "is_running"]

FLOCK = struct.Struct("hhqqi4x")
"""struct flock on Linux of 64 bits: type, whence, start, len, pid."""

CLOSING = 1.0
"""Seconds that closing waits for a party or a thread that is inside."""

_MUTEX_AT = 1 << 41  # beyond the parties' bytes
_ACCESS = 5.0  # seconds until a party inside the lock counts as stopped
_LEAST = 0.1  # seconds that a call without time waits, too: the holder may just be off its core
_FIRST_PAUSE, _LONGEST_PAUSE = 10e-6, 1e-3  # seconds between two tries


class _Inside(threading.local):
    """For each segment, by device and inode: which lock this thread is inside of, and where."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, int], tuple[Mutex, FrameType]] = {}


_inside = _Inside()


class Mutex:
    """A lock between all mappings of a segment, for `with`.

    The kernel gives it back when its holder dies. Threads of one mapping exclude each other too.

    No wait is without end. A party may be stopped inside (SIGSTOP, a debugger): that is a
    QueueTimeoutError after 5 seconds, or when the time of the call is over that asks (`within`).
    And a thread may meet itself, in a signal handler or when the garbage collector closes another
    end of the same ring: that is refused at once.

    fcntl(2) has no time-out, so whoever finds the lock taken asks again, after pauses that grow to
    a millisecond: the lock is held for microseconds, and the deadline bounds the asking.

    A signal handler may raise anywhere (KeyboardInterrupt), even at the first instruction of
    `__exit__`, where nothing can be caught. A lock that was left so is known by its frame, which is
    no longer on its thread's stack, and given back by that thread's next access.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        found = os.fstat(descriptor)
        self._segment = (found.st_dev, found.st_ino)
        # One file description is one holder. An RLock knows its owner: what is interrupted can
        # give it back without knowing how far it came.
        self._threads = threading.RLock()
        self._pause = threading.Lock()  # never free: to wait for it is to pause, handlers or not
        self._pause.acquire()
        self._limit: _Limit | None = None
        self._taken = flock(fcntl.F_WRLCK, _MUTEX_AT)
        self._given = flock(fcntl.F_UNLCK, _MUTEX_AT)

    def __enter__(self) -> None:
        if not self._take(None, sys._getframe(1)):
            self.refuse()

    def __exit__(self, *exc_info: object) -> None:
        # C functions only: an exception of a signal handler comes after them, not between.
        try:
            descriptor = self._descriptor
            if descriptor is None:
                raise ClosedError("this end of the queue was closed meanwhile")
            fcntl.fcntl(descriptor, _SET, self._given)
        finally:
            try:
                _inside.segments.pop(self._segment, None)
            finally:
                self._threads.release()

    def take(self, seconds: float) -> bool:
        """Take the lock if it can be had in time, for who must not fail; `give` follows.

        Raises:
            ClosedError: this mapping is closed.
        """
        return self._take(seconds, sys._getframe(1))

    give = __exit__

    def within(self, timeout: float) -> AbstractContextManager[None]:
        """Let a call's accesses in the `with` wait until `timeout` seconds from now, not longer."""
        return _Limit(self, timeout)

    @contextmanager
    def kept_open(self) -> Iterator[int]:
        """Give the descriptor, which nobody closes meanwhile."""
        # Nor here is anything but C functions between a signal handler and the giving back.
        try:
            if not self._acquire_threads(None):
                self.refuse()
            yield self._opened()
        finally:
            try:
                self._threads.release()
            except RuntimeError:  # it is another thread's
                pass

    def close(self) -> None:
        """Close the descriptor, and with it every lock of this mapping."""
        # A thread may be inside that waits for a party that is stopped, or never comes back.
        try:
            self._threads.acquire(timeout=CLOSING)
            self.disown()
        finally:
            try:
                self._threads.release()
            except RuntimeError:  # it is another thread's
                pass

    def disown(self) -> None:
        """Close the descriptor as a forked child does: whatever its parent's threads held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def refuse(self, seconds: float | None = None) -> NoReturn:
        """Raise QueueTimeoutError, saying why the lock is not to be had.

        Args:
            seconds: how long it was waited for; by default, as long as an access may.
        """
        if self._segment in _inside.segments:
            raise QueueTimeoutError(
                "this thread is inside the queue's lock already: a signal handler or a finalizer "
                "cannot use a queue that it interrupted; set a flag there, and act on it later",
                timeout=0.0,
            )
        if seconds is None:
            limit = self._limit_here()
            seconds = _ACCESS if limit is None else limit.timeout
        raise QueueTimeoutError(
            f"the queue's lock was not to be had in {seconds:g} s: a party seems stopped inside it "
            "(by SIGSTOP or a debugger?); continue it or end it",
            timeout=seconds,
        )

    def _take(self, seconds: float | None, frame: FrameType) -> bool:
        segments = _inside.segments
        if self._segment in segments and not _give_left(segments, self._segment):
            return False
        try:
            if self._acquire_threads(seconds):
                segments[self._segment] = self, frame
                if self._lock(seconds):
                    return True
        except BaseException:
            self._undo()
            raise
        self._undo()
        return False

    def _lock(self, seconds: float | None) -> bool:
        """Take the kernel's lock, in time."""
        pause, deadline = _FIRST_PAUSE, 0.0
        while True:
            descriptor = self._descriptor
            if descriptor is None:
                raise ClosedError("this end of the queue is closed")
            try:
                fcntl.fcntl(descriptor, _SET, self._taken)
                return True
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            deadline = deadline or self._allowed(seconds) + time.monotonic()
            now = time.monotonic()
            if now >= deadline:
                return False
            self._pause.acquire(timeout=min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _acquire_threads(self, seconds: float | None) -> bool:
        acquire = self._threads.acquire
        return acquire(blocking=False) or acquire(timeout=self._allowed(seconds))

    def _allowed(self, seconds: float | None) -> float:
        """Return how long an access may wait from now on that was given so many seconds, if any."""
        if seconds is not None:
            return seconds
        limit = self._limit_here()
        return _ACCESS if limit is None else limit.left()

    def _limit_here(self) -> _Limit | None:
        """Return the limit of the call that this thread is in."""
        limit = self._limit
        return limit if limit is not None and limit.is_here() else None

    def _undo(self) -> None:
        """Give back what `_take` took, however far it came."""
        if _inside.segments.get(self._segment, (None,))[0] is self:
            with suppress(ClosedError):
                self.__exit__()
        else:
            try:
                self._threads.release()
            except RuntimeError:  # it is another thread's
                pass

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ClosedError("this end of the queue is closed")
        return self._descriptor


class _Limit:
    """How long the accesses in a `with` may wait for the lock, all together.

    It is known by its frame whose limit it is, and whether it is over: another thread's is none
    here, nor is one that a signal handler's exception left.
    """

    def __init__(self, mutex: Mutex, timeout: float) -> None:
        self.timeout = _bounded(timeout)
        self._mutex = mutex
        self._deadline = time.monotonic() + timeout

    def __enter__(self) -> None:
        self._call = sys._getframe(1)
        if self._mutex._limit_here() is None:  # else it is part of a call that has one
            self._mutex._limit = self

    def __exit__(self, *exc_info: object) -> None:
        if self._mutex._limit is self:
            self._mutex._limit = None

    def is_here(self) -> bool:
        """Return whether this thread is in the `with`."""
        return is_running(self._call)

    def left(self) -> float:
        """Return the seconds that an access may wait from now on."""
        return _bounded(self._deadline - time.monotonic())


def _bounded(seconds: float) -> float:
    return min(_ACCESS, max(_LEAST, seconds))


def _give_left(
    segments: dict[tuple[int, int], tuple[Mutex, FrameType]], segment: tuple[int, int]
) -> bool:
    """Give back a lock of this thread's whose `with` is over; False if it is not."""
    mutex, holder = segments[segment]
    if is_running(holder):
        return False
    with suppress(ClosedError):
        mutex.give()
    return True


def is_running(called: FrameType) -> bool:
    """Return whether a call of this thread has not returned yet."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame is called:
            return True
        frame = frame.f_back
    return False


def flock(kind: int, start: int, length: int = 1) -> bytes:
    """Return what fcntl(2) takes for a lock of this kind."""
    return FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
