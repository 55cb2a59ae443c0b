"""However joining, renaming, removing and events fall together: no hole, no overlap.

The server's tap and snapshots run as they are, over an index that is a dictionary of lists; so does
the joiner's bookkeeping. Hypothesis chooses the order of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.replicas.copy import Catchup
from kvindex.replicas.messages import (
    BatchApplied,
    Begin,
    End,
    Entry,
    RingMessage,
    SectionRestored,
    StatusChanged,
)
from kvindex.replicas.outflow import Part, Snapshots, StreamTap, TakenRank
from kvindex.subscribe import (
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
)
from kvindex.wire.errors import ClosedError, UnknownRankError
from kvindex.wire.rank import Rank
from tests.examples import examples
from tests.native_ring import needs_ring
from tests.replicas.test_catchup import due_of
from tests.replicas.test_tap import whole
from tests.subscribe.test_status_board import status

pytestmark = [pytest.mark.property, needs_ring]

RANKS = [Rank(worker, dp_rank) for worker in "ab" for dp_rank in range(2)]
_Result = TypeVar("_Result")
Held = dict[Rank, list[bytes]]


def move(mapping: dict[Rank, Any], names: dict[Rank, Rank]) -> None:
    mapping.update({names[rank]: mapping.pop(rank) for rank in names if rank in mapping})


def follow(held: Held, shown: dict[Rank, RankStatus], entry: Entry) -> None:
    """What an index and a board make of an entry."""
    if isinstance(entry, BatchApplied):
        held[entry.rank].append(entry.payload)
    elif isinstance(entry, StatusChanged):
        shown[entry.status.rank] = entry.status
    elif isinstance(entry, SectionRestored):
        assert entry.rank not in held
        held[entry.rank] = msgspec.msgpack.decode(entry.section)
    elif isinstance(entry, RankAdded):
        held.setdefault(entry.rank, [])
    elif isinstance(entry, RankRemoved):
        del held[entry.rank]
        shown.pop(entry.rank, None)
    elif isinstance(entry, RanksRenamed):
        names = dict(entry.names)
        move(held, names)
        move(shown, names)
    else:
        held[entry.rank].clear()


class Server:
    """Stands for outflow, index, subscriber and client at once."""

    chunk_bytes = 1500  # a few entries

    def __init__(self) -> None:
        self.index = self.subscriber = self  # as `snapshot` sees a client
        self.held: Held = {}
        self.shown: dict[Rank, RankStatus] = {}
        self.messages: list[RingMessage] = []
        self.tap = StreamTap(self, lambda: None, clock=lambda: 0.0)  # type: ignore[arg-type]
        self.snapshots = Snapshots(self, self.tap, hold=0.0)  # type: ignore[arg-type]  # one at a time
        self.dumps = 0
        self.serial = 0

    # As an Outflow

    def send(self, body: bytes) -> None:
        self.messages.append(whole(body))

    def admit(self) -> None:
        pass

    # As a Client, its Index and its Subscriber

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(sorted(self.held))

    def dump(self, rank: Rank) -> bytes:
        if rank not in self.held:
            raise UnknownRankError(rank)
        self.dumps += 1
        return msgspec.msgpack.encode(self.held[rank])

    def find(self, rank: Rank) -> RankStatus | None:
        return self.shown.get(rank)

    def cursor(self, rank: Rank) -> bytes | None:
        return str(rank).encode()

    def call(self, function: Callable[[], _Result]) -> _Result:
        result = function()
        self.tap.statuses([])  # the end of the thread's turn
        return result

    # What may happen

    def batch(self, rank: Rank) -> None:
        if rank in self.held:
            self.serial += 1
            payload = b"%d" % self.serial * 100
            self.held[rank].append(payload)
            self.tap.batch(rank, payload)

    def turn_ends(self, rank: Rank) -> None:
        shown = [status(rank, seq=self.serial)] if rank in self.held else []
        self.shown.update({status.rank: status for status in shown})
        self.tap.statuses(shown)

    def add(self, rank: Rank) -> None:
        if rank not in self.held:
            self._tell(RankAdded(rank))

    def resume(self, rank: Rank) -> None:
        """Add a rank that begins with what was saved of it, as long as a message or more."""
        if rank not in self.held:
            self.serial += 1
            section = msgspec.msgpack.encode([b"%d" % self.serial * 400])
            follow(self.held, self.shown, SectionRestored(rank, section))
            self.tap.restored(rank, section)
            self._tell(RankAdded(rank))

    def remove(self, rank: Rank) -> None:
        if rank in self.held:
            self._tell(RankRemoved(rank))

    def restart(self, rank: Rank) -> None:
        if rank in self.held:
            self._tell(RankRestarted(rank, 1, "ts"))

    def lose(self, rank: Rank) -> None:
        if rank in self.held:
            self._tell(RankLost(rank, 0, "hole", 1, 2, True))

    def rename(self, rank: Rank) -> None:
        other = RANKS[RANKS.index(rank) ^ 1]
        pairs = [(a, b) for a, b in ((rank, other), (other, rank)) if a in self.held]
        if pairs:
            self._tell(RanksRenamed(tuple(pairs)))

    def _tell(self, item: Any) -> None:
        follow(self.held, self.shown, item)
        self.tap.item(item)


class Joiner:
    """A replica that takes a step whenever it is told to."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._attached_at: int | None = None
        self._parts: Iterator[Part] | None = None
        self._catchup = Catchup()
        self._read = 0
        self.held: Held = {}
        self.shown: dict[Rank, RankStatus] = {}
        self.sections: set[Rank] = set()
        self.whole = False

    def attach(self) -> None:
        """What the sender does before each message, too: the ring may begin before `Begin`."""
        if self._attached_at is None:
            self._attached_at = len(self._server.messages)

    def step(self) -> None:
        if self._parts is None:
            self.attach()
            self._parts = self._server.snapshots.parts()
        part = next(self._parts, None)
        if isinstance(part, Begin):
            self._catchup.begin(part.number)
            self.held, self.shown, self.sections = {}, {}, set()
        elif isinstance(part, TakenRank):
            self._catchup.place(part.rank, part.number)
            assert part.rank not in self.sections, "each once"
            self.sections.add(part.rank)
            self.held[part.rank] = msgspec.msgpack.decode(part.section)
            assert part.cursor == (None if part.status is None else self._server.cursor(part.rank))
            if part.status is not None:
                self.shown[part.rank] = part.status
        elif isinstance(part, End):
            self._catchup.end(part.number)
            assert part.names == list(self._server.tap.names.items())
            self.whole = True

    def catch_up(self) -> None:
        assert self._attached_at is not None
        messages = self._server.messages[self._attached_at + self._read :]
        self._read += len(messages)
        for message in messages:
            for entry in due_of(self._catchup, message):
                follow(self.held, self.shown, entry)


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
    for rank in RANKS:
        server.batch(rank)
        server.lose(rank)
        server.batch(rank)
        server.turn_ends(rank)
    for joiner in joiners:
        joiner.catch_up()
        assert joiner.held == server.held
        assert joiner.shown == server.shown


def test_who_joins_at_the_same_time_shares_what_is_taken() -> None:
    server = Server()
    for rank in RANKS:
        server.add(rank)
        server.batch(rank)
    joiners = [Joiner(server) for _ in range(3)]
    for _ in range(3):  # one begins, and two ranks are taken for it
        joiners[0].step()
    assert server.dumps == 2
    for joiner in joiners[1:]:
        joiner.step()
    for _ in range(2 * len(RANKS)):
        for joiner in joiners:
            joiner.step()
            server.batch(RANKS[0])
    assert server.dumps == len(RANKS) + 2, "the two that came later took those two as well, once"
    assert server.snapshots.counters["sections_taken"] == server.dumps
    server.turn_ends(RANKS[0])
    for joiner in joiners:
        assert joiner.whole
        assert joiner.sections == set(RANKS)
        joiner.catch_up()
        assert joiner.held == server.held


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
