"""The index over the native core: `kvindex.Index` wherever the module was built.

Python keeps the names of ranks here; everything else is in C++ (`native/core`), where a rank is a
number that is never used twice. The names are one immutable directory that is replaced as a whole,
so that a query sees one state of it without a lock.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvindex.index.api import BaseIndex
from kvindex.index.match import Hits, Match, RankMatch, RankRows, Trusts
from kvindex.index.questions import (
    MatchOptions,
    Question,
    check_block_size,
    check_recomputed,
    wanted_ranks,
)
from kvindex.index.snapshot import open_section, seal_section, section_identity
from kvindex.index.tokens import (
    Lora,
    Namespace,
    Prompt,
    TokenIds,
    event_lora,
    lora_tag,
    pack_extra,
    pack_tokens,
    tagged_lora,
)
from kvindex.index.views import (
    Holding,
    Prefixes,
    ResidentBlock,
    largest_loras,
    prefix_node,
    shown_loras,
    walk_limit,
    with_advice,
)
from kvindex.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    EventBatch,
)
from kvindex.wire._native import SECRET_BYTES, Answer, PackedBatch, decode
from kvindex.wire._native import Index as Core
from kvindex.wire._native import RankRows as CoreRows
from kvindex.wire.decode import (
    bounded,
    check_blocks,
    copy_counts,
    decode_uncommon,
    informational_int,
)
from kvindex.wire.errors import ConfigurationError, InvariantError, SnapshotError, UnknownRankError
from kvindex.wire.fingerprints import secret_words
from kvindex.wire.forks import PARENTS, disown_in_children
from kvindex.wire.quirks import fold_hash, fold_medium, is_content_hash
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

_APPLIED = 0  # what Core.apply returns if all went well

_Value = TypeVar("_Value")
_encode = msgspec.msgpack.Encoder().encode


def read_batch(payload: bytes | bytearray | memoryview) -> PackedBatch | EventBatch:
    """Return the events in a payload of a stream, in the form that is quickest to apply.

    Raises:
        DecodeError: as `kvindex.wire.decode_batch`; or the payload has more blocks than allowed.
    """
    batch = _decoded(payload)
    if isinstance(batch, EventBatch):
        return bounded(batch, len(payload))
    check_blocks(batch.blocks, len(payload))
    return batch


def _decoded(payload: bytes | bytearray | memoryview) -> PackedBatch | EventBatch:
    if isinstance(payload, (bytearray, memoryview)):
        payload = bytes(payload)
    packed = decode(payload) if isinstance(payload, bytes) else None
    return decode_uncommon(payload) if packed is None else packed


_PARENTS_CORES: list[Core] = []  # in a forked child: none is destroyed, for its lock may be held


class Index(BaseIndex):
    """The index over the native core; see `BaseIndex`."""

    backend = "native"

    def _start(self, max_blocks: int | None, max_orphans: int) -> None:
        # More than 64 bits is no limit, and no machine holds that many orphans.
        total, of_rank = (
            None if limit is None else min(limit, 2**64 - 1)
            for limit in (max_blocks, self._max_blocks_per_rank)
        )
        words = secret_words(self._seed, SECRET_BYTES, b"kvindex keys")
        self._core = Core(words, total, of_rank, min(max_orphans, 2**63 - 1))
        self._core_apply = self._core.apply
        self._ids: dict[Rank, int] = {}  # read without the lock, but never iterated over
        # Made of `_ids` when a question needs it: so adding a rank costs the same however many
        # there are. Dropped before `_ids` changes: a Ctrl-C in between leaves none that is wrong.
        self._made: Directory | None = None
        self._encoded_ids: tuple[Mapping[Rank, int], dict[bytes, int]] = ({}, {})
        # Of `_ids` and `_made`, while they are changed. A Ctrl-C at any moment releases it; it does
        # not keep out signal handlers and finalizers, which run in the middle of any call.
        self._lock = threading.RLock()
        disown_in_children(self, Index._disown)

    def _disown(self) -> None:
        """In a forked child: another thread of the parent may hold the core's lock."""
        _PARENTS_CORES.append(self._core)
        self._core = self._core_apply = self._lock = PARENTS

    # Ranks -----------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return self._directory.order

    def add(self, rank: Rank) -> None:
        self._add(rank)

    def remove(self, rank: Rank) -> None:
        with self._lock:
            if rank in self._ids:
                self._made = None
                self._core.remove(self._ids.pop(rank))

    def rename(self, names: Mapping[Rank, Rank]) -> None:
        with self._lock:
            # A copy that replaces the old names at once: `apply` reads them without the lock.
            ids = dict(self._ids)
            moved = {new: ids.pop(old) for old, new in names.items() if old in ids}
            replaced = [ids.pop(rank) for rank in moved if rank in ids]
            ids.update(moved)
            self._made = None
            self._ids = ids
            # After the names: `apply` goes on until the core knows the number that a name has.
            for rank_id in replaced:
                self._core.remove(rank_id)

    def configure(self, rank: Rank, settings: CacheSettings) -> None:
        groups = {
            group_number(group_idx): (spec.kind, spec.sliding_window, spec.attention_chunk_size)
            for group_idx, spec in settings.groups.items()
        }
        plain = (
            settings.removals == "last",
            settings.report_mode == "full",
            settings.eagle is True,
            [] if isinstance(settings.eagle, bool) else [*map(group_number, settings.eagle)],
            min(settings.hash_block_size or 0, 2**31 - 1),
            min(settings.offload_chunk or 0, 2**31 - 1),
            settings.upper_bound,
            settings.resets_connector,
        )
        while not self._core.configure(self._add(rank), groups, *plain):
            pass  # removed by another thread in between: it is known again now

    def __len__(self) -> int:
        return len(self._core)

    # Events ----------------------------------------------------------------------------------

    def apply(
        self, rank: Rank, batch: PackedBatch | EventBatch | bytes | bytearray | memoryview
    ) -> None:
        # Called for every message: only what a common one needs.
        rank_id = self._ids.get(rank)
        if rank_id is None or self._core_apply(rank_id, batch) != _APPLIED:
            self._apply_carefully(rank, batch)

    def _apply_carefully(
        self, rank: Rank, batch: PackedBatch | EventBatch | bytes | bytearray | memoryview
    ) -> None:
        """Apply a batch that is typed, not decoded natively, or of a rank that is not known."""
        if not isinstance(batch, (EventBatch, PackedBatch)):
            batch = _decoded(batch)  # first: an invalid payload must not make the rank known
        packed = pack_batch(batch) if isinstance(batch, EventBatch) else batch
        while self._core.apply(self._add(rank), packed) != _APPLIED:
            pass  # removed by another thread in between: it is known again now

    def lane_target(self) -> tuple[Core, Callable[[Rank], int | None]]:
        """Return the core and what finds a rank's number in it: for `kvindex.subscribe.watch`."""
        return self._core, lambda rank: self._ids.get(rank)

    def apply_entries(self, entries: bytes | memoryview) -> tuple[int, list[bytes]] | None:
        """Apply the batches of a message's encoded entries: for `kvindex.replicas`.

        Return how many were applied, and the entries that are left: statuses, and all from the
        first one on that needs Python. None: these are no entries.
        """
        # By their encoded form: C++ then compares bytes, and needs no name of a rank.
        ids = self._directory.ids
        if self._encoded_ids[0] is not ids:
            encoded = {_encode(rank): rank_id for rank, rank_id in ids.items()}
            self._encoded_ids = ids, encoded
        return self._core.apply_entries(self._encoded_ids[1], entries)

    # Queries ---------------------------------------------------------------------------------

    def match(
        self,
        token_ids: TokenIds,
        *,
        trust: Trusts | None = None,
        **options: Unpack[MatchOptions],
    ) -> Match:
        # Called for every request: a common one has no options but the last tokens to leave out.
        recomputed = options.get("recomputed", 0)
        for name, value in options.items():
            if value is not None and name != "recomputed":
                return self._answer(token_ids, self._question(options), trust)
        directory = self._made or self._directory
        answer = self._core.match(token_ids, recomputed)
        if answer is None:
            answer = self._core.match(self._readable(token_ids, recomputed), 0)
        assert answer is not None
        return Match(NativeContents(answer, directory), directory.ids.keys(), trust)

    def _answer(self, token_ids: TokenIds, question: Question, trust: Trusts | None) -> Match:
        directory = self._directory
        known, wanted_ids = self._narrowed(directory, question.ranks)
        options = _core_options(question, wanted_ids)
        answer = self._core.match_with(token_ids, question.recomputed, *options)
        if answer is None:
            tokens = self._readable(token_ids, question.recomputed)
            answer = self._core.match_with(tokens, 0, *options)
        assert answer is not None
        if question.block_size is not None and answer.best is None:
            units = answer.units()
            ids = directory.ids.values() if wanted_ids is None else wanted_ids
            check_block_size(question.block_size, [units.get(rank_id, 0) for rank_id in ids])
        return Match(NativeContents(answer, directory), known, trust)

    def _look(
        self, token_ids: TokenIds, question: Question, trust: Trusts | None
    ) -> tuple[Match, list[Holding]]:
        directory = self._directory
        known, wanted_ids = self._narrowed(directory, question.ranks)
        answer, held = self._core.look(token_ids, *_core_options(question, wanted_ids))
        holdings = [
            Holding(directory.ranks[of_rank[0]], *of_rank[1:])
            for of_rank in held
            if of_rank[0] in directory.ranks
        ]
        return Match(NativeContents(answer, directory), known, trust), holdings

    def _block_sizes(self, lora: Lora) -> Collection[int]:
        return self._core.block_sizes(lora_tag(lora))

    def _stored_text(self) -> bool:
        return self._core.stored_text()

    # Snapshots -------------------------------------------------------------------------------

    def dump(self, rank: Rank) -> bytes:
        return seal_section(self._of_rank(rank, self._core.dump), self._seed, self._identity())

    def restore(self, rank: Rank, section: bytes | bytearray | memoryview) -> None:
        body = open_section(section, self._seed, self._identity())
        with self._lock:
            # Within the lock: a rank that is removed meanwhile would come back without a name.
            rank_id = self._ids.get(rank)
            restored = self._core.restore(rank_id, body)
            if isinstance(restored, str):
                raise SnapshotError(restored, reason="content")
            if isinstance(restored, tuple):
                wanted, room, limit = restored
                raise SnapshotError(
                    f"the section has {wanted} resident blocks, and {limit} leaves room for"
                    f" {max(room, 0)}: give the index a higher {limit}, or synchronize the rank"
                    " from its engine",
                    reason="room",
                )
            if rank_id is None:
                self._made = None
                self._ids[Rank(*rank)] = restored

    def _identity(self) -> bytes:
        return section_identity(self._seed, self._core.key_check().to_bytes(8, "little"))

    # Insight ---------------------------------------------------------------------------------

    def prefixes(
        self,
        max_nodes: int = 1000,
        *,
        min_blocks: int = 1,
        ranks: Iterable[RankName] | str | None = None,
    ) -> Prefixes:
        limits = walk_limit("max_nodes", max_nodes), walk_limit("min_blocks", min_blocks)
        directory = self._directory
        wanted: Iterable[Rank] = directory.order
        if ranks is not None:
            wanted = dict.fromkeys(wanted_ranks(ranks, directory.ids.keys()))
        rows = {rank: self._known(rank, directory) for rank in wanted}
        nodes, spaces, holders, root, looked_at, unique_blocks = self._core.prefixes(
            *limits, list(rows.values()), ranks is not None
        )
        namespaces = [Namespace(size, tagged_lora(tag), ahead) for size, ahead, tag in spaces]
        return Prefixes(
            nodes=tuple(prefix_node(node, namespaces[node[3]], holders[node[4]]) for node in nodes),
            ranks=tuple(rows),
            children=root[6],
            left_out=root[7],
            left_out_blocks=root[8],
            looked_at=looked_at,
            unique_blocks=unique_blocks,
        )

    def statistics(self) -> dict[str, Any]:
        ranks = {}
        directory = self._directory
        for rank in directory.order:
            statistics = self._core.rank_statistics(directory.ids[rank])
            if statistics is not None:  # None: removed just now
                ranks[str(rank)] = _named_loras(statistics)
        orphans = sum(rank["orphans"] for rank in ranks.values())
        return {**self._core.statistics(), "orphans": orphans, "ranks": ranks}

    def check(self) -> None:
        fault = self._core.check()
        if fault is not None:
            raise InvariantError(fault)

    # Private ---------------------------------------------------------------------------------

    def _add(self, rank: Rank) -> int:
        """Return a rank's number, and make the rank known if needed."""
        rank_id = self._ids.get(rank)
        if rank_id is not None:
            return rank_id

        with self._lock:
            rank_id = self._ids.get(rank)
            if rank_id is None:
                self._made = None
                self._ids[Rank(*rank)] = rank_id = self._core.add()
            return rank_id

    @property
    def _directory(self) -> Directory:
        if (made := self._made) is not None:
            return made
        with self._lock:
            made = self._made
            if made is None:
                ids = dict(self._ids)
                order = tuple(sorted(ids))
                made = Directory(ids, {rank_id: rank for rank, rank_id in ids.items()}, order)
                self._core.set_order([ids[rank] for rank in order])
                self._made = made
            return made

    def _readable(self, token_ids: TokenIds, recomputed: int) -> array[int]:
        """Return the tokens that take part as a buffer, where the core cannot read the caller's."""
        check_recomputed(recomputed)
        return Prompt(token_ids, recomputed, text=self._stored_text).whole()

    def _narrowed(
        self, directory: Directory, wanted: Iterable[Rank] | None
    ) -> tuple[Collection[Rank], list[int] | None]:
        """Return the ranks of a question, and their numbers (None: all)."""
        if wanted is None:
            return directory.ids.keys(), None
        ids = {rank: self._known(rank, directory) for rank in wanted}
        return ids.keys(), list(ids.values())

    @staticmethod
    def _known(rank: Rank, directory: Directory) -> int:
        rank_id = directory.ids.get(rank)
        if rank_id is None:
            raise UnknownRankError(rank, directory.ids)
        return rank_id

    def _of_rank(self, rank: Rank, ask: Callable[[int], _Value | None]) -> _Value:
        """Return the core's values for a rank; None for a rank that was removed just now."""
        directory = self._directory
        value = ask(self._known(rank, directory))
        if value is None:
            raise UnknownRankError(rank, directory.ids)
        return value

    def _view_size(self, rank: Rank) -> int:
        return self._of_rank(rank, self._core.size)

    def _view_clear(self, rank: Rank) -> None:
        self._of_rank(rank, lambda rank_id: self._core.clear(rank_id) or None)

    def _view_statistics(self, rank: Rank) -> dict[str, Any]:
        return _named_loras(self._of_rank(rank, self._core.rank_statistics))

    def _view_origins(self, rank: Rank) -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
        statistics = self._of_rank(rank, self._core.rank_statistics)
        salts = self._of_rank(rank, self._core.salts)
        loras = {tagged_lora(tag): count for tag, count in statistics["loras"].items()}
        return largest_loras(loras), [(tagged_lora(tag), extra) for tag, extra in salts]

    def _view_walk(self, rank: Rank) -> Iterator[ResidentBlock]:
        # At once: a rank that is not known is reported by the call, not by the first step.
        return map(_resident_block, self._of_rank(rank, self._core.walk))


