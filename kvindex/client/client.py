"""A subscriber and an index, joined: connect, then ask."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from kvindex.client.answering import Answering
from kvindex.client.saved_state import SavedState, read_saved
from kvindex.index import Fingerprints, Index, read_batch
from kvindex.index.snapshot import (
    Snapshot,
    SnapshotRecord,
    SnapshotWriter,
    replaced_file,
    require_native,
)
from kvindex.subscribe import (
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    State,
    StreamItem,
    StreamOptions,
    Subscriber,
    Tap,
    Worker,
)
from kvindex.subscribe.watch import Lanes
from kvindex.wire.errors import ClosedError, ConfigurationError, UnknownRankError, check_options
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

if TYPE_CHECKING:  # see `_split`; no dependency: editors and type checkers have it
    from typing_extensions import Unpack

    from kvindex.subscribe.discovery import Discovery, DiscoveryOptions, Engine, Engines, Source

RESUME_WITHIN: Final = 600.0
"""Seconds: any service discovery has reported all workers by then."""

MAX_BLOCKS_PER_RANK: Final = 10_000_000
"""Most resident blocks of one rank in an index that a client makes for itself.

No engine has as many: with blocks of 16 tokens that is a cache of 160 million tokens, and with
pages of one token still that of a node of eight GPUs. A hostile rank needs some GB for it at worst.
"""

_SAVE_ATTEMPTS = 5  # each begins when ranks were renamed in the one before

logger = logging.getLogger(__name__)


class ClientOptions(StreamOptions, total=False):
    """The keyword options of `connect`, except `index`; `connect` describes each.

    Functions that pass options on can take `**options: Unpack[ClientOptions]`.
    """

    max_blocks_per_rank: int | None
    resume: str | os.PathLike[str] | Snapshot | None
    resume_within: float
    discovery: DiscoveryOptions | None


def connect(
    workers: Engines = (), *, index: Index | None = None, **options: Unpack[ClientOptions]
) -> Client:
    """Return a client that subscribes to these engines and answers from their events.

    It returns at once; `Client.wait_live` waits until every rank has caught up.

    Args:
        workers: one engine or several, in any mixture: a `Worker`, which names an engine's
            endpoints; the URL of an engine's HTTP server ("http://engine:8000"), which is asked
            for them now and then; or a source of `kvindex.subscribe.discovery`. More can be added
            later.
        index: the index to fill; a new one by default. With `resume` it must have the seed of the
            index that was saved.
        max_blocks_per_rank: of the new index; 10,000,000 by default. A rank's blocks beyond it
            are left out and counted (`ignored`, "max_blocks_per_rank").
        resume: a file that `Client.save` wrote, perhaps in another process; or a
            `kvindex.index.Snapshot` of what such a file holds. Each rank in it starts with its
            saved contents, and replay brings the batches that it missed, if its publisher proves
            to be the same; if not, it starts from scratch. Ranks of workers that
            are not among `workers` are set aside and take no part in answers until their worker
            is added. If there is no such file, every rank starts from scratch.
        resume_within: seconds for which these ranks are kept, 600 by default; they take as much
            memory as in the file.
        on_loss: what happens to a rank's blocks when batches of it are lost for good. "reset", the
            default, drops them, since the lost batches may have removed some. "keep" keeps them.
            Either way the rank is flagged as not complete until its engine restarts.
        replay_policy: how long to wait for a replay, and how often to ask.
        socket_options: settings of the ZeroMQ sockets.
        probe_interval: seconds without a batch after which a replay request checks whether the
            rank's last batches were lost; 5 by default.
        stale_after: seconds without a sign of life (a batch, a reply to a replay request, a new
            connection) after which a rank is stale; 30 by default.
        context: ZeroMQ context for every socket. By default the process-wide one for inproc
            endpoints, so that they meet, and one of its own for all others.
        discovery: how engines given by URL are asked, and how long an engine that no longer answers
            is kept.
        clock: returns monotonic seconds; for tests.

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
    check_options("connect", options, ClientOptions)
    return Client(workers, index=index, **options)


