"""A router that is cut short by Ctrl-C: Python raises it at calls, and where C functions return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from kvindex import routing
from kvindex.routing import LocalLoadBoard, Router, contexts
from kvindex.routing.contexts import CONTEXT_LIFE
from kvindex.routing.shared_load import SharedBoard
from tests.interrupts import interrupted
from tests.routing.fleet import BLOCK, NOTHING, PROMPT, A, B, C, Clock, Followed, fleet, hold

pytestmark = pytest.mark.unit

MOMENTS = 2_000  # more than any of these calls has
ROUTING = Path(routing.__file__).parent  # an index is tested by itself


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the prompts here have marks, as long ones do."""
    monkeypatch.setattr(contexts, "_STEP", 4 * BLOCK)
    monkeypatch.setattr(contexts, "_BACK", BLOCK)


class Site:
    """A router over ranks that have just changed, with bookings."""

    def __init__(self, *, gauges: bool = False, shared: bool = False) -> None:
        self.clock = Clock()
        index = fleet({"a": 3, "b": 0})
        followed = Followed(index)
        loads = self.board = SharedBoard() if shared else LocalLoadBoard()
        self.router = Router(
            followed, loads=loads, clock=self.clock, expires_after=60.0, predict=5.0
        )
        self.booking = self.router.reserve(PROMPT, ranks="a", request_id="r")
        self.other = self.router.reserve(PROMPT, ranks="b")
        hold(index, C, 0)
        followed.live = followed.connected = frozenset(index.ranks)
        if gauges:
            self.router.report("b", queued_tokens=5_000)

    def check(self) -> None:
        """Everything goes on, and nothing is booked once all has expired."""
        for rank in (A, B, C):
            assert self.router.select(PROMPT, ranks=[rank]).rank == rank
        self.clock.now += 60.0
        assert [self.router.load(rank) for rank in (A, B, C)] == [NOTHING] * 3
        statistics = self.router.statistics()
        assert statistics["bookings"]["open"] == 0
        self.clock.now += 5.0
        assert self.router.statistics()["predictions"]["blocks"] == 0
        self.clock.now += CONTEXT_LIFE
        assert self.router.statistics()["contexts"]["open"] == 0
        assert not any(self.board.columns(self.clock.now).contexts)
        if isinstance(self.board, SharedBoard):
            assert not any(any(row[2:5]) for row in self.board.all_rows())


CALLS: dict[str, Callable[[Site], object]] = {
    "reserve": lambda site: site.router.reserve(PROMPT),
    "select": lambda site: site.router.select(PROMPT),
    "book": lambda site: site.router.book("c/0", 100, 40),
    "first_token": lambda site: site.booking.first_token(),
    "output": lambda site: site.booking.output(40),
    "finish": lambda site: site.booking.finish(16),
    "cancel": lambda site: site.booking.cancel(),
}


def counts(frame: FrameType, event: str) -> bool:
    return event in ("call", "c_return") and ROUTING in Path(frame.f_code.co_filename).parents


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_moment_leaves_the_load_whole(name: str, shared: bool) -> None:
    for moment in range(1, MOMENTS):
        site = Site(gauges=moment % 2 == 0, shared=shared)
        if not interrupted(partial(CALLS[name], site), moment, counts):
            return
        site.check()
    raise AssertionError("the call never came to its end")
