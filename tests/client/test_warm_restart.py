"""A router that goes on from what another process saved: quickly, and without phantom blocks.

Each worker is there when the router starts, or is added later.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from kvindex import Index, ReplayPolicy, State
from kvindex.index.snapshot import SnapshotReader
from kvindex.testing import FakeEngine, Workload
from tests.client.conftest import (
    RANK,
    Resume,
    dp_worker,
    replayed,
    resumed,
    save_worker,
    two_engines,
)
from tests.live import (
    BEFORE,
    LATER,
    MEANWHILE,
    PATIENCE,
    PROMPTS,
    QUICK,
    assert_true,
    caught_up,
    client_of,
    followed,
    link_to,
    resident,
    save_of,
    truth,
    wait_status,
    worker_of,
)

pytestmark = pytest.mark.e2e

USED = {"aside": 0, "restored": 1, "dropped": {}}


@pytest.mark.parametrize("missed", [False, True])
def test_only_what_was_missed_is_replayed_and_the_index_is_as_the_engine(
    engine: FakeEngine, resume: Resume, missed: bool
) -> None:
    saved = engine.published
    if missed:
        engine.run(MEANWHILE)
    with resume(worker_of(engine)) as client:
        caught_up(client, engine)
        assert replayed(client) == engine.published - saved
        assert (replayed(client) > 0) == missed
        assert_true(client, engine, prompts=PROMPTS)
        status = client.status(RANK)
        assert (status.epoch, status.complete, status.restarts) == (0, True, 0)
        assert status.counters["resumed"] == 1
        assert resumed(client) == USED
        assert client.statistics()["thread"].get("cursors_unused", 0) == 0
        engine.run(LATER)
        caught_up(client, engine)
        assert_true(client, engine, prompts=PROMPTS)


def test_what_no_buffer_has_any_more_is_still_known(path: Path, resume: Resume) -> None:
    with FakeEngine("engine", buffer_steps=20) as engine:
        with client_of(worker_of(engine)) as client:
            wait_status(client, RANK, state=State.LIVE)
            for request in BEFORE:
                engine.serve(request.token_ids, new_tokens=request.new_tokens)
                caught_up(client, engine)
            client.save(path)
        engine.run(MEANWHILE)
        with resume(worker_of(engine)) as client:
            caught_up(client, engine)
            assert client.status(RANK).complete
            assert_true(client, engine, prompts=PROMPTS)
        with followed(engine) as client:
            assert not client.status(RANK).complete, "a cold start has but the buffer"


def test_a_buffer_that_no_longer_reaches_back_proves_nothing(path: Path, resume: Resume) -> None:
    with FakeEngine("engine", buffer_steps=4) as engine:
        with client_of(worker_of(engine)) as client:
            wait_status(client, RANK, state=State.LIVE)
            engine.run(BEFORE)
            caught_up(client, engine)
            client.save(path)
        engine.run(MEANWHILE)
        with resume(worker_of(engine)) as client:
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            assert not client.status(RANK).complete
            assert replayed(client) == 4
            assert resident(client, RANK).items() <= truth(engine).items()


def test_a_process_that_has_resumed_can_save_again(
    engine: FakeEngine, path: Path, resume: Resume
) -> None:
    for workload in (MEANWHILE, LATER):
        saved = engine.published
        engine.run(workload)
        with resume(worker_of(engine)) as client:
            caught_up(client, engine)
            assert replayed(client) == engine.published - saved
            client.save(path)
    with resume(worker_of(engine)) as client:
        caught_up(client, engine)
        assert replayed(client) == 0
        assert_true(client, engine, prompts=PROMPTS)


def test_saving_under_load_takes_index_and_position_at_one_point(path: Path) -> None:
    paths = [path.with_suffix(f".{number}") for number in range(8)]
    with FakeEngine("engine") as engine:
        with client_of(worker_of(engine)) as client:
            client.wait_live(PATIENCE)
            requests = iter(Workload(160, seed=1))
            for each in paths:
                for request in islice(requests, 20):
                    engine.serve(request.token_ids, new_tokens=request.new_tokens)
                client.save(each)  # wherever the stream is just then
        for each in paths:
            with client_of(worker_of(engine), resume=each) as client:
                caught_up(client, engine)
                assert_true(client, engine, prompts=PROMPTS)


@pytest.mark.parametrize(("before", "after"), [(BEFORE, MEANWHILE), (MEANWHILE, BEFORE)])
def test_an_engine_that_was_started_anew_is_synchronized_from_its_first_batch(
    path: Path, resume: Resume, before: Workload, after: Workload
) -> None:
    with FakeEngine("engine") as engine:
        engine.run(before)
        save_of(engine, path=path)
        engine.restart()
        engine.run(after)  # to a smaller number than that saved, and to a larger one
        with resume(worker_of(engine)) as client:
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            assert replayed(client) >= engine.published
            assert_true(client, engine, prompts=PROMPTS)
            assert client.status(RANK).complete


def test_an_engine_of_the_same_name_elsewhere_does_not_inherit(
    engine: FakeEngine, resume: Resume
) -> None:
    with FakeEngine("engine") as namesake:
        namesake.run(Workload(60, seed=9))
        assert namesake.published > engine.published
        with resume(worker_of(namesake)) as client:
            wait_status(client, RANK, epoch=1)
            caught_up(client, namesake)
            assert_true(client, namesake, prompts=PROMPTS)


def test_an_engine_that_is_down_is_answered_for_but_not_as_live(
    engine: FakeEngine, resume: Resume
) -> None:
    worker, held = worker_of(engine), engine.lookup(PROMPTS[0]).tokens
    assert held > 0
    engine.close()
    with resume(worker) as client:
        answer = client.match(PROMPTS[0])[RANK]
        assert (answer.tokens, answer.state) == (held, State.CONNECTING)


def test_until_the_overlap_is_proven_a_restored_rank_is_syncing(
    engine: FakeEngine, resume: Resume
) -> None:
    with link_to(engine) as link:
        link.silence_replay()
        patient = ReplayPolicy(timeout=0.1, attempts=1000, backoff=0.01, max_backoff=0.02)
        with resume(worker_of(engine, link), replay_policy=patient) as client:
            status = wait_status(client, RANK, state=State.SYNCING)
            assert "is still the same" in status.reason
            answer = client.match(PROMPTS[0])[RANK]
            assert answer.state == State.SYNCING
            assert answer.tokens == engine.lookup(PROMPTS[0]).tokens
            link.restore_replay()
            caught_up(client, engine)
            assert client.status(RANK).restarts == 0
            assert_true(client, engine, prompts=PROMPTS)


def test_without_a_replay_endpoint_everything_restored_is_dropped(
    engine: FakeEngine, path: Path, resume: Resume
) -> None:
    with resume(worker_of(engine, replay=None)) as client:
        assert client.match(PROMPTS[0])[RANK].tokens == 0
        status = wait_status(client, RANK, state=State.LIVE, epoch=1)
        assert status.counters["refused_no_replay"] == 1
        assert not status.complete
        assert client.save(path) == (), "nothing to prove itself by"


def test_a_replay_endpoint_that_never_answers_drops_what_was_restored(
    engine: FakeEngine, resume: Resume
) -> None:
    with link_to(engine) as link:
        link.silence_replay()
        with resume(worker_of(engine, link), replay_policy=QUICK) as client:
            wait_status(client, RANK, epoch=1)
            assert client.match(PROMPTS[0])[RANK].tokens == 0


# Several ranks -----------------------------------------------------------------------------------


def test_several_ranks_of_which_one_is_gone_and_one_is_new(path: Path, resume: Resume) -> None:
    with two_engines("a", "b") as (a, b), FakeEngine("c") as c:
        c.run(Workload(20, seed=2))
        save_of(a, b, path=path)
        with resume(worker_of(a), worker_of(c)) as client:
            caught_up(client, a, c)
            assert_true(client, a, c)
            assert client.index.ranks == client.ranks == (a.rank, c.rank)
            assert replayed(client, a.rank) == 0
            assert replayed(client, c.rank) == c.published
            assert client.statistics()["resume"]["aside"] == 1


def test_a_rank_of_a_worker_that_has_fewer_now_takes_no_part(path: Path, resume: Resume) -> None:
    with two_engines("engine", "engine", 1) as (zero, one):
        save_worker(path, zero, one)
        with resume(worker_of(zero)) as client:
            caught_up(client, zero)
            assert client.index.ranks == client.ranks == (RANK,)
            assert_true(client, zero)
            assert client.statistics()["resume"]["aside"] == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_that_go_by_other_names_than_their_ports_find_their_publishers(
    path: Path, resume: Resume, swapped: bool
) -> None:
    with two_engines("engine", "engine", 1) as (zero, one):
        save_worker(path, one, zero)
        if not swapped:
            zero.run(MEANWHILE)
        with resume(dp_worker(zero, one) if swapped else dp_worker(one, zero)) as client:
            caught_up(client, zero, one)
            assert_true(client, zero, one)
            restarts = [client.status(rank).restarts for rank in (zero.rank, one.rank)]
            assert restarts == [int(swapped)] * 2, "ports that changed places begin anew"
            assert swapped or replayed(client, one.rank) == 0


def test_a_rank_for_which_there_is_no_room_begins_anew_alone(path: Path, resume: Resume) -> None:
    with two_engines("engine", "other") as (engine, other):
        engine.run(BEFORE)
        save_of(engine, other, path=path, index=Index(seed=5))
        with SnapshotReader(path) as reader:
            sizes = {record.rank: len(record.section) for record in reader}
        assert sizes[engine.rank] > sizes[other.rank]
        index = Index(seed=5, max_blocks=len(Index.load(path).tree(other.rank)))
        with resume(worker_of(other), worker_of(engine), index=index) as client:
            caught_up(client, engine, other)
            assert resumed(client) == {"aside": 0, "restored": 1, "dropped": {"room": 1}}
            assert client.status(engine.rank).counters["refused_room"] == 1
            assert replayed(client, engine.rank) == engine.published
            assert replayed(client, other.rank) == 0
            assert_true(client, other)
