"""Fill an index with a stream from another process, empty it again, and look at its memory."""

from __future__ import annotations

import gc
import os
from itertools import chain
from time import perf_counter
from typing import Any

from benchmarks.sides.adapter import Adapter
from benchmarks.sides.records import CHECKPOINT, EVENT, RecordSpec, records


class Remembering:
    """Resident memory of this process: empty, full, and empty again."""

    def __init__(self, adapter: Adapter, name: str) -> None:
        self._adapter = adapter
        self._name = name

    def measure(
        self, source: dict[str, Any], ranks: int, entries: int, sticky: float
    ) -> dict[str, Any]:
        """Return the bytes of each stage and what the index held when full."""
        spec = RecordSpec(self._name, source, ranks, sticky, (entries,), empty=True)
        self._adapter.reset()
        stream = records(spec)
        first = next(stream)  # what reading takes is part of an empty process
        self._adapter.drain()
        gc.collect()
        stages: list[dict[str, Any]] = [{"bytes": resident_bytes()}]
        apply, started = self._adapter.applier(), perf_counter()
        for record in chain([first], stream):
            if record.kind == EVENT:
                apply(self._adapter.rank(record.rank), record.data)
            elif record.kind == CHECKPOINT:
                self._adapter.drain()
                gc.collect()
                stages.append({"bytes": resident_bytes(), **record.facts()})
        empty, full, again = stages
        return {
            "empty": empty["bytes"],
            "full": full["bytes"],
            "again": again["bytes"],
            "entries": full["entries"],
            "unique_blocks": full["unique_blocks"],
            "seconds": perf_counter() - started,
        }


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
