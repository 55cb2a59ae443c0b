"""What servers need around `match`: a query's JSON to tokens, and an answer to JSON.

Both are done by the native module for a whole prompt and for all ranks at once, without a Python
object for each token or rank. Nothing here knows HTTP.
"""

from __future__ import annotations

import enum
import re

import msgspec

from kvindex.wire.backend import why_not_native

try:
    from kvindex.wire._native import AnswerWriter
    from kvindex.wire._native import read_query as _scan
except ImportError as error:
    raise ImportError(
        f"kvindex.service needs the native module: {why_not_native()}", name=error.name
    ) from error

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvindex.index import Hits, Match, RankRows
from kvindex.wire.errors import UNREADABLE, ConfigurationError, QueryError
from kvindex.wire.rank import Rank, State, Trust

__all__ = ["AnswerForm", "Query", "QueryError", "read_query"]

_FIELD = "token_ids"
_NO_LIMIT = 2**62
_SHOWN = 40  # bytes of what was found


class Fault(enum.IntEnum):
    """What is wrong with a body; the native core has the same numbers."""

    NO_OBJECT = 1
    SYNTAX = 2
    NO_ARRAY = 3
    BAD_TOKEN = 4
    REPEATED = 5
    TOO_MANY = 6
    TOO_DEEP = 7
    NO_TEXT = 8


class Query(msgspec.Struct, frozen=True):
    """What a query's body holds.

    Attributes:
        token_ids: the tokens, as a memoryview of uint32 that `match` reads in place; None if the
            body has no such field.
        rest: the same JSON object without them, to be decoded, and so checked, by msgspec.
    """

    token_ids: memoryview | None
    rest: bytes


def read_query(body: bytes | bytearray | memoryview, *, max_tokens: int | None = None) -> Query:
    """Return the tokens of a query's JSON, and the rest of it.

    The body is one JSON object in UTF-8. Its field `token_ids` is read by a single pass to numbers
    in memory, without a Python int for each. All other fields are left to the caller: decode
    `rest` with msgspec, which finds what is wrong there. A body that is no JSON leaves a rest that
    is none.

    Args:
        body: the bytes of the request.
        max_tokens: refuse more tokens than that; None: take as many as there are.

    Raises:
        QueryError: the body is no JSON object, or `token_ids` is no array of whole numbers from 0
            to 4294967295. The first fault of the body is reported. Values more than 100 levels
            deep count as malformed, and a second `token_ids` as a fault.
        ConfigurationError: `max_tokens` is negative.
        TypeError: `body` has no row of bytes to give.

    Complexity: O(bytes of the body) in time and in memory: 8,192 tokens take some 40 µs.
        The GIL is released for bodies of 256 KiB and more.

    Thread safety: any thread may call it.

    Examples:
        >>> query = read_query(b'{"model_name":"m", "token_ids": [1, 2, 3]}')
        >>> query.token_ids.tolist(), query.rest
        ([1, 2, 3], b'{"model_name":"m"}')
        >>> read_query(b'{"token_ids": [1, 2.5]}')
        Traceback (most recent call last):
        ...
        kvindex.wire.errors.QueryError: token_ids[1] is 2.5: a token is a whole number from 0 to ...
    """
    limit = _NO_LIMIT
    if max_tokens is not None:
        if max_tokens < 0:
            raise ConfigurationError(f"max_tokens is {max_tokens}: it is 0 or more, or None")
        limit = min(max_tokens, limit)
    scanned = _scan(body, limit)
    # A fault has three numbers. Only here it gets words: the native code knows none.
    if len(scanned) == 3:
        raise _error(bytes(body), Fault(scanned[0]), scanned[1], scanned[2])
    tokens, rest = scanned
    return Query(None if tokens is None else memoryview(tokens).cast("I"), rest)


def _error(body: bytes, fault: Fault, at: int, index: int) -> QueryError:
    if fault is Fault.BAD_TOKEN:
        kind = _kind(body, at)
        # What stands there may be no JSON at all, which the scanner leaves to us.
        if kind is None:
            return _malformed(body, Fault.SYNTAX, at)
        return QueryError(
            f"{_FIELD}[{index}] is {kind}: a token is a whole number from 0 to 4294967295",
            reason="range" if _OUT_OF_RANGE.match(body, at) else "type",
            field=_FIELD,
            position=index,
        )
    if fault is Fault.TOO_MANY:
        return _about_tokens(f"more than {index} tokens: send fewer", "too_many", index)
    if fault is Fault.REPEATED:
        return _about_tokens("given more than once: send it once", "repeated")
    kind = None if fault in (Fault.SYNTAX, Fault.TOO_DEEP, Fault.NO_TEXT) else _kind(body, at)
    if fault is Fault.NO_ARRAY and kind is not None:
        return _about_tokens(f"{kind}: it must be an array of tokens", "type")
    if fault is Fault.NO_OBJECT and kind is not None:
        # The scanner has looked at the first byte only: the rest may be no JSON.
        with suppress(*UNREADABLE):
            msgspec.json.decode(body, type=msgspec.Raw)
            return QueryError(f"the body is {kind}: it must be a JSON object", reason="type")
    return _malformed(body, fault, at)


