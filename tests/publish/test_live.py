from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvindex.publish import EventPublisherFactory, KVEventsConfig, ZmqEventPublisher
from kvindex.wire import DIALECTS, AllBlocksCleared, EventBatch, decode_batch, dialect
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ClosedError, ConfigurationError
from tests.live import PATIENCE
from tests.publish.publish_peers import (
    Asker,
    Context,
    Live,
    batch,
    seqs,
    wait_until,
)
from tests.publish.raw_peers import RawPeer

pytestmark = pytest.mark.e2e

Make = Callable[..., ZmqEventPublisher]


@pytest.fixture
def make(context: Context) -> Iterator[Make]:
    made: list[ZmqEventPublisher] = []

    def make(**arguments: Any) -> ZmqEventPublisher:
        usual: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:0", "context": context}
        made.append(ZmqEventPublisher(**(usual | arguments)))
        return made[-1]

    yield make
    for publisher in made:
        publisher.shutdown(timeout=0.0)


def test_a_live_message_is_topic_seq_payload(context: Context, make: Make) -> None:
    publisher = make(topic="kv@pod@model", data_parallel_rank=3)
    live = Live(context, publisher.endpoint, topic=b"kv@pod")
    first = live.join(publisher)
    publisher.publish(batch(7))
    assert live.socket.poll(int(PATIENCE * 1000))
    topic, seq, payload = live.socket.recv_multipart()
    assert (topic, seq) == (b"kv@pod@model", first.to_bytes(8, "big"))
    assert decode_batch(payload).ts == 7.0
    assert decode_batch(payload).data_parallel_rank == 3


def test_batches_arrive_in_order_with_numbers_without_a_hole(context: Context, make: Make) -> None:
    publisher = make()
    live = Live(context, publisher.endpoint)
    first = live.join(publisher)
    for number in range(2000):
        publisher.publish(batch(number))
    received = [live.receive() for _ in range(2000)]
    assert [frame.seq for frame in received] == list(range(first, first + 2000))
    assert [decode_batch(frame.payload).ts for frame in received] == list(map(float, range(2000)))


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_spoken(context: Context, make: Make, name: str) -> None:
    publisher = make(dialect=name, replay_endpoint="tcp://127.0.0.1:0", data_parallel_rank=1)
    publisher.publish(EventBatch(ts=1.0, events=[AllBlocksCleared()]))
    asker = Asker(context, publisher.replay_endpoint)
    asker.ask(0)
    spoken = dialect(name)
    assert len(asker.receive_frames()) == len(asker.receive_frames()) == 3 + spoken.replay_topic
    payload = msgspec.msgpack.decode(asker.replay(0)[0].payload)
    assert len(payload) == 2 + spoken.has_dp_rank
    cleared = {"type": "AllBlocksCleared"} if spoken.form == "map" else ["AllBlocksCleared"]
    assert payload[1] == [cleared]


def test_a_rank_that_the_batch_names_is_kept(context: Context, make: Make) -> None:
    publisher = make(attn_dp_rank=2, replay_endpoint="tcp://127.0.0.1:0")
    publisher.publish(EventBatch(ts=0.0, events=[], data_parallel_rank=5))
    publisher.publish(EventBatch(ts=0.0, events=[]))
    replies = Asker(context, publisher.replay_endpoint).replay(0)
    assert [decode_batch(reply.payload).dp_rank for reply in replies[:-1]] == [5, 2]


def test_a_batch_that_cannot_be_encoded_leaves_a_hole(context: Context, make: Make) -> None:
    publisher = make(dialect="vllm-0.9.0", replay_endpoint="tcp://127.0.0.1:0")
    for events in ([], ["nonsense"], []):
        publisher.publish(EventBatch(ts=0.0, events=events))  # type: ignore[arg-type]
    wait_until(lambda: publisher.statistics()["sent"] == 2, "both good batches are sent")
    assert seqs(Asker(context, publisher.replay_endpoint).replay(0)) == [0, 2]
    statistics = publisher.statistics()
    assert (statistics["encode_errors"], statistics["next_seq"]) == (1, 3)
    assert statistics["published"] == 3


def test_other_than_a_batch_is_refused_at_the_call(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="not list"):
        make().publish([AllBlocksCleared()])  # type: ignore[arg-type]


def test_a_closed_publisher_refuses_batches(make: Make) -> None:
    publisher = make()
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="closed") as caught:
        publisher.publish(batch())
    assert isinstance(caught.value, ClosedError)


def test_big_batches_pass_unharmed(context: Context, make: Make) -> None:
    publisher = make(replay_endpoint="tcp://127.0.0.1:0")
    live = Live(context, publisher.endpoint)
    first = live.join(publisher)
    big = batch(1, blocks=4096)
    publisher.publish(big)
    received = live.receive()
    assert len(received.payload) > 64 * 1024
    assert decode_batch(received.payload).events == big.events
    assert Asker(context, publisher.replay_endpoint).replay(first)[0].payload == received.payload


def test_a_full_queue_that_drops_shows_a_gap_of_the_counted_size(
    context: Context, make: Make
) -> None:
    publisher = make(max_queue_size=2, on_full="drop", replay_endpoint="tcp://127.0.0.1:0")
    for _ in range(3):
        for number in range(500):
            publisher.publish(batch(number, blocks=256))
    wait_until(lambda: publisher.statistics()["queued"] == 0, "the queue is empty")
    statistics = publisher.statistics()
    assert statistics["dropped_queue_full"] > 0
    assert statistics["published"] + statistics["dropped_queue_full"] == 1500
    assert publisher.next_seq == 1500
    held = seqs(Asker(context, publisher.replay_endpoint).replay(0))
    assert len(held) == 1500 - statistics["dropped_queue_full"]
    assert held == sorted(set(held))


