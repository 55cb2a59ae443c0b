"""An engine restarts: what it held before must never be answered again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import zmq

from kvindex import Client, SocketOptions, State
from kvindex.subscribe import RankBatch, RankRestarted, Subscriber
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults
from kvindex.wire import replay_end
from tests.live import (
    PATIENCE,
    REPLAYS,
    assert_true,
    caught_up,
    client_of,
    followed,
    link_to,
    until,
    wait_counter,
    wait_status,
    worker_of,
)
from tests.subscribe.peers import RANK, BlockingSink, prompt, publish_until

pytestmark = pytest.mark.faults

OLD = list(range(100))
NEW = list(range(500, 600))


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


def test_engine_restarts_with_lower_numbers_only_its_new_contents_are_answered(
    engine: FakeEngine,
) -> None:
    serve_growing(engine, OLD)
    with followed(engine) as client:
        assert client.match(OLD)[RANK].tokens == 96
        engine.restart()
        engine.serve(NEW)
        wait_status(client, RANK, epoch=1, seq=0)
        assert_replaced(client, engine)
        assert client.status(RANK).complete


def test_engine_restarts_behind_a_link_that_stays_up_and_is_noticed_by_its_numbers(
    engine: FakeEngine, link: FaultyLink
) -> None:
    serve_growing(engine, OLD)
    with client_of(worker_of(engine, link), probe_interval=60.0) as client:
        caught_up(client, engine)
        engine.restart()
        with client_of(worker_of(engine)) as direct:  # the link reconnects in its own time
            caught_up(direct, engine)
        publish_until(client, lambda n: engine.serve(prompt(n + 1)), lambda s: s.epoch == 1)
        assert_replaced(client, engine)


def test_engine_restarts_while_we_are_cut_off_and_is_past_our_number_nothing_old_is_left(
    engine: FakeEngine, link: FaultyLink
) -> None:
    engine.serve(OLD)
    with followed(engine, via=link) as client:
        link.cut()
        wait_status(client, RANK, connected=False)
        engine.restart()
        serve_growing(engine, NEW)
        assert engine.published > 2
        link.heal()
        wait_status(client, RANK, epoch=1)
        assert_replaced(client, engine)
        assert client.status(RANK).complete


def test_engine_restarts_past_our_number_without_a_disconnect_the_overlap_tells(
    engine: FakeEngine, link: FaultyLink
) -> None:
    engine.serve(OLD)
    with FakeEngine("engine", seed=9) as new, followed(engine, via=link) as client:
        serve_growing(new, NEW)
        link.retarget(new.endpoint, new.replay_endpoint)  # we stay connected to the link
        wait_status(client, RANK, epoch=1)
        assert_replaced(client, new)


def test_reconnect_without_replay_cannot_be_proven_so_nothing_old_is_answered() -> None:
    with FakeEngine("engine", replay=False) as engine, link_to(engine) as link:
        with client_of(worker_of(engine, link)) as client:
            last = publish_until(
                client, lambda n: engine.serve(prompt(n)), lambda s: s.seq is not None
            )
            wait_status(client, RANK, seq=engine.published - 1)
            assert client.match(prompt(last))[RANK].tokens == 64
            link.cut()
            wait_status(client, RANK, connected=False)
            link.heal()
            wait_status(client, RANK, connected=True, restarts=1)
            assert client.match(prompt(last))[RANK].tokens == 0
            assert not client.status(RANK).complete


def test_delayed_duplicate_of_an_old_batch_is_no_restart(
    engine: FakeEngine, link: FaultyLink
) -> None:
    with followed(engine, via=link) as client:
        link.set_faults(Faults(live=LaneFaults(duplicate=1.0, delay=1.0, max_delay=0.05)))
        for length in range(16, 200, 8):
            engine.serve(list(range(length)))
        caught_up(client, engine)
        wait_counter(client, RANK, "duplicates")
        assert client.status(RANK).epoch == 0
        assert_true(client, engine)


def test_engine_restarts_while_we_are_held_up_what_it_had_sent_before_is_not_believed(
    engine: FakeEngine,
) -> None:
    sink = BlockingSink()
    endpoints = engine.endpoint, engine.replay_endpoint or ""
    with Subscriber(
        [worker_of(engine)],
        sink=sink,
        replay_policy=REPLAYS,
        socket_options=SocketOptions(hwm=4_000, reconnect=0.01),
    ) as stream:
        stream.wait_live(PATIENCE)
        engine.serve(prompt(0))
        sink.wait_blocked()
        for number in range(1, 1000):  # more than is taken at once
            engine.serve(prompt(number))
        engine.close()
        with SilentEngine(*endpoints) as new:
            new.wait_met()  # ZeroMQ connects by itself; what came before is not read
            sink.go_on.set()
            new.answer_until(
                lambda: stream.status(RANK).epoch > 0 and stream.status(RANK).state is State.LIVE
            )
            status = stream.status(RANK)
    restarted = max(n for n, item in enumerate(sink.items) if isinstance(item, RankRestarted))
    assert not [item for item in sink.items[restarted:] if isinstance(item, RankBatch)]
    assert (status.seq, status.complete) == (None, True)
    assert status.counters["unread_dropped"] > 0


def serve_growing(engine: FakeEngine, tokens: list[int]) -> None:
    """Serve beginnings of a prompt, each longer than the one before: a batch for each."""
    for length in (40, 60, 80, 100):
        engine.serve(tokens[:length])
    # All is sent: who connects now gets none of it live, not even the end, as if it followed on.
    until(lambda: engine.statistics()["sent"] == engine.published)


def assert_replaced(client: Client, engine: FakeEngine) -> None:
    """Assert that the index comes to hold what the engine does, and nothing of the old prompt."""
    caught_up(client, engine)
    assert client.match(OLD)[RANK].tokens == 0
    assert_true(client, engine, prompts=[OLD, NEW])
