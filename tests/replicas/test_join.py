"""However joining, renaming, removing and events fall together: no hole, no overlap.

Index, tap and snapshots of the server run as they are, and so does the joiner's copy. Hypothesis
chooses the order of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import Index, Rank
from kvindex.replicas.copy import Copy
from kvindex.replicas.messages import Begin, End, decode_message
from kvindex.replicas.outflow import Part, TakenRank
from kvindex.subscribe import RankAdded, RankLost, RankRemoved, RankRestarted, RanksRenamed
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ClosedError
from tests.examples import examples
from tests.index.index_events import apply, removed, stored
from tests.native_ring import needs_ring
from tests.replicas.hand_server import HandServer

pytestmark = [pytest.mark.property, needs_ring]

RANKS = [Rank(worker, dp_rank) for worker in "ab" for dp_rank in range(2)]
SAVED = 40  # blocks of a rank that was saved
_Result = TypeVar("_Result")


class Server(HandServer):
    """What may happen at a server; ranks that are not there, or are, are left alone."""

    chunk_bytes = 600  # a few entries

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[Rank, int] = {}  # block
        self.serial = 0

    def call(self, function: Callable[[], _Result]) -> _Result:
        result = function()
        self.tap.statuses([])  # the end of the thread's turn
        return result

    def batch(self, rank: Rank) -> None:
        """Store a block to stay, and twice one that goes with the next batch.

        So a batch that is lost, repeated or early leaves a trace, and so does a rank whose settings
        did not come: of these, one removal would leave a copy.
        """
        if rank in self.index.ranks:
            self.serial += 2
            stays, goes = (stored(self.serial + n, parent=None) for n in range(2))
            self.apply(rank, removed(self.last.get(rank, 0)), stays, goes, goes)
            self.last[rank] = self.serial + 1

    def turn_ends(self, rank: Rank) -> None:
        self.show(*({rank} & {*self.index.ranks}), seq=self.serial)

    def add(self, rank: Rank) -> None:
        if rank not in self.index.ranks:
            self.tell(RankAdded(rank, CacheSettings(removals="last")))

    def resume(self, rank: Rank) -> None:
        """Add a rank that begins with what was saved of it, as long as a message or more."""
        if rank not in self.index.ranks:
            self.serial += 1
            saved = Index(seed=self.index.seed)
            apply(saved, rank, stored(*range(SAVED), base=1000 * self.serial))
            section = saved.dump(rank)
            assert len(section) >= self.chunk_bytes
            self.index.restore(rank, section)
            self.tap.restored(rank, section)
            self.tell(RankAdded(rank, CacheSettings(removals="last")))

    def remove(self, rank: Rank) -> None:
        if rank in self.index.ranks:
            self.tell(RankRemoved(rank))

    def restart(self, rank: Rank) -> None:
        if rank in self.index.ranks:
            self.tell(RankRestarted(rank, 1, "ts"))

    def lose(self, rank: Rank) -> None:
        if rank in self.index.ranks:
            self.tell(RankLost(rank, 0, "hole", 1, 2, True))

    def rename(self, rank: Rank) -> None:
        other = RANKS[RANKS.index(rank) ^ 1]
        pairs = [(a, b) for a, b in ((rank, other), (other, rank)) if a in self.index.ranks]
        if pairs:
            self.tell(RanksRenamed(tuple(pairs)))


class Joiner:
    """A replica that takes a step whenever it is told to."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._attached_at: int | None = None
        self._parts: Iterator[Part] | None = None
        self._read = 0
        self.copy = Copy(server.index.seed)
        self.sections: set[Rank] = set()
        self.whole = False

    def attach(self) -> None:
        """What the sender does before each message, too: the ring may begin before `Begin`."""
        if self._attached_at is None:
            self._attached_at = len(self._server.sent)

    def step(self) -> None:
        if self._parts is None:
            self.attach()
            self._parts = self._server.snapshots.parts()
        part = next(self._parts, None)
        if isinstance(part, Begin):
            self.copy.begin(part.number)
            self.sections = set()
        elif isinstance(part, TakenRank):
            assert part.rank not in self.sections, "each once"
            self.sections.add(part.rank)
            self.copy.restore(part.rank, part.number, part.section, part.status)
            assert part.cursor == (None if part.status is None else self._server.cursor(part.rank))
        elif isinstance(part, End):
            self.copy.catchup.end(part.number)
            self.copy.names = dict(part.names)
            assert self.copy.names == self._server.tap.names
            self.whole = True

    def catch_up(self) -> None:
        assert self._attached_at is not None
        messages = self._server.sent[self._attached_at + self._read :]
        self._read += len(messages)
        for body in messages:
            self.copy.apply(decode_message(body))
        self._server.assert_same(self.copy)


