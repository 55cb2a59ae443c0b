"""`kvindex fanout`: subscribe once, for any number of router processes on the machine."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvindex.cli.arguments import Commands, count, seconds
from kvindex.cli.endpoints import add_worker_arguments, workers_of
from kvindex.fanout import FanOut

__all__ = ["add_parser"]


def add_parser(commands: Commands) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "fanout",
        help="subscribe once, for many router processes",
        description=(
            "Subscribe, and let processes on this machine join with kvindex.fanout.join(PATH). "
            "Runs until SIGTERM or Ctrl-C, which are its normal ends (exit 0), and then prints "
            "its counters as JSON. Exit 1: it ended by itself."
        ),
    )
    parser.add_argument(
        "path", metavar="PATH", help="socket to listen at, in a directory that is yours alone"
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="go on from what this file holds, if it is there, and write it at the end",
    )
    parser.add_argument(
        "--max-replicas", type=count, default=64, metavar="N", help="most processes (default: 64)"
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds for which a slow process may hold the subscriber up (default: 1)",
    )
    add_worker_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until it is ended."""
    workers = workers_of(arguments)
    options: dict[str, Any] = {"resume": arguments.state} if arguments.state else {}
    with (
        _ended_by_sigterm(),
        FanOut(
            workers,
            arguments.path,
            patience=arguments.patience,
            max_replicas=arguments.max_replicas,
            **options,
        ) as fanout,
    ):
        ranks = len(fanout.client.ranks)
        print(f"listening at {arguments.path}, {ranks} ranks", file=sys.stderr, flush=True)
        try:
            fanout.wait()
        except KeyboardInterrupt:
            pass  # the normal end
        if arguments.state:
            saved = fanout.client.save(arguments.state)
            print(f"{os.fspath(arguments.state)}: {len(saved)} ranks", file=sys.stderr)
        print(json.dumps(fanout.statistics()))
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the command as Ctrl-C does; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
