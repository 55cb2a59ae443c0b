"""What goes wrong ends with its own rank: bad publishers, scans, sinks, calls at bad moments."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import NoReturn

import pytest
import zmq

import kvindex.subscribe.subscriber as subscriber_module
import kvindex.subscribe.subscriber_thread as thread_module
from kvindex import (
    BusyError,
    ClosedError,
    EventStream,
    Rank,
    SocketOptions,
    State,
    Worker,
    ZmqEventPublisher,
    connect,
)
from kvindex.subscribe import RankAdded, RankBatch, StreamItem, Subscriber
from kvindex.subscribe import connection as connection_module
from kvindex.testing import FakeEngine, Faults, LaneFaults
from kvindex.testing.ports import reserve_port
from tests.children import Program
from tests.live import (
    PATIENCE,
    REPLAYS,
    assert_true,
    caught_up,
    client_of,
    link_to,
    until,
    wait_counter,
    wait_status,
    worker_of,
)
from tests.publish.publish_peers import Context
from tests.subscribe.peers import RANK, BlockingSink, RawPublisher, prompt, publish_until, stored

pytestmark = pytest.mark.faults


def test_rank_that_sends_garbage_among_eight_healthy_ones_harms_only_itself(
    context: Context,
) -> None:
    bad = RawPublisher(context)
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(f"good-{number}")) for number in range(8)]
        workers = [worker_of(engine) for engine in engines]
        client = stack.enter_context(client_of(Worker("bad", bad.endpoint), *workers))
        bad.wait_subscribed()
        bad.send(*_garbage())
        for number, engine in enumerate(engines):
            for turn in range(5):
                engine.serve(prompt(number * 10 + turn))
        caught_up(client, *engines)
        assert_true(client, *engines)
        wait_counter(client, Rank("bad", 0), "decode_failures", at_least=len(_garbage()))
        assert client.statistics()["thread"].get("sink_failures", 0) == 0
        assert all(client.status(engine.rank).decode_failures == 0 for engine in engines)


def _garbage() -> list[list[bytes]]:
    zero = bytes(8)
    return [
        [b""],
        [b"", zero],
        [b"", zero, b""],
        [b"", b"\x01", b"\x90"],
        [b"", zero, b"\xc1" * 1000],
        [b"", zero, b"\xdd\xff\xff\xff\xff"],
        [b"", zero, b"\x93\xcb" + bytes(8) + b"\x91\x91\xabBlockStored\xc0"],
        [b"", zero, b"\x91" * 5000],
        [b"", zero, b"\x93", b"surplus"],
        [os.urandom(64), os.urandom(8), os.urandom(512)],
    ]


def test_publisher_killed_mid_batch_and_started_again_only_the_new_contents_are_answered() -> None:
    with publishing("tcp://*:0", "tcp://*:0", token=1) as (first, endpoint, replay):
        with client_of(Worker("engine", endpoint, replay=replay)) as client:

            def wait_published(epoch: int) -> None:
                until(lambda: client.status(RANK), lambda s: s.epoch >= epoch and (s.seq or 0) > 50)

            wait_published(epoch=0)
            first.kill()
            wait_status(client, RANK, connected=False)
            port, replay_port = (e.rpartition(":")[2] for e in (endpoint, replay))
            with publishing(f"tcp://*:{port}", f"tcp://*:{replay_port}", token=2):
                wait_published(epoch=1)
                assert client.match([1] * 16)[RANK].tokens == 0
                assert client.match([2] * 16)[RANK].tokens == 16
                client.index.check()


PUBLISHING = """
import sys, time
from kvindex import BlockStored, EventBatch, ZmqEventPublisher

token = int(sys.argv[3])
publisher = ZmqEventPublisher(endpoint=sys.argv[1], replay_endpoint=sys.argv[2])
print(publisher.endpoint, publisher.replay_endpoint, flush=True)
first = last = token * 10**9
while True:
    parent, last = last if last > first else None, last + 1
    stored = BlockStored(
        block_hashes=[last], parent_block_hash=parent, token_ids=[token] * 16, block_size=16
    )
    publisher.publish(EventBatch(ts=time.time(), events=[stored]))
    time.sleep(0.0005)  # a flood would outrun the replay buffer, and the root be lost
