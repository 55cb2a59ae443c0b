"""The whole fleet as JSON: each rank's status and blocks, and sums.

Needs the core packages only, so that `kvindex top` can show engines without any service.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from kvindex import State, __version__
from kvindex.service.catalog import Partition

_COUNTERS = (
    *("gaps", "replays_asked", "replays_filled", "replays_failed"),
    *("losses", "restarts", "decode_failures"),
)
_FIELDS = (
    *("reason", "complete", "lag", "epoch", "seq", "connected", "last_event_age"),
    *("endpoint", "replay_endpoint", "orphans", "ignored"),
)

PartitionOf: TypeAlias = Callable[[str], Partition]
"""Returns what a worker, by its name, belongs to."""


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent to a rank.

    Attributes:
        open_requests: those that were sent there and have not ended.
        queued_tokens: of them, the tokens that are not prefilled yet.
        left_out: why it gets no requests: "drained", "asleep", "unwell", "ejected"; "" if it does.
        reason: the same in words.
        seconds: for which it still is ejected; None if it is not.
        url: of its engine's HTTP server.
        role: "prefill" or "decode"; "" if it does both.
    """

    open_requests: int
    queued_tokens: int
    left_out: str = ""
    reason: str = ""
    seconds: float | None = None
    url: str = ""
    role: str = ""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank stands and what it holds; see `kvindex.RankStatus`.

    Attributes:
        model, routing_group: its partition.
        blocks: resident blocks by medium.
        block_size: tokens per block; None until the rank has stored one.
        ignored: blocks that the index left out, by reason.
        routed: what is sent there; None if this process routes nothing.
    """

    model: str
    routing_group: str
    worker: str
    dp_rank: int
    state: str
    reason: str
    complete: bool
    lag: int
    epoch: int
    seq: int | None
    connected: bool
    last_event_age: float | None
    endpoint: str
    replay_endpoint: str | None
    blocks: dict[str, int]
    block_size: int | None
    gaps: int
    replays_asked: int
    replays_filled: int
    replays_failed: int
    losses: int
    restarts: int
    decode_failures: int
    orphans: int
    ignored: dict[str, int]
    routed: Routed | None


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """A partition: the block sizes of its ranks, and how many workers and ranks it has.

    Attributes:
        tokenizer: whether an engine can be asked to turn text into its tokens.
    """

    model: str
    routing_group: str
    block_sizes: list[int]
    instances: int
    ranks: int
    tokenizer: bool


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all ranks.

    Attributes:
        states: ranks in each state that some rank is in.
        complete: ranks all of whose history was applied.
        blocks: resident blocks by medium.
        unique_blocks: those of the shared tree: a prefix that many ranks hold counts once.
        lag: batches known of but not applied yet.
    """

    workers: int
    ranks: int
    states: dict[str, int]
    complete: int
    blocks: dict[str, int]
    unique_blocks: int
    lag: int
    gaps: int
    replays_asked: int
    replays_filled: int
    replays_failed: int
    losses: int
    restarts: int
    decode_failures: int
    orphans: int
    ignored: int


class FollowedPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool whose relay a replica follows, and how far it is; `trouble` is "" if all is well."""

    server: str
    trouble: str
    lag_messages: int | None
    lag_seconds: float | None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment.

    Attributes:
        now: when, in seconds since 1970.
        version: of kvindex.
        followed: the pool that the ranks come from; None if this process subscribes to engines.
        missing: engines and sources that have not said where to subscribe, and why.
    """

    now: float
    version: str
    followed: FollowedPool | None
    partitions: list[PartitionView]
    ranks: list[RankView]
    totals: Totals
    missing: dict[str, str]


def overview(
    statistics: Mapping[str, Any],
    partition_of: PartitionOf = lambda _: Partition(""),
    *,
    has_tokenizer: Callable[[Partition], bool] = lambda _: False,
    missing: Mapping[str, str] | None = None,
    routed: Mapping[str, Routed] | None = None,
    clock: Callable[[], float] = time.time,
) -> Fleet:
    """Return how every rank stands, of a client's or a replica's statistics.

    `routed` has what is sent to each rank, by its text, "WORKER/DP_RANK".

    Complexity: O(ranks), some 10 ms for 512.
    """
    ranks = []
    for status in statistics["ranks"].values():
        # From the right: a worker's name may have a "/", too.
        worker, _, dp_rank = status["rank"].rpartition("/")
        partition, held = partition_of(worker), status["index"]
        sizes = [group["block_size"] for group in held.get("groups", {}).values()]
        view = RankView(
            model=partition.model,
            routing_group=partition.routing_group,
            worker=worker,
            dp_rank=int(dp_rank),
            state=str(status["state"]),
            blocks=held.get("media", {}),
            block_size=min(filter(None, sizes), default=None),
            routed=(routed or {}).get(status["rank"]),
            **{name: status[name] for name in (*_FIELDS, *_COUNTERS)},
        )
        ranks.append(view)
    # A rank stays where it was on the page, whichever order engines come in.
    ranks.sort(key=lambda rank: (rank.model, rank.routing_group, rank.worker, rank.dp_rank))
    replica, followed = statistics.get("replica", {}), None
    # A replica of a fan-out on this machine lacks it: there is no pool to name.
    if "lag_messages" in replica:
        fields = {name: replica[name] for name in FollowedPool.__struct_fields__}
        followed = FollowedPool(**fields)
    return Fleet(
        now=clock(),
        version=__version__,
        followed=followed,
        partitions=_partitions(ranks, has_tokenizer),
        ranks=ranks,
        totals=_totals(ranks, statistics["index"]),
        missing=dict(missing or {}),
    )


def _partitions(
    ranks: Iterable[RankView], has_tokenizer: Callable[[Partition], bool]
) -> list[PartitionView]:
    by_partition: dict[Partition, list[RankView]] = {}
    for rank in ranks:
        by_partition.setdefault(Partition(rank.model, rank.routing_group), []).append(rank)
    return [
        PartitionView(
            model=partition.model,
            routing_group=partition.routing_group,
            block_sizes=sorted({rank.block_size for rank in members if rank.block_size}),
            instances=len({rank.worker for rank in members}),
            ranks=len(members),
            tokenizer=has_tokenizer(partition),
        )
        for partition, members in sorted(by_partition.items())
    ]


def _totals(ranks: list[RankView], index: Mapping[str, Any]) -> Totals:
    states = Counter(rank.state for rank in ranks)
    blocks: Counter[str] = Counter()
    for rank in ranks:
        blocks.update(rank.blocks)
    return Totals(
        workers=len({rank.worker for rank in ranks}),
        ranks=len(ranks),
        states={state.value: states[state.value] for state in State if states[state.value]},
        complete=sum(rank.complete for rank in ranks),
        blocks=dict(blocks),
        unique_blocks=index["unique_blocks"],
        lag=sum(rank.lag for rank in ranks),
        orphans=sum(rank.orphans for rank in ranks),
        ignored=sum(sum(rank.ignored.values()) for rank in ranks),
        **{name: sum(getattr(rank, name) for rank in ranks) for name in _COUNTERS},
    )
