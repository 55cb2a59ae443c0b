"""How connections are secured, and that each user of the docs may do its own work and no other."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvindex.replicas import nats
from kvindex.replicas.nats import following
from kvindex.routing import Router, SharedLoad
from kvindex.testing import FakeEngine
from kvindex.testing.ports import reserve_port
from kvindex.wire import log_rate
from kvindex.wire import nats as wire_nats
from kvindex.wire.errors import ConfigurationError, NatsError
from kvindex.wire.nats import NatsOptions, NatsPool, open_connection, parse_pool
from tests.docs.pages import DOCS, fences_in
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.nats_server import NatsServer
from tests.replicas.nats.certificates import Files, make_certificates
from tests.replicas.nats.scenes import connection

pytestmark = pytest.mark.e2e

SECRET = "a-secret-of-the-test"


async def connects(pool: NatsPool) -> bool:
    async with connection(pool) as client:
        await client.flush()
        return bool(client.is_connected)


async def refusal(pool: NatsPool) -> str:
    """Why no connection can be made, as long as it is tried."""
    reasons: asyncio.Queue[str] = asyncio.Queue()
    opening = asyncio.ensure_future(
        open_connection(pool, "test", timeout=PATIENCE, on_change=reasons.put_nowait)
    )
    reason = asyncio.ensure_future(reasons.get())
    await asyncio.wait({opening, reason}, return_when=asyncio.FIRST_COMPLETED)
    assert not opening.done()
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    return await reason


# TLS --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def tls(files: Files, *settings: str) -> str:
    lines = [f'cert_file: "{files.cert}"', f'key_file: "{files.key}"', *settings]
    return "tls { " + ", ".join(lines) + " }"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[NatsServer]:
    """A server that encrypts, and requires a certificate of its clients."""
    config = tls(files, "handshake_first: true", f'ca_file: "{files.ca}"', "verify: true")
    with NatsServer(tmp_path_factory.mktemp("nats"), extra_config=config) as server:
        yield server


def own_certificate(files: Files) -> NatsOptions:
    return {"tls_ca_file": files.ca, "tls_cert_file": files.cert, "tls_key_file": files.key}


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_both_ends_show_certificates(
    encrypted: NatsServer, files: Files, scheme: str
) -> None:
    url = f"{scheme}://127.0.0.1:{encrypted.port}"
    assert await connects(parse_pool(url, "llama", own_certificate(files)))


async def test_a_client_without_a_certificate_is_refused(
    encrypted: NatsServer, files: Files
) -> None:
    url = f"tls://127.0.0.1:{encrypted.port}"
    reason = await refusal(parse_pool(url, "llama", {"tls_ca_file": files.ca}))
    assert reason


async def test_a_server_of_another_authority_is_refused(
    encrypted: NatsServer, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path)
    url = f"tls://127.0.0.1:{encrypted.port}"
    assert "CERTIFICATE_VERIFY_FAILED" in await refusal(
        parse_pool(url, "llama", own_certificate(other))
    )
    # By default, the system's authorities count.
    assert "CERTIFICATE_VERIFY_FAILED" in await refusal(parse_pool(url, "llama", {}))


async def test_a_server_with_the_certificate_of_another_address_is_refused(
    tmp_path: Path,
) -> None:
    files = make_certificates(tmp_path / "tls", address="127.0.0.2")
    with NatsServer(tmp_path, extra_config=tls(files, "handshake_first: true")) as server:
        url = f"tls://127.0.0.1:{server.port}"
        assert "IP address mismatch" in await refusal(
            parse_pool(url, "llama", {"tls_ca_file": files.ca})
        )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake that never comes is given up soon."""
    monkeypatch.setattr(wire_nats, "_CONNECT_SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
async def test_a_server_whose_handshake_comes_later_is_refused_with_what_to_set(
    tmp_path: Path, files: Files
) -> None:
    with NatsServer(tmp_path, extra_config=tls(files)) as server:
        pool = parse_pool(f"tls://127.0.0.1:{server.port}", "llama", {"tls_ca_file": files.ca})
        assert "handshake_first" in await refusal(pool)


async def test_a_server_that_offers_no_tls_is_refused(server: NatsServer) -> None:
    assert "handshake_first" in await refusal(
        parse_pool(f"tls://127.0.0.1:{server.port}", "llama", {})
    )


class RecordingServer:
    """Behaves as a NATS server without TLS, and keeps what it receives."""

    INFO = b'INFO {"server_id":"x","version":"2.12.0","auth_required":true,"headers":true}\r\n'

    def __init__(self, *, is_patient: bool) -> None:
        self.received = b""
        self.connections = 0
        self._is_patient = is_patient  # waits for the client's first bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self.connections += 1
                    if self._is_patient:
                        self.received += connection.recv(1 << 16)
                    connection.sendall(self.INFO)
                    while data := connection.recv(1 << 16):
                        self.received += data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_patient", [False, True])
@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_no_secret_is_sent_to_a_server_that_does_not_encrypt(
    scheme: str, is_patient: bool, files: Files
) -> None:
    recording = RecordingServer(is_patient=is_patient)
    try:
        for secured in ({"user": "ann", "password": SECRET}, {"token": SECRET}):
            options: Any = {**secured, "tls_ca_file": files.ca}
            await refusal(parse_pool(f"{scheme}://{recording.url}", "llama", options))
    finally:
        recording.close()
    assert recording.connections
    assert SECRET.encode() not in recording.received
    assert b"CONNECT" not in recording.received


async def test_the_recording_server_sees_what_is_sent_without_tls() -> None:
    recording = RecordingServer(is_patient=False)
    try:
        pool = parse_pool(f"nats://{recording.url}", "llama", {"token": SECRET})
        with pytest.raises(NatsError, match=r"no connection to .* in 0\.5 s"):
            await open_connection(pool, "test", timeout=0.5)
    finally:
        recording.close()
    assert SECRET.encode() in recording.received


async def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    pool = parse_pool("tls://127.0.0.1:1", "llama", {"tls_ca_file": str(nonsense)})
    with pytest.raises(ConfigurationError, match="the TLS files cannot be used"):
        await open_connection(pool, "test")


# Who may connect --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import nkeys

    path = tmp_path_factory.mktemp("nkeys") / "seed"
    path.write_bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    return path


def public_key(seed: Path) -> str:
    import nkeys

    return str(nkeys.from_seed(bytearray(seed.read_bytes())).public_key.decode())


@pytest.mark.parametrize("way", ["password", "token", "nkey"])
async def test_who_shows_what_the_server_expects_connects_and_no_other(
    tmp_path: Path, seed_file: Path, way: str
) -> None:
    import nkeys

    other = tmp_path / "other"
    other.write_bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    config, right, wrongs = {
        "password": (
            f'user: ann, password: "{SECRET}"',
            {"user": "ann", "password": SECRET},
            [{"user": "ann", "password": "x"}, {"user": "bob", "password": SECRET}, {}],
        ),
        "token": (f'token: "{SECRET}"', {"token": SECRET}, [{"token": "wrong"}]),
        "nkey": (
            f"users: [{{ nkey: {public_key(seed_file)} }}]",
            {"nkey_file": str(seed_file)},
            [{"nkey_file": str(other)}],
        ),
    }[way]
    options: Any = right
    with NatsServer(tmp_path, extra_config=f"authorization {{ {config} }}") as server:
        assert await connects(parse_pool(server.url, "llama", options))
        for wrong in wrongs:
            options = wrong
            reason = await refusal(parse_pool(server.url, "llama", options))
            assert "Authorization Violation" in reason
            assert "check user, token, nkey or credentials" in reason


# nats-py leaves the sockets of refused attempts to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.parametrize(
    "trouble",
    [
        f'authorization {{ user: ann, password: "another-{SECRET}" }}',
        "max_connections: 1",  # nats-py does not connect again after this one
    ],
)
def test_all_go_on_when_they_are_admitted_again(trouble: str, tmp_path: Path) -> None:
    config = f'authorization {{ user: ann, password: "{SECRET}" }}'
    options: NatsOptions = {"user": "ann", "password": SECRET}
    prompt = list(range(64))
    with NatsServer(tmp_path, extra_config=config) as server, FakeEngine() as engine:
        url = f"{server.url}/llama"
        with (
            nats.Relay(worker_of(engine), url, max_bytes=8 << 20, **options) as relay,
            nats.join(url, timeout=PATIENCE, **options) as replica,
            SharedLoad(url, **options) as load,
        ):
            replica.wait_live(PATIENCE)
            until(lambda: load.statistics()["connected"])
            server.reload(trouble)
            until(lambda: relay.statistics()["relay"]["connection"] or replica.trouble)
            server.reload(config)
            until(lambda: load.statistics()["connected"])
            engine.serve(prompt)
            engine.flush()
            until(lambda: replica.match(prompt).best is not None)
            replica.wait_live(PATIENCE)
            until(lambda: not relay.statistics()["relay"]["connection"])
    gc.collect()  # here, where the warnings are expected


