"""The load of several gateways, without I/O: what one publishes, and what a message changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any, Final, TypeAlias, cast

from kvindex.routing.load import HALF_LIFE, LoadColumns, LocalLoadBoard
from kvindex.routing.load_messages import (
    MAX_BYTES,
    MAX_LOAD,
    MAX_NAME,
    LoadRow,
    decode_load,
    encode_load,
)
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

FLUSH_SECONDS: Final = 0.010
"""Changed rows are sent this often."""
WHOLE_SECONDS: Final = 1.0
"""All rows are sent this often."""
ROW_LIFE: Final = 3.0
"""Seconds after its receipt for which another gateway's row counts."""

MAX_GATEWAYS: Final = 1_024
MAX_GATEWAY_ROWS: Final = 16_384
MAX_ALL_ROWS: Final = 65_536
_ZERO_LIFE: Final = 4.0  # seconds for which a row that became zero is sent
_HELD_ROWS: Final = 64  # rows for which the router's lock is held at once


_Key: TypeAlias = tuple[str, int]  # equal to a `Rank`, and made faster
# Another gateway's row as it counts here: queued, open, decode, given in this board's unit, that
# unit's origin, and when it was received.
_TheirRow: TypeAlias = tuple[int, int, int, float, float, float]

_NO_ROW: Final[_TheirRow] = (0, 0, 0, 0.0, 0.0, 0.0)


class _Gateway:
    """Another gateway: its last message, and its rows."""

    def __init__(self) -> None:
        self.number = 0  # of its last message; 0: none yet
        self.heard_at = 0.0
        self.rows: dict[_Key, _TheirRow] = {}  # the longest not renewed first


