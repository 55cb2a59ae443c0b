"""A replica in a process of its own, which tests stop: `python -m … URL` answers lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from kvindex.replicas import Replica, nats
from tests.children import ended_after
from tests.live import PATIENCE
from tests.replicas.nats.pool_copies import contents


class ReplicaProcess:
    """A replica of a pool; it has joined when this returns."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.replicas.nats.replica_process", url]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ending = ended_after(self._process)
        self._ending.__enter__()
        self.ask([])

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return what it holds, as `seen`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(prompts), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the replica's process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Let it stand still, with its connection open; it does when this returns."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> ReplicaProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.__exit__(None, None, None)


def seen(replica: Replica, prompts: list[list[int]]) -> dict[str, Any]:
    """Return what a replica holds of each rank, its states and counters, and what prompts hit."""
    statuses = replica.statuses()
    return {
        "ranks": {
            str(rank): {
                "state": str(status.state),
                "seq": status.seq,
                "reason": status.reason,
                "blocks": listed(contents(replica.index, rank)),
            }
            for rank, status in statuses.items()
        },
        "hits": [
            {str(rank): match[rank].tokens for rank in statuses}
            for match in map(replica.match, prompts)
        ],
        "replica": replica.statistics()["replica"],
    }


def listed(blocks: dict[tuple[Any, str, int], int]) -> list[list[Any]]:
    """Return blocks and their copies in a form that JSON keeps."""
    return sorted([str(h), medium, group, copies] for (h, medium, group), copies in blocks.items())


def main() -> None:
    with nats.join(sys.argv[1], timeout=PATIENCE) as replica:
        for line in sys.stdin:
            print(json.dumps(seen(replica, json.loads(line))), flush=True)
            replica.index.check()


if __name__ == "__main__":
    main()
