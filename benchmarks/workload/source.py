"""Where the requests come from, as a value that another process can be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload.fleet import Change, Fleet
from benchmarks.workload.requests import Request, conversations, trace


@dataclass(frozen=True)
class Source:
    """A workload.

    Attributes:
        seed: which conversations, and which ranks serve them.
        open_at_once: conversations from which the next turn may come.
        unit: every segment is a multiple of this many blocks.
        trace: a file of requests instead of conversations; `unit` does not change it.
    """

    seed: int = 1
    open_at_once: int = 1_024
    unit: int = 1
    trace: str | None = None

    def requests(self) -> Iterator[Request]:
        """Yield the requests, from the first."""
        if self.trace is not None:
            return trace(Path(self.trace))
        return conversations(seed=self.seed, open_at_once=self.open_at_once, unit=self.unit)

    def changes(self, fleet: Fleet, entries: int) -> Iterator[Change]:
        """Serve requests until this many entries are resident, or the trace ends."""
        for request in self.requests():
            if fleet.entries >= entries:
                return
            yield from fleet.serve(request)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values, which are this class's arguments."""
        return asdict(self)
