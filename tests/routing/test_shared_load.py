"""A board that gateways share, without a network: what is sent, counted, refused and dropped."""

from __future__ import annotations

import math
import threading
from typing import Any

import msgspec
import pytest

from kvindex import ClosedError, ConfigurationError, Rank
from kvindex.routing import Load, LocalLoadBoard, Router, SharedLoad
from kvindex.routing.shared_load import (
    MAX_GATEWAY_ROWS,
    MAX_GATEWAYS,
    MAX_LOAD,
    MAX_ROWS,
    SharedBoard,
    decode_load,
    encode_load,
)
from tests.children import in_child
from tests.routing.fleet import NOTHING, A, B, C, Clock, router_of

pytestmark = pytest.mark.unit

ID = "0123456789ab"


def board(clock: Clock, *ranks: Rank, **options: Any) -> SharedBoard:
    made = SharedBoard(**options)
    made.attach(threading.RLock(), clock)
    made.arrange(ranks)
    return made


def send(source: SharedBoard, *targets: SharedBoard, whole: bool = False) -> None:
    """Deliver what a board has to send, as its thread does."""
    for data in source.encode(source.all_rows() if whole else source.changed_rows()):
        for target in targets:
            assert target.receive(data) == ""


def message(number: int, *rows: tuple[Any, ...], gateway: str = ID, version: Any = 1) -> bytes:
    return msgspec.msgpack.encode([version, gateway, number, rows])


def row(rank: Rank, queued: Any = 10, given: Any = 0.0) -> tuple[Any, ...]:
    return (*rank, queued, 1, 2, given)


def test_a_booking_is_seen_elsewhere_and_so_is_its_end(clock: Clock) -> None:
    here, there = board(clock, A, B), board(clock, B, A)
    here.add(A, 100, 1, 7, clock.now)
    there.add(A, 5, 1, 1, clock.now)
    send(here, there)
    assert there.load(A, clock.now) == Load(105, 2, 8)
    assert here.load(A, clock.now) == Load(100, 1, 7)
    here.add(A, -100, -1, -7, clock.now)
    send(here, there)
    assert there.load(A, clock.now) == Load(5, 1, 1)


def test_only_own_load_is_sent_on(clock: Clock) -> None:
    here, there = board(clock, A), board(clock, A)
    here.add(A, 100, 1, 7, clock.now)
    send(here, there)
    assert there.all_rows() == []


def test_a_wake_comes_once_until_rows_are_read(clock: Clock) -> None:
    wakes = []
    loads = board(clock, A, B, wake=lambda: wakes.append(1))
    loads.give(A, 10, clock.now)
    loads.add(A, 10, 1, 1, clock.now)
    loads.add(B, 10, 1, 1, clock.now)
    assert len(wakes) == 1
    assert [tuple(r[:2]) for r in loads.changed_rows()] == [A, B]
    assert loads.changed_rows() == []
    loads.add(B, 10, 1, 1, clock.now)
    assert len(wakes) == 2


def test_a_gauge_is_corrected_by_the_bookings_of_all_gateways(clock: Clock) -> None:
    here, there = board(clock, A), board(clock, A)
    here.add(A, 100, 1, 7, clock.now)
    send(here, there)
    there.report(A, 130, 2, until=clock.now + 0.1)
    assert there.load(A, clock.now) == Load(130, 2, 7)
    here.add(A, 50, 1, 3, clock.now)
    send(here, there)
    assert there.load(A, clock.now) == Load(180, 3, 10)
    assert there.all_rows() == []


def test_tokens_given_elsewhere_weigh_as_if_given_here(clock: Clock) -> None:
    here, there = board(clock, A, B), board(clock, A, B)
    here.give(A, 1_000, clock.now)
    clock.now += 60.0
    send(here, there)
    there.give(B, 500, clock.now)
    given = there.columns(clock.now).given
    assert given[0] == pytest.approx(given[1])
    clock.now += 40_000.0  # more halvings than a double has
    there.give(B, 1, clock.now)
    assert there.columns(clock.now).given.tolist() == [0.0, 1.0]
    here.give(A, 7, clock.now)
    send(here, there)
    assert there.columns(clock.now).given.tolist() == pytest.approx([7.0, 1.0])


