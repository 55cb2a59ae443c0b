"""`kvindex fanout`: subscribe once, for any number of router processes on the machine.

Subscribe, and let processes on this machine join with kvindex.replicas.join(PATH). Reports on
stderr which ranks become live or stop being live, and why; at SIGUSR1 it shows all of them, as
`kvindex status PATH` does. Runs until SIGTERM, SIGHUP or Ctrl-C, its normal ends (exit 0), and then
prints its counters as JSON, with those of each rank. Exit 1: it ended by itself, or --state names a
file that it cannot continue from, or could not write at the end.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
from pathlib import Path

from kvindex import Client, ConfigurationError, SnapshotError
from kvindex.replicas import FanOut
from kvindex.subscribe.discovery import Engines
from kvindex.tools.cli.arguments import add_cache_options, count, option, seconds
from kvindex.tools.cli.endpoints import add_engine_options, engines_of
from kvindex.tools.cli.output import counted
from kvindex.tools.cli.serving import serve, signals_handled


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    text = "socket to listen at, in a directory that only you can write to"
    parser.add_argument("path", metavar="PATH", help=text)
    text = "continue from this file if it exists, and write it at the end"
    option(parser, "--state FILE", text)
    option(parser, "--max-replicas N", "most processes that may join", count, 64)
    text = "seconds for which a slow process may block the subscriber"
    option(parser, "--patience S", text, seconds, 1.0)
    text = "print the counters every S seconds, too, each time as a line of JSON"
    option(parser, "--stats-every S", text, seconds)
    text = "most blocks kept of one rank (default: 10,000,000)"
    option(parser, "--max-blocks-per-rank N", text, count)
    add_engine_options(parser)
    add_cache_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the command."""
    engines = engines_of(arguments)
    if arguments.state:
        _check_writable(Path(arguments.state))
    with signals_handled() as signals, _opened(arguments, engines) as fanout:
        where = f"listening at {arguments.path}"
        serve(fanout, fanout.client, signals, where, arguments.stats_every)
        saved = _save(fanout.client, arguments.state) if arguments.state else True
        print(json.dumps(fanout.report()))
    return 0 if saved else 1


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
        with tempfile.TemporaryFile(dir=path.parent):  # a new file replaces it
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
