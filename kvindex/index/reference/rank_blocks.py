"""The blocks of one rank, by its events: each event's meaning, engine by engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvindex.index.reference.blocks import Block, Blocks, Budget, Place, Placing, StoredChain
from kvindex.index.reference.groups import RankGroups
from kvindex.index.reference.keys import (
    KeyMaker,
    Proofs,
    Salts,
    Step,
    block_contents,
    has_own_extras,
    proven_places,
    step_key,
    stored_namespace,
)
from kvindex.index.tokens import Namespace, holds_text
from kvindex.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch
from kvindex.wire.quirks import (
    HARMLESS_TAGS,
    fold_hash,
    fold_medium,
    is_content_hash,
    is_root_parent,
    medium_tier,
    outlives_clear,
)

# Sparse events ----------------------------------------------------------------------------------

MAX_UNITS = 1024
"""Most units of a block: all of them together count once for all bounds."""

_MAX_MISSES = 8  # of proofs without a success: then the engine hashes otherwise


class Sparse:
    """Stores one rank's blocks whose events have the tokens, but not which labels are theirs.

    Owned by the rank's `RankBlocks`, whose groups, places and salts it is given.
    """

    def __init__(self, placing: Placing, groups: RankGroups, salts: Salts) -> None:
        self._placing = placing
        self._groups = groups
        self._salts = salts
        self._proofs = Proofs()

    def clear(self) -> None:
        """Forget the engine's hash chains."""
        self._proofs.clear()

    def store(self, event: BlockStored, hashes: Sequence[BlockHash], place: Place) -> None:
        """Store blocks of a sparse event (vLLM's windows, Mamba): it leaves out some, unnamed."""
        # A label's place is known if a whole event has named it, in whichever group. Of a window,
        # the engine keeps tails: blocks in a row, up to a place where a hit may end. Such a place
        # has a label from a whole event where other groups have larger blocks. So the labels
        # without a known place lie in a row before the next label with one.
        first = 0
        before: Block | None = None  # the last block whose place is known
        for i, block_hash in enumerate(hashes):
            known = self._placing.blocks.get(block_hash)
            if known is None:
                continue
            if first < i:
                reach = len(event.token_ids) // self._groups.unit
                tail: list[Block] = []
                if not self._placing.blocks.is_ambiguous(block_hash):
                    count = i - first
                    tail = self._tail_before(known, count, event.block_size, place, before, reach)
                for unnamed, block in zip(hashes[first:i], tail, strict=False):
                    if self._placing.add_copies(unnamed, block, {place: 1}):
                        self._placing.counters["stored"] += 1
                        self._placing.attach([(unnamed, block)])
                first = i if tail else first
            self._placing.relocate(hashes[first : i + 1], place)
            first, before = i + 1, known
        self._placing.relocate(hashes[first:], place)

    def store_proven(self, event: BlockStored, hashes: Sequence[BlockHash], place: Place) -> bool:
        """Store blocks where the engine's hash chain has their labels; False if that is unsure."""
        unit = self._groups.unit
        scale = event.block_size // unit
        # Blocks that a request computes again look like announcements of report mode "full": there
        # only whole events count.
        full = self._groups.settings.report_mode == "full"
        counters = self._placing.counters
        hopeless = counters["proofs_missed"] >= _MAX_MISSES and not counters["proofs"]
        if hopeless or full or scale > MAX_UNITS:
            return False
        steps = self._proofs.chain(event, unit)
        if steps is None:
            return False
        places = proven_places(hashes, steps, scale)
        if places is None:
            counters["proofs_missed"] += 1
            return False
        self._proofs.keep(steps, unit)
        if not places:
            return True
        counters["proofs"] += 1
        namespace = stored_namespace(event, unit)
        anchor = self._anchor(event.parent_block_hash, namespace)
        if anchor is None:
            return False
        parent, gap = anchor
        if event.parent_block_hash is None:
            self._salts.learn(event, namespace)
        contents = [step.content for step in (*gap, *steps)]
        salted = parent is None and (*gap, *steps)[0].salted
        chain = StoredChain(namespace, hashes, contents, scale, place, salted)
        self._place_sparsely(parent, chain, [len(gap) + i * scale for i in places])
        return True

    def _place_sparsely(
        self, parent: Block | None, chain: StoredChain, starts: Sequence[int]
    ) -> None:
        """Store a chain of which only blocks that start at these units have labels."""
        first = reached = 0
        while first < len(starts):
            start = starts[first]
            stop = start
            last = first
            while last < len(starts) and starts[last] == stop:
                stop, last = stop + chain.scale, last + 1
            row = chain._replace(
                hashes=chain.hashes[first:last], contents=chain.contents[start:stop]
            )
            # Blocks without a copy stay where a block after them has one.
            parent = self._placing.place(parent, row, unnamed=chain.contents[reached:start])
            if parent is None:
                self._placing.ignore(self._placing.no_room(), len(starts) - last)
                return
            first, reached = last, stop

    def _anchor(
        self, parent_hash: BlockHash | None, namespace: Namespace
    ) -> tuple[Block | None, list[Step]] | None:
        """Return the last resident block before a proven chain, and the steps after it."""
        gap: list[Step] = []
        by_bytes = isinstance(parent_hash, bytes)
        key = None if parent_hash is None else step_key(fold_hash(parent_hash))
        while key is not None:
            step = self._proofs.look(key)
            if step is None:
                return None
            name = step.digest if by_bytes else key
            block = self._placing.blocks.get(name)
            if block is not None and self._placing.names_one(name):
                return (block, gap[::-1]) if block.namespace == namespace else None
            gap.append(step)
            key = step.parent
        return None, gap[::-1]

    def _tail_before(
        self,
        known: Block,
        count: int,
        size: int,
        place: Place,
        before: Block | None,
        reach: int,
    ) -> list[Block]:
        """Return the places of so many blocks in a row before a known one, or none if unsure."""
        # Blocks are sure between two places where a hit may end, if the known one is the first that
        # ends a tail: every other such place since `before`, as far as the event reaches, has a
        # label too, and so would have been named.
        group = self._groups.known[place.group_idx]
        step, scale = self._groups.alignment // self._groups.unit, size // self._groups.unit
        if not group.spec.has_window or self._groups.kinds_unknown:
            return []
        if step <= count * scale:
            return []
        places: list[Block] = []
        for distance, block in enumerate(known.ancestors(), 1):
            if distance >= reach or (before is not None and block.depth <= before.depth):
                break
            if len(places) < count and distance % scale == 0:
                places.append(block)
            if (block.depth + 1) % step:
                continue
            if len(places) < count or places[-1] is block or not block.places:
                return []
        return places[::-1] if len(places) == count else []


