"""The trust of all ranks as one value, kept until it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvindex.subscribe import Following, RankStatus
from kvindex.subscribe.sequencer import State
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import ClosedError, NotLiveError, UnknownRankError
from kvindex.wire.rank import Rank, Trust

pytestmark = pytest.mark.unit

A, B = Rank("a", 0), Rank("b", 0)
LATEST = 10.0


def status(rank: Rank, **fields: Any) -> RankStatus:
    known: dict[str, Any] = {
        "state": State.LIVE,
        "reason": "",
        "epoch": 0,
        "seq": 5,
        "complete": True,
        "lag": 0,
        "connected": True,
        "endpoint": "tcp://127.0.0.1:1",
        "replay_endpoint": None,
        "last_event_age": None,
    }
    return RankStatus(rank=rank, **{**known, **fields})


class Board(StatusBoard):
    """A board whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(lambda: self.now, LATEST)
        self.show([status(A), status(B, state=State.SYNCING, complete=False, lag=3)])

    def wait_live(self, ranks: Any, timeout: float = 0.0, *, complete: bool = False) -> None:
        Followed(self).wait_live(timeout, ranks=ranks, complete=complete)


class Followed(Following):
    """Has a board. Rank a is live and rank b is syncing, until the test says otherwise."""

    def __init__(self, board: Board | None = None) -> None:
        self.board = self._board = board or Board()

    @property
    def listeners(self) -> int:
        return len(self.board._listeners)

    def close(self) -> None:
        self.board.end("closed by the test")


@pytest.fixture
def board() -> Board:
    return Board()


def test_trusts_and_live_ranks_are_the_same_objects_while_nothing_in_them_changes(
    board: Board,
) -> None:
    trusts, live = board.trusts(), board.live()
    assert trusts == {A: Trust(State.LIVE, True, 0), B: Trust(State.SYNCING, False, 3)}
    assert live == {A}
    board.show([status(A, seq=6, last_event_age=1.0)])
    assert board.trusts() is trusts
    board.show([status(A, seq=6, lag=2, complete=False), status(B, state=State.SYNCING, lag=9)])
    assert board.live() is live


@pytest.mark.parametrize(
    "change", [{"state": State.REPAIRING}, {"complete": False}, {"lag": 1}], ids=str
)
def test_a_change_that_matters_makes_new_trusts_and_leaves_the_old_as_they_were(
    change: dict[str, Any], board: Board
) -> None:
    before = board.trusts()
    board.show([status(A, **change)])
    assert board.trusts()[A] == status(A, **change).trust
    assert before[A] == Trust(State.LIVE, True, 0)
    with pytest.raises(TypeError):
        before[A] = Trust(State.LIVE, True, 0)  # type: ignore[index]


def test_ranks_that_come_go_live_die_or_are_renamed_show_at_once(board: Board) -> None:
    c = [Rank("c", 0), Rank("c", 1)]
    changes: list[tuple[Callable[[], None], set[Rank], set[Rank]]] = [
        (lambda: None, {A, B}, {A}),
        (lambda: board.show([status(B)]), {A, B}, {A, B}),
        (lambda: board.show([status(A, state=State.REPAIRING)]), {A, B}, {B}),
        (lambda: board.show([status(rank) for rank in c]), {A, B, *c}, {B, *c}),
        (lambda: board.remove(c), {A, B}, {B}),
        (lambda: board.rename([B], {B: Rank("b", 1)}), {A}, set()),
        (lambda: board.show([status(A)]), {A}, {A}),
        (lambda: board.end("closed"), {A}, set()),
    ]
    for change, ranks, live in changes:
        change()
        assert set(board.trusts()) == ranks
        assert board.live() == live
    assert {trust.state for trust in board.trusts().values()} == {State.CLOSED}


