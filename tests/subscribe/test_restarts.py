"""An engine restarts: what it held before must never be answered again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import zmq

from kvindex import Rank, SocketOptions, State
from kvindex.subscribe import RankBatch, RankRestarted, StreamItem, Subscriber
from kvindex.testing import FakeEngine, Faults, LaneFaults
from kvindex.wire import replay_end
from tests.live import (
    PATIENCE,
    REPLAYS,
    assert_true,
    caught_up,
    client_of,
    link_to,
    wait_counter,
    wait_status,
    worker_of,
)

pytestmark = pytest.mark.faults

RANK = Rank("engine", 0)
OLD = list(range(100))
NEW = list(range(500, 600))


def fresh(number: int) -> list[int]:
    """A prompt that is not cached, so that serving it publishes."""
    return [number * 1000 + i for i in range(32)]


class SilentEngine:
    """An engine that has just started at another one's ports, and has published nothing."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.XPUB)
        self._met = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._live.bind(endpoint)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(replay_endpoint)

    def __enter__(self) -> SilentEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.disable_monitor()
        self._met.close(0)
        self._context.destroy(linger=0)

    def wait_met(self) -> None:
        assert self._met.poll(int(PATIENCE * 1000))

    def answer_until(self, reached: Callable[[], bool]) -> None:
        """Answer what is asked: there is nothing to replay."""
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline
            if self._replay.poll(20):
                identity, *_ = self._replay.recv_multipart()
                self._replay.send_multipart(replay_end(identity, with_topic=True))


def test_engine_restarts_with_lower_numbers_only_its_new_contents_are_answered() -> None:
    with FakeEngine("engine") as engine:
        for length in (40, 60, 80, 100):
            engine.serve(OLD[:length])
        with client_of(worker_of(engine)) as client:
            caught_up(client, engine)
            assert client.match(OLD)[RANK].tokens == 96
            engine.restart()
            engine.serve(NEW)
            wait_status(client, RANK, epoch=1, seq=0)
            caught_up(client, engine)
            assert client.match(OLD)[RANK].tokens == 0
            assert_true(client, engine, prompts=[OLD, NEW])
            assert client.status(RANK).complete


def test_engine_restarts_behind_a_link_that_stays_up_and_is_noticed_by_its_numbers() -> None:
    with (
        FakeEngine("engine") as engine,
        link_to(engine) as link,
    ):
        for length in (40, 60, 80, 100):
            engine.serve(OLD[:length])
        with client_of(worker_of(engine, link), probe_interval=60.0) as client:
            caught_up(client, engine)
            engine.restart()
            with client_of(worker_of(engine)) as direct:  # the link reconnects in its own time
                caught_up(direct, engine)
            served = 0
            while client.status(RANK).epoch == 0 and served < 1000:
                served += 1
                engine.serve(fresh(served))
                client.wait_for(lambda statuses: statuses[RANK].epoch == 1, 0.05)
            caught_up(client, engine)
            assert client.match(OLD)[RANK].tokens == 0
            assert_true(client, engine, prompts=[OLD, NEW])


def test_engine_restarts_while_we_are_cut_off_and_is_past_our_number_nothing_old_is_left() -> None:
    with (
        FakeEngine("engine") as engine,
        link_to(engine) as link,
    ):
        engine.serve(OLD[:50])
        engine.serve(OLD)
        with client_of(worker_of(engine, link)) as client:
            caught_up(client, engine)
            link.cut()
            wait_status(client, RANK, connected=False)
            engine.restart()
            for length in range(40, 100, 10):
                engine.serve(NEW[:length])
            assert engine.published > 2
            link.heal()
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            assert client.match(OLD)[RANK].tokens == 0
            assert_true(client, engine, prompts=[OLD, NEW])
            assert client.status(RANK).complete


def test_engine_restarts_past_our_number_without_a_disconnect_the_overlap_tells() -> None:
    with FakeEngine("engine") as engine, FakeEngine("engine", seed=9) as other:
        with link_to(engine) as link:
            engine.serve(OLD)
            with client_of(worker_of(engine, link)) as client:
                caught_up(client, engine)
                for length in range(20, 100, 10):
                    other.serve(NEW[:length])
                link.retarget(
                    other.endpoint, other.replay_endpoint
                )  # we stay connected to the link
                wait_status(client, RANK, epoch=1)
                caught_up(client, other)
                assert client.match(OLD)[RANK].tokens == 0
                assert_true(client, other, prompts=[OLD, NEW])


def test_reconnect_without_replay_cannot_be_proven_so_nothing_old_is_answered() -> None:
    with FakeEngine("engine", replay=False) as engine, link_to(engine) as link:
        with client_of(worker_of(engine, link)) as client:
            wait_status(client, RANK, connected=True)
            served = 0
            while client.status(RANK).seq is None and served < 1000:  # until we are subscribed
                served += 1
                engine.serve(fresh(served))
                client.wait_for(lambda statuses: statuses[RANK].seq is not None, 0.05)
            wait_status(client, RANK, seq=engine.published - 1)
            assert client.match(fresh(served))[RANK].tokens == 32
            link.cut()
            wait_status(client, RANK, connected=False)
            link.heal()
            wait_status(client, RANK, connected=True, restarts=1)
            assert client.match(fresh(served))[RANK].tokens == 0
            assert not client.status(RANK).complete


def test_delayed_duplicate_of_an_old_batch_is_no_restart() -> None:
    with (
        FakeEngine("engine") as engine,
        link_to(engine) as link,
    ):
        with client_of(worker_of(engine, link)) as client:
            caught_up(client, engine)
            link.set_faults(Faults(live=LaneFaults(duplicate=1.0, delay=1.0, max_delay=0.05)))
            for length in range(16, 200, 8):
                engine.serve(list(range(length)))
            caught_up(client, engine)
            wait_counter(client, RANK, "duplicates")
            assert client.status(RANK).epoch == 0
            assert_true(client, engine)


def test_engine_restarts_while_we_are_held_up_what_it_had_sent_before_is_not_believed() -> None:
    held_up, go_on = threading.Event(), threading.Event()
    items: list[StreamItem] = []

    def sink(item: StreamItem) -> None:
        items.append(item)
        if isinstance(item, RankBatch) and not held_up.is_set():
            held_up.set()
            assert go_on.wait(PATIENCE)

    with FakeEngine("engine") as engine:
        endpoints = engine.endpoint, engine.replay_endpoint or ""
        with Subscriber(
            [worker_of(engine)],
            sink=sink,
            replay_policy=REPLAYS,
            socket_options=SocketOptions(reconnect=0.01),
        ) as stream:
            assert stream.wait_for(lambda all_: all_[RANK].state is State.LIVE, PATIENCE)
            engine.serve(fresh(0))
            assert held_up.wait(PATIENCE)
            for number in range(1, 1000):  # more than is taken at once
                engine.serve(fresh(number))
            engine.close()
            with SilentEngine(*endpoints) as new:
                new.wait_met()  # ZeroMQ connects by itself; what came before is not read
                go_on.set()
                new.answer_until(
                    lambda: (
                        stream.status(RANK).epoch > 0 and stream.status(RANK).state is State.LIVE
                    )
                )
                status = stream.status(RANK)
    restarted = max(n for n, item in enumerate(items) if isinstance(item, RankRestarted))
    assert not [item for item in items[restarted:] if isinstance(item, RankBatch)]
    assert (status.seq, status.complete) == (None, True)
    assert status.counters["unread_dropped"] > 0