def test_inproc_serves_one_process_and_has_a_suffix_per_rank(context: Context, make: Make) -> None:
    name = f"inproc://kvindex-test-{id(context)}"
    publisher = make(endpoint=name, replay_endpoint=f"{name}-replay", data_parallel_rank=1)
    assert publisher.endpoint == f"{name}_dp1"
    live = Live(context, publisher.endpoint)
    first = live.join(publisher)
    publisher.publish(batch(1))
    publisher.shutdown()
    assert live.receive().seq == first


def test_a_concrete_host_is_connected_to(context: Context, make: Make) -> None:
    live = Live(context, None)
    port = live.socket.bind_to_random_port("tcp://127.0.0.1")
    publisher = make(endpoint=f"tcp://127.0.0.1:{port}")
    live.join(publisher)
    assert publisher.endpoint == f"tcp://127.0.0.1:{port}"


def test_bind_overrides_the_rule(context: Context, make: Make) -> None:
    name = f"inproc://kvindex-test-{id(context)}"
    live = Live(context, None)
    live.socket.bind(name)
    live.join(make(endpoint=name, bind=False))


def test_a_wildcard_with_a_port_of_the_os_is_shown(context: Context, make: Make) -> None:
    for rank in (0, 1):
        publisher = make(endpoint="tcp://*:0", data_parallel_rank=rank)
        assert publisher.bound_endpoint.startswith("tcp://0.0.0.0:")
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        Live(context, publisher.endpoint).join(publisher)


def test_a_port_in_use_is_reported_with_the_known_collision(context: Context, make: Make) -> None:
    first = make(replay_endpoint="tcp://127.0.0.1:0")
    port = int(str(first.replay_endpoint).rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=f"rank 1.*port {port} already.*5557 and 5558"):
        make(endpoint=f"tcp://127.0.0.1:{port - 1}", data_parallel_rank=1, bind=True)


def test_a_failed_constructor_leaves_nothing_open(context: Context, make: Make) -> None:
    taken = make(replay_endpoint="tcp://127.0.0.1:0").replay_endpoint
    name = f"inproc://kvindex-test-{id(context)}"
    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match="the replay endpoint of rank 0"):
        make(endpoint=name, replay_endpoint=taken)
    assert threading.active_count() == threads

    def is_free() -> bool:
        with context.socket(zmq.PUB) as other:
            try:
                other.bind(name)
            except zmq.ZMQError:
                return False
            return True

    wait_until(is_free, "the live endpoint of the failed one can be bound again")


def test_the_factory_makes_a_publisher_that_speaks(context: Context) -> None:
    config = KVEventsConfig(
        publisher="zmq", endpoint="tcp://127.0.0.1:0", dialect="sglang-0.5.18", topic="kv"
    )
    with EventPublisherFactory.create(config, attn_dp_rank=1) as publisher:
        assert isinstance(publisher, ZmqEventPublisher)
        assert publisher.dialect.name == "sglang-0.5.18"
        assert publisher.attn_dp_rank == 1
        Live(context, publisher.endpoint, topic=b"kv").join(publisher)


def test_curve_clients_with_the_servers_key_are_served(context: Context, make: Make) -> None:
    keys = Curve.generate()
    publisher = make(replay_endpoint="tcp://127.0.0.1:0", curve=keys)
    live, asker = Live(context, None), Asker(context, None)
    for socket in (live.socket, asker.socket):
        Curve.generate(keys.public_key).configure(socket)
    live.socket.connect(publisher.endpoint)
    asker.socket.connect(str(publisher.replay_endpoint))
    first = live.join(publisher)
    assert seqs(asker.replay(0)) == list(range(first))
    # A client without keys is kept out.
    assert not live_without_keys(context, publisher)


def live_without_keys(context: Context, publisher: ZmqEventPublisher) -> bool:
    plain = Live(context, None)
    monitor = plain.socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )
    with monitor:
        plain.socket.connect(publisher.endpoint)
        assert monitor.poll(int(PATIENCE * 1000))
        event = recv_monitor_message(monitor)["event"]
        plain.socket.disable_monitor()
    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_a_publisher_refuses_the_keys_of_a_client(make: Make) -> None:
    server = Curve.generate()
    for curve in (Curve.generate(server.public_key), server.public_key):
        with pytest.raises(ConfigurationError, match="own key pair"):
            make(curve=curve)


@pytest.mark.parametrize("replayed", [False, True], ids=["live", "replay"])
def test_a_peer_that_sends_too_much_is_hung_up_on(
    context: Context, make: Make, replayed: bool
) -> None:
    publisher = make(replay_endpoint="tcp://127.0.0.1:0")
    live = Live(context, publisher.endpoint)
    seq = live.join(publisher)
    endpoint = publisher.replay_endpoint if replayed else publisher.endpoint
    assert endpoint is not None
    with RawPeer(endpoint) as peer:
        peer.ready(b"DEALER" if replayed else b"SUB")
        peer.frame(b"\x01", length=8192)  # the rest would only have to be stored
        peer.wait_closed()
    publisher.publish(batch())
    assert live.receive().seq == seq


def test_a_subscription_to_a_long_topic_is_served(context: Context, make: Make) -> None:
    topic = "kv@" + "p" * 3500
    publisher = make(topic=topic)
    live = Live(context, publisher.endpoint, topic=topic.encode())
    live.join(publisher)
