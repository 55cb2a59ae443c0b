"""The subscriber's thread and all that it owns: calls of other threads, feeds and their names.

The thread has no reference to the `Subscriber`. So a dropped `Subscriber` can be collected, and
then ends the thread.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from kvindex.subscribe.delivery import RankAdded, RankRemoved, RanksRenamed
from kvindex.subscribe.diagnosis import feed_status
from kvindex.subscribe.feed import Feed, FeedSettings
from kvindex.subscribe.resumption import Claim, SavedRanks, resume_ranks, settle
from kvindex.subscribe.status_board import StatusBoard
from kvindex.subscribe.watch import SHOW_AFTER, Deadlines, Watch
from kvindex.subscribe.worker import Worker
from kvindex.wire.errors import BusyError, ClosedError, ConfigurationError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank

logger = logging.getLogger(__name__)

_MAX_SLEEP = 1.0  # seconds: sockets that gave up are looked for at least this often
_SHOWN_AT_ONCE = 128  # feeds whose progress is shown in one turn
_TURN = 0.1  # seconds for all busy feeds, so that calls wait little however many feeds there are

Step: TypeAlias = Callable[[float], bool | None]
"""What a feed does at a time."""

_Result = TypeVar("_Result")


class _Call:
    """A command, its answer, and when it began (by `time.monotonic`)."""

    def __init__(self, command: Callable[[], Any]) -> None:
        self.command = command
        self.done: Future[Any] = Future()
        self.begun_at = 0.0


class Commands:
    """A queue of calls with their answers.

    Thread safety: `call` from any thread, all else by the owning thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.running = False  # whether the owning thread carries one out
        self.waiting: deque[_Call] = deque()  # those that it has not begun
        self._wake = wake
        self._lock = threading.Lock()
        self._closed = False

    def call(self, command: Callable[[], _Result], timeout: float) -> _Result:
        """Run a command on the owning thread; return its result, or raise its exception.

        Raises:
            ClosedError: the owner accepts no more commands.
            BusyError: the command was not begun in time, and will not run; or it was begun, and
                has been running for as long.
        """
        call = self._put(command)
        concurrent.futures.wait([call.done], timeout)
        if not call.done.done():
            # Cancelled it cannot run later, when its caller has gone on. Begun, it gets its time.
            if call.done.cancel():
                raise BusyError(timeout)
            left = call.begun_at + timeout - time.monotonic()
            concurrent.futures.wait([call.done], max(0.0, left))
            if not call.done.done():
                raise BusyError(timeout, begun=True)
        result: _Result = call.done.result()
        return result

    def post(self, command: Callable[[], None]) -> None:
        """Enqueue a command from the owning thread itself; failures are logged."""
        self._put(command).done.add_done_callback(_log_failure)

    def _put(self, command: Callable[[], Any]) -> _Call:
        call = _Call(command)
        with self._lock:
            if self._closed:
                raise ClosedError("the subscriber is closed")
            self.waiting.append(call)
        self._wake()
        return call

    def run(self) -> None:
        """Run the queued commands; SystemExit, CancelledError and the like also reach the owner.

        The caller of the command gets every exception.
        """
        self.running = True
        try:
            while self.waiting:
                call = self.waiting.popleft()
                call.begun_at = time.monotonic()
                if not call.done.set_running_or_notify_cancel():
                    continue  # its caller waits no more
                try:
                    call.done.set_result(call.command())
                except BaseException as error:
                    call.done.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
        finally:
            self.running = False

    def close(self) -> None:
        """Refuse the queued commands and all later ones."""
        with self._lock:
            self._closed = True
        while self.waiting:
            done = self.waiting.popleft().done
            if done.set_running_or_notify_cancel():
                done.set_exception(ClosedError("the subscriber is closed"))


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, ClosedError):
        logger.error("a call from within the sink failed: %s", error)


