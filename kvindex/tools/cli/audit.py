"""`kvindex audit`: what routing costs a fleet today, from its events alone."""

from __future__ import annotations

import argparse
import heapq
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvindex import ConfigurationError, EventStream, RankBatch, State, StreamItem
from kvindex.tools.audit import Auditor, AuditReport, html_of, text_of
from kvindex.tools.cli.arguments import add_cache_options, count, option, seconds
from kvindex.tools.cli.engines import add_engine_options, asked_workers, names_engines
from kvindex.tools.cli.output import Progress, StateChanges, counted, json_line, printable
from kvindex.tools.cli.replay import recordings_of
from kvindex.tools.cli.signals import handled

_LOOK = 0.25  # seconds between looks at how the ranks stand


def add_audit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path, help="a recording")
    option(parser, "--minutes N", "length of the window", seconds, 10.0)
    text = "wait so many seconds at most for all ranks to be live before the window opens"
    option(parser, "--settle S", text, seconds, 15.0)
    text = "fill gaps of recordings from the replay replies in them"
    option(parser, "--with-replayed", text)
    text = "evicted blocks remembered of each rank, at 320 to 640 bytes"
    option(parser, "--max-evicted BLOCKS", text, count, 1 << 17)
    option(parser, "--no-tokens", "do not show how shared prefixes begin")
    option(parser, "--json", "print one JSON object instead")
    option(parser, "--html FILE", "write a report with plots to this file, too", Path)
    add_engine_options(parser)
    add_cache_options(parser)


def run_audit(arguments: argparse.Namespace) -> int:
    """Report what routing costs a fleet today, from its events alone.

    Listen to engines for a while, or read recordings (one publisher's each), and report how many
    computed tokens another rank held at that moment, how many larger caches would have kept, and
    how much is held twice. Nothing is sent to the engines but replay requests. All engines must
    serve one model, except that --engine distinguishes models. Ctrl-C ends the window early and
    reports (exit 0). Exit 1: a recording is cut off (the part before is reported), or no engine
    could be reached at the end. Exit 2: the arguments cannot work. Exit 130: Ctrl-C before the
    window opened.
    """
    if arguments.html is not None and not arguments.html.absolute().parent.is_dir():
        raise ConfigurationError(f"cannot write {arguments.html}: there is no such directory")
    broken = False
    if arguments.files:
        report, broken = _audit_files(arguments)
    else:
        report = _audit_engines(arguments)
    if arguments.no_tokens:
        report = report.without_tokens()
    lines = text_of(report).split("\n")
    print(json_line(report) if arguments.json else "\n".join(map(printable, lines)))
    if arguments.html is not None:
        try:
            arguments.html.write_text(html_of(report), "utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {arguments.html}: {error.strerror}") from error
        print(f"wrote {arguments.html}", file=sys.stderr)
    return 1 if broken or not any(rank.counted for rank in report.ranks) else 0


# Recordings ----------------------------------------------------------------------------------


def _audit_files(arguments: argparse.Namespace) -> tuple[AuditReport, bool]:
    """Return the report, and whether a recording was cut off."""
    if names_engines(arguments):
        raise ConfigurationError("name recordings, or engines, not both")
    recordings = recordings_of(arguments)
    source = f"audit of {counted(len(recordings), 'recording')}"
    auditor = Auditor(max_evicted=arguments.max_evicted, source=source)
    progress = Progress()
    last = 0.0
    # By the engines' own clocks: what another rank held at that moment is the question.
    # At one moment by the recording's number: items themselves have no order.
    for at, _, item in heapq.merge(
        *(_timed(number, recording.items(progress)) for number, recording in enumerate(recordings)),
        key=lambda timed: timed[:2],
    ):
        if auditor.began is None:
            auditor.begin(at)
        auditor.receive(item, at)
        last = at
    progress.clear()
    for recording in recordings:
        if recording.error:
            print(f"kvindex audit: {recording.path}: {recording.error}", file=sys.stderr)
        for rank in recording.ranks:
            auditor.complete(rank, recording.complete)
    # Of recordings without a batch there is a report, too: that they have none.
    if auditor.began is None:
        auditor.begin(last)
    return auditor.report(last), any(recording.error for recording in recordings)


def _timed(number: int, items: Iterable[StreamItem]) -> Iterator[tuple[float, int, StreamItem]]:
    """Yield a recording's items with the publisher's time, which never goes back."""
    at = 0.0
    waiting: list[StreamItem] = []  # until the next batch shows the time
    for item in items:
        waiting.append(item)
        if isinstance(item, RankBatch):
            at = max(at, item.batch.ts)
            yield from ((at, number, earlier) for earlier in waiting)
            waiting.clear()
    yield from ((at, number, last) for last in waiting)


# Engines -------------------------------------------------------------------------------------


def _audit_engines(arguments: argparse.Namespace) -> AuditReport:
    workers, models = asked_workers(arguments)
    source = f"audit of {counted(len(workers), 'worker')}"
    auditor = Auditor(models=models, max_evicted=arguments.max_evicted, source=source)
    interrupted = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(_: int) -> None:
        """End the window; a second Ctrl-C acts as usual."""
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    with EventStream(workers) as stream:
        listening = Listening(stream, auditor)
        # Ctrl-C while the past comes in ends the command: there is nothing to report yet.
        listening.settle(arguments.settle)
        with handled({signal.SIGINT: interrupt}):
            listening.open()
            listening.listen(arguments.minutes * 60, interrupted)
    return auditor.report(time.time())


class Listening:
    """Passes on to an auditor what a stream yields, and how its ranks stand."""

    def __init__(self, stream: EventStream, auditor: Auditor) -> None:
        self._stream = stream
        self._auditor = auditor
        self._standing = ""
        self._changes = StateChanges(stream.subscriber.statuses)

    def settle(self, limit: float) -> None:
        """Process the past, until every rank is live and every waiting item was processed."""
        until = time.monotonic() + limit
        progress = Progress()
        while time.monotonic() < until:
            all_live = self._look()
            progress.show(self._standing)
            if self._process(until) and all_live:
                break
        progress.clear()

    def open(self) -> None:
        """Open the window, and report that."""
        self._auditor.begin(time.time())
        print(f"the window is open: {self._standing}", file=sys.stderr, flush=True)

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
            self._process(until)
        progress.clear()

    def _look(self) -> bool:
        """Pass on how the ranks stand; return whether all are live."""
        self._changes.report()
        statuses = self._stream.subscriber.statuses().values()
        for status in statuses:
            self._auditor.receive(status, time.time())
        live = sum(status.state is State.LIVE for status in statuses)
        self._standing = f"{live} of {counted(len(statuses), 'rank')} live"
        return live == len(statuses)

    def _process(self, until: float) -> bool:
        """Process items until it is time to look again; return whether none is left waiting."""
        look_at = min(until, time.monotonic() + _LOOK)
        drained = False
        # Waiting items first, without waiting for more: busy engines would never be drained.
        while (left := look_at - time.monotonic()) > 0:
            try:
                item = self._stream.get(left if drained else 0.0)
            except TimeoutError:
                drained = True
                continue
            self._auditor.receive(item, time.time())
        return drained
