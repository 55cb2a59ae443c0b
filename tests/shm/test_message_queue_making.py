"""Making a queue and attaching to it: values, keys, addresses, forked children."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvindex.shm import Handle, MessageQueue, MsgpackCodec, Waiting
from kvindex.shm.remote import RemoteSender
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ConfigurationError,
    DecodeError,
    KVIndexError,
    SegmentError,
    WriterDiedError,
)
from tests.children import run_code
from tests.live import PATIENCE
from tests.native_ring import needs_ring
from tests.publish.raw_peers import RawPeer
from tests.shm.queue_peers import Running, is_left

pytestmark = [pytest.mark.e2e, needs_ring]


HERE = (1, 1)
ELSEWHERE = (1, 0, None, 64, 2, "127.0.0.1")
COUNTS: list[tuple[Any, ...]] = [
    *[(-1, 0), (0, 1), (0, 0, [0]), (1, 2), (2, -1), (2, 2, [0]), (2, 2, [1, 1])],
    *[(1, 1, None, 0), (1, 1, None, 7), (1, 1, None, 64, 0)],
    *[(1, 0, None, 64, 0, "127.0.0.1"), (1, 0, None, 64, 2, 5), (2, 1, None, 64, 2, "0.0.0.0")],
]
KNOBS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    *[(HERE, {"codec": codec}) for codec in ("json", object(), MsgpackCodec, None)],
    (HERE, {"max_message_bytes": 0}),
    *[(counts, {"on_dead_reader": "ignore"}) for counts in ((0, 0), HERE)],
    (ELSEWHERE, {"remote_window": 0}),
    (ELSEWHERE, {"curve": Curve.generate(Curve.generate().public_key)}),
]


@pytest.mark.parametrize(("args", "knobs"), [*((args, {}) for args in COUNTS), *KNOBS])
def test_values_that_cannot_work_are_refused(args: tuple[Any, ...], knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        MessageQueue(*args, **knobs).close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rank": 7}, "rank 7 is none of the queue's local ranks"),
        ({"codec": MsgpackCodec}, r"pass MsgpackCodec\(\)"),
        ({"codec": "json"}, "codec must be"),
        ({"curve": Curve.generate()}, "curve must name the writer's public key"),
    ],
)
def test_a_wrong_argument_of_a_reader_is_refused_at_once(
    wrong: dict[str, Any], reason: str
) -> None:
    with MessageQueue(1, 1) as writer:
        arguments: dict[str, Any] = {"handle": writer.export_handle(), "rank": 0} | wrong
        with pytest.raises(ConfigurationError, match=reason):
            MessageQueue.create_from_handle(**arguments)


@pytest.mark.parametrize("n_local", [0, 1])
def test_handles_travel_as_bytes_and_by_pickle(n_local: int) -> None:
    with MessageQueue(1, n_local, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
    assert Handle.from_bytes(handle.to_bytes()) == handle
    assert {handle: 1}[Handle.from_bytes(handle.to_bytes())] == 1
    assert pickle.loads(pickle.dumps(handle)) == handle
    for secret in (handle.remote_curve_key, handle.buffer_handle and handle.buffer_handle[3]):
        assert secret is None or str(secret) not in repr(handle)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x00", b"\xc1", b"\x80", b"x" * (2 << 20), MsgpackCodec().encode([1])[0]),
        b"\x81\xa1\xff\x01",  # text that is not UTF-8
        b"\x81\xa1a" + b"\x91" * 10_000,  # nested deeper than Python's stack
    ],
)
def test_bytes_that_are_no_handle_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Handle.from_bytes(data)


def test_a_reader_attaches_to_nothing_when_the_queue_is_closed() -> None:
    with MessageQueue(1, 1) as writer:
        handle = writer.export_handle()
    assert not is_left(handle)
    with pytest.raises(SegmentError, match="is its maker closed"):
        MessageQueue.create_from_handle(handle, 0)


def test_pickle_is_refused_unless_both_sides_ask_for_it() -> None:
    with MessageQueue(1, 1, codec="pickle") as writer:
        with pytest.raises(ConfigurationError, match="codec is 'pickle'"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
    with MessageQueue(1, 1) as writer:
        with pytest.raises(ConfigurationError, match="codec is 'msgpack'"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec="pickle")


def test_connections_are_encrypted_and_peers_without_the_key_hung_up_on() -> None:
    keys = Curve.generate()
    with MessageQueue(1, 0, connect_ip="127.0.0.1", curve=keys, codec="pickle") as writer:
        handle = writer.export_handle()
        assert (handle.remote_curve_key, bool(handle.remote_address)) == (keys.public_key, True)
        with RawPeer(str(handle.remote_address)) as peer:  # speaks in the clear
            peer.ready(b"DEALER")
            peer.wait_closed()
        with RawPeer(str(handle.remote_address), b"CURVE") as peer:  # lacks the key of a hello
            peer.command(b"HELLO", b"\1\0" + bytes(192))
            peer.wait_closed()
        foreign = msgspec.structs.replace(handle, remote_curve_key=Curve.generate().public_key)
        with MessageQueue.create_from_handle(foreign, 0, codec="pickle") as reader:
            with pytest.raises(WriterDiedError, match="CURVE keys"):
                reader.dequeue(PATIENCE)
        own = Curve.generate(keys.public_key)
        with MessageQueue.create_from_handle(handle, 0, codec="pickle", curve=own) as reader:
            sending = Running(lambda: writer.enqueue({1, 2}, PATIENCE))
            assert reader.dequeue(PATIENCE) == {1, 2}
            assert sending.finish() is None


def test_without_curve_there_are_no_remote_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    with pytest.raises(ConfigurationError, match="has no CURVE"):
        MessageQueue(1, 0, connect_ip="127.0.0.1")


def listened_addresses(port: int) -> set[str]:
    """The addresses on which this process listens at a port, by the kernel's word."""
    ours = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            address, _, hexadecimal = local.partition(":")
            is_ours = f"socket:[{inode}]" in ours
            if is_ours and state == "0A" and int(hexadecimal, 16) == port:
                words = bytes.fromhex(address)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.add(socket.inet_ntop(family, packed))
    return addresses


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
        assert (handle.remote_address, handle.remote_curve_key) == (None, None)


