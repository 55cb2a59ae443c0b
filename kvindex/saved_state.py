"""What a saved file holds of ranks, kept until their workers are added."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvindex.errors import ConfigurationError, SnapshotError
from kvindex.index import Index
from kvindex.index.snapshot import SnapshotReader, SnapshotRecord
from kvindex.index.snapshot_section import wrong_backend
from kvindex.rank import Rank
from kvindex.subscribe import SavedRanks

__all__ = ["SavedState", "read_saved"]

logger = logging.getLogger(__name__)


def read_saved(
    path: str | os.PathLike[str], index: Index | None
) -> tuple[Index | None, list[SnapshotRecord]]:
    """Return an index of the file's seed and all that the file holds; nothing if there is none.

    Args:
        path: what `Client.save` wrote.
        index: the index to be filled, or None for a new one.

    Raises:
        SnapshotError: it is no whole file of such an index.
        OSError: it cannot be read.
    """
    try:
        reader = SnapshotReader(path)
    except FileNotFoundError:
        logger.info("there is no snapshot at %s: every rank begins anew", os.fspath(path))
        return index, []
    with reader:
        if reader.backend != Index.backend:
            raise wrong_backend(reader.backend, Index.backend)
        if index is None:
            index = Index(seed=reader.seed)
        elif index.seed != reader.seed:
            raise SnapshotError(
                "the snapshot was made by an index with another seed: give Index(seed=...) the "
                "seed of that index, or no index",
                reason="backend",
            )
        return index, list(reader)


class SavedState(SavedRanks):
    """Saved ranks, kept aside until their worker is added; each is used once, or dropped.

    What is kept aside is no part of the index: nothing is answered from it. It takes the bytes
    that its sections had in the file.

    Args:
        index: what ranks are restored into.
        records: what was saved.
        within: seconds from now for which it is kept.
        clock: monotonic seconds.
        on_restored: told each rank that was restored, and its section.

    Raises:
        ConfigurationError: `within` is not above 0.

    Owner: the subscriber's thread; `statistics` from any thread.
    """

    def __init__(
        self,
        index: Index,
        records: list[SnapshotRecord],
        within: float,
        clock: Callable[[], float],
        on_restored: Callable[[Rank, bytes], None],
    ) -> None:
        if not within > 0:
            raise ConfigurationError(f"resume_within must be above 0 s, not {within!r}")
        self._index = index
        self._clock = clock
        self._on_restored = on_restored
        self._until = clock() + within
        self._workers: dict[str, dict[int, SnapshotRecord]] = {}
        self._restored = 0
        self._dropped: Counter[str] = Counter()
        for record in records:
            if record.cursor is None:
                self._drop(record.rank, "no_cursor")
            else:
                self._workers.setdefault(record.rank.worker, {})[record.rank.dp_rank] = record

    def cursors(self, worker: str) -> Mapping[int, bytes]:
        """Return the cursors of a worker's ranks, by the dp_ranks that they went by."""
        saved = self._workers.get(worker, {})
        return {dp_rank: record.cursor or b"" for dp_rank, record in saved.items()}

    def take_up(self, worker: str, refused: Mapping[Rank, str]) -> Mapping[Rank, str]:
        """Restore what was saved of a worker's ranks, where it is not refused; drop the rest.

        Nothing of the worker is kept aside afterwards: when it is removed and added again, the
        saved state is older than what was forgotten then.
        """
        failed: dict[Rank, str] = {}
        for record in self._workers.pop(worker, {}).values():
            rank = record.rank
            reason = refused.get(rank, "no_publisher")
            if not reason:
                reason = failed[rank] = self._restore(record)
            if reason:
                self._drop(rank, reason)
        return failed

    def expire(self) -> None:
        """Drop everything, once the time for it is over."""
        if self._workers and self._clock() >= self._until:
            records = self.records()
            self._workers.clear()
            for record in records:
                self._drop(record.rank, "expired")

    def records(self) -> list[SnapshotRecord]:
        """Return what is kept aside, by rank."""
        workers = list(self._workers.values())  # at once: the owner may go on
        return sorted(record for saved in workers for record in saved.values())

    def statistics(self) -> dict[str, Any]:
        """Return how many ranks and bytes are kept aside, and what became of the others."""
        records = self.records()
        return {
            "aside": len(records),
            "aside_bytes": sum(len(record.section) for record in records),
            "restored": self._restored,
            "dropped": dict(self._dropped),
        }

    def _restore(self, record: SnapshotRecord) -> str:
        """Have the index hold what was saved of a rank; return why it cannot, one word."""
        try:
            self._index.restore(record.rank, record.section)
        except SnapshotError as error:
            logger.warning("%s: its saved state is of no use: %s", record.rank, error)
            return error.reason
        self._restored += 1
        self._on_restored(record.rank, record.section)
        return ""

    def _drop(self, rank: Rank, reason: str) -> None:
        self._dropped[reason] += 1
        logger.info("%s: what was saved of it is dropped (%s)", rank, reason)
