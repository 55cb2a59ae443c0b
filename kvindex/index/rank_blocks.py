"""What one rank holds, as its events tell it: each event's meaning, engine by engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvindex.errors import InvariantError
from kvindex.index.chains import chain_images, needed_runs, restored_blocks
from kvindex.index.guard import HOLD_BLOCKS, Hold
from kvindex.index.keys import (
    Lora,
    Namespace,
    block_contents,
    first_extra,
    has_own_extras,
    stored_namespace,
)
from kvindex.index.labels import Budget, Label, Labels, cuts
from kvindex.index.orphans import Orphan, Orphans
from kvindex.index.proofs import Proofs, Step, proven_places, step_key
from kvindex.index.rank_groups import RankGroups
from kvindex.index.rank_image import MAX_PLACES, MAX_TORN, RankImage
from kvindex.index.tokens import holds_text
from kvindex.index.tree import Block, Owner, RadixTree, ancestors
from kvindex.rank import Rank
from kvindex.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    EventBatch,
)
from kvindex.wire.quirks import (
    fold_hash,
    fold_medium,
    is_content_hash,
    is_root_parent,
    medium_tier,
    outlives_clear,
)

__all__ = ["RankBlocks"]

_COUNTERS = (
    *("stored", "stored_text", "reannounced", "orphaned", "orphans_attached", "unplaced"),
    *("removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared"),
    *("proofs", "proofs_missed"),
)
_MAX_MISSES = 8  # of proofs, and none that succeeded: then the engine hashes otherwise
_MAX_TAGS = 64  # distinct unknown event tags counted by name
# Units of one block: it counts once for all bounds, and is placed without letting others go first.
_MAX_UNITS = HOLD_BLOCKS
# Looks at held blocks that clears may take to find what they drop, and how many each stored block
# adds: so clears, too, cost in proportion to what was sent.
_CLEAR_LOOKS = 1 << 23
_CLEAR_LOOKS_A_BLOCK = 16
_MAX_SALTS = 64  # distinct first extra keys remembered
_MAX_SALT_BYTES = 256  # longer ones are not: a publisher chooses their length


class _Chain(NamedTuple):
    """Consecutive blocks that an event stores at one place, each of `scale` units of the tree."""

    namespace: Namespace
    hashes: Sequence[BlockHash]
    contents: Sequence[bytes]  # of each unit
    scale: int
    owner: Owner
    salted: bool = False  # of a chain that starts its prompts

    def cut(self, start: int, stop: int) -> _Chain:
        """Return blocks `start` … `stop - 1` of the chain, as far as there are so many."""
        contents = self.contents[start * self.scale : stop * self.scale]
        return self._replace(hashes=self.hashes[start:stop], contents=contents)

    def after(self, start: int) -> _Chain:
        """Return the chain without its first `start` blocks."""
        contents = self.contents[start * self.scale :]
        return self._replace(hashes=self.hashes[start:], contents=contents)


class RankBlocks:
    """Applies one rank's events to the shared tree.

    Owned by the index, under its lock.

    Attributes:
        labels: the resident blocks by the engine's hashes.
        orphans: the held blocks, whose place is not known.
        groups: what is known of the KV cache groups.
        counters: what was stored, removed, held, … in blocks.
        ignored: blocks left out, by reason.
        skipped: events nobody knows, by tag.
    """

    def __init__(self, rank: Rank, tree: RadixTree, budget: Budget, max_orphans: int) -> None:
        self.rank = rank
        self.labels = Labels(budget)
        self.orphans = Orphans(max_orphans)
        self.groups = RankGroups()
        self._proofs = Proofs()
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.ignored: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._tree = tree
        self._owners: dict[tuple[str, int], Owner] = {}
        self._positions_unknown = False
        self._clear_looks = _CLEAR_LOOKS
        # Whether the engine announced these blocks again, as the first group of a batch showed.
        self._announced: tuple[BlockHash, bool] | None = None
        # Labels of several blocks of which one went away: those that are left cannot be told.
        self._torn: set[BlockHash] = set()
        # Extra keys that prompts started under, the newest last: for `explain` to try.
        self._salts: dict[tuple[Lora, bytes], None] = {}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def places_missing(self) -> bool:
        """Whether blocks were stored whose place is not known: hits may be longer."""
        return self._positions_unknown or self.orphans.forgot or len(self.orphans) > 0

    def by_medium(self) -> dict[str, int]:
        """Return how many blocks of the tree are resident on each medium, in all groups."""
        counts: Counter[str] = Counter()
        for owner in self._owners.values():
            counts[owner.medium] += owner.resident
        return {medium: counts[medium] for medium in sorted(counts) if counts[medium]}

    def salts(self) -> list[tuple[Lora, bytes]]:
        """Return the last LoRAs and extra keys that prompts started under, where they had some."""
        return list(self._salts)

    def rename(self, rank: Rank) -> None:
        """Belong to another rank from now on."""
        self.rank = rank
        for owner in self._owners.values():
            owner.rank = rank

    def configure(self, settings: CacheSettings) -> None:
        """Take the user's word for what the events leave unsaid."""
        self.groups.configure(settings)

    def clear(self, hold: Hold) -> None:
        """Forget everything held and learned: what comes next may be another engine's."""
        self._drop_all(hold)
        self.groups.forget()
        self._owners.clear()

    def image(self) -> RankImage:
        """Return all that is held and known, as plain values."""
        runs = needed_runs(label.block for _, label in self.labels.placements())
        names = [*[run.namespace for run in runs], *self.orphans.namespaces()]
        namespaces = {namespace: i for i, namespace in enumerate(dict.fromkeys(names))}
        places = {owner: i for i, owner in enumerate(self._owners.values())}
        chains, positions = chain_images(runs, namespaces)
        orphans, waiting = self.orphans.image(namespaces, places)
        groups, shapes = self.groups.image()
        return RankImage(
            namespaces=[(size, lora, lookahead) for size, lora, lookahead in namespaces],
            places=[(_packed(owner.medium), owner.group_idx) for owner in places],
            chains=chains,
            salted=[i for i, run in enumerate(runs) if chains[i][0] < 0 and run.salted],
            labels=self.labels.image(positions, places),
            orphans=orphans,
            waiting=waiting,
            groups=groups,
            shapes=shapes,
            torn=list(self._torn),
            skipped=[(_packed(tag), count) for tag, count in self.skipped.items()],
            counters=dict(self.counters),
            ignored=dict(self.ignored),
            orphans_dropped=self.orphans.dropped,
            orphans_forgotten=self.orphans.forgot,
            ambiguous=self.labels.ambiguous,
            duplicates=self.labels.duplicates,
            unit=self.groups.unit,
            reports_full=self.groups.settings.report_mode == "full",
            eagle=_plain_eagle(self.groups.settings.eagle),
            hash_block_size=self.groups.settings.hash_block_size,
            upper_bound=self.groups.settings.upper_bound,
            resets_connector=self.groups.settings.resets_connector,
            positions_unknown=self._positions_unknown,
        )

    def restore(self, image: RankImage) -> None:
        """Hold and know what an image says; there must be nothing yet, and room for it."""
        namespaces = [Namespace(*namespace) for namespace in image.namespaces]
        owners = [Owner(self.rank, _unpacked(medium), group) for medium, group in image.places]
        self._owners = {(owner.medium, owner.group_idx): owner for owner in owners}
        blocks = restored_blocks(self._tree, image.chains, frozenset(image.salted), namespaces)
        for owner, held in self.labels.restore(image.labels, blocks, owners).items():
            self._tree.own(held, owner)
        self._tree.settle(blocks)
        self.labels.ambiguous, self.labels.duplicates = image.ambiguous, image.duplicates
        self.orphans.restore(image, namespaces, owners)
        self.groups.restore(image)
        self.counters.update(image.counters)
        self.ignored.update(image.ignored)
        self.skipped.update({_unpacked(tag): count for tag, count in image.skipped})
        self._positions_unknown = image.positions_unknown
        self._torn.update(image.torn)

    def check(self) -> None:
        """Assert that labels, copies and the tree's owners tell the same.

        Raises:
            InvariantError: they do not.
        """
        owned = self.labels.check()
        for owner in self._owners.values():
            if owned[owner] != owner.resident:
                raise InvariantError(f"{owner!r}: {owned[owner]} blocks have labels")

    def apply(self, batch: EventBatch, hold: Hold) -> None:
        """Apply a batch's events in order."""
        for tag in batch.skipped:
            known = tag in self.skipped or len(self.skipped) < _MAX_TAGS
            self.skipped[tag if known else "(other)"] += 1
        self._announced = None
        self._learn_sizes(batch, hold)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event, hold)
            elif isinstance(event, BlockRemoved):
                self._announced = None  # what it showed may be gone
                self._remove(event, hold)
            elif isinstance(event, AllBlocksCleared):
                self._announced = None
                self.counters["cleared"] += 1
                self._drop_cleared(hold)
            hold.did(1)

    def _learn_sizes(self, batch: EventBatch, hold: Hold) -> None:
        """Learn the unit from all of a batch first: its groups' sizes come one after the other."""
        unit = self.groups.unit
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.groups.learn_size(event)
        if unit and self.groups.unit != unit:
            # What is held lies in the tree by the old unit, where nothing new would meet it.
            if len(self.labels):
                self.ignored["unit_changed"] += len(self.labels)
            self._drop_all(hold)

    def _drop_cleared(self, hold: Hold) -> None:
        """Drop what the engine clears: vLLM leaves what lies off the device as it is.

        A rank whose clears cost more than they may loses what lies off the device as well.
        """
        resets_connector = self.groups.settings.resets_connector
        gone = {
            owner
            for owner in self._owners.values()
            if not outlives_clear(owner.medium, resets_connector=resets_connector)
        }
        if len(gone) < len(self._owners):
            held = [owner for owner in gone if owner.resident]
            looks = len(self.labels) * len(held) + len(self.orphans)
            if looks <= self._clear_looks:
                self._clear_looks -= looks
                self.orphans.drop_places(gone)
                self.labels.drop_places(held, self._tree, hold)
                if len(self.labels) or len(self.orphans):
                    return
        self._drop_all(hold)

    def _drop_all(self, hold: Hold) -> None:
        self.labels.clear(self._tree, hold)
        self.orphans.clear()
        self._proofs.clear()
        self._positions_unknown = False
        self._torn.clear()
        self._salts.clear()

    # Storing ---------------------------------------------------------------------------------

    def _store(self, event: BlockStored, hold: Hold) -> None:
        hashes = [fold_hash(block_hash) for block_hash in event.block_hashes]
        self._clear_looks += _CLEAR_LOOKS_A_BLOCK * len(hashes)
        self._clear_looks = min(self._clear_looks, _CLEAR_LOOKS)
        owner = self._owner(event.medium, event.group_idx)
        if owner is None:
            self.ignored["too_many_media"] += max(1, len(hashes))
            return
        if not event.token_ids:
            self._relocate(hashes, owner, hold)
            return
        fault = _shape_fault(event) or self.groups.learn(event, owner.group_idx)
        if fault is not None:
            self.ignored[fault] += max(1, len(hashes))
        elif self.groups.windows_only and self._store_proven(event, hashes, owner, hold):
            pass
        elif not hashes:
            pass  # a sparse event of no block
        elif len(event.token_ids) != len(hashes) * event.block_size:
            self._store_sparsely(event, hashes, owner, hold)
        elif self._names_only(event, hashes):
            self._relocate(hashes, owner, hold)
        elif event.block_size // self.groups.unit > _MAX_UNITS:
            self.ignored["too_many_units"] += len(hashes)
        else:
            self._store_chain(event, hashes, owner, hold)

    def _names_only(self, event: BlockStored, hashes: Sequence[BlockHash]) -> bool:
        """Whether only the labels of an event can be used: it does not tell the blocks' contents.

        * Extra keys of a block of several units do not tell which unit they belong to.
        * vLLM's connectors leave out the extra keys of blocks that they offload. Their labels are
          those of the GPU's blocks, so these tell the contents.
        """
        if event.extra_keys is None:
            return event.group_idx is not None and bool(medium_tier(fold_medium(event.medium)))
        if event.block_size == self.groups.unit:
            return False
        return any(has_own_extras(event, block) for block in range(len(hashes)))

    def _store_chain(
        self, event: BlockStored, hashes: Sequence[BlockHash], owner: Owner, hold: Hold
    ) -> None:
        unit = self.groups.unit
        namespace = stored_namespace(event, unit)
        if holds_text(event.token_ids):
            self.counters["stored_text"] += len(hashes)
        parent_hash = event.parent_block_hash
        parent = None if parent_hash is None else self.labels.get(fold_hash(parent_hash))
        at_root = parent is None and is_root_parent(parent_hash)
        contents = block_contents(event, unit, at_root=at_root)
        chain = _Chain(namespace, hashes, contents, event.block_size // unit, owner)
        if at_root:
            chain = chain._replace(salted=self._learn_salt(event, namespace))
            self._store_at_root(event, chain, hold)
        elif parent is not None and parent_hash is not None:
            self._store_after(parent, fold_hash(parent_hash), chain, hold)
        else:
            self._store_detached(event, chain, hold)

    def _learn_salt(self, event: BlockStored, namespace: Namespace) -> bool:
        """Remember under which extra keys prompts start; say if these have some."""
        extra = first_extra(event)
        if extra and len(extra) <= _MAX_SALT_BYTES:
            self._salts.pop((namespace.lora, extra), None)
            self._salts[namespace.lora, extra] = None
            if len(self._salts) > _MAX_SALTS:
                del self._salts[next(iter(self._salts))]
        return bool(extra)

    def _owner(self, medium: str | None, group_idx: int | None) -> Owner | None:
        """Return the place that an event names, or None if the rank has too many."""
        place = (fold_medium(medium), group_idx or 0)
        owner = self._owners.get(place)
        if owner is None and len(self._owners) < MAX_PLACES:
            owner = self._owners[place] = Owner(self.rank, *place)
        return owner

    def _store_at_root(self, event: BlockStored, chain: _Chain, hold: Hold) -> None:
        if event.parent_block_hash is None and _hashes_content_only(event):
            # SGLang 0.5.1-0.5.5 names no parent for any node's first page, and its hashes do not
            # tell the position either: to place the page would be a guess.
            self._positions_unknown = True
            self.ignored["position_unknown"] += len(chain.hashes)
        elif self._is_announced_again(event, chain):
            self.counters["reannounced"] += len(chain.hashes)
        else:
            self._place(None, chain, hold)

    def _is_announced_again(self, event: BlockStored, chain: _Chain) -> bool:
        """Whether vLLM's report mode "full" announces blocks that a request found cached.

        Only where the user says that requests use the mode: the wire does not tell. Then a store
        from the root is such an announcement if the engine's own lookup would have found all of
        it, group by group; else the engine computed the blocks, and they are further copies. The
        groups announce one after the other, and what the first one shows holds for all.
        """
        if self.groups.settings.report_mode != "full" or event.parent_block_hash is not None:
            return False
        last = chain.hashes[-1]
        if self._announced is None or self._announced[0] != last:
            self._announced = (last, self._would_be_found(event, chain))
        return self._announced[1]

    def _would_be_found(self, event: BlockStored, chain: _Chain) -> bool:
        size = event.block_size
        stops = range(size, size * len(chain.hashes) + 1, size)
        return all(
            self._is_held(block_hash, chain.owner.medium, group_idx)
            for group_idx, group in self.groups.hashed().items()
            for first in [group.spec.needed_from(stops[-1], group.block_size)]
            for stop, block_hash in zip(stops, chain.hashes, strict=True)
            if stop > first and stop % group.block_size == 0
        )

    def _is_held(self, block_hash: BlockHash, medium: str, group_idx: int) -> bool:
        label = self.labels.get(block_hash)
        owner = self._owners.get((medium, group_idx))
        return label is not None and owner is not None and owner in label.copies

    def _store_after(
        self, parent: Label, parent_hash: BlockHash, chain: _Chain, hold: Hold
    ) -> None:
        if parent.block.run.namespace != chain.namespace:
            self.ignored["parent_namespace"] += len(chain.hashes)
        elif parent.other is not None or self._is_torn(parent_hash):
            # One hash names several blocks (see `Label`): which of them is meant is not said.
            self.ignored["parent_ambiguous"] += len(chain.hashes)
        else:
            self._place(parent.block, chain, hold)

    def _is_torn(self, block_hash: BlockHash) -> bool:
        return block_hash in self._torn or len(self._torn) >= MAX_TORN

    def _store_detached(self, event: BlockStored, chain: _Chain, hold: Hold) -> None:
        """Store blocks whose parent is not resident: known ones need none, others wait."""
        if self._positions_unknown or _hashes_content_only(event):
            self.ignored["position_unknown"] += len(chain.hashes)
            return
        assert event.parent_block_hash is not None
        parent_hash = fold_hash(event.parent_block_hash)
        for i, block_hash in enumerate(chain.hashes):
            label = self.labels.get(block_hash)
            if label is not None and label.block.run.namespace == chain.namespace:
                if self._add_copies(block_hash, label.block, {chain.owner: 1}):
                    self.counters["stored"] += 1
                    self._place(label.block, chain.after(i + 1), hold)
                return
            if chain.scale == 1:
                content = chain.contents[i]
                self.orphans.hold(block_hash, parent_hash, chain.namespace, content, chain.owner)
            else:  # another group's smaller blocks may tell its place
                self.orphans.hold_label(block_hash, chain.owner)
            self.counters["orphaned"] += 1
            parent_hash = block_hash
            hold.did(1)

    def _relocate(self, hashes: Sequence[BlockHash], owner: Owner, hold: Hold) -> None:
        """Note a further place of blocks that the event names without their tokens."""
        for block_hash in hashes:
            label = self.labels.get(block_hash)
            if label is None:
                self.orphans.hold_label(block_hash, owner)
                self.counters["unplaced"] += 1
            elif self._add_copies(block_hash, label.block, {owner: 1}):
                self.counters["stored"] += 1
            hold.did(1)

    def _store_sparsely(
        self, event: BlockStored, hashes: Sequence[BlockHash], owner: Owner, hold: Hold
    ) -> None:
        """Store blocks of a sparse event (vLLM's windows, Mamba): it leaves out some, unnamed.

        A label's place is known if a whole event has named it, in whichever group. Of a window, the
        engine keeps tails: blocks in a row, up to a place where a hit may end. Such a place has a
        label from a whole event where other groups have larger blocks. So the labels that nobody
        has named lie in a row before the next one that somebody has.
        """
        first = 0
        before: Block | None = None  # the last block whose place is known
        for i, block_hash in enumerate(hashes):
            label = self.labels.get(block_hash)
            if label is None:
                continue
            if first < i:
                reach = len(event.token_ids) // self.groups.unit
                tail = self._tail_before(label, i - first, event.block_size, owner, before, reach)
                for unnamed, block in zip(hashes[first:i], tail, strict=False):
                    if self._add_copies(unnamed, block, {owner: 1}):
                        self.counters["stored"] += 1
                        self._attach([(unnamed, block)], hold)
                first = i if tail else first
            self._relocate(hashes[first : i + 1], owner, hold)
            first, before = i + 1, label.block
        self._relocate(hashes[first:], owner, hold)

    def _store_proven(
        self, event: BlockStored, hashes: Sequence[BlockHash], owner: Owner, hold: Hold
    ) -> bool:
        """Store blocks where the engine's hash chain has their labels; False if that is unsure.

        What a request computes again looks like what report mode "full" announces: there only
        whole events count.
        """
        unit = self.groups.unit
        scale = event.block_size // unit
        full = self.groups.settings.report_mode == "full"
        hopeless = self.counters["proofs_missed"] >= _MAX_MISSES and not self.counters["proofs"]
        if hopeless or full or scale > _MAX_UNITS:
            return False
        steps = self._proofs.chain(event, unit, hold)
        if steps is None:
            return False
        places = proven_places(hashes, steps, scale)
        if places is None:
            self.counters["proofs_missed"] += 1
            return False
        self._proofs.keep(steps, unit)
        if not places:
            return True
        self.counters["proofs"] += 1
        namespace = stored_namespace(event, unit)
        anchor = self._anchor(event.parent_block_hash, namespace)
        if anchor is None:
            return False
        parent, gap = anchor
        if event.parent_block_hash is None:
            self._learn_salt(event, namespace)
        contents = [step.content for step in (*gap, *steps)]
        salted = parent is None and (*gap, *steps)[0].salted
        chain = _Chain(namespace, hashes, contents, scale, owner, salted)
        self._place_sparsely(parent, chain, [len(gap) + place * scale for place in places], hold)
        return True

    def _place_sparsely(
        self, parent: Block | None, chain: _Chain, starts: Sequence[int], hold: Hold
    ) -> None:
        """Put a chain into the tree of which only blocks that start at these units have labels."""
        first = reached = 0
        while first < len(starts):
            start = starts[first]
            stop = start
            last = first
            while last < len(starts) and starts[last] == stop:
                stop, last = stop + chain.scale, last + 1
            some = chain._replace(
                hashes=chain.hashes[first:last], contents=chain.contents[start:stop]
            )
            # Blocks without an owner stay where a block after them has one.
            parent = self._place(parent, some, hold, unnamed=chain.contents[reached:start])
            if parent is None:
                self.ignored[self._no_room()] += len(starts) - last
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
            label = self.labels.get(name)
            if label is not None and label.other is None and not self._is_torn(name):
                if label.block.run.namespace != namespace:
                    return None
                return label.block, gap[::-1]
            gap.append(step)
            key = step.parent
        return None, gap[::-1]

    def _tail_before(
        self,
        label: Label,
        count: int,
        size: int,
        owner: Owner,
        before: Block | None,
        reach: int,
    ) -> list[Block]:
        """Return the places of so many blocks in a row before a label's, or none if unsure.

        Sure is what lies between two places where a hit may end, the label's being the first that
        ends a tail: every other one since `before`, as far as the event reaches, has a label too,
        and so would have been named.
        """
        group = self.groups.known()[owner.group_idx]
        step, scale = self.groups.alignment // self.groups.unit, size // self.groups.unit
        if not group.spec.has_window or self.groups.kinds_untold or label.other is not None:
            return []
        if step <= count * scale:
            return []
        places: list[Block] = []
        for distance, block in enumerate(ancestors(label.block), 1):
            if distance >= reach or (before is not None and block.depth <= before.depth):
                break
            if len(places) < count and distance % scale == 0:
                places.append(block)
            if (block.depth + 1) % step:
                continue
            if len(places) < count or places[-1] is block or not self._holds(block):
                return []
        return places[::-1] if len(places) == count else []

    def _holds(self, block: Block) -> bool:
        return any(owner in block.run.owners for owner in self._owners.values())

    def _place(
        self, parent: Block | None, chain: _Chain, hold: Hold, unnamed: Sequence[bytes] = ()
    ) -> Block | None:
        """Put a chain of blocks into the tree, cut by cut, then all held blocks that waited for it.

        The last block of a cut stays while others go first: this rank holds it. Return the last
        of all, or None if there was no room for all. `unnamed` units come before the chain.
        """
        most = max(1, HOLD_BLOCKS // chain.scale)
        for start in range(0, len(chain.hashes), most):
            cut = chain.cut(start, start + most)
            placed = self._place_some(parent, cut, hold, () if start else unnamed)
            if len(placed) < len(cut.hashes):
                self.ignored[self._no_room()] += len(chain.hashes) - start - len(placed)
                return None
            parent = placed[-1]
            hold.did(len(placed) * chain.scale)
        return parent

    def _place_some(
        self, parent: Block | None, chain: _Chain, hold: Hold, unnamed: Sequence[bytes]
    ) -> list[Block]:
        """Place as many blocks as there is room for, and return them."""
        contents = [*unnamed, *chain.contents] if unnamed else chain.contents
        units = self._tree.extend(parent, chain.namespace, contents, salted=chain.salted)
        blocks = units[len(unnamed) + chain.scale - 1 :: chain.scale]
        count = 0
        for block_hash, block in zip(chain.hashes, blocks, strict=True):
            if not self.labels.add(block_hash, block, chain.owner):
                break
            count += 1
        self._tree.own(blocks[:count], chain.owner)
        if count < len(blocks):
            self._tree.prune(blocks[-1])
        self.counters["stored"] += count
        if len(self.orphans):
            self._attach(list(zip(chain.hashes, blocks[:count], strict=False)), hold)
        return blocks[:count]

    def _attach(self, placed: list[tuple[BlockHash, Block]], hold: Hold) -> None:
        """Give held blocks the place that has become known, and so on down the chain."""
        while placed:
            block_hash, block = placed.pop()
            held = self.orphans.pop(block_hash)
            if held is not None:
                self._add_copies(block_hash, block, held.copies)
            for child_hash, orphan in self.orphans.pop_children(block_hash):
                child = self._attach_one(child_hash, orphan, block)
                if child is not None:
                    placed.append((child_hash, child))
            hold.did(1)

    def _attach_one(self, block_hash: BlockHash, orphan: Orphan, parent: Block) -> Block | None:
        if orphan.namespace != parent.run.namespace:
            self.ignored["parent_namespace"] += 1
            return None
        (block,) = self._tree.extend(parent, orphan.namespace, [orphan.content])
        if not self._add_copies(block_hash, block, orphan.copies):
            self._tree.prune(block)
            return None
        self.counters["orphans_attached"] += 1
        return block

    def _no_room(self) -> str:
        """Say why there was no room for a block."""
        return "max_blocks_per_rank" if self.labels.full() else "max_blocks"

    def _add_copies(self, block_hash: BlockHash, block: Block, copies: dict[Owner, int]) -> bool:
        """Make a block resident in these owners as far as there is room; say if it is in any."""
        added = 0
        for owner, count in copies.items():
            if self.labels.add(block_hash, block, owner, count):
                self._tree.own([block], owner)
                added += 1
            else:
                self.ignored[self._no_room()] += 1
        return added > 0

    # Removing --------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved, hold: Hold) -> None:
        owner = self._owners.get((fold_medium(event.medium), event.group_idx or 0))
        if owner is None:
            self.counters["removed_unknown"] += len(event.block_hashes)
            return
        for hashes in cuts(event.block_hashes):
            gone: list[Block] = []
            for block_hash in map(fold_hash, hashes):
                gone = self._remove_one(block_hash, owner, gone, hold)
            self._tree.disown(gone, owner)
            hold.did(len(hashes))

    def _remove_one(
        self, block_hash: BlockHash, owner: Owner, gone: list[Block], hold: Hold
    ) -> list[Block]:
        """Take one copy away; return the blocks that the tree has still to disown."""
        labels = self.labels.held_in(block_hash, owner)
        if not labels:
            held = self.orphans.drop_copy(block_hash, owner)
            self.counters["removed_orphans" if held else "removed_unknown"] += 1
            return gone
        self.counters["removed"] += 1
        # Which of several blocks of one hash is gone is not said: none may be answered for.
        if len(labels) > 1:
            self.counters["removed_ambiguous"] += len(labels) - 1
            if len(self._torn) < MAX_TORN:
                self._torn.add(block_hash)
        for label in labels:
            if self.labels.drop(block_hash, label, owner):
                gone.append(label.block)
            if len(gone) >= HOLD_BLOCKS:
                self._tree.disown(gone, owner)
                hold.did(len(gone))
                gone = []
        return gone


def _plain_eagle(eagle: bool | tuple[int, ...]) -> bool | list[int]:
    return eagle if isinstance(eagle, bool) else list(eagle)


def _packed(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _unpacked(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


def _hashes_content_only(event: BlockStored) -> bool:
    """Whether the engine's labels leave out the prefix, as those of SGLang 0.4.8-0.5.5 do."""
    return is_content_hash(event.block_hashes[0], event.token_ids[: event.block_size])


def _shape_fault(event: BlockStored) -> str | None:
    """Say why an event's tokens cannot belong to its hashes, if they cannot."""
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