def _core_options(question: Question, wanted_ids: list[int] | None) -> tuple[Any, ...]:
    """Return a question in the core's form."""
    media = question.media
    return (
        lora_tag(question.lora),
        question.extras,
        None if media is None else [pack_text(medium) for medium in media],
        wanted_ids,
        min(question.block_size or 0, 2**32 - 1),
    )


def _named_loras(statistics: dict[str, Any]) -> dict[str, Any]:
    loras = {tagged_lora(tag): count for tag, count in statistics["loras"].items()}
    return with_advice({**statistics, "loras": shown_loras(loras)})


def _resident_block(values: tuple[Any, int, str, int, int, int, bytes]) -> ResidentBlock:
    block_hash, depth, medium, group_idx, copies, block_size, tag = values
    return ResidentBlock(
        block_hash=block_hash,
        depth=depth,
        medium=medium,
        group_idx=group_idx,
        copies=copies,
        block_size=block_size,
        lora=tagged_lora(tag),
    )


# Answers ----------------------------------------------------------------------------------------


class Directory(NamedTuple):
    """The ranks by name and by number, and in order."""

    ids: Mapping[Rank, int]
    ranks: Mapping[int, Rank]
    order: tuple[Rank, ...]


class NativeContents:
    """The core's answer, with the ranks' names at the time of the question; see `Contents`."""

    __slots__ = ("_answer", "_directory")

    def __init__(self, answer: Answer, directory: Directory) -> None:
        self._answer = answer
        self._directory = directory

    def get(self, rank: Rank) -> RankMatch | None:
        rank_id = self._directory.ids.get(rank)
        values = None if rank_id is None else self._answer.get(rank_id)
        return None if values is None else _rank_match(rank, values)

    def nothing(self, rank: Rank) -> RankMatch:
        rank_id = self._directory.ids.get(rank)
        if rank_id is None:
            return RankMatch(rank=rank)
        block_size, lower_bound = self._answer.nothing(rank_id)
        return RankMatch(rank=rank, block_size=block_size, lower_bound=lower_bound)

    def first(self) -> RankMatch | None:
        values = self._answer.best
        if values is None:
            return None
        rank = self._directory.ranks.get(values[0])
        if rank is not None:
            return _rank_match(rank, values)
        # It became known while the core answered: the next one is first.
        return next(map(self.get, self.longest()), None)

    def longest(self) -> list[Rank]:
        # Missing: the rank became known while the core answered.
        names = map(self._directory.ranks.get, self._answer.longest())
        return [rank for rank in names if rank is not None]

    def hits(self, rows: RankRows, live: bytes | bytearray | None) -> Hits:
        ids = self._directory.ids
        numbered = rows._numbered
        if numbered is None or numbered[0] is not ids:
            # The same mapping means the same ranks: a new directory is made for each change.
            numbered = rows._numbered = ids, CoreRows([ids.get(rank) for rank in rows])
        columns = rows._columns()
        self._answer.hits(numbered[1], live, *columns)
        return columns


