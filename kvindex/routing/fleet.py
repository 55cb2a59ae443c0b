"""The ranks that a router chooses among: their rows and states, and which a request may go to."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar

import msgspec

from kvindex.index import ExtraKeys, Index, Lora, Match, RankRows, TokenIds
from kvindex.routing.load import LoadColumns
from kvindex.wire.errors import ConfigurationError, NoCandidateError, UnknownRankError
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
    """A source at one moment."""

    index: Index  # to be queried after the states were read
    live: frozenset[Rank] | None  # None for a bare index: all count as live
    connected: frozenset[Rank] | None  # whose publisher is; None likewise


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
        prompt_tokens: tokens of all that has to be computed for the request, perhaps as an
            estimate, where `token_ids` are only the first of several prompts, or are not known and
            empty. They count as load; no rank counts as holding any beyond `token_ids`.
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
        """Return the request, or raise ConfigurationError."""
        tokens = self.prompt_tokens
        if tokens is None:
            return self
        known = len(self.token_ids)
        if not isinstance(tokens, int) or tokens < known:
            raise ConfigurationError(
                f"prompt_tokens is {tokens!r} beside {known} token_ids: give a number from {known}"
            )
        # No rank can be credited for unknown tokens.
        return self if known else self._replace(reads_cache=False)

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

    Raises ClosedError, since a closed source's index is no longer updated, and as `Index.match`.
    """
    if not isinstance(source, Index):
        source.check_open()
    # First the states: a rank that is cleared between the two is then live with nothing, and not
    # dead with blocks that count.
    standing = look(source)
    return standing, request.match(standing.index)


class Fleet:
    """The ranks of a source at one moment, each a row, with their streams' states. Immutable."""

    __slots__ = ("_names", "_standing", "connected", "live", "ranks", "row_of", "rows")
    rows: RankRows  # for `Match.hits`
    row_of: dict[Rank, int]
    _names: RankNames

    def __init__(self, standing: Standing, before: Fleet | None = None) -> None:
        self._standing = standing
        ranks = self.ranks = standing.index.ranks
        # The states change often, the ranks seldom: their rows and names are made once.
        if before is not None and ranks is before.ranks:
            self.rows, self.row_of, self._names = before.rows, before.row_of, before._names
        else:
            self.rows = RankRows(ranks)
            self.row_of = {rank: row for row, rank in enumerate(ranks)}
            self._names = RankNames(ranks)
        # A byte for each row: 0 if the rank is not live, or not connected; None if all are.
        live, connected = standing.live, standing.connected
        self.live = b"\1" * len(ranks) if live is None else bytes(map(live.__contains__, ranks))
        self.connected: bytes | None = None
        if connected is not None and not connected.issuperset(ranks):
            self.connected = bytes(map(connected.__contains__, ranks))

    def follow(self, standing: Standing) -> Fleet:
        """Return the fleet as it is now: the same object if nothing has changed, in O(1)."""
        before = self._standing
        # By identity: a source replaces these objects when they change, and never changes them.
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


# Filters ------------------------------------------------------------------------------------------


class FilterRequest(NamedTuple):
    """A request, and the ranks that a filter judges for it.

    Attributes:
        ranks: the ranks, sorted.
        live: a byte for each rank: 0 if it is not live.
        loads: each rank's load.
        prompt_tokens: tokens of the prompt.
        lora: the request's adapter.
        labels: the labels that the request wants.
    """

    ranks: Sequence[Rank]
    live: bytes | bytearray
    loads: LoadColumns
    prompt_tokens: int
    lora: Lora
    labels: Mapping[str, str]


class Filter(Protocol):
    """Decides which ranks may be chosen. Called under the router's lock, so it must be quick."""

    @property
    def name(self) -> str:
        """Its name in errors and statistics."""

    def keeps(self, request: FilterRequest, /) -> Iterable[object]:
        """Return for each rank whether it may be chosen (by its truth)."""


_Value = TypeVar("_Value")
ByRank: TypeAlias = Mapping[Rank, _Value] | Mapping[str, _Value]


def _values_of(rank: Rank, table: ByRank[_Value]) -> list[_Value]:
    """Return the values given for a rank's worker and for the rank, by any of its names."""
    entries: Mapping[Any, _Value] = table
    return [entries[name] for name in _names(rank) if name in entries]


