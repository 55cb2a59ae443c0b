"""A descriptor by which any thread wakes the one that waits for sockets."""

from __future__ import annotations

import socket


class Waker:
    """Wakes a thread that waits in a selector or poller; waking it twice is as good as once.

    Thread safety: `wake` from any thread, within any lock; the rest by the waiting thread only.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        # Whoever wakes may hold a lock that the waiting thread wants: it must not wait for room.
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable after `wake`."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; nothing happens once it is closed."""
        try:
            self._sender.send(b"\0")
        except OSError:
            pass  # full: it is readable anyway; closed: nobody waits

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        try:
            while self._receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._receiver.close()
        self._sender.close()