def test_a_row_that_is_not_renewed_for_three_seconds_counts_no_more(clock: Clock) -> None:
    here, there = board(clock, A, B), board(clock, A, B)
    here.add(A, 1, 1, 1, clock.now)
    here.give(A, 100, clock.now)
    here.add(B, 2, 1, 1, clock.now)
    send(here, there)
    clock.now += 2.0
    here.add(A, 1, 0, 0, clock.now)
    send(here, there)  # B's row is not in it
    there.expire()
    assert there.load(B, clock.now) == Load(2, 1, 1)
    assert there.statistics()["age"] == 2.0
    clock.now += 1.0
    there.expire()
    assert (there.load(A, clock.now), there.load(B, clock.now)) == (Load(2, 1, 1), NOTHING)
    clock.now += 2.0
    there.expire()
    assert there.load(A, clock.now) == NOTHING
    assert there.columns(clock.now).given.tolist() == [0.0, 0.0]
    statistics = there.statistics()
    assert (statistics["gateways"], statistics["rows"], statistics["age"]) == (0, 0, None)


def test_more_stale_rows_than_one_hold_of_the_lock_are_dropped(clock: Clock) -> None:
    ranks = [Rank("w", number) for number in range(200)]
    there = board(clock, *ranks)
    there.receive(message(1, *map(row, ranks)))
    clock.now += 3.0
    there.expire()
    assert sum(there.columns(clock.now).queued) == 0
    assert there.statistics()["gateways"] == 0


def test_a_clock_that_goes_back_keeps_no_row_for_long(clock: Clock) -> None:
    there = board(clock, A)
    there.receive(message(1, row(A)))
    clock.now -= 500.0
    there.expire()
    assert there.load(A, clock.now) == NOTHING


def test_a_row_that_became_zero_is_sent_for_four_seconds_more(clock: Clock) -> None:
    here, lossy = board(clock, A), board(clock, A)
    here.add(A, 1, 1, 1, clock.now)
    send(here, lossy)
    here.add(A, -1, -1, -1, clock.now)
    here.changed_rows()  # lost
    for _ in range(4):
        assert here.all_rows() == [("a", 0, 0, 0, 0, 0.0)]
        clock.now += 1.0
    assert here.all_rows() == []
    assert here._published == {}


def test_load_of_a_rank_that_is_not_known_takes_no_memory_and_counts_once_it_is(
    clock: Clock,
) -> None:
    here, there = board(clock, A, C), board(clock, A)
    here.add(C, 5, 1, 1, clock.now)
    here.give(C, 100, clock.now)
    send(here, there)
    assert there.load(C, clock.now) == NOTHING
    assert there.columns(clock.now).queued.tolist() == [0.0]
    assert (there.statistics()["rows"], there.statistics()["unknown_ranks"]) == (0, 1)
    there.arrange([A, C])
    send(here, there, whole=True)  # as each second
    assert there.load(C, clock.now) == Load(5, 1, 1)
    assert there.columns(clock.now).given.tolist() == [0.0, 100.0]
    there.arrange([A])
    there.arrange([A, C])
    send(here, there, whole=True)
    assert there.columns(clock.now).given.tolist() == [0.0, 100.0]
    here.add(C, -5, -1, -1, clock.now)
    there.arrange([A])
    send(here, there)
    assert there._booked_absent == {}


def test_own_load_on_a_rank_without_a_row_is_sent_too(clock: Clock) -> None:
    here, there = board(clock, A), board(clock, A)
    here.add(A, 5, 1, 1, clock.now)
    here.arrange([])
    send(here, there, whole=True)
    assert there.load(A, clock.now) == Load(5, 1, 1)


