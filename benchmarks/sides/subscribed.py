"""kvindex behind its sockets: `connect`, fed by `benchmarks.feed`."""

from __future__ import annotations

import gc
from time import perf_counter, sleep
from typing import Any

from benchmarks.feed import sentinel_tokens
from benchmarks.sides.busy import ask, listen
from kvindex import Client, Match, State, Worker, connect

_POLL = 0.005  # seconds between looks for the sentinel, as on the other side


class Subscribed:
    """A client of every publisher of a feed."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._worker_ranks = 0

    def connect(self, endpoints: list[str], worker_ranks: int = 0) -> None:
        """Subscribe to a feed; the feed reports when all have joined.

        Args:
            endpoints: one for each rank.
            worker_ranks: ranks of each worker; 0: one worker has all.
        """
        gc.collect()
        gc.freeze()
        size = self._worker_ranks = worker_ranks or len(endpoints)
        self._client = connect(
            [
                Worker(str(first // size), endpoints[first : first + size])
                for first in range(0, len(endpoints), size)
            ]
        )

    def wait(self, ranks: int, timeout: float) -> None:
        """Return when every rank holds the sentinel: all that was sent before is applied."""
        sentinel, deadline = sentinel_tokens(), perf_counter() + timeout
        while perf_counter() < deadline:
            if sum(1 for match in self._open.index.match(sentinel) if match.blocks) == ranks:
                return
            sleep(_POLL)
        raise TimeoutError(f"not drained within {timeout} s: {self._open!r}")

    def check(self, prompts: list[Any]) -> None:
        """Assert the right depth of each rank for each prompt, and that nothing was lost."""
        for tokens, depths in prompts:
            held = self._depths(self._open.match(tokens))
            if held != {int(rank): blocks for rank, blocks in depths}:
                raise AssertionError(f"a wrong answer for a prompt of {len(tokens)} tokens")
        statuses = self._open.subscriber.statuses().values()
        if any(s.losses or s.gaps or s.state is not State.LIVE for s in statuses):
            raise AssertionError(f"the stream was not whole: {self._open!r}")

    def ask(self, prompts: list[Any], seconds: float, pause: float) -> list[int]:
        """Return the nanoseconds of each match while the feed goes on."""
        samples: list[int] = []
        ask(self._open.match, [tokens for tokens, _ in prompts], seconds, pause, samples)
        return samples

    def listen(
        self, prompts: list[Any], seconds: float, markers: int, pause: float
    ) -> dict[str, Any]:
        """Match while a feed with markers goes on; return what `busy.listen` notes."""
        return listen(
            self._open.match,
            lambda tokens: self._open.match(tokens).best is not None,
            [tokens for tokens, _ in prompts],
            seconds,
            markers,
            pause,
        )

    def forget_turns(self) -> None:
        """Let the longest turn be the longest from now on."""
        self._open.subscriber._thread._counters.pop("longest_turn_us", None)

    def thread(self) -> dict[str, int]:
        """Return the counters of the subscriber's thread."""
        counters: dict[str, int] = self._open.statistics()["thread"]
        return counters

    def close(self) -> None:
        """Unsubscribe."""
        self._open.close()
        self._client = None
        gc.unfreeze()

    @property
    def _open(self) -> Client:
        if self._client is None:
            raise RuntimeError("connect first")
        return self._client

    def _depths(self, match: Match) -> dict[int, int]:
        size = self._worker_ranks
        return {int(m.rank.worker) * size + m.rank.dp_rank: m.blocks for m in match if m.blocks}
