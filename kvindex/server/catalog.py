"""What was registered: values that never change, so that every process can hold the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

__all__ = ["BY_CLIENTS", "DEFAULT_GROUP", "Catalog", "Partition", "Registration"]

DEFAULT_GROUP = "default"

BY_CLIENTS = "zmq"
"""The `source` of what was registered over HTTP; all else was named by the operator."""


class Partition(NamedTuple):
    """Which instances are asked together: those that serve one model to one group of users.

    Attributes:
        model: the model's name.
        routing_group: a name that keeps fleets of one model apart; "default" unless told.
    """

    model: str
    routing_group: str = DEFAULT_GROUP

    def __str__(self) -> str:
        return f"model={self.model} routing_group={self.routing_group}"


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One DP rank of one instance, as it was registered.

    Attributes:
        instance_id: as its dialect gives it. 7 and "7" are the same instance.
        partition: whom it serves.
        dp_rank: by which it was registered; a `dp_rank` in its batches wins.
        endpoint: its PUB socket, as it was named.
        replay_endpoint: its ROUTER socket, or None.
        block_size: tokens per block; 0: not told.
        source: who named it: "zmq" for `/register`, or another word for what was configured.
        details: what else its dialect told, to be shown again.
    """

    instance_id: int | str
    partition: Partition
    dp_rank: int = 0
    endpoint: str
    replay_endpoint: str | None = None
    block_size: int = 0
    source: str = BY_CLIENTS
    details: dict[str, Any] = {}

    @property
    def worker(self) -> str:
        """The name of its worker in kvindex."""
        return str(self.instance_id)


class Catalog:
    """All that is registered. Immutable: a change makes another one.

    Args:
        registrations: in the order in which they came; one for each instance and dp_rank.

    Complexity: O(registrations) to make and to change; a look-up is O(1).

    Thread safety: immutable.

    Examples:
        >>> one = Registration(instance_id=1, partition=Partition("m"), endpoint="tcp://h:1")
        >>> catalog = Catalog([one])
        >>> catalog.partitions[Partition("m")].keys(), catalog.instances["1"][0] is one
        (dict_keys(['1']), True)
        >>> catalog.without([one]).partitions
        mappingproxy({})
    """

    def __init__(self, registrations: Iterable[Registration] = ()) -> None:
        self.registrations = tuple(registrations)

    @cached_property
    def instances(self) -> Mapping[str, Mapping[int, Registration]]:
        """Each instance's registrations by dp_rank, by the name of its worker."""
        found: dict[str, dict[int, Registration]] = {}
        for one in self.registrations:
            found.setdefault(one.worker, {})[one.dp_rank] = one
        return MappingProxyType(found)

    @cached_property
    def partitions(self) -> Mapping[Partition, Mapping[str, int | str]]:
        """Each partition's instances: their ids by the names of their workers."""
        found: dict[Partition, dict[str, int | str]] = {}
        for one in self.registrations:
            found.setdefault(one.partition, {})[one.worker] = one.instance_id
        return MappingProxyType(found)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The names of the models that somebody is registered for, sorted."""
        return tuple(sorted({partition.model for partition in self.partitions}))

    def of(self, partition: Partition) -> list[Registration]:
        """Return the registrations of a partition. O(registrations)."""
        return [one for one in self.registrations if one.partition == partition]

    def with_(self, registration: Registration) -> Catalog:
        """Return this with one registration more, or in the place of the same rank's."""
        key = registration.worker, registration.dp_rank
        kept = [one for one in self.registrations if (one.worker, one.dp_rank) != key]
        return Catalog([*kept, registration])

    def without(self, gone: Iterable[Registration]) -> Catalog:
        """Return this without some registrations."""
        keys = {(one.worker, one.dp_rank) for one in gone}
        return Catalog(r for r in self.registrations if (r.worker, r.dp_rank) not in keys)
