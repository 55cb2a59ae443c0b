"""`kvindex fanout`: subscribe once, for any number of router processes on the machine."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvindex import Client, ConfigurationError, SnapshotError
from kvindex.index.replicas import FanOut
from kvindex.subscribe.discovery import Engines
from kvindex.tools.cli.arguments import Commands, add_cache_arguments, cache_of, count, seconds
from kvindex.tools.cli.endpoints import add_engine_arguments, engines_of
from kvindex.tools.cli.output import counted
from kvindex.tools.cli.states import StateChanges, state_table

__all__ = ["add_parser"]

_LOOK = 0.5  # seconds between looks at the ranks' states


def add_parser(commands: Commands, text: str) -> None:
    """Add this command to the command line, with `text` in the list of commands."""
    parser = commands.add_parser(
        "fanout",
        help=text,
        description=(
            "Subscribe, and let processes on this machine join with "
            "kvindex.index.replicas.join(PATH). "
            "Says on stderr which ranks become live or stop being live, and why; at SIGUSR1 it "
            "shows all of them, as `kvindex status PATH` does. Runs until SIGTERM, SIGHUP or "
            "Ctrl-C, its normal ends (exit 0), and then prints its counters as JSON, with those of "
            "each rank. Exit 1: it ended by itself, or --state names a file that it cannot "
            "continue from, or could not write at the end."
        ),
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="socket to listen at, in a directory that only you can write to",
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="continue from this file if it exists, and write it at the end",
    )
    parser.add_argument(
        "--max-replicas",
        type=count,
        default=64,
        metavar="N",
        help="most processes that may join (default: 64)",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds for which a slow process may block the subscriber (default: 1)",
    )
    parser.add_argument(
        "--stats-every",
        type=seconds,
        metavar="S",
        help="print the counters every S seconds, too, each time as a line of JSON",
    )
    parser.add_argument(
        "--max-blocks-per-rank",
        type=count,
        metavar="N",
        help="most blocks kept of one rank (default: 10,000,000)",
    )
    add_engine_arguments(parser)
    add_cache_arguments(parser)
    parser.set_defaults(run=run, log_from=logging.WARNING)


def run(arguments: argparse.Namespace) -> int:
    """Serve until it is ended."""
    engines = engines_of(arguments, cache_of(arguments))
    if arguments.state:
        _check_writable(Path(arguments.state))
    with (
        _shown_by_signal() as asked,
        _ended_by_signals() as ignore_signals,
        _opened(arguments, engines) as fanout,
    ):
        try:
            ranks = counted(len(fanout.client.ranks), "rank")
            print(f"listening at {arguments.path}, {ranks}", file=sys.stderr, flush=True)
            _serve(fanout, asked, arguments.stats_every or math.inf)
        except KeyboardInterrupt:
            ignore_signals()  # the normal end; systemd, or a shell, may send another one
        saved = _save(fanout.client, arguments.state) if arguments.state else True
        print(json.dumps(fanout.report()))
    return 0 if saved else 1


def _serve(fanout: FanOut, asked: list[int], stats_every: float) -> None:
    """Serve until it ends; print the ranks' changes, and the counters when they are due."""
    changes = StateChanges(fanout.client.subscriber.statuses, first_live=True)
    due = time.monotonic() + stats_every
    while not fanout.wait(_LOOK):
        changes.tell()
        if asked:
            asked.clear()
            table = state_table(fanout.client.statistics()["ranks"])
            print(table, file=sys.stderr, flush=True)
        if time.monotonic() >= due:
            due += stats_every
            print(json.dumps(fanout.report()), flush=True)


def _opened(arguments: argparse.Namespace, engines: Engines) -> FanOut:
    try:
        return FanOut(
            engines,
            arguments.path,
            patience=arguments.patience,
            max_replicas=arguments.max_replicas,
            max_blocks_per_rank=arguments.max_blocks_per_rank,
            resume=arguments.state or None,
        )
    except SnapshotError as error:  # it begins with the path
        raise SnapshotError(
            f"--state {error}; to start without it, delete it or move it away",
            reason=error.reason,
        ) from error


def _check_writable(path: Path) -> None:
    """Refuse a state file that could not be written at the end, before there is one to lose."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):  # a new file is what takes its place
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--state {path}: it could not be written at the end ({error.strerror}): name a file "
            "in a directory that exists and that you may write to"
        ) from error


def _save(client: Client, path: str) -> bool:
    """Write the state; return whether it worked."""
    try:
        saved = client.save(path)
    except OSError as error:
        print(
            f"kvindex fanout: --state {path}: it could not be written ({error.strerror}); a file "
            "that was there is as before",
            file=sys.stderr,
        )
        return False
    print(f"{path}: {counted(len(saved), 'rank')}", file=sys.stderr)
    return True


@contextmanager
def _shown_by_signal() -> Iterator[list[int]]:
    """Make SIGUSR1 request the ranks' states: a handler itself must wait for no lock."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only that one can
        yield asked
        return
    before = signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Have SIGTERM, or a terminal that goes away, end the command as Ctrl-C does.

    The first one does; later ones are ignored, so that they break no saving off. Ctrl-C can. What
    is given ignores them from now on.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one can
        yield lambda: None
        return
    came: list[int] = []

    def end_once(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1:
            raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGHUP)
    wanted = [one for one in signals if signal.getsignal(one) is not signal.SIG_IGN]  # by nohup
    before = {one: signal.signal(one, end_once) for one in wanted}

    def ignore() -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)

    try:
        yield ignore
    finally:
        if came:
            ignore()  # until the process ends, which it was told to: it is to exit with our code
        else:
            for one, handler in before.items():
                signal.signal(one, handler)
