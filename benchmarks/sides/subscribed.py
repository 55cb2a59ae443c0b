"""kvindex behind its sockets: `connect`, fed by `benchmarks.feed`."""

from __future__ import annotations

import gc
from time import perf_counter, sleep
from typing import Any

from benchmarks.feed import sentinel_tokens
from benchmarks.sides.busy import ask
from kvindex import Client, Match, State, Worker, connect

_POLL = 0.005  # seconds between looks for the sentinel, as on the other side


class Subscribed:
    """A client of every publisher of a feed."""

    def __init__(self) -> None:
        self._client: Client | None = None

    def connect(self, endpoints: list[str]) -> None:
        """Subscribe to a feed; the feed tells when all have joined."""
        gc.collect()
        gc.freeze()
        self._client = connect([Worker("engine", endpoints)])

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
            held = _depths(self._open.match(tokens))
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


def _depths(match: Match) -> dict[int, int]:
    return {m.rank.dp_rank: m.blocks for m in match if m.blocks}
