"""One rank's events: which tokens it computed, and who held them at that moment.

A store on the device is computation, with these exceptions: a block that the rank holds on
another medium (it is loaded, mostly), one that is announced again in report mode "full", and one
that SGLang before 0.5.6 stores anew in the batch that removed it (its nodes were split). A store on
another medium is a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvindex import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Rank,
)
from kvindex.tools.audit.blocks import HeldBlocks
from kvindex.tools.audit.histogram import Histogram
from kvindex.tools.audit.prefixes import Prefix, PrefixTree
from kvindex.tools.audit.stores import (
    MainGroup,
    block_contents,
    is_sparse,
    is_whole,
    runs_of,
    tier_of,
)
from kvindex.wire.quirks import fold_hash, is_content_hash, is_root_parent


class Window(NamedTuple):
    """What is counted now, and beside whom.

    Attributes:
        counted: whether this batch counts.
        peers: the other ranks whose contents count, as a set of bits.
        siblings: those of them that belong to the same worker.
    """

    counted: bool
    peers: int
    siblings: int


class RankAudit:
    """Processes one rank's batches in order, and notes how its stream stood.

    Attributes:
        groups: which group of its model counts.
        tokens: what the window has, in tokens, by the names of `Tokens`.
        counts: blocks left out by reason, and what happened to the stream.
        ages: tokens computed again, by the seconds since they were evicted.
        distances: the same, by the blocks by which the cache was too small.
        peak: the most blocks in use on the device after a batch, copies included.
        state, complete: of its stream, as last reported; "" and None before that.
        away: seconds of the window in which its contents did not count, until `away_since`.
        away_since: when they last stopped to count; None while they do.
        received: when its first and its last batch arrived.
    """

    def __init__(
        self, rank: Rank, number: int, model: str, blocks: HeldBlocks, tree: PrefixTree
    ) -> None:
        self.rank = rank
        self.number = number
        self.model = model
        self.blocks = blocks
        self.groups = MainGroup()
        self.tokens: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.ages, self.distances = Histogram(), Histogram()
        self.peak = 0
        self.state = ""
        self.complete: bool | None = None
        self.away = 0.0
        self.away_since: float | None = None
        self.received: tuple[float, float] | None = None
        self._tree = tree
        self._start = tree.start(model.encode("utf-8", "surrogatepass"))
        self._content_hashes: bool | None = None
        # Of the batch at hand: what it removed, its time, and what counts.
        self._removed: set[BlockHash] = set()
        self._now = 0.0
        self._window = Window(False, 0, 0)

    def stop_away(self, at: float, *, resume: bool = False) -> None:
        """Sum up the time until now in which the contents did not count."""
        if self.away_since is not None:
            self.away += max(0.0, at - self.away_since)
            self.away_since = at if resume else None

    @property
    def places_unknown(self) -> bool:
        """Whether the engine's labels leave out the prefix of a block (SGLang up to 0.5.5)."""
        return bool(self._content_hashes)

    def drop(self, *, forget: bool) -> None:
        """Hold nothing any more; `forget` what was learned of the engine, too."""
        self.blocks.drop()
        if forget:
            self._content_hashes = None
            self.groups.forget()

    def apply(self, batch: EventBatch, window: Window) -> None:
        """Process a batch's events in order."""
        self._removed.clear()
        self._now, self._window = batch.ts, window
        self.counts["skipped_events"] += len(batch.skipped)
        if self.groups.learn(batch) and self.blocks.labels:
            self.counts["main_group_changed"] += 1
            self.drop(forget=False)
        for event in runs_of(filter(self._is_main, batch.events)):
            if isinstance(event, list):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.counts["clears"] += window.counted
                self.drop(forget=False)
        self.blocks.settle()
        self.peak = max(self.peak, self.blocks.on_device)

    def _is_main(self, event: Event) -> bool:
        if isinstance(event, AllBlocksCleared) or (event.group_idx or 0) == self.groups.main:
            return True
        self.counts["other_groups"] += len(event.block_hashes)
        return False

    def _remove(self, event: BlockRemoved) -> None:
        tier = tier_of(event.medium)
        copies_left = self.groups.settings.copies_left(event)
        counted = self._window.counted
        for label, left in zip(map(fold_hash, event.block_hashes), copies_left, strict=False):
            if not self.blocks.remove(label, tier, self._now, left, counted=counted):
                self.counts["removed_unknown"] += 1
            if self._content_hashes and tier is None:
                self._removed.add(label)

    # Storing ---------------------------------------------------------------------------------

    def _store(self, run: list[BlockStored]) -> None:
        """Process stores that follow one another in a chain, on one medium."""
        first, tier = run[0], tier_of(run[0].medium)
        if self._content_hashes is None and tier is None and is_whole(first):
            tokens = first.token_ids[: first.block_size]
            self._content_hashes = is_content_hash(first.block_hashes[0], tokens)
        fault = self._fault(first)
        if fault:
            self.counts[fault] += sum(len(event.block_hashes) for event in run)
            return
        if tier is None and self._is_announced_again(first):
            self.tokens["reannounced"] += len(first.token_ids) * self._window.counted
            run = run[1:]
        labels = [fold_hash(label) for event in run for label in event.block_hashes]
        prefixes = self._prefixes(run, labels, tier)
        if self._window.counted and labels:
            self._count(run[0], labels, prefixes, tier)
        for label, prefix in zip(labels, prefixes, strict=True):
            if reason := self.blocks.put(label, prefix, self._now, tier):
                self.counts[reason] += 1
        if prefixes and prefixes[-1] is not None:
            self._tree.prune(prefixes[-1])

    def _fault(self, event: BlockStored) -> str:
        """Return why a store cannot count, or "" if it can."""
        if not event.token_ids or self._content_hashes:
            return ""
        if event.block_size <= 0:
            return "malformed"
        if tier_of(event.medium) is None and event.block_size < self.groups.size:
            return "partial_block"
        return "" if is_whole(event) or is_sparse(event) else "malformed"

    def _is_announced_again(self, event: BlockStored) -> bool:
        """Whether vLLM's report mode "full" reports blocks that a request found in the cache."""
        if self.groups.settings.report_mode != "full" or event.parent_block_hash is not None:
            return False
        held = map(self.blocks.labels.get, map(fold_hash, event.block_hashes))
        return bool(event.token_ids) and all(block is not None and block.device for block in held)

    def _prefixes(
        self, run: list[BlockStored], labels: Sequence[BlockHash], tier: str | None
    ) -> list[Prefix | None]:
        """Return each block with its prefix, or None where events do not show it."""
        known = self.blocks.labels
        if not run or self._content_hashes or not self._states_contents(run[0], tier):
            return [block.prefix if (block := known.get(label)) else None for label in labels]
        prefix = self._before(run[0])
        prefixes: list[Prefix | None] = []
        after, size = self._tree.after, run[0].block_size
        contents = (content for event in run for content in block_contents(event))
        for label, content in zip(labels, contents, strict=True):
            if prefix is not None:
                prefix = after(prefix, content, size)
            elif (block := known.get(label)) is not None:
                prefix = block.prefix  # its label was placed before
            prefixes.append(prefix)
        if prefixes[0] is not None and prefixes[0].parent is self._start:
            self._tree.note_beginning(prefixes[0], run[0].token_ids)
        return prefixes

    def _states_contents(self, event: BlockStored, tier: str | None) -> bool:
        """Whether a store names its blocks' tokens, and all else that their identity covers.

        vLLM's connectors leave out the extra keys of what they offload, and may join blocks.
        """
        if not is_whole(event):
            return False
        if tier is None:
            return True
        complete = event.extra_keys is not None or event.group_idx is None
        return complete and event.block_size == self.groups.size

    def _before(self, event: BlockStored) -> Prefix | None:
        parent = event.parent_block_hash
        if parent is None:
            return self._start
        block = self.blocks.labels.get(fold_hash(parent))
        if block is not None:
            return block.prefix
        return self._start if is_root_parent(parent) else None

    # Counting --------------------------------------------------------------------------------

    def _count(
        self,
        first: BlockStored,
        labels: Sequence[BlockHash],
        prefixes: Sequence[Prefix | None],
        tier: str | None,
    ) -> None:
        """Count a run before it is held: who holds what now is what matters."""
        size = first.block_size if first.token_ids else self.groups.size
        blocks: Counter[str] = Counter()
        if tier is not None:
            blocks["offloaded"] = len(labels)
        elif not first.token_ids:
            blocks["returned"] = len(labels)
        else:
            for label, prefix in zip(labels, prefixes, strict=True):
                self._classify(label, prefix, blocks, size)
            if len(labels) == 1:
                blocks["alone"] = blocks["computed"]
        for name, count in blocks.items():
            self.tokens[name] += count * size

    def _classify(
        self, label: BlockHash, prefix: Prefix | None, blocks: Counter[str], size: int
    ) -> None:
        """Count one stored block: whether it was computed, and who held it."""
        bit = self.blocks.bit
        if prefix is None:
            moved = label in self._removed
            blocks["moved" if moved else "computed"] += 1
            blocks["unknown"] += not moved
            return
        if prefix.whole & bit:
            held = self.blocks.labels.get(label)
            if held is not None and not held.device:
                blocks["returned"] += 1
            else:
                blocks["computed"] += 1
                blocks["here"] += 1
            return
        blocks["computed"] += 1
        others = prefix.whole & self._window.peers
        if others:
            near = others & self._window.siblings
            blocks["elsewhere"] += 1
            blocks["same_worker" if near else "other_worker"] += 1
        returned = self.blocks.find_evicted(prefix)
        if returned is not None:
            blocks["evicted"] += 1
            blocks["evicted_elsewhere"] += bool(others)
            self.ages.add(max(0.0, self._now - returned.at), size)
            self.distances.add(returned.distance, size)
        elif not others:
            blocks["unreachable" if prefix.held & bit else "first"] += 1
