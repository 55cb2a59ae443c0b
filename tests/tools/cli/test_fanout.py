"""`kvindex fanout`: the process beside a router's, from start to end."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import IO

import pytest

from kvindex import State, Worker
from kvindex.replicas import FanOut, ask, join
from kvindex.testing import FakeEngine, FaultyLink, Workload
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.native_ring import needs_ring
from tests.tools.commands import NOBODY, Run, at, started

pytestmark = [pytest.mark.e2e, needs_ring]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the command is to listen."""
    return str(tmp_path / "kvindex.sock")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_fanout_continues_from_its_state(
    number: signal.Signals, path: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with FakeEngine("a") as engine:
        engine.run(Workload(20, seed=1))
        argv = ("fanout", path, *at(engine, "a"), "--state", str(state))
        with started(*argv) as command, join(path, PATIENCE) as replica:
            caught_up(replica, engine)  # type: ignore[arg-type]  # it has what that asks
            counters = command.end(number).json
            assert (counters["joined"], counters["died"]) == (1, 0)
            until(replica.statuses, lambda statuses: statuses[engine.rank].state is State.STALE)
            assert state.exists()
            assert not Path(path).exists()
            engine.run(Workload(20, seed=2))
            with started(*argv) as command:
                caught_up(replica, engine)  # type: ignore[arg-type]
                assert replica.status(engine.rank).counters["resumed"] == 1
                command.end(number)


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
def test_further_signals_do_not_stop_the_saving(
    number: signal.Signals, path: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    argv = ("fanout", path, *NOBODY, "--state", str(state))
    with started(*argv, code=("-c", SIGNALLED)) as command:
        assert command.err.readline().startswith("listening at")
        assert command.end(number).json["replicas"] == 0
    assert state.exists()


def test_signal_handlers_are_restored(path: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in signals]

    def wait(*_: object) -> bool:
        assert [signal.getsignal(number) for number in signals] != before
        raise KeyboardInterrupt

    monkeypatch.setattr(FanOut, "wait", wait)
    run("fanout", path, *NOBODY)
    assert [signal.getsignal(number) for number in signals] == before


# --state, before anything is served --------------------------------------------------------------


@pytest.fixture
def never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(*_: object) -> bool:
        raise AssertionError("it serves")

    monkeypatch.setattr(FanOut, "wait", served)


@pytest.mark.usefixtures("never_served")
@pytest.mark.parametrize("state", ["none/state", "file/state", ".", "/proc/state"])
def test_a_state_that_cannot_be_written_is_refused(
    state: str, path: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").write_bytes(b"")
    ran = run("fanout", path, *NOBODY, "--state", tmp_path / state, code=2)
    assert ran.err.startswith(f"kvindex fanout: --state {tmp_path / state}: ")
    assert ran.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("never_served")
def test_a_damaged_state_is_named_with_what_to_do(path: str, tmp_path: Path, run: Run) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"junk" * 20)
    ran = run("fanout", path, *NOBODY, "--state", state, code=1)
    assert f"--state {state}: " in ran.err
    assert ran.err.count(str(state)) == 1
    assert "this is no snapshot" in ran.err
    assert "delete it or move it away" in ran.err
    assert state.read_bytes() == b"junk" * 20


def test_a_state_that_cannot_be_saved_is_reported(
    path: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def wait(*_: object) -> bool:
        folder.rmdir()  # as a disk that fills up meanwhile
        raise KeyboardInterrupt

    monkeypatch.setattr(FanOut, "wait", wait)
    ran = run("fanout", path, *NOBODY, "--state", folder / "state", code=1)
    assert ran.json["replicas"] == 0
    assert f"--state {folder / 'state'}: it could not be written" in ran.err


def test_a_path_that_is_taken_is_refused(path: str, run: Run) -> None:
    with FanOut((), path):
        assert "living server" in run("fanout", path, *NOBODY, code=2).err


# What a running one reports ----------------------------------------------------------------------


def line_with(stream: IO[str], text: str) -> str:
    """Return the first line that has a text; the process's end is the limit."""
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"it ended without {text!r}")


def test_the_states_of_ranks_are_reported_as_they_change(path: str) -> None:
    with FakeEngine("a") as engine, FaultyLink(engine.endpoint, engine.replay_endpoint) as link:
        with started("fanout", path, *at(link, "a")) as command:
            assert command.err.readline() == f"listening at {path}, 1 rank\n"
            assert line_with(command.err, "a/0: ") == "a/0: live\n"
            link.cut()
            assert "a/0: connecting: " in line_with(command.err, "a/0: c")
            link.heal()
            line_with(command.err, "a/0: live")
            command.process.send_signal(signal.SIGUSR1)
            header = line_with(command.err, "rank")
            assert header.split()[:4] == ["rank", "state", "complete", "seq"]
            name, state, *_ = command.err.readline().split()
            assert name == "a/0"
            assert State(state) is not State.CLOSED
            report = command.end(signal.SIGTERM).json
            assert report["ranks"]["a/0"]["endpoint"] == link.endpoint
    assert report["joined"] == 0


def test_a_rank_that_never_lives_is_reported_in_this_programs_words(path: str) -> None:
    with started("fanout", path, *NOBODY) as command:
        line = line_with(command.err, "a/0: connecting: nothing listens at tcp://127.0.0.1:1")
        assert "--bind" in line
        assert "Worker(" not in line
        command.end(signal.SIGTERM)


def test_the_counters_are_printed_every_so_often_as_lines_of_json(path: str) -> None:
    with started("fanout", path, *NOBODY, "--stats-every", "0.2") as command:
        for _ in range(2):
            report = json.loads(command.out.readline())
            assert report["replicas"] == 0
            assert report["ranks"]["a/0"]["endpoint"] == "tcp://127.0.0.1:1"
        assert all(
            json.loads(line)["ranks"] for line in command.end(signal.SIGTERM).out.splitlines()
        )


def test_any_process_can_ask_for_the_ranks_states(path: str, run: Run) -> None:
    with FakeEngine("a") as engine, FanOut([worker_of(engine)], path) as fanout:
        engine.serve(range(64))
        caught_up(fanout.client, engine)
        with join(path, PATIENCE):
            ran = run("status", path, "--require-live")
            header, rank, joined = ran.out.splitlines()
            assert header.split()[-2:] == ["idle", "s"]
            assert rank.split()[:8] == ["a/0", "live", "yes", "0", "0", "0", "0", "4"]
            assert joined == "1 process has joined"
            report = ask(path)
            assert report["ranks"]["a/0"]["index"] == fanout.report()["ranks"]["a/0"]["index"]
            assert (report["replicas"], report["joining"], report["turned_away"]) == (1, 0, {})
        fanout.client.add(Worker("b", "tcp://127.0.0.1:1"))
        assert "b/0: " in run("status", path, "--require-live", code=3).out
        assert run("status", path, "--json").json["ranks"]["b/0"]["state"] == "connecting"


def test_where_nobody_answers_the_path_and_the_reason_are_reported(path: str, run: Run) -> None:
    nobody = f"kvindex status: no fan-out server answers at {path}: "
    assert run("status", path, code=1).err == f"{nobody}No such file or directory\n"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen()
        assert run("status", path, "--wait", 0.1, code=1).err == f"{nobody}timed out\n"
