"""A process that ends with its `FanOut` open: quietly, as its own code says; replicas are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex.replicas import join
from kvindex.testing import FakeEngine, Workload
from tests.children import Program
from tests.live import PATIENCE, caught_up, until
from tests.native_ring import needs_ring

pytestmark = [pytest.mark.e2e, needs_ring]

SERVE = """
import os, sys
from kvindex import Worker
from kvindex import replicas
path, endpoint, replay = sys.argv[1:]
server = replicas.FanOut([Worker("a", endpoint, replay=replay)], path)
print("up", flush=True)
sys.stdin.readline()
"""
ENDINGS = {
    "the end": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("1 / 0", 1, "ZeroDivisionError"),
    "in a function": ("def main():\n    kept = server\nmain()", 0, ""),
}


def serving(path: str, engine: FakeEngine, then: str) -> Program:
    """A process that serves until it is sent a line, and then does something."""
    process = Program("-c", SERVE + then, path, engine.endpoint, str(engine.replay_endpoint))
    assert process.line() == "up\n"
    return process


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_quietly_and_replicas_are_told(ending: str, tmp_path: Path) -> None:
    then, code, last = ENDINGS[ending]
    path = tmp_path / "kvindex.sock"
    with FakeEngine("a") as engine, serving(str(path), engine, then) as process:
        with join(path, PATIENCE) as replica:
            engine.run(Workload(20, seed=1))
            caught_up(replica, engine)  # type: ignore[arg-type]  # it has what that asks
            _, err = process.finish("\n")
            assert process.process.returncode == code, err
            assert err.count("Traceback") == bool(last), err
            assert (err.splitlines() or [""])[-1].startswith(last)
            until(replica.statuses, lambda _: bool(replica.statistics()["replica"]["rejoins"]))
            assert replica.statistics()["replica"]["rejoins"] == {"server_closed": 1}
            assert not path.exists()


def test_a_forked_child_that_ends_leaves_the_parents_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "kvindex.sock"
    then = """
pid = os.fork()
if pid == 0:
    sys.exit(0)
print(os.waitpid(pid, 0)[1], flush=True)
sys.stdin.readline()
"""
    with FakeEngine("a") as engine, serving(str(path), engine, then) as process:
        process.tell()
        assert process.line() == "0\n"
        with join(path, PATIENCE) as replica:
            engine.run(Workload(20, seed=1))
            caught_up(replica, engine)  # type: ignore[arg-type]
        _, err = process.finish("\n")
        assert (process.process.returncode, err) == (0, "")
