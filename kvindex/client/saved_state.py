"""The ranks in a saved file, kept until their workers are added."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvindex.index import Index
from kvindex.index.snapshot import Snapshot, SnapshotReader, SnapshotRecord, require_native
from kvindex.subscribe import SavedRanks
from kvindex.wire.errors import ConfigurationError, SnapshotError
from kvindex.wire.rank import Rank

logger = logging.getLogger(__name__)


def read_saved(
    path: str | os.PathLike[str] | Snapshot,
    index: Index | None,
    max_blocks_per_rank: int | None = None,
) -> tuple[Index | None, list[SnapshotRecord]]:
    """Return an index of the file's seed and all that the file holds; nothing if there is none."""
    if isinstance(path, Snapshot):
        return _index_for(path.seed, index, max_blocks_per_rank), list(path.ranks)
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(
            f"resume must be the path of a file that Client.save wrote, not {type(path).__name__}"
        )
    require_native(Index.backend if index is None else index.backend)
    try:
        with SnapshotReader(path) as reader:
            index = _index_for(reader.seed, index, max_blocks_per_rank)
            records = list(reader)
    except FileNotFoundError:
        logger.info("there is no snapshot at %s: every rank begins anew", os.fspath(path))
        return index, []
    # An error, although a cold start would work: whoever names a file expects its blocks.
    except SnapshotError as error:
        raise SnapshotError(f"{os.fspath(path)}: {error}", reason=error.reason) from error
    without = sum(record.cursor is None for record in records)
    if without:
        logger.warning(
            "%s says of %d of the %d ranks in it what they held, but not up to which event, so "
            "they begin anew: Index.save writes such files; Client.save writes those that can be "
            "continued from",
            os.fspath(path),
            without,
            len(records),
        )
    return index, records


def _index_for(seed: int, index: Index | None, max_blocks_per_rank: int | None) -> Index:
    """Return the index that accepts a snapshot's sections, or raise SnapshotError."""
    if index is None:
        return Index(seed=seed, max_blocks_per_rank=max_blocks_per_rank)
    if index.seed != seed:
        raise SnapshotError(
            "the snapshot was made by an index with another seed: give Index(seed=...) the seed "
            "of that index, or no index",
            reason="backend",
        )
    return index


class SavedState(SavedRanks):
    """Saved ranks, kept aside until their worker is added; each is used once, or dropped.

    A rank kept aside is no part of the index: no answer uses it. It needs as much memory as its
    section had bytes in the file.

    Owner: the subscriber's thread; `statistics` from any thread.
    """

    patient = True

    def __init__(
        self,
        index: Index,
        records: list[SnapshotRecord],
        within: float,
        clock: Callable[[], float],
        on_restored: Callable[[Rank, bytes], None] | None,
    ) -> None:
        if not within > 0:
            raise ConfigurationError(f"resume_within must be above 0 s, not {within!r}")
        self._index = index
        self._clock = clock
        self._on_restored = on_restored
        self._until = clock() + within
        # Records without a cursor are of no use; they are reported once their worker is added.
        self._workers: dict[str, dict[int, SnapshotRecord]] = {}
        self._restored = 0
        self._dropped: Counter[str] = Counter()
        for record in records:
            if record.cursor is None:
                self._drop(record.rank, "no_cursor")
                record = record._replace(section=b"")
            self._workers.setdefault(record.rank.worker, {})[record.rank.dp_rank] = record

    def cursors(self, worker: str) -> Mapping[int, bytes | None]:
        """Return the cursors of a worker's ranks, by the dp_ranks that they had."""
        saved = self._workers.get(worker, {})
        return {dp_rank: record.cursor for dp_rank, record in saved.items()}

    def restore(self, worker: str, refused: Mapping[Rank, str]) -> Mapping[Rank, str]:
        """Restore the saved states of these ranks; drop those that are refused."""
        failed: dict[Rank, str] = {}
        saved = self._workers.get(worker, {})
        for rank, reason in refused.items():
            # Used once: if a rank is removed and added again, its saved state is older than the
            # contents forgotten then. Ranks that the worker does not have yet wait.
            record = saved.pop(rank.dp_rank, None)
            if record is None or record.cursor is None:
                continue
            if not reason:
                reason = failed[rank] = ""
                try:
                    self._index.restore(record.rank, record.section)
                except SnapshotError as error:
                    logger.warning("%s: its saved state is of no use: %s", record.rank, error)
                    reason = failed[rank] = error.reason
                else:
                    self._restored += 1
                    if self._on_restored is not None:
                        self._on_restored(record.rank, record.section)
            if reason:
                self._drop(rank, reason)
        return failed

    def expire(self) -> None:
        """Drop everything, once `within` is over."""
        if self._workers and self._clock() >= self._until:
            records = self.records()
            self._workers.clear()
            for record in records:
                self._drop(record.rank, "expired")

    def records(self) -> list[SnapshotRecord]:
        """Return the records that are kept aside, by rank."""
        workers = list(self._workers.values())  # at once: the owner may go on
        kept = [record for saved in workers for record in list(saved.values())]
        return sorted(record for record in kept if record.cursor is not None)

    def statistics(self) -> dict[str, Any]:
        """Return how many ranks and bytes are kept aside, and what became of the others."""
        records = self.records()
        return {
            "aside": len(records),
            "aside_bytes": sum(len(record.section) for record in records),
            "restored": self._restored,
            "dropped": dict(self._dropped),
        }

    def _drop(self, rank: Rank, reason: str) -> None:
        self._dropped[reason] += 1
        logger.info("%s: what was saved of it is dropped (%s)", rank, reason)
