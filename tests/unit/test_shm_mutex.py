"""The lock between mappings: every wait for it ends, and nothing leaves it taken."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvindex.errors import ClosedError, EncodeError, QueueTimeoutError
from kvindex.shm.codec import Codec, MsgpackCodec, PickleCodec
from kvindex.shm.layout import CLOSED, READY, Layout, Rule, SlotState
from kvindex.shm.mutex import Mutex
from kvindex.shm.ring_python import RingReader, RingWriter
from kvindex.shm.segment import Segment

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(2, 2, 64)


class InterruptError(Exception):
    """What a signal handler raises here."""


@pytest.fixture
def ends() -> Iterator[tuple[Segment, Segment]]:
    """Give two mappings of one segment that holds a ring."""
    made = Segment.make(LAYOUT.total_bytes, LAYOUT.header(Rule.LOCK))
    attached = Segment.attach(made.name)
    yield made, attached
    attached.close()
    made.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.shm.mutex._ACCESS", 0.2)
    monkeypatch.setattr("kvindex.shm.ring_python.CLOSING", 0.1)


def writer_of(segment: Segment) -> RingWriter:
    return RingWriter(
        segment.memory, *(LAYOUT.n_reader, LAYOUT.max_chunks, LAYOUT.max_chunk_bytes),
        segment.mutex(),
    )  # fmt: skip


def reader_of(segment: Segment, slot: int = 0) -> RingReader:
    return RingReader(
        segment.memory, *(LAYOUT.n_reader, LAYOUT.max_chunks, LAYOUT.max_chunk_bytes), slot,
        segment.mutex(),
    )  # fmt: skip


def elsewhere(call: Callable[[], Any]) -> Any:
    """Return what a call does in another thread: what it returns, or the error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return results[0]


def is_free(*mutexes: Mutex) -> bool:
    """Whether another thread gets each of them."""

    def try_all() -> bool:
        for mutex in mutexes:
            if not mutex.take(0.0):
                return False
            mutex.give()
        return True

    return bool(elsewhere(try_all))


def is_resumed(frame: FrameType) -> bool:
    """Whether a generator goes on, where Python 3.10 has profilers raise past its handlers.

    A signal's handler runs later there, inside of them.
    """
    return sys.version_info < (3, 11) and frame.f_lasti >= 0


def interrupt(call: Callable[[], object], name: str, step: int) -> None:
    """Raise inside a function where handlers run: as it starts, and after each of its C calls."""
    left = step

    def raise_it(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal left
        if (
            frame.f_code.co_name == name
            and event in ("call", "c_return", "c_exception")
            and not (event == "call" and is_resumed(frame))
        ):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise InterruptError

    sys.setprofile(raise_it)
    try:
        call()
    except InterruptError:
        pass
    finally:
        sys.setprofile(None)


def test_a_lock_that_another_mapping_keeps_is_an_error_in_time(
    ends: tuple[Segment, Segment],
) -> None:
    mine, other = (end.mutex() for end in ends)

    def enter() -> None:
        with other:
            pass

    with mine:
        started = time.monotonic()
        error = elsewhere(enter)
        assert 0.2 <= time.monotonic() - started < 5
        assert isinstance(error, QueueTimeoutError)
        assert error.timeout == 0.2
        assert "stopped inside" in str(error)
    assert is_free(mine, other)


# A call's own time -----------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> float:
    """How long the lock was waited for in vain, as the error says."""
    with pytest.raises(QueueTimeoutError, match="stopped inside") as raised:
        call()
    return raised.value.timeout


@pytest.fixture
def held(
    ends: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], float]]:
    """Ask for the first end's lock, which another party holds."""
    monkeypatch.setattr("kvindex.shm.mutex._LEAST", 0.05)

    def enter() -> None:
        with ends[0].mutex():
            pass

    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ends[1].mutex():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(20)
    yield lambda: refused(enter)
    leave.set()
    thread.join(20)


@pytest.mark.parametrize(
    ("timeout", "waited"),
    [(0.1, 0.1), (0.0, 0.05), (-1.0, 0.05), (float("nan"), 0.05), (60.0, 0.2)],
)
def test_a_call_waits_for_the_lock_as_long_as_it_may_last(
    ends: tuple[Segment, Segment], held: Callable[[], float], timeout: float, waited: float
) -> None:
    with ends[0].mutex().within(timeout):
        assert held() == waited
        assert held() == waited
    assert held() == 0.2


def test_a_part_of_a_call_keeps_to_the_time_of_the_whole(
    ends: tuple[Segment, Segment], held: Callable[[], float]
) -> None:
    mutex = ends[0].mutex()
    with mutex.within(0.1):
        with mutex.within(0.15):
            assert held() == 0.1
        assert held() == 0.1
    assert held() == 0.2


