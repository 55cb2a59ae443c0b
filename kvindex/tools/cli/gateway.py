"""In front of engines: `kvindex gateway` serves OpenAI's API, `kvindex epp` picks for others."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from kvindex import ConfigurationError
from kvindex.subscribe.discovery import Source
from kvindex.tools.cli.arguments import (
    add_access_options,
    count,
    needing,
    option,
    settings_of,
    settings_options,
)
from kvindex.tools.cli.engines import add_discovery_options, add_nats_options, pool_of, sources_of
from kvindex.tools.cli.output import counted, printable
from kvindex.tools.cli.signals import ending

_FOUND_SECONDS = 2.0  # for engines to answer before the first lines
_FOLLOWED = "Engines that appear, leave, move and grow are followed."


# gateway -----------------------------------------------------------------------------------------


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    from kvindex.gateway.settings import GatewaySettings

    settings = GatewaySettings()
    text = "HTTP server of an engine, http://HOST:PORT"
    parser.add_argument("engine", nargs="*", metavar="ENGINE", help=text)
    text = "Some engines prefill prompts, and others decode them. Those named otherwise do both."
    apart = parser.add_argument_group("prefill and decode apart (vLLM with NIXL)", text)
    option(apart, "--prefill URL", "an engine that prefills for those that decode", repeat=True)
    option(apart, "--decode URL", "an engine that decodes", repeat=True)
    settings_options(apart, settings, "--local-tokens N")
    listening = parser.add_argument_group("listening")
    settings_options(listening, settings.listening, "--host HOST", "--port PORT")
    settings_options(listening, settings, "--drain S")
    text = "write a line of JSON for each request to stderr; no prompts"
    option(listening, "--access-log", text)
    settings_options(listening, settings, "--tenant-header NAME", "--explain-headers")
    option(listening, "--proxy NAME", "have Envoy in front (needs kvindex[envoy])", ("envoy",))
    text = "of Envoy (default: one for each processor)"
    option(listening, "--threads N", text, count)
    option(listening, "--print-envoy", "print Envoy's configuration, and exit")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process that this one starts
    access = add_access_options(parser)
    settings_options(access, settings, "--admin-token-file FILE")
    settings_options(
        access,
        settings.listening.limits,
        *("--max-body BYTES=body_bytes", "--max-bodies BYTES=bodies_bytes"),
        "--max-connections N=connections",
    )
    text = "Without these limits a request never waits for a rank."
    settings_options(
        parser.add_argument_group("load", text),
        settings,
        *("--max-open-requests N=open_requests", "--max-queued-tokens N=queued_tokens"),
        *("--max-waiting N=waiting", "--wait-within S=queue_within", "--policy NAME"),
        *("--kv-source FORM", "--pull-rate TOKENS"),
    )
    settings_options(
        parser.add_argument_group("engines' answers"),
        settings,
        *("--head-within S", "--head-hold S", "--silent-within S", "--tokens-within S"),
    )
    tokens = parser.add_argument_group("tokens", "By default engines are asked for them.")
    text = "folder with a model's tokenizer.json and chat template: spares the engines the work"
    option(tokens, "--tokenizer [MODEL=]DIR", text, repeat=True, dest="tokenizers")
    add_discovery_options(parser, _FOLLOWED)
    _add_pool_options(parser)


def run_gateway(arguments: argparse.Namespace) -> int:
    """Serve OpenAI's API in front of engines; each request goes where its prompt is.

    Serve OpenAI's API in front of vLLM or SGLang engines that publish KV-cache events. Each request
    goes to the DP rank that holds most of its prompt and has least to do. Needs the extra packages
    of kvindex[gateway]. Runs until SIGTERM or Ctrl-C, its normal ends (exit 0): then /ready answers
    503, and open requests end within --drain seconds; a second signal ends it at once. Exit 1: it
    cannot listen.
    """
    with needing("gateway", "gateway"):
        from kvindex.gateway.gateway import Gateway
    from kvindex.gateway.settings import GatewaySettings
    from kvindex.service.http import Limits, Listening

    sources = _sources(arguments)
    if not sources:
        raise ConfigurationError("no engine is named: give the URL of one, http://HOST:PORT")
    listening = GatewaySettings().listening
    limits = {
        "body_bytes": listening.limits.body_bytes,
        "bodies_bytes": listening.limits.bodies_bytes,
        **settings_of(arguments, Limits),
    }
    # A model's name may have a "/", but no "=".
    folders = (text.rpartition("=") for text in arguments.tokenizers)
    own = {
        **settings_of(arguments, GatewaySettings),
        "tokenizers": {model: folder for model, _, folder in folders},
        "pool": pool_of(arguments),
        "listening": Listening(
            **{"port": listening.port, **settings_of(arguments, Listening)},
            limits=Limits(**limits),
        ),
    }
    settings = GatewaySettings(**own)
    if arguments.threads is not None and arguments.proxy is None:
        raise ConfigurationError("--threads is of Envoy: add --proxy envoy")
    if arguments.proxy is not None or arguments.print_envoy:
        with needing("envoy", "picker"):
            from kvindex.gateway.envoy.running import check_engines
        if arguments.silent_within is not None:
            raise ConfigurationError(
                "with --proxy envoy, --head-within is for all of an answer: leave out "
                "--silent-within"
            )
        check_engines(arguments.engine)
        if arguments.prefill or arguments.decode or arguments.local_tokens is not None:
            raise ConfigurationError(
                "with --proxy envoy nothing is prefilled elsewhere: leave out --prefill, --decode "
                "and --local-tokens"
            )
    # Everything is checked by now: what is printed would run.
    if arguments.print_envoy:
        from kvindex.gateway.envoy.config import printed

        print(printed(settings))
        return 0
    if arguments.access_log:
        _log_requests()
    token = _engine_token(arguments)
    if arguments.part is not None:
        from kvindex.gateway.envoy.running import run_picker
        from kvindex.gateway.gateway import Routers

        with Routers(sources, settings, token) as routers:
            _print_engines(routers, "")
            run_picker(arguments.part, routers, settings, token)
    elif arguments.proxy is not None:
        _run_envoy(arguments.threads, settings)
    else:
        with (
            Gateway(sources, settings, engine_token=token) as running,
            ending(running, hangs_up=True),
        ):
            _print_address(running.url)
            _print_engines(running.routers, running.url)
            _print_admission(settings)
            running.run()
    return 0


def _run_envoy(threads: int | None, settings: Any) -> None:
    """Run Envoy and a picker."""
    from kvindex.gateway.envoy.running import reserved, wait_listening, with_envoy

    # The address is kept from now on, so that Envoy and its successors find it free.
    holder, address = reserved(settings)
    is_over = threading.Event()

    def announce() -> None:
        if wait_listening(address, is_over):
            _print_address(settings.listening.url(address[1]))

    with holder:
        # The picker is this command once more, as a child, with --part.
        command = [sys.executable, "-m", "kvindex", *sys.argv[1:]]
        children = with_envoy(command, settings, address, threads)
        threading.Thread(target=announce, name="kvindex-envoy-listens", daemon=True).start()
        try:
            with ending(children, at_once=children.kill, hangs_up=True):
                _print_admission(settings)
                children.run()
        finally:
            is_over.set()


def _print_address(url: str) -> None:
    print(f"kvindex serves OpenAI's API at {url}/v1", flush=True)
    _print_lines([f"the page: {url}/"])


def _print_admission(settings: Any) -> None:
    listening = settings.listening
    if listening.insecure and not listening.tokens():
        _print_lines(["warning: anybody who reaches this address may send requests (--insecure)"])
    elif listening.tokens() and listening.scheme == "http":
        _print_lines(["note: without --tls-cert the token travels as it is"])


# epp ---------------------------------------------------------------------------------------------


def add_epp_options(parser: argparse.ArgumentParser) -> None:
    from kvindex.gateway.settings import GatewaySettings, PickerSettings

    text = "HTTP server of an engine, http://ADDRESS:PORT, as the gateway reaches it"
    parser.add_argument("engine", nargs="*", metavar="ENGINE", help=text)
    picker, gateway = PickerSettings(), GatewaySettings()
    settings_options(parser, picker, "--host HOST", "--port PORT")
    option(parser, "--tls-cert FILE", "certificate chain, PEM (default: one signed by itself)")
    option(parser, "--tls-key FILE", "its private key, PEM")
    settings_options(parser, picker, "--plain=is_plain", "--max-body BYTES=body_bytes")
    settings_options(parser, gateway, "--drain S")
    settings_options(parser, picker, "--metrics-port PORT", "--metrics-host HOST")
    text = "write a line of JSON for each request to stderr; no prompts"
    option(parser, "--access-log", text)
    settings_options(
        parser,
        gateway,
        *("--max-open-requests N=open_requests", "--max-queued-tokens N=queued_tokens"),
        *(
            "--wait-within S=queue_within",
            "--policy NAME",
            *("--kv-source FORM", "--pull-rate TOKENS"),
            "--tenant-header NAME",
            "--explain-headers",
        ),
    )
    settings_options(parser, picker, "--endpoints N", "--conformance=is_conformance")
    add_discovery_options(parser, _FOLLOWED)
    _add_pool_options(parser)


def run_epp(arguments: argparse.Namespace) -> int:
    """Pick endpoints for gateways such as agentgateway, Envoy AI Gateway or Istio.

    Answer a gateway's ext_proc streams with the engine that holds most of each prompt and has least
    to do, as the Gateway API Inference Extension's endpoint picker protocol wants it. Request and
    response bodies are FULL_DUPLEX_STREAMED. Needs the extra packages of kvindex[epp]. Runs until
    SIGTERM or Ctrl-C, its normal ends (exit 0): then its health is NOT_SERVING, and open streams
    end within --drain seconds.
    """
    with needing("epp", "picker"):
        from kvindex.gateway.gateway import Routers
        from kvindex.gateway.picker.service import PickerServer
    from kvindex.gateway.settings import GatewaySettings, PickerSettings

    sources = _sources(arguments)
    settings = GatewaySettings(**settings_of(arguments, GatewaySettings), pool=pool_of(arguments))
    tls: dict[str, Any] = {}
    # Without any the picker signs a certificate by itself: half a pair would pass unnoticed.
    if arguments.tls_cert is not None or arguments.tls_key is not None:
        if arguments.tls_cert is None or arguments.tls_key is None:
            raise ConfigurationError("--tls-cert and --tls-key belong together")
        tls = {"tls": (arguments.tls_cert, arguments.tls_key)}
    picker = PickerSettings(**settings_of(arguments, PickerSettings), **tls)
    if arguments.access_log:
        _log_requests()
    token = _engine_token(arguments)
    with Routers(sources, settings, token) as routers:
        server = PickerServer(routers, picker, settings, token)

        def begin() -> None:
            print(f"kvindex picks endpoints at {picker.host}:{server.port}", flush=True)
            if server.metrics_port:
                host = picker.metrics_host or picker.host
                print(f"  metrics: http://{host}:{server.metrics_port}/metrics", flush=True)
            _print_engines(routers, "")

        asyncio.run(server.serve(begin))
    return 0


# Both --------------------------------------------------------------------------------------------


def _add_pool_options(parser: argparse.ArgumentParser) -> None:
    text = "follow a pool's relay on NATS, nats://HOST[,HOST]/POOL, and share load with its others"
    option(parser, "--from URL", text, dest="from_url")
    add_nats_options(parser)


def _sources(arguments: argparse.Namespace) -> list[Source]:
    from kvindex.service.sources import Defaults, source_of

    return [
        source_of(entry, Defaults(), f"source {number}")
        for number, entry in enumerate(sources_of(arguments), 1)
    ]


def _engine_token(arguments: argparse.Namespace) -> Callable[[], str | None]:
    from kvindex.service.sources import token_reader

    path = arguments.engine_token_file
    return token_reader(path) if path else lambda: None


def _log_requests() -> None:
    """Write a line of JSON for each request to stderr, as it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("kvindex.gateway.access")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


def _print_engines(routers: Any, url: str) -> None:
    """Print which engines are found, and what to try next at a URL, if there is one."""
    missing = routers.found(_FOUND_SECONDS)
    servings = routers.servings()
    lines = [
        f"{serving.url}: {serving.kind or 'an engine'} {serving.version}, "
        f"{counted(serving.ranks, 'rank')}, serves {', '.join(serving.models) or 'no model'}"
        + (f" ({serving.role})" if serving.role else "")
        for serving in servings
    ]
    lines += [f"not found yet: {name}: {why}" for name, why in missing.items()]
    if url and servings and servings[0].models:
        chat = {"model": servings[0].models[0], "messages": [{"role": "user", "content": "Hi"}]}
        header = "-H 'content-type: application/json'"
        lines.append(f"try: curl {url}/v1/chat/completions {header} -d '{json.dumps(chat)}'")
    _print_lines(lines)


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"  {printable(line)}", flush=True)
