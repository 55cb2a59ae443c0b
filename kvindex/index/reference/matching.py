"""One walk for all ranks: from a prompt's keys to each rank's blocks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from kvindex.index.keys import Namespace
from kvindex.index.match import RankMatch
from kvindex.index.reference.engine_hit import Cache, GroupCoverage, tiered_hit
from kvindex.index.reference.groups import Group, RankGroups
from kvindex.index.reference.keys import PromptKeys
from kvindex.index.reference.rank_blocks import RankBlocks
from kvindex.index.reference.tree import Owner, RadixTree
from kvindex.index.spans import Spans, extend_spans, main_group, union
from kvindex.wire.quirks import medium_tier
from kvindex.wire.rank import Rank

__all__ = ["Held", "held_blocks", "no_match", "rank_matches"]

Held: TypeAlias = "dict[Namespace, dict[Owner, Spans]]"
"""For each namespace, the stretches of the prompt that each owner holds."""


def held_blocks(
    tree: RadixTree,
    namespace: Namespace,
    keys: PromptKeys,
    media: frozenset[str] | None,
    may_skip_holes: bool,
) -> dict[Owner, Spans]:
    """Return which of the prompt's blocks each owner holds, as far as any rank's match can go.

    Args:
        tree: the tree to walk.
        namespace: where to walk.
        keys: the prompt's keys there.
        media: folded names of the media that count, or None for all.
        may_skip_holes: whether some rank's match may go on after blocks that it does not hold.
    """
    held: dict[Owner, Spans] = {}
    alive: set[Rank] | None = None
    for segment in tree.walk(namespace, keys):
        holders = set()
        for owner in segment.owners:
            if media is None or owner.medium in media:
                holders.add(owner.rank)
                extend_spans(held.setdefault(owner, []), segment.start, segment.stop)
        alive = holders if alive is None else alive & holders
        if not alive and not may_skip_holes:
            break
    return held


def rank_matches(held: Held, ranks: Mapping[Rank, RankBlocks], length: int) -> Iterator[RankMatch]:
    """Yield the match of each of these ranks that holds part of a prompt of so many tokens."""
    by_rank: dict[Rank, Held] = {}
    for namespace, spans_of in held.items():
        for owner, spans in spans_of.items():
            by_rank.setdefault(owner.rank, {}).setdefault(namespace, {})[owner] = spans
    for rank, rank_held in by_rank.items():
        blocks = ranks.get(rank)
        if blocks is not None:
            yield _rank_match(rank, blocks, rank_held, length)


def no_match(rank: Rank, blocks: RankBlocks) -> RankMatch:
    """Return the match of a rank that holds nothing of a prompt."""
    size = blocks.groups.main_block_size()
    return RankMatch(rank=rank, block_size=size, lower_bound=blocks.places_missing)


def _rank_match(rank: Rank, blocks: RankBlocks, held: Held, length: int) -> RankMatch:
    """Return the best answer over the rank's ways of hashing (with and without lookahead)."""
    ways = [
        spans_of
        for namespace, spans_of in sorted(held.items(), key=lambda entry: entry[0].lookahead)
        if namespace.block_size == blocks.groups.unit
    ]
    answers = (_match_one_way(rank, blocks, spans_of, length) for spans_of in ways)
    return max(answers, key=lambda answer: answer.tokens, default=no_match(rank, blocks))


def _match_one_way(
    rank: Rank, blocks: RankBlocks, spans_of: Mapping[Owner, Spans], length: int
) -> RankMatch:
    groups = blocks.groups
    hashed = groups.hashed()
    if groups.kinds_unknown:
        hashed = _with_longest_unknown(groups, hashed, spans_of)
    cache = Cache(groups.unit, groups.alignment)
    tiers = {medium_tier(owner.medium) for owner in spans_of}
    coverage = {tier: _coverage(groups, hashed, spans_of, tier) for tier in tiers}
    tokens, device_tokens, host_tokens = tiered_hit(cache, length, coverage)
    if not tokens:
        return no_match(rank, blocks)
    main = main_group(hashed)
    size = hashed[main].block_size
    by_medium = {}
    for owner, spans in spans_of.items():
        if owner.group_idx == main:
            units, scale = tokens // groups.unit, size // groups.unit
            count = sum(_blocks(start, min(stop, units), scale) for start, stop in spans)
            if count:
                by_medium[owner.medium] = count
    return RankMatch(
        rank=rank,
        blocks=tokens // size,
        tokens=tokens,
        block_size=size,
        by_medium=by_medium,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        upper_bound=groups.upper_bound or tokens > device_tokens,
        lower_bound=blocks.places_missing,
    )


def _with_longest_unknown(
    groups: RankGroups, hashed: Mapping[int, Group], spans_of: Mapping[Owner, Spans]
) -> dict[int, Group]:
    """Return the groups without those of an unknown kind, but for the one that reaches furthest.

    One of them has full attention, and holds every block that any of them needs.
    """

    def reach(group_idx: int) -> int:
        spans = union(
            span for owner, s in spans_of.items() if owner.group_idx == group_idx for span in s
        )
        return spans[0][1] if spans and spans[0][0] == 0 else 0

    unknown = [group_idx for group_idx, group in hashed.items() if not group.known]
    longest = max(unknown, key=lambda group_idx: (reach(group_idx), -group_idx))
    return {i: group for i, group in hashed.items() if group.known or i == longest}


def _coverage(
    groups: RankGroups, hashed: Mapping[int, Group], spans_of: Mapping[Owner, Spans], tier: int
) -> list[GroupCoverage]:
    """Return one tier's coverage in each group."""
    held: dict[int, Spans] = {group_idx: [] for group_idx in hashed}
    for owner, spans in spans_of.items():
        if owner.group_idx in held and medium_tier(owner.medium) == tier:
            held[owner.group_idx] += spans
    return [
        GroupCoverage(group.spec, group.block_size, union(held[i]), groups.drops_last(i))
        for i, group in hashed.items()
    ]


def _blocks(start: int, stop: int, scale: int) -> int:
    """Return how many blocks of `scale` units end in [start, stop)."""
    return max(0, stop // scale - start // scale)
