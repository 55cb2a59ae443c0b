"""Questions to an index whose ranks are followed: answers with each rank's trust."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from kvindex.index import Explanation, Index, Match, MatchOptions, TokenIds
from kvindex.subscribe import Following, RankStatus, State
from kvindex.wire.errors import ClosedError, UnknownRankError
from kvindex.wire.rank import Rank, Trust

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

_JUST_ADDED = Trust(State.CONNECTING, False, 0)


class Answering(Following):
    """The questions about prompts and ranks that `Client` and `Replica` answer.

    Thread safety: every method may be called from any thread.
    """

    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Statuses and statistics can still be read then."""
        return self._closed

    def check_open(self) -> None:
        """Raise ClosedError once `close` was called."""
        if self._closed:
            raise ClosedError(
                f"this {type(self).__name__} is closed, so its answers would be out of date; its"
                " `index` still answers what the ranks held"
            )

    @property
    @abstractmethod
    def index(self) -> Index:
        """The index that the events fill."""

    def match(self, token_ids: TokenIds, **options: Unpack[MatchOptions]) -> Match:
        """Return how much of a prompt each rank holds, with each rank's trust.

        A rank of the index that is not followed, or was not when this began, is "connecting".

        It takes microseconds (docs/benchmarks.md has figures) and waits for nothing but the index's
        lock, so async code calls it directly.

        Args: as `Index.match`; `MatchOptions` has the options.

        Raises: as `Index.match`, and
            ClosedError: this was closed.
        """
        self.check_open()
        # Before the index answers: a change in between makes the answer better than its trust, not
        # worse. A rank that is added in between may hold blocks that are not proven yet.
        return self.index.match(token_ids, trust=self._trust(), **options)

    def match_many(
        self, prompts: Iterable[TokenIds], **options: Unpack[MatchOptions]
    ) -> list[Match]:
        """Return one `Match` for each prompt; options are those of `match`, for all of them.

        Raises: as `match`.
        """
        self.check_open()
        return [self.match(token_ids, **options) for token_ids in prompts]

    def explain(self, token_ids: TokenIds, **options: Unpack[MatchOptions]) -> Explanation:
        """Return, for each rank, where its match ends and why, with notes on its stream.

        For people, and slow: `print` it.

        Args: as `Index.explain`.

        Raises: as `Index.explain`, and
            ClosedError: this was closed.
        """
        self.check_open()
        return self.index.explain(
            token_ids, trust=self._trust(), notes=self._stream_notes, **options
        )

    def live_ranks(self) -> frozenset[Rank]:
        """Return the ranks that are live now.

        The object is the same until a rank is added, removed or changes its state: `is` detects a
        change cheaply. While the thread that follows the streams is stuck, no rank is live.

        Complexity: O(1), and O(ranks) once after a change.
        """
        return self._board.live()

    def connected_ranks(self) -> frozenset[Rank]:
        """Return the ranks whose publisher is connected now: neither "connecting" nor "closed".

        The object is the same until a rank's connection changes, as with `live_ranks`.
        """
        return self._board.connected()

    def _trust(self) -> Callable[[Rank], Trust]:
        """Return how far each rank can be trusted now."""
        trusts = self._board.trusts()
        # The index may have ranks that the board does not: followed by nobody, or just added.
        return lambda rank: trusts.get(rank, _JUST_ADDED)

    def _stream_notes(self, rank: Rank) -> Iterator[str]:
        """Yield the notes of a rank's stream on missing blocks."""
        # Notes of one status: asking the board for each would mix two moments.
        try:
            status = self._board.get(rank)
        except UnknownRankError:
            yield "nobody follows its stream"
            return
        if status.state != State.LIVE:
            reason = f": {status.reason}" if status.reason else ""
            yield f"not live ({status.state}), so this may be out of date{reason}"
        if not status.complete:
            yield "not all of its history was seen: blocks stored in what was missed are unknown"
        if status.losses:
            losses = _times(status.losses, "loss", "losses")
            yield f"{losses}: blocks may have been dropped, or missed"
        if status.restarts:
            times = _times(status.restarts, "time", "times")
            yield f"restarted {times}: what it held before was dropped"

    def _shown(self, status: RankStatus) -> RankStatus:
        try:
            held = self.index.tree(status.rank).statistics()
        except UnknownRankError:
            return status  # its worker is being removed
        return msgspec.structs.replace(status, orphans=held["orphans"], ignored=held["ignored"])

    def statistics(self) -> dict[str, Any]:
        """Return every counter as plain JSON-ready values.

        `ranks`: by `str(rank)` the stream's `RankStatus` and, under `index`, the rank's part of
        `Index.statistics`. `index`: the totals of `Index.statistics`.

        Of a `Client` also `thread`: the subscriber's own counters; and `resume`: of the ranks in a
        saved file, those set `aside` until their worker is added, and their bytes; those
        `restored`, whose own counters show whether they continued; those `dropped`, by reason.

        Of a `Replica` also `replica`: `joins`; `rejoins` and `join_failures` by reason; `messages`
        and `batches` that were applied, `entries_passed` that were in a snapshot already;
        `backlog`: chunks that wait in the ring; `silences` of the server; `following` or not, and
        the `trouble`. If it follows a pool on NATS, `backlog` counts messages of the log, and there
        are the statistics of `kvindex.replicas.nats.following.LogOrigin`.
        """
        index = self.index.statistics()
        by_rank = index.pop("ranks")
        ranks = {}
        for rank, status in self._board.all().items():
            # A rank that is being added has a status before the index has its tree.
            held = by_rank.get(str(rank), {})
            ranks[str(rank)] = {
                **status.to_dict(),
                "index": held,
                "orphans": held.get("orphans", 0),
                "ignored": held.get("ignored", {}),
            }
        return {"ranks": ranks, "index": index, **self._own_statistics()}

    @abstractmethod
    def _own_statistics(self) -> dict[str, Any]:
        """Return what only this class counts."""

    def __repr__(self) -> str:
        statuses = self._board.all().values()
        live = sum(status.state is State.LIVE for status in statuses)
        blocks = len(self.index)
        return f"<{type(self).__name__} of {len(statuses)} ranks, {live} live, {blocks} blocks>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, it belongs to this process: "
            "make one in the other process, or send match.to_dict()"
        )


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