def test_the_time_of_a_call_is_that_of_its_thread(
    ends: tuple[Segment, Segment], held: Callable[[], float]
) -> None:
    with ends[0].mutex().within(0.1):
        assert elsewhere(held) == 0.2


def test_the_time_of_a_call_ends_with_it_however_it_ends(
    ends: tuple[Segment, Segment], held: Callable[[], float]
) -> None:
    mutex = ends[0].mutex()
    with pytest.raises(InterruptError), mutex.within(0.1):
        raise InterruptError

    def left() -> None:
        mutex.within(0.1).__enter__()  # as when a handler raises as `__exit__` begins

    assert held() == 0.2
    left()
    assert held() == 0.2
    with mutex.within(0.15):
        assert held() == 0.15


def test_nothing_of_a_call_is_kept_for_its_time(ends: tuple[Segment, Segment]) -> None:
    mutex = ends[0].mutex()

    def call() -> weakref.ref[threading.Event]:
        body = threading.Event()
        with mutex.within(0.1):
            pass
        return weakref.ref(body)

    assert call()() is None


def test_so_long_it_waits_for_a_thread_of_its_own_end_too(
    ends: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvindex.shm.mutex._ACCESS", 60.0)  # which `elsewhere` does not wait
    mutex = ends[0].mutex()
    with mutex.kept_open():

        def asked() -> tuple[float, float]:
            with mutex.within(0.1):
                return refused(lambda: ends[0].lives(1)), refused(mutex.__enter__)

        assert elsewhere(asked) == (0.1, 0.1)


def test_a_lock_that_is_given_back_meanwhile_is_got(ends: tuple[Segment, Segment]) -> None:
    mine, other = (end.mutex() for end in ends)
    asked = threading.Event()

    def take() -> bool:
        asked.set()
        taken = other.take(20)
        other.give()
        return taken

    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(take()))
    with mine:
        thread.start()
        assert asked.wait(20)
    thread.join(20)
    assert got == [True]


@pytest.mark.parametrize("which", [0, 1], ids=["by the same end", "by another end"])
def test_a_thread_that_meets_itself_is_refused_at_once(
    ends: tuple[Segment, Segment], which: int
) -> None:
    mutex = ends[0].mutex()
    again = ends[which].mutex()
    started = time.monotonic()
    with mutex:
        assert not again.take(60)
        with pytest.raises(QueueTimeoutError, match="inside the queue's lock already"):
            again.__enter__()
        assert not is_free(ends[1].mutex())
    assert time.monotonic() - started < 10
    assert is_free(mutex, again)


def test_closing_inside_the_lock_does_not_hang_and_is_told(ends: tuple[Segment, Segment]) -> None:
    mutex = ends[1].mutex()
    with pytest.raises(ClosedError), mutex:
        ends[1].close()
    assert is_free(ends[0].mutex())


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize(
    "name", ["__enter__", "_take", "_acquire_threads", "_lock", "__exit__", "body"]
)
def test_an_exception_of_a_signal_handler_leaves_nothing_taken(
    ends: tuple[Segment, Segment], name: str, step: int
) -> None:
    mutex, other = ends[0].mutex(), ends[1].mutex()

    def body() -> None:
        with mutex:
            os.getpid()

    interrupt(body, name, step)
    with mutex:  # gives back what was left
        pass
    assert is_free(mutex, other)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("name", ["kept_open", "_acquire_threads", "lives", "_is_held"])
def test_nor_does_one_while_the_descriptor_is_kept_open(
    ends: tuple[Segment, Segment], name: str, step: int
) -> None:
    interrupt(lambda: ends[0].lives(1), name, step)
    assert is_free(ends[0].mutex(), ends[1].mutex())


def test_an_interrupt_while_waiting_gives_the_thread_lock_back(
    ends: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvindex.shm.mutex._ACCESS", 30.0)
    mine, other = (end.mutex() for end in ends)
    entered, leave = threading.Event(), threading.Event()

    def keep() -> None:
        with other:
            entered.set()
            leave.wait(30)

    def raise_it(*_: object) -> None:
        raise InterruptError

    thread = threading.Thread(target=keep)
    thread.start()
    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        assert entered.wait(20)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptError):
            mine.__enter__()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        leave.set()
        thread.join(20)
    assert is_free(mine, other)


