"""The access log, one line of JSON a request, and the counters of requests. No prompts."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvindex.gateway.exchange import End, Exchange

logger = logging.getLogger(__name__)

SECONDS: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the durations that are counted together; one more has no bound."""


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
    """Logs and counts requests at the end of each.

    Lines are written at level INFO by the logger "kvindex.gateway.access".

    Owner: one event loop. Complexity: O(1) a request; the counters are bounded by the routes, the
    status codes and the reasons that this package names.
    """

    def __init__(self) -> None:
        self.open = 0
        self.on_idle: Callable[[], object] = lambda: None  # called when no request is open
        self.on_end: Callable[[Exchange], object] = lambda _: None  # called at each request's end
        self._requests: Counter[tuple[str, int, str]] = Counter()
        self._retries: Counter[str] = Counter()
        self._choices: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._waits, self._firsts, self._whole = Durations(), Durations(), Durations()

    def begin(self) -> None:
        """Count a request as open, until `end`."""
        self.open += 1

    def end(self, exchange: Exchange) -> None:
        """Log and count a request that `begin` counted, and that has ended."""
        self.open -= 1
        place, usage = exchange.place, exchange.usage
        duration = exchange.ended_at - exchange.began_at
        self._requests[exchange.call.path, exchange.status, str(exchange.end)] += 1
        self._retries.update(failure.reason for failure in exchange.failures)
        self._sources[exchange.tokens_from] += 1
        self._whole.add(duration)
        if place is not None:
            self._choices[place.reason] += 1
        if exchange.waited is not None:
            self._waits.add(exchange.waited)
        if exchange.first_token is not None:
            self._firsts.add(exchange.first_token)
        delivered = None if usage is None else usage.cached_tokens
        if exchange.end is End.WHOLE and place is not None:
            self._tokens["prompt"] += exchange.prompt_tokens
            self._tokens["output"] += exchange.output_tokens
            self._tokens["held"] += place.held
            self._tokens["delivered"] += delivered or 0
            self._tokens["answers"] += 1
            self._tokens["answers_with_usage"] += usage is not None
        self.on_end(exchange)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", _line(exchange, delivered, duration))
        if not self.open:
            self.on_idle()

    def count(self, path: str, status: int, end: End = End.REFUSED) -> None:
        """Count a request that has no life here: it is refused before, or not picked for."""
        self._requests[path, status, str(end)] += 1

    def statistics(self) -> dict[str, Any]:
        """Return the counters.

        Returns:
            `open` requests; `requests` as rows of path, status, end and number; `failures` (tries
            without an answer), `choices` and `tokens_from` by reason; `tokens` of whole answers;
            `wait`, `first_token` and `duration`, each as `Durations.statistics`.
        """
        return {
            "open": self.open,
            "requests": [(*labels, number) for labels, number in self._requests.items()],
            "failures": dict(self._retries),
            "choices": dict(self._choices),
            "tokens_from": dict(self._sources),
            "tokens": dict(self._tokens),
            "wait": self._waits.statistics(),
            "first_token": self._firsts.statistics(),
            "duration": self._whole.statistics(),
        }


def _line(exchange: Exchange, delivered: int | None, duration: float) -> str:
    place = exchange.place
    failures: Sequence[str] = [f"{each.rank} {each.reason}" for each in exchange.failures]
    fields = {
        "id": exchange.request_id,
        "path": exchange.call.path,
        "model": exchange.call.model,
        "rank": None if place is None else str(place.rank),
        "reason": None if place is None else place.reason,
        "tokens_from": exchange.tokens_from,
        "prompt_tokens": exchange.prompt_tokens,
        "held": None if place is None else place.held,
        "delivered": delivered,
        "output_tokens": exchange.output_tokens,
        "wait": _rounded(exchange.waited),
        "first_token": _rounded(exchange.first_token),
        "duration": _rounded(duration),
        "status": exchange.status,
        "end": str(exchange.end),
        "tries": exchange.tries,
        "failures": failures,
    }
    return msgspec.json.encode(fields).decode()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
