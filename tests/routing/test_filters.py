"""Filters, drained ranks and wishes: which ranks may be chosen, and what is counted as refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvindex import ConfigurationError, Rank, UnknownRankError
from kvindex.routing import (
    Capacity,
    DuplicateBookingError,
    FilterRequest,
    Labels,
    LoraLoaded,
    NoCandidateError,
    OnlyLive,
    Prefer,
    Router,
)
from tests.routing.fleet import BLOCK, NOTHING, PROMPT, A, B, Followed, fleet, hold, router_of

pytestmark = pytest.mark.unit

HOLDS = {"a": 9, "b": 0}  # so a is chosen where it may be
ZONES = Labels({"a": {"zone": "1", "gpu": "h100"}, "b/0": {"zone": "2"}})


def test_drained_ranks_get_no_new_request_and_keep_the_open_ones() -> None:
    router = router_of(HOLDS)
    booking = router.reserve(PROMPT)
    router.drain("a")
    assert router.drained == {A}
    assert router.select(PROMPT).rank == B
    assert router.load(A).open_requests == 1
    booking.finish()
    router.drain("b")
    with pytest.raises(NoCandidateError, match="drained refuses 2") as caught:
        router.select(PROMPT)
    assert caught.value.refused == {"drained": 2}
    router.undrain("a")
    assert router.select(PROMPT).rank == A
    assert router.statistics()["refused"] == {"drained": 4}


def test_ranks_narrow_the_choice() -> None:
    router = router_of(HOLDS)
    for ranks in (["b/0"], "b", B):
        assert router.select(PROMPT, ranks=ranks).rank == B
    with pytest.raises(UnknownRankError):
        router.select(PROMPT, ranks="nobody")


@pytest.mark.parametrize(
    ("labels", "rank", "preferred"),
    [
        ({}, A, A),
        ({"zone": "2"}, B, B),
        ({"zone": "1", "gpu": "h100"}, A, A),
        ({"zone": "3"}, None, A),
    ],
)
def test_labels_decide_where_the_request_names_some(
    labels: dict[str, str], rank: Rank | None, preferred: Rank
) -> None:
    assert router_of(HOLDS, filters=[Prefer(ZONES)]).select(PROMPT, labels=labels).rank == preferred
    router = router_of(HOLDS, filters=[ZONES])
    if rank is not None:
        assert router.select(PROMPT, labels=labels).rank == rank
        return
    with pytest.raises(NoCandidateError, match="labels refuses 2"):
        router.select(PROMPT, labels=labels)


def test_a_wish_that_leaves_no_rank_is_ignored() -> None:
    followed = Followed(fleet(HOLDS))
    router = Router(followed, filters=[Prefer(ZONES), Capacity(open_requests=1)])
    wish: Any = {"labels": {"zone": "1"}}
    followed.connected = frozenset([B])
    assert router.select(PROMPT, **wish).rank == B  # a's engine is probably down
    followed.connected = frozenset([A, B])
    with router.reserve(PROMPT, **wish) as booking:
        assert booking.rank == A
        assert router.select(PROMPT, **wish).rank == B  # a is full
    router.drain("a")
    assert router.select(PROMPT, **wish).rank == B
    assert router.select(PROMPT, ranks="b", **wish).rank == B


def test_a_rank_that_is_not_connected_is_chosen_only_if_no_other_may_be() -> None:
    followed = Followed(fleet("ab"))
    followed.connected = frozenset([B])
    router = Router(followed)
    assert {router.reserve(PROMPT).rank for _ in range(5)} == {B}
    assert router.statistics()["refused"] == {"disconnected": 5}
    assert router.select(PROMPT, ranks="a").rank == A
    followed.connected = frozenset()
    assert router.reserve(PROMPT).rank == A


def test_a_request_with_a_lora_goes_where_it_is_loaded() -> None:
    router = router_of(HOLDS, filters=[LoraLoaded({"a": {"french"}, "b/0": {"german"}})])
    assert router.select(PROMPT, lora="german").rank == B
    assert router.select(PROMPT).rank == A


@pytest.mark.parametrize(
    "limit", [{"open_requests": 1}, {"queued_tokens": 100}, {"decode_blocks": 10}]
)
def test_full_ranks_are_left_out(limit: dict[str, int]) -> None:
    router = router_of("ab", filters=[Capacity(**limit)])
    assert {router.reserve(PROMPT).rank for _ in range(2)} == {A, B}
    with pytest.raises(NoCandidateError, match="capacity refuses 2"):
        router.reserve(PROMPT)


def test_a_capacity_without_a_limit_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Capacity()


def test_only_live_ranks_are_chosen_where_a_filter_requires_it() -> None:
    followed = Followed(fleet(HOLDS))
    followed.live = frozenset([B])
    assert Router(followed, filters=[OnlyLive()]).select(PROMPT).rank == B


class Own:
    """A filter of the user's own."""

    name = "own"

    def __init__(self, keeps: Callable[[FilterRequest], Iterable[object]]) -> None:
        self.keeps = keeps


@pytest.mark.parametrize("kept", [[A], [True] * 3, b"\1"])
def test_a_filter_that_does_not_answer_for_each_rank_is_refused(kept: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'own' returned [13] values"):
        router_of("ab", filters=[Own(lambda request: kept)]).reserve(PROMPT)


def test_a_filter_that_books_under_the_same_id_leaks_no_load() -> None:
    def book_once(request: FilterRequest) -> bytes | bytearray:
        if not router.statistics()["bookings"]["open"]:
            router.book("a/0", 10, 10, request_id="r")
        return request.live

    router = router_of("a", filters=[Own(book_once)])
    with pytest.raises(DuplicateBookingError):
        router.reserve(PROMPT, request_id="r")
    router.booking("r").finish()
    assert router.load(A) == NOTHING


def test_a_filter_that_calls_the_router_while_ranks_change_mixes_no_rows() -> None:
    def change_ranks(request: FilterRequest) -> bytes | bytearray:
        if B in request.ranks:
            index.remove(B)
            hold(index, Rank("0"), 0)
            assert router.load("a").open_requests == 0
        return request.live

    index = fleet(HOLDS)
    router = Router(index, filters=[Own(change_ranks)])
    decision = router.select(PROMPT, ranks=iter(["a"]))
    assert (decision.rank, decision.tokens) == (A, 9 * BLOCK)
    assert [candidate.rank for candidate in decision.candidates] == [A, B]
    assert router.select(PROMPT, ranks="0").rank == Rank("0")
