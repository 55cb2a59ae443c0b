"""Parties of a queue over TCP in tests: readers as threads and as processes, and impostors."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import zmq

from kvindex.shm import Waiting
from kvindex.shm.remote import RemoteReader, RemoteSender
from kvindex.shm.remote.protocol import Message, Welcome, decode, encode
from kvindex.wire.errors import KVIndexError
from tests.children import ended_after
from tests.live import PATIENCE

MILLISECONDS = int(PATIENCE * 1000)
MAX_BYTES = 1 << 20

READER_PROCESS = """
import sys
from kvindex.wire.errors import KVIndexError
from kvindex.shm import Waiting
from kvindex.shm.remote import RemoteReader

address, rank, mode = sys.argv[1:]
reader = RemoteReader(
    address, int(rank), max_message_bytes=1 << 20, curve=None, waiting=Waiting()
)
reader.wait_ready(120.0)
print("ready", flush=True)
count = 0
try:
    while True:
        if mode == "stuck" and count == 10:
            print("stuck", flush=True)
            sys.stdin.read()
        number = int(bytes(reader.frames(120.0)[0]))
        if number != count:
            print("hole", count, number, flush=True)
        count += 1
except KVIndexError as error:
    print(type(error).__name__, count, flush=True)
"""

WRITER_PROCESS = """
import sys
from kvindex.shm import Waiting
from kvindex.shm.remote import RemoteSender

sender = RemoteSender(1, "127.0.0.1", curve=None, waiting=Waiting())
print(sender.address, flush=True)
sender.wait_connected(120.0)
for number in range(int(sys.argv[1])):
    sender.send([b"%d" % number], 120.0)
print("sent", flush=True)
for _ in sys.stdin:
    sender.serve()
"""


class Queue:
    """A sender and its readers, closed with the test."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def sender(self, n_remote: int = 1, ip: str = "127.0.0.1", **knobs: Any) -> RemoteSender:
        knobs = {"linger": 0.0, "curve": None, "waiting": Waiting(), **knobs}
        return self._stack.enter_context(closing(RemoteSender(n_remote, ip, **knobs)))

    def reader(self, sender: RemoteSender, rank: int = 0, **knobs: Any) -> RemoteReader:
        return self.reader_at(sender.address, rank, **knobs)

    def reader_at(self, address: str, rank: int = 0, **knobs: Any) -> RemoteReader:
        knobs = {"max_message_bytes": MAX_BYTES, "curve": None, "waiting": Waiting(), **knobs}
        return self._stack.enter_context(closing(RemoteReader(address, rank, **knobs)))

    def pair(self, **knobs: Any) -> tuple[RemoteSender, RemoteReader]:
        """A sender and its only reader, joined."""
        sender = self.sender(**knobs)
        reader = self.reader(sender)
        sender.wait_connected(PATIENCE)
        return sender, reader

    def collect(self, reader: RemoteReader, *, slow_every: int = 0) -> Collector:
        collector = Collector(reader, slow_every=slow_every)
        self._stack.callback(collector.stop)
        return collector

    def process(self, sender: RemoteSender, rank: int, mode: str = "run") -> Process:
        return self._started(READER_PROCESS, sender.address, str(rank), mode)

    def stranger(self, sender: RemoteSender) -> zmq.Socket[bytes]:
        """A bare socket that is connected to the sender."""
        return self.stranger_at(sender.address)

    def stranger_at(self, address: str) -> zmq.Socket[bytes]:
        stranger = self._socket(zmq.DEALER)
        stranger.connect(address)
        return stranger

    def impostor(self) -> Impostor:
        return Impostor(self._socket(zmq.ROUTER))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        socket = context.socket(kind)
        self._stack.callback(socket.close, linger=0)
        return socket

    def writer_process(self, messages: int) -> Process:
        return self._started(WRITER_PROCESS, str(messages))

    def _started(self, script: str, *arguments: str) -> Process:
        process = Process(script, *arguments)
        self._stack.callback(process.end)
        return process

    def close(self) -> None:
        self._stack.close()


class Process:
    """A party in a process of its own, that says on lines how it fares."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack = ExitStack()
        self._stack.enter_context(ended_after(self._process))

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def end(self) -> None:
        self._stack.close()


class Collector(threading.Thread):
    """A thread that receives until that ends.

    A slow reader rests a millisecond each so many messages.
    """

    def __init__(self, reader: RemoteReader, *, slow_every: int = 0) -> None:
        super().__init__(daemon=True)
        self.messages: list[list[bytes]] = []
        self.ended_by: KVIndexError | None = None
        self._reader = reader
        self._slow_every = slow_every
        self._cancel = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while True:
                frames = self._reader.frames(PATIENCE, self._cancel)
                self.messages.append([bytes(frame) for frame in frames])
                if self._slow_every and len(self.messages) % self._slow_every == 0:
                    self._cancel.wait(0.001)
        except KVIndexError as error:
            self.ended_by = error

    def stop(self) -> None:
        self._cancel.set()
        self.join(PATIENCE)

    def result(self) -> list[list[bytes]]:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.messages


def drain(reader: RemoteReader) -> Iterator[list[bytes]]:
    """Yield all messages, until receiving raises."""
    while True:
        yield [bytes(frame) for frame in reader.frames(PATIENCE)]


class Impostor:
    """Somebody who says what no writer says, in a writer's place."""

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
        self.say(encode(Welcome(next_seq, 16, ready)))

    def hear(self) -> bytes:
        """Return what the reader says next."""
        assert self._socket.poll(MILLISECONDS)
        return self._socket.recv_multipart()[1]

    def say(self, *parts: bytes) -> None:
        self._socket.send_multipart([self._identity, *parts])


def small(seq: int, *frames: bytes) -> bytes:
    """Return the part of a small message."""
    return encode(Message(seq, [memoryview(frame) for frame in frames]))
