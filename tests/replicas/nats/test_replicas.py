"""Replicas of a pool on a real server: joining, following, and what makes them join anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvindex import ConfigurationError, State, replicas
from kvindex.replicas import nats
from kvindex.wire.errors import QueueTimeoutError
from kvindex.wire.nats import NatsPool
from tests.children import in_child
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.replicas.hand_server import held
from tests.replicas.nats.hand_relay import A, B, RealLog, begun
from tests.replicas.nats.scenes import of

pytestmark = [pytest.mark.e2e, needs_ring]


@pytest.fixture
def log(pool: NatsPool, stack: ExitStack) -> RealLog:
    return begun(pool, stack)


def joined(log: RealLog, stack: ExitStack, stale_after: float = PATIENCE) -> replicas.Replica:
    replica = nats.join(
        str(log.pool), timeout=PATIENCE, stale_after=stale_after, **log.pool.options
    )
    stack.callback(replica.close)
    return replica


def assert_same(log: RealLog, *followers: replicas.Replica) -> None:
    """Store one more block; wait until every replica has all that the relay has, and is live."""
    log.relay.store(A)
    log.relay.show(*log.relay.index.ranks)
    wanted = held(log.relay.index)

    def are_same() -> bool:
        log.turn()  # as a relay does every second
        return all(f.live_ranks() == wanted.keys() and held(f.index) == wanted for f in followers)

    until(are_same)


def test_replicas_join_and_follow(log: RealLog, stack: ExitStack) -> None:
    first = joined(log, stack)
    assert held(first.index) == held(log.relay.index)
    log.relay.add(B)
    log.relay.store(B)
    second = joined(log, stack)
    assert_same(log, first, second)
    log.relay.remove(B)
    assert_same(log, first, second)
    assert first.ranks == (A,)
    replica = until(lambda: of(first), lambda own: own["number"] == log.last)
    assert replica["server"] == str(log.pool)
    assert (replica["epoch"], replica["lag_messages"]) == ("e-1", 0)
    assert replica["lag_seconds"] >= 0
    assert replica["following"]
    assert first.trouble == ""


def test_ranks_are_stale_until_the_relay_has_appended_since(log: RealLog, stack: ExitStack) -> None:
    replica = joined(log, stack)
    assert replica.status(A).state is State.STALE
    assert "nothing recent was received" in replica.status(A).reason
    log.turn()
    replica.wait_live(PATIENCE)


def change_epoch(log: RealLog) -> None:
    log.begin()


def purge(log: RealLog) -> None:
    """Lose a body for good, then go on with a snapshot behind it."""
    log.turn()
    log.relay.store(A)
    log.turn()
    log.purge()
    log.snapshot()


@pytest.mark.parametrize(
    ("change", "reasons"), [(change_epoch, {"new_epoch"}), (purge, {"trimmed", "new_epoch"})]
)
def test_a_replica_joins_anew_and_answers_meanwhile(
    log: RealLog, stack: ExitStack, change: Callable[[RealLog], None], reasons: set[str]
) -> None:
    replica = joined(log, stack)
    assert_same(log, replica)
    log.relay.store(A)
    change(log)
    assert_same(log, replica)
    if change is change_epoch:
        assert of(replica)["rejoins"] == {"new_epoch": 1}
        assert of(replica)["joins"] == 2
    assert set(of(replica)["rejoins"]) <= reasons


def test_whoever_waits_for_a_relay_is_given_the_reason(pool: NatsPool) -> None:
    with pytest.raises(QueueTimeoutError, match="no copy from the relay of nats://"):
        nats.join(str(pool), timeout=0.5)


def test_a_replica_that_follows_at_once_has_its_ranks_later(
    pool: NatsPool, stack: ExitStack
) -> None:
    replica = stack.enter_context(nats.follow(str(pool), stale_after=PATIENCE))
    assert replica.ranks == ()
    until(lambda: of(replica)["join_failures"].get("no_stream"))
    assert_same(begun(pool, stack), replica)


def test_what_cannot_work_is_refused_at_the_call(pool: NatsPool, tmp_path: Path) -> None:
    for options in ({"timeout": 0.0}, {"stale_after": -1.0}, {"user": "u"}):
        with pytest.raises(ConfigurationError):
            nats.join(str(pool), **options)
    with pytest.raises(ConfigurationError, match="tls_ca_file"):
        nats.join(str(pool), timeout=PATIENCE, tls_ca_file=str(tmp_path / "none"))


def test_a_forked_child_shows_that_it_does_not_follow(log: RealLog, stack: ExitStack) -> None:
    replica = joined(log, stack)
    assert_same(log, replica)

    def child() -> None:
        assert replica.trusts()[A].state is State.CLOSED
        assert "was forked" in replica.trouble
        replica.close()

    assert in_child(child) == 0
    assert_same(log, replica)