"""


@contextmanager
def publishing(endpoint: str, replay: str, *, token: int) -> Iterator[tuple[Program, str, str]]:
    """Run a process that publishes batches of this token; yield it, and both of its endpoints."""
    with Program("-c", PUBLISHING, endpoint, replay, str(token)) as program:
        live, replay = program.line().split()
        yield program, live, replay


def test_consumer_stalled_past_the_high_water_mark_loses_nothing_once_it_goes_on() -> None:
    sink = BlockingSink(lambda item: isinstance(item, RankBatch) and item.seq == 3)
    with (
        FakeEngine("engine", hwm=10, num_blocks=8192) as engine,
        Subscriber(
            [worker_of(engine)],
            sink=sink,
            replay_policy=REPLAYS,
            socket_options=SocketOptions(hwm=10, keepalive=1.0, keepalive_timeout=1.0),
            probe_interval=0.3,
        ) as subscriber,
    ):
        subscriber.wait_live(PATIENCE)
        for number in range(4):
            engine.serve(prompt(number))
        sink.wait_blocked()
        # Large batches: far more than 10 of them and than what the kernel's buffers hold.
        for number in range(300):
            engine.serve([number] * 8 + list(range(4000)))
            engine.clear()
        last = engine.published - 1
        threading.Event().wait(3.0)  # longer than the time-out of a dead connection
        sink.go_on.set()
        until(lambda: subscriber.status(RANK).seq == last)
        status = subscriber.status(RANK)
        assert (status.losses, status.restarts, status.complete) == (0, 0, True)
        assert "disconnects" not in status.counters
        # Seen as a gap, or only by a probe where the last batches are among the dropped.
        assert status.counters["replayed"] >= 1, "nothing was dropped: the test does not test"


def test_a_rank_that_floods_costs_others_nothing(context: Context, engine: FakeEngine) -> None:
    flooding, stop = RawPublisher(context, hwm=1), threading.Event()
    flooding.socket.setsockopt(zmq.XPUB_NODROP, 1)

    def flood() -> None:
        flooding.wait_subscribed()
        payload = bytes(1024 * 1024)
        for seq in count():
            flooding.send_batches(range(seq, seq + 1), payload)
            if stop.is_set():
                return

    with (
        client_of(Worker("bad", flooding.endpoint), worker_of(engine)) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        flooded = thread.submit(flood)
        wait_counter(client, Rank("bad", 0), "undecodable")
        for number in range(100):
            engine.serve(prompt(number))
        caught_up(client, engine)
        wait_counter(client, Rank("bad", 0), "undecodable", 100)
        stop.set()
        flooded.result(PATIENCE)
        assert_true(client, engine)
        status = client.status(engine.rank)
        assert (status.gaps, status.losses, status.complete) == (0, 0, True)


def test_drops_duplicates_delays_reorder_and_corruption_at_once_end_in_the_truth() -> None:
    bad = LaneFaults(drop=0.1, duplicate=0.1, reorder=0.1, delay=0.1, corrupt=0.1)
    faults = Faults(live=bad, replay=LaneFaults(drop=0.02, duplicate=0.02, corrupt=0.02))
    with ExitStack() as stack:
        engines = [
            stack.enter_context(FakeEngine("engine", dp_rank=rank, num_blocks=64))
            for rank in range(3)
        ]
        links = [
            stack.enter_context(link_to(engine, seed=seed)) for seed, engine in enumerate(engines)
        ]
        worker = Worker(
            "engine",
            [link.endpoint for link in links],
            replay=[str(link.replay_endpoint) for link in links],
        )
        client = stack.enter_context(client_of(worker))
        client.wait_live(PATIENCE)
        # Only now: a first reply lost at joining cannot be told from a buffer that has wrapped.
        for link in links:
            link.set_faults(faults)
        for number in range(150):
            for engine in engines:
                engine.serve([*prompt(number % 17), number])
        for link in links:
            link.quiesce()
        caught_up(client, *engines)
        assert_true(client, *engines, prompts=map(prompt, range(17)))
        for engine in engines:
            status = client.status(engine.rank)
            assert (status.epoch, status.losses, status.complete) == (0, 0, True), status


def test_publisher_whose_messages_are_too_large_twice_in_a_row_is_connected_to_again(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_STUCK_AFTER", 0.1)
    publisher = RawPublisher(context)
    # Announces each subscription, though the one before still counts.
    publisher.socket.setsockopt(zmq.XPUB_VERBOSER, 1)
    # The second connection does not last: its socket stays, and ZeroMQ leaves it unconnected.
    socket_options = SocketOptions(max_message_bytes=1024, max_reconnect=10 * PATIENCE)
    with client_of(Worker("engine", publisher.endpoint), socket_options=socket_options) as client:
        for disconnects in (1, 2):
            publisher.wait_subscribed()
            publisher.send([b"", bytes(8), bytes(4096)])
            wait_counter(client, RANK, "disconnects", disconnects)
        publisher.wait_subscribed()


LATE = Worker("late", "tcp://127.0.0.1:1")


def fail(*_: object) -> NoReturn:
    raise RuntimeError("a planted bug")


def publisher_of(dp_rank: int | None = None) -> ZmqEventPublisher:
    return ZmqEventPublisher(dp_rank, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls give up soon."""
    monkeypatch.setattr(subscriber_module, "_COMMAND_TIMEOUT", 0.2)


