"""A subscriber and an index, joined: connect, then ask."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from kvindex.errors import UnknownRankError
from kvindex.index import ExtraKeys, Fingerprints, Index, Match, read_batch
from kvindex.index.snapshot import SnapshotReader, SnapshotWriter, replaced_file
from kvindex.index.snapshot_section import wrong_backend
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
    Tap,
    Worker,
)

__all__ = ["Client", "connect", "follow_item"]

logger = logging.getLogger(__name__)


def connect(
    workers: Iterable[Worker] | Worker = (),
    *,
    index: Index | None = None,
    resume: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Client:
    """Return a client that subscribes to these workers and answers from what they publish.

    It returns at once; `Client.wait_live` waits until every rank has caught up.

    Args:
        workers: one worker or several; more can be added later.
        index: the index to fill; a new one by default. With `resume` it must have the seed of the
            index that was saved.
        resume: a file that `Client.save` wrote, perhaps in another process. Each rank of `workers`
            that is in it begins with what it held then, and takes by replay what it has missed,
            if its publisher proves to be the same; if not, it begins anew. Other ranks in the file
            are left out. If there is no such file, every rank begins anew.
        options: settings of `kvindex.subscribe.Subscriber`: `on_loss`, `replay`, `link`,
            `probe_interval`, `stale_after`, `context`, `clock`.

    Raises:
        ConfigurationError: a worker or a setting cannot work.
        SnapshotError: the file at `resume` cannot be restored; its `reason` says why.
        OSError: it cannot be read.

    Examples:
        >>> from kvindex import Worker, connect
        >>> client = connect([Worker("vllm-0", "tcp://127.0.0.1:5557")])
        >>> client.ranks
        (Rank(worker='vllm-0', dp_rank=0),)
        >>> client.match([1, 2, 3]).best is None
        True
        >>> client.close()
    """
    return Client(workers, index=index, resume=resume, **options)


class Client:
    """Answers which rank holds a prompt, from live events, and says how far to trust it.

    Args: as `connect`, and
        tap: told of everything that the index takes.

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
        resume: str | os.PathLike[str] | None = None,
        tap: Tap | None = None,
        **options: Any,
    ) -> None:
        workers = [workers] if isinstance(workers, Worker) else list(workers)
        cursors: dict[Rank, bytes] = {}
        if resume is not None:
            names = {worker.worker for worker in workers if isinstance(worker, Worker)}
            index, cursors = _restored(resume, names, index)
        self.index = Index() if index is None else index
        self.subscriber = Subscriber(
            workers,
            fingerprints=Fingerprints(self.index.seed),
            resume=cursors,
            **(_untapped(self.index) if tap is None else _tapped(self.index, tap)),
            **options,
        )
        if cursors:
            self.subscriber.call(lambda: self._drop_unclaimed(cursors))

    def _drop_unclaimed(self, restored: Iterable[Rank]) -> None:
        """Forget what was restored of ranks that no publisher has taken up."""
        for rank in set(restored).difference(self.subscriber.ranks):
            self.index.remove(rank)

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

    def save(self, path: str | os.PathLike[str]) -> tuple[Rank, ...]:
        """Write what every rank holds and how far its stream was applied; return the ranks written.

        `connect(resume=path)` goes on from there. Each rank is taken between two of its batches;
        events of all ranks wait as long as it takes to copy one, queries do not wait. A rank is
        left out where there is nothing to go on from: nothing was applied yet, or its publisher has
        no replay to prove itself by. The file replaces one that is there only when all is written,
        and is readable by its owner alone, since it contains the index's seed.

        Raises:
            OSError: it cannot be written; a file that was there is as before.
            ClosedError: the client is closed.
            BusyError: the subscriber's thread was held for too long.
        """
        written = []
        with replaced_file(path) as file:
            writer = SnapshotWriter(file, backend=self.index.backend, seed=self.index.seed)
            for rank in self.ranks:
                taken = self.subscriber.call(partial(self._take, rank))
                if taken is not None:
                    writer.add(rank, *taken)
                    written.append(rank)
            writer.finish()
        return tuple(written)

    def _take(self, rank: Rank) -> tuple[bytes, bytes] | None:
        """Return section and cursor of a rank, on the subscriber's thread."""
        try:
            cursor = self.subscriber.cursor(rank)
            return None if cursor is None else (self.index.dump(rank), cursor)
        except UnknownRankError:  # removed or renamed just now
            return None

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


def follow_item(index: Index, item: StreamItem) -> None:
    """Have an index take what is not a batch."""
    if isinstance(item, RankAdded):
        index.add(item.rank)
        index.describe_groups(item.rank, item.groups)
    elif isinstance(item, RankRemoved):
        index.remove(item.rank)
    elif isinstance(item, RanksRenamed):
        index.rename(dict(item.names))
    elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
        index.tree(item.rank).clear()


class _Kept(msgspec.Struct, frozen=True, gc=False):
    """A decoded batch with the payload that it was made of."""

    payload: bytes
    batch: Any
    ts: float
    data_parallel_rank: int | None


def _keep(payload: bytes) -> _Kept:
    batch = read_batch(payload)
    return _Kept(payload, batch, batch.ts, batch.data_parallel_rank)


def _untapped(index: Index) -> dict[str, Any]:
    """Return settings of a subscriber that fills an index."""
    return {"sink": partial(follow_item, index), "on_batch": index.apply, "decode": read_batch}


def _tapped(index: Index, tap: Tap) -> dict[str, Any]:
    """Return settings of a subscriber that tells a tap, after the index, what that has taken."""

    def on_item(item: StreamItem) -> None:
        follow_item(index, item)
        tap.item(item)

    def on_batch(rank: Rank, kept: _Kept) -> None:
        index.apply(rank, kept.batch)
        tap.batch(rank, kept.payload)

    return {"sink": on_item, "on_batch": on_batch, "decode": _keep, "on_statuses": tap.statuses}


def _restored(
    path: str | os.PathLike[str], workers: Collection[str], index: Index | None
) -> tuple[Index | None, dict[Rank, bytes]]:
    """Return an index with what a file holds of these workers' ranks, and every cursor in it."""
    cursors: dict[Rank, bytes] = {}
    try:
        reader = SnapshotReader(path)
    except FileNotFoundError:
        logger.info("there is no snapshot at %s: every rank begins anew", os.fspath(path))
        return index, cursors
    with reader:
        if reader.backend != Index.backend:
            raise wrong_backend(reader.backend, Index.backend)
        index = Index(seed=reader.seed) if index is None else index
        restored = []
        try:
            for rank, section, cursor in reader:
                if cursor is not None:
                    cursors[rank] = cursor
                    if rank.worker in workers:
                        restored.append(rank)
                        index.restore(rank, section)
        except BaseException:  # also of the checksum, which comes last
            for rank in restored:
                index.remove(rank)
            raise
    return index, cursors
