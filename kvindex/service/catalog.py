"""The registrations: immutable values, so that threads can read them without a lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec

DEFAULT_GROUP = "default"

BY_CLIENTS = "zmq"
"""The `source` of what was registered over HTTP; all else was named by the operator."""


class Partition(NamedTuple):
    """Which instances are asked together: those that serve one model to one group of users."""

    model: str
    routing_group: str = DEFAULT_GROUP  # keeps fleets of one model apart

    def __str__(self) -> str:
        return f"model={self.model} routing_group={self.routing_group}"


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One DP rank of one instance, as it was registered."""

    instance_id: int | str  # as its dialect gives it: 7 and "7" are the same instance
    partition: Partition
    dp_rank: int = 0  # by which it was registered; a `dp_rank` in its batches wins
    endpoint: str  # its PUB socket, as it was named
    replay_endpoint: str | None = None  # its ROUTER socket
    block_size: int = 0  # tokens; 0: not known
    source: str = BY_CLIENTS  # or another word for what the operator named
    details: dict[str, Any] = {}  # further fields of its dialect, to be shown again

    @property
    def worker(self) -> str:
        """The name of its worker in kvindex."""
        return str(self.instance_id)


_Ranks: TypeAlias = dict[tuple[str, int], Registration]
_Instances: TypeAlias = dict[str, dict[int, Registration]]
_Partitions: TypeAlias = dict[Partition, dict[str, int | str]]


class Catalog:
    """All that is registered. Immutable: a change makes another one.

    `instances` has each instance's registrations by dp_rank, by the name of its worker;
    `partitions` the ids of each partition's instances, by the names of their workers.

    Complexity: O(registrations) to make; a look-up is O(1). A change copies dictionaries: it takes
    microseconds where there are a thousand registrations, and shares the rest.

    Examples:
        >>> entry = Registration(instance_id=1, partition=Partition("m"), endpoint="tcp://h:1")
        >>> catalog = Catalog([entry])
        >>> catalog.partitions[Partition("m")].keys(), catalog.instances["1"][0] is entry
        (dict_keys(['1']), True)
        >>> catalog.without([entry]).partitions
        mappingproxy({})
    """

    def __init__(self, registrations: Iterable[Registration] = ()) -> None:
        ranks = {(entry.worker, entry.dp_rank): entry for entry in registrations}
        instances: _Instances = {}
        partitions: _Partitions = {}
        for (worker, dp_rank), entry in ranks.items():
            instances.setdefault(worker, {})[dp_rank] = entry
            partitions.setdefault(entry.partition, {})[worker] = entry.instance_id
        self._set(ranks, instances, partitions)

    def _set(
        self,
        ranks: _Ranks,
        instances: _Instances,
        partitions: _Partitions,
    ) -> Catalog:
        self._ranks = ranks
        self.instances = MappingProxyType(instances)
        self.partitions = MappingProxyType(partitions)
        return self

    @cached_property
    def registrations(self) -> tuple[Registration, ...]:
        """All, in the order in which they came."""
        return tuple(self._ranks.values())

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The names of the registered models, sorted."""
        return tuple(sorted({partition.model for partition in self.partitions}))

    def of(self, partition: Partition) -> Iterator[Registration]:
        """Iterate over the registrations of a partition."""
        for worker in self.partitions.get(partition, ()):
            for entry in self.instances[worker].values():
                if entry.partition == partition:
                    yield entry

    def with_(self, registration: Registration) -> Catalog:
        """Return this with one registration more, or in the place of the same rank's."""
        # Taken away first: in another partition it would stay listed in the old one.
        rest = self.without([registration])
        worker, dp_rank = registration.worker, registration.dp_rank
        ranks, instances, partitions = rest._copies()
        ranks[worker, dp_rank] = registration
        instances[worker] = {**instances.get(worker, {}), dp_rank: registration}
        ids = partitions.get(registration.partition, {})
        partitions[registration.partition] = {**ids, worker: registration.instance_id}
        return Catalog()._set(ranks, instances, partitions)

    def without(self, gone: Iterable[Registration]) -> Catalog:
        """Return this without some registrations."""
        keys = self._ranks.keys() & {(entry.worker, entry.dp_rank) for entry in gone}
        if not keys:
            return self
        ranks, instances, partitions = self._copies()
        left_by: set[tuple[Partition, str]] = set()
        for key in keys:
            left_by.add((ranks.pop(key).partition, key[0]))
        for worker in {worker for worker, _ in keys}:
            before = instances.pop(worker)
            if left := {n: entry for n, entry in before.items() if (worker, n) in ranks}:
                instances[worker] = left
        for partition, worker in left_by:
            ids = {name: id_ for name, id_ in partitions.pop(partition).items() if name != worker}
            # Other ranks of the worker may be there still, and its id is theirs: of 7 and "7" the
            # one that came last.
            for entry in instances.get(worker, {}).values():
                if entry.partition == partition:
                    ids[worker] = entry.instance_id
            if ids:
                partitions[partition] = ids
        return Catalog()._set(ranks, instances, partitions)

    def _copies(self) -> tuple[_Ranks, _Instances, _Partitions]:
        return self._ranks.copy(), self.instances.copy(), self.partitions.copy()
