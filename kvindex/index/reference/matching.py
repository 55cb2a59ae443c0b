"""From a prompt's keys to a rank's blocks of it, and to its match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from kvindex.index.match import RankMatch
from kvindex.index.reference.blocks import Place
from kvindex.index.reference.engine_hit import (
    Cache,
    GroupCoverage,
    tiered_hit,
)
from kvindex.index.reference.groups import Group, RankGroups
from kvindex.index.reference.keys import PromptKeys
from kvindex.index.reference.rank_blocks import RankBlocks
from kvindex.index.tokens import Namespace
from kvindex.index.views import Spans, extend_spans, main_group, union
from kvindex.wire.quirks import medium_tier
from kvindex.wire.rank import Rank

HeldSpans: TypeAlias = "dict[Namespace, dict[Place, Spans]]"
"""For each namespace, the stretches of the prompt that each place holds."""


def held_blocks(rank: RankBlocks, keys: PromptKeys, *, whole: bool) -> dict[Place, Spans]:
    """Return which of a prompt's blocks a rank holds on each medium in each group.

    Unless `whole`, it may be as far only as a match can reach.
    """
    labelled: dict[Place, Spans] = {}
    to_hole = not whole and rank.ends_at_holes
    for depth in range(keys.length):
        block = rank.blocks.find(keys[depth])
        if block is None or (to_hole and not block.places):
            break
        for place in block.places:
            extend_spans(labelled.setdefault(place, []), depth, depth + 1)
    held: dict[Place, Spans] = {}
    for (medium, group_idx, chunk), spans in labelled.items():
        counted = spans
        if medium_tier(medium):
            counted = rank.groups.whole_chunks(spans, group_idx, chunk)
        held.setdefault(Place(medium, group_idx), []).extend(counted)
    return {place: union(spans) for place, spans in held.items() if spans}


def no_match(rank: Rank, blocks: RankBlocks) -> RankMatch:
    """Return the match of a rank that holds nothing of a prompt."""
    size = blocks.groups.main_block_size()
    return RankMatch(rank=rank, block_size=size, lower_bound=blocks.places_missing)


def rank_match(
    rank: Rank, blocks: RankBlocks, held: HeldSpans, media: frozenset[str] | None, length: int
) -> RankMatch:
    """Return the best answer over the rank's ways of hashing (with and without lookahead).

    `held` are the blocks of a prompt of `length` tokens; `media` are the folded names of those that
    count, None for all.
    """
    answers = [no_match(rank, blocks)]
    for _, spans_of in sorted(held.items(), key=lambda entry: entry[0].lookahead):
        counted = {
            place: spans
            for place, spans in spans_of.items()
            if media is None or place.medium in media
        }
        answers.append(_match_one_way(rank, blocks, counted, length))
    return max(answers, key=lambda answer: answer.tokens)


def _match_one_way(
    rank: Rank, blocks: RankBlocks, spans_of: Mapping[Place, Spans], length: int
) -> RankMatch:
    groups = blocks.groups
    hashed = groups.hashed()
    if groups.kinds_unknown:
        hashed = _with_longest_unknown(hashed, spans_of)
    cache = Cache(groups.unit, groups.alignment, groups.offload_chunk)
    tiers = {medium_tier(place.medium) for place in spans_of}
    coverage = {tier: _coverage(groups, hashed, spans_of, tier) for tier in tiers}
    tokens, device_tokens, host_tokens = tiered_hit(cache, length, coverage)
    if not tokens:
        return no_match(rank, blocks)
    main = main_group(hashed)
    size = hashed[main].block_size
    by_medium = {}
    for place, spans in spans_of.items():
        if place.group_idx == main:
            # A block counts where it ends: so many multiples of `scale` lie in (start, stop].
            units, scale = tokens // groups.unit, size // groups.unit
            count = sum(max(0, min(stop, units) // scale - start // scale) for start, stop in spans)
            if count:
                by_medium[place.medium] = count
    return RankMatch(
        rank=rank,
        blocks=tokens // size,
        tokens=tokens,
        block_size=size,
        by_medium=by_medium,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        upper_bound=blocks.upper_bound or tokens > device_tokens,
        lower_bound=blocks.places_missing,
    )


def _with_longest_unknown(
    hashed: Mapping[int, Group], spans_of: Mapping[Place, Spans]
) -> dict[int, Group]:
    """Return the groups without those of an unknown kind, but for the one that reaches furthest."""
    # One of them has full attention, and holds every block that any of them needs.

    def reach(group_idx: int) -> int:
        spans = union(
            span for place, s in spans_of.items() if place.group_idx == group_idx for span in s
        )
        return spans[0][1] if spans and spans[0][0] == 0 else 0

    unknown = [group_idx for group_idx, group in hashed.items() if not group.known]
    longest = max(unknown, key=lambda group_idx: (reach(group_idx), -group_idx))
    return {i: group for i, group in hashed.items() if group.known or i == longest}


def _coverage(
    groups: RankGroups, hashed: Mapping[int, Group], spans_of: Mapping[Place, Spans], tier: int
) -> list[GroupCoverage]:
    """Return one tier's coverage in each group."""
    held: dict[int, Spans] = {group_idx: [] for group_idx in hashed}
    for place, spans in spans_of.items():
        if place.group_idx in held and medium_tier(place.medium) == tier:
            held[place.group_idx] += spans
    return [
        GroupCoverage(group.spec, group.block_size, union(held[i]), groups.drops_last(i))
        for i, group in hashed.items()
    ]
