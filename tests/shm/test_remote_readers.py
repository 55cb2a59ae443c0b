"""A queue over TCP: order, completeness, credit, waiting, joining and leaving."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvindex.shm.remote import RemoteReader, RemoteSender
from kvindex.shm.remote.credit import SendWindow
from kvindex.shm.remote.protocol import Acknowledgement, Closed, Message, encode
from kvindex.shm.ring import Waiting
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    QueueClosedError,
    QueueTimeoutError,
    WriterDiedError,
)
from tests.live import PATIENCE
from tests.publish.publish_peers import wait_until
from tests.shm.remote_peers import Queue, small

pytestmark = pytest.mark.e2e

PATIENT = 3600.0


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue()
    yield queue
    queue.close()


def various(number: int) -> list[bytes]:
    """A message: mostly small, at times of many frames, empty ones, or large ones."""
    if number % 97 == 0:
        return [b"%d" % number, b"", b"x" * 30_000, b"y" * number]
    if number % 7 == 0:
        return [b"%d" % number, b"", b"z" * (number % 50)]
    return [b"%d" % number]


def test_readers_of_different_speed_get_all_in_order(queue: Queue) -> None:
    sender = queue.sender(3, linger=PATIENT)
    readers = [queue.reader(sender, rank) for rank in range(3)]
    sender.wait_connected(PATIENCE)
    collectors = [queue.collect(readers[i], slow_every=(0, 200, 50)[i]) for i in range(3)]
    expected = [various(number) for number in range(10_000)]
    for message in expected:
        assert sender.send(message, PATIENCE) == frozenset()
    sender.close()
    for collector in collectors:
        assert collector.result() == expected
        assert isinstance(collector.ended_by, QueueClosedError)
    statistics = sender.statistics()
    assert (statistics["sent"], statistics["unread"], statistics["died"]) == (10_000, 0, 0)
    assert not any(count for name, count in statistics.items() if name.startswith("refused"))


def test_memory_may_be_used_again_at_once(queue: Queue) -> None:
    sender, reader = queue.pair()
    memory = bytearray(100_000)
    for value in range(5):
        memory[:] = bytes([value]) * len(memory)
        sender.send([memory, memoryview(memory)[:10]], PATIENCE)
    memory[:] = b"\xff" * len(memory)
    for value in range(5):
        large, small = reader.frames(PATIENCE)
        assert bytes(large) == bytes([value]) * 100_000
        assert bytes(small) == bytes([value]) * 10


def test_a_full_window_of_messages_stops_the_writer(queue: Queue) -> None:
    sender, reader = queue.pair(window=8)
    for number in range(8):
        sender.send([b"%d" % number], 0.0)
    began = time.monotonic()
    with pytest.raises(QueueTimeoutError, match="remote reader 0 to read: 8 messages") as caught:
        sender.send([b"never sent"], 0.2)
    assert time.monotonic() - began >= 0.19
    assert caught.value.timeout == 0.2
    assert [bytes(reader.frames(PATIENCE)[0]) for _ in range(8)] == [b"%d" % i for i in range(8)]
    sender.send([b"8"], PATIENCE)
    assert bytes(reader.frames(PATIENCE)[0]) == b"8"
    assert sender.statistics()["waits"] >= 1


def test_a_full_window_of_bytes_stops_the_writer(queue: Queue) -> None:
    sender, reader = queue.pair(max_window_bytes=1000)
    sender.send([bytes(900)], 0.0)
    with pytest.raises(QueueTimeoutError, match="900 bytes are unread"):
        sender.send([bytes(200)], 0.0)
    assert len(reader.frames(PATIENCE)[0]) == 900
    sender.send([bytes(5000)], PATIENCE)  # more than the window: goes alone
    assert len(reader.frames(PATIENCE)[0]) == 5000


def test_one_slow_reader_bounds_what_all_are_sent(queue: Queue) -> None:
    sender = queue.sender(2, window=4)
    slow, fast = queue.reader(sender, 0), queue.collect(queue.reader(sender, 1))
    sender.wait_connected(PATIENCE)
    for number in range(4):
        sender.send([b"%d" % number], PATIENCE)
    with pytest.raises(QueueTimeoutError):
        sender.send([b"never sent"], 0.1)
    wait_until(lambda: len(fast.messages) == 4, "the fast reader has what was sent")
    queue.collect(slow)
    sender.send([b"4"], PATIENCE)
    wait_until(lambda: len(fast.messages) == 5, "the fast reader goes on")


def test_nothing_is_sent_before_all_have_joined(queue: Queue) -> None:
    sender = queue.sender(2)
    first = queue.reader(sender, 0)
    wait_until(lambda: not sender.serve() and sender.connected == {0}, "the first has joined")
    with pytest.raises(
        QueueTimeoutError, match=r"1 remote readers to join; connected: ranks \[0\]"
    ):
        sender.send([b"too early"], 0.0)
    with pytest.raises(QueueTimeoutError, match=r"connected: ranks \[0\]"):
        sender.wait_connected(0.0)
    second = queue.reader(sender, 1)
    sender.send([b"now"], PATIENCE)
    assert sender.connected == {0, 1}
    assert [bytes(reader.frames(PATIENCE)[0]) for reader in (first, second)] == [b"now"] * 2


def test_readers_are_ready_when_the_writer_notifies_them(queue: Queue) -> None:
    sender = queue.sender(2)
    first, second = queue.reader(sender, 0), queue.reader(sender, 1)
    sender.wait_connected(PATIENCE)
    _wait_obstacle(first, "other readers to join")
    sender.send_ready()
    first.wait_ready(PATIENCE)
    second.wait_ready(PATIENCE)


def test_a_message_makes_ready_and_is_not_lost(queue: Queue) -> None:
    sender, reader = queue.pair()
    sender.send([b"first"], PATIENCE)
    reader.wait_ready(PATIENCE)
    assert bytes(reader.frames(0.0)[0]) == b"first"


@pytest.mark.parametrize(
    ("timeout", "error"), [(-1.0, QueueTimeoutError), (float("nan"), ConfigurationError)]
)
def test_a_negative_timeout_is_over_at_once_and_one_that_is_no_number_is_refused(
    queue: Queue, timeout: float, error: type[Exception]
) -> None:
    sender, reader = queue.pair(window=1)
    sender.send([b"fills the window"], PATIENCE)
    with pytest.raises(error):
        sender.send([b""], timeout)
    assert reader.frames(PATIENCE)
    with pytest.raises(error):
        reader.frames(timeout)


def test_a_reader_that_waits_to_be_ready_gets_an_error_when_the_queue_closes(queue: Queue) -> None:
    sender, reader = queue.pair()
    sender.close()
    with pytest.raises(QueueClosedError):
        reader.wait_ready(PATIENCE)


def test_closing_does_not_wait_longer_than_linger(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    sender = queue.sender(2, linger=0.2)
    reader, quick = queue.reader(sender, 0), queue.reader(sender, 1)
    sender.send([b"unread"], PATIENCE)
    assert quick.frames(PATIENCE) == [b"unread"]
    wait_until(lambda: not sender.serve() and not sender._window.unread_by(1), "one has read it")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        sender.close()
    assert time.monotonic() - began >= 0.19
    assert caplog.messages == ["closed while remote reader 0 had not read 1 messages"]
    # It had come nevertheless, and so had the writer's farewell.
    assert reader.frames(PATIENCE) == [b"unread"]
    with pytest.raises(QueueClosedError):
        reader.frames(PATIENCE)


def test_a_reader_that_calls_no_more_has_acknowledged_what_it_read(queue: Queue) -> None:
    sender, reader = queue.pair(window=1000)
    for number in range(3):
        sender.send([b"%d" % number, bytes(20_000 * (number % 2))], PATIENCE)
    for _ in range(3):
        reader.frames(PATIENCE)
    wait_until(lambda: not sender.serve() and sender.statistics()["unread"] == 0, "acknowledged")


@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_closing_waits_for_no_reader_that_has_read_all(
    queue: Queue, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    sender, reader = queue.pair(window=1000, linger=PATIENT)
    for number in range(count):
        sender.send([b"%d" % number], PATIENCE)
    for number in range(count):
        assert reader.frames(PATIENCE) == [b"%d" % number]
    closing = threading.Thread(target=sender.close, daemon=True)
    with caplog.at_level(logging.INFO, "kvindex.shm"):
        closing.start()  # while the reader is in no call
        closing.join(PATIENCE)
    assert not closing.is_alive()
    assert not caplog.messages
    with pytest.raises(QueueClosedError, match=f"at message {count}"):
        reader.frames(PATIENCE)


def test_a_reader_of_the_last_message_frees_a_writer_that_closes(queue: Queue) -> None:
    sender, reader = queue.pair(linger=PATIENT)
    for number in range(3):
        sender.send([b"%d" % number], PATIENCE)
    closing = threading.Thread(target=sender.close)
    closing.start()
    # Its farewell is behind the messages here already, or comes: either must do.
    for number in range(3):
        assert reader.frames(PATIENCE) == [b"%d" % number]
    closing.join(PATIENCE)
    assert not closing.is_alive()
    with pytest.raises(QueueClosedError, match="at message 3"):
        reader.frames(PATIENCE)


def test_the_farewell_behind_the_last_message_keeps_nobody_waiting(queue: Queue) -> None:
    impostor = queue.impostor()
    reader = queue.reader_at(impostor.address)
    impostor.meet()
    impostor.welcome(ready=False)
    impostor.say(small(0, b"last"))
    reader.wait_ready(PATIENCE)  # has the message now
    impostor.say(encode(Closed(1)))
    wait_until(lambda: has_come(reader), "the farewell waits")
    assert reader.frames(PATIENCE) == [b"last"]
    assert impostor.hear() == encode(Acknowledgement(1))
    with pytest.raises(QueueClosedError):
        reader.frames(PATIENCE)


def test_a_message_that_was_waited_for_is_acknowledged_at_once(queue: Queue) -> None:
    impostor = queue.impostor()
    reader = queue.reader_at(impostor.address)
    impostor.meet()
    impostor.welcome()
    sending = threading.Timer(0.1, impostor.say, [small(0, b"late")])
    sending.start()
    assert reader.frames(PATIENCE) == [b"late"]
    sending.join(PATIENCE)
    assert impostor.hear() == encode(Acknowledgement(1))


def test_messages_are_not_acknowledged_while_more_wait(queue: Queue) -> None:
    impostor = queue.impostor()
    reader = queue.reader_at(impostor.address)
    impostor.meet()
    impostor.welcome(ready=False)
    impostor.say(small(0, b"first"))
    reader.wait_ready(PATIENCE)
    impostor.say(encode(Message(1, [])), b"last")
    wait_until(lambda: has_come(reader), "the other waits")
    assert reader.frames(PATIENCE) == [b"first"]
    assert reader.frames(PATIENCE) == [b"last"]
    assert impostor.hear() == encode(Acknowledgement(2))


def has_come(reader: RemoteReader) -> bool:
    """Whether something that it has not read waits in a reader's socket."""
    return bool(reader._socket.poll(0))


