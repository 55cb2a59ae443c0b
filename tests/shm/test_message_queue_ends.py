"""What one end of a queue promises to the process that holds it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import force_setattr

from kvindex.shm import (
    Handle,
    MessageQueue,
    MsgpackCodec,
    ShmRingBuffer,
    Waiting,
)
from kvindex.shm.remote import RemoteSender
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    InUseError,
    KVIndexError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    SegmentError,
    WaitCancelledError,
)
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.publish.raw_peers import RawPeer
from tests.shm.queue_peers import is_left

pytestmark = [pytest.mark.e2e, needs_ring]

ASLEEP = Waiting(look=10.0)
"""Who sleeps is woken, or is late for every test: it would look an hour later."""
force_setattr(ASLEEP, "look", 3600.0)

Pair = Callable[..., tuple[MessageQueue, MessageQueue]]

WAYS = ["memory", "remote"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(request.param)


@pytest.fixture
def pair(way: str) -> Iterator[Pair]:
    """Make a writer and its one reader, which is ready."""
    with ExitStack() as stack:

        def make(**knobs: Any) -> tuple[MessageQueue, MessageQueue]:
            waiting = knobs.pop("waiting", Waiting())
            if way == "remote":
                knobs.update(connect_ip="127.0.0.1", remote_window=4)
            n_local = int(way != "remote")
            writer = MessageQueue(1, n_local, None, 256, 4, waiting=waiting, **knobs)
            stack.callback(writer.close)
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0, waiting=waiting)
            stack.callback(reader.close)
            if way == "remote":
                joining = threading.Thread(target=reader.wait_until_ready, args=(PATIENCE,))
                joining.start()
                writer.wait_until_ready(PATIENCE)
                joining.join(PATIENCE)
            else:
                writer.wait_until_ready(PATIENCE)
            return writer, reader

        yield make


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


class Noticed(threading.Event):
    """An event that tells when a waiting thread has looked at it, and how often it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()
        self.times_found_set = 0

    def is_set(self) -> bool:
        found = super().is_set()
        self.times_found_set += found
        self.looked.set()
        return found


def fill(writer: MessageQueue) -> None:
    for number in range(4):
        writer.enqueue(number, timeout=PATIENCE)
    with pytest.raises(QueueTimeoutError):
        writer.enqueue("no room", timeout=0.0)


def sleeps(queue: MessageQueue) -> int:
    return int(queue.statistics()["local"]["sleeps"])


def slept_since(queue: MessageQueue, before: int) -> bool:
    return sleeps(queue) > before


# Ending a wait -------------------------------------------------------------------------------


