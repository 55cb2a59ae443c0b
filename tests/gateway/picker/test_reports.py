"""What Envoy reports of answers: each request ends once, as its line in the access log says."""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("grpc")

from envoy.data.accesslog.v3 import accesslog_pb2

from kvindex import Rank
from kvindex.gateway.access import Access
from kvindex.gateway.picker.messages import NOTES
from kvindex.gateway.picker.stream import BOOKING, ENGINES, Picker, Reports
from kvindex.gateway.request_life import End, Exchange
from kvindex.gateway.routing import UnknownModelError
from tests.gateway.lives import LoggedReservation, call_of

pytestmark = pytest.mark.service

KEY = "key-1"
RANK = Rank("a")


class Reported:
    """A request that Envoy has sent to an engine, and what becomes of it."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.now = 10.0
        self.access = Access()
        self.reports = Reports(self.access, self.move, lambda: self.now)
        self.exchange = self.open_another(KEY)

    def open_another(self, key: str) -> Exchange:
        exchange = Exchange(call_of(), "id", 10.0)
        self.access.begin(exchange, ())
        exchange.reserved(LoggedReservation(self.log, RANK), 10.0)
        self.reports.begin(key, exchange)
        return exchange

    def move(self, exchange: Exchange, endpoint: str) -> None:
        self.log.append(("move", endpoint))

    def ended(self) -> tuple[End | None, int]:
        return self.exchange.end, self.exchange.status


def line(
    status: int = 200,
    details: str = "via_upstream",
    *flags: str,
    key: str = KEY,
    attempts: int = 1,
    **notes: str,
) -> Any:
    """A line of the access log."""
    entry = accesslog_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    for flag in flags:
        setattr(common.response_flags, flag, True)
    common.metadata.filter_metadata[NOTES].update({BOOKING: key, **notes})
    common.upstream_cluster = ENGINES
    common.upstream_request_attempt_count = attempts
    common.time_to_last_downstream_tx_byte.FromMilliseconds(500)
    entry.request.path = "/v1/chat/completions?x=1"
    entry.response.response_code.value = status
    entry.response.response_code_details = details
    return entry


LEFT = "downstream_connection_termination"
BROKE = "upstream_reset_after_response_started{connection_termination}"
USAGE = (
    '{"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 7}}'
)


@pytest.mark.parametrize(
    ("entry", "end", "status"),
    [
        (line(), End.WHOLE, 200),
        (line(400), End.STATUS, 400),
        (line(empty="yes"), End.BROKEN, 200),
        (line(error='{"code":400}', last="yes"), End.EVENT, 200),
        (line(200, "downstream_remote_disconnect", LEFT), End.LEFT, 200),
        (line(0, "downstream_remote_disconnect", LEFT), End.LEFT, 499),
        (line(200, "downstream_remote_disconnect", LEFT, last="yes"), End.WHOLE, 200),
        (line(200, BROKE, "upstream_connection_termination"), End.BROKEN, 200),
        (
            line(503, "upstream_reset_before_response_started", "no_healthy_upstream"),
            End.NO_ANSWER,
            503,
        ),
        (line(413, "request_payload_too_large"), End.REFUSED, 413),
    ],
)
def test_a_request_ends_as_its_line_says(entry: Any, end: End, status: int) -> None:
    served = Reported()
    served.now = 11.0
    served.reports.logged(entry)
    assert served.ended() == (end, status)
    assert served.exchange.ended_at == 10.5, "as Envoy says, not when it is read"
    released = ("finish", RANK, None) if end is End.WHOLE else ("cancel", RANK)
    assert served.log == [released]
    served.reports.logged(entry)
    assert len(served.log) == 1
    assert (len(served.reports), served.access.open) == (0, 0)


def test_usage_and_retries_are_counted() -> None:
    served = Reported()
    served.reports.logged(line(usage=USAGE, attempts=3))
    assert served.log == [("finish", RANK, 7)]
    assert served.exchange.output_tokens == 3
    assert served.exchange.tries == 3
    assert served.access.statistics()["failures"] == {"retried_by_envoy": 2}


FAILED, BAD = '{"type":" ","code":500}', '{"type":"BadRequestError ","code":null}'


@pytest.mark.parametrize(
    ("entry", "outcome"),
    [
        (line(), "answered"),
        (line(400), "answered"),
        (line(501), "answered"),
        (line(500), "status_500"),
        (line(empty="yes"), "empty"),
        (line(200, BROKE, "upstream_connection_termination"), "reset"),
        (line(error=FAILED), "error_event"),
        (line(error=BAD), "answered"),
    ],
)
def test_what_a_line_says_is_what_the_engines_ejection_is_judged_by(
    entry: Any, outcome: str
) -> None:
    served = Reported()
    served.reports.logged(entry)
    reservation = cast(LoggedReservation, served.exchange.reservation)
    assert reservation.outcomes == [outcome]


def test_a_refusal_of_its_rank_is_learnt() -> None:
    served = Reported()
    served.reports.logged(line(400, refusal="no such rank"))
    assert served.log == [("misnumbered", RANK, b"no such rank"), ("cancel", RANK)]


def test_the_first_content_moves_the_load_to_who_serves_it() -> None:
    served = Reported()
    served.now = 10.2
    served.reports.first(f"{KEY} 10.0.0.6:8000".encode())
    assert served.log == [("move", "10.0.0.6:8000"), ("first_token", RANK)]
    assert served.exchange.first_token == pytest.approx(0.2)
    served.reports.first(b"unknown 10.0.0.6:8000")
    served.reports.first(b"\xff")
    served.reports.logged(line())
    served.reports.first(f"{KEY} 10.0.0.6:8000".encode())  # overtaken by the end
    assert served.log[2:] == [("finish", RANK, None)]


def test_the_line_of_a_response_names_the_id_that_its_engine_has_made() -> None:
    served = Reported()
    served.reports.logged(line(made="resp_1"))
    assert served.log == [("made", RANK, "resp_1"), ("finish", RANK, None)]


def test_a_request_of_another_picker_or_of_none_is_counted_by_its_status() -> None:
    served = Reported()
    served.reports.logged(line(key="of a picker that has died"))
    served.now += 61.0
    served.reports.sweep()
    assert served.access.statistics()["requests"] == [("/v1/chat/completions", 200, "unpicked", 1)]
    assert served.exchange.end is None


def test_a_client_that_leaves_while_its_request_is_placed_leaves_no_booking() -> None:
    served = Reported()
    gone = line(0, "downstream_remote_disconnect", LEFT, key="placed too late")
    served.reports.logged(gone)
    exchange = served.open_another("placed too late")
    assert (exchange.end, len(served.reports)) == (End.LEFT, 1)
    assert served.log == [("cancel", RANK)]


def test_what_is_remembered_of_lines_that_come_early_is_bounded() -> None:
    served = Reported()
    for number in range(5000):
        served.reports.logged(line(key=str(number)))
    assert len(served.reports._early) == 4096
    assert served.access.statistics()["requests"][0][3] == 5000 - 4096


def test_an_open_request_is_heard_of_each_minute_or_given_up() -> None:
    served = Reported()
    entry = line()
    entry.common_properties.intermediate_log_entry = True
    for _ in range(10):
        served.now += 60.0
        served.reports.logged(entry)
        served.reports.sweep()
    assert served.log == [("touch", RANK, 0)] * 10
    served.now += 201.0
    served.reports.sweep()
    assert served.exchange.end is End.FAILED
    assert served.log[-1] == ("cancel", RANK)
    assert served.access.statistics()["failures"] == {"not_reported": 1}


def test_when_envoy_is_gone_all_its_requests_end() -> None:
    served = Reported()
    served.reports.first(f"{KEY} ".encode())
    served.reports.abandon()
    assert served.ended() == (End.FAILED, 200)
    assert served.log[-1] == ("cancel", RANK)
    assert len(served.reports) == 0


def test_a_load_stays_where_it_is_once_its_model_has_gone() -> None:
    class Gone:
        def servings(self, model: str) -> Any:
            raise UnknownModelError(model, ())

    routing, tokenizing = cast(Any, Gone()), cast(Any, None)
    picker = Picker(routing, tokenizing, most_bytes=1, has_reports=True)
    exchange = Exchange(call_of(), "id", 0.0)
    exchange.reserved(LoggedReservation([], RANK), 0.0)
    picker.move(exchange, "10.0.0.9:8000")
    assert exchange.reservation is not None
    assert exchange.reservation.rank == RANK
