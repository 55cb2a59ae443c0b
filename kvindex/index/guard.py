"""The lock of an index, with provisions for signal handlers and forks.

Threads wait for each other. Two others cannot: a signal handler, which interrupts its own thread,
and a forked child, which lacks the thread that would release the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from typing import Final, NoReturn, Protocol, TypeVar

from kvindex.wire.errors import InUseError, InvariantError, UnknownRankError
from kvindex.wire.forks import Fork, guard_forks

__all__ = ["HOLD_BLOCKS", "Guard", "HeldInForks", "Hold", "WholeHold"]

HOLD_BLOCKS: Final = 1024
"""How many blocks of a long change, or as much other work, others wait for at most."""

_MOMENT = 1e-5  # seconds without the lock: a waiting thread needs some to wake up

_ATTEMPTS = 100  # at a question during which signal handlers change the index
_PATIENCE = 5.0  # seconds for which a fork waits for a change under way

_Result = TypeVar("_Result")
_Part = TypeVar("_Part")


class HeldInForks(Protocol):
    """An object with a lock of its own that must be held while its process forks."""

    def hold_for_fork(self) -> bool:
        """Wait until nothing is half changed, and keep it so; True."""

    def end_fork(self, in_child: bool) -> None:
        """Release the lock; in a child it is made anew, held or not."""


class Guard:
    """Lets one thread at a time change or ask an index.

    A signal handler that interrupts a question may ask and change anything: the question is asked
    again if the handler changed something. A handler that interrupts a change gets InUseError,
    since no true answer exists then.

    Args:
        core: an object with a lock of its own, held during forks too. Its changes are whole or not
            done at all; without it, a change cut short by an exception leaves the index unusable.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, core: HeldInForks | None = None) -> None:
        self._core = core
        self._lock = threading.RLock()
        self._changing = False
        self._changes = 0
        self._broken = ""
        # Parts with a paused change, by the thread that changes them.
        self._paused: dict[object, int] = {}
        self._done = threading.Condition(self._lock)
        guard_forks(self)

    def ask(self, question: Callable[[], _Result]) -> _Result:
        """Return the answer to a question while nothing changes."""
        with self._lock:
            for _ in range(_ATTEMPTS):
                self._check()
                changes = self._changes
                try:
                    answer = question()
                except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError):
                    if changes == self._changes:
                        raise
                else:
                    if changes == self._changes:
                        return answer
        raise InUseError(
            f"signal handlers changed this index in the middle of each of {_ATTEMPTS} attempts to "
            "answer: change it more rarely there"
        )

    def change(self, work: Callable[[], _Result]) -> _Result:
        """Do a change while no other thread changes or asks; return its result."""
        with self._lock:
            self._check()
            try:
                self._changing = True
                return work()
            except (UnknownRankError, TypeError, ValueError, OverflowError):  # of what was given
                raise
            except BaseException as error:
                if self._core is None:
                    self._broken = f"{type(error).__name__} was raised in the middle of a change"
                raise
            finally:
                self._changes += 1
                self._changing = False

    def change_part(
        self, find: Callable[[], _Part], work: Callable[[_Part, Hold], _Result]
    ) -> _Result:
        """Change one part, such as a rank; the change may let other threads go first now and then.

        Another change of the same part, and `settled`, waits until the change is done.

        Args:
            find: finds the part, with the lock held.
            work: changes the part, and calls `Hold.did` when others may go first.
        """
        with self.settled(find) as part:
            try:
                return self.change(lambda: work(part, Hold(self, part)))
            finally:
                if self._paused.pop(part, None) is not None:
                    self._done.notify_all()

    @contextmanager
    def settled(self, find: Callable[[], _Part]) -> Iterator[_Part]:
        """Hold the lock at a moment when no change of a part is under way; yield the part."""
        with self._lock:
            self._check()
            while (part := find()) in self._paused:
                if self._paused[part] == threading.get_ident():
                    self._refuse_handler()
                self._done.wait()
                self._check()
            yield part

    def is_paused(self, part: object) -> bool:
        """Whether a change of a part is under way, and lets others go first; needs the lock."""
        return part in self._paused

    def _pause(self, part: object) -> None:
        self._paused[part] = threading.get_ident()
        self._changes += 1
        self._changing = False
        try:
            self._let_others_go()
        finally:
            self._changing = True

    def _let_others_go(self) -> None:
        self._done.wait(_MOMENT)  # releases the lock, however often this thread holds it

    def _refuse_handler(self) -> NoReturn:
        raise InUseError(
            "a signal's handler interrupted a change of this index and cannot use it: note "
            "the signal there, and act on it when the handler has returned"
        )

    def _check(self) -> None:
        if self._changing:
            self._refuse_handler()
        if self._broken:
            raise InvariantError(f"the index is half changed: {self._broken}; make a new one")

    def prepare_fork(self, fork: Fork) -> None:
        """Acquire the locks, this guard's own one if possible in time, until the fork is over."""
        taken: list[bool] = []
        fork.then(partial(self._end_fork, taken))
        until = fork.prepared_at + _PATIENCE
        # In one C call each: if a signal handler raises, the lock is not taken, or noted.
        taken.extend(map(self._lock.acquire, (True,), (max(0.0, until - time.monotonic()),)))
        if self._core is not None:
            taken.extend(starmap(self._core.hold_for_fork, ((),)))

    def miss_fork(self) -> None:
        """In a child: this thread took no lock, but another thread may have held it."""
        self._end_fork([], True)

    def _end_fork(self, taken: list[bool], in_child: bool) -> None:
        if self._core is not None and (in_child or len(taken) == 2):
            self._core.end_fork(in_child)
        if in_child:  # a paused change stays unfinished
            self._paused.clear()
        if taken[:1] == [True]:
            self._lock.release()
        elif in_child:
            self._lock = threading.RLock()
            if self._changing and self._core is None:
                self._broken = "another thread was changing it when this process was forked"
            self._changing = False
        if in_child:
            self._done = threading.Condition(self._lock)


class Hold:
    """A guard's lock, held by a long change of one part.

    Args:
        guard: whose lock is held.
        part: the part that is changed.
    """

    def __init__(self, guard: Guard, part: object) -> None:
        self._guard = guard
        self._part = part
        self._blocks = 0

    def did(self, blocks: int) -> None:
        """Report that so many blocks are done, at a moment when everything shared is whole.

        Other threads may go first then. They may change other parts; they see part of this change.
        """
        self._blocks += blocks
        if self._blocks >= HOLD_BLOCKS:
            self._blocks = 0
            self._guard._pause(self._part)


class WholeHold(Hold):
    """Keeps the lock to the end."""

    def __init__(self) -> None:
        """Need no guard: the lock is never released."""

    def did(self, blocks: int) -> None:
        """Go on."""
