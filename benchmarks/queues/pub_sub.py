"""ZMQ PUB/SUB over ipc with msgpack: what is written without a shared-memory queue.

Nothing is lost: XPUB_NODROP makes the publisher wait for the slowest reader. What may queue on
either side of each connection is what the ring of the other queues holds, 1,000 messages at most.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from benchmarks.queues.adapter import Reader, Ring, Writer

_MOST_QUEUED: Final = 1_000  # messages; libzmq's own default
_COPY_BELOW: Final = 65_536  # bytes; below it a copy is cheaper than a frame that libzmq refers to


class PubSub:
    """PUB/SUB sockets, the publisher's an XPUB: it sees who has subscribed."""

    def writer(self, ring: Ring) -> Writer:
        """Return a publisher bound in a private folder."""
        end, folder = _End(zmq.XPUB, ring), tempfile.mkdtemp()
        socket, encode = end.socket, msgspec.msgpack.Encoder().encode
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        endpoint = f"ipc://{Path(folder) / 'queue'}"
        socket.bind(endpoint)

        def wait_until_ready() -> None:
            for _ in range(ring.readers):
                socket.recv()  # a subscription
            socket.send(b"")

        def close() -> None:
            end.close()
            shutil.rmtree(folder)

        def send(message: Any) -> None:
            socket.send(encode(message), 0, end.copy)

        return Writer(endpoint, wait_until_ready, send, close)

    def reader(self, handle: str, rank: int, ring: Ring) -> Reader:
        """Return a subscriber."""
        end = _End(zmq.SUB, ring)
        socket, decode = end.socket, msgspec.msgpack.Decoder().decode
        socket.subscribe(b"")
        socket.connect(handle)

        def receive() -> Any:
            return decode(socket.recv())

        def receive_large() -> Any:
            return decode(socket.recv(copy=False).buffer)

        return Reader(socket.recv, receive if end.copy else receive_large, end.close)


class _End:
    """A socket in a context of its own."""

    def __init__(self, kind: int, ring: Ring) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        most = ring.chunk_bytes * ring.chunks // ring.message_bytes
        self.socket.set_hwm(min(_MOST_QUEUED, most))
        self.copy = ring.message_bytes < _COPY_BELOW

    def close(self) -> None:
        """Close the socket and its context."""
        self.socket.close()
        self._context.term()
