"""A router that goes on from what another process saved: quickly, and without phantom blocks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvindex import (
    ClosedError,
    ConfigurationError,
    EventBatch,
    Index,
    Rank,
    ReplayPolicy,
    State,
    Worker,
    ZmqEventPublisher,
)
from kvindex.index.snapshot import SnapshotReader, SnapshotWriter
from kvindex.subscribe import Subscriber
from kvindex.testing import FakeEngine, Workload
from kvindex.wire.errors import SnapshotError
from tests.children import ended_after
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
    link_to,
    resident,
    save_of,
    wait_status,
    worker_of,
)

pytestmark = pytest.mark.e2e

RANK = Rank("engine", 0)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router.kvindex"


def replayed(client: Any, rank: Rank = RANK) -> int:
    return int(client.status(rank).counters.get("replayed", 0))


def test_only_what_was_missed_is_replayed_and_the_index_is_as_the_engine(path: Path) -> None:
    with FakeEngine("engine", cpu_blocks=64) as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        saved = engine.published
        engine.run(MEANWHILE)
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert replayed(client) == engine.published - saved > 0
            assert_true(client, engine, prompts=PROMPTS)
            status = client.status(RANK)
            assert (status.epoch, status.complete, status.restarts) == (0, True, 0)
            assert status.counters["resumed"] == 1
            engine.run(LATER)
            caught_up(client, engine)
            assert_true(client, engine, prompts=PROMPTS)


def test_nothing_was_missed(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert replayed(client) == 0
            assert_true(client, engine, prompts=PROMPTS)


def test_what_no_buffer_has_any_more_is_still_known(path: Path) -> None:
    with FakeEngine("engine", buffer_steps=20) as engine:
        with client_of(worker_of(engine)) as client:
            wait_status(client, RANK, state=State.LIVE)
            for request in BEFORE:
                engine.serve(request.token_ids, new_tokens=request.new_tokens)
                caught_up(client, engine)
            client.save(path)
        engine.run(MEANWHILE)
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert client.status(RANK).complete
            assert_true(client, engine, prompts=PROMPTS)
        with client_of(worker_of(engine)) as client:
            caught_up(client, engine)
            assert not client.status(RANK).complete, "a cold start has but the buffer"


def test_a_process_that_has_resumed_can_save_again(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        for workload in (MEANWHILE, LATER):
            saved = engine.published
            engine.run(workload)
            with client_of(worker_of(engine), resume=path) as client:
                caught_up(client, engine)
                assert replayed(client) == engine.published - saved
                client.save(path)
        with client_of(worker_of(engine), resume=path) as client:
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


def test_an_engine_that_was_started_anew_is_synchronized_from_its_first_batch(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        engine.restart()
        engine.run(MEANWHILE)
        with client_of(worker_of(engine), resume=path) as client:
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            assert replayed(client) == engine.published
            assert_true(client, engine, prompts=PROMPTS)
            assert client.status(RANK).complete


def test_an_engine_that_was_started_anew_and_is_past_our_number_is_told_apart(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(MEANWHILE)
        save_of(engine, path=path)
        saved = engine.published
        engine.restart()
        engine.run(BEFORE)
        assert engine.published > saved
        with client_of(worker_of(engine), resume=path) as client:
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            assert_true(client, engine, prompts=PROMPTS)
            assert client.status(RANK).complete


def test_an_engine_that_is_down_is_answered_for_but_not_as_live(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        worker, prompt = worker_of(engine), PROMPTS[0]
        held = engine.lookup(prompt).tokens
        assert held > 0
    with client_of(worker, resume=path) as client:
        found = client.match(prompt)[RANK]
        assert (found.tokens, found.state) == (held, State.CONNECTING)


def test_until_the_overlap_is_proven_a_restored_rank_is_syncing(path: Path) -> None:
    with FakeEngine("engine") as engine, link_to(engine) as link:
        engine.run(BEFORE)
        save_of(engine, path=path)
        link.silence_replay()
        patient = ReplayPolicy(timeout=0.1, attempts=1000, backoff=0.01, max_backoff=0.02)
        with client_of(worker_of(engine, link), resume=path, replay_policy=patient) as client:
            status = wait_status(client, RANK, state=State.SYNCING)
            assert "is still the same" in status.reason
            found = client.match(PROMPTS[0])[RANK]
            assert found.state == State.SYNCING
            assert found.tokens == engine.lookup(PROMPTS[0]).tokens
            link.restore_replay()
            caught_up(client, engine)
            assert client.status(RANK).restarts == 0
            assert_true(client, engine, prompts=PROMPTS)


def test_a_buffer_that_no_longer_reaches_back_proves_nothing(path: Path) -> None:
    with FakeEngine("engine", buffer_steps=4) as engine:
        with client_of(worker_of(engine)) as client:
            wait_status(client, RANK, state=State.LIVE)
            engine.run(BEFORE)
            caught_up(client, engine)
            client.save(path)
        engine.run(MEANWHILE)
        with client_of(worker_of(engine), resume=path) as client:
            wait_status(client, RANK, epoch=1)
            caught_up(client, engine)
            status = client.status(RANK)
            assert not status.complete
            assert replayed(client) == 4
            last = resident(client, RANK)
            assert last.items() <= engine_truth(engine).items()


def engine_truth(engine: FakeEngine) -> dict[tuple[Any, str, int], int]:
    return {
        (h % 2**64 if isinstance(h, int) else h, medium, group or 0): copies
        for (h, medium, group), copies in engine.truth().items()
    }


def test_without_a_replay_endpoint_everything_restored_is_dropped(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with client_of(worker_of(engine, replay=None), resume=path) as client:
            assert client.match(PROMPTS[0])[RANK].tokens == 0
            status = wait_status(client, RANK, state=State.LIVE, epoch=1)
            assert status.counters["refused_no_replay"] == 1
            assert not status.complete
            assert client.save(path) == (), "nothing to prove itself by"


def test_a_replay_endpoint_that_never_answers_drops_what_was_restored(path: Path) -> None:
    with FakeEngine("engine") as engine, link_to(engine) as link:
        engine.run(BEFORE)
        save_of(engine, path=path)
        link.silence_replay()
        with client_of(worker_of(engine, link), resume=path, replay_policy=QUICK) as client:
            wait_status(client, RANK, epoch=1)
            assert client.match(PROMPTS[0])[RANK].tokens == 0


def test_several_ranks_of_which_one_is_gone_and_one_is_new(path: Path) -> None:
    with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        for seed, engine in enumerate((a, b, c)):
            engine.run(Workload(20, seed=seed))
        save_of(a, b, path=path)
        with client_of(worker_of(a), worker_of(c), resume=path) as client:
            caught_up(client, a, c)
            assert_true(client, a, c)
            assert client.index.ranks == client.ranks == (a.rank, c.rank)
            assert replayed(client, a.rank) == 0
            assert replayed(client, c.rank) == c.published
            assert client.statistics()["resume"]["aside"] == 1


def test_a_rank_of_a_worker_that_has_fewer_now_takes_no_part(path: Path) -> None:
    with FakeEngine("engine") as zero, FakeEngine("engine", dp_rank=1) as one:
        for seed, engine in enumerate((zero, one)):
            engine.run(Workload(20, seed=seed))
        with client_of(dp_worker(zero, one)) as client:
            caught_up(client, zero, one)
            client.save(path)
        with client_of(worker_of(zero), resume=path) as client:
            caught_up(client, zero)
            assert client.index.ranks == client.ranks == (RANK,)
            assert_true(client, zero)
            assert client.statistics()["resume"]["aside"] == 1


def dp_worker(*engines: FakeEngine) -> Worker:
    """A worker whose ports are in this order, whatever the engines name themselves."""
    replay = {port: engine.replay_endpoint or "" for port, engine in enumerate(engines)}
    return Worker("engine", {p: e.endpoint for p, e in enumerate(engines)}, replay=replay)


def test_ranks_that_go_by_other_names_than_their_ports_find_their_publishers(path: Path) -> None:
    with FakeEngine("engine") as zero, FakeEngine("engine", dp_rank=1) as one:
        for seed, engine in enumerate((zero, one)):
            engine.run(Workload(20, seed=seed))
        with client_of(dp_worker(one, zero)) as client:
            caught_up(client, zero, one)
            client.save(path)
        zero.run(MEANWHILE)
        with client_of(dp_worker(one, zero), resume=path) as client:
            caught_up(client, zero, one)
            assert_true(client, zero, one)
            assert replayed(client, one.rank) == 0
            assert client.status(zero.rank).restarts == client.status(one.rank).restarts == 0


def test_ranks_whose_ports_have_changed_places_begin_anew(path: Path) -> None:
    with FakeEngine("engine") as zero, FakeEngine("engine", dp_rank=1) as one:
        for seed, engine in enumerate((zero, one)):
            engine.run(Workload(20, seed=seed))
        with client_of(dp_worker(one, zero)) as client:
            caught_up(client, zero, one)
            client.save(path)
        with client_of(dp_worker(zero, one), resume=path) as client:
            caught_up(client, zero, one)
            assert_true(client, zero, one)
            assert client.status(zero.rank).restarts == client.status(one.rank).restarts == 1


def test_a_missing_file_is_a_cold_start(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert_true(client, engine)
            assert client.status(RANK).epoch == 0


def test_a_damaged_file_is_refused_and_nothing_of_it_stays(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        whole = path.read_bytes()
        with SnapshotReader(whole) as reader:
            index = Index(seed=reader.seed)
        for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"no snapshot"):
            path.write_bytes(damaged)
            with pytest.raises(SnapshotError) as refused:
                client_of(worker_of(engine), index=index, resume=path)
            assert refused.value.reason in ("truncated", "checksum", "format")
            assert index.ranks == ()


def test_an_index_of_another_seed_is_refused(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with pytest.raises(SnapshotError):
            client_of(worker_of(engine), index=Index(seed=5), resume=path)


def test_an_index_given_with_its_seed_keeps_its_limits(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path, index=Index(seed=5))
        index = Index(seed=5, max_blocks=100_000)
        with client_of(worker_of(engine), index=index, resume=path) as client:
            caught_up(client, engine)
            assert client.index is index
            assert replayed(client) == 0
            assert_true(client, engine, prompts=PROMPTS)


@pytest.mark.parametrize("bad", [b"", b"\x91\x01", b"\x92\x63\xc0", b"\xc1"])
def test_a_cursor_that_cannot_be_read_is_a_restart(path: Path, bad: bytes) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        with SnapshotReader(path) as reader:
            [record] = list(reader)
            seed = reader.seed
        with path.open("wb") as file:
            writer = SnapshotWriter(file, seed=seed)
            writer.add(record.rank, record.section, bad)
            writer.finish()
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert client.status(RANK).counters["refused_unreadable_cursor"] == 1
            assert client.status(RANK).epoch == 1
            assert_true(client, engine)


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


# Another process ----------------------------------------------------------------------------------

CHILD = """
import json, os, sys, threading
from kvindex import Rank, Worker, connect

