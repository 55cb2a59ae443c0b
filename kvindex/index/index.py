"""The index: events in, answers out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvindex.errors import ConfigurationError, InvariantError, UnknownRankError
from kvindex.index.keys import ExtraKeys, KeyMaker, Lora, Namespace, PromptKeys, pack_extra
from kvindex.index.labels import Budget, ResidentBlock
from kvindex.index.match import Match
from kvindex.index.matching import Held, held_blocks, rank_matches
from kvindex.index.rank_blocks import RankBlocks
from kvindex.index.tokens import Prompt, TokenIds
from kvindex.index.tree import RadixTree
from kvindex.rank import Rank
from kvindex.wire import EventBatch, GroupSpec, decode_batch, group_specs
from kvindex.wire.quirks import fold_medium

__all__ = ["Index", "TreeView"]


class Index:
    """Which rank holds which prefix, as their events tell it.

    Args:
        seed: seed of the prefix keys, 0 … 2**128 - 1; random when None.
        max_blocks: at most this many resident blocks over all ranks; what does not fit is left
            out and counted (`ignored`, "max_blocks"). None: no limit.
        max_orphans: at most this many blocks of a rank are held for want of their parent;
            beyond it the oldest are dropped and counted.

    Thread safety: every method may be called from any thread; one lock guards the whole index.

    Examples:
        >>> from kvindex import BlockStored, EventBatch, Index, Rank
        >>> index = Index()
        >>> rank = Rank(worker="vllm-0", dp_rank=0)
        >>> prompt = list(range(40))
        >>> stored = BlockStored(block_hashes=[11, 12], token_ids=prompt[:32], block_size=16)
        >>> index.apply(rank, EventBatch(ts=0.0, events=[stored]))
        >>> match = index.match(prompt)
        >>> match.best.rank == rank, match[rank].blocks, match[rank].tokens
        (True, 2, 32)
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        max_blocks: int | None = None,
        max_orphans: int = 16_384,
    ) -> None:
        for name, value in (("seed", seed), ("max_blocks", max_blocks)):
            if not isinstance(value, (int, type(None))):
                raise ConfigurationError(f"{name} must be an int or None, not {value!r}")
        if max_blocks is not None and max_blocks < 1:
            raise ConfigurationError(f"max_blocks must be at least 1 block, not {max_blocks}")
        if max_orphans < 0:
            raise ConfigurationError(f"max_orphans must be at least 0 blocks, not {max_orphans}")
        self._keys = KeyMaker(seed)
        self._tree = RadixTree(self._keys)
        self._budget = Budget(max_blocks)
        self._max_orphans = max_orphans
        self._ranks: dict[Rank, RankBlocks] = {}
        self._lock = threading.Lock()

    # Ranks -----------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The known ranks, sorted."""
        with self._lock:
            return tuple(sorted(self._ranks))

    def add(self, rank: Rank) -> None:
        """Make a rank known before its first event; nothing happens if it is known already."""
        with self._lock:
            self._rank(rank)

    def remove(self, rank: Rank) -> None:
        """Forget a rank and all that it holds; nothing happens if it is not known.

        Complexity: O(blocks of the rank).
        """
        with self._lock:
            blocks = self._ranks.pop(rank, None)
            if blocks is not None:
                blocks.clear()

    def rename(self, names: Mapping[Rank, Rank]) -> None:
        """Know ranks by other names, with all that they hold; several may change places.

        A rank that is not known is left out; one whose name is taken over is forgotten.

        Complexity: O(ranks).
        """
        with self._lock:
            moved = {new: self._ranks.pop(old) for old, new in names.items() if old in self._ranks}
            for rank, blocks in moved.items():
                replaced = self._ranks.pop(rank, None)
                if replaced is not None:
                    replaced.clear()
                blocks.rename(rank)
                self._ranks[rank] = blocks

    def describe_groups(self, rank: Rank, groups: Mapping[int, GroupSpec]) -> None:
        """Say what kinds of KV cache groups a hybrid model's rank has.

        vLLM tells this itself from 0.22 on; before that, without this call, every group counts as
        full attention, which may underestimate the hit but never overestimates it.

        Raises:
            ConfigurationError: a group index or a spec is not valid.
        """
        checked = group_specs(groups)
        with self._lock:
            self._rank(rank).configure(checked)

    def tree(self, rank: Rank) -> TreeView:
        """Return a live view of what one rank holds.

        Raises:
            UnknownRankError: the rank is not known (a KeyError).
        """
        with self._lock:
            self._known(rank)
        return TreeView(self, rank)

    def __len__(self) -> int:
        """Return the number of resident (rank, block) pairs."""
        with self._lock:
            return self._budget.used

    # Events ----------------------------------------------------------------------------------

    def apply(self, rank: Rank, batch: EventBatch | bytes | bytearray | memoryview) -> None:
        """Apply one batch of a rank's events; the rank given here counts, not the batch's.

        Args:
            rank: whose events these are; it becomes known if it was not.
            batch: an `EventBatch`, or the msgpack payload as an engine sent it.

        Raises:
            DecodeError: the payload is not an event batch; nothing of it was applied.

        Complexity: O(blocks), and O(tokens) for their keys.
        """
        decoded = batch if isinstance(batch, EventBatch) else decode_batch(batch)
        with self._lock:
            self._rank(rank).apply(decoded)

    # Queries ---------------------------------------------------------------------------------

    def match(
        self,
        token_ids: TokenIds,
        *,
        lora: Lora = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        media: Iterable[str] | str | None = None,
        ranks: Iterable[Rank] | None = None,
        block_size: int | None = None,
    ) -> Match:
        """Return how much of a prompt each rank holds, from its start.

        An engine never hits a whole prompt (the last token must be computed): to predict its own
        hit, ask with `token_ids[:-1]`.

        Args:
            token_ids: list or tuple of ints, `array`, or a contiguous buffer of 4- or 8-byte
                integers; plain bytes are native-endian 32-bit tokens.
            lora: LoRA adapter name (or numeric id, for engines that send no name).
            salt: cache salt of the request.
            extra_keys: for each block, what its identity covers besides tokens, in the engine's
                form (e.g. `[None, [("image-digest", 3)]]`); missing blocks have none.
            media: count only blocks on these media, e.g. "GPU"; any medium by default.
            ranks: answer for these ranks only; all by default.
            block_size: look at ranks with this block size only.

        Raises:
            TokenError: the tokens have a type, layout or range that cannot be read.
            UnknownRankError: one of `ranks` is not known.
            ConfigurationError: `media` is empty, or `extra_keys` were given while the index holds
                several block sizes and none was chosen.

        Complexity: O(matched blocks × block size + runs × owners).
        """
        prompt = Prompt(token_ids)
        wanted_media = _folded_media(media)
        _check_options(lora, salt, block_size)
        with self._lock:
            wanted = self._wanted(ranks)
            namespaces = self._namespaces(lora or None, block_size, extra_keys)
            extras = _packed_extras(extra_keys, lora, salt)
            window_only = frozenset(r for r, b in wanted.items() if b.groups.window_only)
            held: Held = {}
            for namespace in namespaces:
                keys = PromptKeys(self._keys, namespace, prompt, extras)
                held[namespace] = held_blocks(
                    self._tree, namespace, keys, wanted_media, window_only
                )
            return Match(rank_matches(held, wanted), wanted)

    def match_many(self, prompts: Iterable[TokenIds], **options: Any) -> list[Match]:
        """Return one `Match` for each prompt; options are those of `match`, for all of them.

        Raises: as `match`.
        """
        return [self.match(token_ids, **options) for token_ids in prompts]

    # Insight ---------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values.

        `blocks`, `orphans`: held now, over all ranks. `runs`, `unique_blocks`: size of the shared
        tree. `ranks`: for each `str(rank)` the blocks and orphans held now, its groups, and since
        the rank became known, in blocks: `stored`, `duplicates` (further physical copies),
        `reannounced`, `removed`, `removed_unknown`, `removed_orphans`, `orphaned`,
        `orphans_attached`, `orphans_dropped`, `unplaced`, `ambiguous`, …; `ignored` by reason;
        `skipped` events by tag; `cleared` events.
        """
        with self._lock:
            ranks = {str(rank): _rank_statistics(b) for rank, b in sorted(self._ranks.items())}
            return {
                "blocks": self._budget.used,
                "orphans": sum(rank["orphans"] for rank in ranks.values()),
                "unique_blocks": self._tree.block_count,
                "runs": self._tree.run_count,
                "ranks": ranks,
            }

    def check(self) -> None:
        """Assert every invariant of the index; for tests, O(everything).

        Raises:
            InvariantError: one does not hold; that is a bug in kvindex.
        """
        with self._lock:
            self._tree.check()
            size = 0
            for blocks in self._ranks.values():
                blocks.check()
                size += len(blocks)
            if size != self._budget.used:
                raise InvariantError(f"{size} blocks resident, counted {self._budget.used}")

    # Private ---------------------------------------------------------------------------------

    def _rank(self, rank: Rank) -> RankBlocks:
        blocks = self._ranks.get(rank)
        if blocks is None:
            rank = Rank(*rank)
            blocks = RankBlocks(rank, self._tree, self._budget, self._max_orphans)
            self._ranks[rank] = blocks
        return blocks

    def _known(self, rank: Rank) -> RankBlocks:
        blocks = self._ranks.get(rank)
        if blocks is None:
            raise UnknownRankError(rank, self._ranks)
        return blocks

    def _wanted(self, ranks: Iterable[Rank] | None) -> dict[Rank, RankBlocks]:
        if ranks is None:
            return dict(self._ranks)
        if isinstance(ranks, tuple) and ranks and not isinstance(ranks[0], tuple):
            raise ConfigurationError(f"ranks takes several ranks: give [{ranks!r}]")
        return {rank: self._known(rank) for rank in ranks}

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
            raise ConfigurationError(
                f"extra_keys are per block, and the index holds block sizes {sorted(sizes)}: "
                "say which with block_size="
            )
        return found

    def _use(self, rank: Rank) -> RankBlocks:
        """Return a view's blocks; the caller holds the lock."""
        return self._known(rank)