def test_a_wait_ends_at_its_first_look_after_its_cancel_is_set_and_takes_nothing(
    pair: Pair,
) -> None:
    writer, reader = pair(waiting=Waiting(look=0.05))
    cancel = Noticed()
    waiting = Running(lambda: reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    cancel.set()
    assert isinstance(waiting.finish(), WaitCancelledError)
    assert cancel.times_found_set == 1
    writer.enqueue("kept")
    assert reader.dequeue(PATIENCE) == "kept"


def test_a_cancel_that_is_set_does_not_hide_a_message_that_is_there(pair: Pair) -> None:
    writer, reader = pair()
    cancel = threading.Event()
    cancel.set()
    writer.enqueue("there")
    if writer.export_handle().buffer_handle is None:
        assert reader.dequeue(PATIENCE) == "there"  # TCP takes its time
    else:
        assert reader.dequeue(PATIENCE, cancel) == "there"
    with pytest.raises(WaitCancelledError):
        reader.dequeue(PATIENCE, cancel)
    with pytest.raises(WaitCancelledError):
        with reader.acquire_read(PATIENCE, cancel):
            pass


def test_what_ends_a_wait_and_is_known_is_told_before_any_sleep(pair: Pair) -> None:
    writer, reader = pair(waiting=ASLEEP)
    cancel = threading.Event()
    cancel.set()
    writer.enqueue("last")
    assert reader.dequeue(PATIENCE) == "last"
    for timeout in (None, 3600.0):
        call = partial(reader.dequeue, timeout, cancel)
        assert isinstance(Running(call).finish(), WaitCancelledError)
    writer.close()
    for timeout in (None, 3600.0):
        assert isinstance(Running(partial(reader.dequeue, timeout)).finish(), QueueClosedError)
        read = reader.acquire_read(timeout)
        assert isinstance(Running(read.__enter__).finish(), QueueClosedError)


def test_a_reader_that_was_taken_off_is_told_before_any_sleep(pair: Pair) -> None:
    writer, reader = pair(waiting=ASLEEP)
    assert writer.remove_reader(0)
    for timeout in (None, 3600.0):
        assert isinstance(Running(partial(reader.dequeue, timeout)).finish(), ReaderEvictedError)


def test_a_reader_that_waits_is_told_when_another_thread_closes_its_end(pair: Pair) -> None:
    _, reader = pair(waiting=Waiting(look=0.05))
    cancel = Noticed()
    waiting = Running(lambda: reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    reader.close()
    assert isinstance(waiting.finish(), ClosedError)


def test_a_writer_that_waits_is_told_when_another_thread_closes_its_end(pair: Pair) -> None:
    writer, reader = pair(waiting=Waiting(look=0.05))
    fill(writer)
    waiting = Running(lambda: writer.enqueue("never"))
    if writer.export_handle().buffer_handle is not None:
        until(lambda: sleeps(writer) > 0)
    else:
        until(lambda: writer.statistics()["remote"]["waits"] > 1)
    closing = Running(writer.close)
    assert isinstance(waiting.finish(), ClosedError)
    assert [reader.dequeue(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(QueueClosedError):
        reader.dequeue(PATIENCE)
    assert closing.finish() is None


def test_who_sleeps_is_woken_and_does_not_wait_for_its_next_look(pair: Pair) -> None:
    writer, reader = pair(waiting=ASLEEP)
    in_memory = writer.export_handle().buffer_handle is not None
    for number in range(3):
        before = sleeps(reader) if in_memory else 0
        waiting = Running(reader.dequeue)
        if in_memory:
            until(partial(slept_since, reader, before))
        writer.enqueue(number)
        assert waiting.finish() is None
        assert waiting.returned == number
    fill(writer)
    before = sleeps(writer) if in_memory else 0
    waiting = Running(lambda: writer.enqueue("more"))
    if in_memory:
        until(partial(slept_since, writer, before))
    assert reader.dequeue(PATIENCE) == 0
    assert waiting.finish() is None
    assert [reader.dequeue(PATIENCE) for _ in range(4)] == [1, 2, 3, "more"]
    if in_memory:  # told that it closes, too
        before = sleeps(reader)
        waiting = Running(reader.dequeue)
        until(partial(slept_since, reader, before))
        writer.close()
        assert isinstance(waiting.finish(), QueueClosedError)


def test_a_second_thread_is_refused_while_the_first_uses_an_end(pair: Pair) -> None:
    writer, reader = pair(waiting=Waiting(look=5.0))
    cancel = Noticed()
    waiting = Running(lambda: reader.dequeue(cancel=cancel))
    if writer.export_handle().buffer_handle is not None:
        until(lambda: sleeps(reader) > 0)
    else:
        assert cancel.looked.wait(PATIENCE)
    with pytest.raises(InUseError, match="another thread"):
        reader.dequeue(timeout=0.0)
    with pytest.raises(InUseError, match="another thread"):
        with reader.acquire_read(timeout=0.0):
            pass
    writer.enqueue("for the first")
    assert waiting.finish() is None
    assert waiting.returned == "for the first"


def test_a_second_thread_is_refused_while_the_first_waits_for_room(pair: Pair) -> None:
    writer, reader = pair(waiting=Waiting(look=5.0))
    fill(writer)
    waiting = Running(lambda: writer.enqueue("more"))
    if writer.export_handle().buffer_handle is not None:
        until(lambda: sleeps(writer) > 0)
    else:
        until(lambda: writer.statistics()["remote"]["waits"] > 1)
    with pytest.raises(InUseError, match="another thread"):
        writer.enqueue("second", timeout=0.0)
    got = [reader.dequeue(PATIENCE) for _ in range(5)]
    assert got == [0, 1, 2, 3, "more"]
    assert waiting.finish() is None


def test_long_waits_are_warned_of_unless_they_are_expected(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = pair(waiting=Waiting(look=0.005, warn_after=0.02))
    writer.wait_until_ready(PATIENCE)
    reader.wait_until_ready(PATIENCE)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvindex"):
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(timeout=0.06, indefinite=True)
        assert not caplog.messages
        cancel = threading.Event()
        waiting = Running(lambda: reader.dequeue(cancel=cancel))
        until(lambda: "waiting for a message" in caplog.text)
        cancel.set()
        assert isinstance(waiting.finish(), WaitCancelledError)
        caplog.clear()
        if writer.export_handle().buffer_handle is not None:
            fill(writer)
            waiting = Running(lambda: writer.enqueue("no room"))
            until(lambda: "the readers [0]" in caplog.text)
            assert reader.dequeue(PATIENCE) == 0
            assert waiting.finish() is None


# Reading in place ----------------------------------------------------------------------------


def test_a_message_that_is_read_in_place_cannot_be_written_and_goes_when_the_block_ends(
    pair: Pair,
) -> None:
    writer, reader = pair()
    writer.enqueue(b"body")
    with reader.acquire_read(PATIENCE) as body:
        assert bytes(body) == b"body"
        assert body.readonly
    if writer.export_handle().buffer_handle is not None:
        with pytest.raises(ValueError, match="released"):
            body[0]


def test_a_message_whose_reading_fails_counts_as_read(pair: Pair) -> None:
    writer, reader = pair()
    writer.enqueue(b"first")
    writer.enqueue(b"x" * 500)  # in fragments
    writer.enqueue(b"third")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            with reader.acquire_read(PATIENCE):
                raise ZeroDivisionError
    assert reader.dequeue(PATIENCE) == b"third"


def test_a_chunk_is_not_written_while_it_is_read_in_place() -> None:
    with MessageQueue(1, 1, None, 256, 1) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(b"a" * 200)
            with reader.acquire_read(PATIENCE) as body:
                with pytest.raises(QueueTimeoutError):
                    writer.enqueue(b"b" * 200, timeout=0.01)
                assert bytes(body) == b"a" * 200
            writer.enqueue(b"b" * 200, PATIENCE)
            assert reader.dequeue(PATIENCE) == b"b" * 200


# Who may attach ------------------------------------------------------------------------------


def test_only_the_maker_writes() -> None:
    with ShmRingBuffer(1, 64, 2) as ring, ShmRingBuffer(*ring.handle()) as attached:
        with pytest.raises(SegmentError, match="only the maker"):
            attached.writer()


@pytest.mark.parametrize(
    ("args", "knobs"),
    [
        ((-1, 0), {}),
        ((0, 1), {}),
        ((0, 0, [0]), {}),
        ((1, 2), {}),
        ((2, -1), {}),
        (("1", 1), {}),
        ((1.0, 1.0), {}),
        ((True, True), {}),
        ((None, None), {}),
        ((1, 1, 0), {}),
        ((2, 2, ["a", "b"]), {}),
        ((2, 2, [0]), {}),
        ((2, 2, [1, 1]), {}),
        ((1, 1, None, 0), {}),
        ((1, 1, None, 7), {}),
        ((1, 1, None, 64, 0), {}),
        ((1, 1), {"codec": "json"}),
        ((1, 1), {"codec": object()}),
        ((1, 1), {"codec": MsgpackCodec}),
        ((1, 1), {"codec": None}),
        ((1, 1), {"waiting": 0.5}),
        ((1, 1), {"waiting": Waiting}),
        ((0, 0), {"max_message_bytes": 0}),
        ((0, 0), {"on_dead_reader": "ignore"}),
        ((1, 0, None, 1.5, 2, "127.0.0.1"), {}),
        ((1, 0, None, 64, 0, "127.0.0.1"), {}),
        ((1, 0, None, 64, 2, 5), {}),
        ((1, 0, None, 64, 2, "127.0.0.1"), {"curve": "key"}),
        ((1, 0, None, 64, 2, "127.0.0.1"), {"curve": Curve.generate(Curve.generate().public_key)}),
        ((1, 0, None, 64, 2, "127.0.0.1"), {"remote_window": "4"}),
        ((1, 1), {"on_dead_reader": "ignore"}),
        ((1, 1), {"max_message_bytes": 0}),
        ((1, 1), {"max_message_bytes": "1"}),
        ((1, 0, None, 64, 2, "0.0.0.0"), {}),
        ((1, 0, None, 64, 2, "::"), {}),
        ((1, 0, None, 64, 2, "*"), {}),
        ((1, 0, None, 64, 2, "a.host"), {}),
        ((2, 1, None, 64, 2, "0.0.0.0"), {}),
        ((1, 0, None, 64, 2, "127.0.0.1"), {"remote_window": 0}),
    ],
)
def test_values_that_cannot_work_are_refused(args: tuple[Any, ...], knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        MessageQueue(*args, **knobs).close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"handle": None}, "handle must be the Handle .* not a NoneType"),
        ({"handle": b"bytes"}, "handle must be the Handle .* not a bytes"),
        ({"handle": (1, 64, 2, "name")}, "handle must be the Handle .* not a tuple"),
        ({"rank": "0"}, "rank must be an int, not '0'"),
        ({"rank": 0.0}, "rank must be an int, not 0.0"),
        ({"rank": True}, "rank must be an int, not True"),
        ({"codec": MsgpackCodec}, r"pass MsgpackCodec\(\)"),
        ({"waiting": 0.5}, "waiting must be a Waiting.* not 0.5"),
        ({"curve": Curve.generate()}, "curve must name the writer's public key"),
        ({"curve": b"key"}, "curve must name the writer's public key"),
    ],
)
def test_a_reader_is_told_at_once_what_it_gave_wrongly(given: dict[str, Any], said: str) -> None:
    with MessageQueue(1, 1) as writer:
        arguments: dict[str, Any] = {"handle": writer.export_handle(), "rank": 0} | given
        with pytest.raises(ConfigurationError, match=said):
            MessageQueue.create_from_handle(**arguments)


def test_a_reader_attaches_to_nothing_when_the_queue_is_closed() -> None:
    with MessageQueue(1, 1) as writer:
        handle = writer.export_handle()
    assert not is_left(handle)
    with pytest.raises(SegmentError, match="is its maker closed"):
        MessageQueue.create_from_handle(handle, 0)


# Pickle --------------------------------------------------------------------------------------


def test_pickle_is_refused_unless_both_sides_ask_for_it() -> None:
    with MessageQueue(1, 1, codec="pickle") as writer:
        with pytest.raises(ConfigurationError, match="codec is 'pickle'"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
    with MessageQueue(1, 1) as writer:
        with pytest.raises(ConfigurationError, match="codec is 'msgpack'"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec="pickle")


def test_without_its_key_an_encrypted_queue_hears_nobody_out() -> None:
    with MessageQueue(1, 0, connect_ip="127.0.0.1", curve=Curve.generate()) as writer:
        address = writer.export_handle().remote_address
        assert address is not None
        with RawPeer(address) as peer:  # speaks in the clear
            peer.ready(b"DEALER")
            peer.wait_closed()
        with RawPeer(address, b"CURVE") as peer:  # has not the key to say hello with
            peer.command(b"HELLO", b"\1\0" + bytes(192))
            peer.wait_closed()


@pytest.mark.parametrize("n_local", [0, 1])
def test_pickle_is_refused_for_remote_readers_without_curve(n_local: int) -> None:
    with pytest.raises(ConfigurationError, match="curve"):
        MessageQueue(2, n_local, connect_ip="127.0.0.1", codec="pickle")
    with MessageQueue(
        1, 0, connect_ip="127.0.0.1", codec="pickle", curve=Curve.generate()
    ) as writer:
        handle = writer.export_handle()
        forged = type(handle)(
            **{name: getattr(handle, name) for name in handle.__struct_fields__}
            | {"remote_curve_key": None}
        )
        with pytest.raises(ConfigurationError, match="curve"):
            MessageQueue.create_from_handle(forged, 0, codec="pickle")


def test_keys_of_ones_own_are_used(pair: Pair, way: str) -> None:
    if way != "remote":
        return
    server = Curve.generate()
    with MessageQueue(1, 0, connect_ip="127.0.0.1", curve=server, codec="pickle") as writer:
        handle = writer.export_handle()
        keys = Curve.generate(server.public_key)
        with MessageQueue.create_from_handle(handle, 0, codec="pickle", curve=keys) as reader:
            sending = Running(lambda: writer.enqueue({1, 2}, PATIENCE))
            assert reader.dequeue(PATIENCE) == {1, 2}
            assert sending.finish() is None


# The network ---------------------------------------------------------------------------------


def listened_addresses(port: int) -> set[str]:
    """The addresses on which this process listens at a port, by the kernel's word."""
    ours = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            address, _, hexadecimal = local.partition(":")
            is_ours = f"socket:[{inode}]" in ours
            if is_ours and state == "0A" and int(hexadecimal, 16) == port:
                words = bytes.fromhex(address)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found


@pytest.mark.parametrize(
    ("connect_ip", "host", "address"),
    [(None, "127.0.0.1", "127.0.0.1"), ("127.0.0.1",) * 3, ("::1", "[::1]", "::1")],
)
def test_only_the_given_address_is_listened_on(
    connect_ip: str | None, host: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MessageQueue(1, 0, connect_ip=connect_ip) as writer:
        remote = writer.export_handle().remote_address
        assert remote is not None
        name, _, port = remote.removeprefix("tcp://").rpartition(":")
        assert name == host
        assert listened_addresses(int(port)) == {address}
        assert ("connect_ip is not given" in caplog.text) == (connect_ip is None)


def test_a_queue_without_remote_readers_listens_nowhere() -> None:
    with MessageQueue(1, 1, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
        assert (handle.remote_address, handle.remote_token) == (None, None)


def test_a_remote_reader_reads_over_ipv6() -> None:
    with MessageQueue(1, 0, connect_ip="::1") as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 7) as reader:
            sending = Running(lambda: writer.enqueue([6], PATIENCE))
            assert reader.dequeue(PATIENCE) == [6]
            assert sending.finish() is None


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\x02"], [b"\x01"], [b"\x63", b"x"], [b"\x01", b"\xc1"], [b"\x01\x01", b"\xc0"]],
)
def test_what_a_foreign_writer_sends_is_an_error_of_ours(frames: list[bytes]) -> None:
    with closing(RemoteSender(1, "127.0.0.1")) as foreign:
        handle = Handle(
            n_reader=1,
            local_reader_ranks=[],
            buffer_handle=None,
            remote_address=foreign.address,
            remote_token=foreign.token,
            remote_curve_key=None,
            codec="msgpack",
            max_message_bytes=100,
        )
        with MessageQueue.create_from_handle(handle, 0) as reader:
            sending = Running(lambda: foreign.send(frames, PATIENCE))
            try:
                reader.dequeue(PATIENCE)
            except KVIndexError:
                pass
            assert sending.finish() is None


# Signals -------------------------------------------------------------------------------------


class InterruptError(Exception):
    """What a signal's handler raises here."""


GUARDED: dict[str, Callable[[MessageQueue, MessageQueue], object]] = {
    "enqueue": lambda writer, _: writer.enqueue("second", PATIENCE),
    "dequeue": lambda _, reader: reader.dequeue(PATIENCE),
    "_one_user": lambda writer, _: writer.wait_until_ready(PATIENCE),
}


def interrupt(call: Callable[[], object], name: str, step: int) -> bool:
    """Raise inside a function where handlers run: as it starts, and after each of its C calls."""
    left = step

    def raise_it(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal left
        if frame.f_code.co_name == name and event in ("call", "c_return", "c_exception"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise InterruptError

    sys.setprofile(raise_it)
    try:
        call()
    except InterruptError:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("name", GUARDED)
def test_what_a_signals_handler_raises_leaves_no_end_taken(pair: Pair, name: str) -> None:
    writer, reader = pair()
    for step in itertools.count():
        writer.enqueue("first", PATIENCE)
        interrupted = interrupt(lambda: GUARDED[name](writer, reader), name, step)
        writer.enqueue("last", PATIENCE)
        while reader.dequeue(PATIENCE) != "last":
            pass
        writer.wait_until_ready(PATIENCE)
        if not interrupted:
            break
    assert step >= 3  # as it starts, when it took the lock, and when it gave it back


# Forks ---------------------------------------------------------------------------------------

FORKED = """
import os, sys
from kvindex.wire.errors import ClosedError, WriterDiedError
from kvindex.shm import MessageQueue, ShmRingBuffer, Waiting

writer = MessageQueue(1, 1, None, 64, 4)
reader = MessageQueue.create_from_handle(
    writer.export_handle(), 0, waiting=Waiting(look=0.01))
name = writer.export_handle().buffer_handle[3]
writer.enqueue("before")
told, tell = os.pipe()
if os.fork() == 0:
    refused = 0
    for use in [
        lambda: writer.enqueue("from the child", timeout=0.0),
        lambda: reader.dequeue(timeout=0.0),
        lambda: writer.wait_until_ready(0.0),
        lambda: reader.wait_until_ready(0.0),
        lambda: writer.acquire_write().__enter__(),
        lambda: reader.acquire_read().__enter__(),
        lambda: (writer.close(), reader.close()),
    ] * 2:
        try:
            use()
        except ClosedError as error:
            refused += "belongs to the parent process; attach one by the queue" in str(error)
    os.write(tell, bytes([refused]))
    sys.exit(0)  # with all that runs at an interpreter's end
print("refused", os.read(told, 1)[0], flush=True)
os.wait()
print("still there", os.path.exists("/dev/shm/" + name), reader.dequeue(120.0), flush=True)
writer.close()
reader.close()

go_on, let_go = os.pipe()
handle_at, hand_over = os.pipe()
parent = os.fork()
if parent == 0:
    writer = MessageQueue(1, 1, None, 64, 4)
    os.close(let_go)
    if os.fork() == 0:  # outlives its parent, but not this script
        os.read(go_on, 1)
        os._exit(0)
    os.write(hand_over, writer.export_handle().to_bytes())
    os.read(told, 1)
    os._exit(1)  # without a word
from kvindex.shm import Handle
handle = Handle.from_bytes(os.read(handle_at, 10000))
reader = MessageQueue.create_from_handle(handle, 0, waiting=Waiting(look=0.01))
os.write(tell, b"x")
try:
    reader.dequeue(120.0)
except WriterDiedError:
    print("told of the death", flush=True)
os.write(let_go, b"x")
"""


@pytest.mark.parametrize("backend", ["python", ""])
def test_a_forked_child_has_no_part_in_its_parents_queue(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED],
        env=os.environ | {"KVINDEX_BACKEND": backend},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "refused 12\nstill there True before\ntold of the death\n"
    assert done.stderr == ""


def test_a_remote_end_is_refused_in_a_forked_child() -> None:
    script = """
import os, sys
from kvindex.wire.errors import ClosedError
from kvindex.shm import MessageQueue
import tests.shm.queue_peers

writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
pid = os.fork()
if pid == 0:
    try:
        writer.enqueue(1, timeout=0.1)
    except ClosedError:
        sys.exit(7)
    sys.exit(8)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "7\n", done.stderr
