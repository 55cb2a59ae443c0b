"""Envoy's configuration: requests are buffered and picked for, answers are read as they pass.

Envoy serves the routes of models by itself: it asks the picker for each request, sends it to the
engine that the picker names in the metadata "envoy.lb", and to any engine while there is no picker.
All else goes to the gateway's own server: other paths, and whatever its guard must judge (another
Host, an Origin, a wrong or missing token).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from kvindex.gateway.calls import FORGED, ROUTES
from kvindex.gateway.picker.messages import DESTINATION, NAMESPACE, NOTES
from kvindex.gateway.picker.stream import ENGINES
from kvindex.gateway.request_life import MOST_TRIES
from kvindex.gateway.settings import GatewaySettings
from kvindex.gateway.upstream import MOST_HEAD
from kvindex.service.http import PEER, Limits, Listening

PICKER: Final = "picker"
"""The picker's socket, a file in the folder of the configuration."""
ANSWERS: Final = "answers"
"""That where the Lua program reports that an answer has begun."""
DOOR: Final = "door"
"""That of the gateway's own HTTP server."""
ENGINES_FILE: Final = "engines.json"
"""The file with the engines' addresses, which Envoy reads again whenever it is replaced."""

_TYPES: Final = "type.googleapis.com/envoy.extensions"
_CLUSTERS: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
_MANY: Final = 100_000  # connections and requests: the limits are elsewhere
_PICKER_SECONDS: Final = 10.0  # in its queue, beyond the times in which it answers by itself
_HUNG_SECONDS: Final = 3  # without an answer to a health check: then requests go without it
_KEEPALIVE_SECONDS: Final = 4  # vLLM and SGLang close idle connections after 5
_CONNECT_SECONDS: Final = 3
_REPORT_SECONDS: Final = 60  # between reports of a request that is open
_ENVOYS_OWN: Final = 256 << 20  # bytes that Envoy needs beside bodies
_FORGED: Final = (*(prefix.decode() for prefix in FORGED), "x-envoy-")


def bootstrap(
    settings: GatewaySettings,
    folder: str,
    address: tuple[str, int],
    tokens: Sequence[str],
    descriptors: int | None = None,
) -> dict[str, Any]:
    """Return the configuration, with sockets and the engines' file in a folder.

    `address` is an IP address and a port; any of the tokens admits a client, and without one all
    are admitted. Envoy may open so many `descriptors`; None: as many as it needs.
    """
    most = settings.listening.limits.connections
    if descriptors is not None:  # each may need one more, to an engine, and Envoy has its own
        most = min(most, descriptors // 4)
    kind = "downstream_connections.v3.DownstreamConnectionsConfig"
    connections = {
        "@type": f"{_TYPES}.resource_monitors.{kind}",
        "max_active_downstream_connections": most,
    }
    name = "envoy.resource_monitors.global_downstream_max_connections"
    monitor = {"name": name, "typed_config": connections}
    # Envoy keeps each body for a retry, whatever the number of its streams.
    heap = {
        "@type": f"{_TYPES}.resource_monitors.fixed_heap.v3.FixedHeapConfig",
        "max_heap_size_bytes": settings.listening.limits.bodies_bytes + _ENVOYS_OWN,
    }
    full = "envoy.resource_monitors.fixed_heap"
    refuses = {
        "name": "envoy.overload_actions.stop_accepting_requests",  # 503
        "triggers": [{"name": full, "threshold": {"value": 1.0}}],
    }
    return {
        "node": {"id": "kvindex", "cluster": "kvindex"},  # the engines' file needs them
        "static_resources": {
            "listeners": [_listener(settings, address, tokens)],
            "clusters": [
                _engines(folder),
                _picker(folder),
                _server(folder, ANSWERS),
                _server(folder, DOOR),
            ],
        },
        "overload_manager": {
            "refresh_interval": "0.25s",
            "resource_monitors": [monitor, {"name": full, "typed_config": heap}],
            "actions": [refuses],
        },
    }


def printed(settings: GatewaySettings) -> str:
    """Return Envoy's configuration as JSON, without the tokens; its files are in /run/kvindex."""
    listening = settings.listening
    tokens = ["TOKEN"] if listening.tokens() else []
    address = (listening.host, listening.port)
    return json.dumps(bootstrap(settings, "/run/kvindex", address, tokens), indent=2)


def engines_file(version: int, endpoints: Iterable[str]) -> bytes:
    """Return the contents of the engines' file, given `ip:port` of each."""
    parts = (endpoint.rpartition(":") for endpoint in endpoints)
    addresses = [_address(host.strip("[]"), int(port)) for host, _, port in parts]
    assignment = {"@type": _CLUSTERS, **_assignment(ENGINES, addresses)}
    return msgspec.json.encode({"version_info": str(version), "resources": [assignment]})


# The listener ------------------------------------------------------------------------------------


def _listener(
    settings: GatewaySettings, address: tuple[str, int], tokens: Sequence[str]
) -> dict[str, Any]:
    listening = settings.listening
    chain: dict[str, Any] = {
        "filters": [_named("network.http_connection_manager", _manager(settings, tokens))]
    }
    if listening.tls is not None:
        certificate, key = listening.tls
        files = {"certificate_chain": {"filename": certificate}, "private_key": {"filename": key}}
        context = {
            "@type": f"{_TYPES}.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {
                "tls_certificates": [files],
                "alpn_protocols": ["h2", "http/1.1"],
            },
        }
        chain["transport_socket"] = {"name": "tls", "typed_config": context}
    return {
        "name": "gateway",
        "address": _address(*address),
        "enable_reuse_port": False,  # a second gateway at this port is an error
        "filter_chains": [chain],
    }


