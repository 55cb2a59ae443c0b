"""Who answers at an engine's ports, and what the doctor makes of strangers there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from kvindex import Curve, Worker, ZmqEventPublisher, connect
from kvindex.testing import FakeEngine, HttpEngine, HttpOptions
from kvindex.tools.doctor import Target, claims
from tests.live import PATIENCE, worker_of
from tests.tools.doctor.doctored import (
    BRIEFLY,
    LIVE,
    NEVER_LIVE,
    bound,
    briefly,
    finds,
    ids,
    look_at,
    stranger,
    the,
    unused,
)

pytestmark = pytest.mark.e2e

NEVER_DIALLED = replace(NEVER_LIVE, handshake=BRIEFLY)


# Publishers ------------------------------------------------------------------------------------


def test_a_port_where_nobody_listens_is_refused(tmp_path: Path) -> None:
    with unused() as endpoint:
        for nobody in (endpoint, f"ipc://{tmp_path}/nothing"):
            report = look_at(Worker("a", nobody), limits=NEVER_DIALLED)
            assert ids(report) == ["publisher-refused", "replay-not-named"]
            assert report.exit_code == 1


def test_a_publisher_that_connects_is_caught_by_listening_there() -> None:
    kinds = ["publisher-connects", "replay-not-named"]
    with unused() as endpoint, ZmqEventPublisher(0, endpoint, None):
        finds(kinds, Worker("a", endpoint), limits=LIVE)


def test_a_subscriber_that_dials_a_dead_port_is_no_engine() -> None:
    with unused() as endpoint, connect([Worker("other", endpoint)]):
        finds(["subscriber-dials", "replay-not-named"], Worker("a", endpoint))


def test_a_publisher_is_found_among_subscribers_that_dial_the_same_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "_PUBLISHER_RETRIES", PATIENCE)
    with unused() as endpoint, connect([Worker("other", endpoint)]):
        with ZmqEventPublisher(0, endpoint, None):
            report = look_at(Worker("a", endpoint), limits=LIVE)
        assert ids(report) == ["publisher-connects", "replay-not-named"]


def test_a_connection_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where nobody listens at a local port, TCP may choose that very port to dial from.
    def dial_from_there(address: tuple[str, int], timeout: float) -> socket.socket:
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # beside the port's holder
        caller.settimeout(timeout)
        caller.bind(address)
        caller.connect(address)
        return caller

    monkeypatch.setattr(socket, "create_connection", dial_from_there)
    with unused() as endpoint:
        report = look_at(Worker("a", endpoint), limits=NEVER_DIALLED)
    assert ids(report) == ["publisher-refused", "replay-not-named"]


def test_a_host_that_is_unknown_could_not_be_looked_at() -> None:
    report = look_at(Worker("a", "tcp://no-such-host.invalid:5557", replay=None))
    assert ids(report)[0] == "endpoint-unreachable"


def sends(answer: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    return send


@pytest.mark.parametrize(
    ("behaviour", "kind", "protocol"),
    [
        (sends(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "port-not-zmq", "an HTTP server"),
        (sends(b"\x15\x03\x03\x00\x02\x02\x28"), "port-not-zmq", "a TLS server"),
        (sends(b"SSH-2.0-OpenSSH_9.9\r\n"), "port-not-zmq", "another protocol"),
        (socket.socket.close, "port-reset", None),  # as a proxy without a server
        (lambda connection: None, "port-silent", None),
    ],
)
def test_a_stranger_at_the_port_is_named(
    behaviour: Callable[[socket.socket], None], kind: str, protocol: str | None
) -> None:
    silent = replace(NEVER_LIVE, handshake=BRIEFLY)
    with stranger(behaviour) as endpoint:
        limits = silent if kind == "port-silent" else NEVER_LIVE
        report = look_at(Worker("a", endpoint), limits=limits)
        assert ids(report) == [kind, "replay-not-named"]
        assert the(report, kind).evidence.get("protocol") == protocol


def test_a_server_that_waits_for_a_request_is_named() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        endpoint = server.url.replace("http", "tcp")
        report = finds(["port-not-zmq"], Worker("a", endpoint, replay=engine.replay_endpoint))
        assert the(report, "port-not-zmq").evidence["protocol"] == "an HTTP server"


def test_a_greeting_that_breaks_off_is_no_finding_of_its_own() -> None:
    with stranger(sends(b"\xff\0\0\0\0\0\0\0\x01\x7f")) as endpoint:
        report = look_at(Worker("a", endpoint), limits=replace(NEVER_LIVE, handshake=BRIEFLY))
        assert ids(report) == ["stream-not-live", "replay-not-named"]


def test_a_publisher_that_demands_a_key_is_found() -> None:
    server = Curve.generate()
    with ZmqEventPublisher(0, "tcp://*:0", None, curve=server) as publisher:
        assert ids(look_at(Worker("a", publisher.endpoint))) == [
            "port-encrypted",
            "replay-not-named",
        ]
        right = Worker("a", publisher.endpoint, curve=Curve.generate(server.public_key))
        assert ids(look_at(right, limits=LIVE)) == ["replay-not-named"]
        other = Curve.generate(Curve.generate().public_key)
        wrong = look_at(Worker("a", publisher.endpoint, curve=other))
        assert ids(wrong) == ["stream-not-live", "replay-not-named"]


def test_exchanged_endpoints_are_recognized_by_their_kinds() -> None:
    with FakeEngine() as engine:
        assert engine.replay_endpoint is not None
        report = look_at(Worker("a", engine.replay_endpoint, replay=engine.endpoint))
        assert ids(report) == ["publisher-wrong-socket", "replay-wrong-socket"]
        assert the(report, "publisher-wrong-socket").evidence["socket_type"] == "ROUTER"
        assert the(report, "replay-wrong-socket").evidence["socket_type"] == "PUB"


def test_a_socket_of_neither_kind_is_wrong_at_both_endpoints(tmp_path: Path) -> None:
    with bound(zmq.SUB) as (_, endpoint), bound(zmq.PUSH, f"ipc://{tmp_path}/x") as (_, replay):
        report = look_at(Worker("a", endpoint, replay=replay))
        assert ids(report) == ["publisher-wrong-socket", "replay-wrong-socket"]
        assert {finding.evidence["socket_type"] for finding in report.findings} == {"unknown"}


def test_ports_that_collide_between_ranks_are_found() -> None:
    with FakeEngine(dp_rank=0) as zero, FakeEngine(dp_rank=1) as one:
        announce = {"replay_endpoint": one.endpoint}
        with HttpEngine([zero, one], options=HttpOptions(announce=announce)) as server:
            report = look_at(server.url, passive=True)
            assert ids(report)[0] == "ports-collide"
            seen = the(report, "ports-collide").evidence
            assert seen == {"endpoint": one.endpoint, "publishes": [1], "replays": [0, 1]}


# Replay ----------------------------------------------------------------------------------------


def test_a_replay_endpoint_that_was_not_named_is_not_said_to_be_missing_in_the_engine() -> None:
    with FakeEngine() as engine:
        report = finds(["replay-not-named"], Worker("a", engine.endpoint), limits=LIVE)
        assert "replay=tcp://" in the(report, "replay-not-named").remedy
        with HttpEngine(engine, options=HttpOptions(sources=None)) as server:  # it does not say
            target = Target(url=server.url, worker=Worker("a", engine.endpoint))
            assert ids(look_at(target, passive=True, limits=LIVE)) == ["replay-not-named"]


def test_a_replay_port_where_nobody_listens_is_found() -> None:
    with FakeEngine() as engine, unused() as endpoint:
        assert "replay-refused" in ids(look_at(Worker("a", engine.endpoint, replay=endpoint)))


def test_a_replay_port_that_never_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    briefly(monkeypatch, claims, "_replay")
    with FakeEngine() as engine, bound(zmq.ROUTER) as (_, endpoint):
        assert "replay-silent" in ids(look_at(Worker("a", engine.endpoint, replay=endpoint)))


def test_a_healthy_publisher_gives_no_findings() -> None:
    with FakeEngine() as engine:
        report = look_at(worker_of(engine), limits=LIVE)
        assert (ids(report), report.exit_code) == ([], 0)
