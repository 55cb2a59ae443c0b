"""A queue over TCP: credit, acknowledgements, joining, closing, addresses and keys."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvindex.shm import MessageQueue, Waiting
from kvindex.shm.codec import BUFFERS
from kvindex.shm.remote import RemoteReader, RemoteSender
from kvindex.shm.remote.protocol import Acknowledgement, Closing, Message, encode
from kvindex.shm.remote.sender import SendWindow
from kvindex.shm.ring import RingSender
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    WriterDiedError,
)
from tests.live import PATIENCE, meanwhile, until
from tests.native_ring import needs_ring
from tests.shm.queue_peers import Running
from tests.shm.remote_peers import RemoteQueue, received, send, serve_until, small

pytestmark = [pytest.mark.e2e, needs_ring]

PATIENT = 3600.0


def test_memory_may_be_used_again_at_once(remote: RemoteQueue) -> None:
    sender, reader = remote.pair()
    memory = bytearray(100_000)
    for value in range(5):
        memory[:] = bytes([value]) * len(memory)
        send(sender, memory, memoryview(memory)[:10])
    memory[:] = b"\xff" * len(memory)
    for value in range(5):
        assert received(reader) == [bytes([value]) * 100_000, bytes([value]) * 10]


@pytest.mark.parametrize(
    ("knobs", "sent", "unread"),
    [
        ({"window": 8}, [1] * 8, "8 messages of 8 bytes"),
        ({"max_window_bytes": 1000}, [900], "1 messages of 900 bytes"),
    ],
    ids=["messages", "bytes"],
)
def test_a_full_window_stops_the_writer(
    remote: RemoteQueue, knobs: dict[str, int], sent: list[int], unread: str
) -> None:
    sender, reader = remote.pair(**knobs)
    for size in sent:
        send(sender, bytes(size), timeout=0.0)
    began = time.monotonic()
    with pytest.raises(QueueTimeoutError, match=f"remote reader 0 to read: {unread}") as caught:
        send(sender, bytes(200), timeout=0.2)
    assert time.monotonic() - began >= 0.19
    assert caught.value.timeout == 0.2
    assert [received(reader) for _ in sent] == [[bytes(size)] for size in sent]
    send(sender, bytes(5000))  # more than a window of bytes: goes alone
    assert received(reader) == [bytes(5000)]
    assert sender.statistics()["waits"] >= 1


def test_a_reader_waits_for_the_others_to_join(
    remote: RemoteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    sender = remote.sender(2, waiting=Waiting(warn_after=0.02))
    first = remote.reader(sender.address, 0)
    serve_until(sender, connected=1)
    with pytest.raises(QueueTimeoutError, match=r"1 remote readers .* connected: ranks \[0\]"):
        sender.wait_ready(0.1)
    assert "waiting for 1 remote readers to join" in caplog.text

    def is_reported() -> bool:
        with pytest.raises(QueueTimeoutError) as raised:
            first.wait_ready(0.05)
        return "other readers to join" in str(raised.value)

    until(is_reported)  # the reader is admitted
    remote.reader(sender.address, 1)
    sender.wait_ready(PATIENCE)
    first.wait_ready(PATIENCE)


def test_a_message_makes_ready_and_is_not_lost(remote: RemoteQueue) -> None:
    sender, reader = remote.pair()
    send(sender, b"first")
    reader.wait_ready(PATIENCE)
    assert received(reader, 0.0) == [b"first"]


# Acknowledgements ----------------------------------------------------------------------------


def test_a_reader_that_calls_no_more_has_acknowledged_what_it_read(remote: RemoteQueue) -> None:
    sender, reader = remote.pair(window=1000)
    for number in range(3):
        send(sender, b"%d" % number, bytes(20_000 * (number % 2)))
    for _ in range(3):
        received(reader)
    serve_until(sender, unread=0)


def has_packets(reader: RemoteReader) -> bool:
    """Whether packets that it has not read wait in a reader's socket."""
    return bool(reader._socket.poll(0))


def test_the_farewell_behind_the_last_message_keeps_nobody_waiting(remote: RemoteQueue) -> None:
    impostor, reader = remote.fooled()
    impostor.welcome(ready=False)
    impostor.send(small(0, b"last"))
    reader.wait_ready(PATIENCE)  # has the message now
    impostor.send(encode(Closing(1)))
    until(lambda: has_packets(reader))  # the farewell waits
    assert received(reader) == [b"last"]
    assert impostor.receive() == encode(Acknowledgement(1))
    with pytest.raises(QueueClosedError):
        received(reader)


def test_a_message_that_was_waited_for_is_acknowledged_at_once(remote: RemoteQueue) -> None:
    impostor, reader = remote.fooled()
    impostor.welcome()
    sending = threading.Timer(0.1, impostor.send, [small(0, b"late")])
    sending.start()
    assert received(reader) == [b"late"]
    sending.join(PATIENCE)
    assert impostor.receive() == encode(Acknowledgement(1))


