"""What is wrong and what to try: in wait_live's TimeoutError and in the status."""

from __future__ import annotations

import itertools
import socket
from contextlib import ExitStack

import pytest

from kvindex import (
    Client,
    EventBatch,
    NotLiveError,
    ReplayPolicy,
    State,
    Worker,
    ZmqEventPublisher,
    connect,
)
from kvindex.subscribe.connection import HostCheck
from kvindex.testing import FakeEngine, FaultyLink
from kvindex.wire import encode_batch, live_frames
from tests.live import (
    PATIENCE,
    QUICK,
    caught_up,
    client_of,
    explain,
    until,
    wait_counter,
    wait_status,
    worker_of,
)
from tests.publish.publish_peers import Context
from tests.subscribe.peers import RANK, RawPublisher, prompt, publish_until, stored

pytestmark = pytest.mark.e2e


def complains(client: Client, *words: str) -> None:
    """Wait until the reason has all of these words; then `wait_live` has them too."""
    until(client.statuses, lambda s: all(word in s[RANK].reason for word in words))
    with pytest.raises(TimeoutError) as caught:
        client.wait_live(0.01)
    assert isinstance(caught.value, NotLiveError)
    assert caught.value.timeout == 0.01
    assert "engine/0" in str(caught.value)
    assert client.status(RANK).state is not State.LIVE
    assert all(word in caught.value.reasons[RANK] for word in words)


def test_connecting_to_nothing(unused_port: int) -> None:
    with client_of(Worker("engine", f"tcp://127.0.0.1:{unused_port}")) as client:
        complains(client, f"nothing listens at tcp://127.0.0.1:{unused_port}", "failed attempts")


def test_publisher_that_connects_instead_of_binding(unused_port: int) -> None:
    # An engine given "tcp://127.0.0.1:PORT" connects there: for us nothing listens.
    with ZmqEventPublisher(endpoint=f"tcp://127.0.0.1:{unused_port}"):
        with client_of(Worker("engine", f"tcp://127.0.0.1:{unused_port}")) as client:
            complains(client, "connects instead of listening", "bind=True", "tcp://*:PORT")


def test_wrong_port_where_the_replay_socket_answers(engine: FakeEngine) -> None:
    with client_of(Worker("engine", str(engine.replay_endpoint))) as client:
        complains(client, "not as the expected ZeroMQ socket", "replay port")


def test_wrong_port_where_something_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with client_of(Worker("engine", f"tcp://127.0.0.1:{port}")) as client:
            complains(client, "has not shaken hands as ZeroMQ does")


