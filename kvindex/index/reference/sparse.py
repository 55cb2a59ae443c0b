"""Blocks of sparse events: which of them the labels name, since some are left out, unnamed."""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.index.keys import Namespace
from kvindex.index.reference.blocks import Block, Place
from kvindex.index.reference.groups import RankGroups
from kvindex.index.reference.keys import Salts, stored_namespace
from kvindex.index.reference.placing import Chain, Placing
from kvindex.index.reference.proofs import Proofs, Step, proven_places, step_key
from kvindex.wire import BlockHash, BlockStored
from kvindex.wire.quirks import fold_hash

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
        """Store blocks of a sparse event (vLLM's windows, Mamba): it leaves out some, unnamed.

        A label's place is known if a whole event has named it, in whichever group. Of a window, the
        engine keeps tails: blocks in a row, up to a place where a hit may end. Such a place has a
        label from a whole event where other groups have larger blocks. So the labels without a
        known place lie in a row before the next label with one.
        """
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
        """Store blocks where the engine's hash chain has their labels; False if that is unsure.

        Blocks that a request computes again look like announcements of report mode "full": there
        only whole events count.
        """
        unit = self._groups.unit
        scale = event.block_size // unit
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
        chain = Chain(namespace, hashes, contents, scale, place, salted)
        self._place_sparsely(parent, chain, [len(gap) + i * scale for i in places])
        return True

    def _place_sparsely(self, parent: Block | None, chain: Chain, starts: Sequence[int]) -> None:
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
        """Return the places of so many blocks in a row before a known one, or none if unsure.

        Blocks are sure between two places where a hit may end, if the known one is the first that
        ends a tail: every other such place since `before`, as far as the event reaches, has a label
        too, and so would have been named.
        """
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
