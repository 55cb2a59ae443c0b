"""What an index must answer, said the slow and obvious way: one dictionary for each rank.

No tree, no runs, no prefix keys: a resident block is its namespace and the tuple of all contents
from the start of the prompt, and a prompt is matched by looking up its prefixes one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvindex.wire import BlockHash, BlockStored

Content = tuple[Any, ...]
Owner = tuple[str, int]  # medium, group


class Namespace(NamedTuple):
    block_size: int
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


class Place(NamedTuple):
    namespace: Namespace
    prefix: tuple[Content, ...]


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
        self.reports_full = False

    # Events

    def store(
        self,
        event: BlockStored,
        contents: Sequence[Content],
        owner: Owner,
        *,
        namespace: Namespace,
    ) -> None:
        """Apply a store whose blocks have these contents; parent None is the start."""
        hashes, parent = event.block_hashes, event.parent_block_hash
        group = owner[1]
        self.windows[group] = event.kv_cache_spec_sliding_window
        if event.block_size < self.sizes.get(group, 0):
            return
        self.sizes[group] = event.block_size
        if parent is None and self._told_again(hashes, owner):
            return
        if parent in self.places and self.places[parent].namespace != namespace:
            return
        for block_hash, content in zip(hashes, contents, strict=True):
            self.copies[block_hash, owner] += 1
            if block_hash not in self.places:
                if parent is None:
                    self.places[block_hash] = Place(namespace, (content,))
                else:
                    self.waiting[block_hash] = Waiting(parent, namespace, content)
            parent = block_hash
        self._settle()

    def locate(self, block_hash: BlockHash, owner: Owner) -> None:
        """Apply a store that names no tokens."""
        self.copies[block_hash, owner] += 1

    def remove(self, block_hash: BlockHash, owner: Owner) -> None:
        if self.copies[block_hash, owner] > 0:
            self.copies[block_hash, owner] -= 1
        self._forget_gone()

    def clear(self) -> None:
        self.copies.clear()
        self._forget_gone()
        self.reports_full = False

    def _told_again(self, hashes: Sequence[BlockHash], owner: Owner) -> bool:
        """vLLM's report mode "full" repeats what is counted; one first block may be a copy."""
        if not all(h in self.places and self.copies[h, owner] for h in hashes):
            return False
        self.reports_full |= len(hashes) > 1
        return self.reports_full

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
        answers = [self._match_one_way(prompt, media, lookahead) for lookahead in (0, 1)]
        return max(answers, key=lambda answer: answer[0])

    def _match_one_way(
        self, prompt: Prompt, media: set[str] | None, lookahead: int
    ) -> tuple[int, dict[str, int]]:
        present: dict[int, list[set[str]]] = {}
        for group, size in self.sizes.items():
            namespace = Namespace(size, prompt.lora, lookahead)
            contents = prompt.contents(size, lookahead)
            places = [Place(namespace, tuple(contents[: i + 1])) for i in range(len(contents))]
            present[group] = [self._media_of(place, group, media) for place in places]
        for hit in range(len(prompt.tokens), 0, -1):
            if present and all(self._fits(group, hit, present[group]) for group in present):
                main = min(present, key=lambda group: (self.windows[group] is not None, group))
                found = Counter(m for on in present[main][: hit // self.sizes[main]] for m in on)
                return hit, dict(found)
        return 0, {}

    def _fits(self, group: int, hit: int, present: list[set[str]]) -> bool:
        size, window = self.sizes[group], self.windows[group]
        if hit % size or hit // size > len(present):
            return False
        stop = hit // size
        start = 0 if window is None else max(0, stop - -(-(window - 1) // size))
        return all(present[start:stop])

    def _media_of(self, place: Place, group: int, media: set[str] | None) -> set[str]:
        return {
            medium
            for (h, (medium, its_group)), count in self.copies.items()
            if count and its_group == group and (media is None or medium in media)
            if self.places.get(h) == place
        }