class Client(Answering):
    """Answers which rank holds a prompt, from live events, and how far to trust the answer.

    Args: as `connect`, and
        tap: receives everything that the index receives.
        on_stop: called once, on the subscriber's thread, when it ends for whatever reason.

    Attributes:
        subscriber: receives the events.
        discovery: follows the engines that were given by URL or by a source; None if none was. Its
            `engines()` are their last reports: URL, kind, version, models, first rank.

    A client that is dropped without `close` ends its thread, with a ResourceWarning. A forked child
    of a process with a client must connect by itself: its inherited copy receives nothing, and its
    calls raise ClosedError.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        workers: Engines = (),
        *,
        index: Index | None = None,
        max_blocks_per_rank: int | None = None,
        resume: str | os.PathLike[str] | Snapshot | None = None,
        resume_within: float = RESUME_WITHIN,
        discovery: DiscoveryOptions | None = None,
        tap: Tap | None = None,
        on_stop: Callable[[], None] | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        check_options("Client", options, StreamOptions)
        if index is not None and max_blocks_per_rank is not None:
            raise ConfigurationError(
                "max_blocks_per_rank is for the index that a client makes: with index=, give it to"
                " that one, Index(max_blocks_per_rank=...)"
            )
        named, sources = _split(workers)
        limit = MAX_BLOCKS_PER_RANK if max_blocks_per_rank is None else max_blocks_per_rank
        records: list[SnapshotRecord] = []
        if resume is not None:
            index, records = read_saved(resume, index, limit)
        self._index = Index(max_blocks_per_rank=limit) if index is None else index
        self._saved = SavedState(
            self._index,
            records,
            resume_within,
            options.get("clock", time.monotonic),
            None if tap is None else tap.restored,
        )
        fingerprints = Fingerprints(self._index.seed)
        self.subscriber = Subscriber(
            named,
            fingerprints=fingerprints,
            resume=self._saved,
            **_feeding(self._index, fingerprints, self._saved.expire, tap),
            on_stop=on_stop,
            **options,
        )
        self._board = self.subscriber.board
        self.discovery: Discovery | None = None
        # Last: from here on its thread adds engines to a client that is whole.
        if sources:
            try:
                self.discovery = self._follow(sources, discovery)
            except BaseException:
                self.subscriber.close()  # else its thread and its sockets outlive the failure
                raise

    def _follow(self, sources: Iterable[Source], options: DiscoveryOptions | None) -> Discovery:
        """Return a discovery that feeds this client for as long as the client is referenced."""
        from kvindex.subscribe.discovery import Discovery

        # The discovery's threads must not keep a client that was dropped without `close`.
        client = weakref.ref(self)
        live: set[Rank] = set()

        def living() -> Client:
            known = client()
            if known is None:
                raise ClosedError("the client was dropped")
            return known

        def add(engine: Engine) -> None:
            living().add(engine.worker)

        def remove(engine: Engine) -> None:
            with suppress(UnknownRankError):  # another caller removed it
                living().remove(engine.worker.name)

        def is_alive(worker: str) -> bool:
            return any(rank.worker == worker for rank in living().connected_ranks())

        def ask_again(status: RankStatus) -> None:
            # An engine that hangs up may come back at other ports: it is asked at once.
            if status.state is State.LIVE:
                live.add(status.rank)
            elif status.rank in live:
                live.discard(status.rank)
                discovery.refresh(status.rank.worker)

        discovery = Discovery(
            sources, add, remove, options, is_alive=is_alive, on_change=self._board.ring
        )
        self.on_change(ask_again)
        weakref.finalize(self, discovery.end).atexit = False
        return discovery

    @property
    def index(self) -> Index:
        """The index that the events fill."""
        return self._index

    # Workers and their streams ----------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Subscribe to a further worker's ranks, or to further ranks of a worker.

        `client.add(Worker("a", {1: "tcp://…"}))` adds dp_rank 1 to a worker "a" that has rank 0.

        Ranks that were set aside from the file at `resume` continue from it, like those given to
        `connect`; events of all ranks wait while they are restored. The saved state of a rank is
        used once: added again after `remove`, the rank starts from scratch.

        Raises: as `Subscriber.add`.
        """
        self.subscriber.add(worker, resume=self._saved)

    def remove(self, name: RankName) -> None:
        """Unsubscribe from a worker's ranks, or from one rank, and forget what they hold.

        Args:
            name: the name of a worker, for all its ranks; or a `Rank`, or its text "a/0".

        Raises:
            UnknownRankError: there is none of that name.
        """
        self.subscriber.remove(name)

    def _missing(self) -> Mapping[str, str]:
        if self.discovery is None:
            return {}
        self.discovery.check_open()  # it may have failed: nothing is found any more
        return self.discovery.missing()

    def _own_statistics(self) -> dict[str, Any]:
        own = {
            "thread": self.subscriber.statistics()["thread"],
            "resume": self._saved.statistics(),
        }
        if self.discovery is not None:
            own["discovery"] = self.discovery.statistics()
        return own

    def save(self, path: str | os.PathLike[str]) -> tuple[Rank, ...]:
        """Write what every rank holds and how far its stream was applied; return the ranks written.

        `connect(resume=path)` continues from there. Each rank is saved between two of its batches.
        Events of all ranks wait while one rank is copied, and queries wait behind such an event:
        60 to 200 ms for a million blocks of that rank. A rank is left out if its stream
        cannot be continued: nothing was applied yet, or its publisher has no replay. Ranks
        that are set aside are written as they were read, so that a router that is restarted before
        it knows all its workers loses none. If ranks are renamed meanwhile, saving begins anew. The
        file replaces an existing one only when all of it is written. Only its owner can read it,
        since it contains the index's seed.

        Raises:
            OSError: it cannot be written; an existing file is unchanged.
            ClosedError: the client is closed.
            BusyError: the subscriber's thread was blocked for too long.
            ConfigurationError: the index is the Python one, which has no snapshots.
        """
        require_native(self.index.backend)
        with replaced_file(path) as file:
            for _ in range(_SAVE_ATTEMPTS):
                file.seek(0)
                file.truncate()
                # A rank that is renamed while others are written could be in the file twice, or not
                # at all: the names before and after must agree.
                names = self._names()
                written = self._write(file)
                now = self._names()
                if all(now.get(publisher, rank) == rank for publisher, rank in names.items()):
                    break
            else:
                logger.warning("%s may lack ranks: they were renamed again and again", path)
        return written

    def _names(self) -> dict[tuple[str, str], Rank]:
        """Return the name of each rank, by worker and endpoint, which stay the same."""
        statuses = self._board.all().values()
        return {(status.rank.worker, status.endpoint): status.rank for status in statuses}

    def _write(self, file: BinaryIO) -> tuple[Rank, ...]:
        """Write a snapshot; return its ranks."""
        written = []
        writer = SnapshotWriter(file, seed=self.index.seed)
        # At once: a rank whose worker is being added is in one of the two.
        ranks, aside = self.subscriber.call(lambda: (self.ranks, self._saved.records()))
        for rank in ranks:
            # One call for each rank: events of all ranks wait while it runs.
            taken = self.subscriber.call(partial(self._take, rank))
            if taken is not None:
                writer.add(rank, *taken)
                written.append(rank)
        for record in aside:
            writer.add(*record)
            written.append(record.rank)
        writer.finish()
        return tuple(sorted(written))

    def _take(self, rank: Rank) -> tuple[bytes, bytes] | None:
        """Return section and cursor of a rank, on the subscriber's thread."""
        try:
            # On that thread nothing is applied between the two: the section is as of the cursor.
            cursor = self.subscriber.cursor(rank)
            return None if cursor is None else (self.index.dump(rank), cursor)
        except UnknownRankError:  # removed just now; or renamed: then all is written anew
            return None

    def close(self) -> None:
        """Stop receiving, and refuse further questions. Idempotent.

        `index` stays as it is and still answers questions.
        """
        self._closed = True
        # First: it would add engines to a closed subscriber.
        if self.discovery is not None:
            self.discovery.close()
        self.subscriber.close()


