"""The index itself: ranks by name, one lock, and the questions that it answers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from kvindex.index.api import BaseIndex
from kvindex.index.match import Match, PlainContents, Trusts
from kvindex.index.questions import Question, check_block_size
from kvindex.index.reference.blocks import Budget
from kvindex.index.reference.keys import KeyMaker, PromptKeys
from kvindex.index.reference.matching import HeldSpans, held_blocks, no_match, rank_match
from kvindex.index.reference.rank_blocks import RankBlocks
from kvindex.index.tokens import Lora, Namespace, Prompt, TokenIds
from kvindex.index.views import Holding, ResidentBlock, largest_loras, shown_loras, with_advice
from kvindex.wire import BlockRemoved, CacheSettings, EventBatch, decode_batch
from kvindex.wire.backend import warn_of_fallback
from kvindex.wire.decode import copy_counts
from kvindex.wire.errors import InvariantError, UnknownRankError
from kvindex.wire.forks import PARENTS, disown_in_children
from kvindex.wire.rank import Rank

_OF_ARGUMENTS = (UnknownRankError, TypeError, ValueError, OverflowError)


class _Changes:
    """Surrounds each change of an index: one that is cut short leaves it unusable."""

    # A Ctrl-C in the middle leaves half of a change, from which no answer would be true.

    def __init__(self) -> None:
        self._cut_short = ""

    def check(self) -> None:
        """Raise InvariantError once a change was cut short."""
        if self._cut_short:
            raise InvariantError(f"the index is half changed: {self._cut_short}; make a new one")

    def __enter__(self) -> None:
        self.check()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, _OF_ARGUMENTS):
            self._cut_short = f"{kind.__name__} was raised in the middle of a change"


class Index(BaseIndex):
    """The index as a readable specification; see `BaseIndex`."""

    backend = "python"

    def _start(self, max_blocks: int | None, max_orphans: int) -> None:
        warn_of_fallback()
        self._keys = KeyMaker(self._seed)
        self._budget = Budget(max_blocks, self._max_blocks_per_rank)
        self._max_orphans = max_orphans
        self._ranks: dict[Rank, RankBlocks] = {}
        self._order: tuple[Rank, ...] = ()
        self._lock = threading.RLock()
        self._changes = _Changes()
        disown_in_children(self, Index._disown)

    def _disown(self) -> None:
        """In a forked child: another thread of the parent may hold the lock."""
        self._lock = PARENTS

    # Ranks -----------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return self._order

    def add(self, rank: Rank) -> None:
        with self._lock, self._changes:
            self._rank(rank)

    def remove(self, rank: Rank) -> None:
        with self._lock, self._changes:
            if rank in self._ranks:
                self._ranks.pop(rank).clear()
                self._order = tuple(sorted(self._ranks))

    def rename(self, names: Mapping[Rank, Rank]) -> None:
        with self._lock, self._changes:
            # All are taken before any is placed: two ranks may change names with each other.
            moved = {new: self._ranks.pop(old) for old, new in names.items() if old in self._ranks}
            for rank in moved.keys() & self._ranks:
                self._ranks.pop(rank).clear()
            self._ranks.update(moved)
            self._order = tuple(sorted(self._ranks))

    def configure(self, rank: Rank, settings: CacheSettings) -> None:
        with self._lock, self._changes:
            self._rank(rank).groups.configure(settings)

    def __len__(self) -> int:
        return self._budget.used

    # Events ----------------------------------------------------------------------------------

    def apply(self, rank: Rank, batch: EventBatch | bytes | bytearray | memoryview) -> None:
        if not isinstance(batch, EventBatch):
            batch = decode_batch(batch)
        else:  # a program made it, and nothing has checked it yet
            for event in batch.events:
                if isinstance(event, BlockRemoved):
                    copy_counts(event.remaining_copy_counts, len(event.block_hashes))
        with self._lock, self._changes:
            self._rank(rank).apply(batch)

    # Queries ---------------------------------------------------------------------------------

    def _answer(self, token_ids: TokenIds, question: Question, trust: Trusts | None) -> Match:
        # Within one lock: the sizes are those of the time of the answer.
        with self._lock:
            match, _ = self._find(token_ids, question, trust)
            if not match:
                units = [blocks.groups.unit for blocks in self._wanted(question.ranks).values()]
                check_block_size(question.block_size, units)
            return match

    def _look(
        self, token_ids: TokenIds, question: Question, trust: Trusts | None
    ) -> tuple[Match, list[Holding]]:
        return self._find(token_ids, question, trust, whole=True)

    def _find(
        self, token_ids: TokenIds, question: Question, trust: Trusts | None, *, whole: bool = False
    ) -> tuple[Match, list[Holding]]:
        """Return an answer, and the blocks that it looked at: all of the prompt's if `whole`."""
        prompt = Prompt(token_ids, question.recomputed, text=self._stored_text)
        keys: dict[Namespace, PromptKeys] = {}
        matches, holdings = [], []
        with self._lock:
            self._changes.check()
            wanted = self._wanted(question.ranks)
            for rank, blocks in wanted.items():
                held: HeldSpans = {}
                for space in blocks.blocks.namespaces():
                    size, lora, lookahead = space
                    if lora != question.lora or question.block_size not in (None, size):
                        continue
                    if space not in keys:
                        keys[space] = PromptKeys(self._keys, space, prompt, question.extras)
                    held[space] = held_blocks(blocks, keys[space], whole=whole)
                    holdings += [
                        Holding(rank, place.group_idx, place.medium, size, lookahead, spans)
                        for place, spans in held[space].items()
                    ]
                matches.append(rank_match(rank, blocks, held, question.media, prompt.length))
            nothing = {rank: no_match(rank, blocks) for rank, blocks in self._ranks.items()}
        return Match(PlainContents(matches, nothing), wanted.keys(), trust), holdings

    def _block_sizes(self, lora: Lora) -> Collection[int]:
        with self._lock:
            spaces = [s for blocks in self._ranks.values() for s in blocks.blocks.namespaces()]
            return {space.block_size for space in spaces if space.lora == lora}

    def _stored_text(self) -> bool:
        with self._lock:
            return any(blocks.counters["stored_text"] for blocks in self._ranks.values())

    # Insight ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        with self._lock:
            self._changes.check()
            ranks = {str(rank): _rank_statistics(self._ranks[rank]) for rank in self._order}
            ranks_blocks = [blocks.blocks for blocks in self._ranks.values()]
            unique = len({key for blocks in ranks_blocks for key in blocks.block_keys()})
            return {
                "blocks": self._budget.used,
                "orphans": sum(rank["orphans"] for rank in ranks.values()),
                "unique_blocks": unique,
                "runs": unique,
                "ranks": ranks,
            }

    def check(self) -> None:
        with self._lock:
            self._changes.check()
            for blocks in self._ranks.values():
                blocks.blocks.check()
            size = sum(map(len, self._ranks.values()))
            if size != self._budget.used:
                raise InvariantError(f"{size} blocks resident, counted {self._budget.used}")

    # Private ---------------------------------------------------------------------------------

    def _rank(self, rank: Rank) -> RankBlocks:
        """Return a rank's blocks; the rank becomes known."""
        blocks = self._ranks.get(rank)
        if blocks is None:
            rank = Rank(*rank)
            blocks = RankBlocks(self._keys, self._budget, self._max_orphans)
            self._ranks[rank] = blocks
            self._order = tuple(sorted(self._ranks))
        return blocks

    def _known(self, rank: Rank) -> RankBlocks:
        self._changes.check()
        blocks = self._ranks.get(rank)
        if blocks is None:
            raise UnknownRankError(rank, self._ranks)
        return blocks

    def _wanted(self, ranks: Iterable[Rank] | None) -> dict[Rank, RankBlocks]:
        return {rank: self._known(rank) for rank in (self._ranks if ranks is None else ranks)}

    def _view_size(self, rank: Rank) -> int:
        with self._lock:
            return len(self._known(rank))

    def _view_clear(self, rank: Rank) -> None:
        with self._lock, self._changes:
            self._known(rank).clear()

    def _view_statistics(self, rank: Rank) -> dict[str, Any]:
        with self._lock:
            return _rank_statistics(self._known(rank))

    def _view_origins(self, rank: Rank) -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
        with self._lock:
            blocks = self._known(rank)
            return largest_loras(blocks.blocks.by_lora()), list(blocks.salts)

    def _view_walk(self, rank: Rank) -> Iterator[ResidentBlock]:
        # A copy: events may be applied while the caller iterates.
        with self._lock:
            return iter(list(self._known(rank).blocks.walk()))


def _rank_statistics(blocks: RankBlocks) -> dict[str, Any]:
    statistics = {
        "blocks": len(blocks),
        "orphans": len(blocks.orphans),
        "orphans_dropped": blocks.orphans.dropped,
        "ambiguous": blocks.blocks.ambiguous,
        "duplicates": blocks.blocks.duplicates,
        "salted": blocks.blocks.salted(),
        "loras": shown_loras(blocks.blocks.by_lora()),
        "media": blocks.by_medium(),
        **{name: blocks.counters[name] for name in sorted(blocks.counters)},
        "ignored": dict(blocks.ignored),
        "skipped": dict(blocks.skipped),
        "groups": {
            str(group_idx): {
                "kind": group.spec.kind,
                "known": group.known,
                "sliding_window": group.spec.sliding_window,
                "attention_chunk_size": group.spec.attention_chunk_size,
                "block_size": group.block_size,
            }
            for group_idx, group in sorted(blocks.groups.known.items())
        },
    }
    return with_advice(statistics)
