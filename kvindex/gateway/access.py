"""The access log, one line of JSON a request; the counters of requests, and their series."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvindex import Client
from kvindex.gateway.request_life import End, Exchange
from kvindex.gateway.tracing import Spans
from kvindex.replicas import Replica
from kvindex.routing import Router
from kvindex.service.http import Headers
from kvindex.service.metrics import FunnelCollector, RankCollector, SeriesLabels

logger = logging.getLogger(__name__)

SECONDS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the durations that are counted together; one more has no bound."""

_TENANT: Final = re.compile(rb"[A-Za-z0-9._:@/+-]{1,64}")
_MOST_TENANTS: Final = 256
_OTHER: Final = "other"


class Durations:
    """Durations in seconds, counted by SECONDS. Owner: one event loop."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def statistics(self) -> dict[str, Any]:
        """Return the counts, by bucket, and the sum."""
        return {"buckets": list(self.counts), "sum": self.total}


class Access:
    """Logs and counts requests at the end of each, by the logger "kvindex.gateway.access".

    `tenant_header` names the header of requests whose value their tokens are counted by; `tracer`
    makes their spans.

    Owner: one event loop. Complexity: O(1) a request; the counters are bounded by the routes, the
    status codes and the reasons that this package names, and by 256 tenants.
    """

    def __init__(self, tenant_header: str | None = None, tracer: Any = None) -> None:
        self.open = 0
        self.on_idle: Callable[[], object] = lambda: None  # called when no request is open
        self.on_end: Callable[[Exchange], object] = lambda _: None  # called at each request's end
        self._requests: Counter[tuple[str, int, str]] = Counter()
        self._retries: Counter[str] = Counter()
        self._choices: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._prefills: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._tenant_header = None if tenant_header is None else tenant_header.lower().encode()
        self._tenants: dict[str, Counter[str]] = {}
        self._tracer = tracer
        self._waits, self._firsts, self._whole = Durations(), Durations(), Durations()

    def begin(self, exchange: Exchange, headers: Headers) -> None:
        """Count a request with these headers as open, until `end`; begin its spans."""
        self.open += 1
        exchange.tenant = self._tenant_of(headers)
        if self._tracer is not None:
            Spans(self._tracer).began(exchange, headers)

    def _tenant_of(self, headers: Headers) -> str | None:
        if self._tenant_header is None:
            return None
        # Of several the last: a proxy in front may add its own behind what its client has sent.
        value = dict(headers).get(self._tenant_header, b"")
        # Clients may send anything: what is no plain name is no label, and so no tenant.
        return value.decode("ascii") if not value or _TENANT.fullmatch(value) else _OTHER

    def end(self, exchange: Exchange) -> None:
        """Log and count a request that `begin` counted, and that has ended."""
        self.open -= 1  # first: what follows may ask how many are open
        if exchange.spans is not None:
            exchange.spans.ended(exchange)
        try:
            self._count(exchange)
            self.on_end(exchange)
        except Exception:  # what counts must not break an answer
            logger.exception("a request could not be counted")
        if not self.open:
            self.on_idle()

    def _count(self, exchange: Exchange) -> None:
        reservation, usage = exchange.reservation, exchange.usage
        prefiller, prefill = exchange.prefiller, exchange.prefill
        duration = exchange.ended_at - exchange.began_at
        self._requests[exchange.call.path, exchange.status, str(exchange.end)] += 1
        failures = [*exchange.prefill_failures, *exchange.failures]
        self._retries.update(failure.reason for failure in failures)
        self._sources[exchange.tokens_from] += 1
        self._whole.add(duration)
        if reservation is not None:
            self._choices[reservation.reason] += 1
        if prefill is not None:
            self._prefills[prefill.reason] += 1
        if exchange.waited is not None:
            self._waits.add(exchange.waited)
        if exchange.first_token is not None:
            self._firsts.add(exchange.first_token)
        # Only of whole answers are the engine's tokens known, and so comparable with ours.
        if exchange.end is End.WHOLE and prefiller is not None:
            self._tokens["prompt"] += exchange.prompt_tokens
            self._tokens["output"] += exchange.output_tokens
            if exchange.call.is_single:
                self._tokens["held"] += prefiller.held
                self._tokens["delivered"] += exchange.delivered or 0
            if prefill is not None:
                self._tokens["moved"] += prefill.moved
            self._tokens["answers"] += 1
            self._tokens["answers_with_usage"] += usage is not None
            if exchange.tenant is not None:
                self._count_tenant(exchange, exchange.tenant)
        if logger.isEnabledFor(logging.INFO):
            fields = {
                "id": exchange.request_id,
                "path": exchange.call.path,
                **({} if exchange.tenant is None else {"tenant": exchange.tenant}),
                "model": exchange.call.model,
                "rank": None if reservation is None else str(reservation.rank),
                "reason": None if reservation is None else reservation.reason,
                "tokens_from": exchange.tokens_from,
                "prompt_tokens": exchange.prompt_tokens,
                "held": None if prefiller is None else prefiller.held,
                "delivered": exchange.delivered,
                **_pull(exchange),
                **_prefill(exchange),
                "output_tokens": exchange.output_tokens,
                "wait": _rounded(exchange.waited),
                "first_token": _rounded(exchange.first_token),
                "duration": _rounded(duration),
                "status": exchange.status,
                "end": str(exchange.end),
                "tries": exchange.tries,
                "failures": [f"{failure.rank} {failure.reason}" for failure in failures],
            }
            logger.info("%s", msgspec.json.encode(fields).decode())

    def _count_tenant(self, exchange: Exchange, tenant: str) -> None:
        if tenant not in self._tenants and len(self._tenants) >= _MOST_TENANTS:
            tenant = _OTHER
        counter = self._tenants.setdefault(tenant, Counter())
        counter["prompt"] += exchange.prompt_tokens
        counter["output"] += exchange.output_tokens
        counter["delivered"] += exchange.delivered or 0

    def count(self, path: str, status: int, end: End = End.REFUSED) -> None:
        """Count a request that has no life here: it is refused before, or not picked for."""
        self._requests[path, status, str(end)] += 1

    def statistics(self) -> dict[str, Any]:
        """Return the counters: `requests` as rows of path, status, end and number."""
        return {
            "open": self.open,
            "requests": [(*labels, number) for labels, number in self._requests.items()],
            "failures": dict(self._retries),
            "choices": dict(self._choices),
            "prefills": dict(self._prefills),
            "tokens_from": dict(self._sources),
            "tokens": dict(self._tokens),
            "tenants": {tenant: dict(tokens) for tenant, tokens in self._tenants.items()},
            "wait": self._waits.statistics(),
            "first_token": self._firsts.statistics(),
            "duration": self._whole.statistics(),
        }


def _pull(exchange: Exchange) -> dict[str, Any]:
    """Return where an engine was told to pull from, and whether it did; nothing if it was not."""
    source = None if exchange.reservation is None else exchange.reservation.source
    if source is None:
        return {}
    return {"source": str(source.rank), "pulled": source.was_pulled(exchange.delivered)}


def _prefill(exchange: Exchange) -> dict[str, Any]:
    """Return whether another engine prefilled the prompt, and why; nothing without roles."""
    prefill = exchange.prefill
    if prefill is None:
        return {}
    where = None if prefill.reservation is None else str(prefill.reservation.rank)
    return {
        "disaggregated": prefill.reason == "apart",
        "prefill": prefill.reason,
        "prefill_rank": where,
        "moved": prefill.moved,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


# Prometheus ---------------------------------------------------------------------------------------


CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_DURATIONS: Final = {
    "wait": "Seconds from a request's arrival to its first rank",
    "first_token": "Seconds from a request's arrival to its first content",
    "duration": "Seconds from a request's arrival to its end",
}
_COUNTERS: Final = {  # by the part of the statistics: name, text, label
    "failures": ("failures", "Tries that brought no answer", "reason"),
    "choices": ("choices", "Ranks that were chosen, by what decided", "reason"),
    "prefills": ("prefills", "Requests to engines that decode, by who prefilled and why", "reason"),
    "tokens_from": ("prompts", "Prompts by where their tokens are from", "source"),
    "tokens": ("tokens", "Tokens of whole answers", "kind"),
    "refused": ("refused", "Requests that the guard refused", "reason"),
    "token_failures": ("token_failures", "Questions for tokens without an answer", "reason"),
    "engine_failures": ("engine_failures", "Requests to engines without a whole answer", "reason"),
    "shed": ("shed", "Requests that found no room in time", "reason"),
}


class GatewayCollector(Collector):
    """The counters of one gateway; `read` returns them, as `Gateway.statistics` does."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are is only known when they are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        counters = self._read()
        requests = CounterMetricFamily(
            "kvindex_gateway_requests",
            "Requests by how they ended",
            labels=("path", "status", "end"),
        )
        for path, status, end, number in counters["requests"]:
            requests.add_metric((path, str(status), end), number)
        yield requests
        for part, (name, text, label) in _COUNTERS.items():
            family = CounterMetricFamily(f"kvindex_gateway_{name}", text, labels=(label,))
            for value, number in counters[part].items():
                family.add_metric((value,), number)
            yield family
        text = "Tokens of whole answers, by the tenant that asked"
        tenants = CounterMetricFamily(
            "kvindex_gateway_tenant_tokens", text, labels=("tenant", "kind")
        )
        for tenant, tokens in counters["tenants"].items():
            for kind, number in tokens.items():
                tenants.add_metric((tenant, kind), number)
        yield tenants
        for name, text in (("open", "Requests that are open"), ("waiting", "Requests that wait")):
            yield GaugeMetricFamily(f"kvindex_gateway_{name}", text, value=counters[name])
        text = "Engines that failed, and were left out for a while"
        yield CounterMetricFamily("kvindex_gateway_ejections", text, value=counters["ejections"])
        text = "Seconds for which an engine is left out"
        ejected = GaugeMetricFamily("kvindex_gateway_ejected_seconds", text, labels=("worker",))
        for worker, one in counters["ejected"].items():
            ejected.add_metric((worker,), one["seconds"])
        yield ejected
        for name, text in _DURATIONS.items():
            buckets = counters[name]["buckets"]
            # Prometheus counts in each bucket those of the lower ones, too.
            bounds = list(zip([*map(str, SECONDS), "+Inf"], accumulate(buckets), strict=True))
            histogram = HistogramMetricFamily(f"kvindex_gateway_{name}_seconds", text)
            histogram.add_metric((), bounds, counters[name]["sum"])
            yield histogram


class AllCollector(Collector):
    """The series of ranks, of routers, and of a gateway or picker; routers may come and go."""

    def __init__(
        self,
        source: Client | Replica,
        routers: Callable[[], Iterable[Router]],
        read: Callable[[], Mapping[str, Any]],
        model_of: Callable[[str], str],
    ) -> None:
        self._source = source
        self._routers = routers
        self._read = read
        self._model_of = model_of

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are is only known when they are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        # Anew each time: models and their routers come and go.
        yield from RankCollector(
            self._source, labels_of=lambda worker: SeriesLabels(self._model_of(worker))
        ).collect()
        yield from FunnelCollector(tuple(self._routers())).collect()
        yield from GatewayCollector(self._read).collect()


def exposition(
    source: Client | Replica,
    routers: Iterable[Router],
    read: Mapping[str, Any],
    model_of: Callable[[str], str],
) -> bytes:
    """Return all series as text. It takes a moment for many ranks: not on an event loop."""
    registry = CollectorRegistry()
    registry.register(AllCollector(source, lambda: routers, lambda: read, model_of))
    text: bytes = generate_latest(registry)
    return text
