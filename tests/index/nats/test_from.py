"""`kvindex fanout --from` and `kvindex serve --from`: one follower of a pool a host."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvindex import Rank
from kvindex.index.replicas import Replica, ask, join
from kvindex.tools.cli import main
from kvindex.wire.nats import NatsPool
from tests.index.index_events import tokens
from tests.index.nats.hand_relay import HandRelay, RealLog, held
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer
from tests.service.http.served import Served, serving
from tests.tools.commands import started

pytestmark = [pytest.mark.e2e, needs_ring]

A, B = Rank("a"), Rank("b")


def begun(pool: NatsPool, stack: ExitStack) -> RealLog:
    """A log whose first epoch has begun; `a` holds the block 1."""
    log = RealLog(pool, HandRelay(pool.options.get("key_file")))
    stack.callback(log.close)
    log.relay.add(A)
    log.relay.store(A)
    log.relay.show(A)
    log.begin()
    return log


def longest(served: Served, instance: str, *blocks: int) -> int:
    """How many tokens of these blocks an instance is said to hold; below 0: the status."""
    query = {"token_ids": tokens(*blocks), "model_name": "default"}
    answer = served.post("/query", query)
    if answer.status != 200:
        return -answer.status
    return int(answer.json["instances"].get(instance, {}).get("longest_matched", 0))


def live_after_turn(log: RealLog, replica: Replica) -> bool:
    log.turn()
    return replica.live_ranks() == {A}


def ready_after_turn(log: RealLog, served: Served) -> bool:
    log.turn()
    return served.get("/ready").status == 200


def test_a_fanout_hands_a_pool_on_to_the_processes_of_its_host(
    pool: NatsPool, tmp_path: Path
) -> None:
    path, key = str(tmp_path / "kvindex.sock"), tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    sealed = NatsPool(pool.servers, pool.name, {"key_file": str(key)})
    with ExitStack() as stack:
        log = begun(sealed, stack)
        argv = ("fanout", path, "--from", str(pool), "--nats-key-file", str(key))
        command = stack.enter_context(started(*argv))
        assert command.err.readline().startswith(f"listening at {path}, from {pool}, ")
        replica = stack.enter_context(join(path, PATIENCE))
        assert held(replica.index) == held(log.relay.index)
        until(lambda: live_after_turn(log, replica))
        assert until(command.err.readline, lambda line: "a/0: live" in line)
        report = ask(path, PATIENCE)
        assert report["replica"]["server"] == str(pool)
        assert report["ranks"]["a/0"]["state"] == "live"
        ran = command.end()
        assert ran.json["replicas"] == 1


def test_a_fanout_prints_why_it_does_not_follow(pool: NatsPool, tmp_path: Path) -> None:
    path = str(tmp_path / "kvindex.sock")
    with started("fanout", path, "--from", str(pool)) as command:
        assert command.err.readline().startswith("listening at")
        assert until(command.err.readline, lambda line: "no_stream" in line)
        command.end()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_answers_for_the_ranks_of_a_pool(pool: NatsPool, processes: int) -> None:
    with ExitStack() as stack:
        log = begun(pool, stack)
        argv = ("--from", pool, "--processes", processes)
        served = stack.enter_context(serving(*argv))
        until(lambda: longest(served, "a", 1) == 4)
        log.relay.add(B)
        log.relay.store(B)
        log.relay.show(B)
        log.turn()
        until(lambda: longest(served, "b", 2) == 4)
        log.relay.remove(B)
        log.turn()
        until(lambda: longest(served, "b", 2) == 0)
        log.relay = HandRelay()
        log.relay.add(B)
        log.relay.store(B)
        log.relay.show(B)
        log.begin()
        until(lambda: longest(served, "b", 1) == 4)
        worker = {"instance_id": 7, "endpoint": "tcp://h:1", "block_size": 4}
        refused = served.post("/register", {**worker, "model_name": "default"})
        assert refused.status == 400
        assert f"this server follows {pool}: register engines with the relay" in str(refused.body)
        assert served.get("/snapshot").status == 404
        assert "b" in str(served.get("/workers").body)
        until(lambda: ready_after_turn(log, served))
        assert served.end() == 0


def test_a_server_is_not_ready_before_it_has_joined(pool: NatsPool) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(serving("--from", pool))
        ready = served.get("/ready")
        assert ready.status == 503
        assert str(pool) in str(ready.body)
        log = begun(pool, stack)
        until(lambda: ready_after_turn(log, served))


@pytest.mark.parametrize("command", [("fanout", "PATH"), ("serve",)])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--worker", "a=tcp://h:1"), "--worker cannot be given beside it"),
        (("--engine", "http://h:1"), "--engine cannot be given beside it"),
        (("--state", "FILE"), "--state cannot be given beside it"),
        (("--removals", "last"), "--removals cannot be given beside it"),
        (("--offload-chunk", "64"), "--offload-chunk cannot be given beside it"),
        (("--max-blocks-per-rank", "7"), "--max-blocks-per-rank cannot be given beside it"),
        (("--nats-user", "u"), "--nats-user has no password"),
        (("--nats-token-file", "FILE"), "--nats-token-file FILE cannot be read"),
    ],
)
def test_what_is_the_relays_cannot_be_given(
    command: tuple[str, ...],
    argv: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [each.replace("PATH", str(tmp_path / "kvindex.sock")) for each in command]
    assert main([*named, "--from", "nats://h/pool", *argv]) == 2
    assert message in capsys.readouterr().err


def test_options_of_nats_need_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fanout", "PATH", "--nats-tls-ca", "FILE"]) == 2
    assert "--nats-tls-ca belongs to --from" in capsys.readouterr().err
    assert main(["serve", "--from", "nats://h"]) == 2
    assert "no pool is named" in capsys.readouterr().err


def test_a_password_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = 'authorization { users: [ { user: "u", password: "p" } ] }'
    secret, path = tmp_path / "secret", str(tmp_path / "kvindex.sock")
    with NatsServer(tmp_path / "nats", extra_config=users) as server, ExitStack() as stack:
        secret.write_text("p\n")
        pool = NatsPool((server.url,), "llama", {"user": "u", "password": "p"})
        begun(pool, stack)
        argv = ("--from", str(pool), "--nats-user", "u", "--nats-password-file", str(secret))
        command = stack.enter_context(started("fanout", path, *argv))
        stack.enter_context(join(path, PATIENCE))
        command.end()
