"""Questions to an index whose ranks are followed by somebody: answers with each rank's trust."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

import msgspec

from kvindex.errors import UnknownRankError
from kvindex.index import (
    Explanation,
    ExtraKeys,
    Index,
    Lora,
    Match,
    MatchOptions,
    TokenIds,
)
from kvindex.rank import Rank, Trust
from kvindex.rank_lookup import RankName
from kvindex.subscribe import RankStatus, State

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

__all__ = ["Answering"]

_JUST_ADDED = Trust(State.CONNECTING, False, 0)


class Answering(ABC):
    """What `Client` and `Replica` are asked about prompts and ranks.

    Thread safety: every method may be called from any thread.
    """

    @property
    @abstractmethod
    def index(self) -> Index:
        """What the events have filled."""

    @abstractmethod
    def _trusts(self) -> Mapping[Rank, Trust]:
        """Return how far each rank can be trusted now, as a snapshot."""

    @abstractmethod
    def _status(self, rank: RankName) -> RankStatus:
        """Return how a rank's stream stands; raises UnknownRankError."""

    def match(
        self,
        token_ids: TokenIds,
        *,
        lora: Lora = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        media: Iterable[str] | str | None = None,
        ranks: Iterable[RankName] | str | None = None,
        block_size: int | None = None,
    ) -> Match:
        """Return how much of a prompt each rank holds, with each rank's trust.

        A rank of the index that nobody follows, or did not yet when this began, is "connecting".

        It takes microseconds (docs/benchmarks.md has figures) and waits for nothing but the index's
        lock, so async code calls it directly.

        Args and Raises: as `Index.match`.
        """
        return self.index.match(
            token_ids,
            lora=lora,
            salt=salt,
            extra_keys=extra_keys,
            media=media,
            ranks=ranks,
            block_size=block_size,
            trust=self._trust(),
        )

    def match_many(
        self, prompts: Iterable[TokenIds], **options: Unpack[MatchOptions]
    ) -> list[Match]:
        """Return one `Match` for each prompt; options are those of `match`, for all of them."""
        return [self.match(token_ids, **options) for token_ids in prompts]

    def explain(self, token_ids: TokenIds, **options: Unpack[MatchOptions]) -> Explanation:
        """Return, for each rank, where its match ends and why, and what its stream says to that.

        For people, and slow: `print` it.

        Args and Raises: as `Index.explain`.
        """
        return self.index.explain(
            token_ids, trust=self._trust(), notes=self._stream_notes, **options
        )

    def _trust(self) -> Callable[[Rank], Trust]:
        """Return how far each rank can be trusted now.

        To be called before the index is asked: what changes in between makes an answer better than
        its trust, not worse. A rank that comes in between may hold what is not proven yet.
        """
        trusts = self._trusts()
        return lambda rank: trusts.get(rank, _JUST_ADDED)

    def _stream_notes(self, rank: Rank) -> Iterator[str]:
        """Yield what a rank's stream says to a missing block."""
        try:
            status = self._status(rank)
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

    def status(self, rank: RankName) -> RankStatus:
        """Return how a rank's stream stands, with its orphans and ignored blocks.

        Raises:
            UnknownRankError: the rank is not subscribed to.

        `rank` may be a text, too: "a/0", or "a" if that worker has one rank only.
        """
        status = self._status(rank)
        try:
            held = self.index.tree(status.rank).statistics()
        except UnknownRankError:
            return status  # its worker is being removed
        return msgspec.structs.replace(status, orphans=held["orphans"], ignored=held["ignored"])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, it belongs to this process: "
            "make one in the other process, or send match.to_dict()"
        )


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