class Roster:
    """The feeds of all workers: adds, names and removes them, and notifies outlet and board."""

    def __init__(self, settings: FeedSettings, watch: Watch, board: StatusBoard) -> None:
        self.feeds: dict[Rank, Feed] = {}  # by the present names of their ranks
        self._by_worker: dict[str, list[Feed]] = {}  # in the order of their ports
        self._by_endpoint: dict[str, list[Feed]] = {}
        self.deadlines: Deadlines[Feed] = Deadlines()
        self._settings = settings
        self._watch = watch
        self._board = board
        self._outlet = settings.outlet
        self._counters = settings.counters
        self._clock = settings.clock

    def guard(self, feed: Feed, step: Step, now: float) -> bool | None:
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
        """Subscribe to a worker's ranks, also to more of one that is there; resume saved ones."""
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
            # All or none: the first ones have sockets already.
            for feed in feeds:
                feed.close(now)
            raise
        # Every rank is announced before the first item of any.
        for feed, resumption in zip(feeds, plan, strict=True):
            feed.rename(Rank(worker.name, resumption.dp_rank))
            self.feeds[feed.rank] = feed
            self._by_endpoint.setdefault(feed.address.endpoint, []).append(feed)
            self._outlet.put(RankAdded(feed.rank, worker.cache))
        of_worker = [*self._feeds_of(worker.name), *feeds]
        self._by_worker[worker.name] = sorted(of_worker, key=lambda feed: feed.address.dp_rank)
        for feed, resumption in zip(feeds, plan, strict=True):
            self.guard(feed, partial(feed.start, resumption), now)
            self.deadlines.set(feed, feed.deadline)
        self._publish_named((), feeds, feeds)
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

    def note_strangers(self, cursors: Iterable[Rank]) -> None:
        """Count the cursors of workers that are not subscribed to."""
        workers = {rank.worker for rank in self.feeds}
        self._note_unused(rank for rank in cursors if rank.worker not in workers)

    def _note_unused(self, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            self._counters["cursors_unused"] += 1
            logger.info("%s: there is a cursor, but no publisher to go on with", rank)

    def remove(self, name: RankName) -> None:
        """Unsubscribe from a worker's ranks, or one rank; UnknownRankError if there is none."""
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

    def _note_named(self, feed: Feed) -> None:
        """Rename ranks, unless a publisher names the dp_rank of its port, and has it: O(1) then."""
        if not feed.reader.named == feed.rank.dp_rank == feed.address.dp_rank:
            self._settle_names(feed)

    def _settle_names(self, feed: Feed) -> None:
        """Rename a worker's ranks: one of its publishers has named its dp_rank, or has left."""
        feeds = self._feeds_of(feed.worker.name)
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
        if not names:
            return
        # Two may change places: then neither's status is the other's.
        self._board.hold(names)
        moved = [self.feeds.pop(rank) for rank in names]
        for feed in moved:
            feed.rename(names[feed.rank])
            self.feeds[feed.rank] = feed
        # The index may be busy for long: until then the board shows the old names.
        self._outlet.put(RanksRenamed(tuple(names.items())))
        self._publish_named(names, feeds, moved)


class Progress:
    """What lanes took, on its way to the statuses.

    ::

        taken ──── collects_after ────► collected ──── SHOW_AFTER in all ────► shown

    Collecting and showing cost more than a batch does, so both wait for more of them. Taps want
    batches early, so those are collected before they are shown.
    """

    def __init__(self, guard: Callable[[Feed, Step, float], object], collects_after: float) -> None:
        self._guard = guard
        self._collects_after = collects_after
        self._taken: dict[Feed, None] = {}
        self._collected: dict[Feed, None] = {}
        # By `time.monotonic`, as nobody's own clock moves while lanes work.
        self._collect_at = self._show_at = 0.0

    @property
    def due(self) -> float:
        """When something is to be collected or shown, by `time.monotonic`."""
        collect_at = self._collect_at if self._taken else math.inf
        return min(collect_at, self._show_at if self._collected else math.inf)

    def note_taken(self, feeds: Iterable[Feed]) -> None:
        """Note that the lanes of these feeds have taken something."""
        feeds = dict.fromkeys(feeds)
        if feeds and not self._taken:
            self._collect_at = time.monotonic() + self._collects_after
        self._taken.update(feeds)

    def collect(self, now: float, at_most: int | None = None) -> list[Feed]:
        """Have the sequencers of all feeds, or of so many, accept what was taken."""
        feeds = list(islice(self._taken, at_most))
        for feed in feeds:
            del self._taken[feed]
            self._guard(feed, feed.collect, now)
        return feeds

    def take_all(self, now: float) -> list[Feed]:
        """Collect everything, and return the feeds to be shown."""
        collected, self._collected = self._collected, {}
        return [*collected, *self.collect(now)]

    def take_due(self, now: float) -> list[Feed]:
        """Collect what has waited for long enough, and return the feeds to be shown."""
        moment = time.monotonic()
        if moment >= self._collect_at:
            # A part of many feeds: their statuses together would take too long for one turn.
            collected = self.collect(now, _SHOWN_AT_ONCE)
            if collected and not self._collected:
                self._show_at = moment + SHOW_AFTER - self._collects_after
            self._collected.update(dict.fromkeys(collected))
        if moment < self._show_at:
            return []
        shown, self._collected = list(self._collected), {}
        return shown


class SubscriberThread:
    """Runs a roster's feeds until `request_stop`.

    Thread safety: `request_stop`, `end`, `disown`, `is_current`, `wake`, `statistics`, and `board`
    and `commands` as they say, from any thread; all else belongs to the thread.
    """

    def __init__(self, settings: FeedSettings, on_stop: Callable[[], None] | None) -> None:
        self._settings = settings
        self._clock = settings.clock
        self._outlet = settings.outlet
        self._counters = settings.counters
        self._on_stop = on_stop
        self._pid = os.getpid()
        self._lanes = settings.lanes
        self._collects_after = SHOW_AFTER if self._lanes is None else self._lanes.collects_after
        self._watch = Watch(settings.lanes)
        # A sleep is no sign that the thread is stuck, nor are two.
        self.board = StatusBoard(settings.clock, settings.sequencer.stale_after + 2 * _MAX_SLEEP)
        self.roster = Roster(settings, self._watch, self.board)
        self.wake = self._watch.wake
        self.commands = Commands(self.wake)
        self._progress = Progress(self.roster.guard, self._collects_after)
        self._waiting: dict[Feed, None] = {}  # feeds that wait for their turn, the longest first
        self._woke_at = time.monotonic()
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="kvindex-subscriber", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._thread is threading.current_thread()

    def request_stop(self) -> None:
        """End the thread soon, without waiting; the collector may call this within any lock."""
        if self._pid == os.getpid():  # a forked child shares its parent's descriptors
            self.stopping = self._outlet.shut = True
            self.wake()

    def end(self, timeout: float) -> None:
        """End the thread, and wait for its end; from the thread itself, do not wait."""
        self.request_stop()
        if not self.is_current and self._pid == os.getpid():
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("the subscriber's sink has not returned; it ends when that does")

    def disown(self, reason: str) -> None:
        """In a forked child, which lacks the thread: show every rank as closed, and end waiting."""
        self.stopping = self._outlet.shut = self._outlet.forked = True
        self.board.disown(reason)

    def statistics(self) -> dict[str, Any]:
        """Return the thread's counters; any thread may call this.

        Of them `turns` are those of waiting and work, `lane_rounds` those that lanes made alone,
        `longest_turn_us` the longest time between two waits, in microseconds, and `lane_batches`
        the batches that lanes took; `lanes` is why there are none, or "in use".
        """
        trouble = "the events do not go into a native index"
        if self._lanes is not None:
            trouble = self._lanes.trouble
        return {**self._counters, "lanes": trouble or "in use"}

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the subscriber was closed"
        try:
            while not self.stopping:
                self._turn()
        except BaseException as error:
            if not self._outlet.forked:
                logger.exception("the subscriber's thread failed; it is closed")
                self._counters["thread_failures"] += 1
                reason = f"the subscriber's thread failed: {error!r}"
        finally:
            # In a forked child the sockets and feeds are the parent's.
            if not self._outlet.forked:
                # Calls first, so that nobody waits for a thread that is ending. The context last
                # of ZeroMQ's, for it waits for all sockets. A failed feed only logs that.
                self.commands.close()
                self.stopping = self._outlet.shut = True
                self.roster.close(self._clock())
                self.board.end(reason)
                self._watch.close()
                self._settings.contexts.close()
                if self._on_stop is not None:
                    self._on_stop()

    def _turn(self) -> None:
        """Wait for work, and do some of it: calls, then messages, then time-outs."""
        if not self._has_room():
            # No time-out may count while its reply waits in a socket. So only calls are served.
            self._watch.wait_for_call(_MAX_SLEEP)
            self.commands.run()
            self._woke_at = time.monotonic()
            return
        self._note_turn()
        watch, progress = self._watch, self._progress
        seconds = 0.0 if self._waiting else self._sleep()
        self._waiting.update(watch.wait(seconds, collects_after=self._collects_after))
        now = self._clock()
        progress.note_taken(watch.taken)
        self.board.sign(now)
        self._woke_at = time.monotonic()
        changed = []
        if self.commands.waiting:
            changed += progress.collect(now)  # a call finds every stream where the sink stands
            self.commands.run()
        # At once: in a child that a command has forked the sockets are the parent's.
        if self.stopping:
            return
        # All at once for a tap that has no patience.
        changed += progress.take_due(now) if self._collects_after else progress.take_all(now)
        changed += [*self._pump(now), *self._tick(now)]
        self.roster.publish(dict.fromkeys(changed), now)

    def _note_turn(self) -> None:
        """Count the turn that ends, and those that lanes have made alone."""
        longest = time.monotonic() - self._woke_at
        intake, counters = self._watch.intake, self._counters
        if intake is not None:
            longest = max(longest, intake.longest_round())
            counters["lane_rounds"] = intake.rounds
        counters["turns"] += 1
        counters["longest_turn_us"] = max(counters["longest_turn_us"], int(longest * 1e6))

    def _pump(self, now: float) -> Iterator[Feed]:
        """Pump waiting feeds, at least one; yield those pumped, and leave the rest waiting."""
        roster, until = self.roster, self._clock() + _TURN
        while self._waiting and self._has_room():
            feed = next(iter(self._waiting))
            del self._waiting[feed]
            if not feed.closed:
                # As `guard`, without its call: this is the way of nearly all messages.
                try:
                    feed.pump(now)
                except Exception as error:
                    roster.fail(feed, error, now)
                roster.deadlines.set(feed, feed.deadline)
                yield feed
            if self._clock() >= until:
                return

    def _tick(self, now: float) -> Iterator[Feed]:
        """Let time pass for feeds, at least one; yield those for which something was due."""
        deadlines, until = self.roster.deadlines, self._clock() + _TURN
        for feed in deadlines.due(now):
            # Its message may have come: pumping it sets its deadline anew.
            if feed.closed or feed in self._waiting:
                continue
            if self._clock() >= until:
                deadlines.set(feed, now)
                continue
            if self.roster.guard(feed, feed.tick, now):
                yield feed
            deadlines.set(feed, feed.deadline)

    def _has_room(self) -> bool:
        """Whether the sink accepts more."""
        has_room = self._outlet.has_room
        return has_room is None or has_room()

    def _sleep(self) -> float:
        """Return how long the thread may wait."""
        nearest = self.roster.deadlines.nearest
        sleep = _MAX_SLEEP if nearest is None else min(_MAX_SLEEP, nearest - self._clock())
        return min(sleep, self._progress.due - time.monotonic())
