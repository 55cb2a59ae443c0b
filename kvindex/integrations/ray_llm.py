"""Ray Serve LLM's own `KVAwareRouter` on kvindex, in the place of the service that it embeds.

Ray's `KVTokenTracker` imports `SelectionService` from `dynamo.llm`. `install` puts the class below
there. Ray's code stays as it is, and neither ai-dynamo nor PYTHONHASHSEED is needed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

from kvindex.client import connect
from kvindex.errors import UnknownRankError
from kvindex.rank import Rank
from kvindex.routing import Booking, NoCandidateError, Router
from kvindex.subscribe import Worker

__all__ = ["SelectionService", "install"]

_RAY_FORGETS_AFTER = 3_600.0  # seconds; its tracker then frees what was not completed


def install(**options: Any) -> None:
    """Have Ray's `KVTokenTracker` find our `SelectionService`, in this process.

    Ray runs it in each worker process: `ray.init(runtime_env={"worker_process_setup_hook":
    "kvindex.integrations.ray_llm.install"})`. A process that calls it has no other `dynamo.llm`.

    Args:
        options: what `SelectionService` takes beside `indexer_threads`.

    Examples:
        >>> install(policy="lmetric")
        >>> from dynamo.llm import SelectionService
    """
    module = ModuleType("dynamo.llm", "kvindex stands in for it: see kvindex.integrations.ray_llm")
    module.SelectionService = partial(SelectionService, **options)  # type: ignore[attr-defined]
    sys.modules["dynamo.llm"] = module


class SelectionService:
    """What Ray asks for a worker, and tells of each request's life.

    Each ingress replica has its own service, which subscribes to all engines. Ray sends every
    reservation and every event of a request's life to all of them, so each knows the whole load.

    Args:
        indexer_threads: taken, and not needed.
        dp_size: DP ranks in each replica's engine, at successive ports. Ray tells of one. Ray does
            not hand the chosen rank on, so the engine's own balancer takes one of them.
        options: of the `Router`: `policy`, `filters`, `predict`, ...

    Thread safety: every method may be called from any thread and any event loop.
    """

    def __init__(self, indexer_threads: int = 0, *, dp_size: int = 1, **options: Any) -> None:
        self.client = connect()
        self.router = Router(self.client, **{"expires_after": _RAY_FORGETS_AFTER, **options})
        self.ignored: Counter[str] = Counter()  # what Ray told of requests or workers unknown here
        self._dp_size = dp_size
        self._followed: dict[str, Worker] = {}
        self._block_size = 1
        self._bookings: dict[str, Booking] = {}
        # Adding and removing wait for kvindex's thread, which an event loop must not.
        self._changes = ThreadPoolExecutor(1, "kvindex-ray-llm")

    async def upsert_worker(self, worker: Mapping[str, Any]) -> None:
        """Follow a worker's KV events, or follow them somewhere else from now on."""
        self._block_size = worker["block_size"]
        await self._change(self._follow, str(worker["worker_id"]), self._worker(worker))

    async def delete_worker(self, worker_id: int) -> None:
        """Forget a worker, what it holds, and the requests that it had."""
        name = str(worker_id)
        for request_id, booking in list(self._bookings.items()):
            if booking.rank.worker == name:
                self._bookings.pop(request_id, None)
                booking.cancel()
        await self._change(self._follow, name, None)

    async def select_and_reserve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Choose one of the allowed workers and book the request there, in one step.

        Raises:
            RuntimeError: none of them is known. Ray answers 503.
        """
        request_id = request["selection_id"]
        allowed = set(map(str, request["allowed_worker_ids"]))
        known = self.router.ranks
        ranks = [rank for rank in known if rank.worker in allowed]
        await self.free_reservation(request_id)  # Ray asks again when it found no replica
        try:
            booking = self.router.reserve(
                request["token_ids"],
                request_id=request_id,
                ranks=None if len(ranks) == len(known) else ranks,
            )
        except NoCandidateError as error:
            raise RuntimeError(f"{error} (none of workers {sorted(allowed)} is known)") from error
        self._bookings[request_id] = booking
        decision = booking.decision
        return {
            "worker_id": int(booking.rank.worker),
            "dp_rank": booking.rank.dp_rank,
            "sequence_hashes": [],  # Ray hands them on to peers, and we need none
            "isl_tokens": decision.prompt_tokens,
            "effective_prefill_tokens": decision.new_tokens,
            "overlap": {"longest_matched": decision.tokens},
        }

    async def create_reservation(self, request: Mapping[str, Any]) -> None:
        """Book what another ingress replica has chosen."""
        request_id = request["selection_id"]
        rank = Rank(str(request["worker_id"]), request["dp_rank"])
        tokens = request["isl_tokens"], request["effective_prefill_tokens"]
        await self.free_reservation(request_id)
        try:
            self._bookings[request_id] = self.router.book(rank, *tokens, request_id=request_id)
        except UnknownRankError:  # an error would make Ray drop the reservations that come with it
            self.ignored["reservation of an unknown worker"] += 1

    async def prefill_complete(self, request_id: str) -> None:
        """Note a request's first token."""
        self._tell(request_id, Booking.first_token)

    def add_output_block(self, request_id: str, decay_fraction: float | None = None) -> None:
        """Note that a request has filled one more block. `decay_fraction` is not needed."""
        self._tell(request_id, lambda booking: booking.output(self._block_size))

    async def free_reservation(self, request_id: str) -> None:
        """Give a request's load back: it ended."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            booking.finish()

    def close(self) -> None:
        """Stop following. Idempotent."""
        self._changes.shutdown()
        self.client.close()

    def _tell(self, request_id: str, news: Callable[[Booking], None]) -> None:
        booking = self._bookings.get(request_id)
        if booking is None:
            self.ignored["news of an unknown request"] += 1
        else:
            news(booking)

    def _worker(self, told: Mapping[str, Any]) -> Worker:
        """Return the worker that Ray tells of; ranks without an endpoint are at the next ports."""
        start = told["data_parallel_start_rank"]
        size = max(self._dp_size, told["data_parallel_size"])
        name, first = str(told["worker_id"]), told["kv_events_endpoints"][start]
        found = Worker(name, first, told.get("replay_endpoint"), size).publishers()
        live = {start + one.dp_rank: one.endpoint for one in found} | told["kv_events_endpoints"]
        replay = {start + one.dp_rank: one.replay for one in found if one.replay is not None}
        return Worker(name, live, replay or None)

    async def _change(self, change: Callable[..., None], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._changes, partial(change, *args))

    def _follow(self, name: str, worker: Worker | None) -> None:
        if self._followed.get(name) == worker:
            return
        if self._followed.pop(name, None) is not None:
            self.client.remove(name)
        if worker is not None:
            self.client.add(worker)
            self._followed[name] = worker
