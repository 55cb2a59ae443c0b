"""The picker's protocol in Envoy's messages (envoy.service.ext_proc.v3, GAIE proposal 004)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from kvindex.service.http import Headers, Reply

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = f"{DESTINATION}-served"
SUBSET: Final = f"{DESTINATION}-subset"
STEERS: Final = "test-epp-endpoint-selection"
"""Names the endpoints of a request, in conformance tests of gateways only."""
NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
UPSTREAM: Final = "upstream.address"
NOTES: Final = "kvindex"
"""The metadata in which our own Envoy notes what the picker has to learn of an answer."""

PIECE: Final = 62_000
"""Bytes of a body in one message: Envoy refuses mutations over 64 KiB."""

_OVERWRITE: Final = 2  # HeaderAppendAction OVERWRITE_IF_EXISTS_OR_ADD
# Clients do not name destinations, ranks or priorities.
_STRIPPED: Final = (
    *(SERVED, SUBSET, "x-gateway-inference-objective", "x-gateway-inference-fairness-id"),
    *("x-gateway-model-name-rewrite", "x-data-parallel-rank", "x-kvindex-booking"),
    # Destinations for others before the engine, such as side-cars: only a gateway may name them.
    *("x-prefiller-host", "x-prefiller-host-port", "x-prefiller-url", "x-encoder-hosts"),
    *("x-encoder-hosts-ports", "x-routed-dp-rank", "x-kv-cache-source-host-port"),
)


def headers_of(message: Any) -> list[tuple[bytes, bytes]]:
    """Return the fields of `HttpHeaders`, names in lower case."""
    return [
        (header.key.lower().encode(), header.raw_value or header.value.encode())
        for header in message.headers.headers
    ]


def subset_of(message: Any) -> frozenset[str] | None:
    """Return the endpoints that a request may go to, `ip:port` or `ip`; None: to all."""
    fields = message.metadata_context.filter_metadata.get(SUBSET_NAMESPACE)
    if fields is None or SUBSET not in fields.fields:
        return None
    value = fields.fields[SUBSET]
    # The protocol says a text with commas; some gateways send a list.
    if value.WhichOneof("kind") == "string_value":
        texts = [value.string_value]
    else:
        texts = [item.string_value for item in value.list_value.values]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def served_by(message: Any) -> str:
    """Return the endpoint that serves a request, as its answer's head tells; "" if it does not."""
    metadata = message.metadata_context.filter_metadata.get(NAMESPACE)
    # The protocol names the metadata; Envoy by itself has its attributes.
    if metadata is not None and SERVED in metadata.fields:
        served: str = metadata.fields[SERVED].string_value
        return served
    for attributes in message.attributes.values():
        if UPSTREAM in attributes.fields:
            address: str = attributes.fields[UPSTREAM].string_value
            return address
    return ""


@lru_cache(4096)
def endpoint_of(url: str) -> str:
    """Return an engine's `ip:port`, IPv6 in brackets; "" if its host is no address.

    Examples:
        >>> endpoint_of("http://10.0.0.5:8000"), endpoint_of("http://[::1]"), endpoint_of("http://a")
        ('10.0.0.5:8000', '[::1]:80', '')
    """
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return ""
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def is_in(endpoint: str, subset: frozenset[str]) -> bool:
    """Return whether an endpoint is in a subset."""
    host = endpoint.rpartition(":")[0]
    return endpoint in subset or host in subset or host.strip("[]") in subset


# Answers ---------------------------------------------------------------------------------------


def nothing(part: str) -> Any:
    """Return an answer that changes nothing of a part, such as "request_headers"."""
    answer = ext_proc.ProcessingResponse()
    getattr(answer, part).SetInParent()
    return answer


def noted(part: str, notes: Mapping[str, str]) -> Any:
    """Return an answer that changes nothing but the metadata of our own Envoy."""
    answer = nothing(part)
    answer.dynamic_metadata[NOTES] = dict(notes)
    return answer


def with_fields(fields: Mapping[str, str]) -> Any:
    """Return the answer to an answer's head that adds fields to it."""
    answer = nothing("response_headers")
    for name, value in fields.items():
        option = answer.response_headers.response.header_mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key, option.header.raw_value = name, value.encode()
    return answer


def destination(
    endpoint: str, headers: Headers, length: int | None, part: str = "request_headers"
) -> Any:
    """Return the answer to a request's head, or body, that sends it to an endpoint.

    That is `ip:port`, or several with commas: where to try, in order. `length` is that of the body,
    if it has changed.
    """
    answer = ext_proc.ProcessingResponse()
    response = getattr(answer, part).response
    response.clear_route_cache = True  # the proxy has chosen a route before it asked us
    mutation = response.header_mutation
    fields = [(DESTINATION.encode(), endpoint.encode()), *headers]
    names = {name for name, _ in fields}
    mutation.remove_headers.extend(name for name in _STRIPPED if name.encode() not in names)
    if length is not None:
        fields.append((b"content-length", b"%d" % length))
    for name, value in fields:
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key, option.header.raw_value = name.decode(), value
    # Proxies read the one or the other; no client can set the metadata.
    answer.dynamic_metadata[NAMESPACE] = {DESTINATION: endpoint}
    return answer


def pieces(part: str, body: bytes, *, is_last: bool) -> Iterator[Any]:
    """Yield answers that stream a body: "request_body" or "response_body"."""
    starts = range(0, len(body), PIECE) or [0]
    for start in starts:
        answer = ext_proc.ProcessingResponse()
        streamed = getattr(answer, part).response.body_mutation.streamed_response
        streamed.body = body[start : start + PIECE]
        streamed.end_of_stream = is_last and start + PIECE >= len(body)
        yield answer


def refusal(reply: Reply) -> Any:
    """Return the answer that ends a request with this reply."""
    answer = ext_proc.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = reply.status
    immediate.body = reply.body
    fields: Sequence[tuple[bytes, bytes]] = reply.headers
    for name, value in ((b"content-type", reply.content_type), *fields):
        option = immediate.headers.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key, option.header.raw_value = name.decode(), value
    return answer
