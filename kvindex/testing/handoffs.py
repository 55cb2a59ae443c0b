"""Prefill and decode apart, as vLLM's NIXL connector does it: what P keeps until D has fetched it.

D asks P over HTTP (`DELETE /handoffs/...`), where the engines have a side channel of their own.
"""

from __future__ import annotations

import http.client
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvindex.testing.cache import Running
from kvindex.testing.engine import FakeEngine

PATH: Final = "/handoffs/"
TOKEN_BYTES: Final = 256  # of KV, by the metrics
_COUNTED: Final = ("handed_over", "fetched", "refused", "expired", "late")
_PATIENCE: Final = 5.0  # seconds that D waits for P


class Handoff(msgspec.Struct, frozen=True):
    """What P tells of a prompt that it computed: its `kv_transfer_params`, word for word to D."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int
    remote_block_ids: list[list[int | None]]
    fake_unknown: str  # must reach D, too, as what a later vLLM adds must
    remote_prefill_cached_tokens: int | None = None
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    tp_size: int = 1
    transfer_mode: str = "pull"

    def settle(self, how: str) -> bool:
        """Tell P how it ended ("fetched", "refused"); return whether P is there and knows of it."""
        peer = http.client.HTTPConnection(self.remote_host, self.remote_port, timeout=_PATIENCE)
        path = f"{PATH}{self.remote_engine_id}/{self.remote_request_id}/{how}"
        try:
            peer.request("DELETE", path)
            return peer.getresponse().status == 200
        except (OSError, ValueError, http.client.HTTPException):
            return False
        finally:
            peer.close()


class Handoffs:
    """The prompts that a P computed, whose blocks it keeps until D has them or a lease ends.

    Any thread may use them. Leases end when somebody looks.
    """

    def __init__(self, lease: float, clock: Callable[[], float]) -> None:
        self._engine_id = uuid.uuid4().hex  # another one after a restart: D finds nothing then
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[FakeEngine, Running, float]] = {}
        self._counters = Counter(dict.fromkeys(_COUNTED, 0))

    def offer(
        self, engine: FakeEngine, running: Running, address: tuple[str, int], *, lost: bool
    ) -> dict[str, Any]:
        """Keep a request's blocks; return its `kv_transfer_params`, of nothing if it is lost."""
        with self._lock:
            self._counters["handed_over"] += 1
            request_id = f"cmpl-fake-{self._counters['handed_over']}"
            tables = [list(table) for table in running.tables]
            if lost:
                engine.release(running)
            else:
                self._kept[request_id] = (engine, running, self._clock() + self._lease)
        handoff = Handoff(
            remote_engine_id="lost" if lost else self._engine_id,
            remote_request_id=request_id,
            remote_host=address[0],
            remote_port=address[1],
            remote_num_tokens=running.prompt_tokens,
            remote_block_ids=tables,
            fake_unknown=request_id,
            remote_prefill_cached_tokens=running.hit_tokens,
        )
        fields: dict[str, Any] = msgspec.to_builtins(handoff)
        return fields

    def settle(self, path: str) -> bool:
        """Free what a path of D names; return whether this engine handed it over."""
        engine_id, _, rest = path.removeprefix(PATH).partition("/")
        request_id, _, how = rest.partition("/")
        self.expire()
        with self._lock:
            if engine_id != self._engine_id or how not in ("fetched", "refused"):
                return False
            kept = self._kept.pop(request_id, None)
            if kept is None:  # its lease is over. As in vLLM, D reads what now lies there
                self._counters["late"] += 1
                return True
            self._counters[how] += 1
            return kept[0].release(kept[1])

    def expire(self) -> None:
        """Free what was kept for as long as the lease."""
        with self._lock:
            now = self._clock()
            for request_id, (engine, running, until) in list(self._kept.items()):
                if until <= now:
                    del self._kept[request_id]
                    engine.release(running)
                    self._counters["expired"] += 1

    def statistics(self) -> dict[str, int]:
        """Return the blocks that are pinned, and how many handoffs came to which end."""
        self.expire()
        with self._lock:
            kept = [table for _, running, _ in self._kept.values() for table in running.tables]
            return {"pinned": sum(map(len, kept)), **self._counters}
