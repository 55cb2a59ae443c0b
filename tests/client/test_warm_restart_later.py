"""Workers that a router discovers after its start: what was saved of them is used once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvindex import Client, ConfigurationError, Rank, RankStatus, Worker
from kvindex.index.snapshot import SnapshotReader, SnapshotRecord
from kvindex.subscribe import StreamItem, Tap
from kvindex.testing import FakeEngine, ManualClock
from tests.client.conftest import RANK, replayed, resumed, save_worker, two_engines
from tests.live import (
    PROMPTS,
    assert_true,
    caught_up,
    client_of,
    worker_of,
)

pytestmark = pytest.mark.e2e


def test_nothing_is_answered_from_what_is_kept_aside(engine: FakeEngine, path: Path) -> None:
    assert engine.lookup(PROMPTS[0]).tokens > 0
    with client_of(resume=path) as client:
        assert client.ranks == client.index.ranks == ()
        assert list(client.match(PROMPTS[0])) == []
        assert len(client.index) == 0


def test_a_worker_that_is_added_while_the_router_saves_is_in_the_file(
    engine: FakeEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(resume=path) as client:
        adding = threading.Thread(target=client.add, args=(worker_of(engine),))
        records = client._saved.records

        def added_just_now() -> list[SnapshotRecord]:
            adding.start()
            adding.join(0.2)  # as far as it comes: not to its end
            return records()

        monkeypatch.setattr(client._saved, "records", added_just_now)
        assert client.save(path) == (RANK,)
        adding.join()
    with client_of(worker_of(engine), resume=path) as client:
        caught_up(client, engine)
        assert replayed(client) == 0


class DeafTap:
    """A tap that ignores everything."""

    patience = 0.0

    def batch(self, rank: Rank, payload: bytes) -> None: ...

    def item(self, item: StreamItem) -> None: ...

    def restored(self, rank: Rank, section: bytes) -> None: ...

    def statuses(self, statuses: Sequence[RankStatus]) -> None: ...


@pytest.mark.parametrize("tap", [None, DeafTap()], ids=["untapped", "tapped"])
def test_what_nobody_adds_is_given_up_in_time_and_not_saved_again(
    engine: FakeEngine, path: Path, tap: Tap | None
) -> None:
    clock = ManualClock(1000.0)
    with Client(resume=path, resume_within=60.0, clock=clock, tap=tap) as client:
        clock.advance(59.9)
        _let_it_turn(client)
        assert resumed(client) == {"aside": 1, "restored": 0, "dropped": {}}
        clock.advance(0.2)
        _let_it_turn(client)
        assert resumed(client) == {"aside": 0, "restored": 0, "dropped": {"expired": 1}}
        assert client.save(path) == ()
        client.add(worker_of(engine))
        caught_up(client, engine)
        assert replayed(client) == engine.published
    with SnapshotReader(path) as reader:
        assert list(reader) == []


def _let_it_turn(client: Client) -> None:
    """Return when the subscriber's thread has ended a turn that began after this was called."""
    for _ in range(2):
        client.subscriber.call(lambda: None)


def test_for_ever_is_a_time(engine: FakeEngine, path: Path) -> None:
    with client_of(resume=path, resume_within=float("inf")) as client:
        _let_it_turn(client)
        assert resumed(client)["aside"] == 1


def test_a_worker_that_grows_rank_by_rank_goes_on_rank_by_rank(path: Path) -> None:
    with two_engines("engine", "engine", 1) as (zero, one):
        save_worker(path, zero, one)
        with client_of(resume=path) as client:
            client.add(worker_of(zero))
            caught_up(client, zero)
            assert client.index.ranks == client.ranks == (RANK,)
            assert resumed(client) == {"aside": 1, "restored": 1, "dropped": {}}
            client.add(worker_of(one))
            caught_up(client, zero, one)
            assert resumed(client) == {"aside": 0, "restored": 2, "dropped": {}}
            assert (replayed(client, zero.rank), replayed(client, one.rank)) == (0, 0)
            assert_true(client, zero, one)
            client.remove(one.rank)
            client.add(worker_of(one))  # what was saved of it is used up
            caught_up(client, zero, one)
            assert replayed(client, one.rank) == one.published
            assert_true(client, zero, one)


def test_a_worker_that_cannot_be_added_uses_nothing_up(
    engine: FakeEngine, path: Path, tmp_path: Path
) -> None:
    with client_of(resume=path) as client:
        with pytest.raises(ConfigurationError):
            client.add(Worker("engine", f"ipc://{tmp_path}/none/there", bind=True))
        assert resumed(client) == {"aside": 1, "restored": 0, "dropped": {}}
        client.add(worker_of(engine))
        caught_up(client, engine)
        assert replayed(client) == 0
        with pytest.raises(ConfigurationError, match="already"):
            client.add(worker_of(engine))
        assert_true(client, engine, prompts=PROMPTS)
