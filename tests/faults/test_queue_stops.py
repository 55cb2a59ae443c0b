"""A party is stopped inside the lock of a ring whose rule is one lock.

What must hold: no other waits for it longer than its caller said, it is told why, and nothing is
lost or sent that was not to be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvindex.errors import QueueTimeoutError
from kvindex.shm import MessageQueue, Waiting
from kvindex.shm.layout import Rule
from tests.e2e.queue_peers import DEADLINE
from tests.ring_rules import follow

ROOT = Path(__file__).parents[2]
TIMEOUT = 0.2
BOUND = 2.5
"""Seconds: far more than the time-out, and half of what a call without one waits for the lock."""

STOPPING = """
import os, signal, sys
from kvindex.shm import Handle, ShmRingBuffer
handle = Handle.from_bytes(bytes.fromhex(sys.argv[1]))
with ShmRingBuffer(*handle.buffer_handle) as ring:
    reader = ring.reader(1)
    print("attached", flush=True)
    sys.stdin.readline()
    with ring.segment.mutex():
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdin.readline()
"""


class Stopping:
    """A reader in a process of its own, which can be stopped inside the lock."""

    def __init__(self, handle: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STOPPING, handle.hex()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "attached\n"

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()  # which ends stopped processes, too, and gives back their locks
        self.process.communicate()


class Ends:
    """Both ends of a queue here, and its second reader, not stopped yet."""

    def __init__(self, stack: ExitStack) -> None:
        waiting = Waiting(look=0.01)
        self.writer = stack.enter_context(MessageQueue(2, 2, None, 64, 8, waiting=waiting))
        handle = self.writer.export_handle()
        self.reader = stack.enter_context(
            MessageQueue.create_from_handle(handle, 0, waiting=waiting)
        )
        self.other = Stopping(handle.to_bytes())
        stack.callback(self.other.kill)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    follow(Rule.LOCK, monkeypatch)
    with ExitStack() as stack:
        yield Ends(stack)


def acquire_read(ends: Ends) -> None:
    with ends.reader.acquire_read(TIMEOUT):
        pass


def acquire_write(ends: Ends) -> None:
    with ends.writer.acquire_write(TIMEOUT, length=8):
        pass


CALLS: dict[str, Callable[[Ends], object]] = {
    "enqueue": lambda ends: ends.writer.enqueue(b"never seen", TIMEOUT),
    "enqueue in fragments": lambda ends: ends.writer.enqueue(b"never seen" * 20, TIMEOUT),
    "acquire_write": acquire_write,
    "writer's wait_until_ready": lambda ends: ends.writer.wait_until_ready(TIMEOUT),
    "dequeue": lambda ends: ends.reader.dequeue(TIMEOUT),
    "dequeue, cancellable": lambda ends: ends.reader.dequeue(TIMEOUT, threading.Event()),
    "acquire_read": acquire_read,
    "reader's wait_until_ready": lambda ends: ends.reader.wait_until_ready(TIMEOUT),
}


def timed_out(call: Callable[[], object]) -> None:
    started = time.monotonic()
    with pytest.raises(QueueTimeoutError, match="stopped inside") as raised:
        call()
    assert TIMEOUT <= time.monotonic() - started < BOUND
    assert raised.value.timeout == TIMEOUT


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_party_stopped_inside_the_lock_makes_no_call_outlast_its_time_out(
    ends: Ends, call: Callable[[Ends], object]
) -> None:
    ends.writer.enqueue(b"before", DEADLINE)
    ends.other.stop()
    timed_out(lambda: call(ends))
    ends.other.resume()
    ends.writer.enqueue(b"after", DEADLINE)
    assert [ends.reader.dequeue(DEADLINE) for _ in range(2)] == [b"before", b"after"]


def test_a_party_stopped_inside_the_lock_while_another_waits_ends_that_wait_in_time(
    ends: Ends,
) -> None:
    ended: list[tuple[float, float]] = []

    def wait() -> None:
        started = time.monotonic()
        with pytest.raises(QueueTimeoutError) as raised:
            ends.reader.dequeue(0.5)
        ended.append((raised.value.timeout, time.monotonic() - started))

    thread = threading.Thread(target=wait)
    thread.start()
    ends.other.stop()
    thread.join(DEADLINE)
    ((timeout, waited),) = ended
    assert timeout == 0.5 <= waited < BOUND


def test_what_was_read_in_place_counts_as_unread_if_the_lock_is_not_to_be_had_after(
    ends: Ends,
) -> None:
    ends.writer.enqueue(b"before", DEADLINE)

    def read() -> None:
        with ends.reader.acquire_read(TIMEOUT) as view:
            assert bytes(view) == b"before"
            ends.other.stop()

    timed_out(read)
    ends.other.resume()
    assert ends.reader.dequeue(DEADLINE) == b"before"


def test_what_was_written_in_place_is_not_sent_if_the_lock_is_not_to_be_had_after(
    ends: Ends,
) -> None:
    def write() -> None:
        with ends.writer.acquire_write(TIMEOUT, length=4) as view:
            view[:] = b"lost"
            ends.other.stop()

    timed_out(write)
    ends.other.resume()
    ends.writer.enqueue(b"sent", DEADLINE)
    assert ends.reader.dequeue(DEADLINE) == b"sent"


def test_a_call_goes_on_when_the_party_that_was_stopped_inside_the_lock_does(ends: Ends) -> None:
    ends.other.stop()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(ends.reader.dequeue(DEADLINE)))
    thread.start()
    ends.other.resume()
    ends.writer.enqueue(b"whole", DEADLINE)
    thread.join(DEADLINE)
    assert got == [b"whole"]
