"""How a queue reaches readers on other machines: over TCP, and without losing anything silently.

The writer binds one ZeroMQ ROUTER, each reader connects a DEALER: PUB/SUB would drop messages for
a reader that is slow. Here each reader has a window of messages and bytes that it need not have
acknowledged; when it is full, the writer waits. Messages are numbered, and a reader that finds one
missing raises an error.

Peers that die are noticed by their connection: it closes at once with the process, and after
`RemoteLink.heartbeat_timeout` where a machine or a network ended. The writer then removes the
reader, and returns its rank; a reader raises WriterDiedError, having returned all that had come.

With CURVE the writer is the server. Any client key is let in by ZeroMQ, which is enough: a reader
must then show the queue's token (32 random bytes, from the handle) inside the encrypted channel,
before it is sent anything. So who holds the handle may read, and nobody else.
"""

from __future__ import annotations

from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.remote.sockets import RemoteLink

__all__ = ["RemoteLink", "RemoteReader", "RemoteSender"]
