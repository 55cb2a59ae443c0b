"""`kvindex serve` from start to end: registered, asked, refused, ended and started again."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex import ConfigurationError, Worker
from kvindex.service.http import raise_descriptors
from kvindex.service.server import Server
from kvindex.service.settings import ServeSettings
from kvindex.service.sources import FixedSource, target_of
from kvindex.testing import FakeEngine
from kvindex.testing.ports import reserve_port
from kvindex.tools.cli.serve import print_beginning
from tests.live import PATIENCE, until
from tests.service.http.scenes import (
    BLOCK,
    Served,
    certificate_in,
    engine,
    matched,
    register,
    serving,
)

pytestmark = pytest.mark.service

PROMPT = list(range(3 * BLOCK))
QUERY = {"token_ids": PROMPT, "model_name": "m"}
TOKEN = "a-token-for-these-tests"


def states(served: Served) -> dict[str, str]:
    """Return the state of each registered rank."""
    return {
        f"{worker['instance_id']}/{rank}": listener["state"]
        for worker in served.get("/workers").json
        for rank, listener in worker["listeners"].items()
    }


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that stays ours while nobody listens at it."""
    holder, port = reserve_port()
    with holder:
        yield port


def test_an_engine_is_registered_asked_killed_and_comes_back() -> None:
    with (
        reserved_port() as live,
        reserved_port() as replayed,
        serving() as served,
    ):
        ports = {"endpoint": f"tcp://127.0.0.1:{live}"}
        ports["replay_endpoint"] = f"tcp://127.0.0.1:{replayed}"
        with engine(**ports) as fake:
            assert register(served, fake).status == 201
            assert register(served, fake).status == 200  # the same again
            fake.serve(PROMPT)
            until(lambda: matched(served, PROMPT) == len(PROMPT))
            until(lambda: served.get("/ready").status == 200)
        until(lambda: states(served), lambda ranks: ranks["1/0"] != "live")
        reasons = until(lambda: served.get("/ready?strict=1"), lambda answer: answer.status == 503)
        assert "1/0" in reasons.json["behind"]
        with engine(**ports, seed=5) as again:
            again.serve(PROMPT[:BLOCK])
            until(lambda: matched(served, PROMPT) == BLOCK)
            until(lambda: states(served) == {"1/0": "live"})


