"""One rank's events: which tokens it computed, and who held them at that moment.

A store on the device is computation, with these exceptions: a block that the rank holds on
another medium (it is loaded, mostly), one that is announced again in report mode "full", and one
that SGLang before 0.5.6 stores anew in the batch that removed it (its nodes were split). A store on
another medium is a copy.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvindex import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    ConfigurationError,
    Event,
    EventBatch,
    GroupSpec,
    Rank,
)
from kvindex.tools.audit.blocks import HeldBlocks, Histogram, Prefix, PrefixTree
from kvindex.wire.quirks import fold_hash, fold_medium, is_content_hash, is_root_parent, medium_tier


class Window(NamedTuple):
    """Whether a batch counts, and beside which ranks, as sets of bits."""

    counted: bool
    peers: int  # the other ranks whose contents count
    siblings: int  # those of them that belong to the same worker


class RankAudit:
    """Processes one rank's batches in order, and notes how its stream stood."""

    def __init__(
        self, rank: Rank, number: int, model: str, blocks: HeldBlocks, tree: PrefixTree
    ) -> None:
        self.rank = rank
        self.number = number
        self.model = model
        self.blocks = blocks
        self.groups = MainGroup()
        # What the window has, by the names of `Tokens`; blocks left out, by reason.
        self.tokens: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        # Tokens computed again, by the seconds since they were evicted, and by the blocks by which
        # the cache was too small.
        self.ages, self.distances = Histogram(), Histogram()
        self.peak = 0  # the most blocks in use on the device after a batch, copies included
        # Of its stream, as last reported: recordings report none.
        self.state = ""
        self.complete: bool | None = None
        # Seconds of the window in which its contents did not count, and since when they do not.
        self.away = 0.0
        self.away_since: float | None = None
        self.received: tuple[float, float] | None = None  # the first and the last batch
        self._tree = tree
        self._start = tree.start(model.encode("utf-8", "surrogatepass"))
        self._content_hashes: bool | None = None
        # Of the batch at hand: what it removed, its time, and what counts.
        self._removed: set[BlockHash] = set()
        self._now = 0.0
        self._window = Window(False, 0, 0)
        self._room = 0  # of the shared cache
        self._need = 0.0  # of the run at hand: the most that a block so far has needed

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
        self._now, self._window, self._room = batch.ts, window, self.blocks.fleet.room
        self.counts["skipped_events"] += len(batch.skipped)
        # Labels of one group say nothing of another's blocks.
        if self.groups.learn(batch) and self.blocks.labels:
            self.counts["main_group_changed"] += 1
            self.drop(forget=False)
        main: list[Event] = []
        for one in batch.events:
            if isinstance(one, AllBlocksCleared) or (one.group_idx or 0) == self.groups.main:
                main.append(one)
            else:
                self.counts["other_groups"] += len(one.block_hashes)
        for event in runs_of(main):
            if isinstance(event, list):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.counts["clears"] += window.counted
                self.drop(forget=False)
                # Other weights may follow: then no cache could have used what was before.
                self.blocks.fleet.evicted.clear()
        self.blocks.settle()
        self.blocks.fleet.block_size = self.groups.size or self.blocks.fleet.block_size
        self.peak = max(self.peak, self.blocks.on_device)

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
        # SGLang before 0.5.6 hashes a page's own tokens: its first whole store shows that.
        if self._content_hashes is None and tier is None and is_whole(first):
            tokens = first.token_ids[: first.block_size]
            self._content_hashes = is_content_hash(first.block_hashes[0], tokens)
        fault = self._fault(first)
        if fault:
            self.counts[fault] += sum(len(event.block_hashes) for event in run)
            return
        # In report mode "full" vLLM announces once more what a request found in the cache, by the
        # first store of its prompt.
        if tier is None and self.groups.settings.report_mode == "full" and first.token_ids:
            held = map(self.blocks.labels.get, map(fold_hash, first.block_hashes))
            if first.parent_block_hash is None and all(block and block.device for block in held):
                self.tokens["reannounced"] += len(first.token_ids) * self._window.counted
                run = run[1:]
        labels = [fold_hash(label) for event in run for label in event.block_hashes]
        prefixes = self._prefixes(run, labels, tier)
        # Before the blocks are held: who holds what now is what matters.
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

    def _prefixes(
        self, run: list[BlockStored], labels: Sequence[BlockHash], tier: str | None
    ) -> list[Prefix | None]:
        """Return each block with its prefix, or None where events do not show it."""
        known = self.blocks.labels
        if not run or self._content_hashes or not self._states_contents(run[0], tier):
            return [block.prefix if (block := known.get(label)) else None for label in labels]
        parent, prefix = run[0].parent_block_hash, None
        # First by its label: a block may have the number by which others name the root.
        if parent is not None and (held := known.get(fold_hash(parent))) is not None:
            prefix = held.prefix
        elif is_root_parent(parent):
            prefix = self._start
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

    # Counting --------------------------------------------------------------------------------

    def _count(
        self,
        first: BlockStored,
        labels: Sequence[BlockHash],
        prefixes: Sequence[Prefix | None],
        tier: str | None,
    ) -> None:
        """Count the tokens of a run by who holds what."""
        size = first.block_size if first.token_ids else self.groups.size
        blocks: Counter[str] = Counter()
        if tier is not None:
            blocks["offloaded"] = len(labels)
        elif not first.token_ids:
            blocks["returned"] = len(labels)
        else:
            self._need = 0.0
            for label, prefix in zip(labels, prefixes, strict=True):
                self._classify(label, prefix, blocks, size)
            # Generation stores one block at a time, as it fills; a prompt stores several, mostly.
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
            # A node that SGLang split is removed and stored anew: nothing was computed.
            moved = label in self._removed
            blocks["moved" if moved else "computed"] += 1
            blocks["unknown"] += not moved
            return
        if prefix.whole & bit:
            # Held on another medium only: it was loaded, mostly. Events do not tell.
            held = self.blocks.labels.get(label)
            if held is not None and not held.device:
                blocks["returned"] += 1
            else:
                blocks["computed"] += 1
                blocks["here"] += 1
            return
        blocks["computed"] += 1
        # A cache that lacks a block cannot use those behind it.
        self._need = max(self._need, self.blocks.need(prefix, self._window.peers | bit, self._room))
        if self._need < math.inf:
            blocks["again"] += 1
            self.blocks.fleet.needs.add(self._need, size)
        # Whole prefixes: a block behind a hole saves a router nothing.
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


