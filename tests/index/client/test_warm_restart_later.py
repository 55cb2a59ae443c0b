"""Workers that a router learns of after its start go on from what was saved as well, once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvindex import Client, ConfigurationError, Index, Rank, RankStatus, State, Worker
from kvindex.index.snapshot import SnapshotReader, SnapshotRecord
from kvindex.subscribe import StreamItem, Tap
from kvindex.testing import FakeEngine, ManualClock, Workload
from tests.live import (
    BEFORE,
    MEANWHILE,
    PROMPTS,
    assert_true,
    caught_up,
    client_of,
    save_of,
    wait_status,
    worker_of,
)

pytestmark = pytest.mark.e2e

RANK = Rank("engine", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router.kvindex"


def ranks_in(path: Path) -> list[Rank]:
    with SnapshotReader(path) as reader:
        return [record.rank for record in reader]


def replayed(client: Client, rank: Rank = RANK) -> int:
    return int(client.status(rank).counters.get("replayed", 0))


def resumed(client: Client) -> dict[str, Any]:
    """What became of the ranks in the file; the bytes of those kept aside left out."""
    found = client.statistics()["resume"]
    assert (found.pop("aside_bytes") > 0) == (found["aside"] > 0)
    return dict(found)


def two_engines() -> tuple[FakeEngine, FakeEngine]:
    engines = FakeEngine("engine"), FakeEngine("other")
    for seed, engine in enumerate(engines):
        engine.run(Workload(20, seed=seed))
    return engines


@pytest.mark.parametrize("known", [False, True], ids=["connect-to-none", "connect-to-another"])
def test_a_worker_added_later_replays_what_it_missed_and_nothing_else(
    path: Path, known: bool
) -> None:
    engine, other = two_engines()
    with engine, other:
        engine.run(BEFORE)
        save_of(engine, other, path=path)
        saved = engine.published
        engine.run(MEANWHILE)
        with client_of(*[worker_of(other)] * known, resume=path) as client:
            assert resumed(client) == {"aside": 2 - known, "restored": int(known), "dropped": {}}
            client.add(worker_of(engine))
            caught_up(client, engine)
            assert replayed(client) == engine.published - saved > 0
            assert_true(client, engine, prompts=PROMPTS)
            status = client.status(RANK)
            assert (status.epoch, status.complete, status.restarts) == (0, True, 0)
            client.add(worker_of(other)) if not known else None
            caught_up(client, engine, other)
            assert_true(client, engine, other)
            assert resumed(client) == {"aside": 0, "restored": 2, "dropped": {}}
            assert client.statistics()["thread"].get("cursors_unused", 0) == 0


def test_nothing_is_answered_from_what_is_kept_aside(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        worker, held = worker_of(engine), engine.lookup(PROMPTS[0]).tokens
    assert held > 0
    with client_of(resume=path) as client:
        assert client.ranks == client.index.ranks == ()
        assert list(client.match(PROMPTS[0])) == []
        assert len(client.index) == 0
        client.add(worker)  # its engine is down: answered for, but not as live
        found = client.match(PROMPTS[0])[RANK]
        assert (found.tokens, found.state) == (held, State.CONNECTING)


def test_a_worker_that_is_added_again_begins_anew(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with client_of(resume=path) as client:
            client.add(worker_of(engine))
            caught_up(client, engine)
            assert replayed(client) == 0
            client.remove("engine")
            assert client.index.ranks == ()
            client.add(worker_of(engine))
            caught_up(client, engine)
            assert replayed(client) == engine.published
            assert client.status(RANK).epoch == 0
            assert_true(client, engine, prompts=PROMPTS)
            assert resumed(client) == {"aside": 0, "restored": 1, "dropped": {}}


def test_an_engine_of_the_same_name_elsewhere_does_not_inherit(path: Path) -> None:
    with FakeEngine("engine") as engine, FakeEngine("engine") as namesake:
        engine.run(BEFORE)
        namesake.run(Workload(60, seed=9))
        save_of(engine, path=path)
        assert namesake.published > engine.published
        with client_of(resume=path) as client:
            client.add(worker_of(namesake))
            wait_status(client, RANK, epoch=1)
            caught_up(client, namesake)
            assert_true(client, namesake, prompts=PROMPTS)


def test_an_engine_that_was_started_anew_before_its_worker_is_added_is_noticed(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        engine.restart()
        engine.run(MEANWHILE)
        with client_of(resume=path) as client:
            client.add(worker_of(engine))
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            assert replayed(client) == engine.published
            assert_true(client, engine, prompts=PROMPTS)


def test_a_router_that_saves_before_it_knows_all_workers_loses_none(path: Path) -> None:
    engine, other = two_engines()
    with engine, other:
        save_of(engine, other, path=path)
        engine.run(MEANWHILE)
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert client.save(path) == (engine.rank, other.rank)
        with client_of(resume=path) as client:  # again, and now it knows none
            assert client.save(path) == (engine.rank, other.rank)
            client.add(worker_of(other))
            client.remove("other")
            assert client.save(path) == (engine.rank,), "what was used is not kept"
        with client_of(worker_of(engine), worker_of(other), resume=path) as client:
            caught_up(client, engine, other)
            assert replayed(client, engine.rank) == 0
            assert replayed(client, other.rank) == other.published
            assert_true(client, engine, other)


def test_a_worker_that_is_added_while_the_router_saves_is_in_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
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
    """A tap that wants to know nothing."""

    def batch(self, rank: Rank, payload: bytes) -> None: ...

    def item(self, item: StreamItem) -> None: ...

    def restored(self, rank: Rank, section: bytes) -> None: ...

    def statuses(self, statuses: Sequence[RankStatus]) -> None: ...


@pytest.mark.parametrize("tap", [None, DeafTap()], ids=["untapped", "tapped"])
def test_what_nobody_adds_is_given_up_in_time_and_not_saved_again(
    path: Path, tap: Tap | None
) -> None:
    clock = ManualClock(1000.0)
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
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
    assert ranks_in(path) == []


def _let_it_turn(client: Client) -> None:
    """Return when the subscriber's thread has ended a turn that began after this was called."""
    for _ in range(2):
        client.subscriber.call(lambda: None)


