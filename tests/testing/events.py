"""Events of one kind among others."""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.wire import BlockRemoved, BlockStored, Event


def stores(events: Sequence[Event]) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored)]


def removals(events: Sequence[Event]) -> list[BlockRemoved]:
    return [event for event in events if isinstance(event, BlockRemoved)]