# All events -------------------------------------------------------------------------------------

_MAX_PLACES = 64  # distinct (medium, group) places
_MAX_TAGS = 64  # distinct unknown event tags counted by name
# Looks at held blocks that clears may take to find what they drop, and how many each stored block
# adds: so clears, too, cost in proportion to what was sent.
_CLEAR_LOOKS = 1 << 23
_CLEAR_LOOKS_A_BLOCK = 16
_MAX_EARLY_BYTES = 16 * 2**20


class _Counts(NamedTuple):
    """The counters of a rank."""

    counters: Counter[str]
    ignored: Counter[str]
    skipped: Counter[str]

    def copy(self) -> _Counts:
        return _Counts(*map(Counter, self))

    def reset_to(self, before: _Counts) -> None:
        for counter, old in zip(self, before, strict=True):
            counter.clear()
            counter.update(old)


class _EarlyBatches:
    """What a rank applied while no block size on the device was known, and its counters before."""

    # A chunk off the device may come first. Its unit is too large for the device's blocks, so all
    # is applied again once these show theirs.

    def __init__(self, counts: _Counts) -> None:
        self.counts = counts.copy()
        self.batches: list[EventBatch] = []
        self._bytes = 0

    def keep(self, batch: EventBatch) -> bool:
        """Keep a batch; return whether there was room."""
        self._bytes += 64
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._bytes += 4 * len(event.token_ids)
            if not isinstance(event, AllBlocksCleared):
                self._bytes += 64 + 16 * len(event.block_hashes)
        self.batches.append(batch)
        return self._bytes <= _MAX_EARLY_BYTES