def test_beyond_loopback_a_token_is_needed_but_for_probes_and_no_network_is_dialled() -> None:
    with serving("--host", "0.0.0.0", env={"KVINDEX_TOKEN": TOKEN}) as served, engine() as fake:
        assert served.get("/workers").status == 401
        wrong = served.get("/workers", authorization=f"Bearer {TOKEN}x")
        assert (wrong.status, wrong.json["reason"]) == (401, "token")
        assert "www-authenticate" in wrong.headers
        assert served.post("/query", QUERY).status == 401
        assert served.get("/workers", authorization=f"Bearer {TOKEN}").status == 200
        assert served.get("/health").status == 200
        bare = served.get("/ready")
        assert (bare.status, bare.body) == (200, b"")
        answer = register(served, fake, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status == 403


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_a_registration_that_points_elsewhere_is_refused_and_nothing_is_dialled(
    field: str, at_loopback: Served
) -> None:
    with engine() as fake:  # where else: tests/service/test_guards.py
        assert register(at_loopback, fake, **{field: "tcp://169.254.169.254:80"}).status == 403
    assert at_loopback.get("/workers").json == []


@pytest.fixture(scope="module")
def at_loopback() -> Iterator[Served]:
    with serving() as served:
        yield served


def test_hosts_networks_and_limits_of_the_command_line_hold() -> None:
    limits = ("--max-body", 1000, "--max-ranks", 1)
    host = ("--allowed-host", "kvindex.example")
    networks = ("--register-network", "203.0.113.0/24")
    with serving(*limits, *host, *networks) as served, engine() as fake:

        def status(path: str, body: Any = None, **headers: str) -> int:
            answer = served.post(path, body, **headers) if body else served.get(path, **headers)
            return answer.status

        assert status("/workers", host="evil.example") == 421
        assert status("/query", QUERY, host="evil.example") == 421
        assert status("/workers", host="kvindex.example") == 200
        assert status("/query", QUERY, origin="http://evil.example") == 403
        long = b"[" + b"1," * 1000 + b"1]"
        for path in ("/query", "/register", "/nowhere"):
            assert (path, status(path, long, content_type="application/json")) == (path, 413)
        assert register(served, fake).status == 403  # at loopback
        allowed = {"endpoint": "tcp://203.0.113.9:1", "replay_endpoint": None}
        assert register(served, fake, **allowed).status == 201
        assert register(served, fake, **allowed, dp_rank=1).status == 503
        assert register(served, fake, **allowed).status == 200


def test_more_connections_than_allowed_are_refused() -> None:
    with serving("--max-connections", 1) as served:
        kept = served.connection()
        assert served.ask("GET", "/health", via=kept).status == 200
        assert served.get("/health").status == 503
        assert served.ask("GET", "/health", via=kept).status == 200
        kept.close()
        until(lambda: served.get("/health").status == 200)


def test_it_speaks_tls_with_the_certificate_that_is_named(tmp_path: Path) -> None:
    cert, key = certificate_in(tmp_path)
    with serving("--tls-cert", cert, "--tls-key", key) as served:
        context = ssl.create_default_context(cafile=str(cert))
        kept = http.client.HTTPSConnection(
            "127.0.0.1", served.port, timeout=PATIENCE, context=context
        )
        assert served.ask("POST", "/query", QUERY, via=kept).status == 404
        assert served.ask("GET", "/workers", via=kept).json == []
        kept.close()


# The end, and what comes after ------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_are_answered_before_it_ends(number: signal.Signals) -> None:
    body = b'{"instance_id": "7"}'
    head = b"POST /register HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving("--shutdown-within", 300) as served:
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as half:
            half.sendall(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
            assert half.recv(4096).startswith(b"HTTP/1.1 100")  # it is being answered
            served.process.send_signal(number)
            until(lambda: "".join(served.said), lambda said: "ending" in said)
            half.sendall(body)
            with half.makefile("rb") as answer:
                assert answer.read().startswith(b"HTTP/1.1 422"), "and closed behind it"
        assert served.process.wait(PATIENCE) == 0


def test_event_streams_end_whole_and_hold_up_no_end() -> None:
    with serving("--shutdown-within", 300) as served:
        stream = served.connection()
        stream.request("GET", "/events")
        response = stream.getresponse()
        assert b"event: fleet" in response.readline() + response.readline()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
        response.read()  # raises if the last chunk is missing
        stream.close()


def test_a_second_signal_ends_it_at_once() -> None:
    with serving("--shutdown-within", 300) as served:
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as open_one:
            open_one.sendall(
                b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n1"
            )
            served.get("/health")
            served.process.send_signal(signal.SIGTERM)
            until(lambda: "".join(served.said), lambda said: "ending" in said)
            assert served.end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_it_starts_warm_and_knows_who_was_registered(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with engine() as fake:
        with serving("--state", state) as served:
            register(served, fake)
            fake.serve(PROMPT)
            until(lambda: matched(served, PROMPT) == len(PROMPT))
            until(lambda: states(served) == {"1/0": "live"})
            assert served.end() == 0
        assert os.stat(state).st_mode & 0o077 == 0
        fake.serve([9] * len(PROMPT))
        with serving("--state", state) as served:
            until(lambda: matched(served, PROMPT) == len(PROMPT))
            until(lambda: matched(served, [9] * BLOCK) == BLOCK)
            assert states(served) == {"1/0": "live"}


def test_what_was_registered_outlives_a_kill(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with engine() as fake:
        with serving("--state", state) as served:
            register(served, fake)
            until(lambda: state.with_name("state.registered.json").exists())
            served.process.kill()
        with serving("--state", state) as served:
            fake.serve(PROMPT)
            until(lambda: matched(served, PROMPT) == len(PROMPT))


def test_a_new_server_begins_with_the_snapshot_of_another(tmp_path: Path) -> None:
    with engine(buffer_steps=1) as fake:
        name = f"1={fake.endpoint},replay={fake.replay_endpoint},model=m"
        with serving("--worker", name) as first:
            for tokens in ([6] * BLOCK, PROMPT, [7] * BLOCK):  # one after the other is heard live
                fake.serve(tokens)
                until(lambda seen=tokens: matched(first, seen) == len(seen))  # type: ignore[misc]
            with serving("--worker", name, "--warm-from", f"http://127.0.0.1:{first.port}") as new:
                # Its engine replays the last batch only: this can come from the snapshot alone.
                until(lambda: matched(new, PROMPT) == len(PROMPT))


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--state", "no snapshot at all", "delete it or move it away"),
        ("--config", "[serve]\nprot = 1\n", "line 2"),
        ("--host", None, "--insecure"),
        ("--port", None, "cannot listen at 127.0.0.1 port"),
    ],
)
def test_a_start_that_cannot_work_is_an_error_that_says_what_to_do(
    tmp_path: Path, at_loopback: Served, option: str, content: str | None, says: str
) -> None:
    value: object = {"--host": "0.0.0.0", "--port": at_loopback.port}.get(option)
    if content is not None:
        value = tmp_path / "file"
        value.write_text(content)
    with pytest.raises(AssertionError, match=says), serving(option, value):
        pass


def test_it_opens_as_many_files_as_the_system_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as served:
        assert served.get("/health").status == 200
        soft, _ = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
        assert soft >= min(hard, 65_536) or hard == resource.RLIM_INFINITY


def test_a_limit_that_is_higher_already_is_what_may_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 20, 1 << 20))
    assert raise_descriptors() == 1 << 20


