"""What a forked child inherits: sockets that it closes, and objects whose threads it lacks.

Only so can the end of a process be seen, and is a child told that nobody keeps what it has.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

__all__ = ["Fork", "close_in_children", "prepare_forks"]

logger = logging.getLogger(__name__)

_Owner = TypeVar("_Owner")
_Prepare: TypeAlias = "Callable[[_Owner, Fork], None]"


class Fork:
    """A fork that a thread is at: what it holds until then, and what is to be done after it.

    Thread safety: that thread only.
    """

    def __init__(self) -> None:
        self._locks: list[tuple[threading.Lock, list[bool]]] = []
        self._in_child: list[Callable[[], None]] = []

    def hold(self, lock: threading.Lock, timeout: float) -> None:
        """Take a lock if it can be had in time; both processes give it back after the fork."""
        taken: list[bool] = []
        self._locks.append((lock, taken))
        # In one C call: what a signal's handler raises leaves it not taken, or noted.
        taken.extend(map(lock.acquire, (True,), (timeout,)))

    def do_in_child(self, call: Callable[[], None]) -> None:
        """Have something done in the child, when the locks are given back."""
        self._in_child.append(call)

    def end(self, in_child: bool) -> None:
        """Give back and do what was asked for."""
        for lock, taken in self._locks:
            if any(taken):
                lock.release()
        for call in self._in_child if in_child else ():
            try:
                call()
            except Exception:
                logger.exception("a forked child is not told that something is its parent's")


class _Forking(threading.local):
    """The fork that a thread is at, if it is."""

    def __init__(self) -> None:
        self.fork: Fork | None = None


# The state of the process that this package keeps; kvindex/index/guard.py has its own, of indexes.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_prepared: weakref.WeakKeyDictionary[Any, _Prepare[Any]] = weakref.WeakKeyDictionary()
_forking = _Forking()
_watched = False


def close_in_children(owned: socket.socket) -> None:
    """Have every child that is forked from now on close its copy of a socket."""
    _watch()
    _sockets.add(owned)


def prepare_forks(owner: _Owner, prepare: _Prepare[_Owner]) -> None:
    """Have something get ready before every fork from now on.

    Args:
        owner: for as long as it lives.
        prepare: called with it and the fork.
    """
    _watch()
    _prepared[owner] = prepare


def _watch() -> None:
    global _watched
    if not _watched:
        _watched = True
        os.register_at_fork(
            before=_before,
            after_in_parent=partial(_after, False),
            after_in_child=partial(_after, True),
        )


def _before() -> None:
    fork = _forking.fork = Fork()
    interrupted: BaseException | None = None
    for reference in _prepared.keyrefs():  # copied in one step: other threads join meanwhile
        owner = reference()
        prepare = None if owner is None else _prepared.get(owner)
        if prepare is None:
            continue
        try:
            prepare(owner, fork)
        except BaseException as error:  # Python forks all the same: the others get ready, too
            interrupted = error
    if interrupted is not None:
        raise interrupted  # Python says so, and goes on


def _after(in_child: bool) -> None:
    fork, _forking.fork = _forking.fork, None
    if fork is not None:
        fork.end(in_child)
    if in_child:
        for owned in list(_sockets):
            owned.close()
        _sockets.clear()
        _prepared.clear()
