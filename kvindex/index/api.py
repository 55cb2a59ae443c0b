"""The public interface of every index, and the checks of arguments.

Two classes implement it: `kvindex.index.reference.Index`, the readable specification in Python, and
`kvindex.index.native.Index`, its twin in C++. `kvindex.BACKEND` says which one `kvindex.Index` is.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

from kvindex.index.explanation import Explanation, Notes, explain
from kvindex.index.match import Match, Trusts
from kvindex.index.questions import MatchOptions, Question, check_extra_keys, read_question
from kvindex.index.snapshot import (
    SnapshotReader,
    SnapshotSource,
    bytes_of,
    needs_native,
    write_snapshot,
)
from kvindex.index.tokens import Lora, Prompt, TokenIds
from kvindex.index.views import Inspectable, Prefixes, TreeView
from kvindex.wire import CacheSettings, EventBatch
from kvindex.wire.backend import Backend
from kvindex.wire.errors import ConfigurationError, check_options
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

_AnyIndex = TypeVar("_AnyIndex", bound="BaseIndex")


class _Limits(TypedDict, total=False):
    """The limits of an index, as `BaseIndex` describes them."""

    max_blocks: int | None
    max_blocks_per_rank: int | None
    max_orphans: int


class BaseIndex(Inspectable):
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

    Thread safety: every method may be called from any thread; one lock guards the whole index. Do
    not call any from a signal handler or a finalizer, which interrupt a call of their thread. In
    a forked child every call raises ClosedError: another thread may have been changing the index.

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
    """Which implementation this is. The Python index has no snapshots and shows no prefixes."""

    def __init__(
        self,
        *,
        seed: int | None = None,
        max_blocks: int | None = None,
        max_blocks_per_rank: int | None = None,
        max_orphans: int = 16_384,
    ) -> None:
        limits = (("max_blocks", max_blocks), ("max_blocks_per_rank", max_blocks_per_rank))
        for name, value in (("seed", seed), *limits):
            if not isinstance(value, (int, type(None))):
                raise ConfigurationError(f"{name} must be an int or None, not {value!r}")
        if seed is not None and not 0 <= seed < 1 << 128:
            raise ConfigurationError(f"seed must be in 0 … 2**128 - 1, not {seed}")
        for name, limit in limits:
            if limit is not None and limit < 1:
                raise ConfigurationError(f"{name} must be at least 1 block, not {limit}")
        if max_orphans < 0:
            raise ConfigurationError(f"max_orphans must be at least 0 blocks, not {max_orphans}")
        if max_blocks_per_rank is None and max_blocks is not None and max_blocks >= 10_000:
            # So that a rank whose events never end leaves room for the others. Of a smaller limit
            # the tenth would be no room.
            max_blocks_per_rank = max_blocks - max_blocks // 10
        self._seed = int.from_bytes(os.urandom(16), "little") if seed is None else seed
        self._max_blocks_per_rank = max_blocks_per_rank
        self._start(max_blocks, max_orphans)

    @abstractmethod
    def _start(self, max_blocks: int | None, max_orphans: int) -> None:
        """Begin empty; the other limits are known."""

    @property
    def max_blocks_per_rank(self) -> int | None:
        """How many resident blocks one rank may have; None: no limit."""
        return self._max_blocks_per_rank

    @property
    def seed(self) -> int:
        """The seed of the prefix keys: what `Index(seed=...)` needs to restore from this one.

        Keep it secret from clients that send prompts: with it, prompts could be made to collide.
        """
        return self._seed

    # Ranks -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def ranks(self) -> tuple[Rank, ...]:
        """The known ranks, sorted: the same tuple until one is added, removed or renamed. O(1)."""

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

        The rank becomes known if it was not. A payload is msgpack, as an engine sent it.

        Raises:
            DecodeError: the payload is not an event batch, or a BlockRemoved has not one count for
                each block; nothing of it was applied.

        Complexity: O(blocks), and O(tokens) for their keys.
        """

    # Queries ---------------------------------------------------------------------------------

    def match(
        self,
        token_ids: TokenIds,
        *,
        trust: Trusts | None = None,
        **options: Unpack[MatchOptions],
    ) -> Match:
        """Return how much of a prompt each rank holds, from its start.

        It takes microseconds (docs/benchmarks.md has figures) and waits for nothing but the index's
        lock, so async code calls it directly. An engine never hits a whole prompt, because the last
        token must be computed; `recomputed=1` predicts its own hit.

        Args:
            token_ids: list or tuple of ints, `array`, or a contiguous buffer of 4- or 8-byte
                integers. Plain `bytes` are refused, since they may be text; pass
                `memoryview(data).cast("I")` for 32-bit tokens. Strings count as tokens once a
                rank has stored text tokens (TensorRT-LLM).
            trust: how far each rank can be trusted, for `RankMatch.state`, `complete` and `lag`,
                and so for `best`: a mapping, or a function that is called when a rank is looked at.
                `Client.match` fills it in.
            options: `lora`, `salt`, `extra_keys`, `media`, `ranks`, `block_size` and `recomputed`;
                see `MatchOptions`.

        Raises:
            TokenError: the tokens have a type, layout or range that cannot be read.
            UnknownRankError: one of `ranks` is not known.
            ConfigurationError: `media` is empty; every rank's block size is known, and none is
                `block_size`; `extra_keys` were given while the index holds several block sizes
                and none was chosen; or `recomputed` is negative.

        Complexity: O(matched blocks × block size + runs × owners).
        """
        return self._answer(token_ids, self._question(options), trust)

    def match_many(
        self,
        prompts: Iterable[TokenIds],
        *,
        trust: Trusts | None = None,
        **options: Unpack[MatchOptions],
    ) -> list[Match]:
        """Return one `Match` for each prompt; options and errors are those of `match`."""
        return [self.match(token_ids, trust=trust, **options) for token_ids in prompts]

    def explain(
        self,
        token_ids: TokenIds,
        *,
        trust: Trusts | None = None,
        notes: Notes | None = None,
        **options: Unpack[MatchOptions],
    ) -> Explanation:
        """Return, for each rank, where its match ends and why; `print` it.

        The index repeats the question with every LoRA of the ranks' blocks (the 64 with most of
        each rank), and with the last 64 salts (or other first extra keys, up to 256 bytes long)
        under which each rank stored blocks since it became known to this process. The index is
        locked for one question at a time, so events may be applied in between.

        Args and Raises: as `match`, except that any `block_size` may be given, and
            notes: called with each rank; returns further notes, as sentences.

        Complexity: O(blocks of the prompt × owners), times one and the LoRAs and salts tried.
        """
        question = self._question(options, "explain")
        # Once, since the question is repeated; so no repetition has tokens to leave out.
        tokens = Prompt(token_ids, question.recomputed, text=self._stored_text).whole()
        return explain(self, tokens, question._replace(recomputed=0), trust, notes)

    def _question(self, options: MatchOptions, asker: str = "match") -> Question:
        """Return the question that these options ask, checked against what is resident."""
        check_options(asker, options, MatchOptions)
        question = read_question(self.ranks, **options)
        if question.sizes_matter:
            check_extra_keys(question, self._block_sizes(question.lora))
        return question

    @abstractmethod
    def _answer(self, token_ids: TokenIds, question: Question, trust: Trusts | None) -> Match:
        """Return the answer to a question."""

    @abstractmethod
    def _block_sizes(self, lora: Lora) -> Collection[int]: ...

    @abstractmethod
    def _stored_text(self) -> bool: ...

    # Snapshots -------------------------------------------------------------------------------

    # The native index alone has them, and prefixes: the Python one raises ConfigurationError.

    def dump(self, rank: Rank) -> bytes:
        """Return all that the index holds of a rank, for `restore` into an index of this seed.

        Queries go on meanwhile; events wait while one rank is copied.

        Raises:
            UnknownRankError: the rank is not known.

        Complexity: O(blocks of the rank and before them), some 20 bytes for each.
        """
        raise needs_native("snapshots")

    def restore(self, rank: Rank, section: bytes | bytearray | memoryview) -> None:
        """Replace all that the index holds of a rank by a section from `dump`.

        The rank, known before or not and of any name, then answers every query and applies later
        events like the dumped rank: orphans, labels, groups and counters are restored, too.

        Raises:
            SnapshotError: the section cannot be restored here; the index is as before. Its
                `reason` says why; "room": it does not fit `max_blocks` or
                `max_blocks_per_rank`.
            ConfigurationError: it is no bytes.

        Complexity: O(blocks of the section and of the rank).
        """
        raise needs_native("snapshots")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot to a file, which replaces an existing file once all is written.

        Each rank is written as it is at its turn. Only the file's owner can read it, since it
        contains the seed.

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
    def load(cls: type[_AnyIndex], source: SnapshotSource, **limits: Unpack[_Limits]) -> _AnyIndex:
        """Return the index in a snapshot.

        Args:
            source: a path, a file open for reading, or the bytes of a snapshot.
            limits: `max_blocks`, `max_blocks_per_rank` and `max_orphans`, as for a new index.

        Raises:
            SnapshotError: it is no snapshot that can be restored here; `reason` says why.
            ConfigurationError: the source is neither a path nor a readable file nor bytes.
            OSError: the file cannot be read.
        """
        if cls.backend != "native":
            raise needs_native("snapshots")
        with SnapshotReader(source) as reader:
            index = cls(seed=reader.seed, **limits)
            for record in reader:
                index.restore(record.rank, record.section)
        return index

    @classmethod
    def from_bytes(
        cls: type[_AnyIndex], data: bytes | bytearray | memoryview, **limits: Unpack[_Limits]
    ) -> _AnyIndex:
        """Return the index in the bytes of a snapshot, with limits as for `load`.

        Raises:
            SnapshotError: as `load`.
            ConfigurationError: they are no bytes; a file is read by `load`.
        """
        view = bytes_of(data, "a snapshot in memory (a file is read by Index.load)")
        return cls.load(data if isinstance(data, bytes) else view, **limits)

    # Insight ---------------------------------------------------------------------------------

    def prefixes(
        self,
        max_nodes: int = 1000,
        *,
        min_blocks: int = 1,
        ranks: Iterable[RankName] | str | None = None,
    ) -> Prefixes:
        """Return which ranks hold which prefixes: the tree from its roots on, up to `max_nodes`.

        The next node is always the one that most ranks hold; of several the longest, then the one
        whose first block was stored first. Nodes below a hole (a node that no rank holds) are last.

        Args:
            max_nodes: at most this many nodes.
            min_blocks: leave out shorter nodes where nothing follows them.
            ranks: count only these, and leave out nodes that none of them holds, with all nodes
                below; all ranks by default, and holes are shown. Names as for `match`.

        Raises:
            UnknownRankError: one of `ranks` is not known.
            ConfigurationError: `max_nodes` or `min_blocks` is no int from 1 on; or it is the
                Python index, which does not show prefixes.

        Complexity: it looks at the children of each node that it shows, and no further; at most at
            256 × `max_nodes` in all, however much the index holds, and for one node at a quarter of
            the looks that are left. Each look costs O(blocks of the child / 64).

        Thread safety: as all of the index, but the lock is released about every thousand looks (a
            tenth of a millisecond). Events may be applied in between, so nodes may be of different
            moments. Each node existed when it was looked at.

        Examples:
            >>> from kvindex import BlockStored, EventBatch, Index, Rank
            >>> index = Index()
            >>> stored = BlockStored(block_hashes=[1, 2], token_ids=[1, 2], block_size=1)
            >>> index.apply(Rank("a"), EventBatch(ts=0.0, events=[stored]))
            >>> prefixes = index.prefixes()
            >>> [(node.parent, node.depth, node.blocks, node.by_medium) for node in prefixes.nodes]
            [(-1, 0, 2, {'GPU': 1})]
        """
        raise needs_native("prefixes")

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values.

        `blocks`, `orphans`: held now, over all ranks. `unique_blocks`: different ones of these and
        of holes. `runs`: how many nodes the shared tree keeps them in; in the Python index, each is
        its own. `ranks`: for each `str(rank)` the blocks and orphans held now and its groups;
        `loras`, its blocks by LoRA ("" for none, "id 7" for a numeric id; the 64 with most, and
        "(other)"); `media`, its blocks by where they lie (a block on two media counts on both, and
        one of a hybrid model's larger size as several of the smallest, in each group); `salted`,
        its blocks of prompts that start under a salt or other extra keys. Since the rank became
        known, in blocks: `stored`, `stored_text` (with text among the tokens), `duplicates`
        (further physical copies), `reannounced`, `removed`, `removed_unknown`, `removed_orphans`,
        `orphaned`, `orphans_attached`, `orphans_dropped`, `unplaced`, `ambiguous`, …; `ignored` by
        reason; `skipped` events by tag; `cleared` events; `proofs` and `proofs_missed`, events of
        models without full attention whose labels vLLM's hash chain has, or lacks. `advice` names
        settings that seem to be missing or wrong, in sentences (`CacheSettings`).
        """

    @abstractmethod
    def check(self) -> None:
        """Assert every invariant of the index; for tests, O(everything).

        Raises:
            InvariantError: an invariant does not hold; that is a bug in kvindex.
        """
