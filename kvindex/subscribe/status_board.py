"""What the subscriber's thread shows to all others: the latest status of each rank.

Written by that thread alone, read and waited on by any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from kvindex.errors import ClosedError, NotLiveError, UnknownRankError
from kvindex.rank import Rank, Trust
from kvindex.rank_lookup import RankName, find_ranks
from kvindex.sequencer import State
from kvindex.subscribe.status import RankStatus

__all__ = ["StatusBoard"]

Statuses = Mapping[Rank, RankStatus]


class StatusBoard:
    """The ranks' latest snapshots, and waiting for them to change.

    Args:
        clock: the subscriber's clock, in seconds.
        patience: seconds without a sign of the writing thread after which what it called live is
            shown as stale.
        silent: how a rank is then said to be not live; "{:.0f}" stands for those seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        patience: float,
        *,
        silent: str = "the subscriber's thread is stuck for {:.0f} s: is its sink slow?",
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._silent = silent
        self._changed = threading.Condition()
        self._statuses: dict[Rank, RankStatus] = {}
        self._names: dict[Rank, Rank] = {}  # by the rank that a port tells, the one it is
        self._signed_at = clock()
        self._ended: str | None = None
        # Made when asked for, until something in it changes; and whether the thread was stuck then.
        self._trusts: tuple[Mapping[Rank, Trust], bool] | None = None

    # By the writing thread --------------------------------------------------------------------

    def sign(self, now: float) -> None:
        """Note that the thread has come round."""
        self._signed_at = now

    def show(self, statuses: Iterable[RankStatus]) -> None:
        """Replace these ranks' snapshots."""
        with self._changed:
            for status in statuses:
                before = self._statuses.get(status.rank)
                if before is None or before.trust != status.trust:
                    self._trusts = None
                self._statuses[status.rank] = status
            self._changed.notify_all()

    def remove(self, worker: str) -> None:
        """Forget a worker's ranks."""
        with self._changed:
            self._statuses = {r: s for r, s in self._statuses.items() if r.worker != worker}
            self._names = {r: n for r, n in self._names.items() if r.worker != worker}
            self._trusts = None
            self._changed.notify_all()

    def rename(self, gone: Iterable[Rank], names: Mapping[Rank, Rank]) -> None:
        """Take names away, and note under which a port's own rank is found now."""
        with self._changed:
            for rank in gone:
                self._statuses.pop(rank, None)
            self._names.update(names)
            self._trusts = None

    def end(self, reason: str, *, shown: str = "closed") -> None:
        """Show every rank as closed for the reason `shown`, and end all waiting."""
        with self._changed:
            self._ended = reason
            self._trusts = None
            for rank, status in self._statuses.items():
                self._statuses[rank] = msgspec.structs.replace(
                    status, state=State.CLOSED, connected=False, reason=shown
                )
            self._changed.notify_all()

    def disown(self, reason: str) -> None:
        """In a forked child, which lacks the writing thread and whoever held the lock: end."""
        self._changed = threading.Condition()
        self.end(reason, shown=reason)

    # By any thread ----------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks, sorted."""
        with self._changed:
            return tuple(sorted(self._statuses))

    @property
    def ended(self) -> str | None:
        """Why the writing thread has ended; None while it runs."""
        return self._ended

    def check_open(self) -> None:
        """Raise ClosedError, with the reason, once the writing thread has ended."""
        if self._ended is not None:
            raise ClosedError(self._ended)

    def find(self, rank: Rank) -> RankStatus | None:
        """Return a rank's latest snapshot, or None. O(1)."""
        status = self._statuses.get(rank)
        return None if status is None else self._believed(status)

    def trusts(self) -> Mapping[Rank, Trust]:
        """Return how far each rank can be trusted; O(1) until one of them changes."""
        stuck = self._clock() - self._signed_at >= self._patience
        made = self._trusts
        if made is None or made[1] is not stuck:
            with self._changed:
                trusts = {rank: _trust(status, stuck) for rank, status in self._statuses.items()}
                made = self._trusts = MappingProxyType(trusts), stuck
        return made[0]

    def get(self, rank: RankName) -> RankStatus:
        """Return a rank's snapshot, its `last_event_age` being an age.

        Raises:
            UnknownRankError: there is none, under its own name or its port's.
        """
        with self._changed:
            found = self._find(rank)
            if len(found) > 1:
                raise UnknownRankError(rank, found, ambiguous=True)
            status = self._statuses[found[0]]
        return self._aged(status)

    def all(self) -> dict[Rank, RankStatus]:
        """Return every rank's snapshot, as `get` does."""
        with self._changed:
            statuses = sorted(self._statuses.items())
        return {rank: self._aged(status) for rank, status in statuses}

    def wait_for(self, condition: Callable[[Statuses], bool], timeout: float) -> bool:
        """Wait until the snapshots, as of `get`, meet a condition; return whether they did in time.

        Raises:
            ClosedError: the writing thread has ended, or ended meanwhile.
        """
        with self._changed:
            met = self._changed.wait_for(
                lambda: (
                    self._ended is not None
                    or condition(_Snapshots(dict(self._statuses), self._aged))
                ),
                timeout,
            )
            self.check_open()
            return met

    def wait_live(
        self,
        ranks: Iterable[RankName] | str | None,
        timeout: float,
        *,
        complete: bool = False,
    ) -> None:
        """Wait until every rank, or each of these, is live, and complete if that is wanted.

        Raises:
            NotLiveError: time ran out.
            UnknownRankError: one of `ranks` is not known.
            ClosedError: the writing thread has ended, or ended meanwhile.
        """
        wanted = None
        if ranks is not None:
            with self._changed:
                names = [ranks] if isinstance(ranks, str) else ranks
                wanted = [rank for name in names for rank in self._find(name)]
        if not self.wait_for(lambda _: not self._late(wanted, complete), timeout):
            with self._changed:
                raise NotLiveError(timeout, self._late(wanted, complete))

    def _late(self, wanted: list[Rank] | None, complete: bool) -> dict[Rank, str]:
        """Return the ranks that are not live, or not complete, and why."""
        late = {}
        for rank in self._statuses if wanted is None else map(self._name, wanted):
            status = self._statuses.get(rank)
            if status is None:
                late[rank] = "it is not subscribed to any more"
                continue
            status = self._believed(status)
            if status.state is not State.LIVE:
                late[rank] = status.reason or f"its state is {status.state}"
            elif complete and not status.complete:
                why = status.reason or "batches were lost, or published before we came"
                late[rank] = f"it is live, but not complete: {why}"
        return late

    def _find(self, name: RankName) -> list[Rank]:
        """Return the ranks that a name stands for, at least one; a port's own name finds its rank.

        Raises:
            UnknownRankError: there is none.
        """
        if isinstance(name, str):
            found = find_ranks(name, {**dict.fromkeys(self._statuses), **self._names})
            return list(dict.fromkeys(map(self._name, found)))
        rank = self._name(name)
        if rank not in self._statuses:
            raise UnknownRankError(name, self._statuses)
        return [rank]

    def _name(self, rank: Rank) -> Rank:
        return rank if rank in self._statuses else self._names.get(rank, rank)

    def _believed(self, status: RankStatus) -> RankStatus:
        """Return a snapshot as it is, or as stale when the thread has not come round for long."""
        silence = self._clock() - self._signed_at
        if status.state is not State.LIVE or silence < self._patience:
            return status
        return msgspec.structs.replace(
            status, state=State.STALE, reason=self._silent.format(silence)
        )

    def _aged(self, status: RankStatus) -> RankStatus:
        """Return a snapshot with the time of its last event turned into an age."""
        status = self._believed(status)
        if status.last_event_age is None:
            return status
        age = max(0.0, self._clock() - status.last_event_age)
        return msgspec.structs.replace(status, last_event_age=age)


class _Snapshots(Mapping[Rank, RankStatus]):
    """Statuses of one moment that nobody can change, each made true when it is looked at."""

    def __init__(
        self, statuses: dict[Rank, RankStatus], aged: Callable[[RankStatus], RankStatus]
    ) -> None:
        self._statuses = statuses
        self._aged = aged

    def __getitem__(self, rank: Rank) -> RankStatus:
        return self._aged(self._statuses[rank])

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._statuses)

    def __len__(self) -> int:
        return len(self._statuses)


def _trust(status: RankStatus, stuck: bool) -> Trust:
    trust = status.trust
    return trust._replace(state=State.STALE) if stuck and trust.state is State.LIVE else trust
