"""POST /query_by_hash: a body in, an answer out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvindex.service.asking import UNREADABLE, media_type
from kvindex.service.catalog import DEFAULT_GROUP, Partition
from kvindex.service.dialects import dynamo
from kvindex.service.hashing import HashFollower, packed_hashes
from kvindex.service.registry import Registry
from kvindex.service.replies import JSON, Reply, refused, text_reply
from kvindex.service.service import Ranks, Service
from kvindex.service.traffic import Traffic

__all__ = ["HashQueries", "no_hashes"]

_I64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Query(msgspec.Struct, frozen=True):
    block_hashes: list[_I64]
    model_name: str
    routing_group: str = DEFAULT_GROUP
    lora_name: str | None = None
    cache_salt: object = None


_decoder = msgspec.json.Decoder(_Query)


def no_hashes() -> Reply:
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

    def answer(self, body: bytes, content_type: bytes | None) -> Reply:
        """Return the answer to a query by hash."""
        if media_type(content_type) != JSON:
            return text_reply(415, "send the query with content-type: application/json")
        query = _read(body)
        if isinstance(query, Reply):
            return query
        if query.cache_salt is not None:
            return refused(
                400,
                "cache_salt is not accepted by /query_by_hash; block_hashes must already include "
                "the intended cache salt",
            )
        partition = Partition(query.model_name, query.routing_group)
        ranks = self._service.ranks_of(partition)
        if ranks is None:
            return dynamo.nobody(self._service.catalog, partition)
        return self._match(ranks, query)

    def _match(self, ranks: Ranks, query: _Query) -> Reply:
        """Answer for these ranks, and count it as a query of whole blocks."""
        began = time.perf_counter_ns()
        trusts = self._follower.trusts()
        match = self._follower.index.match(
            packed_hashes(query.block_hashes), lora=query.lora_name or None
        )
        found = self._follower.in_tokens(match.hits(ranks.rows), iter(ranks.rows))
        asked = len(query.block_hashes) * max(found.block_size, default=0)
        best = max(found.tokens, default=0)
        took = time.perf_counter_ns() - began
        self._traffic.query(ranks.partition, asked, best, took)
        return Reply(200, ranks.form("dynamo").write(found, trusts))


def _read(body: bytes) -> _Query | Reply:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        said = f"the query has not the right form: {error}"
        if _has_rolling(body):
            return refused(501, "rolling hashes are not kept: ask with local `block_hashes`")
        return text_reply(422, said)
    except UNREADABLE as error:
        return text_reply(400, f"the body is no JSON: {error}")


def _has_rolling(body: bytes) -> bool:
    """Return whether a query is RFC #1403's, by rolling hashes."""
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE:
        return False  # it is wrong in more than one place
    return isinstance(fields, Mapping) and "seq_hashes" in fields
