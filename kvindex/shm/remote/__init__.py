"""A queue's readers on other machines: over TCP, and without losing anything silently.

The writer has one ZeroMQ ROUTER, each reader a DEALER. PUB/SUB would drop messages for a slow
reader. Here each reader has credit, a window of unacknowledged messages: when it is used up, the
writer waits. Read `protocol` first, then `sender` (the writer's end) and `reader` (a reader's end).

With CURVE, ZeroMQ admits only peers that know the writer's public key, from the queue's handle.
"""

from __future__ import annotations

from kvindex.shm.remote.protocol import IN_USE
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender

__all__ = ["IN_USE", "RemoteReader", "RemoteSender"]
