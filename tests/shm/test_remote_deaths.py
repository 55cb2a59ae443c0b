"""A queue over TCP whose parties die, freeze, or never were what they seemed."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from kvindex.shm.remote import RemoteSender
from kvindex.shm.remote.protocol import (
    VERSION,
    Acknowledgement,
    Closed,
    Hello,
    Message,
    Refused,
    Welcome,
    decode,
    encode,
)
from kvindex.wire.errors import (
    ConfigurationError,
    QueueTimeoutError,
    WriterDiedError,
)
from tests.live import PATIENCE
from tests.publish.publish_peers import wait_until
from tests.shm.remote_peers import MILLISECONDS, Process, Queue, drain, small

pytestmark = pytest.mark.e2e


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


def test_a_killed_reader_is_removed_and_the_others_get_all(queue: Queue) -> None:
    sender = queue.sender(2, window=16)
    collector = queue.collect(queue.reader(sender, 0))
    process = queue.process(sender, 1)
    sender.wait_connected(PATIENCE)
    sender.send_ready()
    assert process.line() == "ready"
    dead: set[int] = set()
    for number in range(500):
        if number == 200:
            process.kill()
        dead |= sender.send([b"%d" % number], PATIENCE)
    wait_until(lambda: len(collector.messages) == 500, "the other reader has all")
    assert dead == {1}
    assert sender.connected == {0}
    assert sender.statistics()["died"] == 1


def test_a_reader_killed_while_the_writer_waits_for_it_frees_the_writer(queue: Queue) -> None:
    sender = queue.sender(1, window=32)
    process = queue.process(sender, 0, "stuck")
    sender.wait_connected(PATIENCE)
    sender.send_ready()
    for number in range(32):
        sender.send([b"%d" % number], PATIENCE)
    assert (process.line(), process.line()) == ("ready", "stuck")
    with pytest.raises(QueueTimeoutError):
        _fill(sender)
    threading.Timer(0.1, process.kill).start()
    assert sender.send([b"goes on"], PATIENCE) == {0}


def _fill(sender: RemoteSender) -> None:
    while True:
        sender.send([b"more"], 0.1)


def test_a_reader_in_place_of_a_killed_one_begins_with_the_next_message(queue: Queue) -> None:
    sender = queue.sender(1)
    process = queue.process(sender, 0)
    sender.wait_connected(PATIENCE)
    sender.send_ready()
    assert process.line() == "ready"
    sender.send([b"0"], PATIENCE)
    process.kill()
    reader = queue.reader(sender, 0)
    ended = threading.Event()
    dead: set[int] = set()
    thread = threading.Thread(target=lambda: _serve_until(ended, sender, dead))
    thread.start()
    reader.wait_ready(PATIENCE)
    ended.set()
    thread.join(PATIENCE)
    assert dead == {0}
    sender.send([b"1"], PATIENCE)
    assert reader.frames(PATIENCE) == [b"1"]


def _serve_until(ended: threading.Event, sender: RemoteSender, dead: set[int]) -> None:
    while not ended.wait(0.005):
        dead |= sender.serve()


def test_readers_of_a_killed_writer_read_what_was_sent_and_get_an_error(queue: Queue) -> None:
    process = queue.writer_process(200)
    address = process.line()
    reader = queue.reader_at(address)
    reader.wait_ready(PATIENCE)
    assert process.line() == "sent"
    _has_left_the_writer(queue, process, address)
    process.kill()
    messages: list[int] = []
    with pytest.raises(WriterDiedError, match="broke before message 200"):
        messages.extend(int(message[0]) for message in drain(reader))
    assert messages == list(range(200))
    with pytest.raises(WriterDiedError):  # and again
        reader.frames(None)


def _has_left_the_writer(queue: Queue, process: Process, address: str) -> None:
    """Wait until what a writer has sent is with the system: its ZeroMQ works in order."""
    stranger = queue.stranger_at(address)
    stranger.send(encode(Hello(99)))

    def is_answered() -> bool:
        process.tell("serve")
        return bool(stranger.poll(0))

    wait_until(is_answered, "the stranger is refused")


def test_a_writer_killed_while_a_reader_waits_wakes_it(queue: Queue) -> None:
    process = queue.writer_process(0)
    address = process.line()
    reader = queue.reader_at(address)
    assert process.line() == "sent"
    threading.Timer(0.1, process.kill).start()
    with pytest.raises(WriterDiedError):
        reader.frames(None)


def test_a_frozen_reader_is_not_dead_but_can_be_removed(queue: Queue) -> None:
    sender = queue.sender(1, window=4)
    process = queue.process(sender, 0)
    sender.wait_connected(PATIENCE)
    sender.send_ready()
    assert process.line() == "ready"
    process.signal(signal.SIGSTOP)
    for number in range(4):
        assert sender.send([b"%d" % number], PATIENCE) == frozenset()
    with pytest.raises(QueueTimeoutError, match="remote reader 0 to read"):
        sender.send([b"4"], 2.5)  # several probes
    assert sender.evict(0)
    assert sender.send([b"4"], PATIENCE) == frozenset()
    process.signal(signal.SIGCONT)
    assert process.line() == "ReaderEvictedError 4"


def test_a_slow_reader_with_a_full_window_does_not_count_as_dead(queue: Queue) -> None:
    sender, reader = queue.pair(window=4096)
    for number in range(4096):
        sender.send([b"%d" % number], PATIENCE)
    with pytest.raises(QueueTimeoutError):  # several probes
        sender.send([b"4096"], 2.5)
    queue.collect(reader)
    assert sender.send([b"4096"], PATIENCE) == frozenset()


def test_a_writer_that_nobody_is_at_is_dead_at_once(queue: Queue) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        reader = queue.reader_at(address)
        with pytest.raises(WriterDiedError, match=r"no connection to tcp://127\.0\.0\.1:"):
            reader.wait_ready(PATIENCE)
        with pytest.raises(WriterDiedError):
            reader.frames(PATIENCE)


def test_a_reader_that_dies_with_all_read_is_no_loss(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    sender = queue.sender(1)
    process = queue.process(sender, 0)
    sender.wait_connected(PATIENCE)
    sender.send_ready()
    assert process.line() == "ready"
    sender.send([b"0"], PATIENCE)
    wait_until(lambda: not sender.serve() and sender.statistics()["unread"] == 0, "it was read")
    with caplog.at_level(logging.INFO, "kvindex.shm"):
        process.kill()
        wait_until(lambda: sender.serve() == {0}, "its death is noticed")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "died, 0 messages unread" in caplog.text


def test_garbage_from_strangers_is_counted_and_harms_nobody(queue: Queue) -> None:
    sender, reader = queue.pair()
    stranger = queue.stranger(sender)
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
    wait_until(lambda: not sender.serve() and sender.statistics()["refused"] == 7, "all was read")
    assert stranger.poll(MILLISECONDS)
    answer = decode(stranger.recv())
    assert answer == Refused(f"the writer speaks version {VERSION}, the reader 99")
    stranger.send(bytes(1 << 20))  # more than ZeroMQ takes there: it closes the connection
    sender.send([b"unharmed"], PATIENCE)
    assert reader.frames(PATIENCE) == [b"unharmed"]
    statistics = sender.statistics()
    assert (statistics["connected"], statistics["died"]) == (1, 0)


def test_a_stranger_who_does_not_speak_zeromq_is_counted_and_harms_nobody(queue: Queue) -> None:
    sender, reader = queue.pair()
    host, port = sender.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)

        # ZeroMQ takes it for a peer of its first protocol, and its words for frames.
        wait_until(lambda: not sender.serve() and sender.statistics()["refused"] > 0, "refused")
    sender.send([b"unharmed"], PATIENCE)
    assert reader.frames(PATIENCE) == [b"unharmed"]


def test_a_reader_that_acknowledges_what_it_was_not_sent_is_counted(queue: Queue) -> None:
    sender = queue.sender(1, window=1)
    liar = queue.stranger(sender)
    liar.send(encode(Hello(VERSION, 0)))
    sender.wait_connected(PATIENCE)
    sender.send([b"unread"], PATIENCE)
    liar.send(encode(Hello(VERSION, 0)))
    liar.send(encode(Acknowledgement(1000)))
    wait_until(lambda: not sender.serve() and sender.statistics()["refused"] == 2, "counted")
    with pytest.raises(QueueTimeoutError):
        sender.send([b"no credit"], 0.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[small(5, b"a")], [small(7, b"c")]], "message 7 came, but 6 was next"),
        ([[small(5, b"a")], [small(5, b"a")]], "message 5 came, but 6 was next"),
        ([[small(5, b"a")], [encode(Closed(9))]], "message 6 is missing"),
        ([[small(5, b"a")], [encode(Welcome(7, 1, True))]], "an unexpected Welcome"),
        ([[small(5, b"a")], [b"HTTP/1.1 200 OK"]], "no packet of this protocol"),
        ([[small(5, b"a")], [encode(Message(6, []))]], "a message without frames"),
        ([[small(5, b"a")], [encode(Message(6, [])), bytes(9), bytes(9)]], "18 bytes"),
        ([[small(5, b"a")], [small(6, bytes(11))]], "11 bytes"),
    ],
)
def test_a_writer_that_skips_or_lies_is_found_out(
    queue: Queue, parts: list[list[bytes]], message: str
) -> None:
    impostor = queue.impostor()
    reader = queue.reader_at(impostor.address, max_message_bytes=10)
    impostor.meet()
    impostor.welcome(5)
    for part in parts:
        impostor.say(*part)
    assert reader.frames(PATIENCE) == [b"a"]
    for _ in range(2):
        with pytest.raises(WriterDiedError, match=message):
            reader.frames(PATIENCE)


def test_a_message_before_the_welcome_is_none(queue: Queue) -> None:
    impostor = queue.impostor()
    reader = queue.reader_at(impostor.address, max_message_bytes=10)
    impostor.meet()
    impostor.say(small(0, b"a"))
    with pytest.raises(WriterDiedError, match="an unexpected Message"):
        reader.wait_ready(PATIENCE)


def test_a_writer_of_another_version_is_named(queue: Queue) -> None:
    impostor = queue.impostor()
    reader = queue.reader_at(impostor.address, max_message_bytes=10)
    impostor.meet()
    impostor.say(encode(Refused("it speaks version 9")))
    with pytest.raises(ConfigurationError, match="it speaks version 9"):
        reader.wait_ready(PATIENCE)
