"""One bad rank among good ones, a killed publisher, and a consumer that stalls."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import pytest
import zmq

from kvindex import BlockStored, EventBatch, Rank, SocketOptions, Worker, ZmqEventPublisher
from kvindex.subscribe import RankBatch, Subscriber
from kvindex.subscribe import connection as connection_module
from kvindex.testing import FakeEngine, Faults, LaneFaults
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
from tests.subscribe.peers import RANK, BlockingSink, RawPublisher, prompt

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
            first.join(PATIENCE)
            wait_status(client, RANK, connected=False)
            port, replay_port = (e.rpartition(":")[2] for e in (endpoint, replay))
            with publishing(f"tcp://*:{port}", f"tcp://*:{replay_port}", token=2):
                wait_published(epoch=1)
                assert client.match([1] * 16)[RANK].tokens == 0
                assert client.match([2] * 16)[RANK].tokens == 16
                client.index.check()


@contextmanager
def publishing(
    endpoint: str, replay: str, *, token: int
) -> Iterator[tuple[SpawnProcess, str, str]]:
    """Run a process that publishes batches of this token; yield it, and both of its endpoints."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_publish_until_killed, args=(there, endpoint, replay, token))
    process.start()
    try:
        assert here.poll(PATIENCE)
        yield process, *here.recv()
    finally:
        process.kill()
        process.join(PATIENCE)


def _publish_until_killed(parent: Connection, endpoint: str, replay: str, token: int) -> None:
    publisher = ZmqEventPublisher(endpoint=endpoint, replay_endpoint=replay)
    parent.send((publisher.endpoint, publisher.replay_endpoint))
    number = 0
    while True:
        number += 1
        stored = BlockStored(
            block_hashes=[token * 10**9 + number],
            parent_block_hash=token * 10**9 + number - 1 if number > 1 else None,
            token_ids=[token] * 16,
            block_size=16,
        )
        publisher.publish(EventBatch(ts=time.time(), events=[stored]))
        time.sleep(0.0005)  # a flood would outrun the replay buffer, and the root be lost


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