def test_what_was_live_is_stale_while_the_thread_is_stuck_and_only_then(board: Board) -> None:
    trusts, live = board.trusts(), board.live()
    board.wait_live([A], 0.0)
    board.now = LATEST
    stuck = board.trusts(), board.live()
    assert stuck == ({A: Trust(State.STALE, True, 0), B: trusts[B]}, frozenset())
    assert board.trusts() is stuck[0]
    assert board.live() is stuck[1]
    with pytest.raises(NotLiveError, match="stuck for 10 s"):
        board.wait_live([A], 0.0)
    board.sign(board.now)
    assert board.trusts()[A] == trusts[A]
    assert board.live() is live
    board.wait_live([A], 0.0)


def test_a_rank_is_found_by_its_text_its_ports_name_and_its_worker_if_that_has_one_rank(
    board: Board,
) -> None:
    names: list[Any] = [A, ("a", 0), "a/0", "a"]
    for name in names:
        assert board.get(name).rank == A
        board.wait_live([name], 0.0)
    moved = Rank("a", 3)
    board.rename([A], {A: moved})
    board.show([status(moved)])
    for name in (A, "a/0", "a/3", "a"):
        assert board.get(name).rank == moved


def test_nothing_is_live_where_there_is_no_rank(board: Board) -> None:
    board.remove([A, B])
    with pytest.raises(NotLiveError, match="no rank is known after 0 s"):
        board.wait_live(None, 0.0)


def test_ranks_and_names_that_a_board_does_not_keep_are_unknown_and_leave_nothing(
    board: Board,
) -> None:
    moved = Rank("a", 3)
    board.rename((), {A: A, B: B})
    reported: list[RankStatus] = []
    _, stop = board.listen(reported.extend)
    board.keep([moved], {A: moved})
    stop()
    assert {s.rank: s.reason.split()[-1] for s in reported} == {A: "name", B: "more"}
    for name in ("a/0", "a/3"):  # its status comes later
        with pytest.raises(UnknownRankError):
            board.get(name)
    board.show([status(moved)])
    assert board.get("a/0").rank == moved
    with pytest.raises(UnknownRankError):
        board.wait_live([B.worker], LATEST)
    for number in range(100):
        board.keep([moved], {A: moved, Rank("b", number): Rank("b", number)})
    assert len(board._names) == 2


def test_all_ranks_of_a_worker_are_waited_for_and_none_of_them_is_the_workers_status(
    board: Board,
) -> None:
    board.show([status(Rank("b", 1))])
    with pytest.raises(NotLiveError) as late:
        board.wait_live("b", 0.0)
    assert list(late.value.reasons) == [B]
    with pytest.raises(UnknownRankError, match=r"'b' stands for several: b/0, b/1"):
        board.get("b")


@pytest.mark.parametrize("name", ["c", "a/1", Rank("a", 1), 7])
def test_what_is_no_rank_is_refused_by_a_status_and_by_a_wait(name: Any) -> None:
    with pytest.raises(UnknownRankError, match="is not known; known: a/0, b/0"):
        Board().get(name)
    with pytest.raises(UnknownRankError, match="is not known"):
        Board().wait_live([name])


def test_a_disowned_board_needs_no_lock_and_is_closed_with_the_reason(board: Board) -> None:
    with board._lock:  # by a thread that a forked child lacks
        board.disown("forked")
    assert {status.reason for status in board.all().values()} == {"forked"}
    assert {status.state for status in board.all().values()} == {State.CLOSED}
    with pytest.raises(ClosedError, match="forked"):
        board.wait_live(None, LATEST)


def test_whoever_insists_on_complete_ranks_waits_for_them(board: Board) -> None:
    board.wait_live([A], 0.0, complete=True)
    board.show([status(A, complete=False, reason="no replay endpoint")])
    board.wait_live([A], 0.0)
    with pytest.raises(NotLiveError, match="a/0: it is live, but not complete: no replay endpoint"):
        board.wait_live([A], 0.0, complete=True)
