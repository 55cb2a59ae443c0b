"""Compares two findings of one engine."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvindex.subscribe import PublisherAddress
from kvindex.subscribe.discovery.targets import Found, Target

__all__ = ["described", "is_other", "part_of", "place_of", "ranks_of", "with_ranks"]


def place_of(target: Target) -> str:
    """Return a text that differs when another engine has come under a name."""
    return f"{target.url} {target.version}"


def ranks_of(found: Found | None) -> dict[int, PublisherAddress]:
    """Return where each rank publishes."""
    return {} if found is None else {a.dp_rank: a for a in found.worker.publishers()}


def is_other(before: Found, found: Found) -> bool:
    """Return whether more has changed than ranks that have come or gone."""
    old, new = ranks_of(before), ranks_of(found)
    is_moved = any(old[rank] != new[rank] for rank in old.keys() & new.keys())
    return (
        is_moved
        or not old.keys() & new.keys()
        or _settings(before) != _settings(found)
        or (before.model, before.routing_group) != (found.model, found.routing_group)
    )


def _settings(found: Found) -> tuple[object, ...]:
    worker = found.worker
    return worker.topic, worker.bind, worker.curve, worker.cache


def with_ranks(found: Found, addresses: Iterable[PublisherAddress]) -> Found:
    """Return the same engine with these ranks."""
    kept = sorted(addresses, key=lambda address: address.dp_rank)
    replays = {a.dp_rank: a.replay for a in kept if a.replay is not None}
    worker = msgspec.structs.replace(
        found.worker,
        endpoint={address.dp_rank: address.endpoint for address in kept},
        replay=replays if len(replays) == len(kept) else None,
        dp_size=None,
    )
    return msgspec.structs.replace(found, worker=worker)


def part_of(found: Found, addresses: Iterable[PublisherAddress]) -> Found:
    """Return these ranks of an engine."""
    return msgspec.structs.replace(with_ranks(found, addresses), is_part=True)


def described(found: Found) -> str:
    """Return an engine's description for a log line."""
    addresses = found.worker.publishers()
    more = f" and {len(addresses) - 1} more ranks" if len(addresses) > 1 else ""
    replay = "" if addresses[0].replay else ", without replay"
    return f"{found.worker.name} at {addresses[0].endpoint}{more}{replay} ({found.source})"
