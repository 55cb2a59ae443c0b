"""kvindex on NATS: a relay, a replica of a pool, or a subscriber of its own beside them."""

from __future__ import annotations

import gc
import time
from time import perf_counter
from typing import Any

from benchmarks.sides.fanned import Fanned
from kvindex import Client, Worker
from kvindex.replicas import nats

POOL = "bench"


class _Alone:
    """A client in the place of a relay's."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def close(self) -> None:
        self.client.close()


class Pooled(Fanned):
    """A relay, a replica, or a client, in a process of its own; `path` is a URL of NATS."""

    def subscribe(self, endpoints: list[str]) -> None:
        """Subscribe to a feed, and pass nothing on."""
        gc.collect()
        gc.freeze()
        self._server = _Alone(Client([Worker("engine", endpoints)]))  # type: ignore[assignment]

    def serve(self, endpoints: list[str], path: str) -> None:
        """Subscribe to a feed, and write what it sends to NATS."""
        gc.collect()
        gc.freeze()
        workers = [Worker("engine", endpoints)]
        self._server = nats.Relay(  # type: ignore[assignment]
            workers, path, pool=POOL, max_bytes=1 << 30, snapshot_every=32 << 20
        )

    def join(self, path: str) -> float:
        """Become a replica; return the seconds that it took."""
        gc.collect()
        started = perf_counter()
        self._replica = nats.join(path, POOL, timeout=60.0)
        return perf_counter() - started

    def relay(self) -> dict[str, Any]:
        """Return the relay's counters."""
        assert isinstance(self._server, nats.Relay)
        counters: dict[str, Any] = self._server.statistics()["relay"]
        return counters

    def wait_live(self, timeout: float, other_than: str | None = None) -> str:
        """Return the epoch once all ranks are live, in another epoch than this one."""
        assert self._replica is not None
        replica = self._replica

        def epoch() -> Any:
            return replica.statistics()["replica"].get("epoch")

        until = time.monotonic() + timeout
        while len(replica.live_ranks()) < len(replica.ranks) or epoch() in (None, other_than):
            if time.monotonic() > until:
                raise TimeoutError(f"{replica!r} is not live")
            time.sleep(0.002)
        return str(epoch())

    def blocks(self) -> int:
        """Return how many blocks the index has."""
        return len(self._asked.index)