@pytest.mark.parametrize(
    ("kind", "frame"), [(1, b""), (2, b""), (0x63, b"x"), (1, b"\xc1"), (-1, b"x"), (2**40, b"x")]
)
def test_nonsense_of_a_foreign_writer_is_an_error_of_ours(kind: int, frame: bytes) -> None:
    keys = Curve.generate()
    with closing(RemoteSender(1, "127.0.0.1", curve=keys, waiting=Waiting())) as foreign:
        handle = Handle(
            n_reader=1,
            local_reader_ranks=[],
            buffer_handle=None,
            remote_address=foreign.address,
            remote_curve_key=keys.public_key,
            codec="msgpack",
            max_message_bytes=100,
        )
        with MessageQueue.create_from_handle(handle, 0) as reader:
            sending = Running(lambda: foreign.send(kind, [frame], PATIENCE))
            try:
                reader.dequeue(PATIENCE)
            except KVIndexError:
                pass
            assert sending.finish() is None


FORKED = """
import os, sys
from kvindex.wire.errors import ClosedError, WriterDiedError
from kvindex.shm import MessageQueue, ShmRingBuffer, Waiting

writer = MessageQueue(1, 1, None, 64, 4)
reader = MessageQueue.create_from_handle(
    writer.export_handle(), 0, waiting=Waiting(look=0.01))
name = writer.export_handle().buffer_handle[3]
writer.enqueue("before")
notices, notify = os.pipe()
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
    os.write(notify, bytes([refused]))
    sys.exit(0)  # with all that runs at an interpreter's end
print("refused", os.read(notices, 1)[0], flush=True)
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
    os.read(notices, 1)
    os._exit(1)  # without a word
from kvindex.shm import Handle
handle = Handle.from_bytes(os.read(handle_at, 10000))
reader = MessageQueue.create_from_handle(handle, 0, waiting=Waiting(look=0.01))
os.write(notify, b"x")
try:
    reader.dequeue(120.0)
except WriterDiedError:
    print("the death is reported", flush=True)
os.write(let_go, b"x")
"""


FORKED_REMOTE = """
import os, sys
from kvindex.wire.errors import ClosedError
from kvindex.shm import MessageQueue

writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
pid = os.fork()
if pid == 0:
    try:
        writer.enqueue(1, timeout=0.1)
    except ClosedError:
        os._exit(7)
    os._exit(8)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        (FORKED, "refused 12\nstill there True before\nthe death is reported\n"),
        (FORKED_REMOTE, "7\n"),
    ],
    ids=["here", "elsewhere"],
)
def test_a_forked_child_has_no_part_in_its_parents_queue(script: str, printed: str) -> None:
    assert run_code(script) == (0, printed, "")
