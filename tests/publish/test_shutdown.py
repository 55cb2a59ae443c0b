from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import zmq

from kvindex.publish import ZmqEventPublisher
from kvindex.wire import decode_batch
from kvindex.wire.errors import ClosedError, ConfigurationError
from tests.children import Program
from tests.live import PATIENCE, until
from tests.publish.publish_peers import ANY_PORT, Context, Live, Peers, batch, publish_many

pytestmark = pytest.mark.e2e

PUBLISH_AND_END = """
import sys
from kvindex.publish import ZmqEventPublisher
from kvindex.wire import BlockStored, EventBatch

ZmqEventPublisher.SHUTDOWN_TIMEOUT = 120.0  # a loaded machine may need more than the usual
publisher = ZmqEventPublisher(endpoint="tcp://127.0.0.1:0")
print(publisher.endpoint, flush=True)
for line in sys.stdin:
    if line == "end\\n":
        break
    publisher.publish(EventBatch(ts=0.0, events=[]))
stored = BlockStored(block_hashes=[1], token_ids=list(range(5000)), block_size=5000)
for number in range(1, 1501):
    publisher.publish(EventBatch(ts=float(number), events=[stored]))
"""


def test_shutdown_sends_what_waits(peers: Peers) -> None:
    publisher = peers.publisher()
    live, first = peers.joined(publisher)
    publish_many(publisher, 3000)
    publisher.shutdown(timeout=PATIENCE)
    assert [live.receive().seq for _ in range(3000)] == list(range(first, first + 3000))
    assert publisher.statistics()["unsent_at_shutdown"] == 0
    assert publisher.statistics()["sent"] == first + 3000


def test_shutdown_without_time_counts_what_it_leaves(peers: Peers) -> None:
    publisher = peers.publisher()
    many, large = 20_000, batch(blocks=64)
    for _ in range(many):  # far quicker queued than sent
        publisher.publish(large)
    publisher.shutdown(timeout=0.0)
    statistics = publisher.statistics()
    assert statistics["unsent_at_shutdown"] > 0
    assert statistics["sent"] + statistics["unsent_at_shutdown"] == many


def test_a_subscriber_that_does_not_read_delays_shutdown_no_longer_than_the_timeout(
    peers: Peers,
) -> None:
    publisher = peers.publisher()
    stuck = Live(peers.context, None)
    stuck.socket.setsockopt(zmq.RCVBUF, 4096)
    stuck.socket.set_hwm(1)
    stuck.socket.connect(publisher.endpoint)
    stuck.join(publisher)
    big = batch(blocks=1024)
    for _ in range(500):
        publisher.publish(big)
    until(lambda: publisher.statistics()["queued"] == 0)
    began = time.monotonic()
    publisher.shutdown(timeout=0.3)
    assert 0.25 < time.monotonic() - began < PATIENCE


def test_shutdown_is_idempotent_and_may_be_called_by_many(peers: Peers) -> None:
    publisher = peers.publisher()
    threads = [threading.Thread(target=publisher.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    publisher.shutdown()
    with publisher:
        pass
    with pytest.raises(ConfigurationError, match="timeout"):
        publisher.shutdown(timeout=-1.0)


def test_shutdown_frees_the_ports(peers: Peers) -> None:
    first = peers.replaying()
    with first, peers.publisher():
        endpoint, replay_endpoint = first.endpoint, first.replay_endpoint

    def is_free() -> bool:
        try:
            peers.publisher(endpoint=endpoint, replay_endpoint=replay_endpoint, bind=True)
        except ConfigurationError:
            return False
        return True

    until(is_free)  # libzmq unbinds in its own time


def test_a_replay_under_way_is_finished(peers: Peers) -> None:
    publisher = peers.replaying()
    publish_many(publisher, 2000)
    asker = peers.asker(publisher)
    asker.ask(0)
    asker.receive_frames()
    thread = threading.Thread(target=publisher.shutdown, args=(PATIENCE,))
    thread.start()
    assert len(asker.receive()) == 2000
    thread.join(PATIENCE)


def test_a_publisher_that_waits_for_room_is_released_by_shutdown(peers: Peers) -> None:
    publisher = peers.publisher(max_queue_size=1)
    ended: list[str] = []

    def publish_for_ever() -> None:
        try:
            while True:
                publisher.publish(batch(blocks=64))
        except ClosedError as error:
            ended.append(str(error))

    thread = threading.Thread(target=publish_for_ever)
    thread.start()
    until(lambda: publisher.statistics()["sent"] > 10)
    publisher.shutdown()
    thread.join(PATIENCE)
    assert ended == ["the publisher is closed"]


def test_batches_of_the_last_moment_leave_at_exit(peers: Peers) -> None:
    with Program("-c", PUBLISH_AND_END) as program:
        live = Live(peers.context, None)
        live.socket.set_hwm(10)  # so that much is still on its way when the process ends
        live.socket.connect(program.line().strip())
        until = time.monotonic() + PATIENCE
        while not live.socket.poll(5):
            assert time.monotonic() < until, "the subscription did not reach the publisher"
            program.tell()
        program.tell("end")
        frames = [live.receive()]
        while decode_batch(frames[-1].payload).ts < 1500.0:
            frames.append(live.receive())
        assert program.process.wait(PATIENCE) == 0
    assert len(frames) >= 1500
    assert [frame.seq for frame in frames] == list(range(frames[0].seq, frames[-1].seq + 1))


def test_a_forgotten_publisher_is_closed_when_it_is_collected(peers: Peers) -> None:
    publisher = ZmqEventPublisher(endpoint=ANY_PORT, context=peers.context)
    live, first = peers.joined(publisher)
    publisher.publish(batch())
    reference, thread = weakref.ref(publisher), publisher._loop._thread
    del publisher
    gc.collect()
    assert reference() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert live.receive().seq == first


@pytest.mark.parametrize("replay_endpoint", [None, "tcp://127.0.0.1:0"])
def test_a_terminated_context_stops_the_publisher_with_a_reason(
    replay_endpoint: str | None,
) -> None:
    context: Context = zmq.Context()
    publisher = ZmqEventPublisher(
        endpoint="tcp://127.0.0.1:0", replay_endpoint=replay_endpoint, context=context
    )
    term = threading.Thread(target=context.term)
    term.start()
    term.join(PATIENCE)
    assert not term.is_alive(), "the publisher keeps the context from ending"
    for _ in range(2):
        with pytest.raises(ClosedError, match="context was terminated"):
            publisher.publish(batch())
        assert publisher.statistics()["failed"] == 1
        publisher.shutdown()