_RankValues = tuple[int, int, int, int, dict[str, int], int, int, bool, bool]


def _rank_match(rank: Rank, values: _RankValues) -> RankMatch:
    _, blocks, tokens, block_size, by_medium, device_tokens, host_tokens, *bounds = values
    return RankMatch(
        rank=rank,
        blocks=blocks,
        tokens=tokens,
        block_size=block_size,
        by_medium=by_medium,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        upper_bound=bounds[0],
        lower_bound=bounds[1],
    )


# Typed events to the native form ----------------------------------------------------------------

_MAX_UNSIGNED = 2**32 - 1


def pack_batch(batch: EventBatch) -> PackedBatch:
    """Return a batch in native form.

    A payload goes to C++ at once. This serves batches that a program made itself, and payloads that
    the native decoder leaves to `kvindex.wire.decode_batch`.
    """
    packed = PackedBatch()
    for tag in batch.skipped:
        packed.skipped(pack_text(tag))
    for event in batch.events:
        if isinstance(event, BlockStored):
            _pack_stored(packed, event)
        elif isinstance(event, BlockRemoved):
            packed.removed(
                list(map(_hash, event.block_hashes)),
                pack_text(fold_medium(event.medium)),
                group_number(event.group_idx),
                copy_counts(event.remaining_copy_counts, len(event.block_hashes)),
            )
        elif isinstance(event, AllBlocksCleared):
            packed.cleared()
    return packed