def test_a_reader_that_joins_while_the_queue_closes_gets_an_error(queue: Queue) -> None:
    sender, reader = queue.pair(linger=PATIENT)
    sender.send([b"unread"], PATIENCE)
    closing = threading.Thread(target=sender.close)
    closing.start()
    with pytest.raises(QueueClosedError, match="at message 1"):
        queue.reader(sender).wait_ready(PATIENCE)
    assert reader.frames(PATIENCE) == [b"unread"]
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_reader_not_admitted_yet_gets_an_error_when_the_queue_closes(queue: Queue) -> None:
    sender = queue.sender(linger=PATIENT)
    reader = queue.reader(sender)
    wait_until(lambda: bool(sender._socket.poll(0)), "it said hello")
    sender.close()
    with pytest.raises(QueueClosedError, match="at message 0"):
        reader.frames(PATIENCE)


def test_a_reader_in_place_of_one_who_left_begins_with_the_next_message(queue: Queue) -> None:
    sender, first = queue.pair()
    sender.send_ready()
    for number in range(3):
        sender.send([b"%d" % number], PATIENCE)
    assert first.frames(PATIENCE) == [b"0"]
    first.close()
    wait_until(lambda: not sender.serve() and sender.statistics()["left"] == 1, "it has left")
    second = queue.reader(sender)
    assert sender.wait_connected(PATIENCE) == frozenset()
    second.wait_ready(PATIENCE)
    sender.send([b"3"], PATIENCE)
    assert second.frames(PATIENCE) == [b"3"]


