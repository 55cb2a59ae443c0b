from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvindex.publish import ZmqEventPublisher
from kvindex.wire import END_SEQ, parse_replay
from tests.live import PATIENCE
from tests.publish.publish_peers import (
    Asker,
    Context,
    Live,
    batch,
    publish_many,
    seqs,
    wait_until,
)

pytestmark = pytest.mark.e2e

Make = Callable[..., ZmqEventPublisher]


@pytest.fixture
def make(context: Context) -> Iterator[Make]:
    made: list[ZmqEventPublisher] = []

    def make(published: int = 0, **arguments: Any) -> ZmqEventPublisher:
        usual: dict[str, Any] = {
            "endpoint": "tcp://127.0.0.1:0",
            "replay_endpoint": "tcp://127.0.0.1:0",
            "context": context,
        }
        publisher = ZmqEventPublisher(**(usual | arguments))
        made.append(publisher)
        for number in range(published):
            publisher.publish(batch(number))
        wait_until(lambda: publisher.statistics()["sent"] == published, "all is sent")
        return publisher

    yield make
    for publisher in made:
        publisher.shutdown(timeout=0.0)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("vllm-0.24.0", [b"", b"\xff" * 8, b""]),
        ("sglang-0.5.20", [b"", b"\xff" * 8, b""]),
        ("vllm-0.26.0", [b"", b"", b"\xff" * 8, b""]),
        ("sglang-0.5.22", [b"", b"", b"\xff" * 8, b""]),
    ],
)
def test_both_shapes_of_a_replay(context: Context, make: Make, name: str, end: list[bytes]) -> None:
    publisher = make(2, dialect=name, topic="kv")
    asker = Asker(context, publisher.replay_endpoint)
    asker.ask(1)
    topic = [b"kv"] if len(end) == 4 else []
    assert asker.receive_frames()[:-1] == [b"", *topic, bytes(7) + b"\x01"]
    assert asker.receive_frames() == end
    assert end[-2] == publisher.END_SEQ


def test_the_replayed_payload_is_the_one_sent_live(context: Context, make: Make) -> None:
    publisher = make()
    live = Live(context, publisher.endpoint)
    first = live.join(publisher)
    for number in range(20):
        publisher.publish(batch(number))
    sent = [live.receive().payload for _ in range(20)]
    replies = Asker(context, publisher.replay_endpoint).replay(first)
    assert [reply.payload for reply in replies[:-1]] == sent


def test_what_left_the_buffer_is_not_replayed(context: Context, make: Make) -> None:
    publisher = make(25, buffer_steps=10)
    assert seqs(Asker(context, publisher.replay_endpoint).replay(0)) == list(range(15, 25))
    assert publisher.statistics()["buffered"] == 10


@pytest.mark.parametrize("start", [b"", b"\x03", bytes(20), bytes(12) + b"\x03"])
def test_a_start_of_any_length_is_read_as_the_engines_read_it(
    context: Context, make: Make, start: bytes
) -> None:
    publisher = make(5)
    asker = Asker(context, publisher.replay_endpoint)
    asker.socket.send_multipart([b"", start])
    assert seqs(asker.receive()) == list(range(int.from_bytes(start, "big"), 5))


def test_a_req_socket_gets_its_first_reply(context: Context, make: Make) -> None:
    publisher = make(3, dialect="vllm-0.9.1")
    with context.socket(zmq.REQ) as request:
        request.connect(str(publisher.replay_endpoint))
        request.send((2).to_bytes(8, "big"))
        assert request.poll(int(PATIENCE * 1000))
        assert request.recv_multipart()[0] == (2).to_bytes(8, "big")


@pytest.mark.parametrize(
    "frames",
    [[b""], [bytes(8)], [b"", b"", bytes(8)], [b"x", bytes(8)], [b"", bytes(1000)], [b"a"] * 500],
)
def test_a_malformed_request_is_counted_and_not_answered(
    context: Context, make: Make, frames: list[bytes]
) -> None:
    publisher = make(1)
    asker = Asker(context, publisher.replay_endpoint)
    asker.socket.send_multipart(frames)
    assert seqs(asker.replay(0)) == [0]  # the first thing that comes is the answer to this
    assert not asker.socket.poll(0)
    statistics = publisher.statistics()
    assert (statistics["replays_malformed"], statistics["replays_asked"]) == (1, 1)


