"""An answer as JSON that routers of other makes read, with each instance's trust."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kvindex.index import Hits, Match, RankRows
from kvindex.wire._native import AnswerWriter
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank, State, Trust

_WORSE: Final = (
    State.LIVE,
    State.STALE,
    State.REPAIRING,
    State.SYNCING,
    State.CONNECTING,
    State.CLOSED,
)
_JUST_ADDED = Trust(State.CONNECTING, False, 0)


class _Format(enum.IntEnum):
    """Whose JSON is written; the native core has the same numbers."""

    DYNAMO = 0
    RFC = 1


class _Written(NamedTuple):
    """What is written of trust, until another mapping comes."""

    of: Mapping[Rank, Trust]
    by_row: tuple[Trust, ...]
    texts: tuple[bytes, ...]


class AnswerForm:
    """The JSON of answers for some instances, all but the numbers written beforehand.

    In each dialect, ranks and instances that hold nothing of the prompt are absent, and counts are
    in tokens where not said otherwise. `host` stands for what device and host hold together, and
    `all` for what all tiers hold together, each the most of an instance's ranks:

    - "dynamo", as NVIDIA Dynamo's indexer answers: `{"scores": {ID: {DP_RANK: device}},
      "frequencies": [], "instances": {ID: {"longest_matched": all, "gpu": device, "dp": {DP_RANK:
      device}, "cpu": host, "disk": all}}}`. Ranks whose device holds nothing are not in `scores`.
    - "rfc", as RFC 1403 of Mooncake has it: `{TENANT: {ID: {"longest_matched": all, "GPU": device,
      "DP": {DP_RANK: all}, "CPU": host, "DISK": all}}}`.

    Each instance's object ends with how far it can be trusted: `"state"`, `"complete"` and `"lag"`,
    each that of its worst rank, and `"ranks": {DP_RANK: {"state", "complete", "lag"}}` for all of
    them. From good to bad, states are live, stale, repairing, syncing, connecting and closed. So
    `complete` says whether all of its ranks are, and `lag` is the largest.

    Args:
        instances: the id of each instance, with its ranks. An id that is a number is written in
            decimal digits, since names in JSON are strings.
        dialect: "dynamo" or "rfc".
        tenant: whose answers these are, in dialects that say so.

    Raises:
        ConfigurationError: the dialect is unknown, two instances have one name, two ranks of an
            instance have one dp_rank, a rank is in two instances, or a name is no text.

    Attributes:
        rows: the ranks of all instances, in order: the rows of `columns`.

    Thread safety: immutable but for what it remembers of trust; any thread may use it.

    Examples:
        >>> from kvindex import BlockStored, EventBatch, Index, Rank
        >>> index = Index()
        >>> stored = BlockStored(block_hashes=[7], token_ids=[1, 2, 3, 4], block_size=4)
        >>> index.apply(Rank("a"), EventBatch(ts=0.0, events=[stored]))
        >>> form = AnswerForm([("a", [Rank("a")]), ("b", [Rank("b")])], "rfc")
        >>> form.write(index.match([1, 2, 3, 4, 5]), None)
        b'{"default":{"a":{"longest_matched":4,"GPU":4,"DP":{"0":4},"CPU":4,"DISK":4}}}'
    """

    def __init__(
        self,
        instances: Sequence[tuple[int | str, Sequence[Rank]]],
        dialect: str = "dynamo",
        *,
        tenant: str = "default",
    ) -> None:
        named = [(_name(of), [_dp_rank(rank) for rank in ranks]) for of, ranks in instances]
        _refuse_repeated((name for name, _ in named), "instances")
        for name, dp_ranks in named:
            _refuse_repeated(dp_ranks, f"ranks of instance {name}")
        self.rows = RankRows(rank for _, ranks in instances for rank in ranks)
        self._of_instance: list[slice] = []
        for _, dp_ranks in named:
            start = self._of_instance[-1].stop if self._of_instance else 0
            self._of_instance.append(slice(start, start + len(dp_ranks)))
        self._writer = AnswerWriter(_dialect(dialect), _name(tenant), named)
        self._written: _Written | None = None

    def columns(self, match: Match) -> Hits:
        """Return what each rank of `rows` holds, those that hold nothing included.

        For answers that are not JSON, and for counting hits.
        """
        return match.hits(self.rows)

    def write(self, match: Match | Hits, trusts: Mapping[Rank, Trust] | None) -> bytes:
        """Return the JSON of an answer for all instances.

        Args:
            match: the answer, or `columns` of it, where those are at hand.
            trusts: how far ranks can be trusted, as of `Client.trusts()`, taken before the match: a
                mapping that does not change. What is written of it is kept until another one comes.
                A rank that is not in it is connecting. None: nothing is written of trust.

        Raises:
            ValueError: the columns are not those of this form's `rows`.

        Complexity: O(ranks); and O(ranks) in Python once for each other `trusts`. No object is made
            for a rank.
        """
        hits = match if isinstance(match, Hits) else match.hits(self.rows)
        written = None if trusts is None else self._trust(trusts)
        return self._writer.write(hits.device, hits.host, hits.tokens, written)

    def _trust(self, trusts: Mapping[Rank, Trust]) -> tuple[bytes, ...]:
        """Return what is written of trust at each instance's end."""
        written = self._written
        if written is None or written.of is not trusts:
            by_row = tuple([trusts.get(rank, _JUST_ADDED) for rank in self.rows])
            texts = tuple(
                written.texts[at]
                if written is not None and written.by_row[rows] == by_row[rows]
                else _trust_text(self.rows[rows], by_row[rows])
                for at, rows in enumerate(self._of_instance)
            )
            written = self._written = _Written(trusts, by_row, texts)
        return written.texts


def _trust_text(ranks: Sequence[Rank], trusts: Sequence[Trust]) -> bytes:
    """Return the members that say how far an instance can be trusted, a comma first."""
    worst = Trust(
        state=max((trust.state for trust in trusts), key=_WORSE.index, default=State.CLOSED),
        complete=all(trust.complete for trust in trusts),
        lag=max((trust.lag for trust in trusts), default=0),
    )
    by_rank = ",".join(
        f"{_dp_rank(rank)}:{{{_members(trust)}}}" for rank, trust in zip(ranks, trusts, strict=True)
    )
    return f',{_members(worst)},"ranks":{{{by_rank}}}'.encode()


def _members(trust: Trust) -> str:
    complete = "true" if trust.complete else "false"
    return f'"state":"{trust.state.value}","complete":{complete},"lag":{trust.lag}'


def _dialect(name: str) -> _Format:
    try:
        return _Format[name.upper()]
    except KeyError:
        known = ", ".join(f'"{each.name.lower()}"' for each in _Format)
        raise ConfigurationError(f"dialect is {name!r}: it is one of {known}") from None


def _name(given: int | str) -> str:
    """Return the name of a member, as JSON."""
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise ConfigurationError(f"an instance is {given!r}: its id is a number or a text")
    try:
        return msgspec.json.encode(str(given)).decode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{given!r} is no text that UTF-8 can write") from None


def _dp_rank(rank: Rank) -> str:
    return f'"{int(rank.dp_rank)}"'


def _refuse_repeated(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(f"two {what} are called {name}: an answer can name each once")
        seen.add(name)
