"""A subscriber and an index, joined: connect, then ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvindex.errors import UnknownRankError
from kvindex.index import ExtraKeys, Index, Match, fingerprint, read_batch
from kvindex.rank import Rank
from kvindex.subscribe import (
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    State,
    StreamItem,
    Subscriber,
    Worker,
)

__all__ = ["Client", "connect"]


def connect(
    workers: Iterable[Worker] | Worker = (), *, index: Index | None = None, **options: Any
) -> Client:
    """Return a client that subscribes to these workers and answers from what they publish.

    It returns at once; `Client.wait_live` waits until every rank has caught up.

    Args:
        workers: one worker or several; more can be added later.
        index: the index to fill; a new one by default.
        options: settings of `kvindex.subscribe.Subscriber`: `on_loss`, `replay`, `link`,
            `probe_interval`, `stale_after`, `context`, `clock`.

    Raises:
        ConfigurationError: a worker or a setting cannot work.

    Examples:
        >>> from kvindex import Worker, connect
        >>> client = connect([Worker("vllm-0", "tcp://127.0.0.1:5557")])
        >>> client.ranks
        (Rank(worker='vllm-0', dp_rank=0),)
        >>> client.match([1, 2, 3]).best is None
        True
        >>> client.close()
    """
    return Client(workers, index=index, **options)


class Client:
    """Answers which rank holds a prompt, from live events, and says how far to trust it.

    Args: as `connect`.

    Attributes:
        index: what the events have filled.
        subscriber: what receives them.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        workers: Iterable[Worker] | Worker = (),
        *,
        index: Index | None = None,
        **options: Any,
    ) -> None:
        self.index = Index() if index is None else index
        workers = [workers] if isinstance(workers, Worker) else workers
        self.subscriber = Subscriber(
            workers,
            sink=self._on_item,
            on_batch=self.index.apply,
            decode=read_batch,
            fingerprint=fingerprint,
            **options,
        )

    def _on_item(self, item: StreamItem) -> None:
        """Take what is not a batch; those go to the index directly."""
        if isinstance(item, RankAdded):
            self.index.add(item.rank)
            self.index.describe_groups(item.rank, item.groups)
        elif isinstance(item, RankRemoved):
            self.index.remove(item.rank)
        elif isinstance(item, RanksRenamed):
            self.index.rename(dict(item.names))
        elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
            self.index.tree(item.rank).clear()

    # Queries ----------------------------------------------------------------------------------

    def match(
        self,
        token_ids: Any,
        *,
        lora: str | int | None = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        media: Iterable[str] | str | None = None,
        ranks: Iterable[Rank] | None = None,
        block_size: int | None = None,
    ) -> Match:
        """Return how much of a prompt each rank holds, with each rank's trust.

        Args and Raises: as `Index.match`.
        """
        # Before the match: what changes meanwhile makes an answer better than its trust, not worse.
        trusts = self.subscriber.trusts()
        match = self.index.match(
            token_ids,
            lora=lora,
            salt=salt,
            extra_keys=extra_keys,
            media=media,
            ranks=ranks,
            block_size=block_size,
        )
        return match.with_trust(trusts.get)

    def match_many(self, prompts: Iterable[Any], **options: Any) -> list[Match]:
        """Return one `Match` for each prompt; options are those of `match`, for all of them."""
        return [self.match(token_ids, **options) for token_ids in prompts]

    # Workers and their streams ----------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks subscribed to, sorted."""
        return self.subscriber.ranks

    def add(self, worker: Worker) -> None:
        """Subscribe to a further worker's ranks; raises as `Subscriber.add`."""
        self.subscriber.add(worker)

    def remove(self, worker: str) -> None:
        """Unsubscribe from a worker's ranks and forget what they hold.

        Raises:
            UnknownRankError: no such worker.
        """
        self.subscriber.remove(worker)

    def wait_live(self, timeout: float = 5.0, *, ranks: Iterable[Rank] | None = None) -> None:
        """Return once every rank (or each of those given) is live.

        Args:
            timeout: longest wait, in seconds.
            ranks: wait for these only.

        Raises:
            NotLiveError: time ran out (a TimeoutError); it names the ranks, and for each what is
                wrong and what to try.
        """
        self.subscriber.wait_live(timeout, ranks=ranks)

    def wait_for(
        self, condition: Callable[[Mapping[Rank, RankStatus]], bool], timeout: float
    ) -> bool:
        """Wait until the ranks' statuses meet a condition; return whether they did in time.

        Args:
            condition: called with the latest snapshots, whenever one has changed.
            timeout: longest wait, in seconds.
        """
        return self.subscriber.wait_for(condition, timeout)

    def status(self, rank: Rank) -> RankStatus:
        """Return how a rank's stream stands, with its orphans and ignored blocks.

        Raises:
            UnknownRankError: the rank is not subscribed to.
        """
        status = self.subscriber.status(rank)
        try:
            held = self.index.tree(status.rank).statistics()
        except UnknownRankError:
            return status  # the worker is being removed
        return msgspec.structs.replace(status, orphans=held["orphans"], ignored=held["ignored"])

    def statistics(self) -> dict[str, Any]:
        """Return every counter as plain JSON-ready values.

        `ranks`: by `str(rank)` the stream's `RankStatus` and, under `index`, what the index says
        of it; `index`: its totals; `thread`: the subscriber's own counters.
        """
        stream = self.subscriber.statistics()
        index = self.index.statistics()
        by_rank = index.pop("ranks")
        for name, status in stream["ranks"].items():
            held = by_rank.get(name, {})
            status["index"] = held
            status["orphans"] = held.get("orphans", 0)
            status["ignored"] = held.get("ignored", {})
        return {**stream, "index": index}

    def close(self) -> None:
        """Stop receiving; the index stays as it is and can still be asked. Idempotent."""
        self.subscriber.close()

    def __repr__(self) -> str:
        statuses = self.subscriber.statuses().values()
        live = sum(status.state is State.LIVE for status in statuses)
        return f"<Client of {len(statuses)} ranks, {live} live, {len(self.index)} blocks>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