class TreeView:
    """A live view of what one rank holds.

    Thread safety: as the index.

    Raises:
        UnknownRankError: by every method once the rank was removed from the index.
    """

    __slots__ = ("_index", "rank")

    def __init__(self, index: Index, rank: Rank) -> None:
        self._index = index
        self.rank = rank

    def __len__(self) -> int:
        """Return the number of resident blocks of the rank, each counted once. O(1)."""
        with self._index._lock:
            return len(self._index._use(self.rank))

    def clear(self) -> None:
        """Drop everything the rank holds and what its events taught; it stays known.

        Kinds of groups told by `Index.describe_groups` stay. Complexity: O(blocks of the rank).
        """
        with self._index._lock:
            self._index._use(self.rank).clear()

    def statistics(self) -> dict[str, Any]:
        """Return the rank's part of `Index.statistics()["ranks"]`."""
        with self._index._lock:
            return _rank_statistics(self._index._use(self.rank))

    def walk(self) -> Iterator[ResidentBlock]:
        """Iterate over a snapshot of the resident blocks, once for each medium and group.

        Complexity: O(blocks of the rank).
        """
        with self._index._lock:
            return iter(list(self._index._use(self.rank).labels.walk()))


def _check_options(lora: object, salt: object, block_size: object) -> None:
    """Refuse what could match nothing, whatever is resident."""
    if not isinstance(lora, (str, int, type(None))) or isinstance(lora, bool):
        raise ConfigurationError(f"lora must be a name or a numeric id, not {lora!r}")
    if not isinstance(salt, (str, type(None))):
        raise ConfigurationError(f"salt must be a string, not {salt!r}")
    if block_size is not None and not (isinstance(block_size, int) and block_size > 0):
        raise ConfigurationError(f"block_size must be 1 token or more, not {block_size!r}")


