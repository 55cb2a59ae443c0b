"""The answer to a query: for each rank, how much of the prompt is resident there."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, overload

import msgspec

from kvindex.wire.errors import ConfigurationError, UnknownRankError
from kvindex.wire.rank import Rank, State, Trust
from kvindex.wire.rank_lookup import RankName, find_rank


class Hits(NamedTuple):
    """How many tokens of a prompt ranks hold: columns with one row for each rank.

    In each row `device` ≤ `host` ≤ `tokens`; they are 0 where the rank holds nothing, is not known
    or is not in the question.

    Attributes:
        device: tokens that the engine's device holds by itself (`RankMatch.device_tokens`).
        host: those that the device and the host hold together (`RankMatch.host_tokens`).
        tokens: those that all tiers hold together (`RankMatch.tokens`).
        block_size: tokens per block of the rank, whether the question named it or not; 0 while it
            has stored nothing yet, or is not known.
    """

    device: array[int]
    host: array[int]
    tokens: array[int]
    block_size: array[int]


class RankRows(Sequence[Rank]):
    """Ranks in a fixed order: the rows of `Match.hits`.

    Keep it as long as the ranks stay the same. The first `Match.hits` finds each rank once; later
    ones of the same index go on from there, until the index's ranks change.

    Args:
        ranks: the rank of each row, each once; they need not be known.

    Raises:
        ConfigurationError: a rank has two rows.

    Thread safety: any thread may use it.

    Examples:
        >>> rows = RankRows([Rank("b"), Rank("a")])
        >>> len(rows), rows[0], rows.index(Rank("a"))
        (2, Rank(worker='b', dp_rank=0), 1)
    """

    __slots__ = ("_numbered", "_ranks", "_zeros")

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._ranks = tuple(ranks)
        if len(set(self._ranks)) != len(self._ranks):
            twice = next(rank for rank in self._ranks if self._ranks.count(rank) > 1)
            raise ConfigurationError(f"{twice} has two rows: name each rank once")
        self._zeros = array("q", bytes(8 * len(self._ranks)))
        # Of the native index: the directory of ranks it used, and the rows there.
        self._numbered: tuple[object, Any] | None = None

    def _columns(self) -> Hits:
        """Return columns of zeros."""
        zeros = self._zeros
        return Hits(zeros[:], zeros[:], zeros[:], zeros[:])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ranks)

    @overload
    def __getitem__(self, row: int) -> Rank: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Rank, ...]: ...
    def __getitem__(self, row: int | slice) -> Rank | tuple[Rank, ...]:
        """Return the rank of a row, or those of several."""
        return self._ranks[row]

    def __iter__(self) -> Iterator[Rank]:
        """Iterate over the ranks by row."""
        return iter(self._ranks)

    def __repr__(self) -> str:
        return f"RankRows({list(self._ranks)!r})"


Trusts: TypeAlias = Callable[[Rank], Trust | None] | Mapping[Rank, Trust]
"""How far each rank's answer can be trusted; None, or no entry, where nothing is known of it."""


