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


class RankModel:
    """What one rank holds. `windows` maps a group to its window in tokens, None if it has none."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[BlockHash, Owner]] = Counter()
        self.places: dict[BlockHash, Place] = {}
        self.waiting: dict[BlockHash, Waiting] = {}
        self.sizes: dict[int, int] = {}
        self.windows: dict[int, int | None] = {}
        self.unit = 0

    # Events

    def store(
        self, event: BlockStored, prompt: Prompt, start: int, owner: Owner, lookahead: int
    ) -> None:
        """Apply a store of a prompt's blocks from number `start` on; parent None is the start."""
        parent, size = event.parent_block_hash, event.block_size
        self._learn(event, owner)
        if size % self.unit:
            return
        scale = size // self.unit
        stop = start + len(event.token_ids) // size
        units = prompt.contents(self.unit, lookahead)[start * scale : stop * scale]
        namespace = Namespace(self.unit, prompt.lora, lookahead)
        if parent in self.places and self.places[parent].namespace != namespace:
            return
        offloaded = event.extra_keys is None and owner[0] != "GPU"
        if len(event.block_hashes) < stop - start or offloaded:
            self.copies.update((block_hash, owner) for block_hash in event.block_hashes)
            self._settle()
            return
        for i, block_hash in enumerate(event.block_hashes):
            contents = units[i * scale : (i + 1) * scale]
            self.copies[block_hash, owner] += 1
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
            self.sizes[group] = max(self.sizes.get(group, 0), event.block_size)
            alone = len(self.sizes) == 1
            self.unit = self.sizes[group] if alone else gcd(self.unit, event.block_size)
        if before and self.unit != before:
            self.clear()

    def locate(self, block_hash: BlockHash, owner: Owner) -> None:
        """Apply a store that names no tokens."""
        self.copies[block_hash, owner] += 1

    def remove(self, block_hash: BlockHash, owner: Owner, left: int | None) -> None:
        before = self.copies[block_hash, owner]
        if before:
            self.copies[block_hash, owner] = before - 1 if left is None else left
        self._forget_gone()

    def clear(self) -> None:
        self.copies.clear()
        self._forget_gone()

    def clear_told(self) -> None:
        """Apply AllBlocksCleared: vLLM's connector keeps what it holds."""
        self.copies = Counter(
            {key: count for key, count in self.copies.items() if key[1][0] in ("CPU", "STORAGE")}
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
                    for key in [key for key in self.copies if key[0] == block_hash]:
                        del self.copies[key]
                self._settle()
                return

    def _forget_gone(self) -> None:
        self.copies = +self.copies
        alive = {block_hash for block_hash, _ in self.copies}
        self.places = {h: place for h, place in self.places.items() if h in alive}
        self.waiting = {h: waits for h, waits in self.waiting.items() if h in alive}

    # Answers

    @property
    def held(self) -> set[BlockHash]:
        """Labels that have no place yet."""
        return {block_hash for block_hash, _ in self.copies if block_hash not in self.places}

    def resident(self) -> dict[tuple[BlockHash, Owner], tuple[int, int]]:
        """Copies and depth of each resident (hash, (medium, group))."""
        return {
            (h, owner): (count, len(self.places[h].prefix) - 1)
            for (h, owner), count in self.copies.items()
            if h in self.places and count
        }

    def size(self) -> int:
        return len({(h, group) for h, (_, group) in self.resident()})

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
        present = {
            group: {
                (i + 1) * self.unit: self._media_of(p, group, media) for i, p in enumerate(places)
            }
            for group in self.sizes
        }
        on_gpu = self._longest(present, lambda stop, on: "GPU" in on)
        hit = max(
            on_gpu, self._longest(present, lambda s, on: ("GPU" if s <= on_gpu else "CPU") in on)
        )
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

    def _media_of(self, place: Place, group: int, media: set[str] | None) -> set[str]:
        return {
            medium
            for (h, (medium, its_group)), count in self.copies.items()
            if count and its_group == group and (media is None or medium in media)
            if self.places.get(h) == place
        }
