"""What our own Envoy reports of the answers that it forwards: their begin, and how each ended.

Its Lua program reports when the content of a stream begins. Its access log reports each
request's end, and open ones each minute. Both name the request by the metadata that the picker
gave with its head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvindex.gateway.access import Access
from kvindex.gateway.events import Usage, usage_of
from kvindex.gateway.exchange import CLIENT_LEFT, End, Exchange, Failure
from kvindex.gateway.picker.messages import NOTES

BOOKING: Final = "booking"
"""The note that names a request."""
HIDES: Final = "hides"
"""The note that the client did not ask for the usage event."""

ENGINES: Final = "engines"
"""The name of the engines' cluster."""

_SILENT_SECONDS: Final = 200.0  # after which an open request, reported each minute, is given up
_GONE: Final = 502


class Reports:
    """The requests that Envoy has open.

    Args:
        access: counts and logs them.
        move: moves a request's load to the engine that serves it, by `ip:port`.
        time: returns monotonic seconds, those of the exchanges.

    Owner: one event loop.
    """

    def __init__(
        self,
        access: Access,
        move: Callable[[Exchange, str], None],
        time: Callable[[], float],
    ) -> None:
        self._access = access
        self._move = move
        self._time = time
        self._open: dict[str, Exchange] = {}
        self._heard: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, key: str, exchange: Exchange) -> None:
        """Follow a request that goes to an engine."""
        self._open[key], self._heard[key] = exchange, self._time()

    def first(self, message: bytes) -> None:
        """Accept the report that content has begun: the request's key, and who serves it."""
        key, _, served = message.decode("latin-1").partition(" ")
        if (exchange := self._open.get(key)) is not None:
            self._move(exchange, served)
            exchange.begun(self._time())

    def logged(self, entry: Any) -> None:
        """Accept a line of the access log (envoy.data.accesslog.v3.HTTPAccessLogEntry)."""
        common = entry.common_properties
        notes = common.metadata.filter_metadata.get(NOTES)
        key = notes.fields[BOOKING].string_value if notes and BOOKING in notes.fields else ""
        exchange = self._open.get(key)
        if exchange is None:
            if common.upstream_cluster == ENGINES and not common.intermediate_log_entry:
                path = entry.request.path.partition("?")[0]
                self._access.count(path, entry.response.response_code.value, End.UNPICKED)
            return
        if common.intermediate_log_entry:
            self._heard[key] = self._time()
            if exchange.place is not None:
                exchange.place.touch(0)
            return
        if common.upstream_remote_address.HasField("socket_address"):
            self._move(exchange, _endpoint(common.upstream_remote_address.socket_address))
        if exchange.place is not None:
            again = common.upstream_request_attempt_count - 1
            exchange.tries = max(1, again + 1)
            exchange.failures += [Failure(exchange.place.rank, "retried_by_envoy")] * again
        said = {name: notes.fields[name].string_value for name in notes.fields}
        end, status = _ending(entry, said)
        taken = common.time_to_last_downstream_tx_byte.ToTimedelta().total_seconds()
        # The first token's report arrives a moment after it was sent.
        ended = (
            exchange.began_at + max(taken, exchange.first_token or 0.0) if taken else self._time()
        )
        self._end(key, end, status, usage_noted(said), min(ended, self._time()))

    def abandon(self) -> None:
        """End all requests: their Envoy is gone."""
        for key, exchange in list(self._open.items()):
            self._end(key, End.FAILED, exchange.status or _GONE, None, self._time())

    def sweep(self) -> None:
        """End requests that Envoy has not reported for minutes: it has lost their reports."""
        for key, heard in list(self._heard.items()):
            if self._time() - heard > _SILENT_SECONDS:
                exchange = self._open[key]
                if exchange.place is not None:
                    exchange.failures.append(Failure(exchange.place.rank, "not_reported"))
                self._end(key, End.FAILED, exchange.status or _GONE, None, self._time())

    def _end(self, key: str, end: End, status: int, usage: Usage | None, now: float) -> None:
        exchange = self._open.pop(key)
        del self._heard[key]
        exchange.reported(end, status, usage, now)
        self._access.end(exchange)


def _ending(entry: Any, said: dict[str, str]) -> tuple[End, int]:
    """Return how a request ended, and its status."""
    flags, status = entry.common_properties.response_flags, entry.response.response_code.value
    details = entry.response.response_code_details
    has_left = flags.downstream_connection_termination or flags.downstream_remote_reset
    if has_left and "last" not in said:
        return End.LEFT, status or CLIENT_LEFT
    if details.startswith("upstream_reset_after_response_started"):
        return End.BROKEN, status
    if "error" in said:
        return End.EVENT, status
    if details != "via_upstream" and not has_left:  # Envoy's own answer, or the picker's
        return (End.NO_ANSWER if status >= 500 else End.REFUSED), status
    return (End.WHOLE if status < 300 else End.STATUS), status


def usage_noted(notes: Mapping[str, str]) -> Usage | None:
    """Return the usage in the notes: what the first report says, and the last."""
    usage = None
    for name in ("usage", "usage_at_end"):
        if name in notes:
            usage = usage_of(b'{"usage":%b}' % notes[name].encode(), usage)
    return usage


def _endpoint(address: Any) -> str:
    host: str = address.address
    return f"{f'[{host}]' if ':' in host else host}:{address.port_value}"
