"""Apply a stream of events to an empty index, as fast as it goes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import islice
from time import perf_counter
from typing import Any

from benchmarks.sides.adapter import Adapter
from benchmarks.sides.matching import check
from benchmarks.workload import Change, Fleet, Prompt, Source, messages

SAMPLES = 64


class Applying:
    """A stream of events, encoded beforehand, that is applied again and again."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._calls: list[tuple[Any, bytes]] = []
        self._prompts: list[Prompt] = []
        self._blocks = 0

    def prepare(
        self,
        source: dict[str, Any],
        ranks: int,
        blocks: int,
        event_blocks: int,
        batch_events: int,
        capacity: int | None = None,
    ) -> dict[str, Any]:
        """Encode the stream, apply it once and check the answers; return what it has."""
        workload = Source(**source)
        fleet = Fleet(ranks, seed=workload.seed, capacity=capacity)
        if batch_events > 1 and not self._adapter.batches:
            raise ValueError("this index takes one event a call")
        self._calls, self._blocks = [], 0
        changes = (c for request in workload.requests() for c in fleet.serve(request))
        for message in messages(
            _first(changes, blocks),
            self._adapter.encoder(),
            event_blocks=event_blocks,
            batch_events=batch_events,
        ):
            self._calls.append((self._adapter.rank(message.rank), message.data))
            self._blocks += message.blocks
        self.measure()
        self._check(workload, fleet)
        size = sum(len(data) for _, data in self._calls)
        return {"calls": len(self._calls), "blocks": self._blocks, "bytes": size}

    def measure(self) -> float:
        """Return the blocks per second of one run into an empty index."""
        self._adapter.reset()
        apply = self._adapter.applier()
        gc.collect()
        gc.disable()
        try:
            started = perf_counter()
            for rank, data in self._calls:
                apply(rank, data)
            self._adapter.drain()
            seconds = perf_counter() - started
        finally:
            gc.enable()
        return self._blocks / seconds

    def _check(self, workload: Source, fleet: Fleet) -> None:
        if self._adapter.answers:
            requests = islice(workload.requests(), SAMPLES)
            check(self._adapter, [fleet.prompt(request.prompt) for request in requests])


def _first(changes: Iterable[Change], blocks: int) -> Iterator[Change]:
    """The first changes, until they are of so many blocks."""
    done = 0
    for change in changes:
        yield change
        done += change.node.segment.blocks
        if done >= blocks:
            return
