"""Forked children let go of what they inherit: only so can the end of a process be seen."""

from __future__ import annotations

import os
import socket
import weakref

__all__ = ["close_in_children"]

# The one state of the process that this package keeps.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_watched = False


def close_in_children(owned: socket.socket) -> None:
    """Have every child that is forked from now on close its copy of a socket."""
    global _watched
    if not _watched:
        _watched = True
        os.register_at_fork(after_in_child=_close_all)
    _sockets.add(owned)


def _close_all() -> None:
    for owned in list(_sockets):
        owned.close()
    _sockets.clear()
