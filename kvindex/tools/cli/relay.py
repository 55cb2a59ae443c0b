"""`kvindex relay`: subscribe once, and write to NATS for any number of hosts.

Subscribe to engines, named by their HTTP servers (ENGINE) or by the options below, and write all
that they send to the pool's log in NATS. Any host follows it: `kvindex serve --from
nats://HOST/POOL`, or kvindex.replicas.nats.join. Of several relays of a pool, with the same
engines, one writes; if it is silent for 3 s, another one takes over. The pool's stream is made if
it is missing, and used as it is if not.

Reports on stderr which ranks become live or stop being live, and why; at SIGUSR1 it shows all of
them. Runs until SIGTERM, SIGHUP or Ctrl-C, its normal ends (exit 0), and then prints its counters
as JSON, with those of each rank. Exit 1: NATS refused it at the start, or it ended by itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from kvindex.replicas.nats.relay import Relay
from kvindex.tools.cli.arguments import add_cache_options, count, option, seconds, size
from kvindex.tools.cli.endpoints import add_engine_options, engines_of
from kvindex.tools.cli.nats_options import add_nats_options, nats_options_of
from kvindex.tools.cli.serving import serve, signals_handled


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
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
    text = "print the counters every S seconds, too, each time as a line of JSON"
    option(parser, "--stats-every S", text, seconds)
    text = "most blocks kept of one rank (default: 10,000,000)"
    option(parser, "--max-blocks-per-rank N", text, count)
    add_nats_options(parser)
    add_engine_options(parser)
    add_cache_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write until a signal ends the command."""
    arguments.engine += arguments.engines
    engines = engines_of(arguments)
    secured = nats_options_of(arguments)
    with (
        signals_handled() as signals,
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
        where = f"connected to {relay.pool}"
        serve(relay, relay.client, signals, where, arguments.stats_every)
        print(json.dumps(relay.report()))
    return 0


def _allow_options_between(parser: argparse.ArgumentParser) -> None:
    """Let options stand between the URL and the engines, which argparse does not by itself."""
    parse = parser.parse_known_args

    def parse_mixed(
        arguments: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Any:
        parser.parse_known_args = parse  # type: ignore[method-assign]  # which this one calls
        return parser.parse_known_intermixed_args(arguments, namespace)

    parser.parse_known_args = parse_mixed  # type: ignore[method-assign,assignment]
