"""From what an auditor counted to its report."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvindex import __version__
from kvindex.tools.audit.histogram import Histogram, Series
from kvindex.tools.audit.prefixes import Prefix, PrefixTree
from kvindex.tools.audit.rank_audit import RankAudit
from kvindex.tools.audit.report import (
    Bar,
    Bucket,
    Duplication,
    RankReport,
    Report,
    Saving,
    SharedPrefix,
    Tokens,
)
from kvindex.tools.audit.trust import trust_lines

FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Sizes of caches whose savings are reported, in times of the cache as it was seen."""

_SHARED = 10  # prefixes
_CANDIDATES = 200  # for them
_NAMES = 64  # of ranks that hold one


def report_of(
    audits: Sequence[RankAudit],
    tree: PrefixTree,
    counted: int,
    series: Series,
    *,
    began: float,
    ended: float,
    source: str,
) -> Report:
    """Return the report of all ranks; those in `counted` (a set of bits) hold what is shared."""
    ranks = [_rank_report(audit, counted) for audit in audits]
    ages, lifetimes = Histogram(), Histogram()
    for audit in audits:
        ages.merge(audit.ages)
        lifetimes.merge(audit.blocks.lifetimes)
    report = Report(
        format=1,
        version=__version__,
        source=source,
        began=began,
        seconds=max(0.0, ended - began),
        tokens=_sum(rank.tokens for rank in ranks),
        ranks=ranks,
        savings=[
            Saving(factor, sum(a.distances.up_to((factor - 1) * a.peak) for a in audits))
            for factor in FACTORS
        ],
        ages=[Bar(*bar) for bar in ages.bars()],
        lifetimes=[Bar(*bar) for bar in lifetimes.bars()],
        duplication=_duplication(tree, counted, audits),
        shared=_shared(tree, counted, audits),
        bucket_seconds=series.width,
        series=[Bucket(*row) for row in series.rows()],
        trust=[],
    )
    return msgspec.structs.replace(report, trust=list(trust_lines(report, audits)))


def _rank_report(audit: RankAudit, counted: int) -> RankReport:
    size = audit.groups.size
    return RankReport(
        rank=str(audit.rank),
        model=audit.model,
        tokens=Tokens(**audit.tokens),
        block_size=size,
        resident=len(audit.blocks.labels) * size,
        unplaced=_unplaced(audit),
        peak=audit.peak * size,
        evicted_known=len(audit.blocks.evicted),
        evicted_forgotten=audit.blocks.evicted.forgotten,
        state=audit.state,
        complete=audit.complete,
        counted=bool(audit.blocks.bit & counted),
        away=round(audit.away, 3),
        counts={name: count for name, count in sorted(audit.counts.items()) if count},
    )


def _sum(parts: Iterable[Tokens]) -> Tokens:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(msgspec.structs.asdict(part))
    return Tokens(**total)


def _duplication(tree: PrefixTree, counted: int, audits: Sequence[RankAudit]) -> Duplication:
    by_ranks: Counter[int] = Counter()
    for prefix in tree:
        by_ranks[(prefix.held & counted).bit_count()] += prefix.size
    del by_ranks[0]
    return Duplication(
        resident=sum(ranks * tokens for ranks, tokens in by_ranks.items()),
        unique=by_ranks.total(),
        by_ranks=[by_ranks[ranks] for ranks in range(1, max(by_ranks, default=0) + 1)],
        unplaced=sum(_unplaced(audit) for audit in audits if audit.blocks.bit & counted),
    )


def _unplaced(audit: RankAudit) -> int:
    """The tokens of blocks of which events leave out what is before them."""
    blocks = audit.blocks.labels.values()
    return sum(block.prefix is None for block in blocks) * audit.groups.size


def _shared(tree: PrefixTree, counted: int, audits: Sequence[RankAudit]) -> list[SharedPrefix]:
    """The prefixes after which fewer ranks hold on, by tokens × ranks."""

    def holders(prefix: Prefix) -> int:
        return (prefix.whole & counted).bit_count()

    ends = (
        prefix
        for prefix in tree
        if (ranks := holders(prefix)) > 1
        and all(holders(child) < ranks for child in prefix.children())
    )
    largest = heapq.nlargest(_CANDIDATES, ends, key=lambda p: (p.end * holders(p), p.end))
    names = {audit.blocks.bit: str(audit.rank) for audit in audits}
    return [
        SharedPrefix(
            tokens=prefix.end,
            ranks=holders(prefix),
            names=[n for bit, n in names.items() if bit & prefix.whole & counted][:_NAMES],
            first_tokens=list(tree.beginning(prefix)),
        )
        for prefix in _different(largest)
    ]


def _different(prefixes: Sequence[Prefix]) -> list[Prefix]:
    """Return the first few of which none has half of its tokens in common with one before it."""
    chosen: list[Prefix] = []
    seen: set[Prefix] = set()
    for prefix in prefixes:
        path: list[Prefix] = []
        above: Prefix | None = prefix
        while above is not None and above not in seen:
            path.append(above)
            above = above.parent
        if above is None or above.end * 2 <= prefix.end:
            chosen.append(prefix)
            seen.update(path)
        if len(chosen) == _SHARED:
            break
    return chosen
