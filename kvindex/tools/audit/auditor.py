"""The auditor: it receives what happens in a fleet, and reports what routing and caches cost."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import sub

import msgspec

from kvindex import (
    CacheSettings,
    ConfigurationError,
    EventBatch,
    Rank,
    RankAdded,
    RankBatch,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    State,
    StreamItem,
    __version__,
)
from kvindex.tools.audit.blocks import FleetCache, HeldBlocks, Histogram, Prefix, PrefixTree, Series
from kvindex.tools.audit.rank_audit import RankAudit, Window
from kvindex.tools.audit.report import (
    AuditReport,
    Bar,
    Bucket,
    Capacity,
    Duplication,
    RankReport,
    Saving,
    SharedPrefix,
    Tokens,
)

# The ranks whose tokens a router should count by docs/guarantees.md.
_COUNTED = frozenset({State.LIVE, State.REPAIRING, State.STALE})


class Auditor:
    """Counts the tokens that ranks compute by who held them at that moment.

    Feed it what an `EventStream` yields, in that order, and `begin` when the figures are to count;
    items before that show what the ranks hold. Without any `RankStatus`, each rank counts as
    live from its first batch on.

    Args:
        models: what each worker serves, by its name. Prompts of different models share nothing;
            workers that are not named share one model.
        max_blocks_per_rank: the most labels held of a rank. Blocks beyond them are counted as
            computed, but nobody holds them.
        max_evicted: the most evicted blocks remembered of a rank; the oldest are forgotten first.
        source: what is audited, in words for the report.

    Raises:
        ConfigurationError: a bound is below 1.

    Complexity: O(blocks of a batch); a block evicted from the middle of what a rank holds costs as
    much as the rank holds behind it.

    Thread safety: none; one owner at a time.

    Examples:
        >>> from kvindex import Rank, RankBatch
        >>> from kvindex.testing import FakeEngine
        >>> engines = [FakeEngine(f"vllm-{n}", block_size=4, publish=False) for n in range(2)]
        >>> auditor = Auditor()
        >>> auditor.begin(0.0)
        >>> for second, engine in enumerate(engines):
        ...     _ = engine.serve(range(9), flush=False)
        ...     batch = engine.flush()
        ...     auditor.receive(RankBatch(engine.rank, 0, 0, batch, False), float(second))
        >>> tokens = auditor.report(2.0).tokens
        >>> tokens.computed, tokens.elsewhere
        (16, 8)
    """

    def __init__(
        self,
        *,
        models: Mapping[str, str] | None = None,
        max_blocks_per_rank: int = 1 << 20,
        max_evicted: int = 1 << 17,
        source: str = "",
    ) -> None:
        if max_blocks_per_rank < 1 or max_evicted < 1:
            raise ConfigurationError(
                f"max_blocks_per_rank={max_blocks_per_rank} and max_evicted={max_evicted} must be "
                "at least 1"
            )
        self._models = dict(models or {})
        self._bounds = (max_blocks_per_rank, max_evicted)
        self._source = source
        self._tree = PrefixTree()
        self._caches: dict[str, FleetCache] = {}  # by model
        self._audits: dict[Rank, RankAudit] = {}
        self._former: list[RankAudit] = []  # of ranks that are no longer subscribed to
        self._free: list[int] = []  # numbers of those
        self._counted = 0  # the ranks whose contents count, as a set of bits
        self._workers: dict[str, int] = {}  # the ranks of each worker, likewise
        self._began: float | None = None
        self._series = Series(4)

    @property
    def began(self) -> float | None:
        """When the window was opened, or None."""
        return self._began

    @property
    def computed(self) -> int:
        """Tokens computed in the window so far."""
        return sum(audit.tokens["computed"] for audit in self._all())

    @property
    def elsewhere(self) -> int:
        """Of those, what another rank held."""
        return sum(audit.tokens["elsewhere"] for audit in self._all())

    def begin(self, at: float) -> None:
        """Open the window: items received from now on count.

        A replayed batch counts only if its publisher made it after this moment: what a late rank
        replays of its past is no cost of the window.
        """
        self._began = at
        # Who is away as the window opens is away in it from the first moment on.
        for audit in self._audits.values():
            audit.away_since = None if audit.blocks.bit & self._counted else at

    def receive(self, item: StreamItem | RankStatus, at: float) -> None:
        """Receive an item of a stream, or the present status of a rank's stream.

        Args:
            item: a batch, or what happened between batches.
            at: when it arrived, in seconds since 1970; not before the last one.
        """
        if isinstance(item, RankBatch):
            self._apply(item.rank, item.batch, at, replayed=item.replayed)
        elif isinstance(item, RankStatus):
            self._stand(item, at)
        elif isinstance(item, RankAdded):
            self.configure(item.rank, item.cache)
        elif isinstance(item, RankLost):
            audit = self._find(item.rank)
            if self._began is not None:
                audit.counts["losses"] += 1
                if item.last_seq is not None:
                    audit.counts["lost_batches"] += item.last_seq - item.first_seq + 1
            # Else the rank may hold what lost removals took away: the user chose to keep it.
            if item.reset:
                audit.drop(forget=False)
        elif isinstance(item, RankRestarted):
            audit = self._find(item.rank)
            audit.counts["restarts"] += self._began is not None
            audit.drop(forget=True)
        elif isinstance(item, RanksRenamed):
            self._rename(item)
        elif isinstance(item, RankRemoved):
            self._remove(item.rank, at)

    def configure(self, rank: Rank, settings: CacheSettings) -> None:
        """Apply the user's settings for what a rank's events do not state."""
        self._find(rank).groups.settings = settings

    def complete(self, rank: Rank, complete: bool) -> None:
        """Note, from the caller, whether all batches of a rank's publisher were received."""
        self._find(rank).complete = complete

    def report(self, at: float) -> AuditReport:
        """Return what was found between `begin` and now.

        Raises:
            ConfigurationError: `begin` was never called.

        Complexity: O(all blocks that the ranks hold).
        """
        if self._began is None:
            raise ConfigurationError("there is no window yet: call begin(at) first")
        # A report ends nothing: who is away now is away in the next one, too.
        for audit in self._audits.values():
            audit.stop_away(at, resume=True)
        return report_of(
            sorted(self._all(), key=lambda audit: audit.rank),
            self._tree,
            self._caches.values(),
            self._counted,
            self._series,
            began=self._began,
            ended=at,
            source=self._source,
        )

    def _all(self) -> list[RankAudit]:
        return [*self._audits.values(), *self._former]

    def _apply(self, rank: Rank, batch: EventBatch, at: float, *, replayed: bool) -> None:
        audit = self._find(rank)
        audit.received = (audit.received[0] if audit.received else at, at)
        began = self._began
        counted = began is not None and (not replayed or batch.ts >= began)
        peers = self._counted & ~audit.blocks.bit
        # The batch's own share of the sums goes into the figures over time.
        before = [audit.tokens[name] for name in Bucket.__struct_fields__]
        audit.apply(batch, Window(counted, peers, peers & self._workers[rank.worker]))
        after = [audit.tokens[name] for name in Bucket.__struct_fields__]
        if began is not None and after != before:
            self._series.add(at - began, tuple(map(sub, after, before)))

    def _stand(self, status: RankStatus, at: float) -> None:
        audit = self._find(status.rank)
        audit.state, audit.complete = str(status.state), status.complete
        bit = audit.blocks.bit
        if status.state in _COUNTED:
            self._counted |= bit
            audit.stop_away(at)
        else:
            self._counted &= ~bit
            if self._began is not None and audit.away_since is None:
                audit.away_since = at

    def _find(self, rank: Rank) -> RankAudit:
        audit = self._audits.get(rank)
        if audit is None:
            # Numbers are used again: a set of bits is as long as the fleet was large at once.
            number = self._free.pop() if self._free else len(self._audits)
            model = self._models.get(rank.worker, "")
            fleet = self._caches.setdefault(model, FleetCache())
            blocks = HeldBlocks(1 << number, self._tree, fleet, *self._bounds)
            audit = self._audits[rank] = RankAudit(rank, number, model, blocks, self._tree)
            # Until a status says otherwise: of a recording none does.
            self._counted |= blocks.bit
            self._workers[rank.worker] = self._workers.get(rank.worker, 0) | blocks.bit
        return audit

    def _rename(self, item: RanksRenamed) -> None:
        # Names may be exchanged: all old ones go before any new one comes.
        renamed = [(self._find(old), new) for old, new in item.names]
        for old, _ in item.names:
            del self._audits[old]
        for audit, new in renamed:
            self._workers[audit.rank.worker] &= ~audit.blocks.bit
            audit.rank = new
            self._audits[new] = audit
            self._workers[new.worker] = self._workers.get(new.worker, 0) | audit.blocks.bit

    def _remove(self, rank: Rank, at: float) -> None:
        audit = self._audits.pop(rank, None)
        if audit is None:
            return
        bit = audit.blocks.bit
        audit.drop(forget=True)
        audit.state = "removed"
        audit.stop_away(at)
        self._counted &= ~bit
        self._workers[rank.worker] &= ~bit
        # Its figures stay in the report; its number may be another rank's from now on.
        audit.blocks.leave()
        self._free.append(audit.number)
        self._former.append(audit)


