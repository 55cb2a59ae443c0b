"""The answer to a query: for each rank, how much of the prompt is resident there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from kvindex.rank import Rank, Trust
from kvindex.rank_lookup import RankName, find_rank

__all__ = ["Found", "FoundMatches", "Match", "RankMatch"]

_LIVE = "live"


class RankMatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds of a prompt.

    Attributes:
        rank: whose answer it is.
        blocks: leading blocks of the prompt that are resident on any allowed medium; for hybrid
            models the blocks that the engine itself would hit.
        tokens: the same in tokens; more, where a hit may end within a block (fine hashes, Mamba).
        block_size: tokens per block of the rank, whether it holds anything of the prompt or not; 0
            while the rank has stored nothing yet.
        by_medium: of those blocks, how many are on each medium (one on two media counts for both).
        device_tokens: those of `tokens` that the engine's device holds by itself. The rest it would
            have to load from the host or from storage.
        upper_bound: whether the engine's own hit may be shorter: its events do not tell all that
            limits it (see `CacheSettings`), or part of it must be loaded to the device, which the
            engine decides for itself.
        state: stream state when asked through a client, else None.
        complete: whether all of the rank's history was seen; None without a client.
        lag: batches known of but not applied yet; None without a client.
    """

    rank: Rank
    blocks: int = 0
    tokens: int = 0
    block_size: int = 0
    by_medium: dict[str, int] = msgspec.field(default_factory=dict)
    device_tokens: int = 0
    upper_bound: bool = False
    state: str | None = None
    complete: bool | None = None
    lag: int | None = None


class Found(Protocol):
    """What the ranks that hold anything of a prompt hold of it."""

    def get(self, rank: Rank) -> RankMatch | None:
        """Return a rank's match, if the rank holds anything."""

    def block_size(self, rank: Rank) -> int:
        """Return a rank's tokens per block, 0 if they are not known."""

    def values(self) -> Iterable[RankMatch]:
        """Return all of them, in no order."""

    def first(self) -> RankMatch | None:
        """Return the one with most tokens, of equal ones the smallest rank's; None if empty."""


class FoundMatches:
    """What the Python index found.

    Args:
        found: the matches of the ranks that hold anything.
        sizes: tokens per block of every rank that was asked for, 0 where they are not known.
    """

    __slots__ = ("_found", "_sizes")

    def __init__(self, found: Iterable[RankMatch], sizes: Mapping[Rank, int]) -> None:
        self._found = {rank_match.rank: rank_match for rank_match in found}
        self._sizes = sizes

    def get(self, rank: Rank) -> RankMatch | None:
        """Return a rank's match; see `Found`."""
        return self._found.get(rank)

    def block_size(self, rank: Rank) -> int:
        """Return a rank's tokens per block; see `Found`."""
        return self._sizes[rank]

    def values(self) -> Iterable[RankMatch]:
        """Return all matches; see `Found`."""
        return self._found.values()

    def first(self) -> RankMatch | None:
        """Return the match to prefer; see `Found`."""
        return min((found for found in self.values() if found.tokens), key=_longest, default=None)


