"""The ranks of a pool's relay as registrations, which nobody changes here."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvindex import RankStatus, State
from kvindex.replicas import Replica
from kvindex.service.catalog import Catalog, Partition, Registration


class FollowedRegistry:
    """Keeps a catalog of a replica's ranks, in place of a `Registry`.

    Args:
        replica: whose ranks they are.
        address: of the relay's pool, for messages.
        partition: whom all of them serve.
        block_size: of all of them; 0: not known.

    Attributes:
        address: as given.
        catalog: the present registrations; replaced as a whole.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self, replica: Replica, address: str, partition: Partition, block_size: int = 0
    ) -> None:
        self.address = address
        self.catalog = Catalog()
        self._replica = replica
        self._partition = partition
        self._block_size = block_size
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Catalog], None]] = []
        replica.on_change(self._note)
        for status in replica.statuses().values():
            self._note(status)

    def on_change(self, listener: Callable[[Catalog], None]) -> None:
        """Call a function with each new catalog, in order, on the thread that changed it."""
        with self._lock:
            self._listeners.append(listener)

    def statuses(self) -> list[tuple[Registration, RankStatus | None]]:
        """Return each registration with the status of its rank. O(ranks)."""
        statuses = {(s.rank.worker, s.rank.dp_rank): s for s in self._replica.statuses().values()}
        return [
            (entry, statuses.get((entry.worker, entry.dp_rank)))
            for entry in self.catalog.registrations
        ]

    def _note(self, status: RankStatus) -> None:
        """Follow a status that has changed: its rank may be new, or gone."""
        rank = status.rank
        with self._lock:
            present = self.catalog.instances.get(rank.worker, {}).get(rank.dp_rank)
            is_gone = status.state is State.CLOSED and rank not in self._replica.ranks
            if is_gone and present is not None:
                self._replace(self.catalog.without([present]))
            elif not is_gone and (present is None or present.endpoint != status.endpoint):
                self._replace(self.catalog.with_(self._registration(status)))

    def _registration(self, status: RankStatus) -> Registration:
        return Registration(
            instance_id=status.rank.worker,
            partition=self._partition,
            dp_rank=status.rank.dp_rank,
            endpoint=status.endpoint,
            replay_endpoint=status.replay_endpoint,
            block_size=self._block_size,
            source="relay",
        )

    def _replace(self, catalog: Catalog) -> None:
        self.catalog = catalog
        for listener in self._listeners:
            listener(catalog)
