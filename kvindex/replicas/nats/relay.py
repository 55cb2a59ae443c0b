"""The relay: one subscriber whose events any number of hosts follow."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvindex.client import Client, ClientOptions
from kvindex.index.snapshot import Snapshot, SnapshotRecord, require_native
from kvindex.replicas.nats.log import Log, StreamSettings, ask_again
from kvindex.replicas.nats.log_queue import LogQueue
from kvindex.replicas.nats.log_writer import LogWriter
from kvindex.replicas.nats.pool_snapshots import PoolSnapshots, SnapshotContents
from kvindex.replicas.nats.snapshot_keeping import SnapshotKeeper
from kvindex.replicas.nats.writing import Writing
from kvindex.replicas.outflow import StreamTap
from kvindex.replicas.serving import Serving
from kvindex.replicas.snapshot import Snapshots
from kvindex.subscribe.discovery import Engines
from kvindex.wire.errors import (
    BusyError,
    ClosedError,
    ConfigurationError,
    DecodeError,
    NatsError,
    SnapshotError,
)
from kvindex.wire.nats import (
    NatsOptions,
    NatsThread,
    open_connection,
    parse_pool,
    require_nats,
    run_apart,
)

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from nats.aio.client import Client as NatsClient
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_PATIENCE = 0.005  # seconds for which batches are kept back; turns of the log are longer
_RESTART_SECONDS = 60.0  # for the pool's snapshot to arrive
_TRIED = 4  # of its snapshots
_RETRY_SECONDS = 1.0  # between two attempts to connect, once a connection was closed for good
_NAME = re.compile(r"[A-Za-z0-9]{1,64}")
_Result = TypeVar("_Result")


class RelayOptions(ClientOptions, NatsOptions, total=False):
    """The further options of a relay: those of a client, and of a connection to NATS."""


class Relay(Serving):
    """Subscribes to engines, and writes what they send to NATS for replicas on any host.

    Any number of relays may serve a pool: one writes, the others stand by with the same engines.
    If it is silent for 3 s, one of them begins a new epoch, and every replica fetches its snapshot.
    A relay that starts continues from the pool's newest snapshot, as `connect(resume=...)` does,
    unless another `resume` is given; it waits for it, at most a minute.

    Args:
        workers: as for `kvindex.connect`.
        url: "nats://HOST[:PORT][,HOST[:PORT]…][/POOL]"; tls:// for TLS.
        pool: the pool's name, unless the URL has it.
        replicas, store, max_bytes: how the pool's stream is made if it is missing: as
            `StreamSettings`. One that exists is used as it is.
        name: letters and digits that its epochs begin with, for people to read.
        snapshot_every: bytes of the log after which there is another snapshot; a quarter of
            `max_bytes` by default.
        options: as for `kvindex.connect`, and `NatsOptions`.

    Attributes:
        client: the client that it fills; it can be asked as well, and workers added and removed.

    Raises:
        ConfigurationError: a value cannot work, a stream exists that cannot be used, nats-py is
            missing, or the index is the Python one.
        NatsError: no server accepts the connection within 5 s, it has no JetStream, or that does
            not answer for 10 s. Afterwards the relay connects again by itself, for ever.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        workers: Engines,
        url: str,
        *,
        pool: str | None = None,
        replicas: int = 1,
        store: str = "memory",
        max_bytes: int = 1 << 30,
        name: str | None = None,
        snapshot_every: int | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        super().__init__()
        require_native()
        require_nats()
        secured, rest = _split_options(options)
        self.pool = parse_pool(url, pool, secured)
        self._settings = StreamSettings(replicas, store, max_bytes)
        self._every = max_bytes // 4 if snapshot_every is None else snapshot_every
        if self._every <= 0:
            raise ConfigurationError(f"snapshot_every must be above 0, not {snapshot_every!r}")
        if store == "file":
            logger.warning(
                "%s: the stream stores prompts' tokens in files (store=file): let nats-server "
                "encrypt its files",
                self.pool,
            )
        self._name = _own_name(name)
        self._trouble = ""  # with the connection
        self._refused: Counter[str] = Counter()  # snapshots that could not be continued from
        self._writer = LogWriter(self._name)
        self._queue = LogQueue(self._wake)
        self._tap = StreamTap(self._queue, self._ended.set, patience=_PATIENCE)
        self._log: Log | None = None
        self._writing: Writing | None = None
        self._keeper: SnapshotKeeper | None = None
        self._opened: Future[Snapshot | None] = Future()
        self._client_made = asyncio.Event()
        self._thread = NatsThread(
            "kvindex-relay", partial(self._main, "resume" in rest), self._fail
        )
        try:
            resume = self._opened.result()
            if resume is not None:
                rest["resume"] = resume
            self.client = Client(workers, tap=self._tap, on_stop=self._stopped, **rest)
        except BaseException:
            self._thread.close()
            raise
        self._thread.call_soon(self._client_made.set)
        atexit.register(self.close)

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values; those of the client are its own.

        `state`, `epoch`, `position`, `reason`: of the writer; `reason` is why it does not write, or
        its last trouble. `head`: number of the log's last message when it was last looked at, or
        appended. `connection`: what is wrong with it, or ""; `moves`: how often it moved on from a
        server where JetStream did not answer. `appends`, `appended_bytes`: bodies
        of the log. `appended_again`: those that were sent again after trouble; `forgotten`: those
        that NATS had acknowledged and lost. `fenced`: how often another relay took over. `foreign`:
        how often an epoch was given up since another client wrote in its subject. `refused`,
        `failures`: appends that came too late, and steps without an answer. `epochs`: begun.
        `queue`: as `LogQueue.statistics`. `snapshots`: stored ones; `snapshots_lost`: of these, the
        newest ones that NATS lost or somebody changed; `snapshot_failures`: attempts, by the kind
        of error; `last_snapshot`: the newest. `restart_refused`: snapshots that this relay could
        not continue from, by reason. `entries`, `heartbeats`: of its messages.
        """
        writer, writing, keeper = self._writer, self._writing, self._keeper
        counters = {name: writer.counters[name] for name in _COUNTED}
        return {
            "relay": {
                "pool": self.pool.name,
                "state": str(writer.state),
                "epoch": writer.epoch,
                "position": writer.position,
                "head": max(writer.position, 0 if writing is None else writing.head.seq),
                "reason": writer.reason,
                "connection": self._trouble,
                "moves": 0 if self._log is None else self._log.moves,
                **counters,
                "appended_bytes": 0 if writing is None else writing.bytes,
                "queue": self._queue.statistics(),
                **({} if keeper is None else keeper.statistics()),
                "restart_refused": dict(self._refused),
                **self._tap.statistics(),
            }
        }

    def report(self) -> dict[str, Any]:
        """Return `statistics()` and those of the client in one."""
        return {**self.statistics(), **self.client.statistics()}

    def _close_parts(self) -> None:
        self._thread.close()  # another relay takes over after 3 s
        self.client.close()

    # On the thread of the connection ----------------------------------------------------------

    async def _main(self, resumes: bool) -> None:
        """Connect; once there is a client, write until this is cancelled."""
        try:
            connection = await self._connect()
            try:
                log, store = Log(connection, self.pool), PoolSnapshots(connection, self.pool)
                await ask_again(partial(log.make, self._settings))
                self._opened.set_result(None if resumes else await self._newest(store))
                await self._client_made.wait()
                await self._write(log, store)
            finally:
                await _close(connection)
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            raise
        while True:
            await self._write_again()

    async def _connect(self) -> NatsClient:
        name = f"kvindex relay {self._name}"
        return await open_connection(self.pool, name, on_change=self._note_trouble)

    async def _write_again(self) -> None:
        """Connect anew, since the server closed the connection for good; and write."""
        try:
            connection = await self._connect()
        except NatsError as error:
            self._note_trouble(str(error))
            await asyncio.sleep(_RETRY_SECONDS)
            return
        try:
            self._note_trouble("")
            await self._write(Log(connection, self.pool), PoolSnapshots(connection, self.pool))
        finally:
            await _close(connection)

    async def _newest(self, store: PoolSnapshots) -> Snapshot | None:
        """Return the pool's newest snapshot that can be continued from, if there is any."""
        try:
            return await run_apart(self._first_usable(store), _RESTART_SECONDS)
        except (NatsError, asyncio.TimeoutError) as error:
            self._refused[type(error).__name__] += 1
            logger.warning("%s: its snapshots cannot be fetched: %r", self.pool, error)
        return None

    async def _first_usable(self, store: PoolSnapshots) -> Snapshot | None:
        for name in (await ask_again(store.newest))[:_TRIED]:
            try:
                data = await ask_again(partial(store.get, name))
                return await _in_thread(partial(_read, data, name))
            except (NatsError, DecodeError, SnapshotError) as error:
                self._refused[getattr(error, "reason", type(error).__name__)] += 1
                logger.warning("%s: not continued from %s: %s", self.pool, name, error)
        return None

    async def _write(self, log: Log, store: PoolSnapshots) -> None:
        self._log = log
        snapshots = Snapshots(self.client, self._tap)
        index = self.client.index
        self._keeper = SnapshotKeeper(
            log, self._settings, self._writer, store, snapshots, index, self._every
        )
        self._writing = Writing(
            log,
            self._settings,
            self._writer,
            self._queue,
            on_begin=self._begin_epoch,
            on_end=self._end_epoch,
            on_append=self._keeper.note_append,
        )
        await self._writing.run()
        self._writer.abandon("the server closed the connection for good")

    async def _begin_epoch(self) -> None:
        assert self._keeper is not None
        await _in_thread(partial(self.client.subscriber.call, self._attach))
        self._keeper.begin()

    async def _end_epoch(self) -> None:
        assert self._keeper is not None
        await self._keeper.end()  # before the tap: a snapshot would attend it again
        self._queue.detach()
        if self._closing:  # as the process ends, no thread can be started
            return
        try:
            await _in_thread(partial(self.client.subscriber.call, self._tap.recount))
        except (BusyError, ClosedError):  # it goes on to pack messages, which are dropped
            pass

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble and not self._closing:
            self._trouble = trouble
            if self._writing is None:  # the constructor raises the reason
                return
            logger.warning("%s: %s", self.pool, trouble or "connected again")

    # On the subscriber's thread ---------------------------------------------------------------

    def _attach(self) -> None:
        self._tap.flush()  # of an older epoch: it is dropped
        self._queue.attach()
        self._tap.attend()

    # On any thread ----------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._writing is not None:
            self._thread.call_soon(self._writing.wake)

    def _fail(self, error: BaseException) -> None:
        if self._opened.done() and self._opened.exception() is error:
            return  # the constructor raises it
        self._failure = f"the relay failed: {error!r}"
        logger.error("%s: the relay failed and ends", self.pool, exc_info=error)
        self._queue.detach()
        self._ended.set()

    def __repr__(self) -> str:
        return f"<Relay to {self.pool}, {self._writer.state}, of {self.client!r}>"


_COUNTED = (
    "appends",
    "appended_again",
    "forgotten",
    "fenced",
    "foreign",
    "refused",
    "failures",
    "epochs",
)


def _split_options(options: RelayOptions) -> tuple[NatsOptions, ClientOptions]:
    """Return the options of a connection to NATS, and those of a client."""
    secured = {k: v for k, v in options.items() if k in NatsOptions.__annotations__}
    rest = {k: v for k, v in options.items() if k not in secured}
    return NatsOptions(**secured), ClientOptions(**rest)  # type: ignore[typeddict-item]


def _own_name(name: str | None) -> str:
    """Return a name that no other relay has."""
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigurationError(f"name must be 1 to 64 letters and digits, not {name!r:.100}")
    return f"{name or 'relay'}{os.urandom(6).hex()}"


def _read(data: bytes, name: str) -> Snapshot:
    contents = SnapshotContents(data, name)
    return Snapshot(
        contents.seed,
        tuple(SnapshotRecord(part.rank, part.section, part.cursor) for part in contents),
    )


async def _in_thread(function: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(None, function)


async def _close(connection: NatsClient) -> None:
    try:
        await asyncio.wait_for(connection.close(), 2.0)
    except Exception as error:
        logger.info("the connection was not closed in order: %r", error)