@pytest.mark.parametrize("within", [0, -1.0, float("nan")])
def test_a_time_that_cannot_work_is_refused(path: Path, within: float) -> None:
    with pytest.raises(ConfigurationError, match="resume_within"):
        client_of(resume=path, resume_within=within)


def test_for_ever_is_a_time(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with client_of(resume=path, resume_within=float("inf")) as client:
            _let_it_turn(client)
            assert resumed(client)["aside"] == 1


@pytest.mark.parametrize("later", [False, True], ids=["connect", "add"])
def test_a_rank_for_which_there_is_no_room_begins_anew_alone(path: Path, later: bool) -> None:
    engine, other = two_engines()
    with engine, other:
        engine.run(BEFORE)
        save_of(engine, other, path=path, index=Index(seed=5))
        with SnapshotReader(path) as reader:
            sizes = {record.rank: len(record.section) for record in reader}
        assert sizes[engine.rank] > sizes[other.rank]
        index = Index(seed=5, max_blocks=_blocks(path, other.rank))
        workers = [worker_of(other), worker_of(engine)]
        with client_of(*[] if later else workers, index=index, resume=path) as client:
            for worker in workers if later else []:
                client.add(worker)
            caught_up(client, engine, other)
            assert resumed(client) == {"aside": 0, "restored": 1, "dropped": {"room": 1}}
            assert client.status(engine.rank).counters["refused_room"] == 1
            assert replayed(client, engine.rank) == engine.published
            assert replayed(client, other.rank) == 0
            assert_true(client, other)


def _blocks(path: Path, rank: Rank) -> int:
    return len(Index.load(path).tree(rank))


def test_a_worker_that_grows_rank_by_rank_goes_on_rank_by_rank(path: Path) -> None:
    with FakeEngine("engine") as zero, FakeEngine("engine", dp_rank=1) as one:
        for seed, engine in enumerate((zero, one)):
            engine.run(Workload(20, seed=seed))
        with client_of(_both(zero, one)) as client:
            caught_up(client, zero, one)
            client.save(path)
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


def test_ranks_that_go_by_other_names_than_their_ports_find_their_publishers(path: Path) -> None:
    with FakeEngine("engine") as zero, FakeEngine("engine", dp_rank=1) as one:
        for seed, engine in enumerate((zero, one)):
            engine.run(Workload(20, seed=seed))
        with client_of(_both(one, zero)) as client:
            caught_up(client, zero, one)
            client.save(path)
        zero.run(MEANWHILE)
        with client_of(resume=path) as client:
            client.add(_both(one, zero))
            caught_up(client, zero, one)
            assert_true(client, zero, one)
            assert replayed(client, one.rank) == 0
            assert client.status(zero.rank).restarts == client.status(one.rank).restarts == 0


def _both(*engines: FakeEngine) -> Worker:
    """A worker whose ports are in this order, whatever the engines name themselves."""
    replay = {port: engine.replay_endpoint or "" for port, engine in enumerate(engines)}
    return Worker("engine", {p: e.endpoint for p, e in enumerate(engines)}, replay=replay)


def test_a_worker_that_cannot_be_added_uses_nothing_up(path: Path, tmp_path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
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


def test_without_replay_nothing_restored_stays(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with client_of(resume=path) as client:
            client.add(worker_of(engine, replay=None))
            assert client.match(PROMPTS[0])[RANK].tokens == 0
            status = wait_status(client, RANK, state=State.LIVE, epoch=1)
            assert status.counters["refused_no_replay"] == 1


@pytest.mark.parametrize("later", [False, True], ids=["connect", "add"])
def test_a_file_without_positions_is_of_no_use_and_counted(path: Path, later: bool) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        with client_of(worker_of(engine)) as client:
            caught_up(client, engine)
            client.index.save(path)  # not `Client.save`
        with client_of(*[worker_of(engine)] * (not later), resume=path) as client:
            if later:
                client.add(worker_of(engine))
            caught_up(client, engine)
            assert resumed(client) == {"aside": 0, "restored": 0, "dropped": {"no_cursor": 1}}
            assert replayed(client) == engine.published
            assert client.status(RANK).counters["refused_no_cursor"] == 1
            assert_true(client, engine, prompts=PROMPTS)
            client.remove("engine")
            client.add(worker_of(engine))
            caught_up(client, engine)
            assert "refused_no_cursor" not in client.status(RANK).counters
