"""Batches live and replayed, as peers of a publisher see them."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvindex.publish import EventPublisherFactory, KVEventsConfig, ZmqEventPublisher
from kvindex.wire import (
    DIALECTS,
    END_SEQ,
    AllBlocksCleared,
    EventBatch,
    decode_batch,
    dialect,
    parse_replay,
)
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ClosedError, ConfigurationError
from tests.live import PATIENCE, until
from tests.publish.publish_peers import Asker, Live, Peers, batch, publish_many, seqs
from tests.publish.raw_peers import RawPeer

pytestmark = pytest.mark.e2e

# Live --------------------------------------------------------------------------------------------


def test_a_live_message_is_topic_seq_payload_however_long_the_topic(peers: Peers) -> None:
    topic = "kv@" + "p" * 3500
    publisher = peers.publisher(topic=topic, data_parallel_rank=3)
    assert publisher.replay_endpoint is None
    assert publisher.bound_replay_endpoint is None
    live, first = peers.joined(publisher, topic=topic[:-1].encode())
    publisher.publish(batch(7))
    assert live.socket.poll(int(PATIENCE * 1000))
    *frames, payload = live.socket.recv_multipart()
    assert frames == [topic.encode(), first.to_bytes(8, "big")]
    assert decode_batch(payload).ts == 7.0
    assert decode_batch(payload).data_parallel_rank == 3


@pytest.mark.parametrize("room", [100_000, 2], ids="{} may wait".format)
def test_batches_arrive_in_order_with_numbers_without_a_hole(peers: Peers, room: int) -> None:
    publisher = peers.publisher(max_queue_size=room)
    live, first = peers.joined(publisher)
    publish_many(publisher, 2000)
    received = [live.receive() for _ in range(2000)]
    assert [frame.seq for frame in received] == list(range(first, first + 2000))
    assert [decode_batch(frame.payload).ts for frame in received] == list(map(float, range(2000)))


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_spoken(peers: Peers, name: str) -> None:
    publisher = peers.replaying(dialect=name, data_parallel_rank=1)
    publisher.publish(EventBatch(ts=1.0, events=[AllBlocksCleared()]))
    asker = peers.asker(publisher)
    asker.ask(0)
    spoken = dialect(name)
    assert len(asker.receive_frames()) == len(asker.receive_frames()) == 3 + spoken.replay_topic
    payload = msgspec.msgpack.decode(asker.replay(0)[0].payload)
    assert len(payload) == 2 + spoken.has_dp_rank
    cleared = {"type": "AllBlocksCleared"} if spoken.form == "map" else ["AllBlocksCleared"]
    assert payload[1] == [cleared]


def test_a_rank_that_the_batch_names_is_kept(peers: Peers) -> None:
    publisher = peers.replaying(attn_dp_rank=2)
    publisher.publish(EventBatch(ts=0.0, events=[], data_parallel_rank=5))
    publisher.publish(EventBatch(ts=0.0, events=[]))
    replies = peers.asker(publisher).replay(0)
    assert [decode_batch(reply.payload).dp_rank for reply in replies[:-1]] == [5, 2]


def test_a_batch_that_cannot_be_encoded_leaves_a_hole(peers: Peers) -> None:
    publisher = peers.replaying(dialect="vllm-0.9.0")
    for events in ([], ["nonsense"], []):
        publisher.publish(EventBatch(ts=0.0, events=events))  # type: ignore[arg-type]
    until(lambda: publisher.statistics()["sent"] == 2)
    assert peers.replayed(publisher) == [0, 2]
    statistics = publisher.statistics()
    assert (statistics["encode_errors"], statistics["next_seq"]) == (1, 3)
    assert statistics["published"] == 3


def test_a_closed_publisher_refuses_batches_and_an_open_one_what_is_none(peers: Peers) -> None:
    publisher = peers.publisher()
    with pytest.raises(ConfigurationError, match="not list"):
        publisher.publish([AllBlocksCleared()])  # type: ignore[arg-type]
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="closed") as caught:
        publisher.publish(batch())
    assert isinstance(caught.value, ClosedError)


def test_a_full_queue_that_drops_shows_a_gap_of_the_counted_size(peers: Peers) -> None:
    publisher = peers.replaying(max_queue_size=2, on_full="drop")
    for _ in range(3):
        for number in range(500):
            publisher.publish(batch(number, blocks=256))
    until(lambda: publisher.statistics()["queued"] == 0)
    statistics = publisher.statistics()
    assert statistics["dropped_queue_full"] > 0
    assert statistics["published"] + statistics["dropped_queue_full"] == 1500
    assert publisher.next_seq == 1500
    held = peers.replayed(publisher)
    assert len(held) == 1500 - statistics["dropped_queue_full"]
    assert held == sorted(set(held))


def test_inproc_serves_one_process_and_has_a_suffix_per_rank(peers: Peers) -> None:
    name = f"inproc://kvindex-test-{id(peers.context)}"
    publisher = peers.publisher(
        endpoint=name, replay_endpoint=f"{name}-replay", data_parallel_rank=1
    )
    assert publisher.endpoint == f"{name}_dp1"
    live, first = peers.joined(publisher)
    publisher.publish(batch(1))
    publisher.shutdown()
    assert live.receive().seq == first


@pytest.mark.parametrize("options", [{}, {"bind": False}], ids=["concrete host", "as told"])
def test_a_concrete_host_and_whatever_must_not_be_bound_are_connected_to(
    peers: Peers, options: dict[str, Any]
) -> None:
    live = Live(peers.context, None)
    live.socket.bind(f"inproc://kvindex-test-{id(peers)}" if options else "tcp://127.0.0.1:*")
    endpoint = live.socket.get_string(zmq.LAST_ENDPOINT)
    publisher = peers.publisher(endpoint=endpoint, **options)
    live.join(publisher)
    assert publisher.endpoint == endpoint


def test_a_wildcard_with_a_port_of_the_os_is_shown(peers: Peers) -> None:
    for rank in (0, 1):
        publisher = peers.publisher(endpoint="tcp://*:0", data_parallel_rank=rank)
        assert publisher.bound_endpoint.startswith("tcp://0.0.0.0:")
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        peers.live(publisher).join(publisher)


def test_a_port_in_use_is_reported_with_the_known_collision(peers: Peers) -> None:
    first = peers.replaying()
    port = int(str(first.replay_endpoint).rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=f"rank 1.*port {port} already.*5557 and 5558"):
        peers.publisher(endpoint=f"tcp://127.0.0.1:{port - 1}", data_parallel_rank=1, bind=True)


def test_a_failed_constructor_leaves_nothing_open(peers: Peers) -> None:
    taken = peers.replaying().replay_endpoint
    name = f"inproc://kvindex-test-{id(peers.context)}"
    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match="the replay endpoint of rank 0"):
        peers.publisher(endpoint=name, replay_endpoint=taken)
    assert threading.active_count() == threads

    def is_free() -> bool:
        with peers.context.socket(zmq.PUB) as other:
            try:
                other.bind(name)
            except zmq.ZMQError:
                return False
            return True

    until(is_free)


def test_the_factory_makes_a_publisher_that_speaks(peers: Peers) -> None:
    config = KVEventsConfig(
        publisher="zmq", endpoint="tcp://127.0.0.1:0", dialect="sglang-0.5.18", topic="kv"
    )
    with EventPublisherFactory.create(config, attn_dp_rank=1) as publisher:
        assert isinstance(publisher, ZmqEventPublisher)
        assert publisher.dialect.name == "sglang-0.5.18"
        assert publisher.attn_dp_rank == 1
        peers.live(publisher, topic=b"kv").join(publisher)


def test_curve_clients_with_the_servers_key_are_served(peers: Peers) -> None:
    keys = Curve.generate()
    publisher = peers.replaying(curve=keys)
    live, asker = Live(peers.context, None), Asker(peers.context, None)
    for socket in (live.socket, asker.socket):
        Curve.generate(keys.public_key).configure(socket)
    live.socket.connect(publisher.endpoint)
    asker.socket.connect(str(publisher.replay_endpoint))
    first = live.join(publisher)
    assert seqs(asker.replay(0)) == list(range(first))
    # A client without keys is kept out.
    assert not live_without_keys(peers, publisher)


def live_without_keys(peers: Peers, publisher: ZmqEventPublisher) -> bool:
    plain = Live(peers.context, None)
    monitor = plain.socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )
    with monitor:
        plain.socket.connect(publisher.endpoint)
        assert monitor.poll(int(PATIENCE * 1000))
        event = recv_monitor_message(monitor)["event"]
        plain.socket.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_a_publisher_refuses_the_keys_of_a_client(peers: Peers) -> None:
    server = Curve.generate()
    for curve in (Curve.generate(server.public_key), server.public_key):
        with pytest.raises(ConfigurationError, match="own key pair"):
            peers.publisher(curve=curve)


@pytest.mark.parametrize("replayed", [False, True], ids=["live", "replay"])
def test_a_peer_that_sends_too_much_is_hung_up_on(peers: Peers, replayed: bool) -> None:
    publisher = peers.replaying()
    live, seq = peers.joined(publisher)
    endpoint = publisher.replay_endpoint if replayed else publisher.endpoint
    assert endpoint is not None
    with RawPeer(endpoint) as peer:
        peer.ready(b"DEALER" if replayed else b"SUB")
        peer.frame(b"\x01", length=8192)  # the rest would only have to be stored
        peer.wait_closed()
    publisher.publish(batch())
    assert live.receive().seq == seq


# Replayed ----------------------------------------------------------------------------------------


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