class RankBlocks:
    """Applies one rank's events to its blocks. Owned by the index, under its lock."""

    def __init__(self, keys: KeyMaker, budget: Budget, max_orphans: int) -> None:
        self.blocks = Blocks(keys, budget)
        self._placing = Placing(self.blocks, max_orphans)
        self.orphans = self._placing.orphans
        self.counters = self._placing.counters
        self.ignored = self._placing.ignored
        self.groups = RankGroups()
        self.skipped: Counter[str] = Counter()
        self._counts = _Counts(self.counters, self.ignored, self.skipped)
        self._early: _EarlyBatches | None = _EarlyBatches(self._counts)
        self.salts = Salts()
        self._sparse = Sparse(self._placing, self.groups, self.salts)
        self._positions_unknown = False
        self._removals_unknown = False
        self._clear_looks = _CLEAR_LOOKS
        # Whether the engine announced these blocks again, as the first group of a batch showed.
        self._announced: tuple[BlockHash, bool] | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def ends_at_holes(self) -> bool:
        """Whether a match ends at the first block without a label."""
        chunks = any(self.groups.units_in(place.chunk) > 1 for place in self.blocks.resident)
        return self.groups.ends_at_holes and not chunks

    @property
    def places_missing(self) -> bool:
        """Whether blocks were left out, or their place is not known: hits may be longer."""
        return self._placing.left_out or self.orphans.forgot or len(self.orphans) > 0

    @property
    def upper_bound(self) -> bool:
        """Whether the engine's hits may be shorter than the answers."""
        return self.groups.upper_bound or self._removals_unknown

    def by_medium(self) -> dict[str, int]:
        """Return how many blocks are resident on each medium, in all groups."""
        counts: Counter[str] = Counter()
        for place, count in self.blocks.resident.items():
            counts[place.medium] += count
        return {medium: counts[medium] for medium in sorted(counts) if counts[medium]}

    def clear(self) -> None:
        """Forget everything held and learned: the next events may be another engine's."""
        self._drop_all()
        self.groups.forget()
        self.blocks.resident.clear()
        self._early = _EarlyBatches(self._counts)

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch's events in order."""
        self._announced = None
        self._learn_sizes(batch)
        if self._early is not None and not self._early.keep(batch):
            self._early = None
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._announced = None  # its blocks may be gone
                # Its labels may be those of blocks or of chunks: the event does not show which.
                lost = fold_medium(event.medium), event.group_idx or 0
                places = [p for p in self.blocks.resident if (p.medium, p.group_idx) == lost]
                copies_left = self.groups.settings.copies_left(event)
                self._placing.remove(event.block_hashes, copies_left, places)
            elif isinstance(event, AllBlocksCleared):
                self._announced = None
                self.counters["cleared"] += 1
                self._drop_cleared()
        for tag in batch.skipped:
            known = tag in self.skipped or len(self.skipped) < _MAX_TAGS
            self.skipped[tag if known else "(other)"] += 1
            # It may have removed what is held, wherever it stood in the batch.
            if tag not in HARMLESS_TAGS and (len(self.blocks) or len(self.orphans)):
                self._removals_unknown = True

    def _learn_sizes(self, batch: EventBatch) -> None:
        """Learn the unit from all of a batch first: its events have one group's size each."""
        unit = self.groups.unit
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.groups.learn_size(event)
        changed = unit and self.groups.unit != unit
        early, self._early = self._early, None
        if early is not None:
            known = self.groups.device_size_known
            if early.batches and (known or changed):
                self._drop_all()
                self.blocks.resident.clear()
                self._counts.reset_to(early.counts)
                for kept in early.batches:
                    self.apply(kept)
            if not known:
                self._early = early
        elif changed:
            # The resident blocks are kept by the old unit, where no new block would meet them.
            dropped = len(self.blocks)
            self._drop_all()
            self._placing.ignore("unit_changed", dropped)

    def _drop_cleared(self) -> None:
        """Drop the blocks that the engine clears: vLLM keeps those off the device."""
        resets_connector = self.groups.settings.resets_connector
        gone = {
            place
            for place in self.blocks.resident
            if not outlives_clear(place.medium, resets_connector=resets_connector)
        }
        if len(gone) < len(self.blocks.resident):
            held = [place for place in gone if self.blocks.resident[place]]
            looks = len(self.blocks) * len(held) + len(self.orphans)
            if looks <= self._clear_looks:
                self._clear_looks -= looks
                self.orphans.drop_places(gone)
                self.blocks.drop_places(held)
                if len(self.blocks) or len(self.orphans):
                    return
        # Also where a rank's clears exceed their allowed cost: to lose blocks off the device makes
        # answers too low, to keep those that are gone would make them too high.
        self._drop_all()

    def _drop_all(self) -> None:
        self._placing.clear()
        self._sparse.clear()
        self._positions_unknown = False
        self._removals_unknown = False
        self.salts.clear()

    # Storing ---------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        hashes = [fold_hash(block_hash) for block_hash in event.block_hashes]
        self._clear_looks += _CLEAR_LOOKS_A_BLOCK * len(hashes)
        self._clear_looks = min(self._clear_looks, _CLEAR_LOOKS)
        place = Place(fold_medium(event.medium), event.group_idx or 0, self.groups.chunk_of(event))
        if place not in self.blocks.resident:
            if len(self.blocks.resident) >= _MAX_PLACES:
                self._placing.ignore("too_many_media", max(1, len(hashes)))
                return
            self.blocks.resident[place] = 0
        if not event.token_ids:
            self._placing.relocate(hashes, place)
            return
        fault = _shape_fault(event) or self.groups.learn(event, place.group_idx)
        if fault is not None:
            self._placing.ignore(fault, max(1, len(hashes)))
            return
        if self.groups.windows_only and self._sparse.store_proven(event, hashes, place):
            pass
        elif not hashes:
            pass  # a sparse event of no block
        elif len(event.token_ids) != len(hashes) * event.block_size:
            self._sparse.store(event, hashes, place)
        elif self._names_only(event, hashes):
            self._placing.relocate(hashes, place)
        elif event.block_size // self.groups.unit > MAX_UNITS:
            self._placing.ignore("too_many_units", len(hashes))
        else:
            self._store_chain(event, hashes, place)

    def _names_only(self, event: BlockStored, hashes: Sequence[BlockHash]) -> bool:
        """Whether only the labels of an event can be used: the blocks' contents are unknown."""
        # vLLM's connectors leave out the extra keys of blocks that they offload. Their labels are
        # those of the GPU's blocks, whose contents are known.
        if event.extra_keys is None:
            return event.group_idx is not None and bool(medium_tier(fold_medium(event.medium)))
        # Extra keys of a block of several units do not show which unit they belong to.
        if event.block_size == self.groups.unit:
            return False
        return any(has_own_extras(event, block) for block in range(len(hashes)))

    def _store_chain(self, event: BlockStored, hashes: Sequence[BlockHash], place: Place) -> None:
        unit = self.groups.unit
        namespace = stored_namespace(event, unit)
        if holds_text(event.token_ids):
            self.counters["stored_text"] += len(hashes)
        parent_hash = event.parent_block_hash
        parent = None if parent_hash is None else self.blocks.get(fold_hash(parent_hash))
        at_root = parent is None and is_root_parent(parent_hash)
        contents = block_contents(event, unit, at_root=at_root)
        chain = StoredChain(namespace, hashes, contents, event.block_size // unit, place)
        if at_root:
            chain = chain._replace(salted=self.salts.learn(event, namespace))
            self._store_at_root(event, chain)
        elif parent is None or parent_hash is None:
            self._store_detached(event, chain)
        elif parent.namespace != namespace:
            self._placing.ignore("parent_namespace", len(hashes))
        elif not self._placing.names_one(fold_hash(parent_hash)):
            self._placing.ignore("parent_ambiguous", len(hashes))
        else:
            self._placing.place(parent, chain)

    def _store_at_root(self, event: BlockStored, chain: StoredChain) -> None:
        if event.parent_block_hash is None and _hashes_content_only(event):
            # SGLang 0.5.1-0.5.5 names no parent for any node's first page, and its hashes do not
            # show the position either: to place the page would be a guess.
            self._positions_unknown = True
            self._placing.ignore("position_unknown", len(chain.hashes))
        elif self._is_announced_again(event, chain):
            self.counters["reannounced"] += len(chain.hashes)
        else:
            self._placing.place(None, chain)

    def _is_announced_again(self, event: BlockStored, chain: StoredChain) -> bool:
        """Whether vLLM's report mode "full" announces blocks that a request found cached."""
        # Only where the user states that requests use the mode: events do not show it.
        if self.groups.settings.report_mode != "full" or event.parent_block_hash is not None:
            return False
        # The groups announce one after the other, and the first one's case is that of all.
        last = chain.hashes[-1]
        if self._announced is not None and self._announced[0] == last:
            return self._announced[1]
        # It is an announcement if the engine's own lookup would have found all of it, group by
        # group; else the engine computed the blocks, and they are further copies.
        size = event.block_size
        stops = range(size, size * len(chain.hashes) + 1, size)
        announced = all(
            self.blocks.get(block_hash) in self.blocks.held_at(block_hash, place)
            for group_idx, group in self.groups.hashed().items()
            for place in [chain.place._replace(group_idx=group_idx)]
            for first in [group.spec.needed_from(stops[-1], group.block_size)]
            for stop, block_hash in zip(stops, chain.hashes, strict=True)
            if stop > first and stop % group.block_size == 0
        )
        self._announced = (last, announced)
        return announced

    def _store_detached(self, event: BlockStored, chain: StoredChain) -> None:
        """Store blocks whose parent is not resident: known ones need none, others wait."""
        if self._positions_unknown or _hashes_content_only(event):
            self._placing.ignore("position_unknown", len(chain.hashes))
            return
        assert event.parent_block_hash is not None
        parent_hash = fold_hash(event.parent_block_hash)
        for i, block_hash in enumerate(chain.hashes):
            block = self.blocks.get(block_hash)
            if block is not None and block.namespace == chain.namespace:
                if self._placing.add_copies(block_hash, block, {chain.place: 1}):
                    self.counters["stored"] += 1
                    if i + 1 < len(chain.hashes):
                        self._placing.place(block, chain.after(i + 1))
                return
            if chain.scale == 1:
                content = chain.contents[i]
                self.orphans.hold(block_hash, parent_hash, chain.namespace, content, chain.place)
            else:  # another group's smaller blocks may show its place
                self.orphans.hold_label(block_hash, chain.place)
            self.counters["orphaned"] += 1
            parent_hash = block_hash


def _hashes_content_only(event: BlockStored) -> bool:
    """Whether the engine's labels leave out the prefix, as those of SGLang 0.4.8-0.5.5 do."""
    return is_content_hash(event.block_hashes[0], event.token_ids[: event.block_size])


def _shape_fault(event: BlockStored) -> str | None:
    """Return why an event's tokens cannot belong to its hashes, if they cannot."""
    count = len(event.block_hashes)
    if event.block_size <= 0:
        return "block_size"
    blocks, rest = divmod(len(event.token_ids), event.block_size)
    if rest or blocks < count:
        return "token_count"
    if event.extra_keys is not None and len(event.extra_keys) != count:
        return "extra_keys_count"
    if event.lookahead_token_ids is not None and count:
        lengths = {len(tokens) for tokens in event.lookahead_token_ids}
        if len(event.lookahead_token_ids) != count or len(lengths) != 1:
            return "lookahead_count"
    return None
