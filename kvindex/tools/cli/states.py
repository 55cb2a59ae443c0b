"""The states of the ranks at a terminal: each change, and a table of all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvindex import Rank, RankStatus, State
from kvindex.tools.cli.output import in_options, printable, table

__all__ = ["StateChanges", "state_table"]

_PATIENCE = 3.0  # seconds for ranks to become live before those that are not are named


class StateChanges:
    """Reports on stderr when a rank becomes live or stops being live, and why.

    Args:
        statuses: returns the status of each rank.
        first_live: whether to report that a rank is live for the first time.
    """

    def __init__(
        self, statuses: Callable[[], Mapping[Rank, RankStatus]], *, first_live: bool = False
    ) -> None:
        self._statuses = statuses
        self._patient_until = time.monotonic() + _PATIENCE
        self._reported: dict[Rank, State | None] = {}
        self._unknown = None if first_live else State.LIVE

    def report(self) -> None:
        """Report what has changed since the last call."""
        patient = time.monotonic() < self._patient_until
        for rank, status in self._statuses().items():
            is_live = status.state is State.LIVE
            if self._reported.get(rank, self._unknown) is status.state or (
                patient and not is_live and rank not in self._reported
            ):
                continue
            self._reported[rank] = status.state
            why = "" if is_live else f": {in_options(status.reason)}"
            print(printable(f"{rank}: {status.state}{why}"), file=sys.stderr, flush=True)


def state_table(ranks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how ranks stand, and below it why some are not live.

    Args:
        ranks: as in `Client.statistics()`.
    """
    rows = [
        (
            name,
            rank["state"],
            "yes" if rank["complete"] else "no",
            "-" if rank["seq"] is None else rank["seq"],
            rank["lag"],
            rank["epoch"],
            rank["losses"],
            rank["index"].get("blocks", 0),
            "-" if rank["last_event_age"] is None else f"{rank['last_event_age']:.1f}",
        )
        for name, rank in ranks.items()
    ]
    header = ("rank", "state", "complete", "seq", "lag", "epoch", "losses", "blocks", "idle s")
    reasons = [
        printable(f"{name}: {in_options(rank['reason'])}")
        for name, rank in ranks.items()
        if rank["reason"]
    ]
    return "\n".join([table(header, rows), *reasons])
