"""`kvindex serve`: the index over HTTP, for routers in other languages and for people.

Subscribe, and answer over HTTP: /query as clients of Dynamo's indexer and of RFC #1403 ask,
/register, /workers, /ready, /metrics, /events, and a page at /. Workers are from options, a file,
discovery, or POST /register. Needs the extra packages of kvindex[server]. Runs until SIGTERM or
Ctrl-C, its normal ends (exit 0); a second one ends it at once. Exit 1: it cannot listen, or --state
names a file that it cannot continue from, or could not write at the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

from kvindex import ConfigurationError, Worker
from kvindex.tools.cli.arguments import (
    Options,
    add_cache_options,
    cache_of,
    count,
    given,
    needing,
    option,
    port,
    seconds,
)
from kvindex.tools.cli.endpoints import WORKER_FORM, add_engine_options, workers_of
from kvindex.tools.cli.nats_options import add_from_option, followed_pool
from kvindex.tools.cli.output import counted
from kvindex.tools.cli.signals import handled

_OWN_KEYS = ("model", "routing_group", "block_size")
_SETTINGS = (
    *("host", "port", "shutdown_within", "dialect", "tokenizer"),
    *("compat_metrics", "token_file", "insecure", "tls_cert", "tls_key", "allowed_hosts"),
    *("register_networks", "state", "save_every", "warm_from"),
    *("model", "routing_group", "block_size"),
)
_REFUSED_FROM = (  # --from: they belong to the relay
    *("worker", "endpoint", "replay_endpoint", "dp_size", "topic", "name", "bind", "engine"),
    *("group", "removals", "report_mode", "eagle", "hash_block_size", "offload_chunk"),
    *("upper_bound", "resets_connector", "state", "max_blocks_per_rank"),
    *("dns", "workers_file", "k8s_preset", "k8s_selector", "k8s_pool", "k8s_namespace"),
    *("engine_token_file", "warm_from", "register_networks"),
)
ACCESS = "Beyond loopback, a token is required: a file, or KVINDEX_TOKEN. Never argv."
_MOST_MISSING = 5  # engines that the first lines name
_LIMITS = ("body_bytes", "tokens", "ranks", "ranks_per_instance", "streams", "connections")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options; defaults of settings are those of `ServeSettings`."""
    _add_listening(parser.add_argument_group("listening"))
    access = parser.add_argument_group("access", ACCESS)
    add_access(access)
    text = (
        "where workers that register may be: 10.0.0.0/8, or loopback, private, any (default: "
        "loopback if the server is there, else none)"
    )
    option(access, "--register-network CIDR", text, repeat=True, dest="register_networks")
    _add_state(parser.add_argument_group("state"))
    limits = parser.add_argument_group("limits")
    for form, name, text in (
        ("--max-body BYTES", "body_bytes", "of a request (default: 8 MiB)"),
        ("--max-tokens N", "tokens", "of a query (default: 1,048,576)"),
        ("--max-ranks N", "ranks", "that are registered (default: 4,096)"),
        ("--max-ranks-per-instance N", "ranks_per_instance", "of them (default: 1,024)"),
        ("--max-streams N", "streams", "open /events connections (default: 64)"),
        ("--max-connections N", "connections", "for each process (default: 4,096)"),
    ):
        option(limits, form, text, count, dest=name)
    text = f"A --worker may also have ,{'=…,'.join(_OWN_KEYS)}=… and ,label.KEY=…"
    workers = parser.add_argument_group("workers", text)
    option(workers, "--config FILE", "settings and workers; TOML, followed")
    text = "model of workers that name none (default: default)"
    option(workers, "--model MODEL", text)
    option(workers, "--routing-group NAME", "their group (default: default)")
    text = "tokens of their blocks; events report it anyway"
    option(workers, "--block-size TOKENS", text, count)
    text = "Engines that appear, leave, move and grow are followed. --config has more settings."
    add_discovery(parser.add_argument_group("discovery", text))
    add_from_option(parser)
    add_engine_options(parser)
    add_cache_options(parser)
    text = "most blocks kept of one rank (default: 10,000,000)"
    option(parser, "--max-blocks-per-rank N", text, count)


def _add_listening(group: Options) -> None:
    option(group, "--host HOST", "address to listen at (default: 127.0.0.1)")
    option(group, "--port PORT", "its port; 0: any (default: 8090)", port)
    option(group, "--shutdown-within S", "for open requests (default: 10)", seconds)
    text = "of queries (default: auto, detected for each query)"
    option(group, "--dialect", text, ("auto", "dynamo", "rfc"))
    text = "engine that turns text into tokens, for /api/explain"
    option(group, "--tokenizer URL", text)
    option(group, "--compat-metrics", "add the metric names of Dynamo's indexer")


def add_access(group: Options) -> None:
    """Declare the options of `kvindex.service.http.Listening`, but those of the address."""
    option(group, "--token-file FILE", "tokens, each on a line of its own")
    option(group, "--insecure", "require no token beyond loopback")
    option(group, "--tls-cert FILE", "certificate chain, PEM")
    option(group, "--tls-key FILE", "its private key, PEM")
    text = "that a Host header may have, besides localhost and addresses; *.NAME"
    option(group, "--allowed-host NAME", text, repeat=True, dest="allowed_hosts")