class Match:
    """One answer for all ranks: iterates longest first, `len()` is the number of ranks.

    Ranks that are known but hold nothing of the prompt are part of it, with 0 blocks. `bool()` says
    whether there is a `best`. `in` takes a rank, or a `RankMatch` as iterating gives it.
    `RankMatch`es are made when they are looked at.
    Thread safety: immutable.

    Examples:
        >>> from kvindex import BlockStored, EventBatch, Index, Rank
        >>> index = Index()
        >>> stored = BlockStored(block_hashes=[7], token_ids=[1, 2, 3, 4], block_size=4)
        >>> index.apply(Rank("a"), EventBatch(ts=0.0, events=[stored]))
        >>> match = index.match([1, 2, 3, 4, 5])
        >>> match.best.rank, match[Rank("a")].tokens, len(match)
        (Rank(worker='a', dp_rank=0), 4, 1)
    """

    __slots__ = ("_found", "_ranks", "_trust")

    def __init__(
        self,
        found: Found,
        ranks: Collection[Rank],
        trust: Callable[[Rank], Trust | None] | None = None,
    ) -> None:
        self._found = found
        self._ranks = ranks
        self._trust = trust

    @property
    def best(self) -> RankMatch | None:
        """The live rank that holds most of the prompt; None if no live rank holds a block of it.

        A rank that is not live is named only while no rank of the answer is live: its `state` says
        so. Without a client all ranks count alike. Of ranks that hold equally much the smallest is
        named. Iterate to see what every rank holds, live or not.
        """
        first = self._found.first()
        if first is None or self._trust is None:
            return first
        trusted = self._trusted(first)
        if _is_live(trusted):
            return trusted
        held = [self._trusted(found) for found in self._found.values() if found.tokens]
        live = [found for found in held if _is_live(found)]
        if not live and any(_is_live(self._trusted(RankMatch(rank=rank))) for rank in self._ranks):
            return None
        return min(live or held, key=_longest)

    def __bool__(self) -> bool:
        """Return whether there is a `best`: a rank to prefer, since it holds something."""
        return self.best is not None

    def __getitem__(self, rank: RankName) -> RankMatch:
        """Return a rank's match; 0 blocks for a known rank that holds nothing of the prompt.

        Raises:
            UnknownRankError: the rank is not known, or was not asked for.
        """
        one = find_rank(rank, self._ranks)
        return self._trusted(self._found.get(one) or self._nothing(one))

    def __contains__(self, item: object) -> bool:
        """Return whether a rank is part of the answer, or a `RankMatch` is what it says of one."""
        if isinstance(item, RankMatch):
            return item.rank in self._ranks and self[item.rank] == item
        if isinstance(item, str):
            return any(item in (str(known), known.worker) for known in self._ranks)
        return item in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RankMatch]:
        """Iterate over all ranks, most tokens first, ties by rank."""
        found = {rank_match.rank: rank_match for rank_match in self._found.values()}
        everyone = (found.get(rank) or self._nothing(rank) for rank in self._ranks)
        return iter(sorted(map(self._trusted, everyone), key=_longest))

    def __reduce__(self) -> Any:
        raise TypeError("a Match cannot be pickled or copied: send match.to_dict()")

    def __repr__(self) -> str:
        best = self.best
        found = f"best {best.rank} with {best.tokens} tokens" if best else "nothing resident"
        return f"<Match of {len(self)} ranks: {found}>"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain JSON-ready values: each rank's match by `str(rank)`, longest first."""
        return {str(rank_match.rank): _plain(rank_match) for rank_match in self}

    def with_trust(self, trust: Callable[[Rank], Trust | None]) -> Match:
        """Return the same answer with each rank's trust filled in; None leaves a rank as it is.

        Args:
            trust: called when a rank is looked at; must always say the same of it.
        """
        return Match(self._found, self._ranks, trust)

    def _nothing(self, rank: Rank) -> RankMatch:
        return RankMatch(rank=rank, block_size=self._found.block_size(rank))

    def _trusted(self, rank_match: RankMatch) -> RankMatch:
        found = None if self._trust is None else self._trust(rank_match.rank)
        if found is None:
            return rank_match
        return msgspec.structs.replace(rank_match, **found._asdict())


def _is_live(rank_match: RankMatch) -> bool:
    return rank_match.state in (None, _LIVE)


def _longest(rank_match: RankMatch) -> tuple[int, bool, Rank]:
    return (-rank_match.tokens, not _is_live(rank_match), rank_match.rank)


def _plain(rank_match: RankMatch) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(rank_match)
    del plain["rank"]
    return {"worker": rank_match.rank.worker, "dp_rank": rank_match.rank.dp_rank, **plain}
