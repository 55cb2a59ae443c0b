"""The subscriber: one thread that keeps every rank's stream in order and whole."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal

import msgspec
import zmq

from kvindex.errors import ClosedError, ConfigurationError, NotLiveError, UnknownRankError
from kvindex.rank import Rank
from kvindex.subscribe.config import Replay, SequencerConfig
from kvindex.subscribe.connection import Link
from kvindex.subscribe.feed import Feed, aged
from kvindex.subscribe.state import State
from kvindex.subscribe.status import RankStatus
from kvindex.subscribe.stream import RankAdded, RankRemoved, Sink, StreamItem
from kvindex.subscribe.watch import Watch
from kvindex.subscribe.worker import Worker

__all__ = ["Subscriber"]

logger = logging.getLogger(__name__)

_MAX_SLEEP = 1.0  # seconds: sockets that gave up are looked for at least this often
_COMMAND_TIMEOUT = 30.0  # seconds that a call may wait for the thread, which a slow sink can hold


class Subscriber:
    """Receives every rank's batches in order, repairs gaps, notices restarts, and tells a sink.

    Args:
        workers: the engines to subscribe to; more can be added later.
        sink: called on the subscriber's thread with each `StreamItem`. While it runs nothing else
            is received: a slow sink is made up for by replay, but only as far back as the
            publishers' buffers reach. An exception in it is counted and logged.
        on_loss: "reset" asks the sink to drop a rank's blocks at a loss, "keep" does not.
        replay: patience with replay requests.
        link: socket settings.
        probe_interval: seconds without a batch after which a rank's tail is checked by replay.
        stale_after: seconds without a proof of life after which a rank is stale.
        context: ZeroMQ context; the process-wide one by default, so that inproc endpoints meet.
        clock: monotonic seconds.

    Raises:
        ConfigurationError: a worker or a setting cannot work.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        sink: Sink,
        on_loss: Literal["reset", "keep"] = "reset",
        replay: Replay | None = None,
        link: Link | None = None,
        probe_interval: float = 5.0,
        stale_after: float = 30.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = SequencerConfig(
            has_replay=True,
            on_loss=on_loss,
            replay=replay or Replay(),
            probe_interval=probe_interval,
            stale_after=stale_after,
        )
        self._link = link or Link()
        self._context = context or zmq.Context.instance()
        self._clock = clock
        self._sink = sink
        # Owned by the thread.
        self._feeds: dict[Rank, Feed] = {}
        self._workers: dict[str, Worker] = {}
        self._watch = Watch()
        self._counters: Counter[str] = Counter()
        # Written by the thread, read by all, under the condition's lock.
        self._changed = threading.Condition()
        self._statuses: dict[Rank, RankStatus] = {}
        self._renamed: dict[Rank, Rank] = {}
        self._closed = False
        # Written by all, emptied by the thread.
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._thread = threading.Thread(target=self._run, name="kvindex-subscriber", daemon=True)
        self._thread.start()
        try:
            for worker in workers:
                self.add(worker)
        except BaseException:
            self.close()
            raise

    # Calls from any thread --------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks subscribed to, sorted."""
        with self._changed:
            return tuple(sorted(self._statuses))

    def add(self, worker: Worker) -> None:
        """Subscribe to a further worker's ranks.

        Raises:
            ConfigurationError: its id is taken, or ZeroMQ refuses an endpoint.
            ClosedError: the subscriber is closed.
        """
        self._call(lambda: self._add(worker))

    def remove(self, worker: str) -> None:
        """Unsubscribe from a worker's ranks.

        Raises:
            UnknownRankError: no such worker.
            ClosedError: the subscriber is closed.
        """
        self._call(lambda: self._remove(worker))

    def status(self, rank: Rank) -> RankStatus:
        """Return how a rank's stream stands.

        A rank whose batches name another dp_rank than its port is found under both.

        Raises:
            UnknownRankError: the rank is not subscribed to.
        """
        with self._changed:
            status = self._statuses.get(rank) or self._statuses.get(self._renamed.get(rank, rank))
            if status is None:
                raise UnknownRankError(rank, self._statuses)
        return aged(status, self._clock())

    def find(self, rank: Rank) -> RankStatus | None:
        """Return the latest snapshot of a rank, its `last_event_age` not aged, or None. O(1)."""
        return self._statuses.get(rank)

    def statuses(self) -> dict[Rank, RankStatus]:
        """Return how every rank's stream stands."""
        with self._changed:
            statuses = dict(self._statuses)
        now = self._clock()
        return {rank: aged(status, now) for rank, status in sorted(statuses.items())}

    def statistics(self) -> dict[str, Any]:
        """Return plain JSON-ready values: `ranks` by `str(rank)` as `RankStatus`, and `thread`."""
        ranks = {str(rank): status.to_dict() for rank, status in self.statuses().items()}
        return {"ranks": ranks, "thread": dict(self._counters)}

    def wait_live(self, timeout: float = 5.0, *, ranks: Iterable[Rank] | None = None) -> None:
        """Return once every rank (or each of those given) is live.

        Args:
            timeout: longest wait, in seconds.
            ranks: wait for these only.

        Raises:
            NotLiveError: time ran out (a TimeoutError); it names the ranks, and for each what is
                wrong and what to try.
            UnknownRankError: one of `ranks` is not subscribed to.
            ClosedError: the subscriber is or was closed meanwhile.
        """
        wanted = None if ranks is None else [self.status(rank).rank for rank in ranks]
        if not self.wait_for(lambda statuses: not _late(statuses, wanted), timeout):
            with self._changed:
                raise NotLiveError(timeout, _late(self._statuses, wanted))

    def wait_for(
        self, condition: Callable[[Mapping[Rank, RankStatus]], bool], timeout: float
    ) -> bool:
        """Wait until the ranks' statuses meet a condition; return whether they did in time.

        Args:
            condition: called with the latest snapshots, whenever one has changed.
            timeout: longest wait, in seconds.

        Raises:
            ClosedError: the subscriber is or was closed meanwhile.
        """
        with self._changed:
            met = self._changed.wait_for(lambda: self._closed or condition(self._statuses), timeout)
            if self._closed:
                raise ClosedError("the subscriber was closed")
            return met

    def close(self) -> None:
        """Stop the thread and close every socket; idempotent."""
        if self._thread is threading.current_thread():
            self._stop()
            return
        try:
            self._call(self._stop)
        except ClosedError:
            pass
        self._thread.join(_COMMAND_TIMEOUT)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, command: Callable[[], None]) -> None:
        """Run a command on the thread and wait for it."""
        if self._thread is threading.current_thread():
            command()
            return
        done: Future[None] = Future()
        with self._changed:
            if self._closed:
                raise ClosedError("the subscriber is closed")
            self._commands.append((command, done))
        self._watch.wake()
        done.result(_COMMAND_TIMEOUT)

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException:
            logger.exception("the subscriber's thread failed; it is closed")
            self._counters["thread_failures"] += 1
            self._stop()
        finally:
            self._fail_commands()
            self._watch.close()

    def _turn(self) -> None:
        """Wait for something to do, and do it: commands, then messages, then time-outs."""
        touched: dict[Feed, None] = self._watch.wait(self._sleep())
        now = self._clock()
        self._counters["turns"] += 1
        self._run_commands()
        for feed in touched:
            if not feed.closed:
                feed.pump(now)
        for feed in list(self._feeds.values()):
            if feed.tick(now):
                touched[feed] = None
        self._publish(touched, now)

    def _sleep(self) -> float:
        deadlines = (feed.deadline for feed in self._feeds.values())
        nearest = min((d for d in deadlines if d is not None), default=None)
        return _MAX_SLEEP if nearest is None else min(_MAX_SLEEP, nearest - self._clock())

    def _publish(self, feeds: Iterable[Feed], now: float) -> None:
        """Show others the new statuses of these feeds."""
        with self._changed:
            for feed in feeds:
                if self._feeds.get(feed.rank) is feed:
                    self._statuses[feed.rank] = feed.status(now)
            self._changed.notify_all()

    def _deliver(self, item: StreamItem) -> None:
        try:
            self._sink(item)
        except Exception:
            self._counters["sink_failures"] += 1
            logger.exception("the sink failed on %s", type(item).__name__)

    def _run_commands(self) -> None:
        while self._commands:
            command, done = self._commands.popleft()
            try:
                command()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _fail_commands(self) -> None:
        while self._commands:
            self._commands.popleft()[1].set_exception(ClosedError("the subscriber is closed"))

    def _add(self, worker: Worker) -> None:
        if worker.worker in self._workers:
            raise ConfigurationError(f"worker {worker.worker!r} is subscribed to already")
        for endpoint in worker.shared_endpoints():
            logger.warning(
                "worker %r: one rank publishes at %s, where another replays; "
                "set the engine's replay port further away",
                worker.worker,
                endpoint,
            )
        now = self._clock()
        feeds: list[Feed] = []
        try:
            for address in worker.publishers():
                config = msgspec.structs.replace(
                    self._config, has_replay=address.replay is not None
                )
                feeds.append(
                    Feed(
                        worker,
                        address,
                        config,
                        link=self._link,
                        context=self._context,
                        watch=self._watch,
                        sink=self._deliver,
                        rename=self._rename,
                        now=now,
                    )
                )
        except ConfigurationError:
            for feed in feeds:
                feed.close(now)
            raise
        self._workers[worker.worker] = worker
        for feed in feeds:
            self._feeds[feed.rank] = feed
            self._deliver(RankAdded(feed.rank, feed.groups))
        self._publish(feeds, now)

    def _remove(self, worker: str) -> None:
        if self._workers.pop(worker, None) is None:
            raise UnknownRankError(worker, self._workers)
        now = self._clock()
        for feed in [feed for feed in self._feeds.values() if feed.worker == worker]:
            feed.close(now)
            del self._feeds[feed.rank]
            self._deliver(RankRemoved(feed.rank))
        with self._changed:
            self._statuses = {r: s for r, s in self._statuses.items() if r.worker != worker}
            self._renamed = {r: n for r, n in self._renamed.items() if r.worker != worker}
            self._changed.notify_all()

    def _rename(self, feed: Feed, dp_rank: int) -> bool:
        """Give a feed the dp_rank that its publisher names; say whether that was possible."""
        old, new = feed.rank, Rank(feed.worker, dp_rank)
        other = self._feeds.get(new)
        if other is not None and other.rank_confirmed:
            logger.warning("%s: its batches name dp_rank %d, as another's do", old, dp_rank)
            return False
        moved = {feed: new} if other is None else {feed: new, other: old}
        for moving in moved:
            del self._feeds[moving.rank]
            self._deliver(RankRemoved(moving.rank))
        with self._changed:
            for moving in moved:
                self._statuses.pop(moving.rank, None)
            if other is None:
                self._renamed[old] = new
        for moving, rank in moved.items():
            moving.rank = rank
            self._feeds[rank] = moving
            self._deliver(RankAdded(rank, moving.groups))
        self._publish(moved, self._clock())
        return True

    def _stop(self) -> None:
        now = self._clock()
        for feed in self._feeds.values():
            feed.close(now)
        with self._changed:
            self._closed = True
            for feed in self._feeds.values():
                self._statuses[feed.rank] = feed.status(now)
            self._changed.notify_all()
        self._watch.wake()


def _late(statuses: Mapping[Rank, RankStatus], wanted: list[Rank] | None) -> dict[Rank, str]:
    """Return the ranks that are not live, and why."""
    return {
        rank: status.reason or f"state is {status.state}"
        for rank, status in statuses.items()
        if status.state is not State.LIVE and (wanted is None or rank in wanted)
    }