# The file ---------------------------------------------------------------------------------------


def entry(fake: FakeEngine, name: str) -> str:
    return (
        f'[[workers]]\nname = "{name}"\nendpoint = "{fake.endpoint}"\n'
        f'replay = "{fake.replay_endpoint}"\nmodel = "m"\n'
    )


def test_workers_in_the_file_are_followed_and_a_broken_file_changes_nothing(
    tmp_path: Path,
) -> None:
    config = tmp_path / "kvindex.toml"
    with engine("1") as fake, engine("2") as other:
        fake.serve(PROMPT)
        other.serve(PROMPT[:BLOCK])
        config.write_text(entry(fake, "a"))
        with serving("--config", config) as served:
            until(lambda: matched(served, PROMPT, "a") == len(PROMPT))
            config.write_text(entry(fake, "a") + entry(other, "b"))
            until(lambda: matched(served, PROMPT, "b") == BLOCK)
            config.write_text("[[workers]]\nbroken")
            served.process.send_signal(signal.SIGHUP)
            until(lambda: "".join(served.said), lambda said: "is no TOML" in said)
            assert matched(served, PROMPT, "a") == len(PROMPT)
            config.write_text(entry(other, "a"))  # a has moved, b has gone
            until(lambda: matched(served, PROMPT, "a") == BLOCK)
            until(lambda: set(states(served)) == {"a/0"})


def test_workers_that_are_named_are_added_before_it_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvindex.service.server._FIRST_LOOK", 0.0)
    workers = [Worker(f"w{n}", f"inproc://nobody-publishes-at-{n}") for n in range(50)]
    source = FixedSource(target_of(worker) for worker in workers)
    with Server(ServeSettings(port=0), [source]) as running:
        assert running.missing == {}
        assert len(running.service.catalog.registrations) == 50


def test_it_says_where_it_listens_and_names_a_few_of_many_that_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = SimpleNamespace(
        settings=ServeSettings(host="0.0.0.0", insecure=True),
        service=SimpleNamespace(catalog=SimpleNamespace(registrations=())),
        missing={f"vllm-{n}": "refuses the connection" for n in range(64)},
        url="http://127.0.0.1:8090",
        port=8090,
    )
    print_beginning(running)
    said = capsys.readouterr().out
    assert said.count("not found yet: vllm-") == 5
    assert "and 59 more" in said
    assert "all addresses of this machine, port 8090" in said


def test_a_state_that_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match="no ordinary file"):
        Server(ServeSettings(port=0, state=str(path)))


def test_without_the_native_module_the_command_says_how_to_get_it() -> None:
    said = r"exit code [1-9].*needs the native module.*Unset KVINDEX_BACKEND"
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        with serving(env={"KVINDEX_BACKEND": "python"}):
            pass
