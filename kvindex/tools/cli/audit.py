"""`kvindex audit`: what routing costs a fleet today, from its events alone."""

from __future__ import annotations

import argparse
import heapq
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvindex import (
    ConfigurationError,
    DecodeError,
    EventStream,
    Rank,
    RankBatch,
    State,
    StreamItem,
    Worker,
)
from kvindex.subscribe.discovery import ask_engine
from kvindex.tools.audit import Auditor, Report, html_of, text_of
from kvindex.tools.cli.arguments import Commands, add_cache_arguments, cache_of, count, seconds
from kvindex.tools.cli.endpoints import add_worker_arguments, workers_of
from kvindex.tools.cli.output import Progress, counted, json_line, printable
from kvindex.tools.cli.recorded import Recorded
from kvindex.tools.cli.replay import check_names
from kvindex.tools.cli.states import StateChanges

__all__ = ["Listening", "add_parser"]

_LOOK = 0.25  # seconds between looks at how the ranks stand


def add_parser(commands: Commands, text: str) -> None:
    """Add this command to the command line, with `text` in the list of commands."""
    parser = commands.add_parser(
        "audit",
        help=text,
        description=(
            "Listen to engines for a while, or read recordings (one publisher's each), and say how "
            "many computed tokens another rank held at that moment, how many larger caches would "
            "have kept, and how much is held twice. Nothing is sent to the engines but replay "
            "requests. All engines must serve one model, except that --engine tells models apart. "
            "Ctrl-C ends the window early and reports (exit 0). Exit 1: a recording is cut off "
            "(what came before is reported), or no engine could be heard at the end. Exit 2: the "
            "arguments cannot work. Exit 130: Ctrl-C before the window opened."
        ),
    )
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path, help="a recording")
    parser.add_argument(
        "--minutes", type=seconds, default=10.0, metavar="N", help="length of the window (10)"
    )
    parser.add_argument(
        "--settle",
        type=seconds,
        default=15.0,
        metavar="S",
        help="wait so many seconds at most for all ranks to be live before the window opens (15)",
    )
    parser.add_argument(
        "--with-replayed",
        action="store_true",
        help="fill gaps of recordings from the replay replies in them",
    )
    parser.add_argument(
        "--max-evicted",
        type=count,
        default=1 << 17,
        metavar="BLOCKS",
        help="evicted blocks remembered of each rank, at about 210 bytes (131072)",
    )
    parser.add_argument(
        "--no-tokens", action="store_true", help="do not show how shared prefixes begin"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report with plots to this file, too"
    )
    add_worker_arguments(parser)
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="ask this engine (http://host:8000) where it publishes; repeatable",
    )
    add_cache_arguments(parser)
    parser.set_defaults(run=run, log_from=logging.WARNING)


def run(arguments: argparse.Namespace) -> int:
    """Audit recordings or engines, and report."""
    if arguments.html is not None and not arguments.html.absolute().parent.is_dir():
        raise ConfigurationError(f"cannot write {arguments.html}: there is no such directory")
    broken = False
    if arguments.files:
        report, broken = _audit_files(arguments)
    else:
        report = _audit_engines(arguments)
    if arguments.no_tokens:
        report = report.without_tokens()
    print(json_line(report) if arguments.json else printable_lines(text_of(report)))
    if arguments.html is not None:
        _write(arguments.html, html_of(report))
    return 1 if broken or not any(rank.counted for rank in report.ranks) else 0


def printable_lines(text: str) -> str:
    """Return lines that cannot steer a terminal."""
    return "\n".join(map(printable, text.split("\n")))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)


# Recordings ----------------------------------------------------------------------------------


