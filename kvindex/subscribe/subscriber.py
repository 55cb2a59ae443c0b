"""The subscriber: one thread that keeps every rank's stream in order and whole."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypedDict, TypeVar

import zmq

from kvindex.subscribe.connection import Contexts, SocketOptions
from kvindex.subscribe.delivery import (
    BatchSink,
    Decode,
    FingerprintMaker,
    Outlet,
    RankStatus,
    Sink,
    StatusSink,
)
from kvindex.subscribe.feed import FeedSettings
from kvindex.subscribe.following import Following
from kvindex.subscribe.resumption import SavedRanks, check_saved
from kvindex.subscribe.sequencer import ReplayPolicy, SequencerConfig
from kvindex.subscribe.subscriber_thread import SubscriberThread
from kvindex.subscribe.watch import Lanes
from kvindex.subscribe.worker import Worker, not_a_worker, workers_of
from kvindex.wire import Fingerprints, decode_batch
from kvindex.wire.errors import BusyError, ConfigurationError
from kvindex.wire.forks import FORKED, disown_in_children
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

_COMMAND_TIMEOUT = 30.0  # seconds that a call may wait for the thread, which a slow sink can hold
_NO_CURSORS: Mapping[Rank, bytes] = MappingProxyType({})

_Result = TypeVar("_Result")


class StreamOptions(TypedDict, total=False):
    """The keyword options of every subscriber; `kvindex.connect` describes each.

    Functions that pass options on can take `**options: Unpack[StreamOptions]`.
    """

    on_loss: Literal["reset", "keep"]
    replay_policy: ReplayPolicy | None
    socket_options: SocketOptions | None
    probe_interval: float
    stale_after: float
    context: zmq.Context[zmq.Socket[bytes]] | None
    clock: Callable[[], float]


class Subscriber(Following):
    """Receives every rank's batches in order, repairs gaps, notices restarts, and calls a sink.

    Args:
        workers: the engines to subscribe to; more can be added later.
        sink: called on the subscriber's thread with each `StreamItem`. While it runs nothing else
            is received: replay makes up for a slow sink, but only as far back as the
            publishers' buffers reach. An exception in it is counted and logged.
        on_batch: called as `on_batch(rank, batch)` in place of `sink(RankBatch(…))`.
        resume: what `cursor` returned for ranks, perhaps in another process: they go on from there,
            if the publisher proves to be the same; else `RankRestarted` follows `RankAdded`.
            Those of other workers are counted as `cursors_unused`. Or `SavedRanks`.
        decode: makes a batch of a payload; its result is passed on unchanged.
        fingerprints: makes hashes of payloads, by which a repeated payload is recognised.
        on_statuses: called on the subscriber's thread with the newly shown statuses, at the end
            of each turn (with none, if none is new).
        on_stop: called once, on the subscriber's thread, when it ends for whatever reason.
        has_room: called on the subscriber's thread, between two batches. While it returns False
            nothing is received and no time-out counts, but calls are served; after `wake`, or a
            second later, it is called again.
        lanes: apply ordinary batches to an index in place of `on_batch`, if given.
        on_loss, …, clock: the `StreamOptions`. `on_loss` only sets `RankLost.reset`.

    Attributes:
        board: the ranks' statuses, as the subscriber's thread shows them.
        wake: has the thread call `has_room` again; from any thread.

    Raises:
        ConfigurationError: a worker or a setting cannot work.
        BusyError: a slow sink held the thread for too long; it ends when the sink returns.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        workers: Iterable[Worker] | Worker = (),
        *,
        sink: Sink,
        on_batch: BatchSink | None = None,
        resume: Mapping[Rank, bytes] | SavedRanks = _NO_CURSORS,
        decode: Decode = decode_batch,
        fingerprints: FingerprintMaker | None = None,
        on_loss: Literal["reset", "keep"] = "reset",
        replay_policy: ReplayPolicy | None = None,
        socket_options: SocketOptions | None = None,
        probe_interval: float = 5.0,
        stale_after: float = 30.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_statuses: StatusSink | None = None,
        on_stop: Callable[[], None] | None = None,
        has_room: Callable[[], bool] | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        if not isinstance(replay_policy, ReplayPolicy | None):
            raise ConfigurationError(
                f"replay_policy must be ReplayPolicy(timeout=…, attempts=…), not {replay_policy!r};"
                " the replay endpoint belongs to the Worker"
            )
        if not isinstance(socket_options, SocketOptions | None):
            raise ConfigurationError(
                f"socket_options must be SocketOptions(…), not {socket_options!r}"
            )
        for name, call in (("sink", sink), ("decode", decode), ("on_batch", on_batch)):
            if not callable(call) and not (name == "on_batch" and call is None):
                raise ConfigurationError(f"{name} must be callable, not {call!r}")
        saved = check_saved(resume)
        self._counters: Counter[str] = Counter()
        settings = FeedSettings(
            sequencer=SequencerConfig(
                has_replay=True,
                on_loss=on_loss,
                replay_policy=replay_policy or ReplayPolicy(),
                probe_interval=probe_interval,
                stale_after=stale_after,
            ),
            socket_options=socket_options or SocketOptions(),
            decode=decode,
            fingerprints=fingerprints or Fingerprints(),
            clock=clock,
            contexts=Contexts(context),
            outlet=Outlet(
                sink,
                on_batch,
                self._counters,
                on_statuses,
                has_room,
                None if lanes is None else lanes.on_payload,
            ),
            counters=self._counters,
            lanes=lanes,
        )
        self._thread = SubscriberThread(settings, on_stop)
        self.board = self._board = self._thread.board
        self.wake = self._thread.wake
        # The thread has no reference to this: what was dropped without `close` ends it.
        self._drop = weakref.finalize(self, _drop, self._thread, os.getpid())
        self._drop.atexit = False
        disown_in_children(self, Subscriber._disown)
        try:
            for worker in workers_of(workers):
                self.add(worker, resume=saved)
            if isinstance(resume, Mapping):
                roster = self._thread.roster
                self.call(lambda: roster.note_strangers(Rank(*rank) for rank in resume))
        except BusyError:
            # The sink was waited for; `close` would wait for it once more.
            self._drop.detach()
            self._thread.end(0.0)
            raise
        except BaseException:
            self.close()
            raise

    # Calls from any thread --------------------------------------------------------------------

    @property
    def ended(self) -> str | None:
        """Why the thread has ended, so that nothing more arrives; None while it runs."""
        return self._board.ended

    def add(
        self, worker: Worker, *, resume: Mapping[Rank, bytes] | SavedRanks = _NO_CURSORS
    ) -> None:
        """Subscribe to a worker's ranks, also to further ranks of one that was added before.

        Each rank keeps the settings that it was added with.

        From within the sink it is carried out after the current turn; its failure is logged.

        Args:
            worker: the engine.
            resume: the cursors, as for the constructor; those of other workers are ignored.

        Raises:
            ConfigurationError: it is no `Worker`, one of its dp_ranks is subscribed to already,
                `resume` holds no cursors, or ZeroMQ refuses an endpoint; nothing is added then.
            ClosedError, BusyError: as `call`.
        """
        if not isinstance(worker, Worker):
            raise not_a_worker(worker)
        saved, roster = check_saved(resume), self._thread.roster
        self._call(lambda: roster.add(worker, saved))

    def remove(self, name: RankName) -> None:
        """Unsubscribe from a worker's ranks, or from one rank.

        From within the sink it is carried out after the current turn; its failure is logged.

        Args:
            name: the name of a worker, for all its ranks; or a `Rank`, or its text "a/0", also with
                the dp_rank of its port.

        Raises:
            UnknownRankError: there is none of that name.
            ClosedError, BusyError: as `call`.
        """
        self._call(lambda: self._thread.roster.remove(name))

    def call(
        self, function: Callable[[], _Result], *, timeout: float = _COMMAND_TIMEOUT
    ) -> _Result:
        """Call a function on the subscriber's thread, between two items, and return its result.

        So the sink's state and `cursor` stand at the same point of every stream, and nothing moves
        while the function runs. From within such a function a further one is called at once.

        Args:
            function: called without arguments; it must be short, and not wait for the subscriber.
                Its exceptions are raised here.
            timeout: longest wait for the thread, in seconds.

        Raises:
            ClosedError: the subscriber is closed.
            BusyError: a slow sink held the thread for too long, or the function did (then `begun`
                is true), or this is called by the sink.
        """
        self._board.check_open()
        if not self._thread.is_current:
            return self._thread.commands.call(function, timeout)
        if not self._thread.commands.running:
            raise BusyError(0.0)
        return function()

    def cursor(self, rank: RankName) -> bytes | None:
        """Return how far the sink has received a rank's items, for `resume` in another process.

        Within `call` it stands exactly where the sink does.

        Returns:
            Some kilobytes, or None where there is nothing to go on from: nothing was applied yet,
            or the publisher keeps no batches for replay to prove itself by.

        Raises:
            UnknownRankError: the rank is not subscribed to.
            ClosedError, BusyError: as `call`.
        """
        return self.call(lambda: self._thread.roster.cursor(rank))

    def find(self, rank: Rank) -> RankStatus | None:
        """Return a rank's latest snapshot, its `last_event_age` not aged, or None. O(1)."""
        return self._board.find(rank)

    def statistics(self) -> dict[str, Any]:
        """Return plain JSON-ready values: `ranks` by `str(rank)` as `RankStatus`, and `thread`."""
        ranks = {str(rank): status.to_dict() for rank, status in self.statuses().items()}
        return {"ranks": ranks, "thread": self._thread.statistics()}

    def close(self) -> None:
        """Stop the thread and close every socket; idempotent.

        It waits for a running sink, but no longer than 30 seconds.
        """
        self._drop.detach()
        self._thread.end(_COMMAND_TIMEOUT)

    def _call(self, command: Callable[[], None]) -> None:
        """Run a command on the thread and wait for it; from the thread itself, run it later."""
        self._board.check_open()
        if self._thread.is_current:
            self._thread.commands.post(command)
        else:
            self._thread.commands.call(command, _COMMAND_TIMEOUT)

    def _disown(self) -> None:
        self._thread.disown(FORKED)


def _drop(thread: SubscriberThread, pid: int) -> None:
    """End the thread of a subscriber that was dropped without `close`."""
    if os.getpid() != pid:
        return  # a forked child: the thread is the parent's
    thread.request_stop()
    warnings.warn(
        "a kvindex Client, Subscriber or EventStream was dropped without close(): close it, or use "
        "`with`",
        ResourceWarning,
        stacklevel=2,
    )
