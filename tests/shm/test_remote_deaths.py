"""A queue over TCP whose parties die, freeze, or send what no party of a queue sends."""

from __future__ import annotations

import logging
import signal
import socket
import threading

import pytest

from kvindex.shm import Handle, MessageQueue
from kvindex.shm.codec import BUFFERS
from kvindex.shm.remote import RemoteSender
from kvindex.shm.remote.protocol import (
    VERSION,
    Acknowledgement,
    Closing,
    Hello,
    Message,
    Refusal,
    Welcome,
    decode,
    encode,
)
from kvindex.wire.errors import (
    ConfigurationError,
    KVIndexError,
    QueueTimeoutError,
    ReaderEvictedError,
    WriterDiedError,
)
from tests.live import PATIENCE, until
from tests.shm.conftest import WINDOW, Party
from tests.shm.remote_peers import (
    MILLISECONDS,
    RemoteQueue,
    received,
    send,
    serve_until,
    small,
)

pytestmark = pytest.mark.faults


def sender_of(writer: MessageQueue) -> RemoteSender:
    assert writer._writing is not None
    sender = writer._writing._remote
    assert isinstance(sender, RemoteSender)
    return sender


remotely = pytest.mark.parametrize("party", ["remote"], indirect=True)


@remotely
def test_a_reader_killed_while_the_writer_waits_for_it_frees_the_writer(party: Party) -> None:
    writer, (reader,) = party.ready()
    for number in range(WINDOW):
        writer.enqueue(number, PATIENCE)
    threading.Timer(0.1, reader.end).start()
    writer.enqueue("goes on", PATIENCE)
    assert writer.statistics()["remote"]["died"] == 1


@remotely
def test_a_reader_in_place_of_a_killed_one_begins_with_the_next_message(party: Party) -> None:
    writer, (reader,) = party.ready()
    writer.enqueue("old", PATIENCE)
    reader.end()
    replacing = party.reader(writer)
    assert serve_until(sender_of(writer), died=1, joined=2) == {0}
    writer.enqueue("new", PATIENCE)
    assert replacing.call("take", 1) == ["new"]


@remotely
def test_readers_of_a_killed_writer_read_what_was_sent_and_get_an_error(party: Party) -> None:
    writer = party.peer()
    handle = writer.call("make", 2, 0, None, 64, 4, "127.0.0.1")
    slow = MessageQueue.create_from_handle(Handle.from_bytes(handle), 0)
    with slow, MessageQueue.create_from_handle(Handle.from_bytes(handle), 1) as quick:
        writer.start("send", list(range(100)))
        # What the second reader has was sent to the first one before.
        assert [quick.dequeue(PATIENCE) for _ in range(100)] == list(range(100))
        writer.result()
        threading.Timer(0.1, writer.end).start()
        with pytest.raises(WriterDiedError):
            quick.dequeue()  # which waits when the writer dies
        assert [slow.dequeue(PATIENCE) for _ in range(100)] == list(range(100))
        for _ in range(2):
            with pytest.raises(WriterDiedError, match="broke before message 100"):
                slow.dequeue()


@remotely
def test_a_frozen_reader_is_not_dead_but_can_be_removed(party: Party) -> None:
    writer, (reader,) = party.ready()
    reader.signal(signal.SIGSTOP)  # type: ignore[attr-defined]  # a process
    for number in range(WINDOW):
        writer.enqueue(number, PATIENCE)
    with pytest.raises(QueueTimeoutError, match="remote reader 0 to read"):
        writer.enqueue("never", 2.5)  # several probes
    assert writer.remove_reader(0)
    writer.enqueue("to nobody", PATIENCE)
    reader.signal(signal.SIGCONT)  # type: ignore[attr-defined]
    assert reader.call("take", WINDOW) == list(range(WINDOW))
    with pytest.raises(ReaderEvictedError):
        reader.call("take", 1)


@remotely
def test_a_reader_that_dies_with_all_read_is_no_loss(
    party: Party, caplog: pytest.LogCaptureFixture
) -> None:
    writer, (reader,) = party.ready()
    writer.enqueue("read", PATIENCE)
    reader.call("take", 1)
    serve_until(sender_of(writer), unread=0)
    with caplog.at_level(logging.INFO, "kvindex.shm"):
        reader.end()
        assert serve_until(sender_of(writer), died=1) == {0}
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "died, 0 messages unread" in caplog.text


