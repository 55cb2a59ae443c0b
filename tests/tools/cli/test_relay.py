"""`kvindex relay` and `kvindex status nats://…`: from start to end, with a real server."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvindex.testing import FakeEngine, Workload
from kvindex.tools.cli.arguments import size
from tests.live import until
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer
from tests.tools.commands import Run, at, started

pytestmark = [pytest.mark.e2e, needs_ring]

SMALL = ("--max-bytes", "8MB")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_relay_writes_until_it_is_ended_and_status_shows_it(
    number: signal.Signals, server: NatsServer, run: Run
) -> None:
    pool = number.name
    url = f"{server.url}/{pool}"
    with FakeEngine("a") as engine:
        engine.run(Workload(20, seed=1))
        argv = ("relay", server.url, "--pool", pool, *at(engine, "a"), *SMALL)
        with started(*argv, "--relay-name", "first") as command:
            assert command.err.readline() == f"connected to {url}, 1 rank\n"
            assert command.err.readline().startswith("a/0: live")
            report = until(
                lambda: json.loads(run("status", url, "--json").out),
                lambda report: report["snapshots"] and report["is_written"],
            )
            assert report["epoch"].startswith("first")
            assert report["snapshots"][0]["epoch"] == report["epoch"]
            lines = run("status", url, "--require-live").out.splitlines()
            assert f"{pool}: epoch {report['epoch']}" in lines[0]
            assert report["snapshots"][0]["name"] in lines[-1]
            counters = command.end(number).json
    assert counters["relay"]["state"] == "writing"
    assert counters["ranks"]["a/0"]["seq"] == engine.published - 1


def test_status_of_a_pool_that_no_relay_writes_fails_if_that_is_required(
    server: NatsServer, run: Run
) -> None:
    url = f"{server.url}/silent"
    with started("relay", url, "--worker", "a=tcp://127.0.0.1:1", *SMALL) as command:
        assert command.err.readline().startswith("connected")
        until(lambda: json.loads(run("status", url, "--json").out)["epoch"])
        command.end()
    until(lambda: json.loads(run("status", url, "--json").out), lambda own: not own["is_written"])
    assert "no relay writes" in run("status", url, "--require-live", code=3).out


def test_status_of_no_pool_and_of_no_server_says_so(server: NatsServer, run: Run) -> None:
    assert "there is no pool" in run("status", f"{server.url}/none", code=1).err
    assert "no pool is named" in run("status", server.url, code=2).err
    ran = run("status", "nats://127.0.0.1:1/p", "--wait", "1", code=1)
    assert "no connection" in ran.err


def test_status_says_which_file_of_a_connection_cannot_be_used(tmp_path: Path, run: Run) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    ran = run("status", "nats://127.0.0.1:1/p", "--nats-tls-ca", str(tmp_path / "ca.pem"), code=2)
    assert "TLS files" in ran.err


def test_engines_may_be_named_before_and_after_the_options(run: Run) -> None:
    url = "nats://127.0.0.1:1"
    for argv in (
        (url, "--pool", "a.b", "http://e1", "http://e2"),
        (url, "http://e1", "--pool", "a.b", "--engine", "http://e2"),
        ("--pool", "a.b", url, "http://e1"),
    ):
        assert "letters, digits" in run("relay", *argv, code=2).err
    assert "no engine named" in run("relay", url, "--pool", "p", code=2).err
    assert "URL" in run("relay", "--pool", "p", code=2).err


def test_a_relay_that_nats_refuses_ends_with_its_reason(tmp_path: Path, run: Run) -> None:
    with NatsServer(tmp_path, jetstream=False) as server:
        ran = run("relay", server.url, "--pool", "p", "--worker", "a=tcp://127.0.0.1:1", code=1)
    assert "enable JetStream" in ran.err


@pytest.mark.parametrize(("text", "bytes_"), [("1GB", 1 << 30), ("1.5m", 3 << 19), ("9", 9)])
def test_sizes_have_units(text: str, bytes_: int) -> None:
    assert size(text) == bytes_