def _audit_files(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Return the report, and whether a recording was cut off."""
    if arguments.worker or arguments.endpoint or arguments.engine:
        raise ConfigurationError("name recordings, or engines, not both")
    check_names(arguments.files)
    source = f"audit of {counted(len(arguments.files), 'recording')}"
    auditor = Auditor(max_evicted=arguments.max_evicted, source=source)
    recordings = [
        Recorded(path, on_loss="reset", cache=cache_of(arguments)) for path in arguments.files
    ]
    progress = Progress()
    last = 0.0
    for at, _, item in heapq.merge(
        *(_timed(one, number, arguments, progress) for number, one in enumerate(recordings)),
        key=lambda timed: timed[:2],
    ):
        if auditor.began is None:
            auditor.begin(at)
        auditor.take(item, at)
        last = at
    progress.clear()
    for one in recordings:
        if one.error:
            print(f"kvindex audit: {one.path}: {one.error}", file=sys.stderr)
        for rank in one.ranks:
            auditor.complete(rank, one.complete)
    if auditor.began is None:
        auditor.begin(last)
    return auditor.report(last), any(one.error for one in recordings)


def _timed(
    recorded: Recorded, number: int, arguments: argparse.Namespace, progress: Progress
) -> Iterator[tuple[float, int, StreamItem]]:
    """Yield a recording's items with the publisher's time, which never goes back."""
    at = 0.0
    waiting: list[StreamItem] = []  # until the next batch tells the time
    try:
        for item in recorded.items(with_replayed=arguments.with_replayed, progress=progress):
            waiting.append(item)
            if isinstance(item, RankBatch):
                at = max(at, item.batch.ts)
                yield from ((at, number, one) for one in waiting)
                waiting.clear()
    except DecodeError as error:
        recorded.error = str(error)
    except OSError as error:
        raise ConfigurationError(f"cannot read {recorded.path}: {error}") from error
    yield from ((at, number, one) for one in waiting)


# Engines -------------------------------------------------------------------------------------


def _audit_engines(arguments: argparse.Namespace) -> Report:
    workers, models = _engines(arguments)
    source = f"audit of {counted(len(workers), 'worker')}"
    auditor = Auditor(models=models, max_evicted=arguments.max_evicted, source=source)
    with EventStream(workers) as stream:
        listening = Listening(stream, auditor)
        listening.settle(arguments.settle)
        with _until_interrupted() as interrupted:
            listening.open()
            listening.listen(arguments.minutes * 60, interrupted)
    return auditor.report(time.time())


def _engines(arguments: argparse.Namespace) -> tuple[list[Worker], dict[str, str]]:
    """Return the workers, and what those that were asked over HTTP serve."""
    workers: list[Worker] = []
    models: dict[str, str] = {}
    cache = cache_of(arguments)
    if arguments.worker or arguments.endpoint or not arguments.engine:
        workers = workers_of(arguments, cache)
    for url in arguments.engine:
        report = ask_engine(url)
        worker = report.worker(cache=cache)
        workers.append(worker)
        models[worker.name] = report.model
        for note in report.notes:
            print(printable(f"{url}: {note}"), file=sys.stderr)
    return workers, models


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """Treat one Ctrl-C as the end of the window; a second one acts as usual."""
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Listening:
    """Hands on to an auditor what a stream yields, and how its ranks stand."""

    def __init__(self, stream: EventStream, auditor: Auditor) -> None:
        self._stream = stream
        self._auditor = auditor
        self._told: dict[Rank, tuple[State, bool]] = {}
        self._changes = StateChanges(stream.subscriber.statuses)

    def settle(self, limit: float) -> None:
        """Process the past, until every rank is live and every waiting item was processed."""
        until = time.monotonic() + limit
        progress = Progress()
        while time.monotonic() < until:
            states = self._look()
            live = sum(state is State.LIVE for state in states)
            progress.show(f"{live} of {counted(len(states), 'rank')} live")
            if self._take(until) and live == len(states):
                break
        progress.clear()

    def open(self) -> None:
        """Open the window, and say so."""
        self._auditor.begin(time.time())
        live = sum(state is State.LIVE for state, _ in self._told.values())
        ranks = counted(len(self._told), "rank")
        print(f"the window is open: {live} of {ranks} live", file=sys.stderr, flush=True)

    def listen(self, length: float, interrupted: threading.Event) -> None:
        """Process items for so many seconds."""
        until = time.monotonic() + length
        progress = Progress()
        while (left := until - time.monotonic()) > 0 and not interrupted.is_set():
            self._look()
            computed, elsewhere = self._auditor.computed, self._auditor.elsewhere
            part = elsewhere / computed if computed else 0.0
            progress.show(
                f"{left:,.0f} s left: {computed:,} tokens computed, {part:.1%} of them held "
                "elsewhere; Ctrl-C reports"
            )
            self._take(until)
        progress.clear()

    def _look(self) -> list[State]:
        self._changes.tell()
        statuses = self._stream.subscriber.statuses()
        for rank, status in statuses.items():
            if self._told.get(rank) != (status.state, status.complete):
                self._told[rank] = (status.state, status.complete)
                self._auditor.take(status, time.time())
        return [status.state for status in statuses.values()]

    def _take(self, until: float) -> bool:
        """Process items until it is time to look again; return whether none is left waiting."""
        look_at = min(until, time.monotonic() + _LOOK)
        all_taken = False
        while (left := look_at - time.monotonic()) > 0:
            try:
                item = self._stream.get(left if all_taken else 0.0)
            except TimeoutError:
                all_taken = True
                continue
            self._auditor.take(item, time.time())
        return all_taken
