"""The feeds of all workers: the subscribed ranks and their names.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from kvindex.subscribe.delivery import RankAdded, RankRemoved, RanksRenamed
from kvindex.subscribe.diagnosis import feed_status
from kvindex.subscribe.feed import Feed, FeedSettings
from kvindex.subscribe.resumption import Claim, Resumption, SavedRanks, resume_ranks, settle
from kvindex.subscribe.status_board import StatusBoard
from kvindex.subscribe.watch import Deadlines, Watch
from kvindex.subscribe.worker import Worker
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank

logger = logging.getLogger(__name__)


class Roster:
    """Adds, names and removes the feeds of workers, and notifies outlet and board.

    Attributes:
        feeds: every feed, by the name of its rank.
        deadlines: when each must be called next.
    """

    def __init__(self, settings: FeedSettings, watch: Watch, board: StatusBoard) -> None:
        self.feeds: dict[Rank, Feed] = {}
        self._by_worker: dict[str, list[Feed]] = {}  # in the order of their ports
        self._by_endpoint: dict[str, list[Feed]] = {}
        self.deadlines: Deadlines[Feed] = Deadlines()
        self._settings = settings
        self._watch = watch
        self._board = board
        self._outlet = settings.outlet
        self._counters = settings.counters
        self._clock = settings.clock

    def guard(self, feed: Feed, step: Callable[[float], bool | None], now: float) -> bool | None:
        """Take one step of a feed; a failure ends that feed, and no other."""
        try:
            return step(now)
        except Exception as error:
            self.fail(feed, error, now)
            return True

    def fail(self, feed: Feed, error: Exception, now: float) -> None:
        """Close a feed because of an unexpected error."""
        logger.error("%s: its stream failed and is closed", feed.rank, exc_info=error)
        self._counters["feed_failures"] += 1
        feed.failure = f"failed: {error!r}; remove the worker and add it again"
        feed.close(now)

    def publish(self, feeds: Iterable[Feed], now: float) -> None:
        """Show others the new statuses of these feeds."""
        statuses = [feed_status(feed, now) for feed in feeds if self.feeds.get(feed.rank) is feed]
        self._board.show(statuses)
        self._outlet.put_statuses(statuses)

    def _publish_named(self, gone: Iterable[Rank], feeds: list[Feed], shown: list[Feed]) -> None:
        """Show others which names a worker's ports have now, with the statuses of these feeds."""
        now = self._clock()
        statuses = [feed_status(feed, now) for feed in shown]
        names = {Rank(feed.worker.name, feed.address.dp_rank): feed.rank for feed in feeds}
        self._board.rename(gone, names, statuses)
        self._outlet.put_statuses(statuses)

    def cursor(self, rank: RankName) -> bytes | None:
        """Return a rank's cursor, encoded, or None where there is nothing to go on from."""
        feed = self.feeds[find_rank(rank, self.feeds)]
        saved = feed.cursor(self._clock())
        return None if saved is None else saved.encode()

    def add(self, worker: Worker, saved: SavedRanks) -> None:
        """Subscribe to a worker's ranks; those with a saved state resume from it.

        A worker that was added before gets these ranks as well.

        Raises:
            ConfigurationError: one of them is subscribed to, or ZeroMQ refuses an endpoint.
        """
        present = {feed.address.dp_rank: feed.rank.dp_rank for feed in self._feeds_of(worker.name)}
        twice = sorted(present.keys() & {address.dp_rank for address in worker.publishers()})
        if twice:
            raise ConfigurationError(
                f"worker {worker.name!r} is subscribed to already, at dp_rank "
                f"{', '.join(map(str, twice))}: remove that first"
            )
        self._warn_of_shared(worker)
        now = self._clock()
        feeds: list[Feed] = []
        try:
            for address in worker.publishers():
                feeds.append(Feed(worker, address, self._settings, self._watch, self._note_named))
            ports = [feed.address.dp_rank for feed in feeds]
            identity = self._settings.fingerprints.identity
            plan, unused = resume_ranks(saved, worker.name, ports, identity, present)
        except BaseException:
            for feed in feeds:
                feed.close(now)
            raise
        self._start(feeds, plan, now)
        self._note_unused(unused)

    def _warn_of_shared(self, worker: Worker) -> None:
        """Warn of endpoints used twice: both users then hold the blocks there, or lose them."""
        for endpoint in worker.shared_endpoints(f.address for f in self._feeds_of(worker.name)):
            logger.warning(
                "worker %r: one rank publishes at %s, where another replays; "
                "set the engine's replay port further away",
                worker.name,
                endpoint,
            )
        others = [
            feed
            for address in worker.publishers()
            for feed in self._by_endpoint.get(address.endpoint, ())
            if feed.worker.topic == worker.topic
        ]
        # One line for a pair, however many ranks they share and workers follow.
        if len({feed.worker.name for feed in others}) == 1:
            logger.warning(
                "workers %r and %r are both at %s%s: is one engine added under two names?",
                others[0].worker.name,
                worker.name,
                others[0].address.endpoint,
                f" (and {len(others) - 1} more ranks)" if len(others) > 1 else "",
            )

    def _start(self, feeds: list[Feed], plan: list[Resumption], now: float) -> None:
        """Start the feeds of one worker's publishers, each as planned."""
        for feed, resumption in zip(feeds, plan, strict=True):
            feed.rename(Rank(feed.worker.name, resumption.dp_rank))
            self.feeds[feed.rank] = feed
            self._by_endpoint.setdefault(feed.address.endpoint, []).append(feed)
            self._outlet.put(RankAdded(feed.rank, feed.worker.cache))
        of_worker = [*self._feeds_of(feeds[0].worker.name), *feeds]
        of_worker.sort(key=lambda feed: feed.address.dp_rank)
        self._by_worker[feeds[0].worker.name] = of_worker
        for feed, resumption in zip(feeds, plan, strict=True):
            self.guard(feed, partial(feed.start, resumption), now)
            self.deadlines.set(feed, feed.deadline)
        self._publish_named((), feeds, feeds)

    def note_strangers(self, cursors: Iterable[Rank]) -> None:
        """Count the cursors of workers that are not subscribed to."""
        workers = {rank.worker for rank in self.feeds}
        self._note_unused(rank for rank in cursors if rank.worker not in workers)

    def _note_unused(self, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            self._counters["cursors_unused"] += 1
            logger.info("%s: there is a cursor, but no publisher to go on with", rank)

    def remove(self, name: RankName) -> None:
        """Unsubscribe from a worker's ranks, or from one rank.

        Raises:
            UnknownRankError: there is none of that name.
        """
        gone = list(self._feeds_of(name)) if isinstance(name, str) else []
        gone = gone or [self.feeds[rank] for rank in self._board.named([name]) or ()]
        now = self._clock()
        for feed in gone:
            feed.close(now)
            del self.feeds[feed.rank]
            self.deadlines.forget(feed)
            self._outlet.put(RankRemoved(feed.rank))
            sharing = self._by_endpoint[feed.address.endpoint]
            sharing.remove(feed)
            if not sharing:
                del self._by_endpoint[feed.address.endpoint]
        self._board.remove([feed.rank for feed in gone])
        worker, removed = gone[0].worker.name, set(gone)
        left = [feed for feed in self._by_worker.pop(worker) if feed not in removed]
        if left:
            self._by_worker[worker] = left
            self._settle_names(left[0])

    def _feeds_of(self, worker: str) -> list[Feed]:
        """Return a worker's feeds, in the order of their ports."""
        return self._by_worker.get(worker, [])

    def close(self, now: float) -> None:
        """Close every feed; a failure is logged, and the other feeds close all the same."""
        for feed in self.feeds.values():
            try:
                feed.close(now)
            except Exception:
                logger.exception("%s: closing it failed", feed.rank)

    def _note_named(self, named: Feed) -> None:
        """Rename ranks, unless a publisher names the dp_rank of its port, and has it: O(1) then."""
        if not named.reader.named == named.rank.dp_rank == named.address.dp_rank:
            self._settle_names(named)

    def _settle_names(self, named: Feed) -> None:
        """Rename a worker's ranks: one of its publishers has named its dp_rank, or has left."""
        feeds = self._feeds_of(named.worker.name)
        dp_ranks = settle([Claim(feed.address.dp_rank, feed.reader.named) for feed in feeds])
        names: dict[Rank, Rank] = {}
        for feed, dp_rank in zip(feeds, dp_ranks, strict=True):
            if feed.reader.named not in (None, dp_rank):
                feed.notes.counters["dp_rank_conflicts"] = 1
                logger.warning(
                    "%s: its batches name dp_rank %d, as another's do", feed.rank, feed.reader.named
                )
            if dp_rank != feed.rank.dp_rank:
                names[feed.rank] = Rank(feed.worker.name, dp_rank)
        if names:
            self._rename(feeds, names)

    def _rename(self, feeds: list[Feed], names: dict[Rank, Rank]) -> None:
        self._board.hold(names)  # two may change places: then neither's status is the other's
        moved = [self.feeds.pop(rank) for rank in names]
        for feed in moved:
            feed.rename(names[feed.rank])
            self.feeds[feed.rank] = feed
        # The index may be busy for long: until then the board shows the old names.
        self._outlet.put(RanksRenamed(tuple(names.items())))
        self._publish_named(names, feeds, moved)
