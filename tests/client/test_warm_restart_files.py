"""The file of a warm restart: missing, damaged, of another index or of another process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kvindex import (
    ClosedError,
    ConfigurationError,
    EventBatch,
    Index,
    State,
    Worker,
    ZmqEventPublisher,
)
from kvindex.index.snapshot import SnapshotReader, SnapshotWriter
from kvindex.subscribe import Subscriber
from kvindex.testing import FakeEngine
from kvindex.wire.errors import SnapshotError
from tests.children import ENVIRONMENT, Program
from tests.client.conftest import RANK, Resume, replayed, resumed
from tests.live import (
    BEFORE,
    MEANWHILE,
    PATIENCE,
    PROMPTS,
    assert_true,
    caught_up,
    client_of,
    followed,
    save_of,
    wait_status,
    worker_of,
)

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]


def test_a_missing_file_is_a_cold_start(path: Path, resume: Resume) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        with resume(worker_of(engine)) as client:
            caught_up(client, engine)
            assert_true(client, engine)
            assert client.status(RANK).epoch == 0


def test_a_damaged_file_is_refused_and_nothing_of_it_stays(engine: FakeEngine, path: Path) -> None:
    whole = path.read_bytes()
    with SnapshotReader(whole) as reader:
        index = Index(seed=reader.seed)
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"no snapshot"):
        path.write_bytes(damaged)
        with pytest.raises(SnapshotError) as refused:
            client_of(worker_of(engine), index=index, resume=path)
        assert refused.value.reason in ("truncated", "checksum", "format")
        assert index.ranks == ()


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
        assert client.status(RANK).counters["refused_unreadable_cursor"] == 1
        assert client.status(RANK).epoch == 1
        assert_true(client, engine)


def test_a_file_without_positions_is_of_no_use_and_counted(path: Path, resume: Resume) -> None:
    with FakeEngine("engine") as engine:
        engine.run(BEFORE)
        with followed(engine) as client:
            client.index.save(path)  # not `Client.save`
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


# Another process ----------------------------------------------------------------------------------

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