@pytest.mark.parametrize("option", ["nkey_file", "credentials_file"])
async def test_a_file_without_a_key_is_refused(
    server: NatsServer, tmp_path: Path, option: str
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    options: Any = {option: str(nonsense)}
    with pytest.raises(ConfigurationError, match=f"{option}: .*nonsense has no key"):
        await open_connection(parse_pool(server.url, "llama", options), "test")


async def test_no_answer_is_an_error_in_time_that_names_the_pool() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = parse_pool(f"nats://127.0.0.1:{silent.getsockname()[1]}", "llama", {})
        with pytest.raises(NatsError, match=r"no connection to nats://.*/llama in 0\.2 s"):
            await open_connection(pool, "test", timeout=0.2)


# The rights of the docs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with the three users of the docs."""
    (rights,) = (
        fence.text
        for fence in fences_in(DOCS / "how-to" / "many-machines.md", "text")
        if fence.text.startswith("authorization {")
    )
    with NatsServer(tmp_path_factory.mktemp("nats"), extra_config=rights) as server:
        yield server


PASSWORDS = {"relay": "change-me-1", "replica": "change-me-2", "gateway": "change-me-3"}


PROMPT, LATER = list(range(100)), list(range(200))


def user(name: str) -> NatsOptions:
    return {"user": name, "password": PASSWORDS[name]}


RELAY: Any = {**user("relay"), "max_bytes": 32 << 20}


def as_user(server: NatsServer, name: str) -> NatsPool:
    return parse_pool(server.url, "llama", user(name))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as above
@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"user": "replica", "password": "wrong"}, "'Authorization Violation'; check user"),
        (user("gateway"), "permissions violation"),
        (None, "ConnectionRefusedError"),
    ],
)
def test_a_replica_that_cannot_join_shows_why_between_attempts_too_and_warns_once(
    guarded: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: Any,
    reason: str,
) -> None:
    monkeypatch.setattr(following, "open_connection", partial(open_connection, timeout=2.0))
    monkeypatch.setattr(log_rate, "_INTERVAL", math.inf)
    holder, nobodys = reserve_port()
    url = guarded.url if options else f"nats://127.0.0.1:{nobodys}"
    with holder, nats.follow(url, "llama", **(options or {})) as replica:
        until(lambda: reason in replica.trouble)
        shown = set()

        def has_failed_twice() -> bool:
            shown.add(replica.trouble)
            failures: dict[str, int] = replica.statistics()["replica"]["join_failures"]
            return failures.get("nats", 0) >= 2

        until(has_failed_twice)
        assert not shown & {"joining", "connecting"}
        until(lambda: reason in replica.trouble)
    gc.collect()  # here, where the warnings are expected
    warnings = [r.getMessage() for r in caplog.records if r.name.endswith("replicas.replica")]
    assert len(warnings) == 1


