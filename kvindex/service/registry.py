"""The registry: accepts registrations and subscribes a client to their endpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import msgspec

from kvindex import (
    Client,
    ConfigurationError,
    Rank,
    RankStatus,
    State,
    UnknownRankError,
    Worker,
)
from kvindex.replicas import Replica
from kvindex.service.catalog import BY_CLIENTS, Catalog, Partition, Registration
from kvindex.wire.errors import RegistrationError

logger = logging.getLogger(__name__)

Effect: TypeAlias = Literal["new", "same", "moved"]


class Registry:
    """Keeps a catalog and a client's subscriptions in step.

    Registering the same again changes nothing. A rank that is registered at another endpoint has
    moved: its old blocks are forgotten.

    Args:
        client: subscribes.
        dial: returns the endpoint to dial for one that came over HTTP, by default itself, or raises
            EndpointRefusedError.
        max_ranks: most DP ranks that are registered.
        max_ranks_per_instance: of them, those of one instance.

    Thread safety: every method from any thread; `register` and `unregister` may wait for the
    subscriber's thread, so async code calls them in a thread.
    """

    def __init__(
        self,
        client: Client,
        *,
        dial: Callable[[str], str] = str,
        max_ranks: int = 4096,
        max_ranks_per_instance: int = 1024,
    ) -> None:
        # Replaced as a whole, so that nobody needs a lock to read it.
        self.catalog = Catalog()
        self._client = client
        self._dial = dial
        self._max_ranks = max_ranks
        self._max_ranks_per_instance = max_ranks_per_instance
        self._dialled: dict[tuple[str, int], Worker] = {}  # by worker and registered dp_rank
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Catalog], None]] = []

    def on_change(self, listener: Callable[[Catalog], None]) -> None:
        """Call a function with each new catalog, in order, on the thread that changed it."""
        with self._lock:
            self._listeners.append(listener)

    def register(self, registration: Registration) -> Effect:
        """Subscribe to one rank of an instance, as its client names it.

        Raises:
            RegistrationError: it conflicts with another one, cannot work, or there is no room.
            EndpointRefusedError: its endpoints must not be dialled.
            ClosedError, BusyError: as `Client.add`.
        """
        # Log lines have these names: a line break in one would forge a line.
        names = {"instance_id": registration.worker, **registration.partition._asdict()}
        for what, name in names.items():
            if not name.isprintable():
                raise RegistrationError(
                    f"{what} is {name[:100]!r}: a name has printable characters only",
                    reason="invalid",
                )
        replay = registration.replay_endpoint
        dp_rank = registration.dp_rank
        try:
            worker = Worker(
                registration.worker,
                {dp_rank: self._dial(registration.endpoint)},
                replay=None if replay is None else {dp_rank: self._dial(replay)},
            )
        except ConfigurationError as error:
            raise RegistrationError(str(error), reason="invalid") from None
        # The operator's settings beyond the endpoints (topic, CURVE) stay.
        return self._enter(registration, worker, lambda old: old.publishers())

    def add(
        self,
        worker: Worker,
        partition: Partition,
        *,
        block_size: int = 0,
        source: str = "configured",
        **details: Any,
    ) -> None:
        """Register every rank of a worker, with the worker's own settings (topic, CURVE, cache).

        Raises: as `register`; ranks before the one that fails are registered.
        """
        for address in worker.publishers():
            replay = None if address.replay is None else {address.dp_rank: address.replay}
            endpoint = {address.dp_rank: address.endpoint}
            rank = msgspec.structs.replace(worker, endpoint=endpoint, replay=replay, dp_size=None)
            registration = Registration(
                instance_id=worker.name,
                partition=partition,
                dp_rank=address.dp_rank,
                endpoint=address.endpoint,
                replay_endpoint=address.replay,
                block_size=block_size,
                source=source,
                details=details,
            )
            self._enter(registration, rank, lambda old: old)

    def _enter(
        self, registration: Registration, worker: Worker, place: Callable[[Worker], object]
    ) -> Effect:
        """Register one rank; it has moved if `place` of its worker is another than before."""
        key = registration.worker, registration.dp_rank
        with self._lock:
            present = self.catalog.instances.get(key[0], {}).get(key[1])
            self._check_conflicts(registration, present)
            # The same worker again is no news, so clients may register every few seconds.
            moved = present is not None and place(self._dialled[key]) != place(worker)
            if present is None:
                self._check_room(registration)
            elif moved:
                if registration.source == BY_CLIENTS:
                    self._check_clients([present])
                logger.info("%s/%d has moved to %s", *key, registration.endpoint)
                self._leave([present])
            before = self.catalog
            # First, so that a listener that is notified of the rank finds its instance.
            if moved or present is None or present.source == registration.source:
                self._replace(before.with_(registration))
            if present is None or moved:
                self._dialled[key] = worker
                try:
                    self._subscribe(worker)
                except BaseException:
                    del self._dialled[key]
                    self._replace(before)
                    raise
            return "new" if present is None else "moved" if moved else "same"

    def _subscribe(self, worker: Worker) -> None:
        try:
            self._client.add(worker)
        except ConfigurationError as error:
            # It may be subscribed to already: by a call that came too late for its caller.
            if self._find(worker) is None:
                raise RegistrationError(str(error), reason="invalid") from error

    def unregister(
        self,
        worker: str,
        *,
        model: str | None = None,
        routing_group: str | None = None,
        dp_rank: int | None = None,
        by_client: bool = False,
    ) -> list[Registration]:
        """Unsubscribe from an instance, or from one rank of it; return the removed registrations.

        `model` and `routing_group` are what it must be registered for, if given; `dp_rank` is one
        rank, as it was registered. `by_client` says that HTTP asks: the operator's workers stay.

        Raises:
            RegistrationError: there is no such instance or rank, it is registered for others, or
                it is the operator's.
            ClosedError, BusyError: as `Client.remove`.
        """
        with self._lock:
            ranks = self.catalog.instances.get(worker)
            if ranks is None:
                raise RegistrationError(f"instance {worker} not found", reason="unknown")
            partition = next(iter(ranks.values())).partition
            if model not in (None, partition.model) or routing_group not in (
                None,
                partition.routing_group,
            ):
                why = f"instance {worker} is registered for {partition}"
                raise RegistrationError(why, reason="unknown")
            if dp_rank is not None and dp_rank not in ranks:
                raise RegistrationError(
                    f"instance {worker} dp_rank {dp_rank} not found", reason="unknown"
                )
            gone = list(ranks.values()) if dp_rank is None else [ranks[dp_rank]]
            if by_client:
                self._check_clients(gone)
            self._leave(gone)
            return gone

    def _check_clients(self, present: list[Registration]) -> None:
        # Who may register must not be able to lead the operator's traffic elsewhere.
        for entry in present:
            if entry.source != BY_CLIENTS:
                raise RegistrationError(
                    f"instance {entry.worker} dp_rank {entry.dp_rank} at {entry.endpoint} is this "
                    f"server's own ({entry.source}): change it there, or register another instance",
                    reason="conflict",
                )

    def _check_conflicts(self, new: Registration, present: Registration | None) -> None:
        ranks = self.catalog.instances.get(new.worker, {})
        partition = next((entry.partition for entry in ranks.values()), new.partition)
        if partition != new.partition:
            raise RegistrationError(
                f"instance {new.worker} is already registered for {partition}", reason="conflict"
            )
        if not new.block_size:
            return
        # All that state one have the same: the first one's is enough.
        others = (entry for entry in self.catalog.of(new.partition) if entry is not present)
        known = next((entry.block_size for entry in others if entry.block_size), new.block_size)
        if known != new.block_size:
            raise RegistrationError(
                f"block_size mismatch for {new.partition}: existing={known}, "
                f"requested={new.block_size}",
                reason="conflict",
            )

    def _check_room(self, new: Registration) -> None:
        ranks = len(self.catalog.registrations)
        of_instance = len(self.catalog.instances.get(new.worker, ()))
        if ranks >= self._max_ranks or of_instance >= self._max_ranks_per_instance:
            raise RegistrationError(
                f"{ranks} ranks are registered, {of_instance} of them of instance {new.worker}; "
                f"the most are {self._max_ranks} and {self._max_ranks_per_instance}: unregister "
                "what is gone, or start the server with higher limits",
                reason="room",
            )

    def _leave(self, gone: list[Registration]) -> None:
        """Unsubscribe from ranks of one instance, and forget them."""
        # The catalog at last: if the client is busy, all is as before, and can be asked for again.
        catalog = self.catalog.without(gone)
        name = gone[0].worker
        workers = [self._dialled[entry.worker, entry.dp_rank] for entry in gone]
        with suppress(UnknownRankError):  # a call that came too late for its caller did it
            if name not in catalog.instances:
                self._client.remove(name)
            else:
                for rank in [self._find(worker) for worker in workers]:
                    if rank is not None:
                        self._client.remove(rank)
        for left in gone:
            del self._dialled[left.worker, left.dp_rank]
        self._replace(catalog)

    def statuses(self) -> list[tuple[Registration, RankStatus | None]]:
        """Return each registration with the status of its rank, None if it has none. O(ranks)."""
        # By the endpoint: its batches may have given the rank another name than the registered one.
        by_endpoint = {(s.rank.worker, s.endpoint): s for s in self._client.statuses().values()}
        # Without the lock: a registration holds it for as long as the subscriber's thread is busy.
        statuses = []
        for entry in self.catalog.registrations:
            worker = self._dialled.get((entry.worker, entry.dp_rank))
            endpoint = "" if worker is None else worker.publishers()[0].endpoint
            statuses.append((entry, by_endpoint.get((entry.worker, endpoint))))
        return statuses

    def _find(self, worker: Worker) -> Rank | None:
        """Return the rank of a worker that has one."""
        # By its endpoint, since its batches may have given it another name; the name first, for
        # O(1) in nearly all cases.
        client, [address] = self._client, worker.publishers()
        with suppress(UnknownRankError):
            status = client.status(Rank(worker.name, address.dp_rank))
            if status.endpoint == address.endpoint:
                return status.rank
        with suppress(UnknownRankError):  # renamed just now: the caller asks again
            for rank in client.ranks:
                if rank.worker == worker.name and client.status(rank).endpoint == address.endpoint:
                    return rank
        return None

    def _replace(self, catalog: Catalog) -> None:
        self.catalog = catalog
        for listener in self._listeners:
            listener(catalog)


class FollowedRegistry:
    """Keeps a catalog of the ranks of a pool's relay, in place of a `Registry`: nobody changes it.

    `address` is the pool's, for messages; `partition` and `block_size` (0: not known) are those of
    all of its ranks.

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
        # Listen first: a rank that comes between the two steps would be missed otherwise.
        replica.on_change(self._note)
        for status in replica.statuses().values():
            self._note(status)

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
            # All ranks of a replica that is closed are CLOSED, too, and still its ranks.
            is_gone = status.state is State.CLOSED and rank not in self._replica.ranks
            if is_gone and present is not None:
                self.catalog = self.catalog.without([present])
            elif not is_gone and (present is None or present.endpoint != status.endpoint):
                registration = Registration(
                    instance_id=rank.worker,
                    partition=self._partition,
                    dp_rank=rank.dp_rank,
                    endpoint=status.endpoint,
                    replay_endpoint=status.replay_endpoint,
                    block_size=self._block_size,
                    source="relay",
                )
                self.catalog = self.catalog.with_(registration)
