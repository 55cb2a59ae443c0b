"""`kvindex status`: how the ranks of a running `kvindex fanout` stand, or a pool on NATS.

Ask the `kvindex fanout` (or kvindex.replicas.FanOut) that listens at PATH how its ranks
stand. Or, with nats://HOST/POOL, show who writes to the pool, its log and its snapshots. Exit 0: it
answered; 1: nothing answers, or there is no such pool; 3: --require-live was given and a rank is
not live, or no relay writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvindex.replicas import ask
from kvindex.tools.cli.arguments import option, seconds
from kvindex.tools.cli.nats_options import add_nats_options, nats_options_of
from kvindex.tools.cli.output import counted, in_options, printable, table

_NOT_LIVE = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    text = "the socket it listens at, or nats://HOST[:PORT][,HOST…]/POOL"
    parser.add_argument("path", metavar="PATH", help=text)
    option(parser, "--wait S", "seconds to wait for its answer", seconds, 5.0)
    option(parser, "--require-live", "fail (exit 3) if a rank is not live")
    option(parser, "--json", "print every counter as JSON")
    add_nats_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print."""
    if arguments.path.startswith(("nats://", "tls://")):
        return _show_pool(arguments)
    report = ask(arguments.path, arguments.wait)
    ranks = report["ranks"]
    if arguments.json:
        print(json.dumps(report))
    else:
        print(state_table(ranks))
        print(counted(report["replicas"], "process has joined", "processes have joined"))
    all_live = all(rank["state"] == "live" for rank in ranks.values())
    return 0 if all_live or not arguments.require_live else _NOT_LIVE


def _show_pool(arguments: argparse.Namespace) -> int:
    from kvindex.replicas.nats.pool_report import pool_report

    options = nats_options_of(arguments)
    report = pool_report(arguments.path, timeout=arguments.wait, **options)
    if arguments.json:
        print(json.dumps(report))
    else:
        print("\n".join(_pool_lines(report)))
    return 0 if report["is_written"] or not arguments.require_live else _NOT_LIVE


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
        rows.insert(0, (f"{report['leader']} (leader)", True, True, 0))
        yield table(("server", "online", "current", "lag"), rows)
    if report["snapshots"]:
        rows = [tuple(row.values()) for row in report["snapshots"]]
        yield table(("snapshot", "epoch", "position", "bytes", "behind"), rows)
    else:
        yield "no snapshot: no replica can join"


def state_table(ranks: Mapping[str, Mapping[str, Any]]) -> str:
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