# Filters ask for the names of each rank at each request, under the router's lock.
@lru_cache(maxsize=4_096)
def _names(rank: Rank) -> tuple[str, str, Rank]:
    return rank.worker, str(rank), rank


class Labels:
    """Keeps the ranks that have all labels that the request asks for (`labels=`).

    Args:
        labels: the labels of ranks, read at each request. A rank may be given as text; a worker's
            name stands for all its ranks, and each may have labels of its own, too.

    Examples:
        >>> zones = Labels({"vllm-0": {"gpu": "h100"}, "vllm-0/1": {"zone": "b"}})
    """

    name = "labels"

    def __init__(self, labels: ByRank[Mapping[str, str]]) -> None:
        self._labels = labels

    def keeps(self, request: FilterRequest) -> Iterable[object]:
        if not (wanted := request.labels.items()):
            return _all(request)
        return (wanted <= self._labels_of(rank).items() for rank in request.ranks)

    def _labels_of(self, rank: Rank) -> Mapping[str, str]:
        tables = _values_of(rank, self._labels)
        if len(tables) == 1:  # as a rule: no copy
            return tables[0]
        return dict(pair for table in tables for pair in table.items())


class LoraLoaded:
    """Keeps the ranks that have loaded the request's LoRA adapter; all, for a request without one.

    Args:
        loaded: the adapters of ranks, by the names that `Labels` accepts; read at each request.
    """

    name = "lora"

    def __init__(self, loaded: ByRank[Collection[str | int]]) -> None:
        self._loaded = loaded

    def keeps(self, request: FilterRequest) -> Iterable[object]:
        if (lora := request.lora) is None:
            return _all(request)
        return (
            any(lora == loras or lora in loras for loras in _values_of(rank, self._loaded))
            for rank in request.ranks
        )


class Capacity:
    """Keeps the ranks that have room for one more request.

    Args:
        open_requests: most open requests of a rank.
        queued_tokens: most tokens to prefill of a rank, this prompt's not among them.
        decode_blocks: most blocks of a rank's open requests.

    Raises:
        ConfigurationError: no limit is given.
    """

    name = "capacity"

    def __init__(
        self,
        *,
        open_requests: int | None = None,
        queued_tokens: int | None = None,
        decode_blocks: int | None = None,
    ) -> None:
        limits = (queued_tokens, open_requests, decode_blocks)
        if limits == (None, None, None):
            raise ConfigurationError("give Capacity at least one limit")
        self._limits = [limit if limit is not None else float("inf") for limit in limits]

    def keeps(self, request: FilterRequest) -> Iterable[object]:
        # This request would be one more; its tokens and its blocks are not counted.
        queued, opened, decode = self._limits
        columns = zip(*request.loads[:3], strict=True)
        return (q <= queued and o < opened and d <= decode for q, o, d in columns)


class OnlyLive:
    """Keeps the live ranks.

    Without it, a rank that is not live may be chosen, as one that holds nothing.
    """

    name = "live"

    def keeps(self, request: FilterRequest) -> Iterable[object]:
        return request.live


