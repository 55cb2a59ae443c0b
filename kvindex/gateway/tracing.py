"""OpenTelemetry spans of requests, for the SDK that the user has set up.

```
POST /v1/chat/completions    SERVER, below the client's traceparent
├── reserve                  from the arrival, or the failure before, to the rank
└── try                      CLIENT; its engine receives its traceparent
```

Attributes are named as in OpenTelemetry's semantic conventions for HTTP and generative AI, others
`kvindex.…`. None has a text of prompts or answers, or a key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec
from urllib.parse import urlsplit

from kvindex import __version__
from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from kvindex.gateway.request_life import End, Exchange
from kvindex.service.http import Headers

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # the extra `otel`
    has_api = False
else:
    has_api = True

logger = logging.getLogger(__name__)

TRACE_FIELDS: Final = (b"traceparent", b"tracestate")
"""The fields of a head that join spans: a traced request's engine receives ours."""

_MOST_NAME: Final = 128  # characters of a model's name, which clients may choose
_OPERATIONS: Final = {
    CHAT: "chat",
    MESSAGES: "chat",
    RESPONSES: "chat",
    COMPLETIONS: "text_completion",
    EMBEDDINGS: "embeddings",
}
_ANSWERED: Final = frozenset({End.WHOLE, End.STATUS, End.EVENT})
_P = ParamSpec("_P")


def new_tracer() -> Any:
    """Return a tracer of the process's SDK; None if there is none, or it is switched off."""
    if not has_api:
        return None
    tracer = trace.get_tracer("kvindex.gateway", __version__)
    # These make spans that nobody records: without any, a request costs what it costs.
    is_idle = isinstance(tracer, (trace.ProxyTracer, trace.NoOpTracer))
    return None if is_idle else tracer


def _harmless(step: Callable[_P, None]) -> Callable[_P, None]:
    """Let requests go on, whatever the user's samplers and span processors raise."""

    @wraps(step)
    def run(*arguments: _P.args, **named: _P.kwargs) -> None:
        try:
            step(*arguments, **named)
        except Exception:
            logger.exception("a span could not be made")

    return run


class Spans:
    """The spans of one request, which `began` starts; times in its exchange's seconds.

    Owner: one event loop.
    """

    def __init__(self, tracer: Any) -> None:
        self.headers: Headers = ()  # that the engine of the present try receives
        self._tracer = tracer
        self._zero = 0  # of the exchange's seconds, in nanoseconds since 1970
        self._waits_from = 0.0
        self._request: Any = None
        self._below: Any = None  # the context of its children
        self._try: Any = None  # while it is open

    @_harmless
    def began(self, exchange: Exchange, headers: Headers) -> None:
        """Begin with a request that has these headers."""
        self._waits_from = exchange.began_at
        self._zero = time.time_ns() - int(exchange.began_at * 1e9)
        carrier = {
            name.decode(): [value.decode("latin-1") for key, value in headers if key == name]
            for name in TRACE_FIELDS
        }
        path = exchange.call.path
        request = self._tracer.start_span(
            f"POST {path}",
            TraceContextTextMapPropagator().extract(carrier),
            trace.SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": path, "url.path": path},
            start_time=self._at(exchange.began_at),
        )
        self._below = trace.set_span_in_context(request, Context())
        self._request = request
        exchange.spans = self  # not before: none are better than some

    @_harmless
    def reserved(self, exchange: Exchange, now: float) -> None:
        """Note that a rank is reserved: a try begins."""
        reservation = exchange.reservation
        assert reservation is not None
        waiting = self._tracer.start_span(
            "reserve",
            self._below,
            attributes={
                "kvindex.rank": str(reservation.rank),
                "kvindex.reason": reservation.reason,
                "kvindex.held_tokens": reservation.held,
                "kvindex.prompt_tokens": reservation.prompt_tokens,
            },
            start_time=self._at(self._waits_from),
        )
        waiting.end(self._at(now))
        self._try = self._tracer.start_span(
            "try", self._below, trace.SpanKind.CLIENT, start_time=self._at(now)
        )
        carrier: dict[str, str] = {}
        context = trace.set_span_in_context(self._try, Context())
        TraceContextTextMapPropagator().inject(carrier, context)
        self.headers = [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    @_harmless
    def failed(self, exchange: Exchange, reason: str, now: float) -> None:
        """Note that the try has failed."""
        self._waits_from = now
        self._end_try(exchange, reason, now)

    @_harmless
    def ended(self, exchange: Exchange) -> None:
        """End with the request."""
        status, end = exchange.status, exchange.end
        is_good = end in (End.WHOLE, End.LEFT) or (end is End.STATUS and status < 400)
        failure = "" if is_good else str(status) if end is End.STATUS else str(end)
        self._end_try(exchange, failure, exchange.ended_at)
        self._request.set_attributes(_attributes(exchange))
        if failure and not 400 <= status < 500:  # else it is the client's
            _set_failed(self._request, failure)
        self._request.end(self._at(exchange.ended_at))

    def _end_try(self, exchange: Exchange, failure: str, now: float) -> None:
        attempt, self._try = self._try, None
        reservation = exchange.reservation
        if attempt is None or reservation is None:
            return
        # Only now: a proxy may have sent it to another engine.
        url = urlsplit(reservation.serving.url)
        attempt.set_attributes(
            {
                "http.request.method": "POST",
                "server.address": url.hostname or "",
                "server.port": url.port or (443 if url.scheme == "https" else 80),
                "kvindex.rank": str(reservation.rank),
            }
        )
        if exchange.end in _ANSWERED:
            attempt.set_attribute("http.response.status_code", exchange.status)
        if exchange.tries > 1:
            attempt.set_attribute("http.request.resend_count", exchange.tries - 1)
        if exchange.first_token is not None:
            at = self._at(exchange.began_at + exchange.first_token)
            attempt.add_event("first_token", timestamp=at)
        if failure:
            _set_failed(attempt, failure)
        attempt.end(self._at(now))

    def _at(self, seconds: float) -> int:
        return self._zero + int(seconds * 1e9)


def _set_failed(span: Any, reason: str) -> None:
    span.set_attribute("error.type", reason)
    span.set_status(trace.StatusCode.ERROR)


def _attributes(exchange: Exchange) -> Mapping[str, Any]:
    """Return what is known of a request at its end."""
    call, usage = exchange.call, exchange.usage
    known = {
        "http.response.status_code": exchange.status,
        "gen_ai.operation.name": _OPERATIONS.get(call.path),
        "gen_ai.request.model": call.model[:_MOST_NAME] or None,
        "gen_ai.usage.input_tokens": None if usage is None else usage.prompt_tokens,
        "gen_ai.usage.output_tokens": None if usage is None else usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": exchange.delivered,
        "gen_ai.response.time_to_first_chunk": exchange.first_token,
        "kvindex.request_id": exchange.request_id,
        "kvindex.tokens_from": exchange.tokens_from,
        "kvindex.prompt_tokens": exchange.prompt_tokens,
        "kvindex.tries": exchange.tries,
        "kvindex.end": str(exchange.end),
    }
    return {name: value for name, value in known.items() if value is not None}
