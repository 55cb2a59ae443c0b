"""What kvindex predicted beside what the engine reports, one request at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import msgspec

from kvindex import Client, Rank
from tests.engines.vllm import BLOCK_SIZE, LONGEST, PATIENCE, Vllm
from tests.engines.workload import Request, Workload
from tests.live import until


class Compared(msgspec.Struct, frozen=True):
    """One request: its tokens, how many kvindex predicted as cached, and how many were."""

    asked: int
    predicted: int
    cached: int
    upper_bound: bool

    @property
    def verdict(self) -> str:
        if self.predicted == self.cached:
            return "equal"
        if self.predicted < self.cached:
            return "under"
        return "over, flagged" if self.upper_bound else "over"


class Ledger:
    """All comparisons of a session by phase, for the table at its end."""

    def __init__(self) -> None:
        self._phases: dict[str, list[Compared]] = {}

    def note(self, phase: str, compared: Sequence[Compared]) -> None:
        self._phases.setdefault(phase, []).extend(compared)

    def rows(self) -> Iterator[str]:
        """Yield the lines of a Markdown table."""
        if not self._phases:
            return
        yield "| phase | requests | equal | over | over, flagged | under | tokens cached |"
        yield "|---|---|---|---|---|---|---|"
        for phase, compared in self._phases.items():
            counts = Counter(result.verdict for result in compared)
            verdicts = [counts[name] for name in ("equal", "over", "over, flagged", "under")]
            tokens = f"{sum(c.cached for c in compared):,} of {sum(c.asked for c in compared):,}"
            yield f"| {phase} | {len(compared)} | {' | '.join(map(str, verdicts))} | {tokens} |"


class Fleet:
    """Engines, a client that follows them, and the rank of each engine.

    Args:
        client: follows all of the engines.
        engines: each has one or more ranks.
    """

    def __init__(self, client: Client, engines: Sequence[Vllm]) -> None:
        client.wait_live(timeout=PATIENCE)
        self.client = client
        by_worker = {engine.url.removeprefix("http://"): engine for engine in engines}
        self.places = [(rank, by_worker[rank.worker]) for rank in client.ranks]

    def catch_up(self, work: Workload) -> None:
        """Return when the index has applied all that the engines have done so far.

        Each engine computes a new prompt of one block. Its stream is in order, so when the index
        holds this block it has applied everything before it.
        """
        for rank, engine in self.places:
            marker = work.tokens(BLOCK_SIZE + 1)
            engine.complete({"prompt": marker, "max_tokens": 1}, rank.dp_rank)
            until(partial(self._holds, rank, marker), timeout=PATIENCE)

    def _holds(self, rank: Rank, token_ids: Sequence[int]) -> bool:
        return self.client.match(token_ids)[rank].tokens > 0

    def compare(
        self, rank: Rank, engine: Vllm, request: Request
    ) -> tuple[Compared, dict[str, Any]]:
        """Predict what the engine will hit, send the request, and return both."""
        messages = request.body.get("messages")
        token_ids = request.body["prompt"] if messages is None else engine.tokenize(messages)
        assert len(token_ids) < LONGEST - 40, "the engine would refuse it"
        match = self.client.match(token_ids, salt=request.salt, recomputed=1)[rank]
        answer = engine.complete(request.body, rank.dp_rank)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(token_ids)
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Compared(len(token_ids), match.tokens, cached, match.upper_bound), answer

    def one_by_one(self, work: Workload, count: int) -> list[Compared]:
        """Compare requests to each rank in turn; now and then a client hangs up in between."""
        compared = []
        for number in range(count):
            rank, engine = self.places[number % len(self.places)]
            request = work.next()
            self.catch_up(work)
            result, answer = self.compare(rank, engine, request)
            compared.append(result)
            request.go_on(answer)
            if number % 20 == 19:
                engine.hang_up({"prompt": work.tokens(300), "max_tokens": 200, "ignore_eos": True})
        return compared

    def at_once(self, work: Workload, count: int, threads: int = 6) -> list[Compared]:
        """Compare so many requests, several at a time: the caches change in between."""
        lock = Lock()

        def result(number: int) -> Compared:
            with lock:
                request = work.next(text=False)
            compared, _ = self.compare(*self.places[number % len(self.places)], request)
            return compared

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(result, range(count)))
