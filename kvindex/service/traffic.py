"""The requests to a process, counted in memory that its parent can read.

Each process writes the names of what it counts beside the numbers, so no process has to agree on
places with another. A process counts on one thread; any other thread or process reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvindex.service.catalog import Partition
from kvindex.service.http.guards import REASONS, Counters
from kvindex.service.http.site import OTHER

BUCKETS: Final = (50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 51.2e-3)
"""Upper bounds of the durations that are counted together, in seconds; one more has no bound."""

ASKED: Final = (
    *("queries", "tokens", "best_match", "nanoseconds"),
    *("requests", "asked", "attainable", "chosen"),
    *("reported", "delivered"),
)
"""Columns of `AllTraffic.asked`: queries, with their tokens, those that the best rank held, and the
time taken; finished requests that routers report, in tokens (see `outcomes.Outcome`); and of those
whose engine reported its cached tokens, the tokens asked and delivered."""

_OUTCOMES: Final = ("requests", "asked", "attainable", "chosen")
_REPORTED: Final = (*_OUTCOMES, "delivered")
_NAME_BYTES: Final = 248
_MOST_REQUESTS: Final = 512
_MOST_PARTITIONS: Final = 256
_QUERY: Final = 3 + len(BUCKETS) + 1  # tokens, best match, nanoseconds, and the buckets
_NUMBERS: Final = _QUERY + len(_OUTCOMES) + len(_REPORTED)
_BOUNDS: Final = [int(bound * 1e9) for bound in BUCKETS]


class Rows:
    """Rows of numbers of 64 bits, each under a name, in one buffer.

    A name that finds no room counts as "(other)", which has the last row.

    The buffer has `size(rows, width)` writable bytes, zero at first: for so many names, and numbers
    of each.

    Thread safety: `row` on one thread of one process; `rows` anywhere. A number is written whole.

    Examples:
        >>> rows = Rows(memoryview(bytearray(Rows.size(2, 1))), 2, 1)
        >>> rows.row("a")[0] += 1
        >>> rows.row("b")[0] += 1
        >>> rows.row("c")[0] += 1
        >>> rows.rows()
        {'a': [1], '(other)': [2]}
    """

    def __init__(self, buffer: memoryview, rows: int, width: int) -> None:
        self._buffer = buffer
        self._most = rows
        self._size = self.size(1, width)
        self._known = {name: numbers for _, name, numbers in self._used()}  # of a predecessor
        self._next = len(self._known.keys() - {OTHER})

    @staticmethod
    def size(rows: int, width: int) -> int:
        """Return how many bytes these rows take."""
        return rows * (8 * (1 + width) + _NAME_BYTES)

    def row(self, name: str) -> memoryview:
        """Return the numbers under a name, which gets a row if it has none yet. O(1)."""
        return self._known.get(name) or self._begin(name)

    def rows(self) -> dict[str, list[int]]:
        """Return the numbers under each name that has any. O(rows)."""
        return {name: numbers.tolist() for _, name, numbers in self._used()}

    def _begin(self, name: str) -> memoryview:
        encoded = name.encode(errors="replace")
        last = self._most - 1
        number = last if name == OTHER else self._next
        if name != OTHER:
            if len(encoded) > _NAME_BYTES or number == last:
                return self.row(OTHER)
            self._next += 1
        length, place, numbers = self._row(number)
        place[: len(encoded)] = encoded
        length[0] = len(encoded)  # last: a reader finds the whole name
        self._known[name] = numbers
        return numbers

    def _used(self) -> Iterator[tuple[int, str, memoryview]]:
        for number in range(self._most):
            length, place, numbers = self._row(number)
            if length[0]:
                yield number, bytes(place[: length[0]]).decode(errors="replace"), numbers

    def _row(self, number: int) -> tuple[memoryview, memoryview, memoryview]:
        """Return where a row has its name's length, its name and its numbers."""
        row = self._buffer[number * self._size : (number + 1) * self._size]
        return row[:8].cast("Q"), row[-_NAME_BYTES:], row[8:-_NAME_BYTES].cast("Q")


