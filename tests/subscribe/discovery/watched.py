"""A source that is watched by a thread of its own, and what it reported."""

from __future__ import annotations

import queue
import threading

from kvindex.subscribe.discovery import DiscoveryError, Source, Target
from tests.live import PATIENCE


class Watched:
    """Watches a source until it is closed, and again after each error."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reports: queue.Queue[list[Target] | DiscoveryError] = queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                self.source.watch(lambda targets: self.reports.put(list(targets)))
            except DiscoveryError as error:
                self.reports.put(error)
                self._closed.wait(0.05)

    def next(self) -> list[Target] | DiscoveryError:
        return self.reports.get(timeout=PATIENCE)

    def targets(self, *, despite: str = "") -> list[Target]:
        """Return the targets reported next; errors of the reason `despite` may come first."""
        while not isinstance(report := self.next(), list):
            assert report.reason == despite, report
        return report

    def names(self, *, despite: str = "") -> list[str]:
        return [target.name for target in self.targets(despite=despite)]

    def ports(self) -> list[str]:
        return [target.url.rpartition(":")[2] for target in self.targets()]

    def error(self) -> DiscoveryError:
        report = self.next()
        assert isinstance(report, DiscoveryError), report
        return report

    def close(self) -> None:
        self._closed.set()
        self.source.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