def _folded_media(media: Iterable[str] | str | None) -> frozenset[str] | None:
    if media is None:
        return None
    names = [media] if isinstance(media, str) else list(media)
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"media must be names such as 'GPU', not {media!r}")
    folded = frozenset(map(fold_medium, names))
    if not folded:
        raise ConfigurationError("media is empty: name at least one medium, or leave it out")
    return folded


def _packed_extras(extra_keys: ExtraKeys | None, lora: Lora, salt: str | None) -> list[bytes]:
    if extra_keys is None and not salt:
        return []
    items = list(extra_keys or [None])
    return [
        pack_extra(item, lora=lora, salt=salt if position == 0 else None)
        for position, item in enumerate(items or [None])
    ]


def _rank_statistics(blocks: RankBlocks) -> dict[str, Any]:
    return {
        "blocks": len(blocks),
        "orphans": len(blocks.orphans),
        "orphans_dropped": blocks.orphans.dropped,
        "ambiguous": blocks.labels.ambiguous,
        "duplicates": blocks.labels.duplicates,
        **{name: blocks.counters[name] for name in sorted(blocks.counters)},
        "ignored": dict(blocks.ignored),
        "skipped": dict(blocks.skipped),
        "groups": {
            str(group_idx): {
                "kind": group.spec.kind,
                "sliding_window": group.spec.sliding_window,
                "block_size": group.block_size,
            }
            for group_idx, group in sorted(blocks.groups.known().items())
        },
    }
