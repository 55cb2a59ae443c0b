"""The index in Python: the readable specification, and the fallback without the native module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvindex.index.api import BaseIndex, check_limits, rank_limit
from kvindex.index.explaining import Asked, Holding
from kvindex.index.guard import Guard, WholeHold
from kvindex.index.keys import ExtraKeys, KeyMaker, Lora, Namespace, PromptKeys
from kvindex.index.labels import Budget, ResidentBlock
from kvindex.index.match import FoundMatches, Match, RankMatch, Trusts
from kvindex.index.matching import Held, held_blocks, no_match, rank_matches
from kvindex.index.prefix_walk import PrefixWalk
from kvindex.index.prefixes import Prefixes, walk_limits
from kvindex.index.questions import (
    ambiguous_extras,
    check_block_size,
    check_options,
    folded_media,
    packed_extras,
    wanted_ranks,
)
from kvindex.index.rank_blocks import RankBlocks
from kvindex.index.rank_image import read_image, write_image
from kvindex.index.rank_statistics import largest_loras, shown_loras, with_advice
from kvindex.index.tokens import Prompt, TokenIds
from kvindex.index.tree import RadixTree
from kvindex.wire import CacheSettings, EventBatch, decode_batch
from kvindex.wire.backend import warn_of_fallback
from kvindex.wire.errors import InvariantError, UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

__all__ = ["Index"]


class Index(BaseIndex):
    """The index as a readable specification; see `BaseIndex`."""

    backend = "python"

    def __init__(
        self,
        *,
        seed: int | None = None,
        max_blocks: int | None = None,
        max_blocks_per_rank: int | None = None,
        max_orphans: int = 16_384,
    ) -> None:
        check_limits(seed, max_blocks, max_blocks_per_rank, max_orphans)
        self._keys = KeyMaker(seed)
        warn_of_fallback()
        self._tree = RadixTree(self._keys)
        self._max_blocks_per_rank = rank_limit(max_blocks, max_blocks_per_rank)
        self._budget = Budget(max_blocks, self._max_blocks_per_rank)
        self._max_orphans = max_orphans
        self._ranks: dict[Rank, RankBlocks] = {}
        self._order: tuple[Rank, ...] = ()
        self._guard = Guard()

    @property
    def seed(self) -> int:
        return self._keys.seed

    # Ranks -----------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return self._guard.ask(lambda: self._order)

    def add(self, rank: Rank) -> None:
        self._guard.change(lambda: self._rank(rank))

    def remove(self, rank: Rank) -> None:
        with self._guard.settled(lambda: self._ranks.get(rank)) as blocks:
            if blocks is not None:  # the rank keeps its name until all its blocks are gone
                self._guard.change_part(lambda: blocks, RankBlocks.clear)
                self._guard.change(lambda: self._forget(rank))

    def rename(self, names: Mapping[Rank, Rank]) -> None:
        def rename() -> None:
            moved = {new: self._ranks.pop(old) for old, new in names.items() if old in self._ranks}
            for rank, blocks in moved.items():
                replaced = self._ranks.pop(rank, None)
                if replaced is not None:
                    replaced.clear(WholeHold())
                blocks.rename(rank)
                self._ranks[rank] = blocks
            self._renew_order()

        taken = [new for old, new in names.items() if old in self._ranks and new not in names]
        for rank in taken:
            self.remove(rank)
        with self._guard.settled(lambda: self._first_paused(taken)):
            self._guard.change(rename)

    def configure(self, rank: Rank, settings: CacheSettings) -> None:
        self._guard.change_part(
            lambda: self._rank(rank), lambda blocks, _: blocks.configure(settings)
        )

    def __len__(self) -> int:
        return self._guard.ask(lambda: self._budget.used)

    # Events ----------------------------------------------------------------------------------

    def apply(self, rank: Rank, batch: EventBatch | bytes | bytearray | memoryview) -> None:
        decoded = batch if isinstance(batch, EventBatch) else decode_batch(batch)
        self._guard.change_part(
            lambda: self._rank(rank), lambda blocks, hold: blocks.apply(decoded, hold)
        )

    # Queries ---------------------------------------------------------------------------------

    def match(
        self,
        token_ids: TokenIds,
        *,
        lora: Lora = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        media: Iterable[str] | str | None = None,
        ranks: Iterable[RankName] | str | None = None,
        block_size: int | None = None,
        recomputed: int = 0,
        trust: Trusts | None = None,
    ) -> Match:
        wanted_media = folded_media(media)
        check_options(lora, salt, block_size, recomputed)
        prompt = Prompt(token_ids, recomputed, text=self._stored_text)

        def answer() -> Match:
            wanted = self._wanted(ranks)
            namespaces = self._namespaces(lora or None, block_size, extra_keys)
            extras = packed_extras(extra_keys, lora, salt)
            held: Held = {}
            for namespace in namespaces:
                keys = PromptKeys(self._keys, namespace, prompt, extras)
                may_skip = any(
                    blocks.groups.may_skip_holes(namespace.block_size) for blocks in wanted.values()
                )
                held[namespace] = held_blocks(self._tree, namespace, keys, wanted_media, may_skip)
            matches = list(rank_matches(held, wanted, prompt.length))
            units = [blocks.groups.unit for blocks in wanted.values()]
            nothing = self._nothing()
            if not any(found.tokens for found in matches):
                check_block_size(block_size, units)
            return Match(FoundMatches(matches, nothing), wanted.keys(), trust)

        return self._guard.ask(answer)

    def _look(self, token_ids: TokenIds, asked: Asked) -> tuple[Match, list[Holding]]:
        prompt = Prompt(token_ids)

        def look() -> tuple[Match, list[Holding]]:
            wanted = self._wanted(asked.ranks)
            held: Held = {}
            for namespace in self._namespaces(asked.lora, asked.block_size, None):
                keys = PromptKeys(self._keys, namespace, prompt, asked.extras)
                held[namespace] = held_blocks(self._tree, namespace, keys, None, True)
            holdings = [
                Holding(
                    owner.rank,
                    owner.group_idx,
                    owner.medium,
                    namespace.block_size,
                    namespace.lookahead,
                    spans,
                )
                for namespace, spans_of in held.items()
                for owner, spans in spans_of.items()
                if owner.rank in wanted
            ]
            counted = {
                namespace: {
                    owner: spans
                    for owner, spans in spans_of.items()
                    if asked.media is None or owner.medium in asked.media
                }
                for namespace, spans_of in held.items()
            }
            found = rank_matches(counted, wanted, prompt.length)
            matches = FoundMatches(found, self._nothing())
            return Match(matches, wanted.keys(), asked.trust), holdings

        return self._guard.ask(look)

    # Snapshots -------------------------------------------------------------------------------

    def _key_check(self) -> bytes:
        return self._keys.child(self._keys.root(Namespace(16, "lora", 1)), b"key check")

    def _dump(self, rank: Rank) -> bytes:
        with self._guard.settled(lambda: self._known(rank)) as blocks:
            image = self._guard.ask(blocks.image)
        return write_image(image)

    def _restore(self, rank: Rank, body: memoryview) -> None:
        image = read_image(body)

        def restore() -> None:
            before = self._ranks.get(rank)
            self._budget.check_room(image.resident(), 0 if before is None else len(before))
            if before is not None:
                before.clear(WholeHold())
                self._forget(rank)
            self._rank(rank).restore(image)

        with self._guard.settled(lambda: self._ranks.get(rank)):
            self._guard.change(restore)

    # Insight ---------------------------------------------------------------------------------

    def prefixes(
        self,
        max_nodes: int = 1000,
        *,
        min_blocks: int = 1,
        ranks: Iterable[RankName] | str | None = None,
    ) -> Prefixes:
        max_nodes, min_blocks = walk_limits(max_nodes, min_blocks)
        wanted = self._guard.ask(lambda: self._wanted(ranks))
        rows = {rank: row for row, rank in enumerate(sorted(wanted) if ranks is None else wanted)}
        walk = PrefixWalk(
            self._tree,
            rows,
            only_rows=ranks is not None,
            max_nodes=max_nodes,
            min_blocks=min_blocks,
        )
        return walk.run(self._guard.ask)

    def statistics(self) -> dict[str, Any]:
        def count() -> dict[str, Any]:
            ranks = {str(rank): _rank_statistics(b) for rank, b in sorted(self._ranks.items())}
            return {
                "blocks": self._budget.used,
                "orphans": sum(rank["orphans"] for rank in ranks.values()),
                "unique_blocks": self._tree.block_count,
                "runs": self._tree.run_count,
                "ranks": ranks,
            }

        return self._guard.ask(count)

    def check(self) -> None:
        def check() -> None:
            self._tree.check()
            size = 0
            for blocks in self._ranks.values():
                blocks.check()
                size += len(blocks)
            if size != self._budget.used:
                raise InvariantError(f"{size} blocks resident, counted {self._budget.used}")

        with self._guard.settled(lambda: self._first_paused(self._ranks)):
            self._guard.ask(check)

    # Private ---------------------------------------------------------------------------------

    def _first_paused(self, ranks: Iterable[Rank]) -> RankBlocks | None:
        """Return one of these ranks whose change is under way, if any is."""
        known = filter(None, map(self._ranks.get, ranks))
        return next(filter(self._guard.is_paused, known), None)

    def _rank(self, rank: Rank) -> RankBlocks:
        blocks = self._ranks.get(rank)
        if blocks is None:
            rank = Rank(*rank)
            blocks = RankBlocks(rank, self._tree, self._budget, self._max_orphans)
            self._ranks[rank] = blocks
            self._renew_order()
        return blocks

    def _forget(self, rank: Rank) -> None:
        self._ranks.pop(rank, None)
        self._renew_order()

    def _renew_order(self) -> None:
        self._order = tuple(sorted(self._ranks))

    def _known(self, rank: Rank) -> RankBlocks:
        blocks = self._ranks.get(rank)
        if blocks is None:
            raise UnknownRankError(rank, self._ranks)
        return blocks

    def _stored_text(self) -> bool:
        return any(blocks.counters["stored_text"] for blocks in list(self._ranks.values()))

    def _wanted(self, ranks: Iterable[RankName] | str | None) -> dict[Rank, RankBlocks]:
        if ranks is None:
            return dict(self._ranks)
        return {rank: self._known(rank) for rank in wanted_ranks(ranks, self._ranks)}

    def _namespaces(
        self, lora: Lora, block_size: int | None, extra_keys: ExtraKeys | None
    ) -> Sequence[Namespace]:
        found = [
            namespace
            for namespace in self._tree.namespaces(lora)
            if block_size is None or namespace.block_size == block_size
        ]
        sizes = {namespace.block_size for namespace in found}
        if extra_keys is not None and len(sizes) > 1:
            raise ambiguous_extras(sizes)
        return found

    def _nothing(self) -> dict[Rank, RankMatch]:
        return {rank: no_match(rank, blocks) for rank, blocks in self._ranks.items()}

    def _view_size(self, rank: Rank) -> int:
        return self._guard.ask(lambda: len(self._known(rank)))

    def _view_clear(self, rank: Rank) -> None:
        self._guard.change_part(lambda: self._known(rank), RankBlocks.clear)

    def _view_statistics(self, rank: Rank) -> dict[str, Any]:
        return self._guard.ask(lambda: _rank_statistics(self._known(rank)))

    def _view_origins(self, rank: Rank) -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
        def origins() -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
            blocks = self._known(rank)
            return largest_loras(blocks.labels.by_lora()), blocks.salts()

        return self._guard.ask(origins)

    def _view_walk(self, rank: Rank) -> Iterator[ResidentBlock]:
        with self._guard.settled(lambda: self._known(rank)) as blocks:
            return iter(self._guard.ask(lambda: list(blocks.labels.walk())))


def _rank_statistics(blocks: RankBlocks) -> dict[str, Any]:
    statistics = {
        "blocks": len(blocks),
        "orphans": len(blocks.orphans),
        "orphans_dropped": blocks.orphans.dropped,
        "ambiguous": blocks.labels.ambiguous,
        "duplicates": blocks.labels.duplicates,
        "salted": blocks.labels.salted(),
        "loras": shown_loras(blocks.labels.by_lora()),
        "media": blocks.by_medium(),
        **{name: blocks.counters[name] for name in sorted(blocks.counters)},
        "ignored": dict(blocks.ignored),
        "skipped": dict(blocks.skipped),
        "groups": {
            str(group_idx): {
                "kind": group.spec.kind,
                "told": group.told,
                "sliding_window": group.spec.sliding_window,
                "attention_chunk_size": group.spec.attention_chunk_size,
                "block_size": group.block_size,
            }
            for group_idx, group in sorted(blocks.groups.known().items())
        },
    }
    return with_advice(statistics)