async def denied(server: NatsServer, name: str, subject: str, *, subscribes: bool = False) -> bool:
    """Whether the server refuses that this user publishes (or subscribes) to a subject."""
    notes: list[str] = []
    async with connection(as_user(server, name), on_change=notes.append) as client:
        if subscribes:
            await client.subscribe(subject)
        else:
            await client.publish(subject, b"{}")
        for _ in range(2):  # the first one may be asked before what was published
            await client.flush(timeout=int(PATIENCE))
        return any("permissions violation" in note.lower() for note in notes)


LOG, BUCKET = "KVINDEX_llama", "OBJ_KVINDEX_llama_snapshots"


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        *(("replica", f"$JS.API.STREAM.{verb}.{LOG}") for verb in ("DELETE", "PURGE", "UPDATE")),
        ("replica", "kvindex.llama.log.a-1"),
        ("replica", "kvindex.llama.load"),
        ("replica", f"$O.{BUCKET.removeprefix('OBJ_')}.M.x"),
        ("replica", f"$JS.API.STREAM.CREATE.{LOG}"),
        ("replica", f"$JS.API.STREAM.PURGE.{BUCKET}"),
        ("gateway", "kvindex.llama.log.a-1"),
        ("gateway", f"$JS.API.STREAM.INFO.{LOG}"),
        ("gateway", f"$JS.API.CONSUMER.CREATE.{LOG}"),
        ("gateway", f"$JS.API.STREAM.MSG.GET.{BUCKET}"),
        ("relay", f"$JS.API.STREAM.DELETE.{LOG}"),
        ("relay", "kvindex.other.log.a-1"),
        ("relay", "kvindex.llama.load"),
        ("replica", "listen kvindex.llama.log.*"),
        ("replica", "listen kvindex.llama.load"),
        ("gateway", "listen kvindex.llama.log.*"),
        ("gateway", "listen _INBOX.>"),
        ("relay", "listen >"),
    ],
)
async def test_a_user_may_neither_do_the_work_of_another_nor_listen_to_it(
    guarded: NatsServer, name: str, subject: str
) -> None:
    listened = subject.removeprefix("listen ")
    assert await denied(guarded, name, listened, subscribes=listened != subject)


