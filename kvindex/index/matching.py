"""One walk for all ranks: from a prompt's keys to what each rank holds of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from kvindex.index.groups import GroupCoverage, Spans, engine_hit, extend_spans
from kvindex.index.keys import Namespace, PromptKeys
from kvindex.index.match import RankMatch
from kvindex.index.rank_blocks import RankBlocks
from kvindex.index.rank_groups import Group, RankGroups
from kvindex.index.tree import Owner, RadixTree
from kvindex.rank import Rank

__all__ = ["Held", "held_blocks", "rank_matches"]

Held: TypeAlias = "dict[Namespace, dict[Owner, Spans]]"
"""For each namespace, the stretches of the prompt that each owner holds."""


def held_blocks(
    tree: RadixTree,
    namespace: Namespace,
    keys: PromptKeys,
    media: frozenset[str] | None,
    window_only: bool,
) -> dict[Owner, Spans]:
    """Return which of the prompt's blocks each owner holds, as far as any rank's match can go.

    Args:
        tree: the tree to walk.
        namespace: where to walk.
        keys: the prompt's keys there.
        media: folded names of the media that count, or None for all.
        window_only: whether some rank has no group of full attention here: its match may start
            after a hole.
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
        if not alive and not window_only:
            break
    return held


def rank_matches(held: Held, ranks: Mapping[Rank, RankBlocks]) -> Iterator[RankMatch]:
    """Yield the match of each of these ranks that holds anything of the prompt."""
    by_rank: dict[Rank, Held] = {}
    for namespace, spans_of in held.items():
        for owner, spans in spans_of.items():
            by_rank.setdefault(owner.rank, {}).setdefault(namespace, {})[owner] = spans
    for rank, rank_held in by_rank.items():
        blocks = ranks.get(rank)
        if blocks is not None:
            yield _rank_match(rank, blocks.groups, rank_held)


def _rank_match(rank: Rank, groups: RankGroups, held: Held) -> RankMatch:
    """Return the best answer over the rank's ways of hashing (with and without lookahead)."""
    lookaheads = sorted({namespace.lookahead for namespace in held})
    answers = (_match_one_way(rank, groups, held, lookahead) for lookahead in lookaheads)
    return max(answers, key=lambda answer: answer.tokens)


def _match_one_way(rank: Rank, groups: RankGroups, held: Held, lookahead: int) -> RankMatch:
    known = groups.known()
    coverage = {
        group_idx: GroupCoverage(
            group.spec,
            group.block_size or 1,  # nothing stored yet: no spans either
            _union(spans for _, spans in _group_spans(held, lookahead, group_idx, group)),
        )
        for group_idx, group in known.items()
        if group.spec.takes_part
    }
    tokens = engine_hit(list(coverage.values()))
    size, main = groups.main_block_size(), groups.main()
    if not tokens or main is None:
        return RankMatch(rank=rank, block_size=size)
    by_medium = {}
    for medium, spans in _group_spans(held, lookahead, main, known[main]):
        count = sum(max(0, min(stop, tokens // size) - start) for start, stop in spans)
        if count:
            by_medium[medium] = count
    return RankMatch(
        rank=rank, blocks=tokens // size, tokens=tokens, block_size=size, by_medium=by_medium
    )


def _group_spans(
    held: Held, lookahead: int, group_idx: int, group: Group
) -> Iterator[tuple[str, Spans]]:
    """Yield what each medium holds for one group, in the group's own block size."""
    for namespace, spans_of in held.items():
        if namespace.lookahead == lookahead and namespace.block_size == group.block_size:
            for owner, spans in spans_of.items():
                if owner.group_idx == group_idx:
                    yield owner.medium, spans


def _union(parts: Iterable[Spans]) -> Spans:
    union: Spans = []
    for start, stop in sorted(span for spans in parts for span in spans):
        extend_spans(union, start, stop)
    return union