class RankMatch(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt one rank holds.

    Attributes:
        rank: the rank.
        blocks: leading blocks of the prompt that are resident on any allowed medium; for hybrid
            models the blocks that the engine itself would hit.
        tokens: the same in tokens; more where a hit may end within a block (fine hashes, Mamba).
        block_size: tokens per block of the rank, whether it holds anything of the prompt or not; 0
            while the rank has stored nothing yet.
        by_medium: of those blocks, how many are on each medium (one on two media counts for both).
        device_tokens: those of `tokens` that the engine's device holds by itself. The rest it would
            have to load from the host or from storage.
        host_tokens: those of `tokens` that the device holds and, where it ends, the host: so
            `device_tokens` ≤ `host_tokens` ≤ `tokens`. The rest lies in storage.
        upper_bound: whether the engine's own hit may be shorter: its events do not contain all its
            limits (see `CacheSettings`), events of unknown kinds may have removed some of it, or
            part of it must be loaded to the device, which the engine decides for itself.
        lower_bound: whether the engine's own hit may be longer: the rank has stored blocks that
            were left out (`ignored` in its statistics), or whose place no event has given so far,
            and any of them may continue the prompt.
        state: stream state; None without a client.
        complete: whether all of the rank's history was seen; None without a client.
        lag: batches known of but not applied yet; None without a client.
    """

    rank: Rank
    blocks: int = 0
    tokens: int = 0
    block_size: int = 0
    by_medium: dict[str, int] = msgspec.field(default_factory=dict)
    device_tokens: int = 0
    host_tokens: int = 0
    upper_bound: bool = False
    lower_bound: bool = False
    state: State | None = None
    complete: bool | None = None
    lag: int | None = None


class Contents(Protocol):
    """The contents behind a `Match`: which ranks hold how much of a prompt."""

    def get(self, rank: Rank) -> RankMatch | None:
        """Return a rank's match, if the rank holds anything."""

    def nothing(self, rank: Rank) -> RankMatch:
        """Return the match of a rank that holds nothing."""

    def first(self) -> RankMatch | None:
        """Return the match of the first rank of `longest`, None if there is none. O(1)."""

    def longest(self) -> Iterable[Rank]:
        """Return the ranks that hold anything: most tokens first, of equal ones the smallest."""

    def hits(self, rows: RankRows, live: bytes | bytearray | None) -> Hits:
        """Return the answer as columns; see `Match.hits`."""


class PlainContents:
    """The matches of the Python index, and of each of its ranks that of one which holds nothing."""

    __slots__ = ("_matches", "_nothing")

    def __init__(self, matches: Iterable[RankMatch], nothing: Mapping[Rank, RankMatch]) -> None:
        held = (match for match in matches if match.tokens)
        by_length = sorted(held, key=lambda match: (-match.tokens, match.rank))
        self._matches = {match.rank: match for match in by_length}
        self._nothing = nothing

    def get(self, rank: Rank) -> RankMatch | None:
        return self._matches.get(rank)

    def nothing(self, rank: Rank) -> RankMatch:
        return self._nothing[rank]

    def first(self) -> RankMatch | None:
        return next(iter(self._matches.values()), None)

    def longest(self) -> Iterable[Rank]:
        return self._matches

    def hits(self, rows: RankRows, live: bytes | bytearray | None) -> Hits:
        if live is not None and len(live) != len(rows):
            raise ValueError(f"live must have a byte for each of {len(rows)} rows")
        columns = rows._columns()
        for row, rank in enumerate(rows):
            nothing = self._nothing.get(rank)
            columns.block_size[row] = 0 if nothing is None else nothing.block_size
            match = self._matches.get(rank)
            if match is not None and (live is None or live[row]):
                columns.device[row] = match.device_tokens
                columns.host[row] = match.host_tokens
                columns.tokens[row] = match.tokens
        return columns


class Match:
    """The answer to one question: a collection with one `RankMatch` for each rank.

    There is one order everywhere: most tokens first, and of ranks that hold equally much the
    smallest first. A rank is a candidate if it holds part of the prompt and is live. While no rank
    of the answer is live, every rank that holds part of it is a candidate; its `state` shows that.
    Without a client the ranks' streams are unknown, and all ranks count as live.

    Iteration yields all ranks, live or not, those that hold nothing at the end. A rank may be given
    as text: "a/0", or "a" if worker a has one rank only.

    `RankMatch` objects are made when they are read.

    Args:
        contents: which ranks hold how much.
        ranks: the ranks of the question.
        trust: how far each of them can be trusted, as for `Index.match`.

    Thread safety: immutable.

    Examples:
        >>> from kvindex import BlockStored, EventBatch, Index, Rank
        >>> index = Index()
        >>> stored = BlockStored(block_hashes=[7], token_ids=[1, 2, 3, 4], block_size=4)
        >>> index.apply(Rank("a"), EventBatch(ts=0.0, events=[stored]))
        >>> index.add(Rank("b"))
        >>> match = index.match([1, 2, 3, 4, 5])
        >>> match.best.rank, match[Rank("a")].tokens, len(match)
        (Rank(worker='a', dp_rank=0), 4, 2)
        >>> [candidate.rank.worker for candidate in match.top(2)]
        ['a']
        >>> [(rank_match.rank.worker, rank_match.tokens) for rank_match in match]
        [('a', 4), ('b', 0)]
    """

    __slots__ = ("_contents", "_ranks", "_trust")

    def __init__(
        self, contents: Contents, ranks: Collection[Rank], trust: Trusts | None = None
    ) -> None:
        self._contents = contents
        self._ranks = ranks
        self._trust = trust if trust is None or callable(trust) else trust.get

    @property
    def best(self) -> RankMatch | None:
        """The candidate that holds most of the prompt, or None if there is no candidate.

        The result is None if live ranks hold nothing of the prompt, even if a rank that is not live
        does. A rank that is not live is returned only while no rank of the answer is live.

        Complexity: O(1) if the rank that holds most is live, else as `top`.
        """
        first = self._contents.first()
        # Nearly every request ends here: no list of the ranks that hold something is made for it.
        if first is None or self._is_live(first.rank):
            return first and self._trusted(first)
        return next(self._candidates(), None)

    def top(self, n: int) -> list[RankMatch]:
        """Return the first n candidates, or fewer if there are not so many.

        `top(1)` is `[best]`, or empty if there is no best.

        Raises:
            ValueError: n is negative.

        Complexity: O(ranks that hold part of the prompt); a `RankMatch` is made of n of them only.
        """
        return list(islice(self._candidates(), n))

    def hits(self, rows: RankRows, live: bytes | bytearray | None = None) -> Hits:
        """Return the tokens that each of these ranks holds as columns, whether it is live or not.

        Args:
            rows: the ranks; those that are not known, or that the question left out, hold nothing.
            live: for each row, whether its rank's tokens count: a row whose byte is 0 gets zeros.

        Raises:
            ValueError: `live` has not one byte for each row.

        Complexity: O(rows + ranks that hold part of the prompt). No `RankMatch` is made.

        Examples:
            >>> from kvindex import BlockStored, EventBatch, Index, Rank, RankRows
            >>> index = Index()
            >>> stored = BlockStored(block_hashes=[7], token_ids=[1, 2, 3, 4], block_size=4)
            >>> index.apply(Rank("a"), EventBatch(ts=0.0, events=[stored]))
            >>> rows = RankRows([Rank("a"), Rank("b")])
            >>> match = index.match([1, 2, 3, 4, 5])
            >>> match.hits(rows).tokens
            array('q', [4, 0])
            >>> match.hits(rows, live=bytes([0, 1])).tokens
            array('q', [0, 0])
        """
        return self._contents.hits(rows, live)

    def _candidates(self) -> Iterator[RankMatch]:
        holders = self._contents.longest()
        # Where nothing is live, stale answers are better than none. The holders are asked first:
        # nearly always the first one is live, and the other ranks need no look.
        if not any(map(self._is_live, holders)) and not any(map(self._is_live, self._ranks)):
            return map(self._of, holders)
        return map(self._of, filter(self._is_live, holders))

    def __bool__(self) -> bool:
        """Return whether any rank, live or not, holds part of the prompt. O(1)."""
        return self._contents.first() is not None

    def __getitem__(self, rank: RankName) -> RankMatch:
        """Return a rank's match; 0 blocks for a known rank that holds nothing of the prompt.

        Raises:
            UnknownRankError: the rank is not known, or the question left it out (a KeyError).
        """
        return self._of(find_rank(rank, self._ranks))

    def __contains__(self, item: object) -> bool:
        """Return whether `match[item]` works, or a `RankMatch` equals its rank's match."""
        try:
            if isinstance(item, RankMatch):
                return self[item.rank] == item
            find_rank(item, self._ranks)
        except UnknownRankError:
            return False
        return True

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    def __iter__(self) -> Iterator[RankMatch]:
        """Iterate over all ranks, most tokens first, of equal ones the smallest first."""
        holders = self._contents.longest()
        others = sorted(set(self._ranks).difference(holders))
        return map(self._of, chain(holders, others))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Match cannot be pickled or copied: send match.to_dict()")

    def __repr__(self) -> str:
        best = self.best
        what = f"best {best.rank} with {best.tokens} tokens" if best else "no candidate"
        return f"<Match of {len(self)} ranks: {what}>"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain JSON-ready values: each rank's match by `str(rank)`, longest first."""
        plain: dict[str, dict[str, Any]] = {}
        for rank_match in self:
            fields = msgspec.to_builtins(rank_match)
            del fields["rank"]  # a Rank is a tuple, which JSON would show as a list
            worker, dp_rank = rank_match.rank
            plain[str(rank_match.rank)] = {"worker": worker, "dp_rank": dp_rank, **fields}
        return plain

    def _of(self, rank: Rank) -> RankMatch:
        rank_match = self._contents.get(rank)
        return self._trusted(self._contents.nothing(rank) if rank_match is None else rank_match)

    def _trusted(self, rank_match: RankMatch) -> RankMatch:
        trust = None if self._trust is None else self._trust(rank_match.rank)
        if trust is None:
            return rank_match
        return msgspec.structs.replace(rank_match, **trust._asdict())

    def _is_live(self, rank: Rank) -> bool:
        trust = None if self._trust is None else self._trust(rank)
        return trust is None or trust.state == State.LIVE
