"""The subscriber's thread and all that it owns: sockets, feeds, and the status board.

The thread has no reference to the `Subscriber`. So a dropped `Subscriber` can be collected, and
then ends the thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvindex.subscribe.commands import Commands
from kvindex.subscribe.feed import Feed, FeedSettings
from kvindex.subscribe.roster import Roster
from kvindex.subscribe.status_board import StatusBoard
from kvindex.subscribe.watch import SHOW_AFTER, Watch

logger = logging.getLogger(__name__)

_MAX_SLEEP = 1.0  # seconds: sockets that gave up are looked for at least this often
_SHOWN_AT_ONCE = 128  # feeds whose progress is shown in one turn
_TURN = 0.1  # seconds for all busy feeds, so that calls wait little however many feeds there are


class SubscriberThread:
    """Runs a roster's feeds until `request_stop`.

    Args:
        settings: those of every feed.
        on_stop: called once, on the thread, when it ends.

    Attributes:
        board: the statuses that other threads read.
        commands: the calls of other threads.
        roster: the feeds; owned by the thread.
        stopping: whether `request_stop` was called.
        wake: begins the next turn at once; from any thread.

    Thread safety: `request_stop`, `end`, `is_current` from any thread.
    """

    def __init__(self, settings: FeedSettings, on_stop: Callable[[], None] | None) -> None:
        self._settings = settings
        self._clock = settings.clock
        self._outlet = settings.outlet
        self._counters = settings.counters
        self._on_stop = on_stop
        self._pid = os.getpid()
        self.board = StatusBoard(settings.clock, settings.sequencer.stale_after + 2 * _MAX_SLEEP)
        self._lanes = settings.lanes
        self._collects_after = SHOW_AFTER if self._lanes is None else self._lanes.collects_after
        self._watch = Watch(settings.lanes)
        self.roster = Roster(settings, self._watch, self.board)
        self.wake = self._watch.wake
        self.commands = Commands(self.wake)
        self._waiting: dict[Feed, None] = {}  # feeds that wait for their turn, the longest first
        self._uncollected: dict[Feed, None] = {}  # feeds whose lanes have taken something
        self._collect_at = 0.0  # when that is collected
        self._unshown: dict[Feed, None] = {}  # feeds of which it was collected
        self._woke_at = time.monotonic()
        self._show_at = 0.0  # when it shows in statuses
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
            if not self._outlet.forked:  # else the sockets and feeds are the parent's
                self._stop(reason)

    def statistics(self) -> dict[str, Any]:
        """Return the thread's counters; any thread may call this.

        Of them `turns` are those of waiting and work, `lane_rounds` those that lanes made alone,
        `longest_turn_us` the longest time between two waits, in microseconds, and `lane_batches`
        the batches that lanes took; `lanes` is why there are none, or "in use".
        """
        return {**self._counters, "lanes": self._why_no_lanes() or "in use"}

    def _why_no_lanes(self) -> str:
        if self._lanes is None:
            return "the events do not go into a native index"
        return self._lanes.trouble

    def _turn(self) -> None:
        """Wait for work, and do some of it: calls, then messages, then time-outs."""
        if not self._has_room():
            self._watch.wait_for_call(_MAX_SLEEP)
            self.commands.run()
            self._woke_at = time.monotonic()
            return  # no time-out may count while its reply waits in a socket
        self._note_turn()
        watch, seconds = self._watch, 0.0 if self._waiting else self._sleep()
        collects_after = 0.0 if self._shows_at_once else self._collects_after
        self._waiting.update(watch.wait(seconds, collects_after=collects_after))
        now = self._clock()
        if watch.taken and not self._uncollected:
            self._collect_at = time.monotonic() + self._collects_after
        self._uncollected.update(dict.fromkeys(watch.taken))
        self.board.sign(now)
        self._woke_at = time.monotonic()
        changed = []
        if self.commands.waiting:
            changed += self._collect(now)  # a call finds every stream where the sink stands
            self.commands.run()
        if self.stopping:
            return  # at once: in a child that a command has forked the sockets are the parent's
        if self._shows_at_once:
            shown, self._unshown = self._unshown, {}
            changed += [*shown, *self._collect(now)]
        else:
            changed += self._collect_in_time(now)
        changed += [*self._pump(now), *self._tick(now)]
        self.roster.publish(dict.fromkeys(changed), now)

    @property
    def _shows_at_once(self) -> bool:
        """Whether somebody waits for what lanes take."""
        return self.board.is_awaited or not self._collects_after

    def _note_turn(self) -> None:
        """Count the turn that ends, and those that lanes have made alone."""
        longest = time.monotonic() - self._woke_at
        intake, counters = self._watch.intake, self._counters
        if intake is not None:
            longest = max(longest, intake.longest_round())
            counters["lane_rounds"] = intake.rounds
        counters["turns"] += 1
        counters["longest_turn_us"] = max(counters["longest_turn_us"], int(longest * 1e6))

    def _collect(self, now: float, at_most: int | None = None) -> list[Feed]:
        """Collect what the lanes of all feeds, or of so many, have taken; return the feeds."""
        feeds = list(islice(self._uncollected, at_most))
        for feed in feeds:
            del self._uncollected[feed]
            self.roster.guard(feed, feed.collect, now)
        return feeds

    def _collect_in_time(self, now: float) -> list[Feed]:
        """Collect what has waited for long enough; return the feeds that are to be shown."""
        moment = time.monotonic()
        if moment >= self._collect_at:
            collected = self._collect(now, _SHOWN_AT_ONCE)
            if collected and not self._unshown:
                self._show_at = moment + SHOW_AFTER - self._collects_after
            self._unshown.update(dict.fromkeys(collected))
        if moment < self._show_at:
            return []
        shown, self._unshown = list(self._unshown), {}
        return shown

    def _pump(self, now: float) -> Iterator[Feed]:
        """Pump waiting feeds, at least one; yield those pumped, and leave the rest waiting."""
        roster, until = self.roster, self._clock() + _TURN
        while self._waiting and self._has_room():
            feed = next(iter(self._waiting))
            del self._waiting[feed]
            if not feed.closed:
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
            if feed.closed or feed in self._waiting:
                continue  # its message may have come: pumping it sets its deadline anew
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
        nearest = self.roster.deadlines.nearest
        sleep = _MAX_SLEEP if nearest is None else min(_MAX_SLEEP, nearest - self._clock())
        if self._uncollected:
            sleep = min(sleep, self._collect_at - time.monotonic())
        if self._unshown:
            sleep = min(sleep, self._show_at - time.monotonic())
        return sleep

    def _stop(self, reason: str) -> None:
        """End everything; a failure is logged, and the rest ends all the same."""
        self.commands.close()
        self.stopping = self._outlet.shut = True
        self.roster.close(self._clock())
        self.board.end(reason)
        self._watch.close()
        self._settings.contexts.close()
        if self._on_stop is not None:
            self._on_stop()
