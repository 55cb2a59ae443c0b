"""The load of ranks, and the boards that store it: rows that follow the ranks, gauges that end."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank

GAUGE_LIFE: Final = 0.1
"""Seconds for which an engine's own gauge corrects the booked load; older ones do harm."""

HALF_LIFE: Final = 60.0
"""Seconds after which tokens that a rank was given count half."""

_MOST_HALVINGS: Final = 500  # doubles reach 2**1023
_NOTHING: Final = (0.0, 0.0, 0.0)
_Loads: TypeAlias = "dict[Rank, tuple[float, float, float]]"


class Load(NamedTuple):
    """One rank's load.

    Attributes:
        queued_tokens: tokens of prompts that it has to prefill.
        open_requests: requests that it was given and has not finished.
        decode_blocks: blocks of tokens that these occupy in its cache.
    """

    queued_tokens: int = 0
    open_requests: int = 0
    decode_blocks: int = 0


class LoadColumns(NamedTuple):
    """The loads of several ranks, one row for each.

    Attributes:
        queued: tokens to prefill.
        open: open requests.
        decode: blocks that these occupy.
        given: tokens to prefill that the rank was given lately, in a unit that is the same for all
            rows. It halves within a minute.
        contexts: tokens of the prompts of sessions that the rank served lately: it should keep
            them, since the sessions will probably go on.
        cache: the most tokens that the rank was seen to hold. Negative as long as it was never seen
            to hold fewer than before: its size is not known then.
    """

    queued: array[float]
    open: array[float]
    decode: array[float]
    given: array[float]
    contexts: array[float]
    cache: array[float]

    def kept(self) -> LoadColumns:
        """Return copies that do not change any more, of the columns that decisions show."""
        return LoadColumns(self.queued[:], self.open[:], self.decode[:], *self[3:])


class LoadBoard(Protocol):
    """Stores a router's load: in this process (`LocalLoadBoard`), or shared with others.

    A router calls it under its own lock, one call at a time. One board is for one router.
    """

    def attach(self, lock: AbstractContextManager[object], clock: Callable[[], float]) -> None:
        """Accept a router's lock and its clock, before any other call of the router.

        A board that changes its columns by itself, as when others' load arrives, does so under this
        lock and only for moments. Its times are those of this clock, in seconds.

        Raises:
            ConfigurationError: another router uses this board.
        """

    def arrange(self, ranks: Sequence[Rank]) -> None:
        """Set the rows: one for each of these ranks, in this order.

        Load booked on a rank that is not among them is kept until it is released.
        """

    def columns(self, now: float) -> LoadColumns:
        """Return the loads as they are now; the router reads them before its next call. O(1)."""

    def add(
        self, rank: Rank, queued_tokens: int, open_requests: int, decode_blocks: int, now: float
    ) -> None:
        """Add to a rank's load; negative numbers release load. O(1).

        If it raises, such as a KeyboardInterrupt, it has added nothing.
        """

    def give(self, rank: Rank, new_tokens: int, now: float) -> None:
        """Note that a rank was given so many tokens to prefill. O(1)."""

    def hold(self, rank: Rank, context_tokens: int, held_tokens: int | None) -> None:
        """Note that a rank should keep so many more tokens of contexts, or fewer. O(1).

        A rank without a row has none. If it raises, it has noted nothing.

        Args:
            rank: the rank.
            context_tokens: negative numbers release contexts.
            held_tokens: those that it holds now; None: not looked up.
        """
        return

    def report(
        self, rank: Rank, queued_tokens: int | None, open_requests: int | None, until: float
    ) -> None:
        """Correct the booked load by an engine's own gauges, until a moment of the clock."""

    def load(self, rank: Rank, now: float) -> Load:
        """Return one rank's load; nothing for a rank that is not known."""

    def statistics(self) -> dict[str, Any]:
        """Return counters as JSON-ready values: `load` of `Router.statistics`."""
        return {}

    def close(self) -> None:
        """Stop sharing, if the board shares anything. It stores this router's load as before."""
        return


class _Correction(NamedTuple):
    """The load that an engine's gauges add to the bookings, until a moment."""

    queued: float
    open: float
    until: float


