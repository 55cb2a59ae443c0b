from __future__ import annotations

import threading
import time

import pytest
import zmq

from kvindex.wire import END_SEQ, decode_batch, parse_replay
from tests.live import PATIENCE, until
from tests.publish.publish_peers import Asker, Peers, batch, publish_many, seqs

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("vllm-0.24.0", [b"", b"\xff" * 8, b""]),
        ("sglang-0.5.20", [b"", b"\xff" * 8, b""]),
        ("vllm-0.26.0", [b"", b"", b"\xff" * 8, b""]),
        ("sglang-0.5.22", [b"", b"", b"\xff" * 8, b""]),
    ],
)
def test_both_shapes_of_a_replay(peers: Peers, name: str, end: list[bytes]) -> None:
    publisher = peers.replaying(2, dialect=name, topic="kv")
    asker = peers.asker(publisher)
    asker.ask(1)
    topic = [b"kv"] if len(end) == 4 else []
    assert asker.receive_frames()[:-1] == [b"", *topic, bytes(7) + b"\x01"]
    assert asker.receive_frames() == end
    assert end[-2] == publisher.END_SEQ


def test_the_replayed_payload_is_the_one_sent_live_however_big(peers: Peers) -> None:
    publisher = peers.replaying()
    live, first = peers.joined(publisher)
    big = batch(1, blocks=4096)
    publisher.publish(big)
    publish_many(publisher, 20)
    sent = [live.receive().payload for _ in range(21)]
    assert len(sent[0]) > 64 * 1024
    assert decode_batch(sent[0]).events == big.events
    replies = peers.asker(publisher).replay(first)
    assert [reply.payload for reply in replies[:-1]] == sent


def test_what_left_the_buffer_is_not_replayed(peers: Peers) -> None:
    publisher = peers.replaying(25, buffer_steps=10)
    assert peers.replayed(publisher) == list(range(15, 25))
    assert publisher.statistics()["buffered"] == 10


@pytest.mark.parametrize("start", [b"", b"\x03", bytes(20), bytes(12) + b"\x03"])
def test_a_start_of_any_length_is_read_as_the_engines_read_it(peers: Peers, start: bytes) -> None:
    publisher = peers.replaying(5)
    asker = peers.asker(publisher)
    asker.socket.send_multipart([b"", start])
    assert seqs(asker.receive()) == list(range(int.from_bytes(start, "big"), 5))


def test_a_req_socket_gets_its_first_reply(peers: Peers) -> None:
    publisher = peers.replaying(3, dialect="vllm-0.9.1")
    with peers.context.socket(zmq.REQ) as request:
        request.connect(str(publisher.replay_endpoint))
        request.send((2).to_bytes(8, "big"))
        assert request.poll(int(PATIENCE * 1000))
        assert request.recv_multipart()[0] == (2).to_bytes(8, "big")


@pytest.mark.parametrize(
    "frames",
    [[b""], [bytes(8)], [b"", b"", bytes(8)], [b"x", bytes(8)], [b"", bytes(1000)], [b"a"] * 500],
)
def test_a_malformed_request_is_counted_and_not_answered(peers: Peers, frames: list[bytes]) -> None:
    publisher = peers.replaying(1)
    asker = peers.asker(publisher)
    asker.socket.send_multipart(frames)
    assert seqs(asker.replay(0)) == [0]  # the first thing that comes is the answer to this
    assert not asker.socket.poll(0)
    statistics = publisher.statistics()
    assert (statistics["replays_malformed"], statistics["replays_asked"]) == (1, 1)


def test_a_request_beyond_all_bounds_costs_its_sender_the_connection(peers: Peers) -> None:
    publisher = peers.replaying(1)
    hostile = peers.asker(publisher)
    hostile.socket.send_multipart([b"", bytes(10_000_000)])
    assert peers.replayed(publisher) == [0]
    assert publisher.statistics()["failed"] == 0


def test_a_long_replay_is_lossless_while_live_goes_on(peers: Peers) -> None:
    publisher = peers.replaying(9000)
    live, first = peers.joined(publisher)
    asker = peers.asker(publisher)
    asker.ask(0)
    thread = threading.Thread(target=publish_many, args=(publisher, 1000))
    thread.start()
    replayed = seqs(asker.receive())
    assert replayed == list(range(len(replayed)))
    assert len(replayed) >= 9000
    assert [live.receive().seq for _ in range(1000)] == list(range(first, first + 1000))
    thread.join(PATIENCE)


def test_a_reader_that_pauses_loses_nothing_and_stops_nobody(peers: Peers) -> None:
    publisher = peers.replaying()
    live, _ = peers.joined(publisher)
    big = batch(blocks=64)
    for _ in range(4500):
        publisher.publish(big)
    until(lambda: publisher.statistics()["queued"] == 0)
    paused = Asker(peers.context, None)
    paused.socket.set_hwm(10)
    paused.socket.connect(str(publisher.replay_endpoint))
    paused.ask(0)

    def replayed() -> int:
        return publisher.statistics()["replayed_batches"]

    until(lambda: replayed() > 500)
    assert len(peers.asker(publisher).replay(0)) > 4500
    last = publisher.next_seq
    publisher.publish(batch(1))
    while live.receive().seq < last:
        pass
    assert publisher.statistics()["replays_active"] == 1, "the paused reader's queues held it all"
    assert seqs(paused.receive()) == list(range(last + 1))


def test_many_askers_at_once_are_each_served_whole(peers: Peers) -> None:
    publisher = peers.replaying(500)
    askers = [peers.asker(publisher) for _ in range(20)]
    for asker in askers:
        asker.ask(100)
    for asker in askers:
        assert seqs(asker.receive()) == list(range(100, 500))
    assert publisher.statistics()["replays_served"] == 20


def test_an_asker_that_goes_away_is_forgotten(peers: Peers) -> None:
    publisher = peers.replaying()
    big = batch(blocks=256)
    for _ in range(4000):
        publisher.publish(big)
    asker = peers.asker(publisher)
    asker.ask(0)
    asker.receive_frames()
    asker.socket.close(linger=0)
    until(lambda: publisher.statistics()["replays_active"] == 0)
    assert publisher.statistics()["replays_unreachable"] == 1


def test_an_idle_publisher_answers_at_once(peers: Peers) -> None:
    """The engines take up to 100 ms for each, since they look every 100 ms."""
    publisher = peers.replaying(1)
    asker = peers.asker(publisher)
    asker.replay(END_SEQ)

    def took() -> float:
        began = time.monotonic()
        asker.ask(END_SEQ)
        assert parse_replay(asker.receive_frames()).end
        return time.monotonic() - began

    # Each is asked just after a look: not one would be so quick.
    assert any(took() < 0.05 for _ in range(500))
