"""One subscription for many: `kvindex fanout`, `kvindex relay`, and `kvindex status` of both."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvindex import Client, ConfigurationError, SnapshotError
from kvindex.replicas import FanOut, ask
from kvindex.tools.cli.arguments import add_cache_options, count, option, seconds, size
from kvindex.tools.cli.engines import (
    add_engine_options,
    add_nats_options,
    engines_of,
    nats_options_of,
)
from kvindex.tools.cli.output import StateChanges, counted, in_options, printable, table
from kvindex.tools.cli.signals import handled

if TYPE_CHECKING:
    from kvindex.replicas.nats.relay import Relay

_LOOK = 0.5  # seconds between looks at the ranks' states
_NOT_LIVE = 3


# fanout ------------------------------------------------------------------------------------------


def add_fanout_options(parser: argparse.ArgumentParser) -> None:
    text = "socket to listen at, in a directory that only you can write to"
    parser.add_argument("path", metavar="PATH", help=text)
    text = "continue from this file if it exists, and write it at the end"
    option(parser, "--state FILE", text)
    option(parser, "--max-replicas N", "most processes that may join", count, 64)
    text = "seconds for which a slow process may block the subscriber"
    option(parser, "--patience S", text, seconds, 1.0)
    _add_subscriber_options(parser)


def run_fanout(arguments: argparse.Namespace) -> int:
    """Subscribe once, for any number of router processes on the machine.

    Subscribe, and let processes on this machine join with kvindex.replicas.join(PATH). Reports on
    stderr which ranks become live or stop being live, and why; at SIGUSR1 it shows all of them, as
    `kvindex status PATH` does. Runs until SIGTERM, SIGHUP or Ctrl-C, its normal ends (exit 0), and
    then prints its counters as JSON, with those of each rank. Exit 1: it ended by itself, or
    --state names a file that it cannot continue from, or could not write at the end.
    """
    engines = engines_of(arguments)
    # Before anything is served: at the end it would be too late to name another file.
    if arguments.state:
        _check_writable(Path(arguments.state))
    with _signals_handled() as signals:
        try:
            fanout = FanOut(
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
        with fanout:
            _serve(fanout, signals, f"listening at {arguments.path}", arguments.stats_every)
            # While the client is open: what it holds is gone afterwards.
            saved = _save(fanout.client, arguments.state) if arguments.state else True
            print(json.dumps(fanout.report()))
    return 0 if saved else 1


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


# relay -------------------------------------------------------------------------------------------


def add_relay_options(parser: argparse.ArgumentParser) -> None:
    _allow_options_between(parser)
    text = "nats://HOST[:PORT][,HOST…][/POOL], or tls://"
    parser.add_argument("url", metavar="URL", help=text)
    text = "HTTP server of an engine, as with --engine"
    parser.add_argument("engines", metavar="ENGINE", nargs="*", help=text)
    option(parser, "--pool NAME", "the pool, unless the URL has it: letters, digits, _ and -")
    text = "servers that store the stream, if it is to be made: 1, 3 or 5"
    option(parser, "--replicas N", text, count, 1)
    text = "where the stream is stored, if it is to be made; a file stores prompts' tokens at rest"
    option(parser, "--store KIND", text, ("memory", "file"), "memory")
    text = "size of the stream, if it is to be made; the oldest messages go when it is full"
    option(parser, "--max-bytes SIZE", text, size, 1 << 30)
    option(parser, "--relay-name NAME", "letters and digits that its epochs begin with")
    add_nats_options(parser)
    _add_subscriber_options(parser)


def run_relay(arguments: argparse.Namespace) -> int:
    """Subscribe once, and write to NATS for any number of hosts.

    Subscribe to engines, named by their HTTP servers (ENGINE) or by the options below, and write
    all that they send to the pool's log in NATS. Any host follows it: `kvindex serve --from
    nats://HOST/POOL`, or kvindex.replicas.nats.join. Of several relays of a pool, with the same
    engines, one writes; if it is silent for 3 s, another one takes over. The pool's stream is made
    if it is missing, and used as it is if not. Reports on stderr which ranks become live or stop
    being live, and why; at SIGUSR1 it shows all of them. Runs until SIGTERM, SIGHUP or Ctrl-C, its
    normal ends (exit 0), and then prints its counters as JSON, with those of each rank. Exit 1:
    NATS refused it at the start, or it ended by itself.
    """
    # The other commands of this file must not load the client of NATS.
    from kvindex.replicas.nats.relay import Relay

    arguments.engine += arguments.engines
    engines = engines_of(arguments)
    secured = nats_options_of(arguments)
    with (
        _signals_handled() as signals,
        Relay(
            engines,
            arguments.url,
            pool=arguments.pool,
            replicas=arguments.replicas,
            store=arguments.store,
            max_bytes=arguments.max_bytes,
            name=arguments.relay_name,
            max_blocks_per_rank=arguments.max_blocks_per_rank,
            **secured,
        ) as relay,
    ):
        _serve(relay, signals, f"connected to {relay.pool}", arguments.stats_every)
        print(json.dumps(relay.report()))
    return 0


def _allow_options_between(parser: argparse.ArgumentParser) -> None:
    """Let options stand between the URL and the engines, which argparse does not by itself."""
    # The main parser calls `parse_known_args` of a command's parser, which fills ENGINE with
    # nothing as soon as it meets an option.
    parse = parser.parse_known_args

    def parse_mixed(
        arguments: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Any:
        parser.parse_known_args = parse  # type: ignore[method-assign]  # which this one calls
        return parser.parse_known_intermixed_args(arguments, namespace)

    parser.parse_known_args = parse_mixed  # type: ignore[method-assign,assignment]


# Both --------------------------------------------------------------------------------------------


def _add_subscriber_options(parser: argparse.ArgumentParser) -> None:
    text = "print the counters every S seconds, too, each time as a line of JSON"
    option(parser, "--stats-every S", text, seconds)
    text = "most blocks kept of one rank (default: 10,000,000)"
    option(parser, "--max-blocks-per-rank N", text, count)
    add_engine_options(parser)
    add_cache_options(parser)


class _Signals:
    """The signals that have arrived: handlers only set it, since they must wait for no lock."""

    def __init__(self) -> None:
        self.tables_asked: list[int] = []
        self.has_ended = False

    def end(self, _: int) -> None:
        """End as Ctrl-C does, once."""
        # Later ones interrupt no saving; Ctrl-C itself does.
        if not self.has_ended:
            self.has_ended = True
            raise KeyboardInterrupt


@contextmanager
def _signals_handled() -> Iterator[_Signals]:
    """Let SIGTERM and SIGHUP end the command, and SIGUSR1 ask for a table of the ranks."""
    signals = _Signals()
    ends = (signal.SIGTERM, signal.SIGHUP)  # the latter of a terminal that goes away
    # Under nohup SIGHUP is ignored, and stays so.
    heeded = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]
    with (
        handled({signal.SIGUSR1: signals.tables_asked.append}),
        handled(dict.fromkeys(heeded, signals.end), to_the_end=True),
    ):
        yield signals


def _serve(
    service: FanOut | Relay, signals: _Signals, where: str, stats_every: float | None
) -> None:
    """Serve until a signal, or the service itself, ends it; print what changes meanwhile."""
    client = service.client
    changes = StateChanges(client.statuses, first_live=True)
    every = stats_every or math.inf
    due = time.monotonic() + every
    try:
        print(f"{where}, {counted(len(client.ranks), 'rank')}", file=sys.stderr, flush=True)
        while not service.wait(_LOOK):
            changes.report()
            # Here, not in the handler: statistics take locks that this thread may hold.
            if signals.tables_asked:
                signals.tables_asked.clear()
                print(_state_table(client.statistics()["ranks"]), file=sys.stderr, flush=True)
            if time.monotonic() >= due:
                due += every
                print(json.dumps(service.report()), flush=True)
    except KeyboardInterrupt:
        signals.has_ended = True  # the normal end; systemd, or a shell, may send another signal


# status ------------------------------------------------------------------------------------------


def add_status_options(parser: argparse.ArgumentParser) -> None:
    text = "the socket it listens at, or nats://HOST[:PORT][,HOST…]/POOL"
    parser.add_argument("path", metavar="PATH", help=text)
    option(parser, "--wait S", "seconds to wait for its answer", seconds, 5.0)
    option(parser, "--require-live", "fail (exit 3) if a rank is not live")
    option(parser, "--json", "print every counter as JSON")
    add_nats_options(parser)


def run_status(arguments: argparse.Namespace) -> int:
    """Show how the ranks of a running `kvindex fanout` stand, or a pool on NATS.

    Ask the `kvindex fanout` (or kvindex.replicas.FanOut) that listens at PATH how its ranks
    stand. Or, with nats://HOST/POOL, show who writes to the pool, its log and its snapshots. Exit
    0: it answered; 1: nothing answers, or there is no such pool; 3: --require-live was given and a
    rank is not live, or no relay writes.
    """
    if arguments.path.startswith(("nats://", "tls://")):
        from kvindex.replicas.nats.pool_report import pool_report

        options = nats_options_of(arguments)
        report = pool_report(arguments.path, timeout=arguments.wait, **options)
        lines, is_well = _pool_lines(report), report["is_written"]
    else:
        report = ask(arguments.path, arguments.wait)
        joined = counted(report["replicas"], "process has joined", "processes have joined")
        lines = iter([_state_table(report["ranks"]), joined])
        is_well = all(rank["state"] == "live" for rank in report["ranks"].values())
    print(json.dumps(report) if arguments.json else "\n".join(lines))
    return 0 if is_well or not arguments.require_live else _NOT_LIVE


def _pool_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a pool stands, as `pool_report` returns it."""
    age = "never" if report["age"] is None else f"{report['age']:.1f} s ago"
    writer = f"epoch {report['epoch']}" if report["is_written"] else "no relay writes"
    yield printable(f"{report['pool']}: {writer}; last message {report['head']}, {age}")
    yield (
        f"log: {counted(report['messages'], 'message')} from {report['first']}, "
        f"{report['bytes']} bytes, {counted(report['consumers'], 'reader')}, "
        f"{report['replicas']} x {report['storage']}"
    )
    if report["peers"]:
        rows = [
            (peer["name"], not peer["offline"], peer["current"], peer["lag"])
            for peer in report["peers"]
        ]
        # NATS lists the leader's peers alone, by how far they are behind it.
        rows.insert(0, (f"{report['leader']} (leader)", True, True, 0))
        yield table(("server", "online", "current", "lag"), rows)
    if report["snapshots"]:
        rows = [tuple(row.values()) for row in report["snapshots"]]
        yield table(("snapshot", "epoch", "position", "bytes", "behind"), rows)
    else:
        yield "no snapshot: no replica can join"


def _state_table(ranks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how ranks stand, as in `Client.statistics()`, and below it why some are not live."""
    rows = [
        (
            name,
            *(rank[key] for key in ("state", "complete", "seq", "lag", "epoch", "losses")),
            rank["index"].get("blocks", 0),
            rank["last_event_age"],
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
