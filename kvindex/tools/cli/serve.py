"""`kvindex serve`: the index over HTTP, for routers in other languages and for whoever looks."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.tools.cli.arguments import Commands, add_cache_arguments, cache_of, count, seconds
from kvindex.tools.cli.endpoints import WORKER_FORM, add_worker_arguments, parse_worker, workers_of
from kvindex.tools.cli.output import counted

__all__ = ["add_parser", "options_of", "sources_of"]

_OWN_KEYS = ("model", "routing_group", "block_size")
_SETTINGS = (
    "host",
    "port",
    "processes",
    "model",
    "routing_group",
    "block_size",
    "token_file",
    "insecure",
    "tls_cert",
    "tls_key",
    "allowed_hosts",
    "register_networks",
    "state",
    "save_every",
    "warm_from",
    "shutdown_within",
    "dialect",
    "hash_queries",
    "tokenizer",
    "compat_metrics",
)
_MOST_MISSING = 5  # engines that the first lines name
_LIMITS = ("body_bytes", "tokens", "ranks", "ranks_per_instance", "streams", "connections")


def add_parser(commands: Commands, text: str) -> None:
    """Add this command to the command line, with `text` in the list of commands."""
    parser = commands.add_parser(
        "serve",
        help=text,
        description=(
            "Subscribe, and answer over HTTP: /query as Dynamo's indexer, Mooncake and MindIE "
            "clients ask, /register, /workers, /ready, /metrics, /events, and a page at /. Workers "
            "come from options, a file, discovery, or POST /register. Needs the extra packages of "
            "kvindex[server]. Runs until SIGTERM or Ctrl-C, its normal ends (exit 0); a second one "
            "ends it at once. Exit 1: it cannot listen, or --state names a file that it cannot "
            "continue from, or could not write at the end."
        ),
        argument_default=argparse.SUPPRESS,
    )
    _add_listening(parser)
    _add_access(parser)
    _add_state(parser)
    _add_limits(parser)
    workers = parser.add_argument_group(
        "workers", f"A --worker may also have ,{'=…,'.join(_OWN_KEYS)}=… and ,label.KEY=…"
    )
    workers.add_argument(
        "--config", metavar="FILE", default=None, help="settings and workers; TOML, followed"
    )
    workers.add_argument("--model", help="what workers serve that do not say (default: default)")
    workers.add_argument("--routing-group", metavar="NAME", help="their group (default: default)")
    workers.add_argument(
        "--block-size", type=count, metavar="TOKENS", help="of their blocks; events tell it anyway"
    )
    parser.argument_default = None
    _add_discovery(parser)
    add_worker_arguments(parser)
    add_cache_arguments(parser)
    parser.add_argument(
        "--max-blocks-per-rank",
        type=count,
        default=None,
        metavar="N",
        help="most blocks kept of one rank (default: 10,000,000)",
    )
    parser.set_defaults(run=run, log_from=logging.WARNING)


def _add_listening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("listening")
    group.add_argument("--host", help="address to listen at (default: 127.0.0.1)")
    group.add_argument("--port", type=_port, help="its port; 0: any (default: 8090)")
    group.add_argument("--processes", type=count, metavar="N", help="that answer HTTP (default: 1)")
    group.add_argument(
        "--shutdown-within", type=seconds, metavar="S", help="for open requests (default: 10)"
    )
    group.add_argument(
        "--dialect",
        choices=("auto", "dynamo", "rfc", "motor", "conductor"),
        help="of queries (default: auto, told by each query)",
    )
    group.add_argument(
        "--hash-queries", choices=("xxh3",), help="answer /query_by_hash, by a second index"
    )
    group.add_argument(
        "--tokenizer", metavar="URL", help="engine that turns text into tokens, for /api/explain"
    )
    group.add_argument(
        "--compat-metrics", action="store_true", help="add the metric names of Dynamo's indexer"
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "who may ask", "Beyond loopback, a token is wanted: a file, or KVINDEX_TOKEN. Never argv."
    )
    group.add_argument("--token-file", metavar="FILE", help="tokens, each on a line of its own")
    group.add_argument("--insecure", action="store_true", help="want no token beyond loopback")
    group.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    group.add_argument(
        "--allowed-host",
        action="append",
        dest="allowed_hosts",
        metavar="NAME",
        help="that a Host header may have, besides localhost and addresses; *.NAME; repeatable",
    )
    group.add_argument(
        "--register-network",
        action="append",
        dest="register_networks",
        metavar="CIDR",
        help="where workers that register may be: 10.0.0.0/8, or loopback, private, any; "
        "repeatable (default: loopback if the server is there, else none)",
    )


def _add_state(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("state")
    group.add_argument(
        "--state", metavar="FILE", help="continue from this file if it exists, and keep it current"
    )
    group.add_argument(
        "--save-every", type=seconds, metavar="S", help="between two savings (default: 60)"
    )
    group.add_argument(
        "--warm-from", metavar="URL", help="begin with the snapshot of another kvindex serve"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for option, name, unit, what in (
        ("--max-body", "body_bytes", "BYTES", "of a request (default: 8 MiB)"),
        ("--max-tokens", "tokens", "N", "of a query (default: 1,048,576)"),
        ("--max-ranks", "ranks", "N", "that are registered (default: 4,096)"),
        ("--max-ranks-per-instance", "ranks_per_instance", "N", "of them (default: 1,024)"),
        ("--max-streams", "streams", "N", "open /events connections (default: 64)"),
        ("--max-connections", "connections", "N", "for each process (default: 4,096)"),
    ):
        group.add_argument(option, dest=name, type=count, metavar=unit, help=what)


def _add_discovery(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "discovery",
        "Engines that come, go, move and grow are followed. --config has more settings.",
    )
    group.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="HTTP server of an engine, which is asked where it publishes; repeatable",
    )
    group.add_argument(
        "--dns",
        action="append",
        default=[],
        metavar="URL",
        help="each address of the URL's name is an engine; repeatable",
    )
    group.add_argument(
        "--workers-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a list of workers and engines, TOML or JSON, followed; repeatable",
    )
    group.add_argument(
        "--k8s-preset",
        choices=("llm-d", "aibrix", "vllm-production-stack"),
        help="pods with the labels and ports of this system",
    )
    group.add_argument("--k8s-selector", metavar="LABELS", help="pods with these labels: app=vllm")
    group.add_argument("--k8s-pool", metavar="NAME", help="pods of this InferencePool")
    group.add_argument("--k8s-namespace", metavar="NAME", help="of the pods (default: our own)")
    group.add_argument(
        "--engine-token-file", metavar="FILE", help="the engines' API key, to ask them with"
    )


def sources_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the sources that the command line names, as [[discovery]] tables have them."""
    found: list[dict[str, Any]] = []
    if arguments.engine:
        found.append({"kind": "engines", "urls": arguments.engine})
    found += [{"kind": "dns", "url": url} for url in arguments.dns]
    found += [{"kind": "file", "path": path} for path in arguments.workers_file]
    pods = {
        name: getattr(arguments, f"k8s_{name}")
        for name in ("preset", "selector", "pool", "namespace")
        if getattr(arguments, f"k8s_{name}") is not None
    }
    if pods.keys() - {"namespace"}:
        found.append({"kind": "kubernetes", **pods})
    elif pods:
        raise ConfigurationError(
            "--k8s-namespace says where, not which pods: give --k8s-preset, --k8s-selector or "
            "--k8s-pool"
        )
    return found


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line names, as `ServeSettings` has them, but limits."""
    given = vars(arguments)
    options = {name: given[name] for name in _SETTINGS if given.get(name) is not None}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }


def run(arguments: argparse.Namespace) -> int:
    """Serve until it is ended."""
    try:
        from kvindex.service.running import Running
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvindex"):
            raise
        raise ConfigurationError(
            f"the package {error.name} is missing: pip install 'kvindex[server]'"
        ) from error
    from kvindex.service.serving import Serving
    from kvindex.service.sources import token_reader

    serving = Serving(
        arguments.config, options_of(arguments), _limits_of(arguments), cache_of(arguments)
    )
    settings = serving.settings
    serving.add_workers(_workers(arguments))
    serving.add_discovery(sources_of(arguments))
    running = Running(
        settings,
        serving.sources,
        tokens=settings.tokens(),
        max_blocks_per_rank=arguments.max_blocks_per_rank,
        engine_token=arguments.engine_token_file and token_reader(arguments.engine_token_file),
    )
    try:
        serving.begin(running)
        with _ended_by_signals(running, serving.look):
            _say(running)
            running.run()
    finally:
        saved = running.close()
    return 0 if saved else 1


def _limits_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in _LIMITS}


def _workers(arguments: argparse.Namespace) -> list[tuple[Worker, dict[str, Any]]]:
    """Return the workers of the command line, each with what else is said of it."""
    texts, details = [], {}
    for text in arguments.worker:
        text, said = _split(text)
        texts.append(text)
        details[parse_worker(text).name] = said
    plain = argparse.Namespace(**{**vars(arguments), "worker": texts})
    cache: CacheSettings = cache_of(arguments)
    workers = workers_of(plain, cache, needed=False)
    return [(worker, details.get(worker.name, {})) for worker in workers]


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return a --worker text without what only this command knows, and that."""
    kept: list[str] = []
    said: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key.startswith("label.") and equals:
            labels[key.removeprefix("label.")] = value
        elif key in _OWN_KEYS and equals and kept:
            if not value or (key == "block_size" and not value.isdigit()):
                raise ConfigurationError(f"--worker {text!r}: {part!r} has no usable value")
            said[key] = int(value) if key == "block_size" else value
        else:
            kept.append(part)
    return ",".join(kept), {**said, "labels": labels}