def test_messages_are_not_acknowledged_while_more_wait(remote: RemoteQueue) -> None:
    impostor, reader = remote.fooled()
    impostor.welcome(ready=False)
    impostor.send(small(0, b"first"))
    reader.wait_ready(PATIENCE)
    impostor.send(encode(Message(1, BUFFERS, [])), b"last")
    until(lambda: has_packets(reader))  # the other waits
    assert received(reader) == [b"first"]
    assert received(reader) == [b"last"]
    assert impostor.receive() == encode(Acknowledgement(2))


# Closing -------------------------------------------------------------------------------------


def test_closing_does_not_wait_longer_than_linger(
    remote: RemoteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    sender = remote.sender(2, linger=0.2)
    reader, quick = remote.reader(sender.address, 0), remote.reader(sender.address, 1)
    send(sender, b"unread")
    assert received(quick) == [b"unread"]
    until(lambda: not sender.serve() and not sender._window.unread_by(1))  # one has read it
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        sender.close()
    assert time.monotonic() - began >= 0.19
    assert caplog.messages == ["closed while remote reader 0 had not read 1 messages"]
    # It had come nevertheless, and so had the writer's farewell.
    assert received(reader) == [b"unread"]
    with pytest.raises(QueueClosedError):
        received(reader)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_closing_waits_for_no_reader_that_has_read_all(
    remote: RemoteQueue, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    sender, reader = remote.pair(window=1000, linger=PATIENT)
    for number in range(count):
        send(sender, b"%d" % number)
    for number in range(count):
        assert received(reader) == [b"%d" % number]
    with caplog.at_level(logging.INFO, "kvindex.shm"):
        assert Running(sender.close).finish() is None  # while the reader is in no call
    assert not caplog.messages
    for _ in range(2):
        with pytest.raises(QueueClosedError, match=f"at message {count}"):
            received(reader)
    with pytest.raises(QueueClosedError):
        reader.wait_ready(PATIENCE)


def test_a_reader_that_joins_while_the_queue_closes_gets_an_error(remote: RemoteQueue) -> None:
    sender, reader = remote.pair(linger=PATIENT)
    send(sender, b"unread")
    closing = Running(sender.close)
    with pytest.raises(QueueClosedError, match="at message 1"):
        remote.reader(sender.address).wait_ready(PATIENCE)
    assert received(reader) == [b"unread"]
    assert closing.finish() is None


def test_a_reader_not_admitted_yet_gets_an_error_when_the_queue_closes(
    remote: RemoteQueue,
) -> None:
    sender = remote.sender(linger=PATIENT)
    reader = remote.reader(sender.address)
    until(lambda: bool(sender._socket.poll(0)))  # it said hello
    sender.close()
    with pytest.raises(QueueClosedError, match="at message 0"):
        received(reader)


def test_an_interrupted_send_is_never_silent(
    remote: RemoteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(window: SendWindow, size: int) -> None:
        raise KeyboardInterrupt

    sender, reader = remote.pair()
    with monkeypatch.context() as patch:
        patch.setattr(SendWindow, "record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            send(sender, b"half")
    with pytest.raises(ClosedError, match="message 0 was interrupted"):
        send(sender, b"next")
    sender.close()
    assert received(reader) == [b"half"]
    with pytest.raises(WriterDiedError, match="before message 1"):
        received(reader)


def test_a_message_too_large_for_its_reader_ends_the_connection(remote: RemoteQueue) -> None:
    sender = remote.sender()
    reader = remote.reader(sender.address, max_message_bytes=1000)
    send(sender, b"small")
    send(sender, bytes(50_000))
    assert received(reader) == [b"small"]
    with pytest.raises(WriterDiedError, match=r"more than max_message_bytes \(1000\)"):
        received(reader)


# Addresses and keys --------------------------------------------------------------------------


def test_addresses_of_ipv6_work(remote: RemoteQueue) -> None:
    sender, reader = remote.pair(ip="::1")
    assert sender.address.startswith("tcp://[::1]:")
    send(sender, b"six")
    assert received(reader) == [b"six"]


ALL = "give the address of one of them"
NONE = "connect_ip must be an IP address"


@pytest.mark.parametrize(
    ("ip", "reason"),
    [(ip, ALL) for ip in ("0.0.0.0", "::", "::%lo", "::ffff:0.0.0.0")]
    + [(ip, NONE) for ip in ("", "*", "localhost", "tcp://127.0.0.1", 5, b"\x7f\0\0\1", None)]
    + [("192.0.2.1", r"cannot bind to 'tcp://192\.0\.2\.1:")],
)
def test_only_one_address_of_this_machine_is_listened_on(ip: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        RemoteSender(1, ip, curve=None, waiting=Waiting())


@pytest.mark.parametrize(
    ("address", "rank"), [("ipc:///x", 0), ("tcp://", 0), ("tcp://127.0.0.1:1", -1)]
)
def test_a_reader_of_nonsense_is_refused(remote: RemoteQueue, address: str, rank: int) -> None:
    with pytest.raises(ConfigurationError):
        remote.reader(address, rank)


SERVER, OTHER = Curve.generate(), Curve.generate()


@pytest.mark.parametrize(
    ("server", "client"),
    [(SERVER, OTHER), (SERVER, None), (None, SERVER)],
    ids=["other key", "no key", "no key of the writer"],
)
def test_a_reader_without_the_writers_key_gets_an_error(
    remote: RemoteQueue, server: Curve | None, client: Curve | None
) -> None:
    sender = remote.sender(curve=server)
    curve = Curve.generate(client.public_key) if client else None
    reader = remote.reader(sender.address, curve=curve)
    with pytest.raises(WriterDiedError, match="CURVE keys"):
        reader.wait_ready(PATIENCE)
    assert sender.serve() == frozenset()
    assert sender.connected == frozenset()


# MessageQueue over TCP ---------------------------------------------------------------------------


UNANSWERED = r"tcp://127\.0\.0\.1:\d+: connected, and not accepted yet"


Ends = tuple[MessageQueue, MessageQueue]
attached = MessageQueue.create_from_handle


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A writer and its only reader, which has joined."""
    with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        with attached(writer.export_handle(), 0) as reader:
            writer.wait_until_ready(PATIENCE)
            yield writer, reader


def test_a_writer_that_is_in_no_call_is_named_when_time_is_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warned() -> bool:
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(0.1)
        return "not accepted yet" in caplog.text

    with (
        MessageQueue(1, 0, connect_ip="127.0.0.1") as writer,
        attached(writer.export_handle(), 0, waiting=Waiting(warn_after=0.05)) as reader,
    ):
        until(warned)
        for call in (reader.dequeue, reader.wait_until_ready):
            with pytest.raises(QueueTimeoutError, match=f"^waited 0.1 s for .*{UNANSWERED}"):
                call(0.1)
        writer.wait_until_ready(PATIENCE)
        reader.wait_until_ready(PATIENCE)
        with pytest.raises(QueueTimeoutError, match=r"^waited 0\.01 s for a message$"):
            reader.dequeue(0.01)


def test_a_warning_has_the_length_of_a_short_wait(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    def waited() -> list[float]:
        with pytest.raises(QueueTimeoutError):
            impatient.dequeue(0.1)
        return [float(line.rsplit(" for ")[-1].removesuffix(" s")) for line in caplog.messages]

    with attached(ends[0].export_handle(), 1, waiting=Waiting(warn_after=0.02)) as impatient:
        assert all(seconds >= 0.02 for seconds in until(waited))


@pytest.mark.parametrize(
    ("rank", "why"),
    [(1, "rank 1 is none of its remote readers'"), (0, "rank 0 has another reader")],
)
def test_a_stranger_to_the_queue_gets_the_reason_at_its_next_call(
    ends: Ends, rank: int, why: str
) -> None:
    writer, _ = ends
    # As one at work would, the writer looks at its socket again and again.
    with meanwhile(lambda: writer.wait_until_ready(PATIENCE)):
        with attached(writer.export_handle(), rank) as stranger:
            for call in (stranger.dequeue, stranger.wait_until_ready, stranger.dequeue):
                with pytest.raises(ConfigurationError, match=f"refused: {why}"):
                    call(PATIENCE)


# Closing -------------------------------------------------------------------------------------


def test_a_writer_that_is_dropped_is_closed() -> None:
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        writer.wait_until_ready(PATIENCE)
        del writer
        gc.collect()
        with pytest.raises(QueueClosedError):
            reader.dequeue(PATIENCE)


def test_a_reader_that_was_removed_is_not_waited_for_either(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = ends
    writer.enqueue("unread", PATIENCE)
    assert writer.remove_reader(0)
    with caplog.at_level(logging.WARNING, "kvindex.shm"):
        writer.close()
    assert not caplog.messages  # else it would say that it waited in vain
    assert reader.dequeue(PATIENCE) == "unread"
    with pytest.raises(ReaderEvictedError):
        reader.dequeue(PATIENCE)


def test_a_close_that_is_interrupted_at_the_local_readers_still_notifies_the_remote_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = MessageQueue(2, 1, connect_ip="127.0.0.1")
    handle = writer.export_handle()
    close = RingSender.close

    def interrupted(end: RingSender) -> None:
        close(end)
        raise KeyboardInterrupt

    with (
        MessageQueue.create_from_handle(handle, 0),
        MessageQueue.create_from_handle(handle, 1) as remote,
    ):
        writer.wait_until_ready(PATIENCE)
        monkeypatch.setattr(RingSender, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
        with pytest.raises(QueueClosedError):
            remote.dequeue(PATIENCE)