async def test_a_gateway_may_share_its_load(guarded: NatsServer) -> None:
    for subscribes in (False, True):
        assert not await denied(guarded, "gateway", "kvindex.llama.load", subscribes=subscribes)


def test_a_relay_a_replica_and_gateways_do_their_work_with_the_rights_of_the_docs(
    guarded: NatsServer,
) -> None:
    with FakeEngine("vllm-0") as engine:
        engine.serve(PROMPT)
        with nats.Relay([worker_of(engine)], guarded.url, pool="llama", **RELAY) as relay:
            caught_up(relay.client, engine)
            with (
                nats.join(guarded.url, "llama", PATIENCE, **user("replica")) as replica,
                SharedLoad(guarded.url, "llama", **user("gateway")) as first,
                SharedLoad(guarded.url, "llama", **user("gateway")) as second,
            ):
                replica.wait_live(timeout=PATIENCE)
                assert replica.match(PROMPT)[engine.rank].tokens == 96
                routers = Router(replica, loads=first), Router(replica, loads=second)
                with routers[0].reserve(PROMPT):
                    until(lambda: routers[1].load(engine.rank).open_requests == 1)
                engine.serve(LATER)
                until(replica.statuses, lambda now: now[engine.rank].seq == engine.published - 1)
                assert replica.match(LATER)[engine.rank].tokens == 192
        # Another one continues from the pool's snapshot, and purges what is old.
        with nats.Relay([worker_of(engine)], guarded.url, pool="llama", **RELAY) as relay:
            caught_up(relay.client, engine)
            assert relay.client.match(LATER)[engine.rank].tokens == 192
            statistics = relay.statistics()
    assert "ermission" not in str(statistics), statistics