def _wait_obstacle(reader: RemoteReader, obstacle: str) -> None:
    """Wait until a reader that is not let in says what for."""

    def is_reported() -> bool:
        with pytest.raises(QueueTimeoutError) as raised:
            reader.wait_ready(0.05)
        return obstacle in str(raised.value)

    wait_until(is_reported, obstacle)


def test_an_interrupted_send_is_never_silent(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, reader = queue.pair()
    with monkeypatch.context() as patch:
        patch.setattr(SendWindow, "record", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            sender.send([b"half"], PATIENCE)
    with pytest.raises(ClosedError, match="message 0 was interrupted"):
        sender.send([b"next"], PATIENCE)
    sender.close()
    assert reader.frames(PATIENCE) == [b"half"]
    with pytest.raises(WriterDiedError, match="before message 1"):
        reader.frames(PATIENCE)


def _interrupt(window: SendWindow, size: int) -> None:
    raise KeyboardInterrupt


def test_a_message_too_large_for_its_reader_ends_the_connection(queue: Queue) -> None:
    sender = queue.sender()
    reader = queue.reader(sender, max_message_bytes=1000)
    sender.send([b"small"], PATIENCE)
    sender.send([bytes(50_000)], PATIENCE)
    assert reader.frames(PATIENCE) == [b"small"]
    with pytest.raises(WriterDiedError, match=r"more than max_message_bytes \(1000\)"):
        reader.frames(PATIENCE)


def test_addresses_of_ipv6_work(queue: Queue) -> None:
    sender, reader = queue.pair(ip="::1")
    assert sender.address.startswith("tcp://[::1]:")
    sender.send([b"six"], PATIENCE)
    assert reader.frames(PATIENCE) == [b"six"]


@pytest.mark.parametrize("ip", ["0.0.0.0", "::", "::%lo", "::ffff:0.0.0.0"])
def test_all_interfaces_are_never_listened_on(ip: str) -> None:
    with pytest.raises(ConfigurationError, match="give the address of one of them"):
        RemoteSender(1, ip, curve=None, waiting=Waiting())


@pytest.mark.parametrize("ip", ["", "*", "localhost", "tcp://127.0.0.1", 5, b"\x7f\0\0\1", None])
def test_only_an_address_is_bound_to(ip: Any) -> None:
    with pytest.raises(ConfigurationError, match="connect_ip must be an IP address"):
        RemoteSender(1, ip, curve=None, waiting=Waiting())


def test_an_address_that_is_not_ours_cannot_be_bound_to() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot bind to 'tcp://192\.0\.2\.1:"):
        RemoteSender(1, "192.0.2.1", curve=None, waiting=Waiting())


@pytest.mark.parametrize(
    ("address", "rank"), [("ipc:///x", 0), ("tcp://", 0), ("tcp://127.0.0.1:1", -1)]
)
def test_a_reader_of_nonsense_is_refused(queue: Queue, address: str, rank: int) -> None:
    with pytest.raises(ConfigurationError):
        queue.reader_at(address, rank)


SERVER, OTHER = Curve.generate(), Curve.generate()


@pytest.mark.parametrize(
    ("server", "client"),
    [(SERVER, OTHER), (SERVER, None), (None, SERVER)],
    ids=["other key", "no key", "no key of the writer"],
)
def test_a_reader_without_the_writers_key_gets_an_error(
    queue: Queue, server: Curve | None, client: Curve | None
) -> None:
    sender = queue.sender(curve=server)
    curve = Curve.generate(client.public_key) if client else None
    reader = queue.reader(sender, curve=curve)
    with pytest.raises(WriterDiedError, match="CURVE keys"):
        reader.wait_ready(PATIENCE)
    assert sender.serve() == frozenset()
    assert sender.connected == frozenset()