def _add_state(group: Options) -> None:
    text = "continue from this file if it exists, and keep it current"
    option(group, "--state FILE", text)
    option(group, "--save-every S", "between two savings (default: 60)", seconds)
    option(group, "--warm-from URL", "begin with the snapshot of another kvindex serve")


def add_discovery(group: Options) -> None:
    """Declare the options that `sources_of` reads, besides `--engine`."""
    option(group, "--dns URL", "each address of the URL's name is an engine", repeat=True)
    text = "a list of workers and engines, TOML or JSON, followed"
    option(group, "--workers-file FILE", text, repeat=True)
    presets = ("llm-d", "aibrix", "vllm-production-stack")
    option(group, "--k8s-preset", "pods with the labels and ports of this system", presets)
    option(group, "--k8s-selector LABELS", "pods with these labels: app=vllm")
    option(group, "--k8s-pool NAME", "pods of this InferencePool")
    option(group, "--k8s-namespace NAME", "of the pods (default: our own)")
    text = "the engines' API key, to ask them with"
    option(group, "--engine-token-file FILE", text)


def sources_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the sources that the command line names, as [[discovery]] tables have them."""
    sources: list[dict[str, Any]] = []
    if arguments.engine:
        sources.append({"kind": "engines", "urls": arguments.engine})
    sources += [{"kind": "dns", "url": url} for url in arguments.dns]
    sources += [{"kind": "file", "path": path} for path in arguments.workers_file]
    names = ("preset", "selector", "pool", "namespace")
    given = {name: getattr(arguments, f"k8s_{name}") for name in names}
    pods = {name: value for name, value in given.items() if value is not None}
    if pods.keys() - {"namespace"}:
        sources.append({"kind": "kubernetes", **pods})
    elif pods:
        raise ConfigurationError(
            "--k8s-namespace names the place, not the pods: give --k8s-preset, --k8s-selector or "
            "--k8s-pool"
        )
    return sources


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line names, as `ServeSettings` has them, but limits."""
    return given(arguments, _SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the command."""
    with needing("server", "service"):
        from kvindex.service.server import Server
    from kvindex.service.sources import Serving, token_reader

    limits = {name: value for name in _LIMITS if (value := getattr(arguments, name)) is not None}
    serving = Serving(arguments.config, options_of(arguments), limits, cache_of(arguments))
    settings = serving.settings
    pool = followed_pool(arguments, _REFUSED_FROM)
    serving.add_workers(_workers(arguments))
    serving.add_discovery(sources_of(arguments))
    running = Server(
        settings,
        serving.sources,
        tokens=settings.listening.tokens(),
        max_blocks_per_rank=arguments.max_blocks_per_rank,
        engine_token=arguments.engine_token_file and token_reader(arguments.engine_token_file),
        pool=pool,
    )
    try:
        serving.begin(running)
        ends = dict.fromkeys((signal.SIGTERM, signal.SIGINT), end_of(running))
        with handled(ends, to_the_end=True), handled({signal.SIGHUP: lambda _: serving.look()}):
            _print_beginning(running)
            running.run()
    finally:
        saved = running.close()
    return 0 if saved else 1


def _workers(arguments: argparse.Namespace) -> list[tuple[Worker, dict[str, Any]]]:
    """Return the workers of the command line, each with its further settings."""
    split = [_split(text) for text in arguments.worker]
    plain = argparse.Namespace(**{**vars(arguments), "worker": [text for text, _ in split]})
    details = {text.partition("=")[0]: further for text, further in split}
    return [(worker, details.get(worker.name, {})) for worker in workers_of(plain)]


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return a --worker text without the settings that only this command has, and those."""
    kept: list[str] = []
    further: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key.startswith("label.") and equals:
            labels[key.removeprefix("label.")] = value
        elif key in _OWN_KEYS and equals and kept:
            if not value or (key == "block_size" and not value.isdigit()):
                raise ConfigurationError(f"--worker {text!r}: {part!r} has no usable value")
            further[key] = int(value) if key == "block_size" else value
        else:
            kept.append(part)
    return ",".join(kept), {**further, "labels": labels}


def _print_beginning(running: Any) -> None:
    """Print what is served, where the page is, and what to try next."""
    settings = running.settings
    ranks = len(running.service.catalog.registrations)
    print(f"kvindex serves {counted(ranks, 'rank')} at {running.url}", flush=True)
    token = ' -H "Authorization: Bearer $KVINDEX_TOKEN"' if settings.listening.tokens() else ""
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
    if settings.insecure and not settings.listening.tokens():
        lines.append("warning: anybody who reaches this address may ask and register (--insecure)")
    elif settings.listening.tokens() and settings.listening.scheme == "http":
        lines.append("note: without --tls-cert the token travels as it is")
    for line in lines:
        print(f"  {line}", flush=True)


def end_of(running: Any, at_once: Callable[[], object] = lambda: None) -> Callable[[int], None]:
    """Return a handler of signals: the first one ends the server, the second the process.

    Args:
        running: has `stop`.
        at_once: called before the process ends.
    """
    ending: list[bool] = []

    def end(number: int) -> None:
        if ending:
            at_once()
            os._exit(128 + number)
        ending.append(True)
        print("ending; once more ends at once", file=sys.stderr, flush=True)
        running.stop()

    return end