EVENTS = st.tuples(
    st.sampled_from(["batch", "turn_ends", "restart", "lose"]), st.sampled_from(RANKS)
)
CHANGES = st.tuples(st.sampled_from(["add", "resume", "remove", "rename"]), st.sampled_from(RANKS))
STEPS = st.tuples(st.sampled_from(["step", "step", "attach"]), st.integers(0, 1))
SCHEDULE = st.lists(st.one_of(EVENTS, CHANGES, STEPS), max_size=50)


@examples(200)
@given(SCHEDULE)
def test_a_joiner_holds_what_the_server_holds_whatever_happens_meanwhile(
    schedule: list[tuple[str, Any]],
) -> None:
    server = Server()
    for rank in RANKS[:3]:
        server.add(rank)
        server.batch(rank)
    joiners = [Joiner(server), Joiner(server)]
    joiners[0].step()
    for happening, which in schedule:
        if happening in ("step", "attach"):
            getattr(joiners[which], happening)()
        else:
            getattr(server, happening)(which)
    for joiner in joiners:
        for _ in range(2 * len(RANKS) + 4):  # no more renaming: it comes to an end
            joiner.step()
        assert joiner.whole
    server.turn_ends(RANKS[0])
    for joiner in joiners:
        joiner.catch_up()
    for rank in RANKS:
        server.batch(rank)
        server.lose(rank)
        server.batch(rank)
        server.batch(rank)
        server.turn_ends(rank)
    for joiner in joiners:
        joiner.catch_up()
        assert joiner.copy.statuses == server.shown


def test_who_joins_at_the_same_time_shares_what_is_taken() -> None:
    server, dumps = Server(), []
    dump = server.index.dump
    server.index.dump = lambda rank: dumps.append(rank) or dump(rank)  # type: ignore
    for rank in RANKS:
        server.add(rank)
        server.batch(rank)
    joiners = [Joiner(server) for _ in range(3)]
    for _ in range(3):  # one begins, and two ranks are taken for it
        joiners[0].step()
    assert len(dumps) == 2
    for joiner in joiners[1:]:
        joiner.step()
    for _ in range(2 * len(RANKS)):
        for joiner in joiners:
            joiner.step()
            server.batch(RANKS[0])
    assert len(dumps) == len(RANKS) + 2, "the two that came later took those two as well, once"
    assert server.snapshots.counters["sections_taken"] == len(dumps)
    server.turn_ends(RANKS[0])
    for joiner in joiners:
        assert joiner.whole
        assert joiner.sections == set(RANKS)
        joiner.catch_up()


def test_nothing_is_kept_for_a_joiner_that_went_away() -> None:
    server = Server()
    for rank in RANKS:
        server.add(rank)
    parts = server.snapshots.parts()
    next(parts)
    assert len(server.snapshots._orders) == 1
    parts.close()
    assert server.snapshots._orders == []

    def closed(function: Callable[[], _Result]) -> _Result:
        raise ClosedError("closed")

    server.call = closed  # type: ignore[method-assign]
    with pytest.raises(ClosedError):
        next(server.snapshots.parts())
    assert server.snapshots._orders == []
