"""`kvindex serve`: the index over HTTP, for routers in other languages and for people."""

from __future__ import annotations

import argparse
import shlex
import signal
from typing import Any

from kvindex import ConfigurationError, Worker
from kvindex.tools.cli.arguments import (
    add_access_options,
    add_cache_options,
    cache_of,
    count,
    needing,
    option,
    settings_of,
    settings_options,
)
from kvindex.tools.cli.engines import (
    WORKER_FORM,
    add_discovery_options,
    add_engine_options,
    add_nats_options,
    pool_of,
    sources_of,
    workers_of,
)
from kvindex.tools.cli.output import counted
from kvindex.tools.cli.signals import ending, handled

_OWN_KEYS = ("model", "routing_group", "block_size")
_OF_THE_RELAY = (  # what cannot be given beside --from
    *("worker", "endpoint", "replay_endpoint", "dp_size", "topic", "name", "bind", "engine"),
    *("group", "removals", "report_mode", "eagle", "hash_block_size", "offload_chunk"),
    *("upper_bound", "resets_connector", "state", "max_blocks_per_rank"),
    *("dns", "workers_file", "k8s_preset", "k8s_selector", "k8s_pool", "k8s_namespace"),
    *("engine_token_file", "warm_from", "register_networks"),
)
_MOST_MISSING = 5  # engines that the first lines name


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    from kvindex.service.http import Limits
    from kvindex.service.settings import DIALECTS, ServeSettings

    settings = ServeSettings()
    settings_options(
        parser.add_argument_group("listening"),
        settings,
        *("--host HOST", "--port PORT", "--shutdown-within S", "--dialect", "--tokenizer URL"),
        "--compat-metrics",
        choices={"dialect": DIALECTS},
    )
    access = add_access_options(parser)
    settings_options(access, settings, "--register-network CIDR=register_networks")
    state = parser.add_argument_group("state")
    settings_options(state, settings, "--state FILE", "--save-every S", "--warm-from URL")
    settings_options(
        parser.add_argument_group("limits"),
        Limits(),
        *("--max-body BYTES=body_bytes", "--max-tokens N=tokens", "--max-ranks N=ranks"),
        *("--max-ranks-per-instance N=ranks_per_instance", "--max-streams N=streams"),
        "--max-connections N=connections",
    )
    text = f"A --worker may also have ,{'=…,'.join(_OWN_KEYS)}=… and ,label.KEY=…"
    workers = parser.add_argument_group("workers", text)
    option(workers, "--config FILE", "settings and workers; TOML, followed")
    settings_options(
        workers, settings, "--model MODEL", "--routing-group NAME", "--block-size TOKENS"
    )
    text = "Engines that appear, leave, move and grow are followed. --config has more settings."
    add_discovery_options(parser, text)
    text = "follow the relay of a pool on NATS, nats://HOST[,HOST]/POOL, in place of engines"
    option(parser, "--from URL", text, dest="from_url")
    add_nats_options(parser)
    add_engine_options(parser)
    add_cache_options(parser)
    text = "most blocks kept of one rank (default: 10,000,000)"
    option(parser, "--max-blocks-per-rank N", text, count)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve the index over HTTP, for routers in other languages and for people.

    Subscribe, and answer over HTTP: /query as clients of Dynamo's indexer and of RFC #1403 ask,
    /register, /workers, /ready, /metrics, /events, and a page at /. Workers are from options, a
    file, discovery, or POST /register. Needs the extra packages of kvindex[server]. Runs until
    SIGTERM or Ctrl-C, its normal ends (exit 0); a second one ends it at once. Exit 1: it cannot
    listen, or --state names a file that it cannot continue from, or could not write at the end.
    """
    with needing("server", "service"):
        from kvindex.service.server import Server
    from kvindex.service.http import Limits
    from kvindex.service.settings import ServeSettings
    from kvindex.service.sources import Configuration, token_reader

    configuration = Configuration(
        arguments.config,
        settings_of(arguments, ServeSettings),
        settings_of(arguments, Limits),
        cache_of(arguments),
    )
    pool = pool_of(arguments, beside=_OF_THE_RELAY)
    configuration.add_workers(_workers(arguments))
    configuration.add_discovery(sources_of(arguments))
    running = Server(
        configuration.settings,
        configuration.sources,
        tokens=configuration.settings.tokens(),
        max_blocks_per_rank=arguments.max_blocks_per_rank,
        engine_token=arguments.engine_token_file and token_reader(arguments.engine_token_file),
        pool=pool,
    )
    # From here on the state is written at the end, whatever ends the command.
    try:
        configuration.begin(running.reconfigure)
        with ending(running), handled({signal.SIGHUP: lambda _: configuration.look()}):
            print_beginning(running)
            running.run()
    finally:
        saved = running.close()
    return 0 if saved else 1


def _workers(arguments: argparse.Namespace) -> list[tuple[Worker, dict[str, Any]]]:
    """Return the workers of the command line, each with the settings that only this command has."""
    plain: list[str] = []
    own: dict[str, dict[str, Any]] = {}
    for text in arguments.worker:
        kept: list[str] = []
        settings: dict[str, Any] = {"labels": {}}
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if key.startswith("label.") and equals:
                settings["labels"][key.removeprefix("label.")] = value
            elif key in _OWN_KEYS and equals and kept:  # the first part may be a worker's name
                if not value or (key == "block_size" and not value.isdigit()):
                    raise ConfigurationError(f"--worker {text!r}: {part!r} has no usable value")
                settings[key] = int(value) if key == "block_size" else value
            else:
                kept.append(part)
        plain.append(",".join(kept))
        own[text.partition("=")[0]] = settings
    # What is left is what every command understands.
    workers = workers_of(argparse.Namespace(**{**vars(arguments), "worker": plain}))
    return [(worker, own.get(worker.name, {})) for worker in workers]


def print_beginning(running: Any) -> None:
    """Print what is served, where the page is, and what to try next."""
    settings = running.settings
    ranks = len(running.service.catalog.registrations)
    print(f"kvindex serves {counted(ranks, 'rank')} at {running.url}", flush=True)
    token = ' -H "Authorization: Bearer $KVINDEX_TOKEN"' if settings.tokens() else ""
    # The line is to be copied: it must work as it is, and hold no token.
    if settings.token_file is not None:
        token = token.replace("$KVINDEX_TOKEN", f"$(head -n 1 {shlex.quote(settings.token_file)})")
    lines = [f"the page: {running.url}/", f"how the ranks stand: curl{token} {running.url}/ready"]
    missing = [f"not found yet: {name}: {why}" for name, why in running.missing.items()]
    lines += missing[:_MOST_MISSING]
    if len(missing) > _MOST_MISSING:
        lines.append(f"and {len(missing) - _MOST_MISSING} more that are not found yet")
    if settings.host in ("0.0.0.0", "::"):
        lines.append(f"it listens at all addresses of this machine, port {running.port}")
    if not ranks and not running.missing and running.pool is None:
        lines.append(
            f"add workers by --worker {WORKER_FORM}, --engine URL, --config FILE, POST /register"
        )
    if settings.insecure and not settings.tokens():
        lines.append("warning: anybody who reaches this address may ask and register (--insecure)")
    elif settings.tokens() and settings.scheme == "http":
        lines.append("note: without --tls-cert the token travels as it is")
    for line in lines:
        print(f"  {line}", flush=True)