def test_a_dead_engine_is_not_called_a_wrong_port_because_of_what_once_answered_there() -> None:
    """`kvindex doctor` listens at a dead engine's port for a moment, as port scanners connect."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(PATIENCE)
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        client = stack.enter_context(client_of(Worker("engine", endpoint)))
        server.accept()[0].close()
        complains(client, "not as the expected ZeroMQ socket")
        server.close()
        complains(client, f"nothing listens at {endpoint}")


def test_topic_that_filters_everything_is_named_beside_the_one_that_is_sent() -> None:
    with FakeEngine("engine", topic="kv-events") as engine:
        engine.serve(prompt(0))
        with client_of(worker_of(engine, topic="kv@pod-1")) as client:
            wait_counter(client, RANK, "filtered_by_topic")
            complains(client, "'kv@pod-1' filters out everything", "'kv-events'")
            status = client.status(RANK)
            assert not status.complete
            assert status.lag == status.counters["filtered_by_topic"] > 0


def test_a_number_that_leaps_shows_as_the_largest_lag_that_every_reader_can_hold(
    context: Context,
) -> None:
    publisher = RawPublisher(context)
    patient = ReplayPolicy(timeout=10 * PATIENCE)
    with client_of(Worker("engine", publisher.endpoint), replay_policy=patient) as client:
        publisher.wait_subscribed()
        payload = encode_batch(EventBatch(ts=1.0, events=[]))
        publisher.send(*(live_frames(b"", seq, payload) for seq in (0, 2**64 - 2)))
        wait_status(client, RANK, seq=0, lag=2**63 - 1)


def test_topic_that_filters_everything_shows_live_without_replay() -> None:
    with FakeEngine("engine", replay=False) as engine:
        with client_of(worker_of(engine, topic="kv")) as client:
            publish_until(
                client,
                lambda number: engine.serve(prompt(number)),
                lambda status: status.counters.get("filtered_by_topic"),
            )
            complains(client, "filters out everything")


def test_a_topic_that_fits_is_no_hindrance() -> None:
    with FakeEngine("engine", topic="kv-events") as engine:
        engine.serve(prompt(0))
        with client_of(worker_of(engine, topic="kv")) as client:
            client.wait_live(PATIENCE)
            assert client.match(prompt(0))[RANK].tokens == 64


def test_an_idle_engine_with_a_topic_becomes_live_after_a_while() -> None:
    with FakeEngine("engine", topic="kv-events", dialect="vllm-0.20.0") as engine:
        with client_of(worker_of(engine, topic="kv")) as client:
            client.wait_live(PATIENCE)


def test_replay_port_where_nothing_listens(engine: FakeEngine, unused_port: int) -> None:
    worker = Worker("engine", engine.endpoint, replay=f"tcp://127.0.0.1:{unused_port}")
    with client_of(worker) as client:
        complains(client, f"nothing listens at tcp://127.0.0.1:{unused_port}", "replay")


def test_replay_port_that_is_silent(engine: FakeEngine, link: FaultyLink) -> None:
    link.silence_replay()
    with client_of(worker_of(engine, link), replay_policy=QUICK) as client:
        complains(client, "replay", "silent", str(link.replay_endpoint))


@pytest.mark.parametrize("neighbour_is_busy", [False, True])
def test_the_replay_port_of_another_engine_leaves_none_of_its_blocks_and_is_named(
    engine: FakeEngine, other: FakeEngine, neighbour_is_busy: bool
) -> None:
    numbers = itertools.count()
    theirs = next(numbers)
    other.serve(prompt(theirs))
    for _ in range(20):
        engine.serve(prompt(next(numbers)))
    with client_of(worker_of(engine)) as earlier:
        caught_up(earlier, engine)  # all of that was sent before the next one connects
    worker = Worker("engine", engine.endpoint, replay=other.replay_endpoint)
    with client_of(worker) as client:
        client.wait_live(PATIENCE)

        def live() -> int:
            return client.status(RANK).counters.get("live", 0)

        # What is published before the subscription has arrived is lost: no replay brings it.
        until(lambda: engine.serve(prompt(next(numbers))) and live())
        for _ in range(50):
            before = live()
            ours = next(numbers)
            engine.serve(prompt(ours))
            if neighbour_is_busy:
                other.serve(prompt(next(numbers)))
            wait_counter(client, RANK, "live", before + 1)
            status = wait_status(client, RANK, lag=0)
            if "foreign_replay" in status.counters:
                break
        status = wait_status(client, RANK, state=State.LIVE, seq=engine.published - 1)
        assert (status.complete, status.losses) == (False, 1), explain(client, RANK)
        assert "another publisher's, check replay=" in status.reason
        assert str(other.replay_endpoint) in status.reason
        assert client.match(prompt(theirs))[RANK].tokens == 0
        assert client.match(prompt(ours))[RANK].tokens == engine.lookup(prompt(ours)).tokens > 0


def test_an_engine_that_starts_late_is_found(engine: FakeEngine, link: FaultyLink) -> None:
    link.cut()
    engine.serve(prompt(0))
    with client_of(worker_of(engine, link)) as client:
        complains(client, "nothing listens")
        link.heal()
        client.wait_live(PATIENCE)
        wait_status(client, RANK, seq=0, complete=True, reason="")


def test_one_engine_under_two_names_is_warned_of_unless_their_topics_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = "tcp://127.0.0.1:1"
    with connect([Worker("a", endpoint, topic="x"), Worker("b", endpoint, topic="y")]) as client:
        assert "are both at" not in caplog.text
        client.add(Worker("c", [endpoint], topic="x"))
    assert f"workers 'a' and 'c' are both at {endpoint}" in caplog.text


def test_a_rank_whose_replay_never_answered_says_so_while_it_is_live_and_once_in_the_log(
    engine: FakeEngine, unused_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_port}"
    worker = Worker("engine", engine.endpoint, replay=endpoint)
    with client_of(worker, replay_policy=QUICK) as client:
        client.wait_live(PATIENCE)
        status = client.status(RANK)
        assert "replay requests were not answered" in status.reason
        assert endpoint in status.reason
        assert not status.complete
        with pytest.raises(NotLiveError, match=r"not complete: .* were not answered"):
            client.wait_live(0.0, complete=True)
    logged = [r for r in caplog.records if r.levelname == "WARNING" and endpoint in r.message]
    assert len(logged) == 1, caplog.text


def test_a_rank_without_replay_says_so_while_it_is_live() -> None:
    with FakeEngine("engine", replay=False) as engine, client_of(worker_of(engine)) as client:
        client.wait_live(PATIENCE)
        assert client.status(RANK).reason.startswith("no replay endpoint: ")


def test_an_engine_that_dies_and_comes_back_is_logged_and_its_reason_says_since_when(
    engine: FakeEngine, link: FaultyLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvindex")
    with client_of(worker_of(engine, link)) as client:
        client.wait_live(PATIENCE)
        link.cut()
        until(client.statuses, lambda s: s[RANK].state is State.CONNECTING)
        status = client.status(RANK)
        assert f"connection to {link.endpoint} lost 0 s ago" in status.reason
        assert "is the engine up" not in status.reason
        link.heal()
        client.wait_live(PATIENCE)
    logged = [(r.levelname, r.message) for r in caplog.records if link.endpoint in r.message]
    assert [level for level, _ in logged] == ["INFO", "INFO", "INFO"], logged
    assert logged[0] == logged[2] == ("INFO", f"engine/0: live: {link.endpoint}")
    assert "connecting: connection to" in logged[1][1]


def test_a_host_that_is_unknown_is_told_from_a_port_where_nothing_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(host: str, port: None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(HostCheck.__init__, "__defaults__", (resolve,))
    with client_of(Worker("engine", "tcp://no-such-host.invalid:5557")) as client:
        until(client.statuses, lambda s: "is unknown (" in s[RANK].reason)
        reason = client.status(RANK).reason
        assert "the host 'no-such-host.invalid' is unknown" in reason
        assert "is the engine up" not in reason


def test_two_publishers_behind_one_address_are_named_in_the_reason(
    context: Context,
) -> None:
    relay = RawPublisher(context)
    with client_of(Worker("engine", relay.endpoint)) as client:

        def send(number: int) -> None:
            payload = encode_batch(stored(number))
            for first in (0, 7):  # two engines that count for themselves
                relay.send(live_frames(b"", first + number, payload))

        named = f"several publishers seem to send at {relay.endpoint}"
        publish_until(client, send, lambda status: named in status.reason)