def _malformed(body: bytes, fault: Fault, at: int) -> QueryError:
    if fault is Fault.NO_OBJECT and at < len(body):
        why = f"it begins with {_shown(body, at)}"
    elif fault is Fault.TOO_DEEP:
        why = f"at byte {at} values are nested more than 100 levels deep"
    elif fault is Fault.NO_TEXT:
        why = "it has bytes that are not UTF-8"
    elif at < len(body):
        why = f"at byte {at} stands {_shown(body, at)}, which cannot be there"
    else:
        why = f"it ends at byte {at}, within a value" if body else "it is empty"
    return QueryError(f"the body is not JSON: {why}", reason="malformed")


def _about_tokens(what: str, reason: str, position: int | None = None) -> QueryError:
    return QueryError(f"{_FIELD} is {what}", reason=reason, field=_FIELD, position=position)


# Of a number that is no token: it has no fraction, no exponent, and is not "-0".
_OUT_OF_RANGE = re.compile(rb"-?[1-9][0-9]*(?![0-9.eE])")
_SCALAR = re.compile(
    rb"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)"
    rb"(?=[ \n\r\t,\]}]|\Z)"
)
_KINDS = {b'"': "a string", b"[": "an array", b"{": "an object"}


def _kind(body: bytes, at: int) -> str | None:
    """Return what kind of value begins at a byte, in words; None if it is no JSON."""
    scalar = _SCALAR.match(body, at)
    return _shown(scalar[0], 0) if scalar else _KINDS.get(body[at : at + 1])


def _shown(body: bytes, at: int) -> str:
    """Return what stands at a byte, fit for a line of a log."""
    text = repr(body[at : at + _SHOWN])[2:-1]
    return f"{text}…" if len(body) - at > _SHOWN else text


# From good to bad. `State` has another order: that of a stream's life.
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


class _TrustTexts(NamedTuple):
    """What is written of trust at each instance's end, until another mapping comes."""

    trusts: Mapping[Rank, Trust]
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
        try:
            form = _Format[dialect.upper()]
        except KeyError:
            known = ", ".join(f'"{form.name.lower()}"' for form in _Format)
            raise ConfigurationError(f"dialect is {dialect!r}: it is one of {known}") from None
        members = [(_name(name), [_dp_rank(rank) for rank in ranks]) for name, ranks in instances]
        _refuse_repeated((name for name, _ in members), "instances")
        for name, dp_ranks in members:
            _refuse_repeated(dp_ranks, f"ranks of instance {name}")
        self.rows = RankRows(rank for _, ranks in instances for rank in ranks)
        self._of_instance: list[slice] = []
        for _, dp_ranks in members:
            start = self._of_instance[-1].stop if self._of_instance else 0
            self._of_instance.append(slice(start, start + len(dp_ranks)))
        self._writer = AnswerWriter(form, _name(tenant), members)
        self._written: _TrustTexts | None = None

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
        if trusts is None:
            return self._writer.write(hits.device, hits.host, hits.tokens, None)
        written = self._written
        if written is None or written.trusts is not trusts:
            # One rank's lag changes with each of its batches: texts of other instances stay.
            by_row = tuple([trusts.get(rank, _JUST_ADDED) for rank in self.rows])
            texts = tuple(
                written.texts[at]
                if written is not None and written.by_row[rows] == by_row[rows]
                else _trust_text(self.rows[rows], by_row[rows])
                for at, rows in enumerate(self._of_instance)
            )
            written = self._written = _TrustTexts(trusts, by_row, texts)
        return self._writer.write(hits.device, hits.host, hits.tokens, written.texts)


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


def _name(instance: int | str) -> str:
    """Return the name of a member, as JSON."""
    if isinstance(instance, bool) or not isinstance(instance, (int, str)):
        raise ConfigurationError(f"an instance is {instance!r}: its id is a number or a text")
    try:
        return msgspec.json.encode(str(instance)).decode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{instance!r} is no text that UTF-8 can write") from None


def _dp_rank(rank: Rank) -> str:
    return f'"{int(rank.dp_rank)}"'


def _refuse_repeated(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(f"two {what} are called {name}: an answer can name each once")
        seen.add(name)
