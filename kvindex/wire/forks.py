"""What a forked child lets go.

It closes its copies of the sockets, or the peers would not notice that the parent has ended. Its
objects lack the threads that serve them, and their locks may be held by one of those: they refuse
every call from then on, and never wait for a lock.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvindex.wire.errors import ClosedError

logger = logging.getLogger(__name__)

FORKED: Final = "this process was forked; connect in the child"

_Owner = TypeVar("_Owner")


class _Parents:
    """In the place of what is the parent's, a lock or an index: whatever it is asked, it raises."""

    def _refuse(self, *_: object) -> Any:
        raise ClosedError(FORKED)

    __call__ = __len__ = __enter__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # debuggers and doctest look for some in every object
            raise AttributeError(name)
        self._refuse()

    def __exit__(self, *_: object) -> None:
        """Do nothing: it was never entered."""


PARENTS: Final[Any] = _Parents()

# The state of the process that this package keeps.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_disowned: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def close_in_children(owned: socket.socket) -> None:
    """Close a socket's copy in every child that is forked from now on."""
    _sockets.add(owned)


def disown_in_children(owner: _Owner, disown: Callable[[_Owner], None]) -> None:
    """Call `disown` with its owner in every child that is forked while the owner lives.

    It must wait for nothing. An owner that another thread makes just then is nobody's in the child.
    """
    _disowned[owner] = disown


def _after_in_child() -> None:
    for reference in _disowned.keyrefs():
        owner = reference()
        if owner is None:
            continue
        try:
            _disowned[owner](owner)
        except Exception:  # the others must be let go all the same
            logger.exception("%r could not be let go after a fork", type(owner).__name__)
    # Or the peers would not notice that the parent has ended. `close` of a copy sends nothing.
    for owned in list(_sockets):
        owned.close()
    _disowned.clear()
    _sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