def test_port_scans_of_a_bound_endpoint_leave_its_publisher_connected() -> None:
    holder, port = reserve_port()
    with holder, client_of(Worker("engine", f"tcp://127.0.0.1:{port}", bind=True)) as client:
        with ZmqEventPublisher(endpoint=f"tcp://127.0.0.1:{port}") as publisher:
            wait_status(client, RANK, connected=True)
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", port)) as scan:
                    scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    scan.recv(1)
            publish_until(client, lambda n: publisher.publish(stored(n)), lambda s: s.seq)
            status = client.status(RANK)
            assert (status.connected, status.restarts) == (True, 0)


def test_a_feed_that_fails_ends_alone_and_says_so(
    engine: FakeEngine, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(worker_of(engine), worker_of(other)) as client:
        caught_up(client, engine, other)
        monkeypatch.setattr(client.subscriber._thread.roster.feeds[RANK], "pump", fail)
        engine.serve(prompt(1))
        assert "a planted bug" in wait_status(client, RANK, state=State.CLOSED).reason
        other.serve(prompt(2))
        caught_up(client, other)
        assert client.statistics()["thread"]["feed_failures"] == 1
        client.remove("engine")
        client.add(worker_of(engine))
        caught_up(client, engine)


def test_a_thread_that_fails_ends_every_wait_with_the_reason(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = EventStream([worker_of(engine)], replay_policy=REPLAYS)
    for number in range(5):
        engine.serve(prompt(number))
    last = engine.published - 1
    until(stream.subscriber.statuses, lambda s: s[RANK].seq == last)
    monkeypatch.setattr(stream.subscriber._thread, "_sleep", fail)
    stream.subscriber._thread._watch.wake()
    items: list[StreamItem] = []
    with pytest.raises(ClosedError, match=r"has ended: .*a planted bug"):
        items.extend(stream)
    assert [item.seq for item in items if isinstance(item, RankBatch)] == list(range(last + 1))
    with pytest.raises(ClosedError, match="a planted bug"):
        stream.get(0.0)
    with pytest.raises(ClosedError, match="a planted bug"):
        stream.subscriber.add(LATE)
    assert stream.subscriber.status(RANK).state is State.CLOSED
    stream.close()


def test_a_stream_with_room_for_fewer_items_than_ranks_can_be_made() -> None:
    worker = Worker("engine", "tcp://127.0.0.1:1", dp_size=5)
    with EventStream([worker], max_items=1) as stream:
        ranks = [stream.get(PATIENCE) for _ in range(5)]
        assert all(isinstance(item, RankAdded) for item in ranks)


@pytest.mark.usefixtures("impatient")
def test_closing_while_the_sink_is_stuck_returns_and_ends_when_the_sink_does(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sink, ended = BlockingSink(), threading.Event()
    subscriber = Subscriber(
        [worker_of(engine)], sink=sink, replay_policy=REPLAYS, on_stop=ended.set
    )
    engine.serve(prompt(1))
    sink.wait_blocked()
    subscriber.close()
    assert "has not returned" in caplog.text
    sink.go_on.set()
    assert ended.wait(PATIENCE)
    assert subscriber.status(RANK).state is State.CLOSED


def test_workers_can_be_added_and_removed_from_within_the_sink(
    engine: FakeEngine, other: FakeEngine
) -> None:
    items: list[StreamItem] = []

    def sink(item: StreamItem) -> None:
        items.append(item)
        if isinstance(item, RankBatch) and item.rank == RANK:
            subscriber.add(worker_of(other))
            subscriber.remove("engine")

    other.serve(prompt(2))
    with Subscriber(sink=sink, replay_policy=REPLAYS) as subscriber:
        subscriber.add(worker_of(engine))
        engine.serve(prompt(1))
        until(
            subscriber.statuses,
            lambda s: RANK not in s and other.rank in s and s[other.rank].seq == 0,
        )
    names = [type(item).__name__ for item in items if getattr(item, "rank", None) == RANK]
    assert names == ["RankAdded", "RankBatch", "RankRemoved"]


def test_a_renamed_rank_keeps_what_it_holds() -> None:
    second = Rank("engine", 1)
    with publisher_of() as silent, publisher_of(0) as named:
        silent.publish(stored(1, dp_rank=1))
        worker = Worker(
            "engine",
            [silent.endpoint, named.endpoint],
            replay=[str(silent.replay_endpoint), str(named.replay_endpoint)],
        )
        with client_of(worker) as client:
            # The publisher at rank 0's port names itself 1, before the other has said a word.
            wait_status(client, second, seq=0)
            named.publish(stored(2))
            wait_status(client, RANK, seq=0)
            assert [len(client.index.tree(rank)) for rank in (RANK, second)] == [1, 1]
            assert client.match(prompt(1))[second].tokens == 16
            assert client.match(prompt(2))[RANK].tokens == 16
            client.index.check()


def test_a_hostile_topic_is_named_in_a_few_words(context: Context) -> None:
    publisher = RawPublisher(context)
    with client_of(Worker("engine", publisher.endpoint, topic="kv")) as client:
        for _ in range(2):  # the wanted topic, and all for the time being
            publisher.wait_subscribed()
        publisher.send([b"\xff" * 1_000_000, bytes(8), b""])
        wait_counter(client, RANK, "filtered_by_topic")
        assert len(client.status(RANK).reason) < 1000


def test_hundreds_of_ranks_fit_into_one_client() -> None:
    with connect(Worker("engine", "tcp://127.0.0.1:1", dp_size=150)) as client:
        assert len(client.ranks) == 150


def test_a_stuck_thread_makes_its_ranks_stale(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "_MAX_SLEEP", 0.1)
    ahead = [0.0]
    sink = BlockingSink(lambda item: isinstance(item, RankBatch) and item.seq == 1)
    with Subscriber(
        [worker_of(engine)],
        sink=sink,
        replay_policy=REPLAYS,
        stale_after=5.0,
        clock=lambda: time.monotonic() + ahead[0],
    ) as subscriber:
        engine.serve(prompt(1))
        subscriber.wait_live(PATIENCE)
        engine.serve(prompt(2))
        sink.wait_blocked()
        assert subscriber.status(RANK).state is State.LIVE
        ahead[0] += 60.0
        status = subscriber.status(RANK)
        assert status.state is State.STALE
        assert "stuck" in status.reason
        sink.go_on.set()


@pytest.mark.usefixtures("impatient")
def test_a_sink_that_blocks_when_a_rank_is_added_does_not_hold_the_caller_for_ever() -> None:
    sink = BlockingSink(lambda item: True)
    with Subscriber(sink=sink) as subscriber:
        with pytest.raises(BusyError, match="the call has begun") as raised:
            subscriber.add(LATE)
        assert raised.value.begun
        sink.go_on.set()
        until(subscriber.statuses, lambda statuses: Rank("late", 0) in statuses)


@pytest.mark.usefixtures("impatient")
def test_a_sink_that_blocks_when_the_first_rank_is_added_is_waited_for_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    end = thread_module.SubscriberThread.end

    def noted(thread: thread_module.SubscriberThread, timeout: float) -> None:
        waits.append(timeout)
        end(thread, timeout)

    monkeypatch.setattr(thread_module.SubscriberThread, "end", noted)
    sink = BlockingSink(lambda item: True)
    with pytest.raises(BusyError):
        Subscriber([LATE], sink=sink)
    assert waits == [0.0]
    sink.go_on.set()