def test_numbers_that_are_missing_are_counted_and_older_ones_ignored(clock: Clock) -> None:
    there = board(clock, A)
    for number, queued in ((5, 10), (9, 20), (7, 30), (9, 40)):
        there.receive(message(number, row(A, queued)))
    assert there.load(A, clock.now).queued_tokens == 20
    statistics = there.statistics()
    assert [statistics[n] for n in ("received", "missed", "late")] == [2, 3, 2]


HOSTILE = {
    "not msgpack": (b"\xc1", "malformed"),
    "text that is no UTF-8": (message(9, row(A)).replace(b"\xa1a", b"\xa1\xff"), "malformed"),
    "deep nesting": (b"\x95\x01\xac" + b"a" * 12 + b"\x09\x90" + b"\x91" * 9_000, "malformed"),
    "a long name": (message(9, row(Rank("a" * 257))), "malformed"),
    "another shape": (msgspec.msgpack.encode({"a": 1}), "malformed"),
    "another version": (msgspec.msgpack.encode([2, "anything"]), "version"),
    "the same shape in another version": (message(9, row(A), version=2), "version"),
    "a version that is text": (message(9, version="1"), "malformed"),
    "a foreign id": (message(9, row(A), gateway="x" * 12), "malformed"),
    "an id with a line end": (message(9, row(A), gateway=ID + "\n"), "malformed"),
    "a number of none": (message(0, row(A)), "malformed"),
    "NaN": (message(9, row(A, math.nan)), "malformed"),
    "NaN given": (message(9, row(A, given=math.nan)), "malformed"),
    "infinity given": (message(9, row(A, given=math.inf)), "malformed"),
    "a negative load": (message(9, row(A, -1)), "malformed"),
    "a load that is too large": (message(9, row(A, MAX_LOAD + 1)), "malformed"),
    "a negative rank": (message(9, row(Rank("a", -1))), "malformed"),
    "more rows than one message has": (message(9, *[row(A)] * (MAX_ROWS + 1)), "malformed"),
    "a million rows": (message(9, *[row(A)] * 1_000_000), "size"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_refused_and_touches_no_gateway(name: str, clock: Clock) -> None:
    there = board(clock, A)
    there.receive(message(8, row(A)))
    data, reason = HOSTILE[name]
    assert there.receive(data) == reason
    assert there.load(A, clock.now) == Load(10, 1, 2)
    statistics = there.statistics()
    assert statistics["refused"] == {reason: 1}
    assert (statistics["received"], statistics["missed"]) == (1, 0)


def test_a_message_with_the_own_id_is_refused() -> None:
    there = board(Clock(), A)
    assert there.receive(message(1, row(A), gateway=there.gateway)) == "own id"
    assert there.statistics()["gateways"] == 0


def test_the_largest_loads_of_others_leave_no_trace_when_they_end(clock: Clock) -> None:
    there = board(clock, A)
    there.add(A, 3, 1, 1, clock.now)
    for number in range(100):
        there.receive(message(1, row(A, MAX_LOAD), gateway=f"{number:012x}"))
    for number in range(100):
        there.receive(message(2, (*A, 0, 0, 0, 0.0), gateway=f"{number:012x}"))
    assert there.load(A, clock.now) == Load(3, 1, 1)


def test_gateways_and_their_rows_are_bounded(clock: Clock) -> None:
    ranks = [Rank("w", number) for number in range(MAX_GATEWAY_ROWS)]
    there = board(clock, A, *ranks)
    for number in range(MAX_GATEWAYS):
        there.receive(message(1, gateway=f"{number:012x}"))
    assert there.receive(message(1, gateway="f" * 12)) == "too many gateways"
    assert there.receive(message(2, row(A), gateway="0" * 12)) == ""
    reasons = [
        there.receive(message(number, *map(row, ranks[first : first + MAX_ROWS]), gateway="0" * 12))
        for number, first in enumerate(range(0, len(ranks), MAX_ROWS), 3)
    ]
    assert set(reasons[:-1]) == {""}
    assert reasons[-1] == "too many rows"
    assert there.load(A, clock.now) == Load(10, 1, 2)


def test_rows_are_split_by_number_and_by_size() -> None:
    rows: Any = [row(Rank("w" * 50, number)) for number in range(2_500)]
    messages = [decode_load(data) for data in encode_load(ID, 7, rows)]
    assert [len(m.rows) for m in messages] == [1_000, 1_000, 500]
    assert [m.number for m in messages] == [7, 8, 9]
    small = list(encode_load(ID, 1, [*rows, ("x" * 900, 0, 1, 1, 1, 0.0)], max_bytes=800))
    assert max(map(len, small)) <= 800
    assert sum(len(decode_load(data).rows) for data in small) == 2_500
    assert [decode_load(data).rows for data in encode_load(ID, 1, [])] == [[]]


def test_an_own_row_with_a_name_that_others_refuse_is_not_sent_but_counted(clock: Clock) -> None:
    long = Rank("ä" * 257)
    here, there = board(clock, A, long), board(clock, A, long)
    for rank in (A, long):
        here.add(rank, 5, 1, 1, clock.now)
    send(here, there)
    assert there.load(A, clock.now) == here.load(long, clock.now) == Load(5, 1, 1)
    assert here.statistics()["unsent"] == 1


def test_a_board_that_shares_no_more_counts_its_own_load_only(clock: Clock) -> None:
    there = board(clock, A)
    there.add(A, 5, 1, 1, clock.now)
    there.report(A, 500, 1, until=clock.now + 0.1)
    there.receive(message(1, row(A)))
    there.end_sharing()
    assert there.receive(message(2, row(A))) == ""
    there.add(A, -5, -1, -1, clock.now)
    clock.now += 1.0
    assert there.load(A, clock.now) == NOTHING
    assert there.columns(clock.now).open.tolist() == [0.0]


def test_a_router_shows_what_its_board_shares() -> None:
    shared = SharedBoard()
    router = router_of("a", loads=shared)
    shared.receive(message(1, row(A)))
    assert router.load("a") == Load(10, 1, 2)
    assert router.statistics()["load"]["rows"] == 1
    assert router_of("a").statistics()["load"] == {}


@pytest.mark.parametrize("kind", [LocalLoadBoard, SharedBoard])
def test_a_board_is_for_one_router(kind: type[LocalLoadBoard]) -> None:
    loads = kind()
    router_of("a", loads=loads)
    with pytest.raises(ConfigurationError, match="one router"):
        router_of("a", loads=loads)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://n1/p", {}),
        ("nats://n1", {}),
        ("nats://n1/p", {"user": "u"}),
        ("nats://n1/p", {"credentials_file": "/nowhere/at.all"}),
        ("tls://n1/p", {"tls_ca_file": "/nowhere/at.all"}),
    ],
)
def test_what_cannot_work_is_refused_at_once(url: str, options: Any) -> None:
    with pytest.raises(ConfigurationError):
        SharedLoad(url, **options)


def test_a_server_that_is_not_there_is_no_error() -> None:
    with SharedLoad("nats://127.0.0.1:1/p") as loads:
        router = router_of("a", loads=loads)
        router.reserve([1, 2, 3])
        assert router.load("a").open_requests == 1
        assert not router.statistics()["load"]["connected"]
    assert router.load("a").open_requests == 1
    assert router.statistics()["load"]["trouble"] == "closed"
    loads.close()


def test_a_forked_child_has_a_board_that_is_closed() -> None:
    with SharedLoad("nats://127.0.0.1:1/p") as loads:
        router: Router = router_of("a", loads=loads)
        router.reserve([1, 2, 3])
        loads.receive(message(1, row(A)))
        assert router.load("a").open_requests == 2

        def check() -> None:
            with pytest.raises(ClosedError, match="forked"):
                router.reserve([1, 2, 3])
            assert "forked" in loads.statistics()["trouble"]
            loads.close()

        assert in_child(check) == 0
        assert router.load("a").open_requests == 2
