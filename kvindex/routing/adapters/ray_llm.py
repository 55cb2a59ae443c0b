"""Ray Serve LLM's own `KVAwareRouter` on kvindex, in the place of the service that it embeds.

Ray's `KVTokenTracker` imports `SelectionService` from `dynamo.llm`. `install` puts the class below
there. Ray's code stays as it is, and neither ai-dynamo nor PYTHONHASHSEED is needed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from kvindex.client import connect
from kvindex.routing import Booking, NoCandidateError, Router
from kvindex.subscribe import Worker
from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Rank

__all__ = ["SelectionService", "install"]


def install(**options: Any) -> None:
    """Make Ray's `KVTokenTracker` import our `SelectionService` in this process, with options.

    Each worker process must call it: `ray.init(runtime_env={"worker_process_setup_hook":
    "kvindex.routing.adapters.ray_llm.install"})`. No other code can use `dynamo.llm` there.
    """
    module = ModuleType(
        "dynamo.llm", "kvindex stands in for it: see kvindex.routing.adapters.ray_llm"
    )
    vars(module)["SelectionService"] = partial(SelectionService, **options)
    sys.modules["dynamo.llm"] = module


class SelectionService:
    """Chooses a worker for Ray, and receives the events of each request's life.

    Each ingress replica has its own service, which subscribes to all engines. Ray sends every
    reservation and every event of a request's life to all of them, so each has the whole load.

    Args:
        indexer_threads: not needed.
        dp_size: DP ranks in each replica's engine, at successive ports. Ray reports one rank only,
            and does not pass on the chosen one: the engine's own balancer chooses.
        options: of the `Router`: `policy`, `filters`, `predict`, ...

    Thread safety: one event loop reports workers; other calls come from any thread and any loop.
    """

    def __init__(self, indexer_threads: int = 0, *, dp_size: int = 1, **options: Any) -> None:
        self.client = connect()
        options = {"expires_after": 3_600.0, **options}  # then Ray frees what did not complete
        self.router = Router(self.client, **options)
        self.ignored: Counter[str] = Counter()  # Ray's reports of requests or workers unknown here
        self._dp_size = dp_size
        self._block_size = 1
        self._bookings: dict[str, Booking] = {}
        self._changing = asyncio.Lock()  # one after another, as Ray reports them

    async def upsert_worker(self, worker: Mapping[str, Any]) -> None:
        """Follow a worker's KV events, from now on where Ray reports them."""
        self._block_size = worker["block_size"]
        await self._change(str(worker["worker_id"]), self._worker(worker))

    async def delete_worker(self, worker_id: int) -> None:
        """Forget a worker, its blocks, and its requests."""
        for request_id, booking in list(self._bookings.items()):
            if booking.rank.worker == str(worker_id):
                self._bookings.pop(request_id, None)
                booking.cancel()
        await self._change(str(worker_id), None)

    async def select_and_reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Choose one of the allowed workers and book the request there, in one step.

        Raises:
            RuntimeError: none of them is known. Ray answers 503.
        """
        request_id, tokens = request["selection_id"], request["token_ids"]
        allowed, known = set(map(str, request["allowed_worker_ids"])), self.router.ranks
        ranks = [rank for rank in known if rank.worker in allowed]
        among = None if len(ranks) == len(known) else ranks
        await self.free_reservation(request_id)  # Ray asks again when it found no replica
        try:
            booking = self.router.reserve(tokens, request_id=request_id, ranks=among)
        except NoCandidateError as error:
            raise RuntimeError(f"none of workers {sorted(allowed)} is known: {error}") from error
        self._bookings[request_id] = booking
        decision = booking.decision
        return {
            "worker_id": int(booking.rank.worker),
            "dp_rank": booking.rank.dp_rank,
            "sequence_hashes": [],  # Ray passes them on to the other ingresses; we need none
            "isl_tokens": decision.prompt_tokens,
            "effective_prefill_tokens": decision.new_tokens,
            "overlap": {"longest_matched": decision.tokens},
        }

    async def create_reservation(self, request: Mapping[str, Any]) -> None:
        """Book a request for which another ingress replica has chosen."""
        request_id = request["selection_id"]
        rank = Rank(str(request["worker_id"]), request["dp_rank"])
        tokens = request["isl_tokens"], request["effective_prefill_tokens"]
        await self.free_reservation(request_id)
        try:
            self._bookings[request_id] = self.router.book(rank, *tokens, request_id=request_id)
        except UnknownRankError:  # an error would make Ray drop the reservations that come with it
            self.ignored["reservation of an unknown worker"] += 1

    async def prefill_complete(self, request_id: str) -> None:
        """Report a request's first token."""
        if request_id in self._bookings:
            self._bookings[request_id].first_token()

    def add_output_block(self, request_id: str, decay_fraction: float | None = None) -> None:
        """Report that a request has filled one more block. `decay_fraction` is not needed."""
        if request_id in self._bookings:
            self._bookings[request_id].output(self._block_size)

    async def free_reservation(self, request_id: str) -> None:
        """Release a request's load: it ended."""
        if booking := self._bookings.pop(request_id, None):
            booking.finish()

    def close(self) -> None:
        """Stop following. Idempotent."""
        self.client.close()

    def _worker(self, report: Mapping[str, Any]) -> Worker:
        """Return the worker that Ray reports; ranks without an endpoint are at the next ports."""
        name, start = str(report["worker_id"]), report["data_parallel_start_rank"]
        reported, size = report["kv_events_endpoints"], report["data_parallel_size"]
        first, replay = reported[start], report.get("replay_endpoint")
        publishers = Worker(name, first, replay, max(self._dp_size, size)).publishers()
        live = {start + p.dp_rank: p.endpoint for p in publishers} | reported
        replays = {start + p.dp_rank: p.replay for p in publishers if p.replay is not None}
        return Worker(name, live, replays or None)

    async def _change(self, name: str, worker: Worker | None) -> None:
        async with self._changing:  # kvindex's thread may be busy: an event loop must not wait
            await asyncio.to_thread(self._follow, name, worker)

    def _follow(self, name: str, worker: Worker | None) -> None:
        # First: a worker that Ray reports once more may publish elsewhere by now.
        with suppress(UnknownRankError):  # it is new
            self.client.remove(name)
        if worker is not None:
            self.client.add(worker)
