"""`kvindex top`: the fleet at a terminal, kept up to date; through a pipe, once."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from kvindex import ConfigurationError, State, connect
from kvindex.service.overview import Fleet, overview
from kvindex.tools.cli.arguments import Commands, count, seconds
from kvindex.tools.cli.endpoints import add_engine_arguments, engines_of
from kvindex.tools.cli.fleet_table import SORTS
from kvindex.tools.cli.service_fleet import ServiceFleet

__all__ = ["add_parser"]

_MISSING: Final = "kvindex top needs the package rich: pip install 'kvindex[server]'"


def add_parser(commands: Commands, text: str) -> None:
    """Add this command to the command line, with `text` in the list of commands."""
    parser = commands.add_parser(
        "top",
        help=text,
        description=(
            "Show totals and a table of the ranks: of a running `kvindex serve`, named by its URL, "
            "or of engines that this command subscribes to by itself. At a terminal it goes on "
            "until q or Ctrl-C; else it prints the fleet once. Keys: "
            + ", ".join(f"{key} {sort}" for sort, key in SORTS.items())
            + ", r reverses, arrows and Page Down scroll, / finds, w says why ranks are not well, "
            "q ends."
        ),
    )
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="of a service, e.g. http://127.0.0.1:8090 (its token: KVINDEX_TOKEN)",
    )
    parser.add_argument(
        "--cacert",
        metavar="FILE",
        help="authorities to trust for https, as PEM (default: the system's, or SSL_CERT_FILE)",
    )
    parser.add_argument(
        "--sort",
        choices=tuple(SORTS),
        default="state",
        help="by what the table is sorted: worst, most or longest first (default: state)",
    )
    parser.add_argument("-n", "--ranks", type=count, metavar="N", help="show N ranks at most")
    parser.add_argument(
        "--every",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds between two looks; a change of state is shown at once (default: 1)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=3.0,
        metavar="S",
        help="seconds to wait for engines to be live before the fleet is printed once (default: 3)",
    )
    add_engine_arguments(parser)
    parser.set_defaults(run=run, log_from=logging.ERROR)


def run(arguments: argparse.Namespace) -> int:
    """Show the fleet until it is enough."""
    named = bool(arguments.worker or arguments.endpoint or arguments.engine)
    if named == bool(arguments.url):
        raise ConfigurationError(
            "name either a running service by its URL, or engines (--worker, --endpoint, --engine)"
        )
    try:
        from kvindex.tools.cli.live_top import print_once, show
    except ImportError as error:
        raise ConfigurationError(f"{_MISSING} ({error})") from None
    live = sys.stdout.isatty()
    with ExitStack() as opened:
        if arguments.url:
            read, watch = _service(arguments.url, arguments.cacert, opened)
        else:
            read, watch = _engines(arguments, opened, wait=not live)
        if not live:
            print_once(read(), sort=arguments.sort, most=arguments.ranks)
            return 0
        changed = threading.Event()
        watch(changed)
        with suppress(KeyboardInterrupt):  # the normal end
            show(read, changed, sort=arguments.sort, most=arguments.ranks, every=arguments.every)
    return 0


_Read = Callable[[], Fleet]
_Watch = Callable[[threading.Event], None]


def _service(url: str, cacert: str | None, opened: ExitStack) -> tuple[_Read, _Watch]:
    service = ServiceFleet(url, cacert)
    opened.callback(service.close)
    return service.read, service.watch


def _engines(
    arguments: argparse.Namespace, opened: ExitStack, *, wait: bool
) -> tuple[_Read, _Watch]:
    client = opened.enter_context(connect(engines_of(arguments)))
    if wait:
        client.wait_for(
            lambda statuses: all(status.state is State.LIVE for status in statuses.values()),
            arguments.wait,
        )

    def watch(changed: threading.Event) -> None:
        opened.callback(client.on_change(lambda _: changed.set()))

    def read() -> Fleet:
        found = client.discovery
        return overview(client, missing=None if found is None else found.missing())

    return read, watch
