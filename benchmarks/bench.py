"""What every measure is given: sizes, the workload, the sides."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import venvs
from benchmarks.process import Side
from benchmarks.results import OURS
from benchmarks.routing.traces import has_sessions
from benchmarks.scale import Scale
from benchmarks.workload import Source

_OWN: Final = (OURS, "zmq")  # sides that need nothing but what this interpreter has


@dataclass(frozen=True)
class Contender:
    """One column of a table: a side under a given set of cores.

    Attributes:
        label: of the column.
        side: its name.
        cpus: the cores that it may use; all by default.
        package: what serves it.
        environment: returns variables for it, given its interpreter.
    """

    label: str
    side: str
    cpus: tuple[int, ...] | None = None
    package: str = "benchmarks.sides"
    environment: Callable[[str], dict[str, str]] | None = None


@dataclass(frozen=True)
class Bench:
    """One run of the benchmarks.

    Attributes:
        scale: the sizes.
        peers: whether the peers run too.
        folder: where the peers' environments are kept.
        traces: files of requests, or of sessions; the first of requests replaces the synthetic
            requests.
        images: the folder where pictures are written; None: none are.
        native_bench: the binary of the native core's own benchmark, if it was built.
        seed: of the workload.
    """

    scale: Scale
    peers: bool
    folder: Path
    traces: tuple[Path, ...] = ()
    images: Path | None = None
    native_bench: Path | None = None
    seed: int = 1

    @property
    def request_traces(self) -> list[Path]:
        """The traces that are requests with their times, and not sessions."""
        return [file for file in self.traces if not has_sessions(file)]

    def source(self, **changes: Any) -> Source:
        """Return the workload; a trace, if given, stands for every one."""
        source = Source(seed=self.seed, trace=next(map(str, self.request_traces), None))
        return replace(source, **changes)

    def python(self, side: str) -> str:
        """Return the interpreter that runs a side."""
        if side in _OWN:
            return sys.executable
        return venvs.python_of(re.split("[ -]", side)[0], self.folder)

    @contextmanager
    def start(self, contenders: Iterable[Contender]) -> Iterator[dict[str, Side]]:
        """Start these sides (without the peers, what needs none); yield them by label."""
        started: dict[str, Side] = {}
        try:
            for contender in contenders:
                if contender.side in _OWN or self.peers:
                    started[contender.label] = self._side(contender)
            yield started
        finally:
            for side in started.values():
                side.close()

    def _side(self, contender: Contender) -> Side:
        python, environment = self.python(contender.side), contender.environment
        return Side(
            contender.side,
            python,
            cpus=contender.cpus,
            package=contender.package,
            environment=environment(python) if environment else None,
        )


def last_core() -> tuple[int, ...]:
    """Return the core that is least used by everything else: the last one."""
    return (max(os.sched_getaffinity(0)),)
