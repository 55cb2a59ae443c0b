"""`kvindex relay` and replicas as processes, which tests kill and stop.

`python -m … URL` is a replica that answers lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from kvindex import Rank
from kvindex.index import Index
from kvindex.replicas import Replica, nats
from kvindex.testing import FakeEngine
from kvindex.wire.nats import NatsPool
from tests.children import Program
from tests.live import PATIENCE


class RelayProcess(Program):
    """A relay of some engines; its counters are read as it prints them, twice a second.

    Args:
        pool: to write to; its servers are those that the relay connects to first.
        engines: to subscribe to.
        options: further arguments of the command.
    """

    def __init__(self, pool: NatsPool, engines: Iterable[FakeEngine], *options: str) -> None:
        workers = [
            f"--worker={engine.worker}={engine.endpoint},replay={engine.replay_endpoint}"
            for engine in engines
        ]
        command = ["-m", "kvindex", "relay", str(pool), *workers, *options]
        super().__init__(
            *command, "--stats-every=0.1", "--max-bytes=16MB", stdin=subprocess.DEVNULL
        )
        self.report: dict[str, Any] = {}
        self._reports = 0
        self._printed = threading.Condition()
        self._has_ended = False
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_reports, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait for a report, printed from now on, for which `wanted` is true; return it."""
        with self._printed:
            after = self._reports + 1  # one may be under way already

            def is_wanted() -> bool:
                return self._has_ended or (self._reports > after and bool(wanted(self.report)))

            in_time = self._printed.wait_for(is_wanted, PATIENCE)
            assert in_time, self.report
            assert not self._has_ended, "".join(self._errors)
            return self.report

    def wait_until_it_writes(self, snapshots: int = 1) -> dict[str, Any]:
        """Wait until it writes, and has stored so many snapshots."""
        return self.wait_for(
            lambda report: (
                report["relay"]["state"] == "writing"
                and report["relay"].get("snapshots", 0) >= snapshots
            )
        )

    def kill(self) -> None:
        """End it without any warning, even if it is stopped. Idempotent."""
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        super().kill()

    def _read_reports(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report = json.loads(line)
            with self._printed:
                self.report = report
                self._reports += 1
                self._printed.notify_all()
        with self._printed:
            self._has_ended = True
            self._printed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)


class ReplicaProcess(Program):
    """A replica of a pool; it has joined when this returns."""

    def __init__(self, url: str) -> None:
        super().__init__("-m", "tests.replicas.nats.processes", url, stderr=None)
        self.ask([])

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return what it holds, as `seen`."""
        self.tell(json.dumps(prompts))
        line = self.line()
        assert line, "the replica's process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def contents(index: Index, rank: Rank) -> dict[tuple[Any, str, int], int]:
    """What an index holds of a rank, in the form of `FakeEngine.truth`."""
    if rank not in index.ranks:
        return {}
    return {
        (block.block_hash, block.medium, block.group_idx): block.copies
        for block in index.tree(rank).walk()
    }


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
