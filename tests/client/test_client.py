"""The whole path over every transport, and workers that come, go and are renamed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvindex import (
    BlockStored,
    CacheSettings,
    ClosedError,
    ConfigurationError,
    Curve,
    EventBatch,
    EventStream,
    GroupSpec,
    Rank,
    SocketOptions,
    State,
    UnknownRankError,
    Worker,
    ZmqEventPublisher,
    connect,
)
from kvindex.routing import Router
from kvindex.subscribe import RankAdded, RankBatch, RankRestarted
from kvindex.subscribe.discovery import FileSource
from kvindex.testing import CacheOptions, FakeEngine, Group, Workload
from kvindex.testing.ports import reserve_port
from tests.live import (
    PATIENCE,
    REPLAYS,
    assert_true,
    caught_up,
    client_of,
    until,
    wait_counter,
    wait_status,
    within,
    worker_of,
)
from tests.subscribe.peers import RANK, stored

pytestmark = pytest.mark.e2e

PROMPT = list(range(64))


Publish = Callable[..., ZmqEventPublisher]


@pytest.fixture
def publisher() -> Iterator[Publish]:
    """Make a publisher at ports that the system chooses, closed with the test."""
    with ExitStack() as stack:

        def make(dp_rank: int = 0, *endpoints: str, **options: Any) -> ZmqEventPublisher:
            live, replay = endpoints or ("tcp://*:0", "tcp://*:0")
            return stack.enter_context(ZmqEventPublisher(dp_rank, live, replay, **options))

        yield make


def worker_at(*publishers: ZmqEventPublisher, **options: Any) -> Worker:
    """A worker with these publishers, in the order of its dp ranks."""
    name = options.pop("worker", "engine")
    replay = [str(publisher.replay_endpoint) for publisher in publishers]
    return Worker(name, [publisher.endpoint for publisher in publishers], replay=replay, **options)


def test_two_lines_connect_and_one_asks() -> None:
    with FakeEngine("engine") as engine:
        engine.serve(PROMPT)
        client = connect([Worker("engine", engine.endpoint, replay=engine.replay_endpoint)])
        client.wait_live(timeout=PATIENCE)
        best = client.match(PROMPT).best
        assert best is not None
        assert (best.rank, best.tokens, best.state, best.complete, best.lag) == (
            RANK,
            64,
            State.LIVE,
            True,
            0,
        )
        client.close()
        client.close()
        assert client.status(RANK).state is State.CLOSED
        assert client.index.match(PROMPT)[RANK].tokens == 64  # what the rank held stays


@pytest.mark.parametrize("dialect", ["vllm-0.9.1", "vllm-0.20.0", "sglang-0.5.18", "sglang-0.5.23"])
def test_live_workload_in_an_old_and_a_new_dialect_equals_the_engine(dialect: str) -> None:
    with FakeEngine("engine", dialect=dialect, num_blocks=96) as engine:
        with client_of(worker_of(engine)) as client:
            engine.run(Workload(60, seed=5))
            caught_up(client, engine)
            assert_true(client, engine)


def test_the_whole_path_in_one_process_over_inproc() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = "inproc://kv", "inproc://kv-replay"
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(ZmqEventPublisher(rank, *endpoints, context=context))
            for rank in range(2)
        ]
        for publisher in publishers:
            publisher.publish(stored())
        worker = Worker("engine", endpoints[0], replay=endpoints[1], dp_size=2)
        with client_of(worker, context=context) as client:
            client.wait_live(PATIENCE)
            for publisher in publishers:
                publisher.publish(stored(1))
            for rank in client.ranks:
                wait_status(client, rank, seq=1, complete=True)
            assert client.match(list(range(16)))[Rank("engine", 1)].tokens == 16
    context.term()


def test_ipc_endpoints(publisher: Publish, tmp_path: Path) -> None:
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    published = publisher(0, live, replay)
    published.publish(stored())
    with client_of(Worker("engine", live, replay=replay)) as client:
        client.wait_live(PATIENCE)
        published.publish(stored(1))
        wait_status(client, RANK, seq=1, complete=True)


def test_curve_connects_with_the_right_keys_and_not_without(publisher: Publish) -> None:
    server = Curve.generate()
    published = publisher(curve=server)
    published.publish(stored())
    keyed = worker_at(published, curve=Curve.generate(server.public_key))
    with client_of(keyed, worker_at(published, worker="plain")) as client:
        client.wait_live(PATIENCE, ranks=[RANK])
        assert client.status(RANK).seq == 0
        with pytest.raises(TimeoutError, match="plain/0"):
            client.wait_live(0.3)


def test_we_bind_for_a_publisher_that_connects() -> None:
    holder, port = reserve_port()
    with holder, client_of(Worker("engine", f"tcp://127.0.0.1:{port}", bind=True)) as client:
        publisher = ZmqEventPublisher(endpoint=f"tcp://127.0.0.1:{port}")  # no '*': it connects
        try:
            client.wait_live(PATIENCE)
            number = 0
            while client.status(RANK).seq is None and number < 1000:
                publisher.publish(stored(number))
                number += 1
                within(0.02, lambda: client.status(RANK).seq is not None)
            assert client.status(RANK).seq is not None
        finally:
            publisher.shutdown()


def test_workers_are_added_and_removed_while_others_run() -> None:
    with FakeEngine("a") as a, FakeEngine("b") as b, client_of(worker_of(a)) as client:
        a.serve(PROMPT)
        caught_up(client, a)
        client.add(worker_of(b))
        b.serve(PROMPT)
        caught_up(client, a, b)
        assert len(client.match(PROMPT)) == 2
        with pytest.raises(ConfigurationError, match="subscribed to already"):
            client.add(worker_of(b))
        client.remove("b")
        assert client.ranks == (Rank("a", 0),)
        assert len(client.match(PROMPT)) == 1
        with pytest.raises(KeyError, match="a/0"):
            client.status(Rank("b", 0))
        with pytest.raises(UnknownRankError):
            client.remove("b")
        client.add(worker_of(b))  # again, from the beginning
        caught_up(client, a, b)
        assert client.match(PROMPT)[Rank("b", 0)].tokens == 64


def test_dp_rank_in_the_batches_wins_over_the_ports_and_is_waited_for(publisher: Publish) -> None:
    published = publisher(5)
    published.publish(stored())
    with client_of(worker_at(published)) as client:
        client.wait_live(PATIENCE, ranks=[client.ranks[0]])  # by the port's name
        assert client.status(RANK).state is State.LIVE
        wait_status(client, Rank("engine", 5), seq=0)
        assert client.ranks == (Rank("engine", 5),)
        assert client.match(list(range(16)))[Rank("engine", 5)].tokens == 16
        assert client.status(RANK).rank == Rank("engine", 5)  # still found by its port's


def test_swapped_ports_are_sorted_out_by_the_batches(publisher: Publish) -> None:
    publishers = publisher(1), publisher(0)  # rank 1 where rank 0 is expected
    for number, published in enumerate(publishers):
        published.publish(stored(number))
    with client_of(worker_at(*publishers)) as client:
        for rank in (0, 1):
            wait_status(client, Rank("engine", rank), seq=0, complete=True)
        assert client.status(Rank("engine", 1)).endpoint == publishers[0].endpoint
        first = client.match(list(range(16)))
        assert [first[Rank("engine", rank)].tokens for rank in (0, 1)] == [0, 16]


def test_message_over_the_maximum_size_is_refused_and_the_rank_recovers(
    publisher: Publish,
) -> None:
    published = publisher()
    options = SocketOptions(max_message_bytes=10_000, reconnect=0.02)
    with client_of(worker_at(published), socket_options=options) as client:
        published.publish(stored())
        wait_status(client, RANK, seq=0)
        huge = BlockStored(block_hashes=[99], token_ids=[1] * 20_000, block_size=20_000)
        published.publish(EventBatch(1_001.0, [huge]))
        published.publish(stored(2))
        wait_counter(client, RANK, "disconnects")
        assert client.match([1] * 20_000)[RANK].tokens == 0


def test_events_as_an_iterator_with_a_restart_as_a_value() -> None:
    with FakeEngine("engine") as engine:
        engine.serve(PROMPT)
        engine.serve([*PROMPT, *range(900, 950)])
        with EventStream([worker_of(engine)], replay_policy=REPLAYS, probe_interval=0.2) as stream:
            items = [stream.get(PATIENCE) for _ in range(3)]
            assert items[0] == RankAdded(RANK)
            assert [item.seq for item in items[1:] if isinstance(item, RankBatch)] == [0, 1]
            engine.restart()
            engine.serve(PROMPT)
            restarted = stream.get(PATIENCE)
            assert isinstance(restarted, RankRestarted)
            assert restarted.epoch == 1
            again = stream.get(PATIENCE)
            assert isinstance(again, RankBatch)
            assert (again.epoch, again.seq) == (1, 0)
            with pytest.raises(TimeoutError):
                stream.get(0.01)


def test_a_full_event_stream_holds_the_subscriber_and_closing_frees_it() -> None:
    with FakeEngine("engine") as engine:
        stream = EventStream([worker_of(engine)], max_items=2, replay_policy=REPLAYS)
        for number in range(10):
            engine.serve([number * 1000 + i for i in range(32)])
        assert isinstance(stream.get(PATIENCE), RankAdded)
        seen: list[int] = []
        consumer = threading.Thread(
            target=lambda: seen.extend(i.seq for i in stream if isinstance(i, RankBatch))
        )
        consumer.start()
        until(lambda: stream.subscriber.status(RANK).seq == 9)
        stream.close()
        consumer.join(PATIENCE)
        assert not consumer.is_alive()
        assert seen == list(range(len(seen)))
        assert len(seen) >= 7


def test_a_full_event_stream_still_serves_its_consumers_calls() -> None:
    with FakeEngine("engine") as engine, FakeEngine("late") as late:
        for number in range(30):
            engine.serve([number * 1000 + i for i in range(32)])
        last = engine.published - 1
        with EventStream([worker_of(engine)], max_items=2, replay_policy=REPLAYS) as stream:
            seen: list[int] = []
            for item in stream:
                if isinstance(item, RankBatch):
                    seen.append(item.seq)
                    assert stream.subscriber.cursor(item.rank) is not None
                    stream.subscriber.add(worker_of(late))
                    stream.subscriber.remove("late")
                if seen[-1:] == [last]:
                    break
            assert seen == list(range(last + 1))


def test_a_closed_client_answers_no_question_and_its_router_chooses_no_rank() -> None:
    client = connect([Worker("engine", "tcp://127.0.0.1:1")])
    router = Router(client)
    booking = router.reserve([1, 2, 3])
    assert not client.closed
    client.close()
    assert client.closed
    for ask in (client.match, client.explain, router.select, router.reserve):
        with pytest.raises(ClosedError, match="this Client is closed"):
            ask([1, 2, 3])
    calls: list[Callable[[], object]] = [
        lambda: client.match_many([]),
        lambda: client.add(Worker("other", "tcp://127.0.0.1:1")),
        lambda: client.wait_live(0.1),
        lambda: router.place(booking.rank, [1, 2, 3]),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    booking.finish()
    assert client.index.match([1, 2, 3]).best is None
    assert client.status("engine").state is State.CLOSED
    assert router.statistics()["bookings"]["finished"] == 1


def test_workers_that_cannot_work_leave_no_thread_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError, match="cannot bind"):
        connect([Worker("engine", "tcp://203.0.113.77:5557", bind=True)])
    assert threading.active_count() == before
    source = FileSource(tmp_path / "engines.toml")
    with pytest.raises(ConfigurationError) as refused:
        connect([source, source])
    assert threading.active_count() == before, refused.value


def test_groups_told_with_the_worker_predict_the_hit_of_an_old_hybrid_engine() -> None:
    options = CacheOptions(groups=(Group(), Group.window(32)))
    groups = {0: GroupSpec(), 1: GroupSpec("sliding_window", 32)}
    with FakeEngine("engine", dialect="vllm-0.20.0", options=options, num_blocks=64) as engine:
        worker = worker_of(engine, cache=CacheSettings(groups=groups))
        with client_of(worker, worker_of(engine, worker="untold")) as client:
            prompts = [[number * 1000 + i for i in range(160)] for number in range(3)]
            for prompt in prompts * 2:
                engine.serve(prompt)
            last = engine.published - 1
            wait_status(client, RANK, seq=last)
            wait_status(client, Rank("untold", 0), seq=last)
            hits = [engine.lookup(prompt).tokens for prompt in prompts]
            assert any(hits)
            match = [client.match(prompt) for prompt in prompts]
            assert [m[RANK].tokens for m in match] == hits
            untold = [m[Rank("untold", 0)] for m in match]
            assert all(m.tokens >= hit for m, hit in zip(untold, hits, strict=True))
            assert all(m.upper_bound for m in untold if m.tokens)
