"""Processes that end with a server or a replica open: as their own code says; all are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex.replicas import join
from kvindex.testing import FakeEngine, Workload
from tests.children import Program
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.native_ring import needs_ring
from tests.replicas.fanout_peers import Site, counted

pytestmark = [pytest.mark.e2e, needs_ring]

SERVE = """
import os, sys
from kvindex import Worker
from kvindex import replicas
path, endpoint, replay = sys.argv[1:]
opened = replicas.FanOut([Worker("a", endpoint, replay=replay)], path)
print("up", flush=True)
sys.stdin.readline()
"""
JOIN = """
import sys
from kvindex import replicas
opened = replicas.join(sys.argv[1])
print("up", flush=True)
sys.stdin.readline()
"""
ENDINGS = {
    "the end": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("1 / 0", 1, "ZeroDivisionError"),
    "dropped": ("del opened", 0, ""),
    "in a function": ("def main():\n    kept = opened\nmain()", 0, ""),
}


def started(code: str, *arguments: str) -> Program:
    """A process that has done what comes before its "up"."""
    process = Program("-c", code, *arguments)
    assert process.line() == "up\n"
    return process


def serving(path: str, engine: FakeEngine, then: str) -> Program:
    """A process that serves until it is sent a line, and then does something."""
    return started(SERVE + then, path, engine.endpoint, str(engine.replay_endpoint))


def assert_ends_as_it_says(process: Program, code: int, last: str) -> None:
    _, err = process.finish("\n")
    assert process.process.returncode == code, err
    assert err.count("Traceback") == bool(last), err
    assert (err.splitlines() or [""])[-1].startswith(last)


endings = pytest.mark.parametrize(("then", "code", "last"), ENDINGS.values(), ids=ENDINGS)


@endings
def test_a_server_ends_quietly_and_replicas_are_told(
    then: str, code: int, last: str, tmp_path: Path
) -> None:
    path = tmp_path / "kvindex.sock"
    with FakeEngine("a") as engine, serving(str(path), engine, then) as process:
        with join(path, PATIENCE) as replica:
            engine.run(Workload(20, seed=1))
            caught_up(replica, engine)  # type: ignore[arg-type]  # it has what that asks
            assert_ends_as_it_says(process, code, last)
            until(lambda: replica.statistics()["replica"]["rejoins"])
            assert replica.statistics()["replica"]["rejoins"] == {"server_closed": 1}
            assert not path.exists()


@endings
def test_a_replica_ends_quietly_and_its_server_is_told(
    then: str, code: int, last: str, site: Site
) -> None:
    engine = site.engine()
    server = site.serve(worker_of(engine))
    engine.serve(list(range(64)))
    caught_up(server.client, engine)
    with started(JOIN + then, site.path) as process:
        assert_ends_as_it_says(process, code, last)
    counted(server, left=1, died=0)


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
        assert_ends_as_it_says(process, 0, "")


AGAIN = """
import sys, time
from kvindex import replicas
replica = replicas.join(sys.argv[1])
print("up", flush=True)
while replica.statistics()["replica"]["joins"] != 2:
    time.sleep(0.01)
print("again", flush=True)
sys.stdin.readline()
"""


def test_a_replica_that_joined_anew_leaves_when_its_process_ends(site: Site) -> None:
    server = site.serve()
    with started(AGAIN, site.path) as process:
        server.close()
        server = site.serve()
        assert process.line() == "again\n"
        counted(server, joined=1)
        process.finish("\n")
    counted(server, left=1, died=0)
    server._outflow.send(b"to whom it may concern")
    assert server._outflow._sender.statistics()["readers_removed"] == 0


COLLECTED = """
import faulthandler, gc, sys, threading
from kvindex import replicas
replica = replicas.join(sys.argv[1])
faulthandler.dump_traceback_later(15, exit=True)
gc.disable()
lock, waits = threading.Lock(), threading.Event()
follower = replica._follower
show = follower._show_stale
def log(reason):  # as a handler of the log, whose lock the thread wants
    waits.set()
    with lock:
        show(reason)
follower._show_stale = log
class Router: pass
router = Router()
router.itself, router.replica = router, replica
del router, replica
with lock:
    print("up", flush=True)
    waits.wait()
    gc.collect()  # may run at any allocation, this one too
follower._thread.join()
print("fine")
"""


def test_a_replica_is_collected_inside_a_lock_that_its_thread_wants(site: Site) -> None:
    server = site.serve()
    with started(COLLECTED, site.path) as process:
        server.close()
        out, err = process.finish()
    assert (process.process.returncode, out) == (0, "fine\n"), err


WAITING = """
import threading
from kvindex.shm import ShmRingBuffer
ring = ShmRingBuffer(1, 64, 1)
ring.writer().reserve(0)
reader = ShmRingBuffer(*ring.handle()).reader(0)
inside = threading.Event()
def wait():
    inside.set()
    while True:
        reader.read(64, 0.0, 0.001)
threading.Thread(target=wait, daemon=True).start()
inside.wait()
print("up", flush=True)
"""


def test_the_interpreter_ends_while_a_thread_waits_in_a_ring() -> None:
    with started(WAITING) as process:
        assert_ends_as_it_says(process, 0, "")
