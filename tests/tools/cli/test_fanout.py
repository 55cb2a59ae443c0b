"""`kvindex fanout`: the process beside a router's, from start to end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import IO, Any

import pytest

from kvindex import State, Worker
from kvindex.index.replicas import FanOut, ask, join
from kvindex.testing import FakeEngine, FaultyLink, Workload
from kvindex.tools.cli import main
from tests.live import PATIENCE, caught_up, worker_of
from tests.native_ring import needs_ring
from tests.tools.cli.test_cli import started

pytestmark = [pytest.mark.e2e, needs_ring]

WORKER = ["--worker", "a=tcp://127.0.0.1:1"]


def ended(process: subprocess.Popen[str], number: signal.Signals) -> dict[str, Any]:
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    counters: dict[str, Any] = json.loads(out)
    return counters


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_processes_join_until_it_is_ended_and_it_goes_on_from_its_state(
    number: signal.Signals, tmp_path: Path
) -> None:
    path, state = str(tmp_path / "kvindex.sock"), tmp_path / "state"
    with FakeEngine("a") as engine:
        engine.run(Workload(20, seed=1))
        worker = f"a={engine.endpoint},replay={engine.replay_endpoint}"
        argv = [path, "--worker", worker, "--state", str(state)]
        with started("fanout", *argv) as process, join(path, PATIENCE) as replica:
            caught_up(replica, engine)  # type: ignore[arg-type]  # it has what that asks
            counters = ended(process, number)
            assert (counters["joined"], counters["died"]) == (1, 0)
            assert replica.wait_for(
                lambda statuses: statuses[engine.rank].state is State.STALE, PATIENCE
            )
            assert state.exists()
            assert not Path(path).exists()
            engine.run(Workload(20, seed=2))
            with started("fanout", *argv) as process:
                caught_up(replica, engine)  # type: ignore[arg-type]
                assert replica.status(engine.rank).counters["resumed"] == 1
                ended(process, number)


SIGNALLED = """
import os, signal, sys
from kvindex import Client
from kvindex.tools.cli import main
def signalled():
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
save = Client.save
def saving(client, path):
    signalled()
    return save(client, path)
Client.save = saving
code = main(sys.argv[1:])
signalled()
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_further_signals_break_off_neither_the_saving_nor_the_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    argv = [str(tmp_path / "kvindex.sock"), *WORKER, "--state", str(state)]
    with started("fanout", *argv, code=["-c", SIGNALLED]) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("listening at")
        assert ended(process, number)["replicas"] == 0
    assert state.exists()


def test_a_command_that_no_signal_ended_leaves_the_handlers_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in signals]

    def wait(*_: object) -> bool:
        assert [signal.getsignal(number) for number in signals] != before
        raise KeyboardInterrupt

    monkeypatch.setattr(FanOut, "wait", wait)
    assert main(["fanout", str(tmp_path / "kvindex.sock"), *WORKER]) == 0
    assert [signal.getsignal(number) for number in signals] == before


# --state, before anything is served --------------------------------------------------------------


@pytest.fixture
def never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(*_: object) -> bool:
        raise AssertionError("it serves")

    monkeypatch.setattr(FanOut, "wait", served)