def _split(engines: Engines) -> tuple[Iterable[Worker] | Worker, Sequence[Source]]:
    """Return the workers that are given, and the sources of all other engines."""
    listed = [engines] if isinstance(engines, Worker) else engines
    if isinstance(listed, (list, tuple)) and all(isinstance(engine, Worker) for engine in listed):
        return listed, ()
    # Here: discovery loads asyncio, HTTP and TLS, which callers that name endpoints do not need.
    from kvindex.subscribe.discovery import split_engines

    return split_engines(engines)


# How its subscriber fills the index, and what a tap receives --------------------------------------


def follow_item(index: Index, item: StreamItem) -> None:
    """Apply an item that is not a batch to an index: a rank that came, went, lost or restarted."""
    if isinstance(item, RankAdded):
        index.add(item.rank)
        index.configure(item.rank, item.cache)
    elif isinstance(item, RankRemoved):
        index.remove(item.rank)
    elif isinstance(item, RanksRenamed):
        index.rename(dict(item.names))
    # With on_loss="keep", blocks stay that lost batches may have removed: the rank is flagged.
    elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
        index.tree(item.rank).clear()


class _RawBatch(msgspec.Struct, frozen=True, gc=False):
    """A decoded batch with its payload."""

    payload: bytes
    batch: Any
    ts: float
    data_parallel_rank: int | None


def _keep_payload(payload: bytes) -> _RawBatch:
    batch = read_batch(payload)
    return _RawBatch(payload, batch, batch.ts, batch.data_parallel_rank)


def _feeding(
    index: Index, fingerprints: Fingerprints, expire: Callable[[], None], tap: Tap | None
) -> dict[str, Any]:
    """Return the settings of a subscriber that fills an index, and notifies a tap of each item."""
    lanes = None
    # Lanes write into the tree without Python: they would pass by a subclass's `apply`.
    if fingerprints.core is not None and index.backend == "native" and type(index) is Index:
        core, number = index.lane_target()
        tapped = () if tap is None else (tap.batch, tap.patience)
        lanes = Lanes(core, number, fingerprints.core, *tapped)
    if tap is None:
        return {
            "lanes": lanes,
            "sink": partial(follow_item, index),
            "on_batch": index.apply,
            "decode": read_batch,
            "on_statuses": lambda _: expire(),
        }

    # The index first: a section that a tap takes at an item must have that item in it.
    def on_item(item: StreamItem) -> None:
        follow_item(index, item)
        tap.item(item)

    def on_batch(rank: Rank, raw: _RawBatch) -> None:
        index.apply(rank, raw.batch)
        tap.batch(rank, raw.payload)

    def on_statuses(statuses: Sequence[RankStatus]) -> None:
        expire()
        tap.statuses(statuses)

    return {
        "lanes": lanes,
        "sink": on_item,
        "on_batch": on_batch,
        "decode": _keep_payload,
        "on_statuses": on_statuses,
    }
