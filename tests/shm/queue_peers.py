"""A queue's ends in threads and in processes, all driven in one way: by calls through a pipe.

Processes are forked by a process that has no threads and has imported kvindex already, so that
a test can afford hundreds.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kvindex.shm import Handle, MessageQueue, MsgpackCodec
from kvindex.wire import errors
from kvindex.wire.errors import KVIndexError, QueueClosedError, WriterDiedError
from tests.live import PATIENCE


class End:
    """One end of a queue, and what can be asked of it; runs where the end is."""

    queue: MessageQueue

    def make(self, *args: Any, **knobs: Any) -> bytes:
        """Become a queue's writer; its handle."""
        self.queue = MessageQueue(*args, **knobs)
        return self.queue.export_handle().to_bytes()

    def attach(self, handle: bytes, rank: int, decode_to: Any = Any, **knobs: Any) -> None:
        if decode_to is not Any:
            knobs["codec"] = MsgpackCodec(decode_to)
        self.queue = MessageQueue.create_from_handle(Handle.from_bytes(handle), rank, **knobs)

    def ready(self, timeout: float = PATIENCE) -> None:
        self.queue.wait_until_ready(timeout)

    def send(self, messages: list[Any], timeout: float = PATIENCE) -> None:
        for message in messages:
            self.queue.enqueue(message, timeout)

    def take(self, count: int, timeout: float = PATIENCE) -> list[Any]:
        return [self.queue.dequeue(timeout) for _ in range(count)]

    def drain(self, timeout: float = PATIENCE) -> tuple[list[Any], str]:
        """All messages until the queue ends, and by what it ended."""
        messages = []
        try:
            while True:
                messages.append(self.queue.dequeue(timeout))
        except (QueueClosedError, WriterDiedError) as error:
            return messages, type(error).__name__

    def follow(self, timeout: float = PATIENCE) -> tuple[int | None, int | None, str]:
        """The numbers of the first and the last message, all `numbered`; and what ended them."""
        first = last = None
        try:
            while True:
                last = check(self.queue.dequeue(timeout), last)
                first = last if first is None else first
        except (QueueClosedError, WriterDiedError) as error:
            return first, last, type(error).__name__

    def write_on(self) -> None:
        """Send numbered messages until that fails."""
        for number in itertools.count():
            self.queue.enqueue(numbered(number), PATIENCE)

    def read_raw(self, count: int, timeout: float = PATIENCE) -> list[bytes]:
        bodies = []
        for _ in range(count):
            with self.queue.acquire_read(timeout) as body:
                bodies.append(bytes(body))
        return bodies

    def broadcast(self, timeout: float = PATIENCE) -> Any:
        return self.queue.broadcast_object()

    def statistics(self) -> dict[str, Any]:
        return self.queue.statistics()

    def close(self) -> None:
        self.queue.close()


def numbered(number: int) -> bytes:
    """A message that says its number, of a length and a content that follow from it."""
    return number.to_bytes(8, "big") + bytes([number % 251]) * (number * 37 % 300)


def check(message: bytes, last: int | None) -> int:
    """Return a numbered message's number, having seen that it is whole and follows the last."""
    number = int.from_bytes(message[:8], "big")
    if message != numbered(number):
        raise AssertionError(f"message {number} is damaged: {message!r}")
    if last is not None and number != last + 1:
        raise AssertionError(f"message {number} after {last}")
    return number


def serve(connection: Connection, end: Any) -> None:
    """Do what the pipe's other end asks for, until it is closed."""
    while True:
        try:
            name, args, knobs = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = pickle.dumps((True, getattr(end, name)(*args, **knobs)), protocol=5)
        except Exception as error:
            answer = pickle.dumps((False, (type(error).__name__, str(error))))
        try:
            connection.send_bytes(answer)
        except OSError:
            return


class Peer:
    """An end somewhere else, as a test sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def start(self, name: str, *args: Any, **knobs: Any) -> None:
        """Ask for something that `result` will give; several may be asked for."""
        self.connection.send_bytes(pickle.dumps((name, args, knobs), protocol=5))

    def result(self) -> Any:
        """What was asked for, or the error that came instead."""
        assert self.connection.poll(PATIENCE + 10), "a peer gives no answer"
        good, answer = pickle.loads(self.connection.recv_bytes())
        if good:
            return answer
        name, text = answer
        error = getattr(errors, name, None)
        if error is None:
            raise AssertionError(f"{name} at a peer: {text}")
        raised: KVIndexError = error.__new__(error)
        raised.args = (text,)
        raise raised

    def call(self, name: str, *args: Any, **knobs: Any) -> Any:
        self.start(name, *args, **knobs)
        return self.result()

    def end(self) -> None:
        """Let it be gone."""
        self.connection.close()


class ThreadPeer(Peer):
    def __init__(self, end: Any) -> None:
        ours, theirs = Pipe()
        super().__init__(ours)
        self._served = end
        self._theirs = theirs
        self._thread = threading.Thread(target=serve, args=(theirs, end), daemon=True)
        self._thread.start()

    def end(self) -> None:
        super().end()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._theirs.close()
        if hasattr(self._served, "queue"):
            self._served.queue.close()


class Running(threading.Thread):
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: BaseException | None = None
        self.returned: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.returned = self._call()
        except BaseException as error:
            self.error = error

    def finish(self) -> BaseException | None:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error


class ProcessPeer(Peer):
    def __init__(self, connection: Connection, pid: int, nursery: Nursery) -> None:
        super().__init__(connection)
        self.pid = pid
        self._nursery = nursery
        self._gone = False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, SIGKILL too; the process stays a zombie until `end`."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait until it is gone with all that it held."""
        if not self._gone:
            self._gone = True
            self.signal(signal.SIGKILL)
            self._nursery.reap(self.pid)
            self.connection.close()

    end = kill


class Nursery:
    """A process that forks others, and has them for its children until they are reaped.

    Args:
        end: name of the class in this module, or in another ("module:Class"), that they serve.
    """

    def __init__(self, end: str = "tests.shm.queue_peers:End") -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.shm.queue_peers", str(theirs.fileno()), end],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
            )

    def fork(self) -> ProcessPeer:
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
        return ProcessPeer(ours, int(self._socket.recv(16)), self)

    def reap(self, pid: int) -> None:
        self._socket.send(b"%d" % pid)
        assert int(self._socket.recv(16)) == pid

    def close(self) -> None:
        self._socket.close()
        self._process.wait(PATIENCE)


def tend(nursery: socket.socket, end: str) -> None:
    """Be the nursery's process."""
    module, _, name = end.partition(":")
    served = getattr(__import__(module, fromlist=[name]), name)
    while True:
        request, descriptors, _, _ = socket.recv_fds(nursery, 16, 1)
        if not request:
            return
        if request != b"fork":
            pid, _ = os.waitpid(int(request), 0)
        elif (pid := os.fork()) == 0:
            nursery.close()
            with Connection(descriptors[0]) as connection:
                serve(connection, served())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        nursery.send(b"%d" % pid)


@contextmanager
def ended(peers: list[Peer]) -> Iterator[list[Peer]]:
    """End all peers of a list afterwards, those too that were added meanwhile."""
    try:
        yield peers
    finally:
        for peer in peers:
            peer.end()


def is_left(handle: Handle) -> bool:
    """Whether the queue's ring lies in /dev/shm."""
    return handle.buffer_handle is not None and Path("/dev/shm", handle.buffer_handle[3]).exists()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connected:
        tend(connected, sys.argv[2])