@pytest.mark.usefixtures("never_served")
@pytest.mark.parametrize("state", ["none/state", "file/state", ".", "/proc/state"])
def test_a_state_that_could_not_be_written_at_the_end_is_refused_at_the_start(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / state
    assert main(["fanout", str(tmp_path / "kvindex.sock"), *WORKER, "--state", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvindex fanout: --state {path}: ")
    assert err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("never_served")
def test_a_damaged_state_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"junk" * 20)
    assert main(["fanout", str(tmp_path / "kvindex.sock"), *WORKER, "--state", str(state)]) == 1
    err = capsys.readouterr().err
    assert f"--state {state}: " in err
    assert err.count(str(state)) == 1
    assert "this is no snapshot" in err
    assert "delete it or move it away" in err
    assert state.read_bytes() == b"junk" * 20


def test_a_state_that_cannot_be_written_after_all_is_said_beside_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def wait(*_: object) -> bool:
        folder.rmdir()  # as a disk that fills up meanwhile
        raise KeyboardInterrupt

    monkeypatch.setattr(FanOut, "wait", wait)
    state = folder / "state"
    assert main(["fanout", str(tmp_path / "kvindex.sock"), *WORKER, "--state", str(state)]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["replicas"] == 0
    assert f"--state {state}: it could not be written" in err


def test_a_path_that_is_taken_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "kvindex.sock")
    with FanOut((), path):
        assert main(["fanout", path, "--worker", "a=tcp://127.0.0.1:1"]) == 2
    assert "living server" in capsys.readouterr().err


# What a running one tells ------------------------------------------------------------------------


def line_with(stream: IO[str], text: str) -> str:
    """Return the first line that has a text; the process's end is the limit."""
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"it ended without {text!r}")


def test_it_says_which_ranks_live_die_and_come_back_and_its_end_has_them(tmp_path: Path) -> None:
    path = str(tmp_path / "kvindex.sock")
    with FakeEngine("a") as engine, FaultyLink(engine.endpoint, engine.replay_endpoint) as link:
        worker = f"a={link.endpoint},replay={link.replay_endpoint}"
        with started("fanout", path, "--worker", worker) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == f"listening at {path}, 1 rank\n"
            assert line_with(process.stderr, "a/0: ") == "a/0: live\n"
            link.cut()
            assert "a/0: connecting: " in line_with(process.stderr, "a/0: c")
            link.heal()
            line_with(process.stderr, "a/0: live")
            process.send_signal(signal.SIGUSR1)
            header = line_with(process.stderr, "rank")
            assert header.split()[:4] == ["rank", "state", "complete", "seq"]
            name, state, *_ = process.stderr.readline().split()
            assert name == "a/0"
            assert State(state) is not State.CLOSED
            report = ended(process, signal.SIGTERM)
            assert report["ranks"]["a/0"]["endpoint"] == link.endpoint
    assert report["joined"] == 0


def test_a_rank_that_never_lives_is_told_with_what_to_do_in_this_programs_words(
    tmp_path: Path,
) -> None:
    with started("fanout", str(tmp_path / "kvindex.sock"), *WORKER) as process:
        assert process.stderr is not None
        line = line_with(process.stderr, "a/0: connecting: nothing listens at tcp://127.0.0.1:1")
        assert "--bind" in line
        assert "Worker(" not in line
        ended(process, signal.SIGTERM)


def test_the_counters_come_every_so_often_as_lines_of_json(tmp_path: Path) -> None:
    argv = [str(tmp_path / "kvindex.sock"), *WORKER, "--stats-every", "0.2"]
    with started("fanout", *argv) as process:
        assert process.stdout is not None
        for _ in range(2):
            report = json.loads(process.stdout.readline())
            assert report["replicas"] == 0
            assert report["ranks"]["a/0"]["endpoint"] == "tcp://127.0.0.1:1"
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        assert all(json.loads(line)["ranks"] for line in process.stdout)


def test_any_process_can_ask_how_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "kvindex.sock")
    with FakeEngine("a") as engine, FanOut([worker_of(engine)], path) as fanout:
        engine.serve(range(64))
        caught_up(fanout.client, engine)
        with join(path, PATIENCE):
            assert main(["status", path, "--require-live"]) == 0
            header, rank, joined = capsys.readouterr().out.splitlines()
            assert header.split()[-2:] == ["idle", "s"]
            assert rank.split()[:8] == ["a/0", "live", "yes", "0", "0", "0", "0", "4"]
            assert joined == "1 process has joined"
            report = ask(path)
            assert report["ranks"]["a/0"]["index"] == fanout.report()["ranks"]["a/0"]["index"]
            assert (report["replicas"], report["joining"], report["turned_away"]) == (1, 0, {})
        fanout.client.add(Worker("b", "tcp://127.0.0.1:1"))
        assert main(["status", path, "--require-live"]) == 3
        assert "b/0: " in capsys.readouterr().out
        assert main(["status", path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"]["b/0"]["state"] == "connecting"


def test_where_nobody_answers_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "kvindex.sock")
    assert main(["status", path]) == 1
    nobody = f"kvindex status: no fan-out server answers at {path}: "
    assert capsys.readouterr().err == f"{nobody}No such file or directory\n"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        assert main(["status", path, "--wait", "0.1"]) == 1
    assert capsys.readouterr().err == f"{nobody}timed out\n"