def test_a_request_beyond_all_bounds_costs_its_sender_the_connection(
    context: Context, make: Make
) -> None:
    publisher = make(1)
    hostile = Asker(context, publisher.replay_endpoint)
    hostile.socket.send_multipart([b"", bytes(10_000_000)])
    assert seqs(Asker(context, publisher.replay_endpoint).replay(0)) == [0]
    assert publisher.statistics()["failed"] == 0


def test_a_long_replay_is_lossless_while_live_goes_on(context: Context, make: Make) -> None:
    publisher = make(9000)
    live = Live(context, publisher.endpoint)
    first = live.join(publisher)
    asker = Asker(context, publisher.replay_endpoint)
    asker.ask(0)
    thread = threading.Thread(target=publish_many, args=(publisher, 1000))
    thread.start()
    replayed = seqs(asker.receive())
    assert replayed == list(range(len(replayed)))
    assert len(replayed) >= 9000
    assert [live.receive().seq for _ in range(1000)] == list(range(first, first + 1000))
    thread.join(PATIENCE)


def test_a_reader_that_pauses_loses_nothing_and_stops_nobody(context: Context, make: Make) -> None:
    publisher = make()
    live = Live(context, publisher.endpoint)
    live.join(publisher)
    big = batch(blocks=64)
    for _ in range(4500):
        publisher.publish(big)
    wait_until(lambda: publisher.statistics()["queued"] == 0, "all is sent")
    paused = Asker(context, None)
    paused.socket.set_hwm(10)
    paused.socket.connect(str(publisher.replay_endpoint))
    paused.ask(0)

    def replayed() -> int:
        return publisher.statistics()["replayed_batches"]

    wait_until(lambda: replayed() > 500, "the replay began")
    assert len(Asker(context, publisher.replay_endpoint).replay(0)) > 4500
    last = publisher.next_seq
    publisher.publish(batch(1))
    while live.receive().seq < last:
        pass
    assert publisher.statistics()["replays_active"] == 1, "the paused reader's queues held it all"
    assert seqs(paused.receive()) == list(range(last + 1))


def test_many_askers_at_once_are_each_served_whole(context: Context, make: Make) -> None:
    publisher = make(500)
    askers = [Asker(context, publisher.replay_endpoint) for _ in range(20)]
    for asker in askers:
        asker.ask(100)
    for asker in askers:
        assert seqs(asker.receive()) == list(range(100, 500))
    assert publisher.statistics()["replays_served"] == 20


def test_an_asker_that_goes_away_is_forgotten(context: Context, make: Make) -> None:
    publisher = make()
    big = batch(blocks=256)
    for _ in range(4000):
        publisher.publish(big)
    asker = Asker(context, publisher.replay_endpoint)
    asker.ask(0)
    asker.receive_frames()
    asker.socket.close(linger=0)
    wait_until(lambda: publisher.statistics()["replays_active"] == 0, "the replay is given up")
    assert publisher.statistics()["replays_unreachable"] == 1


def test_an_idle_publisher_answers_at_once(context: Context, make: Make) -> None:
    """The engines take up to 100 ms for each, since they look every 100 ms."""
    publisher = make(1)
    asker = Asker(context, publisher.replay_endpoint)
    asker.replay(END_SEQ)

    def took() -> float:
        began = time.monotonic()
        assert parse_replay(asker_frames(asker)).end
        return time.monotonic() - began

    # Each is asked just after a look: not one would be so quick.
    assert any(took() < 0.05 for _ in range(500))


def test_a_publisher_without_replay_endpoint_has_none(make: Make) -> None:
    publisher = make(3, replay_endpoint=None)
    assert publisher.replay_endpoint is None
    assert publisher.bound_replay_endpoint is None


def asker_frames(asker: Asker) -> list[bytes]:
    asker.ask(END_SEQ)
    return asker.receive_frames()
