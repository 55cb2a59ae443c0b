"""How commands that subscribe for others run: until a signal ends them."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kvindex import Client
from kvindex.replicas import Replica
from kvindex.tools.cli.output import StateChanges, counted, printable
from kvindex.tools.cli.signals import handled
from kvindex.tools.cli.status import state_table

_LOOK = 0.5  # seconds between looks at the ranks' states


class Service(Protocol):
    """What serves others."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is closed; return whether it was in time."""

    def report(self) -> dict[str, Any]:
        """Return all counters."""


class Signals:
    """The signals that have arrived; a handler itself must wait for no lock.

    Attributes:
        asked: numbers of those that ask for a table of the ranks.
        has_ended: whether one has ended the command; later ones interrupt no saving.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.has_ended = False

    def end(self, _: int) -> None:
        """End as Ctrl-C does, once. Ctrl-C itself interrupts saving, too."""
        if not self.has_ended:
            self.has_ended = True
            raise KeyboardInterrupt


@contextmanager
def signals_handled() -> Iterator[Signals]:
    """Let SIGTERM and SIGHUP end the command, and SIGUSR1 ask for a table of the ranks."""
    signals = Signals()
    ends = (signal.SIGTERM, signal.SIGHUP)  # the latter of a terminal that goes away
    wanted = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    with (
        handled({signal.SIGUSR1: signals.asked.append}),
        handled(dict.fromkeys(wanted, signals.end), to_the_end=True),
    ):
        yield signals


def serve(
    service: Service,
    source: Client | Replica,
    signals: Signals,
    where: str,
    stats_every: float | None,
) -> None:
    """Serve until a signal, or the service itself, ends it.

    Prints where it serves, the ranks' changes, and every so many seconds the counters; and of a
    replica, why it does not follow.
    """
    changes, trouble = StateChanges(source.statuses, first_live=True), ""
    every = stats_every or math.inf
    due = time.monotonic() + every
    try:
        ranks = counted(len(source.ranks), "rank")
        print(f"{where}, {ranks}", file=sys.stderr, flush=True)
        while not service.wait(_LOOK):
            changes.report()
            if isinstance(source, Replica) and source.trouble != trouble:
                trouble = source.trouble
                print(printable(trouble or "following"), file=sys.stderr, flush=True)
            if signals.asked:
                signals.asked.clear()
                table = state_table(source.statistics()["ranks"])
                print(table, file=sys.stderr, flush=True)
            if time.monotonic() >= due:
                due += every
                print(json.dumps(service.report()), flush=True)
    except KeyboardInterrupt:
        signals.has_ended = True  # the normal end; systemd, or a shell, may send another signal
