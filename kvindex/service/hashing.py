"""POST /query_by_hash: a second index, of blocks by the hash of their tokens.

kvindex keeps no tokens, and its own keys are under a secret. So a client that asks by Dynamo's
hashes (XXH3-64, seed 1337, of a block's tokens as little-endian u32) has each block's tokens
replaced by the two halves of that hash, in an index of its own: a block of any size is one of two
tokens there, and a row of hashes is a prompt.

A subscriber of its own feeds it, so that its ranks prove themselves by their own replay: a warm
start of the other index says nothing of tokens.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
import xxhash

from kvindex import (
    BlockStored,
    Event,
    EventBatch,
    Hits,
    Index,
    Rank,
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    StreamItem,
    Subscriber,
    Trust,
)
from kvindex.service.apis import dynamo
from kvindex.service.catalog import DEFAULT_GROUP, Partition
from kvindex.service.http.messages import (
    RefusedError,
    Reply,
    Request,
    read_json,
    refused,
)
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.service.traffic import Traffic
from kvindex.wire.errors import UNREADABLE

_SEED: Final = 1337
_UNIT: Final = 2  # tokens that stand for a block: the halves of its hash


def packed_hashes(hashes: list[int]) -> memoryview:
    """Return hashes, signed or not, as the tokens that stand for their blocks."""
    numbers = array("Q", (number % 2**64 for number in hashes))
    if sys.byteorder != "little":
        numbers.byteswap()
    return memoryview(numbers).cast("B").cast("I")


def hashed(event: BlockStored) -> BlockStored | None:
    """Return an event with each block's tokens replaced by their hash, None if that cannot be.

    An event without tokens, of blocks that are known, stays as it is.
    """
    size, blocks = event.block_size, len(event.block_hashes)
    tokens: list[int] = []
    window = event.kv_cache_spec_sliding_window
    if event.token_ids:
        if size < 1 or len(event.token_ids) != blocks * size:
            return None
        try:
            numbers = array("I", event.token_ids)
        except (TypeError, OverflowError):  # text, or no u32
            return None
        if sys.byteorder != "little":
            numbers.byteswap()
        data = memoryview(numbers).cast("B")
        width = 4 * size
        digests = [
            xxhash.xxh3_64_intdigest(data[at : at + width], seed=_SEED)
            for at in range(0, len(data), width)
        ]
        tokens = packed_hashes(digests).tolist()
    return msgspec.structs.replace(
        event,
        token_ids=tokens,
        block_size=_UNIT,
        kv_cache_spec_sliding_window=None if window is None else -(-window * _UNIT // size),
        lookahead_token_ids=None,
    )


class HashFollower:
    """An index of hashes, and the subscriber that feeds it.

    Attributes:
        index: its blocks have two tokens.
        subscriber: feeds it.
        counters: `unhashed`: events left out, because their tokens are text or do not fill blocks.

    Thread safety: every method from any thread.
    """

    def __init__(self) -> None:
        self.index = Index()
        self.counters: Counter[str] = Counter()
        self._sizes: dict[Rank, int] = {}
        self.subscriber = Subscriber(sink=self._follow, on_batch=self._apply)

    def trusts(self) -> Mapping[Rank, Trust]:
        """Return how far each rank can be trusted; as `Client.trusts`."""
        return self.subscriber.trusts()

    def statistics(self) -> dict[str, Any]:
        """Return counters of the ranks' streams and of the index, and `counters`."""
        return {
            **self.subscriber.statistics(),
            "index": self.index.statistics(),
            "unhashed": self.counters["unhashed"],
        }

    def close(self) -> None:
        """Stop. Idempotent."""
        self.subscriber.close()

    def in_tokens(self, hits: Hits, ranks: Iterator[Rank]) -> Hits:
        """Return what was found in the tokens of the ranks' own blocks."""
        sizes = array("q", (self._sizes.get(rank, 0) for rank in ranks))

        def scaled(column: array[int]) -> array[int]:
            both = zip(column, sizes, strict=True)
            return array("q", (tokens // _UNIT * size for tokens, size in both))

        return Hits(scaled(hits.device), scaled(hits.host), scaled(hits.tokens), sizes)

    # On the subscriber's thread -----------------------------------------------------------------

    def _apply(self, rank: Rank, batch: EventBatch) -> None:
        events = list(self._translated(rank, batch.events))
        self.index.apply(rank, msgspec.structs.replace(batch, events=events))

    def _translated(self, rank: Rank, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if not isinstance(event, BlockStored):
                yield event
                continue
            translated = hashed(event)
            if translated is None:
                self.counters["unhashed"] += 1
                continue
            self._sizes[rank] = event.block_size
            yield translated

    def _follow(self, item: StreamItem) -> None:
        if isinstance(item, RankAdded):
            self.index.add(item.rank)
        elif isinstance(item, RankRemoved):
            self.index.remove(item.rank)
            self._sizes.pop(item.rank, None)
        elif isinstance(item, RanksRenamed):
            names = dict(item.names)
            self.index.rename(names)
            self._sizes = {names.get(rank, rank): size for rank, size in self._sizes.items()}
        elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
            self.index.tree(item.rank).clear()


_I64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class HashQuery(msgspec.Struct, frozen=True):
    """The body of POST /query_by_hash."""

    block_hashes: list[_I64]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: Any = None


def no_hashes(_: Request) -> Reply:
    """Return the answer of a server that keeps no hashes."""
    return refused(
        501,
        "this server keeps no hashes of blocks: ask /query with token_ids, or start it with "
        "--hash-queries xxh3",
    )


class HashQueries:
    """Answers queries by hash, for what is registered.

    Args:
        registry: whose registrations are followed.
        follower: what has the hashes.
        traffic: counts the queries, in tokens; one of its own by default.

    Thread safety: `answer` on the event loop.
    """

    def __init__(
        self, registry: Registry, follower: HashFollower, traffic: Traffic | None = None
    ) -> None:
        self._follower = follower
        self._service = Service(follower, registry)
        self._traffic = Traffic() if traffic is None else traffic

    def answer(self, request: Request) -> Reply:
        """Return the answer to a query by hash, and count it as a query of whole blocks."""
        try:
            query = read_json(request, HashQuery)
        except RefusedError as error:
            if error.reply.status == 422 and _has_rolling(request.body):
                return refused(501, "rolling hashes are not kept: ask with local `block_hashes`")
            raise
        if query.cache_salt is not None:
            return refused(
                400,
                "cache_salt is not accepted by /query_by_hash; block_hashes must already include "
                "the intended cache salt",
            )
        partition = Partition(query.model_name, query.routing_group)
        ranks = self._service.ranks_of(partition)
        if ranks is None:
            return dynamo.not_registered(self._service.catalog, partition)
        began = time.perf_counter_ns()
        trusts = self._follower.trusts()
        match = self._follower.index.match(
            packed_hashes(query.block_hashes), lora=query.lora_name or None
        )
        hits = self._follower.in_tokens(match.hits(ranks.rows), iter(ranks.rows))
        tokens = len(query.block_hashes) * max(hits.block_size, default=0)
        best = max(hits.tokens, default=0)
        self._traffic.query(partition, tokens, best, time.perf_counter_ns() - began)
        return Reply(200, ranks.form("dynamo").write(hits, trusts))


def _has_rolling(body: bytes) -> bool:
    """Return whether a query is RFC #1403's, by rolling hashes."""
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE:
        return False  # it is wrong in more than one place
    return isinstance(fields, Mapping) and "seq_hashes" in fields
