"""The auditor: it receives what happens in a fleet, and reports what routing and caches cost."""

from __future__ import annotations

from collections.abc import Mapping
from operator import sub

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
)
from kvindex.tools.audit.blocks import HeldBlocks
from kvindex.tools.audit.findings import report_of
from kvindex.tools.audit.histogram import Series
from kvindex.tools.audit.prefixes import PrefixTree
from kvindex.tools.audit.rank_audit import RankAudit, Window
from kvindex.tools.audit.report import Bucket, Report

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
            self._lose(item)
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

    def report(self, at: float) -> Report:
        """Return what was found between `begin` and now.

        Raises:
            ConfigurationError: `begin` was never called.

        Complexity: O(all blocks that the ranks hold).
        """
        if self._began is None:
            raise ConfigurationError("there is no window yet: call begin(at) first")
        for audit in self._audits.values():
            audit.stop_away(at, resume=True)
        return report_of(
            sorted(self._all(), key=lambda audit: audit.rank),
            self._tree,
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

    def _lose(self, item: RankLost) -> None:
        audit = self._find(item.rank)
        if self._began is not None:
            audit.counts["losses"] += 1
            if item.last_seq is not None:
                audit.counts["lost_batches"] += item.last_seq - item.first_seq + 1
        if item.reset:
            audit.drop(forget=False)

    def _find(self, rank: Rank) -> RankAudit:
        audit = self._audits.get(rank)
        if audit is None:
            used = len(self._audits)
            number = self._free.pop() if self._free else used
            model = self._models.get(rank.worker, "")
            blocks = HeldBlocks(1 << number, self._tree, *self._bounds)
            audit = self._audits[rank] = RankAudit(rank, number, model, blocks, self._tree)
            self._counted |= blocks.bit
            self._workers[rank.worker] = self._workers.get(rank.worker, 0) | blocks.bit
        return audit

    def _rename(self, item: RanksRenamed) -> None:
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
        audit.blocks.bit = 0  # another rank may get it
        self._free.append(audit.number)
        self._former.append(audit)