class Traffic:
    """Counts requests, queries and what routers report, for one process.

    Args:
        buffer: `Traffic.SIZE` writable bytes, zero at first; own memory by default.

    Attributes:
        refused: counters of `REASONS`, for the process's `Guard`.

    Thread safety: as `Rows`.
    """

    SIZE: Final = (
        Counters.size(REASONS)
        + Rows.size(_MOST_REQUESTS, 1)
        + Rows.size(_MOST_PARTITIONS, _NUMBERS)
    )

    def __init__(self, buffer: memoryview | None = None) -> None:
        rest = memoryview(bytearray(self.SIZE)) if buffer is None else buffer
        self.refused = Counters(REASONS, rest)
        rest = rest[Counters.size(REASONS) :]
        self._requests = Rows(rest, _MOST_REQUESTS, 1)
        rest = rest[Rows.size(_MOST_REQUESTS, 1) :]
        self._partitions = Rows(rest, _MOST_PARTITIONS, _NUMBERS)

    def request(self, method: str, route: str, code: int) -> None:
        """Count an answered request; methods and routes that there are not are OTHER."""
        self._requests.row(f"{method} {route} {code}")[0] += 1

    def query(
        self, partition: Partition, tokens: int, best_match_tokens: int, nanoseconds: int
    ) -> None:
        """Count an answered query."""
        row = self._of(partition)
        row[0] += tokens
        row[1] += best_match_tokens
        row[2] += nanoseconds
        row[3 + bisect_left(_BOUNDS, nanoseconds)] += 1

    def outcome(
        self,
        partition: Partition,
        asked: int,
        attainable: int,
        chosen: int,
        delivered: int | None = None,
    ) -> None:
        """Count a finished request that a router reports, in tokens: see `Outcome`."""
        row = self._of(partition)
        for place, number in enumerate((1, asked, attainable, chosen), _QUERY):
            row[place] += number
        if delivered is not None:
            reported = _QUERY + len(_OUTCOMES)
            for place, number in enumerate((1, asked, attainable, chosen, delivered), reported):
                row[place] += number

    def requests(self) -> dict[tuple[str, str, int], int]:
        """Return how many requests were answered, by method, route and status code."""
        requests = {}
        for name, (count,) in self._requests.rows().items():
            method, route, code = name.split(" ") if name != OTHER else ("", name, "0")
            requests[method, route, int(code)] = count
        return requests

    def partitions(self) -> dict[Partition, list[int]]:
        """Return the numbers of each partition, for `AllTraffic`."""
        rows = self._partitions.rows().items()
        return {Partition(*name.split("\0", 1)): numbers for name, numbers in rows}

    def _of(self, partition: Partition) -> memoryview:
        return self._partitions.row(f"{partition.model}\0{partition.routing_group}")


class Sums(NamedTuple):
    """What was asked of one partition so far.

    Attributes:
        tokens: of the prompts of queries.
        best_match: of those, the tokens that the rank with the most held.
        nanoseconds: for which the queries were worked on.
        buckets: how many queries took at most as long as each of BUCKETS, and not less than the one
            before; at the end those that took longer.
        finished: of requests that routers report their number (`requests`), and the tokens `asked`,
            `attainable` and `chosen`.
        reported: the same of those whose engine reported cached tokens, and those `delivered`.
    """

    tokens: int
    best_match: int
    nanoseconds: int
    buckets: list[int]
    finished: dict[str, int]
    reported: dict[str, int]


class AllTraffic:
    """The requests to all processes of a server, out of the counts of each. Any thread."""

    def __init__(self, parts: Callable[[], Iterable[Traffic]]) -> None:
        self._parts = parts

    def refused(self) -> dict[str, int]:
        """Return how many requests were refused, by reason."""
        counts = [part.refused.values() for part in self._parts()]
        return {reason: sum(count[reason] for count in counts) for reason in REASONS}

    def requests(self) -> Counter[tuple[str, str, int]]:
        """Return how many requests were answered, by method, route and status code."""
        return sum((Counter(part.requests()) for part in self._parts()), Counter())

    def sums(self) -> dict[Partition, Sums]:
        """Return what was asked of each partition."""
        added: dict[Partition, list[int]] = {}
        for part in self._parts():
            for partition, numbers in part.partitions().items():
                before = added.get(partition, [0] * len(numbers))
                added[partition] = [a + b for a, b in zip(before, numbers, strict=True)]
        reported = _QUERY + len(_OUTCOMES)
        return {
            partition: Sums(
                *(numbers[0], numbers[1], numbers[2], numbers[3:_QUERY]),
                dict(zip(_OUTCOMES, numbers[_QUERY:reported], strict=True)),
                dict(zip(_REPORTED, numbers[reported:], strict=True)),
            )
            for partition, numbers in added.items()
        }

    def asked(self) -> dict[Partition, list[int]]:
        """Return the numbers of ASKED for each partition."""
        return {
            partition: [
                *(sum(of.buckets), of.tokens, of.best_match, of.nanoseconds),
                *of.finished.values(),
                *(of.reported["asked"], of.reported["delivered"]),
            ]
            for partition, of in self.sums().items()
        }

    def outcomes(self) -> list[Mapping[str, Any]]:
        """Return the routers' reports for each model, as `Router.statistics` does."""
        finished: dict[str, Counter[str]] = {}
        reported: dict[str, Counter[str]] = {}
        for partition, of in self.sums().items():
            if of.finished["requests"]:
                finished.setdefault(partition.model, Counter()).update(of.finished)
                reported.setdefault(partition.model, Counter()).update(of.reported)
        return [
            {
                "model": model,
                "bookings": {"finished": counts["requests"]},
                "funnel": {"finished": counts, "reported": reported[model]},
                "ranks": {},
            }
            for model, counts in finished.items()
        ]