path, mode, endpoint, replay, last = sys.argv[1:]
client = connect([Worker("engine", endpoint, replay=replay)], resume=path)
rank = Rank("engine")
assert client.wait_for(lambda statuses: statuses[rank].seq == int(last), 120.0)
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


def child(path: Path, mode: str, engine: FakeEngine) -> subprocess.Popen[str]:
    last = str(engine.published - 1)
    argv = [str(path), mode, engine.endpoint, engine.replay_endpoint or "", last]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *argv], stdout=subprocess.PIPE, text=True, env=env
    )


def test_fingerprints_mean_the_same_in_another_process(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        saved = engine.published
        engine.run(MEANWHILE)
        out, _ = child(path, "report", engine).communicate(timeout=PATIENCE)
        counters = json.loads(out)
        assert counters["replayed"] == engine.published - saved
        assert "restarts" not in counters


def test_a_process_killed_while_it_saves_leaves_the_old_file_whole(path: Path) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        before = path.read_bytes()
        engine.run(MEANWHILE)
        process = child(path, "save", engine)
        assert process.stdout is not None
        with process.stdout as stdout, ended_after(process):
            assert stdout.readline() == "writing\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait(PATIENCE) == -signal.SIGKILL
        assert path.read_bytes() == before
        with client_of(worker_of(engine), resume=path) as client:
            caught_up(client, engine)
            assert_true(client, engine, prompts=PROMPTS)