def _pack_stored(packed: PackedBatch, event: BlockStored) -> None:
    lora = event_lora(event)
    keys, salt = event.extra_keys, event.cache_salt
    extras = None
    if keys is not None:
        extras = [pack_extra(items, lora=lora) if items else b"" for items in keys]
    # Apart from the others: whether the salt counts depends on whether the event starts a prompt,
    # which only the core knows.
    salted_first = pack_extra(keys[0] if keys else None, lora=lora, salt=salt) if salt else None
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    parent = event.parent_block_hash
    packed.stored(
        list(map(_hash, event.block_hashes)),
        None if parent is None else _hash(parent),
        pack_tokens(event.token_ids),
        min(max(event.block_size, 0), _MAX_UNSIGNED),
        lora_tag(lora),
        pack_text(fold_medium(event.medium)),
        None if event.group_idx is None else group_number(event.group_idx),
        None if kind is None else pack_text(kind),
        informational_int(window),
        None
        if event.lookahead_token_ids is None
        else [pack_tokens(after) for after in event.lookahead_token_ids],
        extras,
        salted_first,
        bool(event.block_hashes)
        and is_content_hash(event.block_hashes[0], event.token_ids[: event.block_size]),
    )


def _hash(block_hash: BlockHash) -> BlockHash:
    if block_hash == b"":
        raise ConfigurationError("a block hash of 0 bytes names no block")
    return fold_hash(block_hash)


def group_number(group_idx: int | None) -> int:
    """Return a group's native number, or raise ConfigurationError."""
    if group_idx is None:
        return 0
    if not 0 <= group_idx <= _MAX_UNSIGNED:
        raise ConfigurationError(f"group_idx must be 0 … {_MAX_UNSIGNED}, not {group_idx}")
    return group_idx


def pack_text(text: str) -> bytes:
    """Return the bytes of a text, whatever code points it holds."""
    return text.encode("utf-8", "surrogatepass")
