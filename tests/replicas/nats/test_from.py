"""`kvindex serve --from`: a server that follows a pool."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs kvindex[server]")

from kvindex.tools.cli import main
from kvindex.wire.nats import NatsPool
from tests.index.index_events import tokens
from tests.live import until
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer
from tests.replicas.nats.hand_relay import B, HandRelay, RealLog, begun
from tests.service.http.scenes import Served, serving

pytestmark = [pytest.mark.e2e, needs_ring]


def longest(served: Served, instance: str, *blocks: int) -> int:
    """How many tokens of these blocks an instance is said to hold; below 0: the status."""
    query = {"token_ids": tokens(*blocks), "model_name": "default"}
    answer = served.post("/query", query)
    if answer.status != 200:
        return -answer.status
    return int(answer.json["instances"].get(instance, {}).get("longest_matched", 0))


def ready_after_turn(log: RealLog, served: Served) -> bool:
    log.turn()
    return served.get("/ready").status == 200


def test_a_server_answers_for_the_ranks_of_a_pool(pool: NatsPool) -> None:
    with ExitStack() as stack:
        log = begun(pool, stack)
        served = stack.enter_context(serving("--from", pool))
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
    argv: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--from", "nats://h/pool", *argv]) == 2
    assert message in capsys.readouterr().err


def test_options_of_nats_need_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--nats-tls-ca", "FILE"]) == 2
    assert "--nats-tls-ca belongs to --from" in capsys.readouterr().err
    assert main(["serve", "--from", "nats://h"]) == 2
    assert "no pool is named" in capsys.readouterr().err


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    users = 'authorization { users: [ { user: "u", password: "p" } ] }'
    secret = tmp_path / "secret"
    with NatsServer(tmp_path / "nats", extra_config=users) as server, ExitStack() as stack:
        secret.write_text("p\n")
        pool = NatsPool((server.url,), "llama", {"user": "u", "password": "p"})
        log = begun(pool, stack)
        argv = ("--from", pool, "--nats-user", "u", "--nats-password-file", secret)
        served = stack.enter_context(serving(*argv))
        until(lambda: ready_after_turn(log, served))
