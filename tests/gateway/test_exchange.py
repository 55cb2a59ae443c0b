"""One request's life, step by step: what is kept back, what is forwarded, and how places end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvindex import Rank
from kvindex.gateway.request_life import MOST_TRIES, End, Exchange, Stage
from tests.gateway.lives import (
    DONE,
    HEAD,
    JSON,
    ROLE,
    WHOLE,
    LoggedAnswer,
    LoggedReservation,
    call_of,
    event,
)

pytestmark = pytest.mark.unit

RANKS = [Rank(f"e{number}") for number in range(MOST_TRIES + 1)]
COMMENT = b": keep-alive\n\n"


class Life:
    """An exchange whose places and answers write into one log."""

    def __init__(self, **fields: Any) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.exchange = Exchange(call_of(**fields), "id", 0.0)

    def reserve(self, rank: Rank = RANKS[0]) -> None:
        self.exchange.reserved(LoggedReservation(self.log, rank), 1.0)

    def answer(self, status: int = 200, headers: Any = None) -> None:
        given = () if headers is None else (headers,)
        self.exchange.answered(LoggedAnswer(self.log, status, *given), 2.0)

    def begin(self, status: int = 200, headers: Any = None) -> Exchange:
        self.reserve()
        self.answer(status, headers)
        return self.exchange


def forwarded() -> Life:
    """A stream whose first event is forwarded."""
    life = Life()
    assert life.begin().received(ROLE, 2.5) == ROLE
    return life


def test_the_head_is_kept_until_the_first_event_is_whole() -> None:
    exchange = Life().begin()
    assert exchange.received(COMMENT, 2.0) == b""
    assert exchange.received(ROLE[:20], 2.0) == b""
    assert (exchange.stage, exchange.status) == (Stage.KEPT, 0)
    assert exchange.received(ROLE[20:], 2.0) == COMMENT + ROLE
    assert (exchange.stage, exchange.status) == (Stage.FORWARDED, 200)


@pytest.mark.parametrize(
    ("status", "outcomes"),
    [
        (200, ["answered"]),
        (400, ["answered"]),
        (429, ["answered"]),
        (500, ["status_500"]),
        (501, ["answered"]),
        (503, ["status_503"]),
    ],
)
def test_what_an_engine_answers_is_what_its_ejection_is_judged_by(
    status: int, outcomes: list[str]
) -> None:
    life = Life()
    reservation = LoggedReservation(life.log, RANKS[0])
    life.exchange.reserved(reservation, 1.0)
    life.answer(status, JSON)
    life.exchange.received(WHOLE, 3.0)
    life.exchange.completed(4.0)
    assert reservation.outcomes == outcomes


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_engine_that_breaks_off_has_failed_and_one_whose_client_leaves_has_not(
    is_begun: bool,
) -> None:
    for failed in (True, False):
        life = Life()
        reservation = LoggedReservation(life.log, RANKS[0])
        life.exchange.reserved(reservation, 1.0)
        if is_begun:
            life.answer()
            life.exchange.received(event("x"), 2.0)
        if failed:
            life.exchange.failed("reset", 3.0)
        else:
            life.exchange.left(3.0)
        assert reservation.outcomes == ["reset"] * failed


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["one"]}, True),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": "one", "n": 2}, False),
    ],
)
def test_the_hit_of_one_of_several_prompts_or_answers_is_not_counted(
    fields: Any, counts: bool
) -> None:
    life = Life(path="/v1/completions", **fields)
    life.begin(headers=JSON)
    life.exchange.received(WHOLE, 3.0)
    life.exchange.completed(4.0)
    name, _, cached = life.log[-1]
    assert (name, cached is not None) == (("finish" if counts else "uncounted"), counts)
    assert (life.exchange.delivered is not None) == counts


def failing(**error: Any) -> bytes:
    return b"data: " + msgspec.json.encode({"error": {"message": "no", **error}}) + b"\n\n"


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (failing(code=500, type="InternalServerError"), "error_event"),
        (failing(), "error_event"),
        (COMMENT + failing(type="overloaded_error"), "error_event"),
        (b"", "empty"),
        (COMMENT, "empty"),
        (DONE, "empty"),
    ],
)
def test_a_stream_that_is_an_error_or_nothing_is_asked_of_another_engine(
    stream: bytes, reason: str
) -> None:
    life = Life()
    exchange = life.begin()
    forwarded = exchange.received(stream, 2.0) + exchange.completed(3.0)
    assert (forwarded, exchange.stage) == (b"", Stage.WAITING)
    assert [failure.reason for failure in exchange.failures] == [reason]


@pytest.mark.parametrize(
    "error",
    [{"code": 400}, {"code": 404}, {"type": "BadRequestError"}, {"type": "invalid_request_error"}],
)
def test_an_error_that_is_the_requests_own_is_the_clients_to_see(error: dict[str, Any]) -> None:
    exchange = Life().begin()
    assert exchange.received(failing(**error), 2.0) == failing(**error)
    exchange.completed(3.0)
    assert exchange.end is End.EVENT


@pytest.mark.parametrize("has_gone_out", [False, True])
def test_a_whole_answer_that_is_an_error_is_asked_of_another_engine_in_time(
    has_gone_out: bool,
) -> None:
    body = b'{"error":{"message":"out of memory","code":500}}'
    exchange = Life(stream=False).begin(headers=JSON)
    if has_gone_out:
        exchange.passed_on()
    forwarded = exchange.received(body, 2.0) + exchange.completed(3.0)
    assert forwarded == (body if has_gone_out else b"")
    assert exchange.end is (End.EVENT if has_gone_out else None)
    assert [failure.reason for failure in exchange.failures] == ["error_body"]


def test_a_refusal_of_the_ranks_number_is_asked_again_with_another() -> None:
    exchange = Life().begin(400, JSON)
    exchange.received(b'{"error":{"message":"no such rank"}}', 2.0)
    assert (exchange.completed(3.0), exchange.stage) == (b"", Stage.WAITING)
    assert exchange.failures[0].reason == "rank_number"


def test_a_head_that_was_kept_for_long_enough_goes_out_and_then_nothing_is_retried() -> None:
    exchange = Life().begin()
    assert exchange.received(COMMENT, 2.0) == b""
    assert exchange.held() == COMMENT
    assert exchange.stage is Stage.FORWARDED
    assert exchange.received(COMMENT, 3.0) == COMMENT
    assert b"broke off" in exchange.failed("reset", 4.0)
    assert exchange.end is End.BROKEN
    whole = Life().begin(headers=JSON)
    assert (whole.held(), whole.stage) == (b"", Stage.KEPT), "a whole answer has no events"


@pytest.mark.parametrize(
    ("stream", "outcomes", "end"),
    [
        (failing(code=500), ["error_event"], End.EVENT),
        (failing(code=400), [], End.EVENT),
        (event("x") + failing(code=500), ["error_event"], End.EVENT),
        (event("x") + DONE, ["answered"], End.WHOLE),
        (COMMENT, ["empty"], End.BROKEN),
    ],
)
def test_what_a_proxy_has_passed_on_is_not_kept_back_and_still_judges_the_engine(
    stream: bytes, outcomes: list[str], end: End
) -> None:
    life = Life()
    reservation = LoggedReservation(life.log, RANKS[0])
    life.exchange.reserved(reservation, 1.0)
    life.answer()
    life.exchange.passed_on()
    assert life.exchange.received(stream, 2.0) == stream
    life.exchange.completed(3.0)
    assert (reservation.outcomes, life.exchange.end) == (outcomes, end)


def test_a_refusal_of_the_ranks_number_that_was_passed_on_is_noted_and_the_clients() -> None:
    refusal = b'{"error":{"message":"no such rank"}}'
    exchange = Life().begin(400, JSON)
    exchange.passed_on()
    assert exchange.received(refusal, 2.0) + exchange.completed(3.0) == refusal
    assert exchange.end is End.STATUS


def test_a_compressed_stream_passes_piece_by_piece_unread() -> None:
    fields = (*HEAD, (b"content-encoding", b"gzip"))
    exchange = Life().begin(headers=fields)
    assert exchange.received(b"\x1f\x8b", 2.0) == b"\x1f\x8b"
    assert exchange.received(b"more", 2.0) == b"more"
    assert exchange.completed(3.0) == b""
    assert (exchange.end, exchange.usage) == (End.WHOLE, None)


def test_a_stream_without_events_is_forwarded_once_it_is_long() -> None:
    exchange = Life().begin()
    comments = COMMENT * 5000
    assert exchange.received(comments, 2.0) == comments


def test_a_place_receives_its_tokens_each_second_or_each_64() -> None:
    life = forwarded()
    for _ in range(129):
        life.exchange.received(event("x"), 3.0)
    assert life.log[1:] == [("touch", RANKS[0], 64), ("touch", RANKS[0], 128)]
    life.exchange.received(event("x"), 3.9)
    life.exchange.received(event("x"), 4.0)
    assert life.log[3:] == [("touch", RANKS[0], 131)]


def test_the_usage_of_an_endless_answer_is_not_read_and_its_body_not_kept() -> None:
    life = Life(stream=False)
    exchange = life.begin(headers=JSON)
    for _ in range(9):
        exchange.received(b" " * (1 << 20), 3.0)
    exchange.received(WHOLE, 3.0)
    assert exchange._parts == []
    exchange.completed(3.0)
    assert life.log[-1] == ("finish", RANKS[0], None)


def test_messages_end_with_an_error_event_of_their_own_form() -> None:
    life = Life(path="/v1/messages", max_tokens=3)
    life.begin().received(b'event: ping\ndata: {"type": "ping"}\n\n', 2.0)
    last = life.exchange.failed("reset", 3.0)
    assert last.startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error"')


def test_an_error_event_of_the_engine_passes_through_and_ends_without_an_answer() -> None:
    life = forwarded()
    error = b'data: {"error":{"message":"out of memory","code":500}}\n\n'
    assert life.exchange.received(error + DONE, 3.0) == error + DONE
    life.exchange.completed(3.0)
    assert life.exchange.end is End.EVENT
    assert life.log == [("cancel", RANKS[0])]


def stage_of(name: str) -> Life:
    life = Life()
    if name in ("sent", "kept"):
        life.reserve()
    if name == "kept":
        life.answer()
    if name in ("forwarded", "ended"):
        life = forwarded()
    if name == "ended":
        life.exchange.completed(3.0)
    assert life.exchange.stage.value == name
    return life


# What each happening leads to, stage by stage, in the order of the columns.
STAGES = ("waiting", "sent", "kept", "forwarded", "ended")
TABLE = {
    "reserved": ("sent", "sent", "kept", "forwarded", "ended"),
    "answered": ("waiting", "kept", "kept", "forwarded", "ended"),
    "unavailable": ("waiting", "waiting", "kept", "forwarded", "ended"),
    "event": ("waiting", "sent", "forwarded", "forwarded", "ended"),
    "completed": ("waiting", "sent", "waiting", "ended", "ended"),  # a stream without an event
    "failed": ("waiting", "waiting", "waiting", "ended", "ended"),
    "refused": ("ended", "ended", "ended", "ended", "ended"),
    "left": ("ended", "ended", "ended", "ended", "ended"),
}


@pytest.mark.parametrize("happening", TABLE)
@pytest.mark.parametrize("stage", STAGES)
def test_each_happening_at_each_stage(happening: str, stage: str) -> None:
    life = stage_of(stage)
    exchange = life.exchange
    life.log.clear()
    happens: dict[str, Callable[[], object]] = {
        "reserved": lambda: life.reserve(RANKS[1]),
        "answered": life.answer,
        "unavailable": lambda: life.answer(503),
        "event": lambda: exchange.received(ROLE, 4.0),
        "completed": lambda: exchange.completed(4.0),
        "failed": lambda: exchange.failed("reset", 4.0),
        "refused": lambda: exchange.refused(429, 4.0),
        "left": lambda: exchange.left(4.0),
    }
    happens[happening]()
    assert exchange.stage.value == TABLE[happening][STAGES.index(stage)]
    had_place = stage in ("sent", "kept", "forwarded")
    if exchange.stage in (Stage.ENDED, Stage.WAITING) and had_place:
        (ending,) = [entry for entry in life.log if entry[0] in ("finish", "cancel")]
        assert ending[1] == RANKS[0]
        assert life.log[-1] == ending, "the place is ended last"
    if stage == "ended":
        expected = {"reserved": [("cancel", RANKS[1])], "answered": [("close",)]}
        expected["unavailable"] = expected["answered"]
        assert life.log == expected.get(happening, [])
