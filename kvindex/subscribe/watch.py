"""What the subscriber's thread waits for: sockets of its feeds, time, and calls from others."""

from __future__ import annotations

import socket
from typing import Any

import zmq

__all__ = ["Watch"]


class Watch:
    """Waits for any of many sockets, each watched on behalf of an owner.

    Thread safety: `wake` from any thread; everything else by the waiting thread only.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._owners: dict[zmq.Socket[bytes], Any] = {}
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._poller.register(self._receiver.fileno(), zmq.POLLIN)

    def add(self, watched: zmq.Socket[bytes], owner: Any) -> None:
        """Wait for this socket too."""
        self._owners[watched] = owner
        self._poller.register(watched, zmq.POLLIN)

    def remove(self, watched: zmq.Socket[bytes]) -> None:
        """Wait for this socket no longer; must come before it is closed. Idempotent."""
        if self._owners.pop(watched, None) is not None:
            self._poller.unregister(watched)

    def wait(self, seconds: float) -> dict[Any, None]:
        """Return the owners of the sockets that can be read, after at most this long."""
        # Rounded up, so that a deadline has passed when the poll returns for it.
        ready = self._poller.poll(max(0, int(seconds * 1000) + 1) if seconds > 0 else 0)
        self._clear()
        owners = self._owners
        return {owners[found]: None for found, _ in ready if found in owners}

    def wake(self) -> None:
        """Make the waiting thread return from `wait`; cheap, and as good as once if repeated."""
        try:
            self._sender.send(b"\0")
        except OSError:
            pass  # full: it is about to return anyway; closed: nobody waits

    def _clear(self) -> None:
        try:
            while self._receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close what `wake` needs; the watched sockets are their owners' to close. Idempotent."""
        self._receiver.close()
        self._sender.close()
