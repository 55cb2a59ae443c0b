"""Weights by size in buckets that grow, and tokens by time in buckets that grow."""

from __future__ import annotations

import math
from collections.abc import Iterator

_PER_OCTAVE = 8
_LEAST = 2.0**-10


class Histogram:
    """Weights by value: each bucket reaches 9 % further than the one before it.

    Bounded: values below a thousandth share a bucket, and so do those above 2**63.

    Examples:
        >>> ages = Histogram()
        >>> ages.add(3.0, 16)
        >>> ages.add(100.0, 32)
        >>> ages.total, ages.up_to(10.0)
        (48, 16)
    """

    def __init__(self) -> None:
        self._weights: dict[int, int] = {}
        self.total = 0

    def add(self, value: float, weight: int) -> None:
        """Count a weight at a value; values that are no number count as 0."""
        bucket = _bucket(value)
        self._weights[bucket] = self._weights.get(bucket, 0) + weight
        self.total += weight

    def merge(self, other: Histogram) -> None:
        """Count all that another histogram has, too."""
        for bucket, weight in other._weights.items():
            self._weights[bucket] = self._weights.get(bucket, 0) + weight
        self.total += other.total

    def up_to(self, value: float) -> int:
        """Return the weight of all buckets that end at this value or before: never too much."""
        return sum(w for bucket, w in self._weights.items() if _end(bucket) <= value)

    def bars(self) -> Iterator[tuple[float, int]]:
        """Yield (end, weight) of each bucket that has a weight, the smallest first."""
        for bucket, weight in sorted(self._weights.items()):
            yield _end(bucket), weight


def _bucket(value: float) -> int:
    """The bucket whose end is the first that is not below the value."""
    inside = min(max(value, _LEAST), 2.0**63) if value == value else _LEAST
    return math.ceil(math.log2(inside) * _PER_OCTAVE - 1e-9)


def _end(bucket: int) -> float:
    return round(math.pow(2.0, bucket / _PER_OCTAVE), 9)


class Series:
    """Sums over time in an even number of buckets at most, which double their width with time."""

    def __init__(self, fields: int, limit: int = 240) -> None:
        self.width = 1.0
        self._fields = fields
        self._limit = limit
        self._buckets: list[list[int]] = []

    def add(self, seconds: float, numbers: tuple[int, ...]) -> None:
        """Count numbers so many seconds after the beginning (before it: at the beginning)."""
        place = max(0.0, seconds) if math.isfinite(seconds) else 0.0
        while place >= self.width * self._limit:
            self._double()
        index = int(place / self.width)
        while len(self._buckets) <= index:
            self._buckets.append([0] * self._fields)
        bucket = self._buckets[index]
        for i, number in enumerate(numbers):
            bucket[i] += number

    def rows(self) -> list[tuple[int, ...]]:
        """Return the numbers of each bucket, from the beginning on."""
        return [tuple(bucket) for bucket in self._buckets]

    def _double(self) -> None:
        self.width *= 2
        halves = [*self._buckets, [0] * self._fields]
        self._buckets = [
            [a + b for a, b in zip(halves[i], halves[i + 1], strict=True)]
            for i in range(0, len(self._buckets), 2)
        ]
