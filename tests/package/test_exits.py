"""Processes that end with threads of ours inside: as their own code says, and quietly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvindex.replicas import FanOut
from kvindex.testing import FakeEngine
from tests.children import Program
from tests.live import PATIENCE, caught_up, worker_of
from tests.native_ring import needs_ring
from tests.publish.publish_peers import wait_until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
JOIN = "import sys; from kvindex import replicas; replica = replicas.join(sys.argv[1])"
ENDINGS = {
    "the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("1 / 0", 1),
    "dropped": ("del replica", 0),
    "in a function": ("def main():\n    kept = replica\nmain()", 0),
}


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def joined(code: str, path: str) -> Program:
    """A process whose replica has joined; the code says "joined" first."""
    process = Program("-c", JOIN + code, path)
    assert process.line() == "joined\n"
    return process


@needs_ring
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_does_not_close_its_replica_ends_well(ending: str, tmp_path: Path) -> None:
    code, exit_code = ENDINGS[ending]
    path = str(tmp_path / "fanout")
    with FakeEngine() as engine, FanOut([worker_of(engine)], path) as server:
        engine.serve(list(range(64)))
        caught_up(server.client, engine)
        ended = run(f"{JOIN}\n{code}", path)
        assert ended.returncode == exit_code, ended.stderr
        wait_until(lambda: server.statistics()["left"] == 1, "the replica has left")
        assert server.statistics()["died"] == 0


AGAIN = """
import time
print("joined", flush=True)
while replica.statistics()["replica"]["joins"] != 2:
    time.sleep(0.01)
print("again", flush=True)
sys.stdin.readline()
"""


@needs_ring
def test_a_replica_that_joined_anew_leaves_when_its_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "fanout")
    server = FanOut((), path)
    try:
        with joined(AGAIN, path) as process:
            server.close()
            server = FanOut((), path)
            assert process.line() == "again\n"
            wait_until(lambda: server.statistics()["joined"] == 1, "the replica has joined anew")
            process.finish("\n")
        wait_until(lambda: server.statistics()["left"] == 1, "the replica has left")
        assert server.statistics()["died"] == 0
        server._outflow.send(b"to whom it may concern")
        assert server._outflow._sender.statistics()["readers_removed"] == 0
    finally:
        server.close()


COLLECTED = """
import faulthandler, gc, threading
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
    print("joined", flush=True)
    waits.wait()
    gc.collect()  # may run at any allocation, this one too
follower._thread.join()
print("fine")
"""


@needs_ring
def test_a_replica_is_collected_inside_a_lock_that_its_thread_wants(tmp_path: Path) -> None:
    path = str(tmp_path / "fanout")
    with FanOut((), path) as server:
        with joined(COLLECTED, path) as process:
            server.close()
            out, err = process.finish()
        assert (process.process.returncode, out) == (0, "fine\n"), err


@needs_ring
def test_the_interpreter_ends_while_a_thread_waits_in_a_ring() -> None:
    ended = run(
        "import threading\n"
        "from kvindex.shm import ShmRingBuffer\n"
        "ring = ShmRingBuffer(1, 64, 1)\n"
        "ring.writer().reserve(0)\n"
        "reader = ShmRingBuffer(*ring.handle()).reader(0)\n"
        "inside = threading.Event()\n"
        "def wait():\n"
        "    inside.set()\n"
        "    while True:\n"
        "        reader.read(64, 0.0, 0.001)\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "inside.wait()\n"
    )
    assert ended.returncode == 0, ended.stderr
