"""A router that goes on from what another process saved: quickly, and without phantom blocks.

Each worker is there when the router starts, or is added later. Damage of the file itself is tested
in `tests/index/test_snapshot.py`, what is kept aside of it in `test_saved_state.py`.
"""

from __future__ import annotations

import json
import signal
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvindex import (
    Client,
    ClosedError,
    ConfigurationError,
    EventBatch,
    Index,
    ReplayPolicy,
    State,
    Worker,
    ZmqEventPublisher,
)
from kvindex.index.snapshot import SnapshotReader, SnapshotRecord, SnapshotWriter
from kvindex.subscribe import Subscriber, Tap
from kvindex.testing import FakeEngine, ManualClock, Workload
from kvindex.wire.errors import SnapshotError
from tests.children import ENVIRONMENT, Program
from tests.client.conftest import (
    RANK,
    NotingTap,
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
            for path in paths:
                for request in islice(requests, 20):
                    engine.serve(request.token_ids, new_tokens=request.new_tokens)
                client.save(path)  # wherever the stream is just then
        for path in paths:
            with client_of(worker_of(engine), resume=path) as client:
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


# Workers that are added later ------------------------------------------------------------------


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


@pytest.mark.parametrize("tap", [None, NotingTap()], ids=["untapped", "tapped"])
def test_what_nobody_adds_is_given_up_in_time_and_not_saved_again(
    engine: FakeEngine, path: Path, tap: Tap | None
) -> None:
    clock = ManualClock(1000.0)
    with Client(resume=path, resume_within=60.0, clock=clock, tap=tap) as client:
        clock.advance(59.9)
        let_it_turn(client)
        assert resumed(client) == {"aside": 1, "restored": 0, "dropped": {}}
        clock.advance(0.2)
        let_it_turn(client)
        assert resumed(client) == {"aside": 0, "restored": 0, "dropped": {"expired": 1}}
        assert client.save(path) == ()
        client.add(worker_of(engine))
        caught_up(client, engine)
        assert replayed(client) == engine.published
    with SnapshotReader(path) as reader:
        assert list(reader) == []


def let_it_turn(client: Client) -> None:
    """Return when the subscriber's thread has ended a turn that began after this was called."""
    for _ in range(2):
        client.subscriber.call(lambda: None)


def test_a_worker_that_grows_rank_by_rank_goes_on_rank_by_rank(path: Path) -> None:
    with two_engines("engine", "engine", 1) as (zero, one):
        save_worker(path, zero, one)
        tap = NotingTap()
        with client_of(resume=path, tap=tap) as client:
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
        with SnapshotReader(path) as reader:
            assert tap.sections == [(record.rank, record.section) for record in reader]


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


# The file --------------------------------------------------------------------------------------


def test_an_index_keeps_its_limits_if_it_has_the_seed(path: Path, resume: Resume) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path, index=Index(seed=5))
        with pytest.raises(SnapshotError):
            client_of(worker_of(engine), index=Index(seed=6), resume=path)
        index = Index(seed=5, max_blocks=100_000)
        with resume(worker_of(engine), index=index) as client:
            caught_up(client, engine)
            assert client.index is index
            assert replayed(client) == 0
            assert_true(client, engine, prompts=PROMPTS)


@pytest.mark.parametrize("bad", [b"", b"\x91\x01", b"\x92\x63\xc0", b"\xc1"])
def test_a_cursor_that_cannot_be_read_is_a_restart(
    engine: FakeEngine, path: Path, bad: bytes
) -> None:
    with SnapshotReader(path) as reader:
        [record] = list(reader)
        seed = reader.seed
    with path.open("wb") as file:
        writer = SnapshotWriter(file, seed=seed)
        writer.add(record.rank, record.section, bad)
        writer.finish()
    with client_of(worker_of(engine), resume=path) as client:
        caught_up(client, engine)
        dropped = {"unreadable_cursor": 1}
        assert resumed(client) == {"aside": 0, "restored": 0, "dropped": dropped}
        assert client.status(RANK).counters["refused_unreadable_cursor"] == 1
        assert client.status(RANK).epoch == 1
        assert_true(client, engine)


