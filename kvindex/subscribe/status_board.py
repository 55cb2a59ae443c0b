"""The latest status of each rank, as the subscriber's thread shows it to all others.

Only that thread writes; any thread reads, and may be called when something changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from kvindex.subscribe.delivery import RankStatus
from kvindex.subscribe.sequencer import State
from kvindex.wire.errors import ClosedError, UnknownRankError
from kvindex.wire.rank import Rank, Trust
from kvindex.wire.rank_lookup import RankName, find_ranks

logger = logging.getLogger(__name__)

_NOBODY: frozenset[Rank] = frozenset()
_AWAY = (State.CONNECTING, State.CLOSED)
_REMOVED = "it is not subscribed to any more"
_RENAMED = "its batches give it another name"

Listener: TypeAlias = Callable[[Sequence[RankStatus]], None]


class StatusBoard:
    """The ranks' latest snapshots, and who is called when they change.

    Args:
        clock: the subscriber's clock, in seconds.
        patience: seconds without a sign of the writing thread after which live ranks are shown
            as stale.
        silent: the reason that such a rank then has; "{:.0f}" stands for those seconds.
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
        self._make_lock()
        self._statuses: dict[Rank, RankStatus] = {}
        self._names: dict[Rank, Rank] = {}  # by the rank of a port, its present name
        self._signed_at = clock()
        self._ended: str | None = None
        self._listeners: dict[object, Listener] = {}
        # Built on request, kept until a value in it changes; and whether the thread was stuck then.
        self._trusts: tuple[Mapping[Rank, Trust], bool] | None = None
        # The live ranks and the connected ones; built on request, kept until a state changes.
        self._standing: tuple[frozenset[Rank], frozenset[Rank]] | None = None

    def _make_lock(self) -> None:
        self._lock = threading.RLock()  # held by its own `with`: see BatchQueue

    # By the writing thread --------------------------------------------------------------------

    def sign(self, now: float) -> None:
        """Note that the thread has come round."""
        was_stuck = now - self._signed_at >= self._patience
        self._signed_at = now
        # Ranks that were shown as stale meanwhile, by the clock alone, are live again: whoever
        # waits for that is told by nothing else.
        if was_stuck:
            with self._writing() as changed:
                changed += self._statuses.values()

    def show(self, statuses: Iterable[RankStatus]) -> None:
        """Replace these ranks' snapshots."""
        with self._writing() as changed:
            changed += self._put(statuses)

    def remove(self, ranks: Collection[Rank]) -> None:
        """Forget ranks."""
        with self._writing() as changed:
            changed += self._take_away(ranks, _REMOVED)
            self._names = {r: n for r, n in self._names.items() if n not in ranks}

    def hold(self, ranks: Iterable[Rank]) -> None:
        """Show ranks as not live until `rename`."""
        # The index exchanges what they hold in between: an answer would be another rank's.
        with self._lock:
            held = [
                under_new_name(self._statuses[rank], rank)
                for rank in ranks
                if rank in self._statuses
            ]
        self.show(held)

    # A rank's new name comes with its status: nobody sees the board without the rank.

    def rename(
        self, gone: Iterable[Rank], names: Mapping[Rank, Rank], statuses: Iterable[RankStatus] = ()
    ) -> None:
        """Remove names, note under which name a port's own rank is found now, and show it."""
        with self._writing() as changed:
            changed += self._take_away(gone, _RENAMED)
            self._names.update(names)
            changed += self._put(statuses)

    def keep(
        self,
        ranks: Collection[Rank],
        names: Mapping[Rank, Rank],
        statuses: Iterable[RankStatus] = (),
    ) -> None:
        """Forget all other ranks and names, and show these: the result of any changes."""
        with self._writing() as changed:
            renamed = {rank for port, rank in self._names.items() if port in names}
            gone = self._statuses.keys() - ranks
            changed += self._take_away(gone & renamed, _RENAMED)
            changed += self._take_away(gone - renamed, _REMOVED)
            self._names = dict(names)
            changed += self._put(statuses)

    def _put(self, statuses: Iterable[RankStatus]) -> Iterator[RankStatus]:
        for status in statuses:
            before = self._statuses.get(status.rank)
            # Most statuses differ in `seq` alone. Then both values stay the same objects, by which
            # a router notices in O(1) that nothing has changed.
            if before is None or before.state is not status.state:
                self._trusts = self._standing = None
            elif (before.complete, before.lag) != (status.complete, status.lag):
                self._trusts = None
            self._statuses[status.rank] = status
            # Without listeners nobody looks at phases: this runs for each busy rank, ten times a
            # second.
            if self._listeners and (before is None or _phase(before) != _phase(status)):
                yield status

    def _take_away(self, ranks: Iterable[Rank], reason: str) -> Iterator[RankStatus]:
        self._trusts = self._standing = None
        for rank in ranks:
            status = self._statuses.pop(rank, None)
            if status is not None:
                yield _closed(status, reason)

    def end(self, reason: str, *, shown: str = "closed") -> None:
        """Show every rank as closed for the reason `shown`, and end all waiting."""
        with self._writing() as changed:
            self._ended = reason
            self._trusts = self._standing = None
            for rank, status in self._statuses.items():
                self._statuses[rank] = _closed(status, shown)
            changed += self._statuses.values()

    @contextmanager
    def _writing(self) -> Iterator[list[RankStatus]]:
        """Hold the lock, then call the listeners with the statuses that the writer lists."""
        changed: list[RankStatus] = []
        with self._lock:
            yield changed
            # Now: who listens later finds the change in the statuses of that moment.
            listeners = tuple(self._listeners.values())
        if changed or self._ended is not None:
            _call(listeners, changed)

    def ring(self) -> None:
        """Call the listeners with no status: something else that they wait for has changed."""
        with self._lock:
            listeners = tuple(self._listeners.values())
        _call(listeners, ())

    def disown(self, reason: str) -> None:
        """End, in a forked child: it lacks the writing thread and the thread that held the lock."""
        self._make_lock()  # a thread that the child lacks may hold the old one, for ever
        self._listeners = {}  # they are for threads and event loops of the parent
        self.end(reason, shown=reason)

    # By any thread ----------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks, sorted."""
        with self._lock:
            return tuple(sorted(self._statuses))

    @property
    def ended(self) -> str | None:
        """Why the writing thread has ended; None while it runs."""
        return self._ended

    def listen(self, listener: Listener) -> tuple[list[RankStatus], Callable[[], None]]:
        """Return the present statuses, and register a function for those that change.

        It is called on the writing thread, with the statuses whose state, completeness or epoch
        has changed; with those of removed ranks, as closed; with none when `ring` is called; and a
        last time when the board ends (at once, with none, if it has ended).

        Returns:
            The statuses as they are now, and a function that ends the calls. It waits for no
            lock, and a call that is under way may still come.
        """
        key = object()

        # A finalizer may call it, in a thread that holds the lock: so it takes none.
        def stop() -> None:
            self._listeners.pop(key, None)

        with self._lock:
            self._listeners[key] = listener
            present = list(self._statuses.values())
            has_ended = self._ended is not None
        if has_ended:
            listener(())  # nobody else will: the writing thread has gone
        return present, stop

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
            with self._lock:
                trusts = {rank: status.trust for rank, status in self._statuses.items()}
                if stuck:
                    for rank, trust in trusts.items():
                        if trust.state is State.LIVE:
                            trusts[rank] = trust._replace(state=State.STALE)
                made = self._trusts = MappingProxyType(trusts), stuck
        return made[0]

    def live(self) -> frozenset[Rank]:
        """Return the ranks that are live: the same object until a rank's state changes. O(1) then.

        No rank is live while the thread is stuck, as in `trusts`.
        """
        if self._clock() - self._signed_at >= self._patience:
            return _NOBODY
        return self._stand()[0]

    def connected(self) -> frozenset[Rank]:
        """Return the ranks with a connection, as `live` does, even while the thread is stuck."""
        return self._stand()[1]

    def _stand(self) -> tuple[frozenset[Rank], frozenset[Rank]]:
        standing = self._standing
        if standing is None:
            with self._lock:
                states = {rank: status.state for rank, status in self._statuses.items()}
                standing = self._standing = (
                    frozenset(rank for rank, state in states.items() if state is State.LIVE),
                    frozenset(rank for rank, state in states.items() if state not in _AWAY),
                )
        return standing

    def get(self, rank: RankName) -> RankStatus:
        """Return a rank's snapshot, its `last_event_age` being an age.

        Raises:
            UnknownRankError: there is none, under its own name or its port's.
        """
        with self._lock:
            named = self._find(rank)
            if len(named) > 1:
                raise UnknownRankError(rank, named, ambiguous=True)
            status = self._statuses[named[0]]
        return self.aged(status)

    def all(self) -> dict[Rank, RankStatus]:
        """Return every rank's snapshot, as `get` does."""
        with self._lock:
            statuses = sorted(self._statuses.items())
        return {rank: self.aged(status) for rank, status in statuses}

    def named(self, ranks: Iterable[RankName] | str | None) -> list[Rank] | None:
        """Return the named ranks, None for all; raises UnknownRankError."""
        if ranks is None:
            return None
        with self._lock:
            names = [ranks] if isinstance(ranks, str) else ranks
            return [rank for name in names for rank in self._find(name)]

    def late(self, wanted: list[Rank] | None, complete: bool) -> dict[Rank, str] | None:
        """Return the wanted ranks (None: all) that are not live, and why; None if there are none.

        Where `complete` is wanted, ranks that are not complete count too. Where all ranks are
        wanted and there is no rank, nothing is live: the result is empty.
        """
        late = {}
        with self._lock:
            if wanted is None and not self._statuses:
                return {}
            for rank in self._statuses if wanted is None else map(self._name, wanted):
                status = self._statuses.get(rank)
                if status is None:
                    late[rank] = _REMOVED
                    continue
                status = self._believed(status)
                if status.state is not State.LIVE:
                    late[rank] = status.reason or f"its state is {status.state}"
                elif complete and not status.complete:
                    why = status.reason or "batches were lost, or published before we came"
                    late[rank] = f"it is live, but not complete: {why}"
        return late or None

    def _find(self, name: RankName) -> list[Rank]:
        """Return the ranks of a name, perhaps a port's own; UnknownRankError: there is none."""
        if isinstance(name, str):
            named = find_ranks(name, {**dict.fromkeys(self._statuses), **self._names})
            ranks = [rank for rank in map(self._name, named) if rank in self._statuses]
            if not ranks:  # it is being added, and has no status yet
                raise UnknownRankError(name, self._statuses)
            return list(dict.fromkeys(ranks))
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

    def aged(self, status: RankStatus) -> RankStatus:
        """Return a snapshot with the time of its last event turned into an age."""
        status = self._believed(status)
        if status.last_event_age is None:
            return status
        age = max(0.0, self._clock() - status.last_event_age)
        return msgspec.structs.replace(status, last_event_age=age)


def _call(listeners: Iterable[Listener], changed: Sequence[RankStatus]) -> None:
    # Without the lock: a listener may ask the board, or wait for another thread that does.
    for listener in listeners:
        try:
            listener(changed)
        except Exception:
            logger.exception("a function that is called with changed statuses failed")


def under_new_name(status: RankStatus, name: Rank) -> RankStatus:
    """Return a status as not live under a name, until what the rank of that name holds is known."""
    return msgspec.structs.replace(status, rank=name, state=State.SYNCING, reason=_RENAMED)


def _phase(status: RankStatus) -> tuple[State, bool, int]:
    """Return the fields whose changes are reported to listeners."""
    return status.state, status.complete, status.epoch


def _closed(status: RankStatus, reason: str) -> RankStatus:
    return msgspec.structs.replace(status, state=State.CLOSED, connected=False, reason=reason)
