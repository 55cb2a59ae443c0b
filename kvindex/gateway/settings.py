"""The settings of `kvindex gateway` and `kvindex epp`: their help has what stands here.

A file of its own: the help must do without the extra packages that a gateway needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kvindex import ConfigurationError
from kvindex.service.http import Limits, Listening
from kvindex.wire.nats import NatsPool

MOST_BODY: Final = 64 << 20
"""Bytes of a request's body by default: images come as text within it."""

MOST_BODIES: Final = 1 << 30
"""Bytes of the bodies of all open requests by default."""

_KV_SOURCE: Final = re.compile(r"llm-d|vllm:\+?[0-9]{1,5}")


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway serves; the engines come beside it.

    Attributes:
        listening: where it listens, and whom it admits.
        admin_token_file: a file with operators' tokens, each on a line of its own: /admin,
            /metrics, the page and /api are for them alone. Without it these are served to this
            machine only.
        open_requests: most open requests of a rank; by default without a limit.
        queued_tokens: most tokens that wait for their prefill on a rank; likewise.
        waiting: requests of one model that may wait for a rank with room.
        queue_within: seconds for which a request may wait; then it is answered 429.
        head_within: seconds until an engine begins to answer. A whole answer begins when all of it
            is generated, so this is its longest generation.
        head_hold: seconds for which the head of a stream waits for its first event. Then it goes
            out, and no other engine can be asked.
        silent_within: seconds for which an engine may send nothing of an answer that has begun.
        explain_headers: say in each answer which rank served it, how many tokens of the prompt that
            held, and why it was chosen: x-kvindex-rank, -held and -reason; -prefill, if another one
            prefilled.
        tenant_header: name of a request header by whose value the metrics count tokens, those of
            256 tenants at most. Clients may send any: let a proxy in front set it.
        tokens_within: seconds that a request may wait for its tokens.
        tokenizers: folders with a model's tokenizer and chat template, by the model's name; "": for
            any other model.
        drain: seconds for open requests to end in, once the gateway is to end.
        policy: of the routers; see `kvindex.routing.POLICIES`.
        kv_source: tell an engine which other one holds more of a prompt, to pull its KV:
            "vllm:PORT" at this port of vLLM's P2P tier on each engine's host, "vllm:+N" at its HTTP
            port + N, both + the number of the DP rank; "llm-d" by its routing side-car.
        pull_rate: tokens per second that an engine pulls from another: then the choice reckons with
            it; needs `kv_source`.
        local_tokens: an engine that decodes prefills by itself where it lacks at most so many
            tokens of the prompt.
        pool: on NATS; then its relay follows the engines' events, this gateway has a replica of the
            relay's index, and it shares its load with the pool's other gateways.

    Raises:
        ConfigurationError: a value cannot work, with what would.
    """

    listening: Listening = Listening(
        port=8080, limits=Limits(body_bytes=MOST_BODY, bodies_bytes=MOST_BODIES)
    )
    admin_token_file: str | None = None
    open_requests: int | None = None
    queued_tokens: int | None = None
    waiting: int = 1024
    queue_within: float = 30.0
    head_within: float = 600.0
    head_hold: float = 1.0
    silent_within: float = 300.0
    explain_headers: bool = False
    tenant_header: str | None = None
    tokens_within: float = 2.0
    tokenizers: Mapping[str, str] = {}
    drain: float = 30.0
    policy: str = "kvindex"
    kv_source: str | None = None
    pull_rate: int | None = None
    local_tokens: int = 2_048
    pool: NatsPool | None = None

    def __post_init__(self) -> None:
        for name in (
            "queue_within",
            "head_within",
            "head_hold",
            "silent_within",
            "tokens_within",
            "drain",
        ):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0 s, not {getattr(self, name)!r}")
        if self.kv_source is not None and not _KV_SOURCE.fullmatch(self.kv_source):
            raise ConfigurationError(
                f"kv_source must be vllm:PORT, vllm:+N or llm-d, not {self.kv_source!r}"
            )
        if self.pull_rate is not None and self.kv_source is None:
            raise ConfigurationError("pull_rate needs kv_source: else nothing is pulled")
        for name in ("waiting", "local_tokens"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must be 0 or more, not {getattr(self, name)}")


class PickerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a picker listens; `GatewaySettings` has the rest.

    Attributes:
        host: address to listen at.
        port: its port; 0: any.
        tls: files with the certificate chain and its private key, in PEM; None: a certificate that
            the picker signs itself, which gateways accept without a check.
        is_plain: serve without TLS.
        body_bytes: most bytes of a request's body.
        metrics_port: where Prometheus series are served, too: /metrics over HTTP, without a token.
        metrics_host: at which address; by default that of `host`.
        endpoints: most that an answer names, 3 at most; those after the first are where a gateway
            may try again. The protocol has a list, but agentgateway and clusters of Envoy that are
            ORIGINAL_DST read one only.
        is_conformance: let requests name their endpoints, for conformance tests of gateways only.
    """

    host: str = "0.0.0.0"
    port: int = 9002
    tls: tuple[str, str] | None = None
    is_plain: bool = False
    body_bytes: int = 10 << 20
    metrics_port: int | None = None
    metrics_host: str | None = None
    endpoints: int = 1
    is_conformance: bool = False


# Engines ------------------------------------------------------------------------------------------
