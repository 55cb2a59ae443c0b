"""What an index must answer, said the slow and obvious way: one dictionary for each rank.

No tree, no runs, no prefix keys: a resident block is its namespace and the tuple of all contents
from the start of the prompt, and a prompt is matched by looking up its prefixes one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import gcd, lcm
from typing import Any, NamedTuple

from kvindex.wire import BlockHash, BlockStored

Content = tuple[Any, ...]
Owner = tuple[str, int]  # medium, group


class Namespace(NamedTuple):
    unit: int
    lora: str | None
    lookahead: int


class Prompt(NamedTuple):
    tokens: tuple[int, ...]
    lora: str | None = None
    salt: str | None = None
    image: str | None = None  # an extra key of the first block

    def contents(self, size: int, lookahead: int) -> list[Content]:
        """What identifies each whole block of the prompt, in order."""
        count = max(0, len(self.tokens) - lookahead) // size
        extras = frozenset({("salt", self.salt), ("image", self.image)})
        return [
            (self.tokens[i * size : (i + 1) * size + lookahead], extras if i == 0 else None)
            for i in range(count)
        ]

    def prefix(self, stop: int, lookahead: int) -> Content:
        """What a label of everything up to a token stands for."""
        return (self.lora, self.salt, self.image, lookahead, self.tokens[: stop + lookahead])


class Place(NamedTuple):
    namespace: Namespace
    prefix: tuple[Content, ...]  # unit by unit


class Waiting(NamedTuple):
    parent: BlockHash
    namespace: Namespace
    content: Content


class Label(NamedTuple):
    """What an engine names; off the device, it ends a chunk of so many tokens (0: a block)."""

    block_hash: BlockHash
    owner: Owner
    chunk: int


class RankModel:
    """What one rank holds. `windows` maps a group to its window in tokens, None if it has none."""

    def __init__(self, offload_chunk: int = 0) -> None:
        self.offload_chunk = offload_chunk
        self.early: list[tuple[str, tuple[Any, ...]]] = []  # before the device showed a size
        self.copies: Counter[Label] = Counter()
        self.places: dict[BlockHash, Place] = {}
        self.waiting: dict[BlockHash, Waiting] = {}
        self.sizes: dict[int, int] = {}
        self.sizes_off_device: set[int] = set()
        self.windows: dict[int, int | None] = {}
        self.unit = 0

    # Events

    def apply(self, what: str, *arguments: Any) -> None:
        """Apply an event by its method's name.

        When the first block on the device shows its size, or one off the device changes the unit
        before that, everything before it happens again, now that the size is known.
        """
        if what == "store" and not self.device_size_known:
            unit = self.unit
            self._learn(arguments[0], arguments[-1])
            if self.device_size_known or self.unit != unit:
                self.clear()
                for before, its_arguments in self.early:
                    getattr(self, before)(*its_arguments)
        if not self.device_size_known:
            self.early.append((what, arguments))
        getattr(self, what)(*arguments)

    @property
    def device_size_known(self) -> bool:
        return bool(self.sizes.keys() - self.sizes_off_device)

    def _chunk_of(self, event: BlockStored, owner: Owner) -> int:
        medium, group = owner
        if medium == "GPU":
            return 0
        if not event.block_size:
            return self.offload_chunk
        known = group in self.sizes and group not in self.sizes_off_device
        return 0 if known and event.block_size <= self.sizes[group] else event.block_size

    def store(
        self, event: BlockStored, prompt: Prompt, start: int, lookahead: int, owner: Owner
    ) -> None:
        """Apply a store of a prompt's blocks from number `start` on; parent None is the start."""
        parent, size = event.parent_block_hash, event.block_size
        self._learn(event, owner)
        if size % self.unit:
            return
        chunk = self._chunk_of(event, owner)
        scale = size // self.unit
        stop = start + len(event.token_ids) // size
        units = prompt.contents(self.unit, lookahead)[start * scale : stop * scale]
        namespace = Namespace(self.unit, prompt.lora, lookahead)
        if parent in self.places and self.places[parent].namespace != namespace:
            return
        offloaded = event.extra_keys is None and owner[0] != "GPU"
        if len(event.block_hashes) < stop - start or offloaded:
            self.copies.update(Label(h, owner, chunk) for h in event.block_hashes)
            self._settle()
            return
        for i, block_hash in enumerate(event.block_hashes):
            contents = units[i * scale : (i + 1) * scale]
            self.copies[Label(block_hash, owner, chunk)] += 1
            if block_hash not in self.places:
                if parent is None:
                    self.places[block_hash] = Place(namespace, tuple(contents))
                elif parent in self.places:
                    prefix = (*self.places[parent].prefix, *contents)
                    self.places[block_hash] = Place(namespace, prefix)
                elif scale == 1:
                    self.waiting[block_hash] = Waiting(parent, namespace, contents[0])
            parent = block_hash
        self._settle()

    def _learn(self, event: BlockStored, owner: Owner) -> None:
        medium, group = owner
        before = self.unit
        self.windows[group] = event.kv_cache_spec_sliding_window
        if group not in self.sizes or medium == "GPU":
            if group in self.sizes_off_device:
                del self.sizes[group]
            self.sizes[group] = max(self.sizes.get(group, 0), event.block_size)
            self.sizes_off_device -= {group}
            self.sizes_off_device |= {group} if medium != "GPU" else set()
            alone = len(self.sizes) == 1
            self.unit = self.sizes[group] if alone else gcd(self.unit, event.block_size)
        if before and self.unit != before:
            self.clear()

    def locate(self, event: BlockStored, owner: Owner) -> None:
        """Apply a store that names no tokens."""
        (block_hash,) = event.block_hashes
        self.copies[Label(block_hash, owner, self._chunk_of(event, owner))] += 1

    def remove(self, block_hash: BlockHash, left: int | None, owner: Owner) -> None:
        """Drop a copy of a block or chunk; one of each, if both have the label and one is left."""
        of = [label for label in self.copies if label[:2] == (block_hash, owner)]
        several = len(of) > 1 and block_hash in self.places and left != 0
        for label in of:
            self.copies[label] = self.copies[label] - 1 if left is None or several else left
        self._forget_gone()

    def clear(self) -> None:
        self.copies.clear()
        self._forget_gone()

    def clear_told(self, _: Owner) -> None:
        """Apply AllBlocksCleared: vLLM's connector keeps what it holds."""
        self.copies = Counter(
            {key: n for key, n in self.copies.items() if key.owner[0] in ("CPU", "STORAGE")}
        )
        self._forget_gone()

    def _settle(self) -> None:
        """Place what waits for a block that has a place, until nothing changes."""
        for block_hash, (parent, namespace, content) in list(self.waiting.items()):
            if block_hash in self.places:
                del self.waiting[block_hash]
            elif parent in self.places:
                place = self.places[parent]
                del self.waiting[block_hash]
                if place.namespace == namespace:
                    self.places[block_hash] = Place(namespace, (*place.prefix, content))
                else:
                    for key in [key for key in self.copies if key.block_hash == block_hash]:
                        del self.copies[key]
                self._settle()
                return

    def _forget_gone(self) -> None:
        self.copies = +self.copies
        alive = {label.block_hash for label in self.copies}
        self.places = {h: place for h, place in self.places.items() if h in alive}
        self.waiting = {h: waits for h, waits in self.waiting.items() if h in alive}

    # Answers

    @property
    def held(self) -> set[BlockHash]:
        """Labels that have no place yet."""
        return {h for h, _, _ in self.copies if h not in self.places}

    def resident(self) -> list[tuple[BlockHash, Owner, int, int]]:
        """Hash, place, copies and depth of each resident block and chunk."""
        return [
            (h, owner, count, len(self.places[h].prefix) - 1)
            for (h, owner, _), count in self.copies.items()
            if h in self.places and count
        ]

    def size(self) -> int:
        return len({(h, group) for h, (_, group), *_ in self.resident()})

    def match(self, prompt: Prompt, media: set[str] | None = None) -> tuple[int, dict[str, int]]:
        """Tokens that the engine would find cached, and the blocks of them on each medium."""
        if not self.sizes:
            return 0, {}
        answers = [self._match_one_way(prompt, media, lookahead) for lookahead in (0, 1)]
        return max(answers, key=lambda answer: answer[0])

    def _match_one_way(
        self, prompt: Prompt, media: set[str] | None, lookahead: int
    ) -> tuple[int, dict[str, int]]:
        """First what the GPU serves; then how far the CPU goes on from there."""
        namespace = Namespace(self.unit, prompt.lora, lookahead)
        contents = prompt.contents(self.unit, lookahead)
        places = [Place(namespace, tuple(contents[: i + 1])) for i in range(len(contents))]
        present = {group: self._present(places, group, media) for group in self.sizes}
        on_gpu = self._longest(present, lambda stop, on: "GPU" in on)
        hit = max(
            on_gpu, self._longest(present, lambda s, on: ("GPU" if s <= on_gpu else "CPU") in on)
        )
        if self._units_in(self.offload_chunk) > 1 and hit - on_gpu < self.offload_chunk:
            hit = on_gpu
        if not hit:
            return 0, {}
        main = min(present, key=lambda group: (self.windows[group] is not None, group))
        stops = range(self.sizes[main], hit + 1, self.sizes[main])
        return hit, dict(Counter(medium for stop in stops for medium in present[main][stop]))

    def _longest(
        self, present: dict[int, dict[int, set[str]]], counts: Callable[[int, set[str]], bool]
    ) -> int:
        """Try every cut from the longest on."""
        step = lcm(*self.sizes.values())
        last = max(present[min(present)], default=0)
        for hit in range(last - last % step, 0, -step):
            if all(self._fits(group, hit, present[group], counts) for group in present):
                return hit
        return 0

    def _fits(
        self,
        group: int,
        hit: int,
        present: dict[int, set[str]],
        counts: Callable[[int, set[str]], bool],
    ) -> bool:
        size, window = self.sizes[group], self.windows[group]
        start = 0 if window is None else max(0, hit - -(-(window - 1) // size) * size)
        return all(counts(stop, present[stop]) for stop in range(start + size, hit + 1, size))

    def _present(
        self, places: list[Place], group: int, media: set[str] | None
    ) -> dict[int, set[str]]:
        """The media of each unit of a prompt, by the token that the unit ends before."""
        present: dict[int, set[str]] = {(i + 1) * self.unit: set() for i in range(len(places))}
        kinds = {(owner, chunk) for _, owner, chunk in self.copies if owner[1] == group}
        for (medium, _), chunk in kinds:
            if media is None or medium in media:
                for number in self._counted(places, (medium, group), chunk):
                    present[(number + 1) * self.unit].add(medium)
        return present

    def _counted(self, places: list[Place], owner: Owner, chunk: int) -> set[int]:
        """The units that labels of one kind stand for: whole chunks, up to each label's unit."""
        named = {
            places.index(self.places[label.block_hash])
            for label, count in self.copies.items()
            if count and label[1:] == (owner, chunk)
            if self.places.get(label.block_hash) in places
        }
        span = self._units_in(chunk)
        covered = {end - back for end in named for back in range(span) if end >= back}
        whole = 1 if owner[0] == "GPU" else self._units_in(self.offload_chunk)
        return {n for n in covered if {n - n % whole + i for i in range(whole)} <= covered}

    def _units_in(self, tokens: int) -> int:
        return tokens // self.unit if tokens and tokens % self.unit == 0 else 1