def test_a_slow_reader_with_a_full_window_does_not_count_as_dead(remote: RemoteQueue) -> None:
    sender, reader = remote.pair(window=4096)
    for number in range(4096):
        send(sender, b"%d" % number)
    with pytest.raises(QueueTimeoutError):  # several probes
        send(sender, b"4096", timeout=2.5)
    for _ in range(4096):
        received(reader)
    assert send(sender, b"4096") == frozenset()


def test_a_writer_that_nobody_is_at_is_dead_at_once(remote: RemoteQueue) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        reader = remote.reader(f"tcp://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(WriterDiedError, match=r"no connection to tcp://127\.0\.0\.1:"):
            reader.wait_ready(PATIENCE)
        with pytest.raises(WriterDiedError):
            received(reader)


def test_garbage_from_strangers_is_counted_and_harms_nobody(remote: RemoteQueue) -> None:
    sender, reader = remote.pair()
    stranger = remote.stranger(sender)
    for parts in (
        [b""],
        [b"garbage"],
        [encode(Hello(VERSION, 0))[:-1]],
        [bytes(100)],
        [b"B", b"B"],
        [encode(Acknowledgement(0))],
        [encode(Hello(99))],
    ):
        stranger.send_multipart(parts)
    serve_until(sender, refused=7)
    assert stranger.poll(MILLISECONDS)
    answer = decode(stranger.recv())
    assert answer == Refusal(f"the writer speaks version {VERSION}, the reader 99")
    stranger.send(bytes(1 << 20))  # more than ZeroMQ takes there: it closes the connection
    host, port = sender.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as web:
        # ZeroMQ takes it for a peer of its first protocol, and its words for frames.
        web.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        until(lambda: not sender.serve() and sender.statistics()["refused"] > 7)
    send(sender, b"unharmed")
    assert received(reader) == [b"unharmed"]
    statistics = sender.statistics()
    assert (statistics["connected"], statistics["died"]) == (1, 0)


def test_a_reader_that_acknowledges_what_it_was_not_sent_is_counted(remote: RemoteQueue) -> None:
    sender = remote.sender(1, window=1)
    liar = remote.stranger(sender)
    liar.send(encode(Hello(VERSION, 0)))
    serve_until(sender, connected=1)
    send(sender, b"unread")
    liar.send(encode(Hello(VERSION, 0)))
    liar.send(encode(Acknowledgement(1000)))
    serve_until(sender, refused=2)
    with pytest.raises(QueueTimeoutError):
        send(sender, b"no credit", timeout=0.0)


WELCOME = [encode(Welcome(5, 16, True))]
FIRST = [small(5, b"a")]
HEADER = encode(Message(6, BUFFERS, []))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([WELCOME, FIRST, [small(7, b"c")]], WriterDiedError, "message 7 came, but 6 was next"),
        ([WELCOME, FIRST, FIRST], WriterDiedError, "message 5 came, but 6 was next"),
        ([WELCOME, FIRST, [encode(Closing(9))]], WriterDiedError, "message 6 is missing"),
        ([WELCOME, FIRST, WELCOME], WriterDiedError, "an unexpected Welcome"),
        ([WELCOME, FIRST, [b"HTTP/1.1 200 OK"]], WriterDiedError, "no packet of this protocol"),
        ([WELCOME, FIRST, [HEADER]], WriterDiedError, "a message without frames"),
        ([WELCOME, FIRST, [HEADER, bytes(9), bytes(9)]], WriterDiedError, "18 bytes"),
        ([WELCOME, FIRST, [small(6, bytes(11))]], WriterDiedError, "11 bytes"),
        ([FIRST], WriterDiedError, "an unexpected Message"),
        ([[encode(Refusal("it has version 9"))]], ConfigurationError, "it has version 9"),
    ],
)
def test_a_writer_that_skips_or_lies_is_reported_each_time(
    remote: RemoteQueue, parts: list[list[bytes]], error: type[KVIndexError], message: str
) -> None:
    impostor, reader = remote.fooled(max_message_bytes=10)
    for part in parts:
        impostor.send(*part)
    if parts[0] is WELCOME:
        assert received(reader) == [b"a"]
    for _ in range(2):
        with pytest.raises(error, match=message):
            received(reader)
