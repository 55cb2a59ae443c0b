"""What a forked child inherits: sockets that it closes, and objects whose threads it lacks.

Only so can the end of a process be seen, and is a child told that nobody keeps what it has.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

__all__ = ["Afterwards", "close_in_children", "prepare_forks"]

_Owner = TypeVar("_Owner")
Afterwards: TypeAlias = Callable[[bool], None]
"""Called after a fork, with whether this is the child."""


class _Forking(threading.local):
    """The fork that a thread is at."""

    def __init__(self) -> None:
        self.afterwards: list[Afterwards] = []


# The one state of the process that this package keeps.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_prepared: weakref.WeakKeyDictionary[Any, Callable[[Any], Afterwards]] = weakref.WeakKeyDictionary()
_forking = _Forking()
_watched = False


def close_in_children(owned: socket.socket) -> None:
    """Have every child that is forked from now on close its copy of a socket."""
    _watch()
    _sockets.add(owned)


def prepare_forks(owner: _Owner, prepare: Callable[[_Owner], Afterwards]) -> None:
    """Have something get ready before every fork from now on, and be told after it.

    Args:
        owner: for as long as it lives.
        prepare: called with it before a fork; returns what is called after it.
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
    _forking.afterwards = []
    for owner, prepare in list(_prepared.items()):
        _forking.afterwards.append(prepare(owner))  # at once: what it has taken is given back


def _after(in_child: bool) -> None:
    afterwards, _forking.afterwards = _forking.afterwards, []
    for call in afterwards:
        call(in_child)
    if in_child:
        for owned in list(_sockets):
            owned.close()
        _sockets.clear()
        _prepared.clear()
