"""What goes wrong around the subscriber must not end it: scans, sinks, calls at bad moments."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import zmq

import kvindex.subscribe.subscriber as subscriber_module
import kvindex.subscribe.subscriber_thread as thread_module
from kvindex import (
    BlockStored,
    BusyError,
    ClosedError,
    EventBatch,
    EventStream,
    Rank,
    State,
    Worker,
    ZmqEventPublisher,
    connect,
)
from kvindex.subscribe import RankAdded, RankBatch, StreamItem, Subscriber
from kvindex.testing import FakeEngine
from kvindex.testing.ports import reserve_port
from tests.live import PATIENCE, REPLAYS, caught_up, client_of, wait_status, worker_of

pytestmark = pytest.mark.faults

RANK = Rank("engine", 0)


def prompt(number: int) -> list[int]:
    return [number * 1000 + i for i in range(32)]


def batch(number: int, dp_rank: int | None = None) -> EventBatch:
    stored = BlockStored(block_hashes=[number + 1], token_ids=prompt(number)[:16], block_size=16)
    return EventBatch(time.time(), [stored], dp_rank)


def test_port_scans_of_a_bound_endpoint_leave_its_publisher_connected() -> None:
    holder, port = reserve_port()
    with holder, client_of(Worker("engine", f"tcp://127.0.0.1:{port}", bind=True)) as client:
        publisher = ZmqEventPublisher(endpoint=f"tcp://127.0.0.1:{port}")
        try:
            wait_status(client, RANK, connected=True)
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", port)) as scan:
                    scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    scan.recv(1)
            number = 0
            while client.status(RANK).seq is None and number < 1000:
                publisher.publish(batch(number))
                number += 1
                client.wait_for(lambda statuses: statuses[RANK].seq is not None, 0.02)
            status = client.status(RANK)
            assert (status.connected, status.restarts) == (True, 0)
            assert status.seq is not None
        finally:
            publisher.shutdown()


def test_a_feed_that_fails_ends_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeEngine("engine") as engine, FakeEngine("other") as other:
        with client_of(worker_of(engine), worker_of(other)) as client:
            caught_up(client, engine, other)
            broken = client.subscriber._thread.roster.feeds[RANK]
            monkeypatch.setattr(broken, "pump", _fail)
            engine.serve(prompt(1))
            status = wait_status(client, RANK, state=State.CLOSED)
            assert "a planted bug" in status.reason
            other.serve(prompt(2))
            caught_up(client, other)
            assert client.statistics()["thread"]["feed_failures"] == 1
            client.remove("engine")
            client.add(worker_of(engine))
            caught_up(client, engine)


def _fail(_: float) -> None:
    raise RuntimeError("a planted bug")


def test_a_thread_that_fails_ends_every_wait_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeEngine("engine") as engine:
        stream = EventStream([worker_of(engine)], replay_policy=REPLAYS)
        for number in range(5):
            engine.serve(prompt(number))
        last = engine.published - 1
        assert stream.subscriber.wait_for(lambda s: s[RANK].seq == last, PATIENCE)
        monkeypatch.setattr(stream.subscriber._thread, "_sleep", lambda: _fail(0))
        stream.subscriber._thread._watch.wake()
        items: list[StreamItem] = []
        with pytest.raises(ClosedError, match=r"has ended: .*a planted bug"):
            items.extend(stream)
        assert [item.seq for item in items if isinstance(item, RankBatch)] == list(range(last + 1))
        with pytest.raises(ClosedError, match="a planted bug"):
            stream.get(0.0)
        with pytest.raises(ClosedError, match="a planted bug"):
            stream.subscriber.add(Worker("late", "tcp://127.0.0.1:1"))
        assert stream.subscriber.status(RANK).state is State.CLOSED
        stream.close()


def test_a_stream_with_room_for_fewer_items_than_ranks_can_be_made() -> None:
    worker = Worker("engine", "tcp://127.0.0.1:1", dp_size=5)
    with EventStream([worker], max_items=1) as stream:
        ranks = [stream.get(PATIENCE) for _ in range(5)]
        assert all(isinstance(item, RankAdded) for item in ranks)


def test_calls_while_the_sink_is_stuck_say_busy_and_are_not_carried_out_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber_module, "_COMMAND_TIMEOUT", 0.2)
    stuck, go_on = threading.Event(), threading.Event()

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            stuck.set()
            assert go_on.wait(PATIENCE)

    with FakeEngine("engine") as engine:
        subscriber = Subscriber([worker_of(engine)], sink=sink, replay_policy=REPLAYS)
        engine.serve(prompt(1))
        assert stuck.wait(PATIENCE)
        with pytest.raises(BusyError, match="its sink has not returned"):
            subscriber.add(Worker("late", "tcp://127.0.0.1:1"))
        go_on.set()
        assert subscriber.wait_for(lambda statuses: statuses[RANK].seq == 0, PATIENCE)
        assert subscriber.ranks == (RANK,)
        subscriber.close()


def test_closing_while_the_sink_is_stuck_returns_and_ends_when_the_sink_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriber_module, "_COMMAND_TIMEOUT", 0.2)
    stuck, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            stuck.set()
            assert go_on.wait(PATIENCE)

    with FakeEngine("engine") as engine:
        subscriber = Subscriber(
            [worker_of(engine)], sink=sink, replay_policy=REPLAYS, on_stop=ended.set
        )
        engine.serve(prompt(1))
        assert stuck.wait(PATIENCE)
        subscriber.close()
        assert "has not returned" in caplog.text
        go_on.set()
        assert ended.wait(PATIENCE)
        assert subscriber.status(RANK).state is State.CLOSED


def test_workers_can_be_added_and_removed_from_within_the_sink() -> None:
    items: list[StreamItem] = []
    holder: list[Subscriber] = []

    def sink(item: StreamItem) -> None:
        items.append(item)
        if isinstance(item, RankBatch) and item.rank == RANK:
            holder[0].add(worker_of(other))
            holder[0].remove("engine")

    with FakeEngine("engine") as engine, FakeEngine("other") as other:
        other.serve(prompt(2))
        with Subscriber(sink=sink, replay_policy=REPLAYS) as subscriber:
            holder.append(subscriber)
            subscriber.add(worker_of(engine))
            engine.serve(prompt(1))
            assert subscriber.wait_for(
                lambda s: RANK not in s and Rank("other", 0) in s and s[Rank("other", 0)].seq == 0,
                PATIENCE,
            )
            names = [type(item).__name__ for item in items if item_rank(item) == RANK]
            assert names == ["RankAdded", "RankBatch", "RankRemoved"]


def item_rank(item: Any) -> Rank | None:
    return getattr(item, "rank", None)


def test_a_renamed_rank_keeps_what_it_holds() -> None:
    with ZmqEventPublisher(endpoint="tcp://*:0", replay_endpoint="tcp://*:0") as silent:
        with ZmqEventPublisher(
            data_parallel_rank=0, endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
        ) as named:
            silent.publish(batch(1, dp_rank=1))
            worker = Worker(
                "engine",
                [silent.endpoint, named.endpoint],
                replay=[str(silent.replay_endpoint), str(named.replay_endpoint)],
            )
            with client_of(worker) as client:
                # The publisher at rank 0's port names itself 1, before the other has said a word.
                wait_status(client, Rank("engine", 1), seq=0)
                named.publish(batch(2))
                wait_status(client, RANK, seq=0)
                held = [len(client.index.tree(Rank("engine", r))) for r in (0, 1)]
                assert held == [1, 1]
                assert client.match(prompt(1))[Rank("engine", 1)].tokens == 16
                assert client.match(prompt(2))[RANK].tokens == 16
                client.index.check()


def test_waiting_for_a_rank_that_is_renamed_waits_for_it_under_its_new_name() -> None:
    with ZmqEventPublisher(
        data_parallel_rank=3, endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
    ) as publisher:
        publisher.publish(batch(1))
        worker = Worker("engine", publisher.endpoint, replay=publisher.replay_endpoint)
        with client_of(worker) as client:
            client.wait_live(PATIENCE, ranks=[client.ranks[0]])
            assert client.status(RANK).rank == Rank("engine", 3)
            assert client.status(RANK).state is State.LIVE


def test_a_hostile_topic_is_named_in_a_few_words() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.linger = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        with client_of(Worker("engine", f"tcp://127.0.0.1:{port}", topic="kv")) as client:
            for _ in range(2):  # the wanted topic, and all for the time being
                assert publisher.poll(int(PATIENCE * 1000))
                publisher.recv()
            publisher.send_multipart([b"\xff" * 1_000_000, bytes(8), b""])
            reached = client.wait_for(
                lambda s: bool(s[RANK].counters.get("filtered_by_topic")), PATIENCE
            )
            assert reached
            assert len(client.status(RANK).reason) < 1000
    finally:
        publisher.close()
        context.term()


def test_hundreds_of_ranks_fit_into_one_client() -> None:
    with connect(Worker("engine", "tcp://127.0.0.1:1", dp_size=150)) as client:
        assert len(client.ranks) == 150


def test_a_stuck_thread_makes_its_ranks_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "_MAX_SLEEP", 0.1)
    now = [0.0]
    stuck, go_on = threading.Event(), threading.Event()

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch) and item.seq == 1:
            stuck.set()
            assert go_on.wait(PATIENCE)

    with FakeEngine("engine") as engine:
        with Subscriber(
            [worker_of(engine)],
            sink=sink,
            replay_policy=REPLAYS,
            stale_after=5.0,
            clock=lambda: time.monotonic() + now[0],
        ) as subscriber:
            engine.serve(prompt(1))
            subscriber.wait_live(PATIENCE)
            engine.serve(prompt(2))
            assert stuck.wait(PATIENCE)
            assert subscriber.status(RANK).state is State.LIVE
            now[0] += 60.0
            status = subscriber.status(RANK)
            assert status.state is State.STALE
            assert "stuck" in status.reason
            go_on.set()


def test_a_sink_that_blocks_when_a_rank_is_added_does_not_hold_the_caller_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber_module, "_COMMAND_TIMEOUT", 0.2)
    go_on = threading.Event()

    def sink(item: StreamItem) -> None:
        go_on.wait(PATIENCE)

    with Subscriber(sink=sink) as subscriber:
        with pytest.raises(BusyError, match="the call has begun") as raised:
            subscriber.add(Worker("late", "tcp://127.0.0.1:1"))
        assert raised.value.begun
        go_on.set()
        assert subscriber.wait_for(lambda statuses: Rank("late", 0) in statuses, PATIENCE)


def test_a_sink_that_blocks_when_the_first_rank_is_added_is_waited_for_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber_module, "_COMMAND_TIMEOUT", 0.05)
    go_on = threading.Event()
    waits: list[float] = []
    end = thread_module.SubscriberThread.end

    def noted(thread: thread_module.SubscriberThread, timeout: float) -> None:
        waits.append(timeout)
        end(thread, timeout)

    monkeypatch.setattr(thread_module.SubscriberThread, "end", noted)

    def sink(item: StreamItem) -> None:
        go_on.wait(PATIENCE)

    with pytest.raises(BusyError):
        Subscriber([Worker("engine", "tcp://127.0.0.1:1")], sink=sink)
    assert waits == [0.0]
    go_on.set()
