"""The inheritance of a forked child: sockets to close, and objects without their threads.

A child closes its copies of the sockets, or the peers would not notice that the parent has ended.
Its objects are notified that they no longer follow a stream.

Before a fork, clients and replicas (`prepare_forks`) get ready first, then the indexes that they
fill (`guard_forks`). After the fork the order is the reverse.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

logger = logging.getLogger(__name__)

_Owner = TypeVar("_Owner")
_Prepare: TypeAlias = "Callable[[_Owner, Fork], None]"


class Fork:
    """A fork of one thread: the locks that it holds until then, and the calls that follow it.

    Attributes:
        guarded: the objects of `guard_forks` at that time.
        prepared_at: when the others were ready, in monotonic seconds.

    Thread safety: that thread only.
    """

    def __init__(self) -> None:
        self.guarded: list[Guarded] = []
        self.prepared_at = 0.0
        self._after: list[Callable[[bool], None]] = []

    def then(self, call: Callable[[bool], None]) -> None:
        """Call this after the fork, the last first, with whether this process is the child."""
        self._after.append(call)

    def do_in_child(self, call: Callable[[], None]) -> None:
        """Call this in the child only."""
        self.then(lambda in_child: call() if in_child else None)

    def hold(self, lock: Any, timeout: float) -> None:
        """Acquire a lock of `threading` if possible in time; both processes release it later."""
        held: list[bool] = []
        self.then(lambda _: lock.release() if any(held) else None)
        # In one C call: if a signal handler raises, the lock is not held, or noted.
        held.extend(map(lock.acquire, (True,), (timeout,)))

    def end(self, in_child: bool) -> None:
        """Make the calls that follow the fork."""
        for call in reversed(self._after):
            try:
                call(in_child)
            except Exception:
                logger.exception("a call after a fork failed")


class _Forking(threading.local):
    """The fork that a thread has begun, if any."""

    def __init__(self) -> None:
        self.fork: Fork | None = None


class Guarded(Protocol):
    """An object that is whole at every fork, and goes on in the child: an index."""

    def prepare_fork(self, fork: Fork) -> None:
        """Keep everything whole until the fork, and register the calls that follow it."""

    def miss_fork(self) -> None:
        """In a child: another thread made this object when the others were ready."""


# The state of the process that this package keeps.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_prepared: weakref.WeakKeyDictionary[Any, _Prepare[Any]] = weakref.WeakKeyDictionary()
_guarded: weakref.WeakKeyDictionary[Guarded, None] = weakref.WeakKeyDictionary()
_forking = _Forking()
_watched = False


def close_in_children(owned: socket.socket) -> None:
    """Close a socket's copy in every child that is forked from now on."""
    _watch()
    _sockets.add(owned)


def prepare_forks(owner: _Owner, prepare: _Prepare[_Owner]) -> None:
    """Call `prepare` before every fork of this process from now on.

    Args:
        owner: for as long as it lives.
        prepare: called with it and the fork.
    """
    _watch()
    _prepared[owner] = prepare


def guard_forks(guarded: Guarded) -> None:
    """Keep an index whole at every fork from now on, those of children too."""
    _watch()
    _guarded[guarded] = None


def _watch() -> None:
    global _watched
    if not _watched and hasattr(os, "register_at_fork"):
        _watched = True
        os.register_at_fork(
            before=_before,
            after_in_parent=partial(_after, False),
            after_in_child=partial(_after, True),
        )


def _living(owners: weakref.WeakKeyDictionary[_Owner, Any]) -> list[_Owner]:
    # Their references are copied in one step: other threads make some meanwhile.
    return [owner for reference in owners.keyrefs() if (owner := reference()) is not None]


def _before() -> None:
    fork = _forking.fork = Fork()
    interruptions = [_try(_prepared[owner], owner, fork) for owner in _living(_prepared)]
    fork.prepared_at = time.monotonic()
    fork.guarded = _living(_guarded)
    interruptions += [_try(guarded.prepare_fork, fork) for guarded in fork.guarded]
    for error in filter(None, interruptions):
        raise error  # Python reports it, and goes on


def _try(call: Callable[..., None], *arguments: object) -> BaseException | None:
    """Return what a call raised: Python forks all the same, so that the others get ready, too."""
    try:
        call(*arguments)
    except BaseException as error:
        return error
    return None


def _after(in_child: bool) -> None:
    fork, _forking.fork = _forking.fork, None
    if in_child:
        for guarded in set(_living(_guarded)).difference(fork.guarded if fork else ()):
            guarded.miss_fork()
    if fork is not None:
        fork.end(in_child)
    if in_child:
        for owned in list(_sockets):
            owned.close()
        _sockets.clear()
        _prepared.clear()
