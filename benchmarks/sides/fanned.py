"""kvindex in several processes: the one that subscribes, or one of its replicas."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable
from time import monotonic, perf_counter
from typing import Any

from kvindex import BlockStored, EventBatch, Rank, RankStatus, Worker
from kvindex.replicas import FanOut, Replica, join
from kvindex.subscribe.status_board import StatusBoard

_BLOCK = 16
_CHAIN = 100  # blocks that follow one another


class Fanned:
    """A server, or a replica of one in another process."""

    def __init__(self) -> None:
        self._server: FanOut | None = None
        self._replica: Replica | None = None
        self._shown: list[tuple[int, int, float]] = []

    def serve(self, endpoints: list[str], path: str) -> None:
        """Subscribe to a feed, for replicas to join at `path`."""
        gc.collect()
        gc.freeze()
        workers = [Worker("engine", endpoints)] if endpoints else []
        self._server = FanOut(workers, path)

    def fill(self, ranks: int, blocks: int) -> None:
        """Let the server's index hold so many blocks of each rank, no two alike."""
        assert self._server is not None
        rng = random.Random(1)
        for number in range(ranks):
            for chain in range(0, blocks, _CHAIN):
                tokens = [rng.getrandbits(17) for _ in range(_CHAIN * _BLOCK)]
                hashes: list[int | bytes] = list(range(chain + 1, chain + _CHAIN + 1))
                stored = BlockStored(block_hashes=hashes, token_ids=tokens, block_size=_BLOCK)
                self._server.client.index.apply(Rank("engine", number), EventBatch(0.0, [stored]))

    def join(self, path: str) -> float:
        """Become a replica; return the seconds that it took."""
        gc.collect()
        started = perf_counter()
        self._replica = join(path, timeout=60.0)
        return perf_counter() - started

    def wait(self, batches: int, timeout: float) -> None:
        """Return when so many batches of all ranks are applied."""
        until = perf_counter() + timeout
        while self.applied() < batches:
            if perf_counter() > until:
                raise TimeoutError(f"{self._asked!r} has not applied {batches} batches")
            time.sleep(0.002)

    def applied(self) -> int:
        """Return how many batches of all ranks are applied."""
        statuses = map(self._asked.status, self._asked.ranks)
        return sum(s.seq + 1 for s in statuses if s.seq is not None)

    def watch(self) -> None:
        """Note from now on when each batch that ends a turn is seen."""
        board: StatusBoard
        if self._server is not None:
            board = self._server.client.subscriber._board
        else:
            assert self._replica is not None
            board = self._replica._board
        show = board.show

        def noting(statuses: Iterable[RankStatus]) -> None:
            statuses = list(statuses)
            show(statuses)
            now = monotonic()  # one clock for all processes
            self._shown += [(s.rank.dp_rank, s.seq, now) for s in statuses if s.seq is not None]

        board.show = noting  # type: ignore[method-assign]

    def seen(self) -> list[tuple[int, int, float]]:
        """Return rank, batch and time of what was noted."""
        return self._shown

    def check(self) -> dict[str, Any]:
        """Return what went wrong, if anything, and the blocks held."""
        if self._server is not None:
            found = self._server.statistics()
            return {"evicted": found["evicted"], "blocks": len(self._server.client.index)}
        assert self._replica is not None
        replica = self._replica.statistics()["replica"]
        return {"evicted": replica["joins"] - 1, "blocks": len(self._replica.index)}

    def close(self) -> None:
        """Leave, or end the server."""
        for one in (self._replica, self._server):
            if one is not None:
                one.close()
        self._server = self._replica = None
        self._shown = []
        gc.unfreeze()

    @property
    def _asked(self) -> Any:
        return self._replica or (self._server and self._server.client)
