"""Which ranks may be chosen for a request: not drained, asked for, and kept by all filters.

Preferences come last, and one that would leave no rank is ignored: first that the publisher is
connected, then those of `Prefer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvindex.routing.filters import Asked, Filter, Prefer
from kvindex.wire.errors import ConfigurationError, NoCandidateError
from kvindex.wire.rank import Rank

__all__ = ["Eligible"]


class Eligible:
    """Decides which ranks may be chosen, and counts the refused ones, by reason.

    Args:
        filters: all of them must agree.

    Attributes:
        drained: ranks that get no more requests.
        refused: ranks refused so far, by the reason.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self, filters: tuple[Filter, ...]) -> None:
        self._filters = [one for one in filters if not isinstance(one, Prefer)]
        self._wishes = [one for one in filters if isinstance(one, Prefer)]
        self.drained: frozenset[Rank] = frozenset()
        self.refused: Counter[str] = Counter()
        self._mask: tuple[Sequence[Rank], frozenset[Rank], bytes] = ((), frozenset(), b"")

    def rows(
        self,
        asked: Asked,
        wanted: bytes | bytearray | None,
        connected: bytes | None = None,
        *,
        placed: bool = False,
    ) -> bytearray:
        """Return a byte for each rank: whether it may be chosen. At least one may.

        Args:
            asked: the request and the ranks, for filters.
            wanted: a byte for each rank: only those with 1 may be chosen; None: any.
            connected: a byte for each rank. A rank with 0 is chosen only if all eligible ones have
                0; None: all are connected.
            placed: check `wanted` only.

        Raises:
            NoCandidateError: none may be chosen.
            ConfigurationError: a filter does not answer for each rank.
        """
        rows = bytearray(b"\1") * len(asked.ranks)
        refused: dict[str, int] = {}
        for reason, keeps in self._reasons(asked, wanted, placed):
            left = _both(rows, _mask(reason, keeps, len(rows)))
            lost = rows.count(1) - left.count(1)
            if lost:
                refused[reason] = refused.get(reason, 0) + lost
            rows = left
        if refused:
            self.refused.update(refused)
        if not any(rows):
            raise NoCandidateError(len(rows), refused)
        if not placed:
            for reason, keeps in self._preferences(asked, connected):
                left = _both(rows, _mask(reason, keeps, len(rows)))
                lost = rows.count(1) - left.count(1)
                if lost and any(left):
                    self.refused[reason] += lost
                    rows = left
        return rows

    def _reasons(
        self, asked: Asked, wanted: bytes | bytearray | None, placed: bool
    ) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield reasons to refuse ranks, and which ranks each of them keeps."""
        if wanted is not None:
            yield "ranks", wanted
        if placed:
            return
        if self.drained:
            yield "drained", self._undrained(asked.ranks)
        for one in self._filters:
            yield one.name, one.keeps(asked)

    def _preferences(
        self, asked: Asked, connected: bytes | None
    ) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield reasons to prefer ranks, the weightiest first, and which ranks each prefers."""
        if connected is not None:
            yield "disconnected", connected
        for one in self._wishes:
            yield one.name, one.keeps(asked)

    def _undrained(self, ranks: Sequence[Rank]) -> bytes:
        """Return a byte for each rank: 0 if it is drained; made once until either changes."""
        known, drained, mask = self._mask
        if known is not ranks or drained is not self.drained:
            mask = bytes(rank not in self.drained for rank in ranks)
            self._mask = (ranks, self.drained, mask)
        return mask


_TRUTH: Final = bytes([0] + 255 * [1])


def _mask(reason: str, keeps: Iterable[object], rows: int) -> bytes | bytearray:
    """Return a byte for each row: 1 if its value is true."""
    mask: bytes | bytearray
    if isinstance(keeps, (bytes, bytearray)):
        mask = keeps.translate(_TRUTH)
    else:
        mask = bytes(map(bool, keeps))
    if len(mask) != rows:
        raise ConfigurationError(
            f"filter {reason!r} returned {len(mask)} values for {rows} ranks: one for each is "
            "needed, true for those that may be chosen"
        )
    return mask


def _both(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return 1 in each row where both have 1; as two long numbers, without a loop over the rows."""
    both = int.from_bytes(one, "little") & int.from_bytes(other, "little")
    return bytearray(both.to_bytes(len(one), "little"))
