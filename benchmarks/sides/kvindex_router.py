"""kvindex's router, over an index that is fed directly or over ZMQ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.sides.matching import timed
from benchmarks.sides.publishing import Publishers
from benchmarks.workload import BLOCK_SIZE, PROMPT_TOKENS, MsgpackEncoder
from kvindex import Client, Index, Rank, Worker, connect
from kvindex.routing import Candidates, Choice, Router

_REQUEST = 256  # tokens that an open request costs


class PlainPolicy:
    """What a user writes first: the least sum, by a loop over the ranks."""

    name = "plain"

    def choose(self, candidates: Candidates) -> Choice:
        """Choose the cheapest rank."""
        prompt_tokens, loads = candidates.prompt_tokens, candidates.loads
        costs = [
            prompt_tokens - held + queued + _REQUEST * requests
            for held, queued, requests in zip(
                candidates.hits.tokens, loads.queued, loads.open, strict=True
            )
        ]
        return Choice(min(candidates.rows(), key=costs.__getitem__), costs)


class KVIndexRouter:
    """Routers by the default policy and by a plain one, over the same index."""

    def __init__(self) -> None:
        self._publishers: Publishers | None = None
        self._source: Index | Client = Index()
        self._routers: dict[str, Router] = {}

    def encoder(self) -> MsgpackEncoder:
        """Return what writes engines' payloads."""
        return MsgpackEncoder()

    def reset(self, ranks: int, fed: str) -> None:
        """Begin again with an empty index, of which nobody or a subscriber follows the ranks."""
        self._close()
        if fed == "zmq":
            self._publishers = Publishers(ranks)
            self._source = connect([Worker("engine", self._publishers.endpoints)])
            self._publishers.wait_joined()
        else:
            self._source = Index()
        self._routers = {
            "select": Router(self._source),
            "plain": Router(self._source, policy=PlainPolicy()),
        }

    def rank(self, number: int) -> Any:
        """Return a rank of the one worker, or the publisher's number."""
        return number if self._publishers else Rank("engine", number)

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return `Index.apply`, or what publishes."""
        if self._publishers:
            return self._publishers.send
        assert isinstance(self._source, Index)
        return self._source.apply

    def held(self, tokens: list[int]) -> dict[int, int]:
        """Return the blocks by dp_rank."""
        return {one.rank.dp_rank: one.blocks for one in self._source.match(tokens) if one.blocks}

    def chosen(self, tokens: list[int]) -> tuple[int, int]:
        """Return what `Router.select` says."""
        decision = self._routers["select"].select(tokens)
        return decision.rank.dp_rank, decision.tokens // BLOCK_SIZE

    def creditable(self, blocks: int) -> int:
        """Return the blocks that count: the engine computes a prompt's last token again."""
        return min(blocks, (PROMPT_TOKENS - 1) // BLOCK_SIZE)

    def occupy(self, tokens: list[int]) -> None:
        """Book a request with each router."""
        for router in self._routers.values():
            router.reserve(tokens)

    def timed(self, call: str, prompts: list[Any], repeats: int) -> list[int]:
        """Return the nanoseconds of each call: "match", "select", "plain" or "reserve"."""
        return timed(self._call(call), prompts, repeats)

    def _call(self, call: str) -> Callable[[Any], object]:
        reserve = self._routers["select"].reserve
        if call == "match":
            return self._source.match
        if call == "reserve":
            return lambda tokens: reserve(tokens).finish()
        return self._routers[call].select

    def _close(self) -> None:
        if isinstance(self._source, Client):
            self._source.close()
        if self._publishers:
            self._publishers.close()
            self._publishers = None