class Ejection:
    """Leaves out workers that fail, for a while: they answer quickest, and so look idle.

    A worker is ejected by the third failure in a row, or by one that shows that it is down, for
    `seconds`; each further time for twice as long. Then one request tries it: if that fails, too,
    it is ejected again. At most a `share` of the workers are ejected at a time, those that were
    first, and none if no other rank could serve a request.

    The caller reports what became of requests; a router only reads it. With what `sent` has
    returned, a report about a request that was sent before an ejection changes nothing: it does not
    tell how the worker serves new ones.

    Args:
        seconds: of the first time.
        longest: seconds at most.
        share: of the workers, the most that are ejected at a time, from 0 to 1.
        clock: returns monotonic seconds.

    Raises:
        ConfigurationError: a number that cannot work.

    Thread safety: any thread may call every method.

    Examples:
        >>> from kvindex import Index
        >>> from kvindex.routing import Router
        >>> index, ejection = Index(), Ejection()
        >>> for worker in ("a", "b"):
        ...     index.add(Rank(worker))
        >>> ejection.failed("a", is_down=True)
        >>> Router(index, filters=[ejection]).select([1, 2, 3]).rank
        Rank(worker='b', dp_rank=0)
    """

    name = "ejected"

    def __init__(
        self,
        *,
        seconds: float = 5.0,
        longest: float = 60.0,
        share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < seconds <= longest < math.inf:
            raise ConfigurationError(f"seconds={seconds!r} must be over 0 and up to {longest!r}")
        if not 0 <= share <= 1:
            raise ConfigurationError(f"share={share!r} must be from 0 to 1")
        self._seconds = seconds
        self._longest = longest
        self._share = share
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: dict[str, _Failing] = {}  # in the order of their ejection
        self._ejections = 0

    def keeps(self, request: FilterRequest) -> Iterable[object]:
        if not self._failing:
            return _all(request)
        out = self._out({rank.worker for rank in request.ranks}, self._clock())
        return [rank.worker not in out for rank in request.ranks]

    def _out(self, workers: Collection[str], now: float) -> dict[str, _Failing]:
        with self._lock:
            out = (
                (worker, failing)
                for worker, failing in self._failing.items()
                if worker in workers and failing.until > now
            )
            return dict(islice(out, int(len(workers) * self._share)))

    def is_out(self, worker: str) -> bool:
        """Return whether a worker is to be left alone now, even if no other is there. O(1)."""
        failing = self._failing.get(worker)
        return failing is not None and failing.until > self._clock()

    def sent(self, worker: str) -> int:
        """Note that a request was sent to a worker: one whose time is over is tried by it. O(1).

        Return what reports about this request are to be given.
        """
        failing = self._failing.get(worker)
        if failing is None:
            return 0
        is_due = failing.times and not failing.has_begun
        if is_due and failing.until <= (now := self._clock()):
            # Nobody else tries it meanwhile; if nothing is reported, the next one does.
            failing.is_tried, failing.until = True, now + self._seconds
        return failing.times

    def begun(self, worker: str, sent: int | None = None) -> None:
        """Note that a worker begins to answer: it may be tried by others, too. O(1)."""
        failing = self._failing.get(worker)
        if failing is not None and failing.is_tried and sent in (None, failing.times):
            failing.until, failing.has_begun = 0.0, True

    def succeeded(self, worker: str, sent: int | None = None) -> None:
        """Note that a worker answered a request, or refused it for what it asks. O(1)."""
        failing = self._failing.get(worker)
        if failing is None:
            return
        is_over = failing.is_tried or failing.until <= self._clock()
        if sent == failing.times or (sent is None and is_over):
            with self._lock:
                self._failing.pop(worker, None)

    def failed(
        self, worker: str, sent: int | None = None, *, is_down: bool = False, reason: str = ""
    ) -> None:
        """Note that a worker failed a request, and why; `is_down` if nobody can connect to it."""
        now = self._clock()
        with self._lock:
            if len(self._failing) >= _MOST_FAILING:  # workers come and go
                self._failing.pop(next(iter(self._failing)))
            failing = self._failing.setdefault(worker, _Failing())
            if sent not in (None, failing.times) or (failing.until > now and not failing.is_tried):
                return  # of a request that was sent before: another one has judged the worker
            failing.in_a_row += 1
            failing.reason = reason
            if is_down or failing.is_tried or failing.in_a_row >= _MOST_IN_A_ROW:
                longer = 2.0 ** min(failing.times, 30)
                failing.until = now + min(self._longest, self._seconds * longer)
                failing.times += 1
                failing.is_tried = failing.has_begun = False
                self._ejections += 1
                # Behind those that were ejected before it.
                self._failing[worker] = self._failing.pop(worker)

    def statistics(self, workers: Collection[str]) -> dict[str, Any]:
        """Return `ejections`, their number, and which of a router's workers are `ejected` now.

        Each of them with the `seconds` that are left, its `failures` in a row, and the `reason` of
        the last one.
        """
        now = self._clock()
        ejected = {
            worker: {
                "seconds": failing.until - now,
                "failures": failing.in_a_row,
                "reason": failing.reason,
            }
            for worker, failing in self._out(workers, now).items()
        }
        return {"ejections": self._ejections, "ejected": ejected}


_MOST_IN_A_ROW: Final = 3  # failures: one alone may be the request's own fault
_MOST_FAILING: Final = 4_096


class _Failing:
    """A worker that has failed since it last answered."""

    __slots__ = ("has_begun", "in_a_row", "is_tried", "reason", "times", "until")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.reason = ""  # of the last failure
        self.times = 0  # that it was ejected
        self.until = 0.0
        self.is_tried = False  # by one request, since its time is over
        self.has_begun = False  # to answer that one


class Prefer:
    """Keeps the ranks that another filter keeps, unless the router would have no rank left.

    It comes last, so it is a preference among the eligible and connected ranks.

    Examples:
        >>> nearby = Prefer(Labels({"vllm-0": {"zone": "a"}}))
        >>> nearby.name
        'prefer labels'
    """

    def __init__(self, preferred: Filter) -> None:
        self._preferred = preferred
        self.name = f"prefer {preferred.name}"

    def keeps(self, request: FilterRequest) -> Iterable[object]:
        return self._preferred.keeps(request)


def _all(request: FilterRequest) -> bytes:
    return b"\1" * len(request.ranks)


class Eligible:
    """Decides which ranks may be chosen, and counts the refused ones, by reason.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self, filters: Iterable[Filter]) -> None:
        self.filters = tuple(filters)
        self.drained: frozenset[Rank] = frozenset()
        self.refused: Counter[str] = Counter()

    def rows(
        self, routed: RoutedRequest, fleet: Fleet, loads: LoadColumns
    ) -> tuple[bytearray, bytearray]:
        """Return a byte for each rank: whether it may be chosen for a request. At least one may.

        And likewise, whether KV may be pulled from it: one without room still has it.

        Raises:
            NoCandidateError, UnknownRankError: as `Router.select`.
            ConfigurationError: a filter does not answer for each rank.
        """
        # All rules must agree: the wanted ranks, the drained ones, and the filters.
        rows, prompt_tokens = bytearray(b"\1") * len(fleet.ranks), routed.length
        request = FilterRequest(
            fleet.ranks, fleet.live, loads, prompt_tokens, routed.lora, routed.labels or {}
        )
        # Each with its reason, and whether it is a wish: one that would leave no rank is ignored.
        rules: list[tuple[str, Iterable[object], bool]] = []
        if routed.ranks is not None:
            rules.append(("ranks", fleet.mask(routed.ranks), False))
        if routed.exclude:
            rules.append(("excluded", fleet.mask(routed.exclude).translate(_FALSITY), False))
        if self.drained:
            undrained = rows[:]
            for rank in self.drained:
                undrained[fleet.row_of[rank]] = 0
            rules.append(("drained", undrained, False))
        # Before the load: who finds the others full waits for them, and does not try a failing one.
        ejections = [f for f in self.filters if isinstance(f, Ejection)]
        rules += [(f.name, f.keeps(request), True) for f in ejections]
        others = [f for f in self.filters if not isinstance(f, (Ejection, Prefer))]
        others.sort(key=lambda f: isinstance(f, Capacity))  # stable
        rules += [(f.name, f.keeps(request), False) for f in others]
        # The other wishes come last: first that the publisher is connected, since else the engine
        # is probably down, then those of `Prefer`.
        if fleet.connected is not None:
            rules.append(("disconnected", fleet.connected, True))
        rules += [(f.name, f.keeps(request), True) for f in self.filters if isinstance(f, Prefer)]
        refused: Counter[str] = Counter()
        givers: bytearray | None = None
        for reason, keeps, is_wish in rules:
            if reason == Capacity.name:
                givers = givers or rows
            left, lost = _narrow(rows, reason, keeps)
            if lost and (1 in left or not is_wish):
                refused[reason] += lost
                rows = left
        self.refused += refused
        if 1 not in rows:
            raise NoCandidateError(len(rows), dict(refused))
        return rows, givers or rows


_TRUTH: Final = bytes([0] + 255 * [1])
_FALSITY: Final = bytes([1] + 255 * [0])


def _narrow(rows: bytearray, reason: str, keeps: Iterable[object]) -> tuple[bytearray, int]:
    """Return 1 in each row where both have it, and how many rows of the first are lost by that."""
    # A filter's bytes may have any value that is true; below, each row is one bit of its byte.
    if isinstance(keeps, (bytes, bytearray)):
        mask: bytes | bytearray = keeps.translate(_TRUTH)
    else:
        mask = bytes(map(bool, keeps))
    if len(mask) != len(rows):
        raise ConfigurationError(
            f"filter {reason!r} returned {len(mask)} values for {len(rows)} ranks: one for each is "
            "needed, true for those that may be chosen"
        )
    # As two long numbers, without a loop over the rows.
    both = int.from_bytes(rows, "little") & int.from_bytes(mask, "little")
    left = bytearray(both.to_bytes(len(rows), "little"))
    return left, rows.count(1) - left.count(1)
