"""Both ends of a queue over TCP in one process, without keys; and impostors of each."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import zmq

from kvindex.shm import Waiting
from kvindex.shm.codec import BUFFERS
from kvindex.shm.remote import RemoteReader, RemoteSender
from kvindex.shm.remote.protocol import Message, Welcome, decode, encode
from tests.live import PATIENCE, until

MILLISECONDS = int(PATIENCE * 1000)


class RemoteQueue:
    """A sender and its readers, closed with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def sender(self, n_remote: int = 1, ip: str = "127.0.0.1", **knobs: Any) -> RemoteSender:
        knobs = {"linger": 0.0, "curve": None, "waiting": Waiting(), **knobs}
        return self._stack.enter_context(closing(RemoteSender(n_remote, ip, **knobs)))

    def reader(self, address: str, rank: int = 0, **knobs: Any) -> RemoteReader:
        knobs = {"max_message_bytes": 1 << 20, "curve": None, "waiting": Waiting(), **knobs}
        return self._stack.enter_context(closing(RemoteReader(address, rank, **knobs)))

    def pair(self, **knobs: Any) -> tuple[RemoteSender, RemoteReader]:
        """A sender and its only reader, admitted."""
        sender = self.sender(**knobs)
        reader = self.reader(sender.address)
        serve_until(sender, connected=1)
        return sender, reader

    def stranger(self, sender: RemoteSender) -> zmq.Socket[bytes]:
        """A bare socket that is connected to the sender."""
        stranger = self._socket(zmq.DEALER)
        stranger.connect(sender.address)
        return stranger

    def fooled(self, **knobs: Any) -> tuple[Impostor, RemoteReader]:
        """A reader whose writer is an impostor, which has received its hello."""
        impostor = Impostor(self._socket(zmq.ROUTER))
        reader = self.reader(impostor.address, **knobs)
        impostor.meet()
        return impostor, reader

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        socket = context.socket(kind)
        self._stack.callback(socket.close, linger=0)
        return socket


class Impostor:
    """Sends what no writer sends, in a writer's place."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._socket.bind("tcp://127.0.0.1:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._identity = b""

    def meet(self) -> None:
        """Wait for the reader's hello."""
        assert self._socket.poll(MILLISECONDS)
        self._identity, part = self._socket.recv_multipart()
        decode(part)

    def welcome(self, next_seq: int = 0, *, ready: bool = True) -> None:
        self.send(encode(Welcome(next_seq, 16, ready)))

    def receive(self) -> bytes:
        assert self._socket.poll(MILLISECONDS)
        return self._socket.recv_multipart()[1]

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart([self._identity, *parts])


def small(seq: int, *frames: bytes) -> bytes:
    """The part of a small message."""
    return encode(Message(seq, BUFFERS, [memoryview(frame) for frame in frames]))


def send(sender: RemoteSender, *frames: Any, timeout: float = PATIENCE) -> frozenset[int]:
    return sender.send(BUFFERS, frames, timeout)


def received(reader: RemoteReader, timeout: float | None = PATIENCE) -> list[bytes]:
    """The frames of a reader's next message."""
    frames: list[bytes] = reader.receive(lambda _, body: list(map(bytes, body)), timeout)
    return frames


def serve_until(sender: RemoteSender, **counts: int) -> frozenset[int]:
    """Let a sender serve until its statistics have these values; return the dead readers."""
    dead: set[int] = set()

    def reached() -> bool:
        dead.update(sender.serve())
        return counts.items() <= sender.statistics().items()

    until(reached)
    return frozenset(dead)