def _say(running: Any) -> None:
    """Say in plain words what is served, where the page is, and what to try next."""
    settings = running.settings
    ranks = len(running.service.catalog.registrations)
    print(f"kvindex serves {counted(ranks, 'rank')} at {running.url}", flush=True)
    token = ' -H "Authorization: Bearer $KVINDEX_TOKEN"' if settings.tokens() else ""
    if settings.token_file is not None:
        token = token.replace("$KVINDEX_TOKEN", f"$(head -n 1 {shlex.quote(settings.token_file)})")
    lines = [f"the page: {running.url}/", f"how the ranks stand: curl{token} {running.url}/ready"]
    missing = [f"not found yet: {name}: {why}" for name, why in running.missing.items()]
    lines += missing[:_MOST_MISSING]
    if len(missing) > _MOST_MISSING:
        lines.append(f"and {len(missing) - _MOST_MISSING} more that are not found yet")
    if settings.host in ("0.0.0.0", "::"):
        lines.append(f"it listens at all addresses of this machine, port {running.port}")
    if not ranks and not running.missing:
        lines.append(
            f"workers come by: --worker {WORKER_FORM}, --engine URL, --config FILE, POST /register"
        )
    if settings.insecure and not settings.tokens():
        lines.append("warning: anybody who reaches this address may ask and register (--insecure)")
    elif settings.tokens() and settings.scheme == "http":
        lines.append("note: without --tls-cert the token travels as it is")
    for line in lines:
        print(f"  {line}", flush=True)


@contextmanager
def _ended_by_signals(running: Any, look: Any) -> Iterator[None]:
    """Have the first SIGTERM or Ctrl-C end the server, the second the process; SIGHUP looks."""
    came: list[int] = []

    def end(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1:
            os._exit(128 + number)
        print("ending; once more ends at once", file=sys.stderr, flush=True)
        running.stop()

    wanted = {signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: lambda *_: look()}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        if not came:
            for number, handler in before.items():
                signal.signal(number, handler)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)
