"""Who answers at an engine's ports, and what the doctor makes of strangers there."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvindex import ConfigurationError, Curve, Worker, ZmqEventPublisher, connect
from kvindex.testing import FakeEngine, HttpEngine, HttpOptions, ManualClock
from kvindex.tools.doctor import Peer, Target, look, ports, zmtp
from tests.live import PATIENCE, worker_of
from tests.tools.doctor.doctored import (
    BRIEFLY,
    LIVE,
    NEVER_LIVE,
    briefly,
    finds,
    ids,
    look_at,
    port_of,
    stranger,
    the,
    unused,
)

pytestmark = pytest.mark.e2e

zmtp_greet = zmtp.greet


@contextmanager
def bound(kind: int, **options: Any) -> Iterator[str]:
    """A ZeroMQ socket of this kind at a port."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            setattr(sock, name, value)
        sock.bind("tcp://127.0.0.1:*")
        yield sock.getsockopt_string(zmq.LAST_ENDPOINT)


# The handshake ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PUB", "XPUB", "ROUTER", "REP", "SUB"])
def test_a_socket_sends_its_kind_at_once(kind: str) -> None:
    with bound(getattr(zmq, kind)) as endpoint:
        peer = look(endpoint, LIVE.handshake)
        assert (peer.kind, peer.socket_type, peer.mechanism) == ("zmq", kind, "NULL")


def test_a_socket_behind_a_path_sends_its_kind(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as sock:
        sock.bind(f"ipc://{tmp_path}/events")
        assert look(f"ipc://{tmp_path}/events", LIVE.handshake).socket_type == "PUB"
    assert look(f"ipc://{tmp_path}/nothing", LIVE.handshake).kind == "refused"


def test_an_encrypted_socket_sends_its_mechanism() -> None:
    public, secret = zmq.curve_keypair()
    keys = {"curve_publickey": public, "curve_secretkey": secret, "curve_server": 1}
    with bound(zmq.PUB, **keys) as endpoint:
        assert look(endpoint, LIVE.handshake) == Peer(kind="zmq", mechanism="CURVE")


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "http"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "tls"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "other"),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f", "zmq"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53), "zmq"),  # ZMTP 2
        (b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32) + b"\x06" * 9, "zmq"),
        (
            b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32) + b"\x04\x03\x05RE",
            "zmq",
        ),
    ],
)
def test_any_bytes_are_read_within_bounds(sent: bytes, kind: str) -> None:
    def send(connection: socket.socket) -> None:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)

    with stranger(send) as endpoint:
        peer = look(endpoint, LIVE.handshake)
        assert peer.kind == kind
        assert peer.socket_type == ""


def test_a_waiting_server_is_recognized_by_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    briefly(monkeypatch, zmtp, "greet")
    with FakeEngine(publish=False) as engine, HttpEngine(engine) as server:
        assert look(server.url.replace("http", "tcp"), LIVE.handshake).kind == "http"


def test_a_tls_server_is_recognized_by_its_handshake(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    files = ["-nodes", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=test"]
    try:
        subprocess.run(["openssl", *request, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the command openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def shake_hands(connection: socket.socket) -> None:
        try:
            context.wrap_socket(connection, server_side=True).close()
        except OSError:
            connection.close()

    with stranger(shake_hands) as endpoint:
        assert look(endpoint, LIVE.handshake).kind == "tls"


# Publishers ------------------------------------------------------------------------------------


def test_a_port_where_nobody_listens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    briefly(monkeypatch, ports, "_who_dials")
    with unused() as endpoint:
        report = finds(["publisher-refused", "replay-not-named"], Worker("a", endpoint))
        assert report.exit_code == 1


def test_a_publisher_that_connects_is_caught_by_listening_there() -> None:
    with unused() as endpoint, ZmqEventPublisher(0, endpoint, None):
        report = finds(
            ["publisher-connects", "replay-not-named"], Worker("a", endpoint), limits=LIVE
        )
        assert the(report, "publisher-connects").evidence["socket_type"] == "PUB"


def test_a_subscriber_that_dials_a_dead_port_is_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    def greet_last(caller: socket.socket, left: float) -> Peer:
        """After which no publisher is waited for."""
        peer = zmtp.greet(caller, left)
        clock.advance(PATIENCE * bool(peer.socket_type))
        return peer

    monkeypatch.setattr(ports, "greet", greet_last)
    monkeypatch.setattr(ports, "time", SimpleNamespace(monotonic=clock))
    with unused() as endpoint, connect([Worker("other", endpoint)]):
        report = finds(["subscriber-dials", "replay-not-named"], Worker("a", endpoint))
        assert the(report, "subscriber-dials").evidence["socket_type"] == "SUB"


def test_a_publisher_is_found_among_subscribers_that_dial_the_same_port() -> None:
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
        assert look(endpoint, LIVE.handshake).kind == "refused"


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "127.0.0.1:1", ""]
)
def test_what_is_no_endpoint_is_refused_as_such(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="endpoint"):
        look(endpoint, LIVE.handshake)


def test_a_host_that_is_unknown_could_not_be_looked_at() -> None:
    report = look_at(Worker("a", "tcp://no-such-host.invalid:5557", replay=None))
    assert ids(report)[0] == "endpoint-unreachable"


def test_another_server_at_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        endpoint = server.url.replace("http", "tcp")

        def greet(connection: socket.socket, timeout: float) -> Peer:
            waits_for_a_request = connection.getpeername()[1] == port_of(endpoint)
            return zmtp_greet(connection, BRIEFLY if waits_for_a_request else timeout)

        monkeypatch.setattr(zmtp, "greet", greet)
        report = finds(["port-not-zmq"], Worker("a", endpoint, replay=engine.replay_endpoint))
        assert the(report, "port-not-zmq").evidence["protocol"] == "an HTTP server"


def test_a_proxy_without_a_server_is_recognized_by_its_reset() -> None:
    with stranger(socket.socket.close) as endpoint:
        assert ids(look_at(Worker("a", endpoint))) == ["port-reset", "replay-not-named"]


def test_a_silent_port_is_found() -> None:
    with stranger(lambda connection: None) as endpoint:
        report = look_at(Worker("a", endpoint), limits=replace(NEVER_LIVE, handshake=BRIEFLY))
        assert ids(report) == ["port-silent", "replay-not-named"]


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


def test_ports_that_collide_between_ranks_are_found() -> None:
    with FakeEngine(dp_rank=0) as zero, FakeEngine(dp_rank=1) as one:
        announce = {"replay_endpoint": one.endpoint}
        with HttpEngine([zero, one], options=HttpOptions(announce=announce)) as server:
            report = look_at(server.url, passive=True)
            assert ids(report)[0] == "ports-collide"
            seen = the(report, "ports-collide").evidence
            assert seen == {"endpoint": one.endpoint, "publishes": [1], "replays": [0, 1]}


# Replay ----------------------------------------------------------------------------------------


def test_a_replay_endpoint_that_is_missing_is_pointed_out() -> None:
    with FakeEngine(replay=False) as engine, HttpEngine(engine) as server:
        assert ids(look_at(server.url, passive=True, limits=LIVE)) == ["replay-missing"]


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
    briefly(monkeypatch, ports, "_replays")
    with FakeEngine() as engine, bound(zmq.ROUTER) as endpoint:
        assert "replay-silent" in ids(look_at(Worker("a", engine.endpoint, replay=endpoint)))


def test_a_healthy_publisher_gives_no_findings() -> None:
    with FakeEngine() as engine:
        report = look_at(worker_of(engine), limits=LIVE)
        assert (ids(report), report.exit_code) == ([], 0)