class LocalLoadBoard(LoadBoard):
    """The load that this process has booked.

    Gauges that an engine reports correct it for `GAUGE_LIFE`: the engine's load beyond our bookings
    at that moment is added to them. Numbers never fall below 0.

    Thread safety: a router calls it under its lock.

    Examples:
        >>> board = LocalLoadBoard()
        >>> board.arrange([Rank("a"), Rank("b")])
        >>> board.add(Rank("a"), 1_000, 1, 64, now=0.0)
        >>> board.load(Rank("a"), now=0.0)
        Load(queued_tokens=1000, open_requests=1, decode_blocks=64)
        >>> board.columns(now=0.0).open.tolist()
        [1.0, 0.0]
    """

    def __init__(self) -> None:
        self._lock: AbstractContextManager[object] = threading.RLock()
        self._clock: Callable[[], float] = time.monotonic
        self._is_attached = False
        self._rows: dict[Rank, int] = {}
        self._own = _zeros(0)  # what this process has booked
        self._absent: _Loads = {}  # the same of ranks without a row
        # What all routers have booked: other objects only where a board shares its load, so that a
        # local one books once.
        self._booked, self._booked_absent = self._own, self._absent
        self._shown = self._booked  # columns of its own while a correction lasts
        self._corrections: dict[Rank, _Correction] = {}
        self._earliest_end = math.inf  # of a correction; until then, no call goes over them
        self._origin = math.inf  # when a token given counts 1
        self._given_at = math.inf  # when a rank was given tokens last

    def attach(self, lock: AbstractContextManager[object], clock: Callable[[], float]) -> None:
        with self._lock:
            if self._is_attached:
                raise ConfigurationError("a board of loads is for one router: make another one")
            self._lock, self._clock, self._is_attached = lock, clock, True

    def arrange(self, ranks: Sequence[Rank]) -> None:
        # All new first, then stored: an interrupted call is made again from what was there.
        before, rows = self._rows, {rank: row for row, rank in enumerate(ranks)}
        own, absent = _moved(self._own, self._absent, before, rows)
        booked, booked_absent = own, absent
        if self._booked is not self._own:
            booked, booked_absent = _moved(self._booked, self._booked_absent, before, rows)
            # Of contexts there are only our own: as a session's prompts reach all routers, each
            # counts it, and it would count several times.
            booked = booked._replace(contexts=own.contexts, cache=own.cache)
        corrections = {r: c for r, c in self._corrections.items() if r in rows}
        self._rows, self._corrections = rows, corrections
        self._own, self._absent = own, absent
        self._booked, self._booked_absent = booked, booked_absent
        self._shown = booked
        if corrections:
            self._show()

    def columns(self, now: float) -> LoadColumns:
        if self._corrections and now >= self._earliest_end:
            for rank in [r for r, gauges in self._corrections.items() if now >= gauges.until]:
                del self._corrections[rank]
                self._show_row(rank, self._rows[rank])
            ends = (gauges.until for gauges in self._corrections.values())
            self._earliest_end = min(ends, default=math.inf)
            if not self._corrections:
                self._shown = self._booked
        return self._shown

    def add(
        self, rank: Rank, queued_tokens: int, open_requests: int, decode_blocks: int, now: float
    ) -> None:
        row = self._rows.get(rank)
        if row is None:
            # All of it or, interrupted, nothing: the sums are made before any of them is stored.
            load = (queued_tokens, open_requests, decode_blocks)
            absent = _sum(self._absent.get(rank, _NOTHING), load)
            booked_absent = _sum(self._booked_absent.get(rank, _NOTHING), load)
            self._absent[rank] = absent
            self._booked_absent[rank] = booked_absent
            for loads in (self._absent, self._booked_absent):
                if loads.get(rank) == _NOTHING:
                    del loads[rank]
            return
        own, booked = self._own, self._booked
        if self._shown is not booked:
            self._show_row(rank, row, queued_tokens, open_requests, decode_blocks)
        # Last, without calls: an interrupt leaves all of it added, or none.
        if own is not booked:
            own.queued[row] += queued_tokens
            own.open[row] += open_requests
            own.decode[row] += decode_blocks
        booked.queued[row] += queued_tokens
        booked.open[row] += open_requests
        booked.decode[row] += decode_blocks

    def give(self, rank: Rank, new_tokens: int, now: float) -> None:
        weight = self._weight(now)
        row = self._rows.get(rank)
        if row is not None:
            own, booked = self._own.given, self._booked.given
            tokens = new_tokens * weight
            if own is not booked:
                own[row] += tokens
            booked[row] += tokens

    def hold(self, rank: Rank, context_tokens: int, held_tokens: int | None) -> None:
        if (row := self._rows.get(rank)) is not None:
            contexts, cache = self._own[4:]
            if held_tokens is not None:
                most = abs(cache[row])
                is_known = cache[row] > 0.0 or held_tokens < most
                if held_tokens < most / 2:  # cleared, or started anew: perhaps with another size
                    most, is_known = 0.0, False
                most = max(most, held_tokens)
                cache[row] = most if is_known else -most
            contexts[row] += context_tokens  # last, and without a call: all of it or nothing

    def report(
        self, rank: Rank, queued_tokens: int | None, open_requests: int | None, until: float
    ) -> None:
        row = self._rows.get(rank)
        if row is None:
            return
        # What the engine has beyond our bookings came from elsewhere: it stays while these change.
        self._corrections[rank] = _Correction(
            0.0 if queued_tokens is None else queued_tokens - self._booked.queued[row],
            0.0 if open_requests is None else open_requests - self._booked.open[row],
            until,
        )
        self._earliest_end = min(self._earliest_end, until)
        if self._shown is self._booked:
            self._show()
        self._show_row(rank, row)

    def load(self, rank: Rank, now: float) -> Load:
        columns = self.columns(now)
        row = self._rows.get(rank)
        if row is None:
            return Load(*map(int, self._absent.get(rank, ())))
        return Load(int(columns.queued[row]), int(columns.open[row]), int(columns.decode[row]))

    def _weight(self, now: float) -> float:
        """Return what a token that is given now counts; what came long before is then forgotten."""
        # Later tokens weigh more, twice as much after a minute; only the ratios count. The sums
        # start anew after so many halvings that earlier tokens are negligible, and where the clock
        # goes back: else the tokens given before would weigh most for long.
        if not self._given_at <= now <= self._origin + _MOST_HALVINGS * HALF_LIFE:
            self._origin = now
            for given in (self._own.given, self._booked.given):
                given[:] = array("d", bytes(8 * len(given)))
        self._given_at = now
        weight: float = 2.0 ** ((now - self._origin) / HALF_LIFE)
        return weight

    def _show(self) -> None:
        self._shown = self._booked.kept()
        for rank in self._corrections:
            self._show_row(rank, self._rows[rank])

    def _show_row(
        self, rank: Rank, row: int, queued: float = 0.0, opened: float = 0.0, decode: float = 0.0
    ) -> None:
        """Show a rank's load, and the load about to be added."""
        booked, shown, gauges = self._booked, self._shown, self._corrections.get(rank, _NOTHING)
        shown.queued[row] = max(0.0, booked.queued[row] + queued + gauges[0])
        shown.open[row] = max(0.0, booked.open[row] + opened + gauges[1])
        shown.decode[row] = booked.decode[row] + decode


def _sum(
    load: tuple[float, float, float], other: tuple[float, float, float]
) -> tuple[float, float, float]:
    return load[0] + other[0], load[1] + other[1], load[2] + other[2]


def _moved(
    columns: LoadColumns, absent: _Loads, before: Mapping[Rank, int], rows: Mapping[Rank, int]
) -> tuple[LoadColumns, _Loads]:
    """Return columns for other rows, and the load of the ranks that have none now."""
    loads = dict(absent)
    for rank, row in before.items():
        loads[rank] = (columns.queued[row], columns.open[row], columns.decode[row])
    moved = _zeros(len(rows))
    for rank, row in rows.items():
        moved.queued[row], moved.open[row], moved.decode[row] = loads.pop(rank, _NOTHING)
        if rank in before:
            moved.given[row] = columns.given[before[rank]]
            moved.contexts[row] = columns.contexts[before[rank]]
            moved.cache[row] = columns.cache[before[rank]]
    return moved, {rank: load for rank, load in loads.items() if load != _NOTHING}


def _zeros(rows: int) -> LoadColumns:
    return LoadColumns(*(array("d", bytes(8 * rows)) for _ in range(6)))
