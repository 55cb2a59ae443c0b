"""The subscriber: one thread that keeps every rank's stream in order and whole."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import zmq

from kvindex.errors import BusyError, ClosedError, ConfigurationError
from kvindex.rank import Rank, Trust
from kvindex.subscribe.commands import Commands
from kvindex.subscribe.config import Replay, SequencerConfig
from kvindex.subscribe.connection import Link
from kvindex.subscribe.feed import Feed
from kvindex.subscribe.outlet import Outlet
from kvindex.subscribe.resumption import SavedRanks, check_saved
from kvindex.subscribe.roster import Roster
from kvindex.subscribe.status import RankStatus
from kvindex.subscribe.status_board import StatusBoard
from kvindex.subscribe.stream import BatchSink, Decode, FingerprintMaker, Sink, StatusSink
from kvindex.subscribe.watch import Watch
from kvindex.subscribe.worker import PublisherAddress, Worker
from kvindex.wire import Fingerprints, decode_batch

__all__ = ["Subscriber"]

logger = logging.getLogger(__name__)

_MAX_SLEEP = 1.0  # seconds: sockets that gave up are looked for at least this often
_COMMAND_TIMEOUT = 30.0  # seconds that a call may wait for the thread, which a slow sink can hold
_NO_CURSORS: Mapping[Rank, bytes] = MappingProxyType({})

_Result = TypeVar("_Result")


class Subscriber:
    """Receives every rank's batches in order, repairs gaps, notices restarts, and tells a sink.

    Args:
        workers: the engines to subscribe to; more can be added later.
        sink: called on the subscriber's thread with each `StreamItem`. While it runs nothing else
            is received: a slow sink is made up for by replay, but only as far back as the
            publishers' buffers reach. An exception in it is counted and logged.
        on_batch: called as `on_batch(rank, batch)` in place of `sink(RankBatch(…))`, for a consumer
            that needs no more than these two; every other item still goes to the sink.
        resume: what `cursor` gave of ranks, perhaps in another process: they go on from there, if
            the publisher proves to be the same. Each of them is told by `RankAdded` and, if it
            does not go on, `RankRestarted`; those that `workers` does not have are counted as
            `cursors_unused`. Or `SavedRanks`, which has the sink restored as ranks are added.
        decode: makes a batch of a payload; what it returns is handed on as it is.
        fingerprints: makes hashes of payloads, by which one that comes again is known.
        on_loss: "reset" asks the sink to drop a rank's blocks at a loss, "keep" does not.
        replay: patience with replay requests.
        link: socket settings.
        probe_interval: seconds without a batch after which a rank's tail is checked by replay.
        stale_after: seconds without a proof of life after which a rank is stale.
        context: ZeroMQ context for every socket. By default the process-wide one for inproc
            endpoints, so that they meet, and one of its own for all others.
        clock: monotonic seconds.
        on_statuses: called on the subscriber's thread with the statuses that others see from now
            on, at the end of each turn (with none, if none is new).
        on_stop: called once, on the subscriber's thread, when that ends for whatever reason.

    Raises:
        ConfigurationError: a worker or a setting cannot work.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        sink: Sink,
        on_batch: BatchSink | None = None,
        resume: Mapping[Rank, bytes] | SavedRanks = _NO_CURSORS,
        decode: Decode = decode_batch,
        fingerprints: FingerprintMaker | None = None,
        on_loss: Literal["reset", "keep"] = "reset",
        replay: Replay | None = None,
        link: Link | None = None,
        probe_interval: float = 5.0,
        stale_after: float = 30.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_statuses: StatusSink | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        _check_settings(replay, link, {"sink": sink, "decode": decode, "on_batch": on_batch})
        saved = check_saved(resume)
        config = SequencerConfig(
            has_replay=True,
            on_loss=on_loss,
            replay=replay or Replay(),
            probe_interval=probe_interval,
            stale_after=stale_after,
        )
        self._shared_context = context or zmq.Context.instance()
        self._own_context = None if context else _large_context()
        self._clock = clock
        self._on_stop = on_stop
        # Written by the thread, read by all.
        self._board = StatusBoard(clock, stale_after + 2 * _MAX_SLEEP)
        # Owned by the thread.
        self._watch = Watch()
        self._counters: Counter[str] = Counter()
        self._outlet = Outlet(sink, on_batch, self._counters, on_statuses)
        self._roster = Roster(
            config,
            link=link or Link(),
            context_for=self._context_for,
            watch=self._watch,
            decode=decode,
            fingerprints=fingerprints or Fingerprints(),
            outlet=self._outlet,
            board=self._board,
            counters=self._counters,
            clock=clock,
        )
        # Set by `close`, read by the thread.
        self._stopping = False
        self._commands = Commands(self._watch.wake)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvindex-subscriber", daemon=True)
        self._thread.start()
        try:
            for worker in workers:
                self.add(worker, resume=saved)
            if isinstance(resume, Mapping):
                self.call(lambda: self._roster.note_strangers(Rank(*rank) for rank in resume))
        except BaseException:
            self.close()
            raise

    # Calls from any thread --------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks subscribed to, sorted."""
        return self._board.ranks

    def add(
        self, worker: Worker, *, resume: Mapping[Rank, bytes] | SavedRanks = _NO_CURSORS
    ) -> None:
        """Subscribe to a further worker's ranks.

        From within the sink it is carried out after the current turn; its failure is logged.

        Args:
            worker: the engine.
            resume: what to go on from, as for the constructor; what is of other workers is left.

        Raises:
            ConfigurationError: it is no `Worker`, its id is taken, `resume` holds no cursors, or
                ZeroMQ refuses an endpoint.
            ClosedError: the subscriber is closed.
            BusyError: a slow sink held the thread for too long.
        """
        if not isinstance(worker, Worker):
            raise ConfigurationError(
                f"expected Worker(NAME, ENDPOINT), not {type(worker).__name__} ({worker!r:.60})"
            )
        saved = check_saved(resume)
        self._call(lambda: self._roster.add(worker, saved))

    def remove(self, worker: str) -> None:
        """Unsubscribe from a worker's ranks.

        From within the sink it is carried out after the current turn; its failure is logged.

        Raises:
            UnknownRankError: no such worker.
            ClosedError: the subscriber is closed.
            BusyError: a slow sink held the thread for too long.
        """
        self._call(lambda: self._roster.remove(worker))

    def call(
        self, function: Callable[[], _Result], *, timeout: float = _COMMAND_TIMEOUT
    ) -> _Result:
        """Return what a function returns that the subscriber's thread calls between two items.

        So whatever the sink keeps and `cursor` stand at the same point of every stream, and nothing
        moves while the function runs; it must not take long, nor wait for the subscriber. What it
        raises is raised here. From within such a function a further one is called at once.

        Args:
            function: called without arguments.
            timeout: longest wait for the thread, in seconds.

        Raises:
            ClosedError: the subscriber is closed.
            BusyError: a slow sink held the thread for too long, or this is called by the sink.
        """
        if self._thread is not threading.current_thread():
            self._check_alive()
            return self._commands.call(function, timeout)
        if not self._commands.running:
            raise BusyError(0.0)
        return function()

    def cursor(self, rank: Rank) -> bytes | None:
        """Return how far a rank's items were given to the sink, for `resume` in another process.

        Within `call` it stands exactly where the sink does. It names the rank's publisher by its
        port, so it finds that again where batches give the rank another name.

        Returns:
            Some kilobytes, or None where there is nothing to go on from: nothing was applied yet,
            or the publisher keeps no batches for replay to prove itself by.

        Raises:
            UnknownRankError: the rank is not subscribed to.
            ClosedError, BusyError: as `call`.
        """
        return self.call(lambda: self._roster.cursor(rank))

    def status(self, rank: Rank) -> RankStatus:
        """Return how a rank's stream stands.

        A rank whose batches name another dp_rank than its port is found under both.

        Raises:
            UnknownRankError: the rank is not subscribed to.
        """
        return self._board.get(rank)

    def find(self, rank: Rank) -> RankStatus | None:
        """Return the latest snapshot of a rank, its `last_event_age` not aged, or None. O(1)."""
        return self._board.find(rank)

    def trusts(self) -> Mapping[Rank, Trust]:
        """Return how far each rank's answers can be trusted, as a snapshot that never changes.

        The same one is returned until a rank's state, completeness or lag changes, or ranks come
        and go: O(1) then, else O(ranks).
        """
        return self._board.trusts()

    def statuses(self) -> dict[Rank, RankStatus]:
        """Return how every rank's stream stands."""
        return self._board.all()

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
        self._board.wait_live(ranks, timeout)

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
        return self._board.wait_for(condition, timeout)

    def close(self) -> None:
        """Stop the thread and close every socket; idempotent.

        It waits for a sink that is running, but no longer than 30 seconds.
        """
        self._stopping = self._outlet.shut = True
        self._watch.wake()
        if self._thread is not threading.current_thread() and self._pid == os.getpid():
            self._thread.join(_COMMAND_TIMEOUT)
            if self._thread.is_alive():
                logger.warning("the subscriber's sink has not returned; it ends when that does")

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, command: Callable[[], None]) -> None:
        """Run a command on the thread and wait for it; from the thread itself, run it later."""
        self._check_alive()
        if self._thread is threading.current_thread():
            self._commands.post(command)
        else:
            self._commands.call(command, _COMMAND_TIMEOUT)

    def _check_alive(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("the subscriber's thread is in the parent of this process")
        self._board.check_open()

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the subscriber was closed"
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            logger.exception("the subscriber's thread failed; it is closed")
            self._counters["thread_failures"] += 1
            reason = f"the subscriber's thread failed: {error!r}"
        finally:
            self._stop(reason)

    def _turn(self) -> None:
        """Wait for something to do, and do it: commands, then messages, then time-outs."""
        roster = self._roster
        touched: dict[Feed, None] = self._watch.wait(self._sleep())
        now = self._clock()
        self._board.sign(now)
        self._counters["turns"] += 1
        self._commands.run()
        for feed in touched:
            if not feed.closed:
                roster.guard(feed, feed.pump, now)
                roster.deadlines.set(feed, feed.deadline)
        for feed in roster.deadlines.due(now):
            if not feed.closed:
                if roster.guard(feed, feed.tick, now):
                    touched[feed] = None
                roster.deadlines.set(feed, feed.deadline)
        roster.publish(touched, now)

    def _sleep(self) -> float:
        nearest = self._roster.deadlines.nearest
        return _MAX_SLEEP if nearest is None else min(_MAX_SLEEP, nearest - self._clock())

    def _context_for(self, address: PublisherAddress) -> zmq.Context[zmq.Socket[bytes]]:
        endpoints = (address.endpoint, address.replay or "")
        if self._own_context is None or any(e.startswith("inproc://") for e in endpoints):
            return self._shared_context
        return self._own_context

    def _stop(self, reason: str) -> None:
        """End everything; what fails on the way is logged, and the rest ends all the same."""
        self._commands.close()
        self._stopping = self._outlet.shut = True
        self._roster.close(self._clock())
        self._board.end(reason)
        self._watch.close()
        if self._own_context is not None:
            self._own_context.destroy(linger=0)
        if self._on_stop is not None:
            self._on_stop()


def _check_settings(replay: object, link: object, calls: dict[str, object]) -> None:
    if replay is not None and not isinstance(replay, Replay):
        raise ConfigurationError(
            f"replay must be Replay(timeout=…, attempts=…), not {replay!r}; "
            "the replay endpoint belongs to the Worker"
        )
    if link is not None and not isinstance(link, Link):
        raise ConfigurationError(f"link must be Link(…), not {link!r}")
    for name, call in calls.items():
        if not callable(call) and not (name == "on_batch" and call is None):
            raise ConfigurationError(f"{name} must be callable, not {call!r}")


def _large_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context with room for thousands of ranks; each takes three to six sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(65_535, context.get(zmq.SOCKET_LIMIT)))
    return context
