"""`kvindex epp`: the endpoint picker of a gateway such as agentgateway, Envoy AI Gateway or Istio.

Answer a gateway's ext_proc streams with the engine that holds most of each prompt and has least to
do, as the Gateway API Inference Extension's endpoint picker protocol wants it. Request and response
bodies are FULL_DUPLEX_STREAMED. Needs the extra packages of kvindex[epp]. Runs until SIGTERM or
Ctrl-C, its normal ends (exit 0): then its health is NOT_SERVING, and open streams end within
--drain seconds.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from kvindex import ConfigurationError
from kvindex.tools.cli.arguments import count, given, needing, option, port, seconds
from kvindex.tools.cli.gateway import log_requests, print_engines
from kvindex.tools.cli.serve import add_discovery, sources_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options; defaults are those of the settings."""
    text = "HTTP server of an engine, http://ADDRESS:PORT, as the gateway reaches it"
    parser.add_argument("engine", nargs="*", metavar="ENGINE", help=text)
    option(parser, "--host HOST", "address to listen at (default: 0.0.0.0)")
    option(parser, "--port PORT", "its port; 0: any (default: 9002)", port)
    option(parser, "--tls-cert FILE", "certificate chain, PEM (default: one signed by itself)")
    option(parser, "--tls-key FILE", "its private key, PEM")
    option(parser, "--plain", "serve without TLS")
    option(parser, "--max-body BYTES", "of a request (default: 10 MiB)", count, dest="body_bytes")
    text = "for open streams to end in, at the end (default: 30)"
    option(parser, "--drain S", text, seconds)
    text = "serve Prometheus series at this port, too: /metrics, without a token"
    option(parser, "--metrics-port PORT", text, port)
    option(parser, "--metrics-host HOST", "at this address (default: --host)")
    text = "write a line of JSON for each request to stderr; no prompts"
    option(parser, "--access-log", text)
    option(parser, "--max-open-requests N", "of a rank", count, dest="open_requests")
    text = "that wait for their prefill on a rank"
    option(parser, "--max-queued-tokens N", text, count, dest="queued_tokens")
    text = "for which a request may wait; then 429 (default: 30)"
    option(parser, "--wait-within S", text, seconds, dest="queue_within")
    option(parser, "--policy NAME", "of the routers (default: kvindex)")
    text = "that an answer names: up to 3, in the order to try them (default: 1)"
    option(parser, "--endpoints N", text, count)
    text = "let requests name endpoints, for conformance tests of gateways only"
    option(parser, "--conformance", text)
    text = "Engines that appear, leave, move and grow are followed."
    add_discovery(parser.add_argument_group("discovery", text))


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends the command."""
    with needing("epp", "picker"):
        from kvindex.gateway.picker.service import PickerServer, PickerSettings
        from kvindex.gateway.routers import Routers
        from kvindex.gateway.settings import GatewaySettings
        from kvindex.service.sources import Defaults, source_of, token_reader
    sources = [
        source_of(entry, Defaults(), f"source {number}")
        for number, entry in enumerate(sources_of(arguments), 1)
    ]
    limits = ("open_requests", "queued_tokens", "queue_within", "drain", "policy")
    settings = GatewaySettings(**given(arguments, limits))
    tls: dict[str, Any] = {}
    if arguments.tls_cert is not None or arguments.tls_key is not None:
        if arguments.tls_cert is None or arguments.tls_key is None:
            raise ConfigurationError("--tls-cert and --tls-key belong together")
        tls = {"tls": (arguments.tls_cert, arguments.tls_key)}
    names = ("host", "port", "body_bytes", "metrics_port", "metrics_host", "endpoints")
    picker = PickerSettings(
        **given(arguments, names),
        **tls,
        is_plain=bool(arguments.plain),
        is_conformance=bool(arguments.conformance),
    )
    if arguments.access_log:
        log_requests()
    reader = arguments.engine_token_file and token_reader(arguments.engine_token_file)
    token = reader or (lambda: None)
    with Routers(sources, settings, token) as routers:
        server = PickerServer(routers, picker, settings, token)

        def begin() -> None:
            print(f"kvindex picks endpoints at {picker.host}:{server.port}", flush=True)
            if server.metrics_port:
                host = picker.metrics_host or picker.host
                print(f"  metrics: http://{host}:{server.metrics_port}/metrics", flush=True)
            print_engines(routers, "")

        asyncio.run(server.serve(begin))
    return 0