class SharedBoard(LocalLoadBoard):
    """A board that counts what other gateways report, and yields what they need.

    The columns have the bookings of all gateways; only own ones are published. A row that its
    gateway did not renew for `ROW_LIFE` counts no more: that covers gateways that died, ranks that
    were removed, and zeros that were lost.

    Thread safety: the router calls `add`, `give` and so on under its lock; one other thread calls
    `changed_rows`, `all_rows`, `receive` and `expire`, which hold that lock for 64 rows at a time.

    Args:
        wake: called under the lock when there are rows to publish: it must not wait.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._booked, self._booked_absent = LoadColumns(*(c[:] for c in self._own)), {}
        self._shown = self._booked
        self.gateway = os.urandom(6).hex()
        self.is_sharing = True
        self._wake = wake
        self._is_awake = False  # whether what changes now will be published without a wake
        self._changed: dict[Rank, None] = {}  # what has changed since the last rows
        self._published: dict[Rank, float] = {}  # ranks, and when their rows were last not zero
        self._number = 0  # of the last message
        self._others: dict[str, _Gateway] = {}
        self._counts = dict.fromkeys(("received", "missed", "late", "unknown_ranks", "unsent"), 0)
        self._refused: dict[str, int] = {}

    # The router's calls

    def arrange(self, ranks: Sequence[Rank]) -> None:
        # First, since an interrupted call is made again: a rank without a row has nothing given.
        for rank in self._rows.keys() - set(ranks):
            for other in self._others.values():
                if rank in other.rows:
                    queued, opened, decode, _, origin, received_at = other.rows[rank]
                    other.rows[rank] = (queued, opened, decode, 0.0, origin, received_at)
        super().arrange(ranks)

    def add(
        self, rank: Rank, queued_tokens: int, open_requests: int, decode_blocks: int, now: float
    ) -> None:
        self._note(rank)
        super().add(rank, queued_tokens, open_requests, decode_blocks, now)

    def give(self, rank: Rank, new_tokens: int, now: float) -> None:
        self._note(rank)
        super().give(rank, new_tokens, now)

    def _note(self, rank: Rank) -> None:
        if self.is_sharing:
            self._changed[rank] = None
            if not self._is_awake:
                self._wake()
                self._is_awake = True  # last: interrupted, it wakes twice

    def statistics(self) -> dict[str, Any]:
        """Return what was received; see `SharedLoad.statistics`."""
        with self._lock:
            now = self._clock()
            firsts = [next(iter(other.rows.values()), None) for other in self._others.values()]
            ages = [now - row[-1] for row in firsts if row is not None]
            return {
                "gateways": len(self._others),
                "rows": self._row_count(),
                "age": max(0.0, *ages) if ages else None,
                **self._counts,
                "refused": dict(self._refused),
            }

    # What is published

    def changed_rows(self) -> list[LoadRow]:
        """Return own rows that have changed since they were last returned."""
        with self._lock:
            changed, self._changed = self._changed, {}
            self._is_awake = False
        return self._own_rows(list(changed))

    def all_rows(self) -> list[LoadRow]:
        """Return own rows that are not zero, and those that became zero lately."""
        with self._lock:
            changed, self._changed = self._changed, {}
            self._is_awake = False
        return self._own_rows(list(self._published | changed))

    def encode(self, rows: Sequence[LoadRow], max_bytes: int = MAX_BYTES) -> Iterable[bytes]:
        """Yield the messages with these rows: one at least, which is a sign of life."""
        for data in encode_load(self.gateway, self._number + 1, rows, max_bytes):
            self._number += 1
            yield data

    def _own_rows(self, ranks: Sequence[Rank]) -> list[LoadRow]:
        rows = []
        sent = [rank for rank in ranks if len(rank.worker) <= MAX_NAME]  # others refuse the message
        self._counts["unsent"] += len(ranks) - len(sent)
        for first in range(0, len(sent), _HELD_ROWS):
            with self._lock:
                now = self._clock()
                # What is given counts half after each half-life; an origin of infinity: nothing is.
                halvings = max(0.0, now - self._origin) / HALF_LIFE
                decay = 2.0**-halvings
                for rank in sent[first : first + _HELD_ROWS]:
                    row = self._own_row(rank, decay)
                    if row[3] or row[2] or row[4] or row[5] >= 1.0:
                        self._published[rank] = now
                    elif not 0.0 <= now - self._published.setdefault(rank, now) < _ZERO_LIFE:
                        del self._published[rank]
                        continue
                    rows.append(row)
        return rows

    def _own_row(self, rank: Rank, decay: float) -> LoadRow:
        place, given = self._rows.get(rank), 0.0
        if place is None:
            load = self._absent.get(rank, (0.0, 0.0, 0.0))
        else:
            own = self._own
            load = own.queued[place], own.open[place], own.decode[place]
            given = min(own.given[place] * decay, MAX_LOAD)
        if min(load) < 0.0 or max(load) > MAX_LOAD:  # who adds by hand may do so wrongly
            load = (_bounded(load[0]), _bounded(load[1]), _bounded(load[2]))
        queued, opened, decode = map(int, load)
        worker, dp_rank = rank
        return worker, dp_rank, queued, opened, decode, given

    # What is received

    def receive(self, data: bytes) -> str:
        """Count a message of another gateway; return why it was refused, or ""."""
        try:
            message = decode_load(data)
        except DecodeError as error:
            return self._refuse(str(error))
        if message.gateway == self.gateway:
            return self._refuse("own id")
        # Ranks that this router does not have are none of its memory. Those that it gets later
        # count from their gateway's next whole message on. The router does not wait for this look.
        known, sender = cast("dict[_Key, int]", self._rows), self._others.get(message.gateway)
        theirs = {} if sender is None else sender.rows
        rows = [row for row in message.rows if (key := row[:2]) in known or key in theirs]
        with self._lock:
            if not self.is_sharing:
                return ""
            other = self._others.get(message.gateway)
            if other is None:
                if len(self._others) >= MAX_GATEWAYS:
                    return self._refuse("too many gateways")
                other = _Gateway()
            if reason := self._lacks_room(other, rows):
                return self._refuse(reason)
            if other.number and message.number <= other.number:
                self._counts["late"] += 1
                return ""
            self._counts["received"] += 1
            self._counts["missed"] += message.number - other.number - 1 if other.number else 0
            self._counts["unknown_ranks"] += len(message.rows) - len(rows)
            other.number, other.heard_at = message.number, self._clock()
            self._others[message.gateway] = other
        for first in range(0, len(rows), _HELD_ROWS):
            with self._lock:
                if self.is_sharing:
                    self._replace(other, rows[first : first + _HELD_ROWS])
        return ""

    def _lacks_room(self, other: _Gateway, rows: Sequence[LoadRow]) -> str:
        """Return why a gateway may have no more rows; "" if these fit."""
        free = min(MAX_GATEWAY_ROWS - len(other.rows), MAX_ALL_ROWS - self._row_count())
        if len(rows) <= free or sum(row[:2] not in other.rows for row in rows) <= free:
            return ""
        return "too many rows"

    def expire(self) -> None:
        """Drop rows that were not renewed, and gateways that are silent and have no rows."""
        with self._lock:
            others = list(self._others.items())
        for gateway, other in others:
            while self._drop_stale(gateway, other):
                pass

    def _drop_stale(self, gateway: str, other: _Gateway) -> bool:
        """Drop some stale rows of a gateway, or the gateway; return whether there may be more."""
        with self._lock:
            now = self._clock()
            oldest = islice(other.rows.items(), _HELD_ROWS)
            stale = [
                rank for rank, _ in takewhile(lambda entry: _is_old(entry[1][-1], now), oldest)
            ]
            self._replace(other, [(*rank, 0, 0, 0, 0.0) for rank in stale])
            if not other.rows and _is_old(other.heard_at, now):
                self._others.pop(gateway, None)
            return len(stale) == _HELD_ROWS

    def _replace(self, other: _Gateway, rows: Iterable[LoadRow]) -> None:
        """Let another gateway's rows count instead of those before; under the lock."""
        now = self._clock()
        weight, origin = self._weight(now), self._origin
        queued_column, open_column, decode_column, given_column = booked = self._booked
        own_given, places = self._own.given, cast("dict[_Key, int]", self._rows)
        for worker, dp_rank, queued, opened, decode, tokens in rows:
            rank = (worker, dp_rank)
            place = places.get(rank)
            given = 0.0 if place is None else tokens * weight
            was_queued, was_open, was_decode, was_given, unit, _ = other.rows.pop(rank, _NO_ROW)
            if queued or opened or decode or given:
                other.rows[rank] = (queued, opened, decode, given, origin, now)
            more = queued - was_queued, opened - was_open, decode - was_decode
            if place is None:
                self._add_others_absent(Rank(*rank), more)
                continue
            queued_column[place] += more[0]
            open_column[place] += more[1]
            decode_column[place] += more[2]
            given += given_column[place] - (was_given if unit == origin else 0.0)
            # Sums of fractions may fall below what they should be.
            given_column[place] = given if given > own_given[place] else own_given[place]
            if self._shown is not booked:
                self._show_row(Rank(*rank), place)

    def _add_others_absent(self, rank: Rank, more: tuple[int, int, int]) -> None:
        loads = self._booked_absent
        load = loads.pop(rank, (0.0, 0.0, 0.0))
        load = load[0] + more[0], load[1] + more[1], load[2] + more[2]
        if any(load):
            loads[rank] = load

    def end_sharing(self) -> None:
        """Count own load only, from now on."""
        with self._lock:
            self.is_sharing = False
            self._others = {}
            self._booked, self._booked_absent = self._own, self._absent
            self._shown = self._booked
            if self._corrections:
                self._show()

    @property
    def has_others(self) -> bool:
        """Whether another gateway counts."""
        return bool(self._others)

    def _row_count(self) -> int:
        return sum(len(other.rows) for other in self._others.values())

    def _refuse(self, reason: str) -> str:
        self._refused[reason] = self._refused.get(reason, 0) + 1
        return reason


def _is_old(received_at: float, now: float) -> bool:
    # A clock that goes back drops rows, too; they are soon sent again.
    return not 0.0 <= now - received_at < ROW_LIFE


def _bounded(number: float) -> float:
    return min(max(0.0, number), MAX_LOAD)
