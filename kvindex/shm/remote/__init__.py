"""How a queue reaches readers on other machines: over TCP, and without losing anything silently.

The writer binds one ZeroMQ ROUTER, each reader connects a DEALER: PUB/SUB would drop messages for
a reader that is slow. Here each reader has a window of messages and bytes that it need not have
acknowledged; when it is full, the writer waits. Messages are numbered, and a reader that finds one
missing raises an error.

Peers that die are noticed by their connection: it closes at once with the process, and after
`RemoteLink.heartbeat_timeout` where a machine or a network ended. The writer then removes the
reader, and returns its rank; a reader raises WriterDiedError, having returned all that had come.
"""

from __future__ import annotations

from kvindex.shm.remote.keys import CurveReader, CurveServer
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.remote.sockets import RemoteLink

__all__ = ["CurveReader", "CurveServer", "RemoteLink", "RemoteReader", "RemoteSender"]