# What stores report -------------------------------------------------------------------------------


_MAX_GROUPS = 64
_TOKEN_BYTES = 8
_SIGN = 1 << 63
_encode = msgspec.msgpack.Encoder().encode


class MainGroup:
    """The group whose blocks stand for a rank's tokens: each group has one block for each token."""

    def __init__(self) -> None:
        self.main = 0  # its index, also where a model has no groups
        # Tokens of its blocks. A smaller one is part of a block, and counts when it is whole.
        self.size = 0
        self.settings = CacheSettings()
        self._groups: dict[int, GroupSpec] = {}
        self._unstated: set[int] = set()

    @property
    def kinds_unknown(self) -> bool:
        """Whether there are several groups, of which some may be anything (vLLM up to 0.21)."""
        return len(self._groups) > 1 and bool(self._unstated)

    @property
    def others_limit_hits(self) -> bool:
        """Whether a hit needs blocks of other groups, too: windows, Mamba's states."""
        return len(self._groups) > 1

    def forget(self) -> None:
        """Forget what was learned: another engine may follow."""
        self.main = self.size = 0
        self._groups.clear()
        self._unstated.clear()

    def learn(self, batch: EventBatch) -> bool:
        """Learn groups, kinds and sizes from all of a batch; return if another group counts now."""
        before = self.main
        for event in batch.events:
            if isinstance(event, BlockStored) and event.token_ids:
                self._learn_kind(event)
        if self._groups:
            # A hit needs all blocks of that group: of a window only the last ones are held.
            needed = (i for i, spec in sorted(self._groups.items()) if spec.needs_all)
            self.main = next(needed, min(self._groups))
        if self.main != before:
            self.size = 0  # blocks of another group may have another one
        for event in batch.events:
            # Connectors may join several blocks into one, off the device.
            if isinstance(event, BlockStored) and (event.group_idx or 0) == self.main:
                on_device = not medium_tier(fold_medium(event.medium))
                if event.block_size > self.size and event.token_ids and on_device:
                    self.size = event.block_size
        return self.main != before

    def _learn_kind(self, event: BlockStored) -> None:
        index = event.group_idx or 0
        if index in self._groups and index not in self._unstated:
            return
        # Indices are from the network: nothing else bounds them.
        if index not in self._groups and len(self._groups) >= _MAX_GROUPS:
            return
        spec = self.settings.groups.get(index)
        if spec is None and event.kv_cache_spec_kind is not None:
            try:
                spec = GroupSpec(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            except ConfigurationError:
                spec = None
        if spec is None:
            self._unstated.add(index)
        else:
            self._unstated.discard(index)
        if spec is None or spec.takes_part:
            self._groups[index] = spec or GroupSpec()


def block_contents(event: BlockStored) -> list[bytes]:
    """Return the content of each block of a store that names all its blocks.

    Equal prompts give equal contents whatever engine they are from: tokens, LoRA, salt, images and
    the tokens that lookahead hashing covers are in them, engine hashes and their seeds are not.
    """
    lora = event.lora_name or event.lora_id or None
    ahead = event.lookahead_token_ids
    covered = len(ahead[0]) if ahead else 0
    tag = _encode((event.block_size, lora, covered))
    packed, width = _packed(event.token_ids), event.block_size * _TOKEN_BYTES
    contents = [tag + packed[i : i + width] for i in range(0, len(packed), width)]
    if ahead:
        contents = [
            content + _packed(tokens) for content, tokens in zip(contents, ahead, strict=True)
        ]
    salt = event.cache_salt if is_root_parent(event.parent_block_hash) else None
    for i, items in enumerate(event.extra_keys or ([None] if salt else [])):
        keys = list(items or ())
        # vLLM repeats the LoRA for each block; the tag has it.
        if isinstance(lora, str) and lora in keys:
            keys.remove(lora)
        if salt and i == 0:  # vLLM puts it among the extra keys, SGLang beside them
            keys.append(salt)
        if keys:
            # Sorted, since two engines need not list the same keys in one order.
            contents[i] += b"".join(sorted(map(_encode, keys)))
    return contents


def _packed(token_ids: Iterable[int]) -> bytes:
    try:
        return array("q", token_ids).tobytes()
    except OverflowError:  # ids are any integers of 64 bits
        return array("q", [(t + _SIGN) % (2 * _SIGN) - _SIGN for t in token_ids]).tobytes()


def tier_of(medium: str | None) -> str | None:
    """The folded name of a medium that is not the device; None for the device."""
    folded = fold_medium(medium)
    return folded if medium_tier(folded) else None


def is_whole(event: BlockStored) -> bool:
    """Whether a store has the tokens of each of its blocks, and fitting extras."""
    count = len(event.block_hashes)
    if not count or event.block_size <= 0 or len(event.token_ids) != count * event.block_size:
        return False
    if event.extra_keys is not None and len(event.extra_keys) != count:
        return False
    ahead = event.lookahead_token_ids
    return ahead is None or (len(ahead) == count and len(set(map(len, ahead))) == 1)


def is_sparse(event: BlockStored) -> bool:
    """Whether a store leaves out some blocks of its tokens, as vLLM's windows and Mamba do."""
    blocks, rest = divmod(len(event.token_ids), event.block_size)
    return not rest and blocks > len(event.block_hashes)


def runs_of(
    events: Iterable[Event],
) -> Iterator[list[BlockStored] | BlockRemoved | AllBlocksCleared]:
    """Yield events, with stores joined that continue one another: some engines split them."""
    run: list[BlockStored] = []
    for event in events:
        if run and not (isinstance(event, BlockStored) and _continues(run[-1], event)):
            yield run
            run = []
        if isinstance(event, BlockStored):
            run.append(event)
        else:
            yield event
    if run:
        yield run


def _continues(before: BlockStored, after: BlockStored) -> bool:
    return (
        after.parent_block_hash is not None
        and bool(before.block_hashes)
        and after.parent_block_hash == before.block_hashes[-1]
        and after.medium == before.medium
        and after.block_size == before.block_size
        and is_whole(before)
        and is_whole(after)
    )