def _manager(settings: GatewaySettings, tokens: Sequence[str]) -> dict[str, Any]:
    limits = settings.listening.limits
    # Clients name no ranks and destinations; usage can be read of answers as they are only.
    names = ["accept-encoding", *(["authorization", "x-api-key", "cookie"] if tokens else [])]
    forged = [{"remove_on_match": {"key_matcher": {"prefix": prefix}}} for prefix in _FORGED]
    mutations = {
        "@type": f"{_TYPES}.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {"request_mutations": [*({"remove": name} for name in names), *forged]},
    }
    # Envoy has no filter that reads usage and errors of streams: a Lua program does.
    reading = {
        "@type": f"{_TYPES}.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": lua()},
    }
    reports = {
        "@type": f"{_TYPES}.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        "common_config": {
            "log_name": "kvindex",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
            "buffer_size_bytes": 0,  # at once: an open request counts as load
        },
    }
    # The order of the filters counts: what a client has forged must be gone before the picker's
    # own fields are set, and the answer is read last, as it leaves.
    host = {"name": "all", "domains": ["*"], "routes": _routes(settings, tokens)}
    return {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_protocol_options": {"accept_http_10": True},
        "common_http_protocol_options": {"idle_timeout": _seconds(limits.idle_seconds)},
        "max_request_headers_kb": max(1, limits.head_bytes >> 10),
        "request_headers_timeout": _seconds(limits.head_seconds),
        "request_timeout": _seconds(limits.head_seconds + limits.body_seconds),
        "stream_idle_timeout": "0s",  # a timer for each token more: those of the tries will do
        # Envoy is at the edge: what clients say of addresses before them is not believed.
        "use_remote_address": True,
        "skip_xff_append": True,
        # As the embedded gateway: a client's id is kept, and each answer has one.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "access_log": [{"name": "envoy.access_loggers.http_grpc", "typed_config": reports}],
        "access_log_options": {"access_log_flush_interval": _seconds(_REPORT_SECONDS)},
        "local_reply_config": _own_answers(limits),
        "route_config": {"name": "gateway", "virtual_hosts": [host]},
        "http_filters": [
            _named("http.header_mutation", mutations),
            _named("http.ext_proc", _picking(settings)),
            _named("http.lua", reading),
            _named(
                "http.router",
                {
                    "@type": f"{_TYPES}.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            ),
        ],
    }


def _routes(settings: GatewaySettings, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """The models' routes, for requests that the guard would admit; all else to its server."""
    admitted: list[dict[str, Any]] = [
        {"name": ":method", "string_match": {"exact": "POST"}},
        {"name": ":authority", "string_match": _regex(_hosts(settings.listening))},
        # Browsers of other sites name one: the guard decides by its own list.
        {"name": "origin", "present_match": False, "treat_missing_header_as_empty": False},
        # A compressed body is inflated there, too.
        {"name": "content-encoding", "present_match": False},
    ]
    ways = [admitted]
    if tokens:
        keys = f"({'|'.join(map(re.escape, tokens))})"
        bearer = {"name": "authorization", "string_match": _regex(f"(?i:bearer) +{keys}")}
        none = {"name": "authorization", "present_match": False}
        key = {"name": "x-api-key", "string_match": _regex(keys)}
        ways = [[*admitted, bearer], [*admitted, none, key]]
    previous = f"{_TYPES}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    retries = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
        "retriable_status_codes": [502, 503],  # as the embedded gateway
        "num_retries": MOST_TRIES - 1,
        "per_try_idle_timeout": _seconds(settings.head_within),
        "retry_host_predicate": [_extension("retry_host_predicates.previous_hosts", previous)],
        # Else a retry may go to the engine that has just failed.
        "host_selection_retry_max_attempts": 5,
    }
    # The Lua program reads from this field who serves a stream, and removes it.
    served = "%UPSTREAM_REMOTE_ADDRESS%"
    peer = "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%"
    to_engines = {
        # No time-out for a whole answer: it may stream for an hour.
        "route": {"cluster": ENGINES, "timeout": "0s", "retry_policy": retries},
        # A retry needs the body once more.
        "request_body_buffer_limit": settings.listening.limits.body_bytes,
        "response_headers_to_add": [
            {"header": {"key": "x-kvindex-served", "value": served}, "append_action": 2}
        ],
    }
    disabled = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "disabled": True}
    off = {"config": {"@type": "type.googleapis.com/google.protobuf.Empty"}, **disabled}
    # Our own server guards, counts and answers by itself: nothing is picked or read for it.
    to_door = {
        "match": {"prefix": "/"},
        "route": {"cluster": DOOR, "timeout": "0s"},
        # Who asks: it decides by that what is for operators.
        "request_headers_to_add": [
            {
                "header": {"key": PEER.decode(), "value": peer},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
        "typed_per_filter_config": {
            f"envoy.filters.http.{name}": off for name in ("header_mutation", "ext_proc", "lua")
        },
    }
    picked = [
        {"match": {"path": path, "headers": way}, **to_engines} for path in ROUTES for way in ways
    ]
    return [*picked, to_door]


def _hosts(listening: Listening) -> str:
    """The Host fields that the guard admits, as a regular expression."""
    names = [name.lower().rstrip(".") for name in listening.allowed_hosts]
    if "*" in names:
        return ".+"
    forms = [r"localhost", r"[^:]+\.localhost", r"\d+\.\d+\.\d+\.\d+", r"\[[0-9A-Fa-f:.]+\]"]
    for name in names:
        below = name.startswith("*.")
        forms.append(r"[^:]+" + re.escape(name[1:]) if below else re.escape(name))
    return rf"(?i)({'|'.join(forms)})\.?(:\d+)?"


def _own_answers(limits: Limits) -> dict[str, Any]:
    """Envoy's own errors in OpenAI's form; those of the picker have it."""

    def form(message: str, kind: str, code: str) -> dict[str, Any]:
        error = {"message": message, "type": kind, "param": None, "code": code}
        return {"body_format_override": {"json_format": {"error": error}}}

    failed = form("%LOCAL_REPLY_BODY%", "server_error", "%RESPONSE_CODE_DETAILS%")
    text = f"the body is longer than {limits.body_bytes} bytes"
    is_413 = {"comparison": {"op": "EQ", "value": {"default_value": 413, "runtime_key": "-"}}}
    too_long = form(text, "invalid_request_error", "body")
    return {
        "mappers": [
            {"filter": {"status_code_filter": is_413}, **too_long},
            {"filter": {"response_flag_filter": {}}, **failed},
        ]
    }


# Filters -----------------------------------------------------------------------------------------


def _picking(settings: GatewaySettings) -> dict[str, Any]:
    # Without limits no request waits for a rank, and a hung picker is noticed the sooner.
    has_limits = settings.open_requests is not None or settings.queued_tokens is not None
    waits = settings.queue_within if has_limits else 0.0
    # Answers do not pass the picker: that would cost each token a message.
    modes = {"request_header_mode": "SEND", "request_body_mode": "BUFFERED"}
    modes |= {"response_header_mode": "SKIP", "response_body_mode": "NONE"}
    modes |= {"request_trailer_mode": "SKIP", "response_trailer_mode": "SKIP"}
    return {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": PICKER}},
        "processing_mode": modes,
        "message_timeout": _seconds(settings.tokens_within + waits + _PICKER_SECONDS),
        # Without the picker requests go on, to the engine with the fewest.
        "failure_mode_allow": True,
        "route_cache_action": "RETAIN",  # the token that a route asks for is removed meanwhile
        "metadata_options": {"receiving_namespaces": {"untyped": [NAMESPACE, NOTES]}},
    }


@cache
def lua() -> str:
    """Return the program that reads answers."""
    return (resources.files(__package__) / "answer.lua").read_text("utf-8")


# Clusters ----------------------------------------------------------------------------------------


def _engines(folder: str) -> dict[str, Any]:
    least = f"{_TYPES}.load_balancing_policies.least_request.v3.LeastRequest"
    override = {
        "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        # Only metadata, which no client can set.
        "override_host_sources": [{"metadata": {"key": NAMESPACE, "path": [{"key": DESTINATION}]}}],
        "fallback_policy": {
            "policies": [{"typed_extension_config": _extension("least_request", least)}]
        },
    }
    policy = {"name": "override_host", "typed_config": override}
    source = {
        "path_config_source": {"path": f"{folder}/{ENGINES_FILE}"},
        "resource_api_version": "V3",
    }
    # Before the engines close: else a request may meet a connection that is just closed.
    limits = {
        "idle_timeout": _seconds(_KEEPALIVE_SECONDS),
        "max_response_headers_kb": MOST_HEAD >> 10,
    }
    return {
        "name": ENGINES,
        "type": "EDS",
        "connect_timeout": _seconds(_CONNECT_SECONDS),
        "eds_cluster_config": {"eds_config": source},
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "circuit_breakers": _no_limits(),
        **_http({"explicit_http_config": {"http_protocol_options": {}}}, limits),
    }


def _picker(folder: str) -> dict[str, Any]:
    # Without a health check Envoy waits for each request's time-out while the picker hangs.
    check: dict[str, Any] = {"interval": "0.25s", "no_traffic_interval": "0.25s"}
    check |= {"timeout": _seconds(_HUNG_SECONDS)}
    check |= {"unhealthy_threshold": 1, "healthy_threshold": 1, "initial_jitter": "0.01s"}
    return {
        "name": PICKER,
        "type": "STATIC",
        "connect_timeout": _seconds(_CONNECT_SECONDS),
        "load_assignment": _assignment(PICKER, [_pipe(folder, PICKER)]),
        # Envoy would ask an unhealthy picker all the same, as its only one.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [{**check, "grpc_health_check": {"service_name": "liveness"}}],
        "circuit_breakers": _no_limits(),
        **_http({"explicit_http_config": {"http2_protocol_options": {}}}, {}),
    }


def _server(folder: str, name: str) -> dict[str, Any]:
    """A cluster of one of our own HTTP servers."""
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": _seconds(_CONNECT_SECONDS),
        "load_assignment": _assignment(name, [_pipe(folder, name)]),
        "circuit_breakers": _no_limits(),
    }


def _http(explicit: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions", **explicit}
    if common:
        options["common_http_protocol_options"] = common
    return {"typed_extension_protocol_options": {key: options}}


# Parts -------------------------------------------------------------------------------------------


def _named(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": f"envoy.filters.{name}", "typed_config": config}


def _extension(name: str, kind: str) -> dict[str, Any]:
    return {"name": f"envoy.{name}", "typed_config": {"@type": kind}}


def _regex(pattern: str) -> dict[str, Any]:
    return {"safe_regex": {"regex": pattern}}


def _seconds(seconds: float) -> str:
    return f"{seconds:.9g}s"


def _no_limits() -> dict[str, Any]:
    # Envoy's own are 1,024, for services that answer within milliseconds.
    names = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(names, _MANY)]}


def _assignment(name: str, addresses: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": address}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _pipe(folder: str, name: str) -> dict[str, Any]:
    return {"pipe": {"path": f"{folder}/{name}"}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