def test_a_file_without_positions_is_of_no_use_and_counted(path: Path, resume: Resume) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        with followed(engine) as client:
            client.index.save(path)  # not `Client.save`
        with client_of(resume=path) as client:
            assert resumed(client) == {"aside": 0, "restored": 0, "dropped": {"no_cursor": 1}}
        with resume(worker_of(engine)) as client:
            caught_up(client, engine)
            assert resumed(client) == {"aside": 0, "restored": 0, "dropped": {"no_cursor": 1}}
            assert replayed(client) == engine.published
            assert client.status(RANK).counters["refused_no_cursor"] == 1
            assert_true(client, engine, prompts=PROMPTS)
            client.remove("engine")
            client.add(worker_of(engine))
            caught_up(client, engine)
            assert "refused_no_cursor" not in client.status(RANK).counters


def test_a_publisher_that_keeps_nothing_is_not_saved(path: Path) -> None:
    with ZmqEventPublisher(0, "tcp://127.0.0.1:*", None) as publisher:
        with client_of(Worker("engine", publisher.endpoint)) as client:
            wait_status(client, RANK, state=State.LIVE)
            publisher.publish(EventBatch(1.0, []))
            assert client.save(path) == ()


def test_saving_after_closing_says_so_and_leaves_the_file(path: Path) -> None:
    path.write_bytes(b"as it was")
    with FakeEngine("engine") as engine:
        for workers in ([], [worker_of(engine)]):
            client = client_of(*workers)
            client.close()
            with pytest.raises(ClosedError):
                client.save(path)
    assert path.read_bytes() == b"as it was"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("resume", [{"engine": b""}, {RANK: "text"}, [RANK]])
def test_what_maps_no_ranks_to_cursors_is_refused(resume: Any) -> None:
    with pytest.raises(ConfigurationError, match="resume"):
        Subscriber(sink=lambda item: None, resume=resume)


# Another process -----------------------------------------------------------------------------

CHILD = """
import json, os, sys, threading, time
from kvindex import Rank, Worker, connect

path, mode, endpoint, replay, last = sys.argv[1:]
client = connect([Worker("engine", endpoint, replay=replay)], resume=path)
rank = Rank("engine")
while client.status(rank).seq != int(last):
    time.sleep(0.01)
client.wait_live(120.0)
if mode == "report":
    print(json.dumps(client.status(rank).counters))
    sys.exit()

def stop_here(descriptor):
    print("writing", flush=True)
    threading.Event().wait()

os.fsync = stop_here  # all is written, but not in place
client.save(path)
"""


def child(path: Path, mode: str, engine: FakeEngine) -> Program:
    last = str(engine.published - 1)
    argv = [str(path), mode, engine.endpoint, engine.replay_endpoint or "", last]
    env = {**ENVIRONMENT, "PYTHONHASHSEED": "12345"}
    return Program("-c", CHILD, *argv, stderr=None, env=env)


def test_fingerprints_mean_the_same_in_another_process(engine: FakeEngine, path: Path) -> None:
    saved = engine.published
    engine.run(MEANWHILE)
    with child(path, "report", engine) as process:
        out, _ = process.finish()
    counters = json.loads(out)
    assert counters["replayed"] == engine.published - saved
    assert "restarts" not in counters


def test_a_process_killed_while_it_saves_leaves_the_old_file_whole(
    engine: FakeEngine, path: Path
) -> None:
    before = path.read_bytes()
    engine.run(MEANWHILE)
    with child(path, "save", engine) as process:
        assert process.line() == "writing\n"
        process.process.send_signal(signal.SIGKILL)
        assert process.process.wait(PATIENCE) == -signal.SIGKILL
    assert path.read_bytes() == before
