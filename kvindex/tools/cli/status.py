"""`kvindex status`: how the ranks of a running `kvindex fanout` stand.

Ask the `kvindex fanout` (or kvindex.index.replicas.FanOut) that listens at PATH how its ranks
stand. Exit 0: it answered; 1: nothing answers at PATH; 3: --require-live was given and a rank is
not live.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from kvindex.index.replicas import ask
from kvindex.tools.cli.arguments import option, seconds
from kvindex.tools.cli.output import counted, in_options, printable, table

_NOT_LIVE = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    parser.add_argument("path", metavar="PATH", help="the socket it listens at")
    option(parser, "--wait S", "seconds to wait for its answer", seconds, 5.0)
    option(parser, "--require-live", "fail (exit 3) if a rank is not live")
    option(parser, "--json", "print every counter as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print."""
    report = ask(arguments.path, arguments.wait)
    ranks = report["ranks"]
    if arguments.json:
        print(json.dumps(report))
    else:
        print(state_table(ranks))
        print(counted(report["replicas"], "process has joined", "processes have joined"))
    all_live = all(rank["state"] == "live" for rank in ranks.values())
    return 0 if all_live or not arguments.require_live else _NOT_LIVE


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