def test_an_error_of_the_kernel_gives_everything_back(
    ends: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutex = ends[0].mutex()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr("kvindex.shm.mutex.fcntl.fcntl", fail)
        with pytest.raises(OSError, match="no locks"):
            mutex.__enter__()
    assert is_free(mutex, ends[1].mutex())


STOPPED = """
import os, signal, sys
from kvindex.shm.segment import Segment
segment = Segment.attach(sys.argv[1])
with segment.mutex():
    print("inside", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_party_stopped_inside_makes_no_other_wait_for_ever(ends: tuple[Segment, Segment]) -> None:
    writer, reader = writer_of(ends[0]), reader_of(ends[1])
    reader.attach()
    writer.admit()
    assert not reader.ready()
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, ends[0].name], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "inside\n"
        os.waitpid(child.pid, os.WUNTRACED)
        with pytest.raises(QueueTimeoutError):
            reader.read(64, 0.0, 0.0)
        with pytest.raises(QueueTimeoutError):
            writer.write(0, b"x", 0.0, 0.0)
        with pytest.raises(QueueTimeoutError):
            writer.state |= READY
        reader.leave()  # closing goes on without the lock
        reader.interrupt()
        writer.state |= CLOSED
        writer.interrupt()
    finally:
        child.kill()  # which ends stopped processes, too, and gives back their locks
        child.communicate()
    assert writer.slot_state(0) == SlotState.ACTIVE
    assert writer.write(0, b"x", 0.0, 0.0)


def test_an_end_that_is_finalized_inside_the_lock_is_given_up_at_once(
    ends: tuple[Segment, Segment],
) -> None:
    writer, reader = writer_of(ends[0]), reader_of(ends[1])
    reader.attach()
    with ends[0].mutex():  # as when the collector runs here
        reader.leave()
    assert writer.slot_state(0) == SlotState.JOINING
    assert not reader.evicted


# Who is told that it was taken off -----------------------------------------------------------


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_reader_that_was_removed_learns_it(
    ends: tuple[Segment, Segment], evict: bool, started: bool
) -> None:
    writer, reader = writer_of(ends[0]), reader_of(ends[1])
    assert not reader.evicted
    reader.attach()
    assert not reader.evicted
    writer.admit()
    if started:
        assert not reader.ready()
    assert not reader.evicted
    assert writer.remove(0, evict)
    assert reader.evicted
    writer.reserve(0)  # the place is another's
    assert reader.evicted


def test_a_reader_that_left_was_not_removed(ends: tuple[Segment, Segment]) -> None:
    writer, reader = writer_of(ends[0]), reader_of(ends[1])
    reader.attach()
    writer.admit()
    assert not reader.ready()
    reader.leave()
    assert not reader.evicted
    reader_of(ends[1]).attach()
    assert not reader.evicted


def test_a_signal_handler_cannot_use_an_end_that_it_interrupted(
    ends: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(ends[0])
    refused: list[Exception] = []

    def interrupted(_kind: int, _length: int) -> None:
        try:
            writer.write(0, b"inner", 0.0, 0.0)
        except RuntimeError as error:
            refused.append(error)
        raise InterruptError

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_publish", interrupted)
        with pytest.raises(InterruptError):
            writer.write(0, b"outer", 0.0, 0.0)
    assert len(refused) == 1
    assert "signal handler" in str(refused[0])
    assert elsewhere(lambda: writer.write(0, b"next", 0.0, 0.0)) is True


def test_a_turn_that_an_exception_left_taken_is_given_back(ends: tuple[Segment, Segment]) -> None:
    writer = writer_of(ends[0])

    def left() -> None:
        writer._take_turn()
        writer._turn.acquire()

    left()
    assert isinstance(elsewhere(lambda: writer.wait(0.0, 0.0)), RuntimeError)
    assert writer.wait(0.0, 0.0)
    assert elsewhere(lambda: writer.wait(0.0, 0.0)) is True


# What encoding leaves ------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [MsgpackCodec(), PickleCodec()], ids=["msgpack", "pickle"])
def test_a_buffer_with_holes_is_an_encode_error(codec: Codec) -> None:
    holes = pickle.PickleBuffer(memoryview(bytes(20000))[::2])
    with pytest.raises(EncodeError):
        codec.encode([holes])


class BoomError(BaseException):
    """What no codec catches."""


def test_whatever_ends_encoding_no_buffer_is_left_for_the_next_message() -> None:
    codec = MsgpackCodec()

    def boom(_: object) -> None:
        raise BoomError

    raises = type("Raises", (), {"__class__": property(boom)})()  # the hook's isinstance asks it
    with pytest.raises(BoomError):
        codec.encode([pickle.PickleBuffer(b"left"), raises])
    assert codec.encode([1]) == (b"\x91\x01", ())