# The report ---------------------------------------------------------------------------------------


FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Sizes of caches whose savings are reported, in times of the cache as it was seen."""

_SHARED = 10  # prefixes
_CANDIDATES = 200  # for them
_MOST_HOLDERS = 64  # of ranks that hold one


def report_of(
    audits: Sequence[RankAudit],
    tree: PrefixTree,
    caches: Collection[FleetCache],
    counted: int,
    series: Series,
    *,
    began: float,
    ended: float,
    source: str,
) -> AuditReport:
    """Return the report of all ranks; those in `counted` (a set of bits) hold what is shared."""
    ranks = [_rank_report(audit, counted) for audit in audits]
    ages, lifetimes = Histogram(), Histogram()
    for audit in audits:
        ages.merge(audit.ages)
        lifetimes.merge(audit.blocks.lifetimes)
    totals: Counter[str] = Counter()
    for rank in ranks:
        totals.update(msgspec.structs.asdict(rank.tokens))
    report = AuditReport(
        format=1,
        version=__version__,
        source=source,
        began=began,
        seconds=max(0.0, ended - began),
        tokens=Tokens(**totals),
        ranks=ranks,
        # A distance is by how many blocks the cache was too small: a cache of twice the size has
        # one peak more.
        savings=[
            Saving(factor, sum(a.distances.up_to((factor - 1) * a.peak) for a in audits))
            for factor in FACTORS
        ],
        capacity=_capacity(caches),
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


def _capacity(caches: Collection[FleetCache]) -> Capacity:
    return Capacity(
        size=sum(cache.size * cache.block_size for cache in caches),
        savings=[
            Saving(factor, sum(cache.needs.up_to(factor) for cache in caches))
            for factor in (1.0, *FACTORS)
        ],
        forgotten=sum(cache.evicted.forgotten for cache in caches),
    )


def _duplication(tree: PrefixTree, counted: int, audits: Sequence[RankAudit]) -> Duplication:
    by_ranks: Counter[int] = Counter()
    for prefix in tree:
        by_ranks[(prefix.held & counted).bit_count()] += prefix.size
    # What no counted rank holds, if there is any: a Counter need not have the key.
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
    # More than are shown: ends of one long prompt are alike, and show it once.
    largest = heapq.nlargest(_CANDIDATES, ends, key=lambda p: (p.end * holders(p), p.end))
    names = {audit.blocks.bit: str(audit.rank) for audit in audits}
    return [
        SharedPrefix(
            tokens=prefix.end,
            ranks=holders(prefix),
            names=[n for bit, n in names.items() if bit & prefix.whole & counted][:_MOST_HOLDERS],
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


# What the figures do not cover --------------------------------------------------------------------


_NAMED_RANKS = 4  # of ranks in one line
_MANY = 0.15  # of the computed tokens; a prompt's last block alone is less, mostly

# What a rank has of something, and what that means for the figures.
_OF_RANKS: tuple[tuple[Callable[[RankAudit], float], str], ...] = (
    (
        lambda rank: rank.counts["losses"],
        "{ranks} lost batches that no replay returned. What was held until then is unknown "
        "({times}).",
    ),
    (
        lambda rank: rank.counts["restarts"],
        "{ranks} restarted: its cache was empty then ({times}).",
    ),
    (lambda rank: rank.counts["clears"], "{ranks} cleared its cache ({times})."),
    (
        lambda rank: rank.complete is False,
        "{ranks}: the audit has not seen all batches since the engine's first. What was stored in "
        "the others counts as held by nobody.",
    ),
    (
        lambda rank: rank.away,
        "{ranks}: unreachable for up to {most:,.0f} s. Meanwhile nothing counts as held there.",
    ),
    (
        lambda rank: rank.places_unknown,
        "{ranks}: the engine's labels leave out what is before a block (SGLang before 0.5.6): all "
        "its tokens are of unknown prompts.",
    ),
    (
        lambda rank: rank.groups.others_limit_hits,
        "{ranks}: the model has several KV cache groups. The figures follow the one that needs all "
        "blocks; windows or states may have shortened the hits.",
    ),
    (
        lambda rank: rank.groups.kinds_unknown,
        "{ranks}: the kinds of the groups are unknown; use --group.",
    ),
)
_LEFT_OUT = {
    "malformed": "blocks whose stores contradict themselves",
    "partial_block": "blocks that were not full yet",
    "max_blocks_per_rank": "blocks beyond max_blocks_per_rank: computed, but held by nobody",
    "too_many_media": "copies on more media than one block can have",
    "label_ambiguous": "blocks whose label names another block, too",
    "main_group_changed": "times, what was held was dropped: another group of the model counts now",
    "skipped_events": "events of an unknown kind",
}


def trust_lines(report: AuditReport, audits: Sequence[RankAudit]) -> Iterator[str]:
    """Yield what limits the figures of a report, the most important first."""
    # Of recordings alone: a live rank has a state, and that says when it was away.
    spans = [audit.received for audit in audits if audit.received is not None and not audit.state]
    if spans and max(first for first, _ in spans) > min(last for _, last in spans):
        yield "Some recordings end before others begin: what ended counts as still held."
    for measure, text in _OF_RANKS:
        by_rank = {str(rank.rank): value for rank in audits if (value := measure(rank))}
        if by_rank:
            total = sum(by_rank.values())
            times = "once" if total == 1 else f"{total:.0f} times"
            names = ", ".join(list(by_rank)[:_NAMED_RANKS])
            if len(by_rank) > _NAMED_RANKS:
                names += f" and {len(by_rank) - _NAMED_RANKS} more"
            yield text.format(ranks=names, times=times, most=max(by_rank.values()))
    tokens = report.tokens
    if tokens.unknown:
        yield (
            f"{tokens.unknown:,} of {tokens.computed:,} computed tokens "
            f"({tokens.unknown / tokens.computed:.1%}) follow a block that the audit never saw: "
            "their holders are unknown."
        )
    if tokens.here > _MANY * tokens.computed:
        yield (
            f"{tokens.here / tokens.computed:.1%} of the computed tokens were stored although the "
            'rank held them. If requests set kv_cache_report_mode to "full", they were announced '
            "and not computed: use --report-mode full."
        )
    if forgotten := sum(rank.evicted_forgotten for rank in report.ranks):
        kept = sum(rank.evicted_known for rank in report.ranks)
        yield (
            f"{forgotten:,} evicted blocks were forgotten for newer ones ({kept:,} are remembered)"
            ": more tokens may have been evicted before."
        )
    if report.capacity.forgotten:
        yield (
            f"{report.capacity.forgotten:,} blocks that no rank held any more were forgotten for "
            "newer ones: one cache, if larger, or infinite, may have saved more."
        )
    for name, what in _LEFT_OUT.items():
        if count := sum(rank.counts[name] for rank in audits):
            yield f"Left out: {count:,} {what}."
    yield (
        "Events do not distinguish prompts from generated tokens: both are computed. A request's "
        "last tokens that fill no block are never reported."
    )
