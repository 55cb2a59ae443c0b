"""The ranks that a router chooses among: their rows, and their streams' states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeAlias, TypedDict

import msgspec

from kvindex.index import ExtraKeys, Index, Lora, Match, RankRows, TokenIds
from kvindex.wire.errors import ConfigurationError, UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, RankNames


class Followed(Protocol):
    """An index whose ranks are followed: a `Client` or a `Replica`."""

    @property
    def index(self) -> Index:
        """The index that the events fill; a replica has another one after each joining."""

    def check_open(self) -> None:
        """Raise ClosedError once it was closed."""

    def live_ranks(self) -> frozenset[Rank]:
        """Return the ranks that are live; the same object until they change."""

    def connected_ranks(self) -> frozenset[Rank]:
        """Return the ranks whose publisher is connected; the same object until they change."""


Source: TypeAlias = Index | Followed
"""What a router asks. All ranks of a bare index count as live."""


class Standing(msgspec.Struct, frozen=True):
    """A source at one moment.

    Attributes:
        index: the index, to be queried after the states were read.
        live: the ranks that are live; None for a bare index: all count as live.
        connected: those whose publisher is connected; None likewise.
    """

    index: Index
    live: frozenset[Rank] | None
    connected: frozenset[Rank] | None


class PromptOptions(TypedDict, total=False):
    """The options of `Router.place`: what the prompt's cached blocks depend on besides its tokens.

    Attributes:
        lora: the request's LoRA adapter.
        salt: its cache salt.
        extra_keys: for each block what its identity covers besides tokens.
        reads_cache: False if the engine will not read its cache for this request, such as with
            `prompt_logprobs` (see `reads_cache`). Then every rank has to prefill the whole prompt,
            and the load decides.
    """

    lora: Lora
    salt: str | None
    extra_keys: ExtraKeys | None
    reads_cache: bool


class RequestOptions(PromptOptions, total=False):
    """The options of `Router.select` and `Router.reserve`: as `PromptOptions`, and these.

    Attributes:
        ranks: choose among these only. "a/0" stands for `Rank("a", 0)`, "a" for all of "a".
        labels: the labels that a rank must have, for the filter `Labels`.
        exclude: ranks that must not be chosen, named likewise: those that a retry has tried before.
        prompt_tokens: tokens of a prompt whose tokens are not known (`token_ids` is empty then), as
            an estimate. They count as load, and no rank counts as holding any of them.
    """

    ranks: Iterable[RankName] | RankName | None
    labels: Mapping[str, str] | None
    exclude: Iterable[RankName] | RankName
    prompt_tokens: int | None


class RoutedRequest(NamedTuple):
    """A request to route: the prompt's tokens, and its `RequestOptions`."""

    token_ids: TokenIds
    lora: Lora = None
    salt: str | None = None
    extra_keys: ExtraKeys | None = None
    reads_cache: bool = True
    ranks: Iterable[RankName] | RankName | None = None
    labels: Mapping[str, str] | None = None
    exclude: Iterable[RankName] | RankName = ()
    prompt_tokens: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) if self.prompt_tokens is None else self.prompt_tokens

    def checked(self) -> RoutedRequest:
        """Return the request; without its tokens, the engine's cache does not count.

        Raises:
            ConfigurationError: `prompt_tokens` is no number from 0, or the tokens are given, too.
        """
        tokens = self.prompt_tokens
        if tokens is None:
            return self
        if len(self.token_ids) or not isinstance(tokens, int) or tokens < 0:
            raise ConfigurationError(
                f"prompt_tokens is {tokens!r} beside {len(self.token_ids)} token_ids: give a "
                "number from 0, for a prompt without token_ids"
            )
        return self._replace(reads_cache=False)

    def match(self, index: Index) -> Match:
        """Return the ranks' match of the prompt without its last token."""
        prompt, lora, salt, extra_keys, *_ = self
        return index.match(prompt, lora=lora, salt=salt, extra_keys=extra_keys, recomputed=1)


def look(source: Source) -> Standing:
    """Return the states of a source's streams now, and the index to ask after that. O(1)."""
    if isinstance(source, Index):
        return Standing(source, None, None)
    live, connected = source.live_ranks(), source.connected_ranks()
    return Standing(source.index, live, connected)


def ask(source: Source, request: RoutedRequest) -> tuple[Standing, Match]:
    """Return a source's standing, and after that the ranks' match of a request's prompt.

    Raises:
        ClosedError: the client or replica was closed, so its index is no longer updated.
        TokenError, ConfigurationError: as `Index.match`.
    """
    if not isinstance(source, Index):
        source.check_open()
    standing = look(source)
    return standing, request.match(standing.index)


class Fleet:
    """The ranks of a source at one moment, each a row, with their streams' states. Immutable.

    Attributes:
        ranks: the ranks by row, sorted.
        rows: the same, for `Match.hits`.
        row_of: each rank's row.
        live: a byte for each row: 0 if the rank is not live.
        connected: a byte for each row: 0 if its publisher is not connected; None if all are.
    """

    __slots__ = ("_names", "_standing", "connected", "live", "ranks", "row_of", "rows")
    rows: RankRows
    row_of: dict[Rank, int]
    _names: RankNames

    def __init__(self, standing: Standing, before: Fleet | None = None) -> None:
        self._standing = standing
        ranks = self.ranks = standing.index.ranks
        if before is not None and ranks is before.ranks:
            self.rows, self.row_of, self._names = before.rows, before.row_of, before._names
        else:
            self.rows = RankRows(ranks)
            self.row_of = {rank: row for row, rank in enumerate(ranks)}
            self._names = RankNames(ranks)
        live, connected = standing.live, standing.connected
        self.live = b"\1" * len(ranks) if live is None else bytes(map(live.__contains__, ranks))
        self.connected: bytes | None = None
        if connected is not None and not connected.issuperset(ranks):
            self.connected = bytes(map(connected.__contains__, ranks))

    def follow(self, standing: Standing) -> Fleet:
        """Return the fleet as it is now: the same object if nothing has changed.

        Complexity: O(1) then, since changed sets and tuples are made anew.
        """
        before = self._standing
        if (
            standing.index.ranks is self.ranks
            and standing.live is before.live
            and standing.connected is before.connected
        ):
            return self
        return Fleet(standing, self)

    def named(self, name: RankName) -> list[Rank]:
        """Return the ranks that a name stands for; raises UnknownRankError if there is none."""
        return self._names.find(name)

    def row(self, name: RankName) -> int:
        """Return the row of the rank that a name stands for; raises UnknownRankError. O(1)."""
        ranks = self._names.find(name)
        if len(ranks) > 1:
            raise UnknownRankError(name, ranks, ambiguous=True)
        return self.row_of[ranks[0]]

    def mask(self, names: Iterable[RankName] | RankName) -> bytearray:
        """Return a byte for each row: 1 if a name stands for its rank; raises UnknownRankError."""
        mask = bytearray(len(self.ranks))
        for name in [names] if isinstance(names, (str, Rank)) else names:  # a Rank is a tuple, too
            for rank in self._names.find(name):
                mask[self.row_of[rank]] = 1
        return mask
