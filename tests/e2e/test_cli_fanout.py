"""`kvindex fanout`: the process beside a router's, from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvindex import State
from kvindex.cli import main
from kvindex.fanout import FanOut, join
from kvindex.testing import FakeEngine, Workload
from tests.live import PATIENCE, caught_up

ROOT = Path(__file__).parents[2]
WORKER = ["--worker", "a=tcp://127.0.0.1:1"]


@contextmanager
def sidecar(*argv: str, code: Sequence[str] = ("-m", "kvindex")) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *code, "fanout", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: signal.Signals) -> dict[str, int]:
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    counters: dict[str, int] = json.loads(out)
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
        with sidecar(*argv) as process, join(path, PATIENCE) as replica:
            caught_up(replica, engine)  # type: ignore[arg-type]  # it has what that asks
            counters = ended(process, number)
            assert (counters["joined"], counters["died"]) == (1, 0)
            assert replica.wait_for(
                lambda statuses: statuses[engine.rank].state is State.STALE, PATIENCE
            )
            assert state.exists()
            assert not Path(path).exists()
            engine.run(Workload(20, seed=2))
            with sidecar(*argv) as process:
                caught_up(replica, engine)  # type: ignore[arg-type]
                assert replica.status(engine.rank).counters["resumed"] == 1
                ended(process, number)


SIGNALLED = """
import os, signal, sys
from kvindex import Client
from kvindex.cli import main
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
    with sidecar(*argv, code=["-c", SIGNALLED]) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("listening at")
        assert ended(process, number)["replicas"] == 0
    assert state.exists()


def test_a_command_that_no_signal_ended_leaves_the_handlers_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(one) for one in signals]

    def wait(*_: object) -> bool:
        assert [signal.getsignal(one) for one in signals] != before
        raise KeyboardInterrupt

    monkeypatch.setattr(FanOut, "wait", wait)
    assert main(["fanout", str(tmp_path / "kvindex.sock"), *WORKER]) == 0
    assert [signal.getsignal(one) for one in signals] == before


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
