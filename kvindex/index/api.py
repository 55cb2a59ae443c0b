"""The public interface of every index, and the checks of arguments.

Two classes implement it: `kvindex.index.reference.Index`, the readable specification in Python, and
`kvindex.index.native.Index`, its twin in C++. `kvindex.BACKEND` says which one `kvindex.Index` is.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvindex.index.explaining import Asked, Holding, explain
from kvindex.index.explanation import Explanation, Notes
from kvindex.index.keys import ExtraKeys, Lora
from kvindex.index.labels import ResidentBlock
from kvindex.index.match import Match, Trusts
from kvindex.index.prefixes import Prefixes
from kvindex.index.questions import (
    MatchOptions,
    check_options,
    folded_media,
    packed_extras,
    wanted_ranks,
)
from kvindex.index.snapshot import SnapshotReader, SnapshotSource, write_snapshot
from kvindex.index.snapshot_section import (
    Identity,
    bytes_of,
    open_section,
    seal_section,
    wrong_backend,
)
from kvindex.index.tokens import Prompt, TokenIds
from kvindex.wire import CacheSettings, EventBatch
from kvindex.wire.backend import Backend
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

__all__ = [
    "BaseIndex",
    "TreeView",
    "check_limits",
    "rank_limit",
]

_SomeIndex = TypeVar("_SomeIndex", bound="BaseIndex")


class BaseIndex(ABC):
    """Which rank holds which prefix, by the ranks' events.

    Args:
        seed: seed of the prefix keys, 0 … 2**128 - 1; random when None.
        max_blocks: at most this many resident blocks over all ranks; further blocks are left
            out and counted (`ignored`, "max_blocks"). None: no limit.
        max_blocks_per_rank: at most this many of one rank, so that none uses up the room of all;
            further blocks are left out and counted likewise ("max_blocks_per_rank"). By
            default nine tenths of a `max_blocks` of 10,000 or more, else no limit.
        max_orphans: at most this many blocks of a rank are held for want of their parent;
            beyond it the oldest are dropped and counted.

    Thread safety: every method may be called from any thread; one lock guards the whole index. A
    signal handler may call every method, too; but it gets InUseError where it interrupted a change
    (Python index), or interrupted a change of the set of ranks and would change that set (native
    index). A forked child has an index of its own, as it was at the fork; it may have part of a
    change of more than 1,024 blocks that another thread was making.

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

    backend: ClassVar[Backend]
    """Which implementation this is; snapshots are taken back by the same one only."""

    _max_blocks_per_rank: int | None

    @abstractmethod
    def __init__(
        self,
        *,
        seed: int | None = None,
        max_blocks: int | None = None,
        max_blocks_per_rank: int | None = None,
        max_orphans: int = 16_384,
    ) -> None: ...

    @property
    def max_blocks_per_rank(self) -> int | None:
        """How many resident blocks one rank may have; None: no limit."""
        return self._max_blocks_per_rank

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the prefix keys: what `Index(seed=...)` needs to restore from this one.

        Keep it secret from clients that send prompts: with it, prompts could be made to collide.
        """

    # Ranks -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def ranks(self) -> tuple[Rank, ...]:
        """The known ranks, sorted: the same tuple until one comes, goes or is renamed. O(1)."""

    @abstractmethod
    def add(self, rank: Rank) -> None:
        """Make a rank known before its first event; nothing happens if it is known already."""

    @abstractmethod
    def remove(self, rank: Rank) -> None:
        """Forget a rank and all that it holds; nothing happens if it is not known.

        Complexity: O(blocks of the rank).
        """

    @abstractmethod
    def rename(self, names: Mapping[Rank, Rank]) -> None:
        """Rename ranks, with all that they hold; several may swap names.

        An unknown rank is left out; a rank whose name is given to another is forgotten.

        Complexity: O(ranks).
        """

    @abstractmethod
    def configure(self, rank: Rank, settings: CacheSettings) -> None:
        """Set what a rank's events do not state about its cache; the rank becomes known.

        Call it before the rank's first event. Settings stay when the rank's tree is cleared.

        Raises:
            ConfigurationError: a group index does not fit 32 bits.
        """

    def tree(self, rank: RankName) -> TreeView:
        """Return a live view of what one rank holds.

        Raises:
            UnknownRankError: the rank is not known (a KeyError).
        """
        if isinstance(rank, str):
            rank = find_rank(rank, self.ranks)
        self._view_size(rank)
        return TreeView(self, rank)

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of resident (rank, block) pairs."""

    # Events ----------------------------------------------------------------------------------

    @abstractmethod
    def apply(self, rank: Rank, batch: EventBatch | bytes | bytearray | memoryview) -> None:
        """Apply one batch of a rank's events; the rank given here counts, not the batch's.

        Args:
            rank: whose events these are; it becomes known if it was not.
            batch: an `EventBatch`, or the msgpack payload as an engine sent it.

        Raises:
            DecodeError: the payload is not an event batch; nothing of it was applied.

        Complexity: O(blocks), and O(tokens) for their keys.
        """

    # Queries ---------------------------------------------------------------------------------

    @abstractmethod
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
        """Return how much of a prompt each rank holds, from its start.

        It takes microseconds (docs/benchmarks.md has figures) and waits for nothing but the index's
        lock, so async code calls it directly. An engine never hits a whole prompt, because the last
        token must be computed: to predict its own hit, ask with `recomputed=1`.

        Args:
            token_ids: list or tuple of ints, `array`, or a contiguous buffer of 4- or 8-byte
                integers. Plain `bytes` are refused, since they may be text; pass
                `memoryview(data).cast("I")` for 32-bit tokens. Strings count as tokens once a
                rank has stored text tokens (TensorRT-LLM).
            lora: LoRA adapter name (or numeric id, for engines that send no name).
            salt: cache salt of the request.
            extra_keys: for each block, what its identity covers besides tokens, in the engine's
                form (e.g. `[None, [("image-digest", 3)]]`); missing blocks have none.
            media: count only blocks on these media, e.g. "GPU"; any medium by default.
            ranks: answer for these ranks only; all by default. "a/0" stands for `Rank("a", 0)`, "a"
                for all ranks of worker a.
            block_size: look at ranks with this block size only. While the size of some rank is not
                known yet, a size that no rank has gives an empty answer.
            recomputed: so many tokens at the end of the prompt do not take part, because the engine
                computes them in any case: as if they were cut off, but nothing is copied.
            trust: how far each rank can be trusted, for `RankMatch.state`, `complete` and `lag`,
                and so for `best`: a mapping, or a function that is called when a rank is looked at.
                `Client.match` fills it in.

        Raises:
            TokenError: the tokens have a type, layout or range that cannot be read.
            UnknownRankError: one of `ranks` is not known.
            ConfigurationError: `media` is empty; every rank's block size is known, and none is
                `block_size`; `extra_keys` were given while the index holds several block sizes
                and none was chosen; or `recomputed` is negative.

        Complexity: O(matched blocks × block size + runs × owners).
        """

    def match_many(
        self,
        prompts: Iterable[TokenIds],
        *,
        trust: Trusts | None = None,
        **options: Unpack[MatchOptions],
    ) -> list[Match]:
        """Return one `Match` for each prompt; options are those of `match`, for all of them.

        Raises: as `match`.
        """
        return [self.match(token_ids, trust=trust, **options) for token_ids in prompts]

    def explain(
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
        notes: Notes | None = None,
    ) -> Explanation:
        """Return, for each rank, where its match ends and why; `print` it.

        It asks again with every LoRA of the ranks' blocks (the 64 with most of each rank), and with
        the last 64 salts (or other first extra keys, up to 256 bytes long) under which each rank
        stored blocks since it became known to this process. The index is locked for one question
        at a time, so events may come in between.

        Args and Raises: as `match`, except that any `block_size` may be asked for, and
            notes: called with each rank; returns further notes, as sentences.

        Complexity: O(blocks of the prompt × owners), times one and the LoRAs and salts tried.
        """
        check_options(lora, salt, block_size, recomputed)
        if extra_keys is not None and block_size is None:
            self.match([], lora=lora, extra_keys=extra_keys)  # rejects keys of unclear blocks
        asked = Asked(
            lora or None,
            packed_extras(extra_keys, lora, salt),
            folded_media(media),
            None if ranks is None else wanted_ranks(ranks, self.ranks),
            block_size,
            trust,
        )
        prompt = Prompt(token_ids, recomputed, text=self._stored_text)
        tokens = array("q")
        tokens.frombytes(prompt.packed(0, prompt.length))
        return explain(self, tokens, asked, notes)

    @abstractmethod
    def _look(self, token_ids: TokenIds, asked: Asked) -> tuple[Match, list[Holding]]:
        """Return an answer, and all blocks of the prompt that the ranks hold at that moment."""

    @abstractmethod
    def _stored_text(self) -> bool:
        """Return whether any rank has stored text among its tokens."""

    # Snapshots -------------------------------------------------------------------------------

    def dump(self, rank: Rank) -> bytes:
        """Return all that the index holds of a rank, for `restore` into an index of this seed.

        Queries go on meanwhile; events wait while one rank is copied.

        Raises:
            UnknownRankError: the rank is not known.

        Complexity: O(blocks of the rank and before them), some 20 bytes for each.
        """
        return seal_section(self._dump(rank), self._identity())

    def restore(self, rank: Rank, section: bytes | bytearray | memoryview) -> None:
        """Replace all that the index holds of a rank by a section from `dump`.

        The rank, known before or not, then answers every query like the dumped rank, and applies
        later events like it: orphans, labels, groups (described ones too) and counters are
        restored, too. The rank's name may differ.

        Args:
            rank: the rank that holds the contents from now on.
            section: the result of `dump`, of an index with the same backend and seed.

        Raises:
            SnapshotError: the section cannot be restored here; the index is as before. Its
                `reason` says why; "room": it does not fit `max_blocks` or
                `max_blocks_per_rank`.
            ConfigurationError: it is no bytes.

        Complexity: O(blocks of the section and of the rank).
        """
        self._restore(rank, open_section(section, self._identity()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file, which replaces an existing file once all is written.

        Each rank is written as it is when its turn comes. The file is readable by its owner only,
        since it contains the seed.

        Raises:
            OSError: it cannot be written; an existing file is unchanged.
        """
        write_snapshot(path, self)

    def to_bytes(self) -> bytes:
        """Return a snapshot as bytes, as `save` would write it."""
        file = BytesIO()
        write_snapshot(file, self)
        return file.getvalue()

    @classmethod
    def load(
        cls: type[_SomeIndex],
        source: SnapshotSource,
        *,
        max_blocks: int | None = None,
        max_blocks_per_rank: int | None = None,
        max_orphans: int = 16_384,
    ) -> _SomeIndex:
        """Return the index in a snapshot.

        Args:
            source: a path, a file open for reading, or the bytes of a snapshot.
            max_blocks: as for a new index.
            max_blocks_per_rank: likewise.
            max_orphans: likewise.

        Raises:
            SnapshotError: it is no snapshot that can be restored here; `reason` says why.
            ConfigurationError: the source is neither a path nor a readable file nor bytes.
            OSError: the file cannot be read.

        Examples:
            >>> from kvindex import Index, Rank
            >>> index = Index()
            >>> index.add(Rank("vllm-0"))
            >>> Index.load(index.to_bytes()).ranks
            (Rank(worker='vllm-0', dp_rank=0),)
        """
        with SnapshotReader(source) as reader:
            if reader.backend != cls.backend:
                raise wrong_backend(reader.backend, cls.backend)
            index = cls(
                seed=reader.seed,
                max_blocks=max_blocks,
                max_blocks_per_rank=max_blocks_per_rank,
                max_orphans=max_orphans,
            )
            for record in reader:
                index.restore(record.rank, record.section)
        return index

    @classmethod
    def from_bytes(
        cls: type[_SomeIndex],
        data: bytes | bytearray | memoryview,
        *,
        max_blocks: int | None = None,
        max_blocks_per_rank: int | None = None,
        max_orphans: int = 16_384,
    ) -> _SomeIndex:
        """Return the index in the bytes of a snapshot.

        Raises:
            SnapshotError: as `load`.
            ConfigurationError: they are no bytes; a file is read by `load`.
        """
        view = bytes_of(data, "a snapshot in memory (a file is read by Index.load)")
        source = data if isinstance(data, bytes) else view
        return cls.load(
            source,
            max_blocks=max_blocks,
            max_blocks_per_rank=max_blocks_per_rank,
            max_orphans=max_orphans,
        )

    def _identity(self) -> Identity:
        return Identity(self.backend, self.seed, self._key_check())

    @abstractmethod
    def _key_check(self) -> bytes:
        """Return prefix keys of contents that never change."""

    @abstractmethod
    def _dump(self, rank: Rank) -> bytes:
        """Return the body of a rank's section; raises UnknownRankError."""

    @abstractmethod
    def _restore(self, rank: Rank, body: memoryview) -> None:
        """Restore a rank from the body of a section; raises SnapshotError."""

    # Insight ---------------------------------------------------------------------------------

    @abstractmethod
    def prefixes(
        self,
        max_nodes: int = 1000,
        *,
        min_blocks: int = 1,
        ranks: Iterable[RankName] | str | None = None,
    ) -> Prefixes:
        """Return which ranks hold which prefixes: the tree from its roots on, up to `max_nodes`.

        For a picture of what ranks share. The next node is always the one that most ranks hold;
        of several the longest, then the one whose first block came first. So nodes that many ranks
        share come before those that few share. Below a hole (a node that no rank holds), nodes come
        last.

        Args:
            max_nodes: at most this many nodes.
            min_blocks: leave out shorter nodes where nothing follows them.
            ranks: count only these, and leave out nodes that none of them holds, with all nodes
                below; all ranks by default, and holes are shown. Names as for `match`.

        Raises:
            UnknownRankError: one of `ranks` is not known.
            ConfigurationError: `max_nodes` or `min_blocks` is no int from 1 on.

        Complexity: it looks at the children of each node that it shows, and no further; at most at
            256 × `max_nodes` in all, however much the index holds, and for one node at a quarter of
            the looks that are left. Each look costs O(blocks of the child / 64).

        Thread safety: as all of the index, but the lock is given back about every thousand looks (a
            tenth of a millisecond in the native index). Events may come in between. Each node
            existed when it was looked at; nodes that were looked at in different pieces are of
            different moments.

        Examples:
            >>> from kvindex import BlockStored, EventBatch, Index, Rank
            >>> index = Index()
            >>> for worker, last in (("a", 3), ("b", 4)):
            ...     stored = BlockStored(
            ...         block_hashes=[1, 2, last], token_ids=[1, 2, last], block_size=1
            ...     )
            ...     index.apply(Rank(worker), EventBatch(ts=0.0, events=[stored]))
            >>> found = index.prefixes()
            >>> [(node.parent, node.depth, node.blocks, node.by_medium) for node in found.nodes]
            [(-1, 0, 2, {'GPU': 2}), (0, 2, 1, {'GPU': 1}), (0, 2, 1, {'GPU': 1})]
            >>> found.holders(found.nodes[2])
            (Rank(worker='b', dp_rank=0),)
        """

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values.

        `blocks`, `orphans`: held now, over all ranks. `runs`, `unique_blocks`: size of the shared
        tree. `ranks`: for each `str(rank)` the blocks and orphans held now and its groups; `loras`,
        its blocks by LoRA ("" for none, "id 7" for a numeric id; the 64 with most, and "(other)");
        `media`, its blocks by where they lie (a block on two media counts on both, and one of a
        hybrid model's larger size as several of the smallest, in each group); `salted`, its blocks
        of prompts that start under a salt or other extra keys. Since the rank became known, in
        blocks: `stored`, `stored_text` (with text among the tokens), `duplicates` (further physical
        copies), `reannounced`, `removed`, `removed_unknown`, `removed_orphans`, `orphaned`,
        `orphans_attached`, `orphans_dropped`, `unplaced`, `ambiguous`, …; `ignored` by reason;
        `skipped` events by tag; `cleared` events; `proofs` and `proofs_missed`, events of models
        without full attention whose labels vLLM's hash chain has, or lacks. `advice` names
        settings that seem to be missing or wrong, in sentences (`CacheSettings`).
        """

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant of the index; for tests, O(everything).

        Raises:
            InvariantError: an invariant does not hold; that is a bug in kvindex.
        """

    # For views; each raises UnknownRankError ------------------------------------------------------

    @abstractmethod
    def _view_size(self, rank: Rank) -> int: ...

    @abstractmethod
    def _view_clear(self, rank: Rank) -> None: ...

    @abstractmethod
    def _view_statistics(self, rank: Rank) -> dict[str, Any]: ...

    @abstractmethod
    def _view_origins(self, rank: Rank) -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
        """Return the LoRAs of resident blocks, and the last salted starts of prompts."""

    @abstractmethod
    def _view_walk(self, rank: Rank) -> Iterator[ResidentBlock]: ...


class TreeView:
    """A live view of what one rank holds.

    Thread safety: as the index.

    Raises:
        UnknownRankError: by every method once the rank was removed from the index.
    """

    __slots__ = ("_index", "rank")

    def __init__(self, index: BaseIndex, rank: Rank) -> None:
        self._index = index
        self.rank = rank

    def __len__(self) -> int:
        """Return the number of resident blocks of the rank, each counted once. O(1)."""
        return self._index._view_size(self.rank)

    def clear(self) -> None:
        """Drop everything the rank holds and all that was learned from its events; it stays known.

        Settings of `Index.configure` stay. Complexity: O(blocks of the rank).
        """
        self._index._view_clear(self.rank)

    def statistics(self) -> dict[str, Any]:
        """Return the rank's part of `Index.statistics()["ranks"]`."""
        return self._index._view_statistics(self.rank)

    def walk(self) -> Iterator[ResidentBlock]:
        """Iterate over a snapshot of the resident blocks, once for each medium and group.

        Complexity: O(blocks of the rank).
        """
        return self._index._view_walk(self.rank)


def check_limits(
    seed: object, max_blocks: int | None, max_blocks_per_rank: int | None, max_orphans: int
) -> None:
    """Reject settings of an index that cannot work."""
    limits = (("max_blocks", max_blocks), ("max_blocks_per_rank", max_blocks_per_rank))
    for name, value in (("seed", seed), *limits):
        if not isinstance(value, (int, type(None))):
            raise ConfigurationError(f"{name} must be an int or None, not {value!r}")
    for name, limit in limits:
        if limit is not None and limit < 1:
            raise ConfigurationError(f"{name} must be at least 1 block, not {limit}")
    if max_orphans < 0:
        raise ConfigurationError(f"max_orphans must be at least 0 blocks, not {max_orphans}")


def rank_limit(max_blocks: int | None, max_blocks_per_rank: int | None) -> int | None:
    """Return how many blocks one rank may have: by default not all of a large `max_blocks`."""
    if max_blocks is None or max_blocks_per_rank is not None:
        return max_blocks_per_rank
    for_others = max_blocks // 10_000 * 1_000
    return max_blocks - for_others if for_others else None
