"""What everything that follows ranks' streams is asked about them: how they stand, and to wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from kvindex.rank import Rank
from kvindex.rank_lookup import RankName
from kvindex.subscribe.status import RankStatus
from kvindex.subscribe.status_board import StatusBoard

__all__ = ["Following"]

_Self = TypeVar("_Self", bound="Following")


class Following(ABC):
    """Base of whatever has a board of ranks' statuses, which another thread writes.

    A context manager: leaving it calls `close`.

    Thread safety: every method may be called from any thread.
    """

    _board: StatusBoard

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks subscribed to, sorted."""
        return self._board.ranks

    def status(self, rank: RankName) -> RankStatus:
        """Return how a rank's stream stands.

        A rank whose batches name another dp_rank than its port is found under both.

        Args:
            rank: a `Rank`, or its text "a/0", or "a" if that worker has one rank only.

        Raises:
            UnknownRankError: the rank is not subscribed to (a KeyError).
        """
        return self._shown(self._board.get(rank))

    def statuses(self) -> dict[Rank, RankStatus]:
        """Return how every rank's stream stands, sorted by rank."""
        return {rank: self._shown(status) for rank, status in self._board.all().items()}

    def wait_live(
        self,
        timeout: float = 5.0,
        *,
        ranks: Iterable[RankName] | str | None = None,
        complete: bool = False,
    ) -> None:
        """Return once every rank (or each of those given) is live.

        Args:
            timeout: longest wait, in seconds.
            ranks: wait for these only.
            complete: insist on every batch since the publisher's first having been applied. It
                takes a replay endpoint that answers, and a buffer that still has all.

        Raises:
            NotLiveError: time ran out (a TimeoutError); it names the ranks, and for each what is
                wrong and what to try.
            UnknownRankError: one of `ranks` is not subscribed to.
            ClosedError: this is closed, or was closed meanwhile.
        """
        self._board.wait_live(ranks, timeout, complete=complete)

    def wait_for(
        self, condition: Callable[[Mapping[Rank, RankStatus]], bool], timeout: float
    ) -> bool:
        """Wait until the ranks' statuses meet a condition; return whether they did in time.

        Args:
            condition: called with the latest statuses, whenever one has changed; it must not
                call this object.
            timeout: longest wait, in seconds.

        Raises:
            ClosedError: this is closed, or was closed meanwhile.
        """
        return self._board.wait_for(condition, timeout)

    @abstractmethod
    def close(self) -> None:
        """Stop following. Idempotent."""

    def _shown(self, status: RankStatus) -> RankStatus:
        """Return a status with what else is known of its rank."""
        return status

    def __enter__(self: _Self) -> _Self:
        self._board.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
