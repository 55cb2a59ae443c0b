"""Processes that end with threads of ours inside: as their own code says, and quietly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvindex.fanout import FanOut
from kvindex.testing import FakeEngine
from tests.e2e.publish_peers import wait_until
from tests.live import PATIENCE, caught_up, worker_of

ROOT = Path(__file__).parents[2]
JOIN = "import sys; from kvindex import fanout; replica = fanout.join(sys.argv[1])"
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
