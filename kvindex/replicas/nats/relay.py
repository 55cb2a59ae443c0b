"""The relay: one subscriber whose events any number of hosts follow.

Its messages wait in a `LogQueue`; the `LogDriver` appends them to the log as a `LogWriter` decides,
and the `SnapshotKeeper` stores the snapshots that the log continues.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from kvindex.client import Client, ClientOptions
from kvindex.index.snapshot import Snapshot, SnapshotRecord, require_native
from kvindex.replicas.nats.log import (
    AROUND_BYTES,
    MAX_MESSAGE_BYTES,
    AppendRefusedError,
    Head,
    Log,
    NoStreamError,
    StreamSettings,
    ask_again,
    cut_message,
    join_bodies,
)
from kvindex.replicas.nats.log_writer import (
    Append,
    LogWriter,
    Look,
    Make,
    Ready,
    Rest,
    WriterState,
)
from kvindex.replicas.nats.snapshots import PoolSnapshots, SnapshotContents, SnapshotKeeper
from kvindex.replicas.outflow import Patience, Snapshots, StreamTap
from kvindex.replicas.server import ReplicaServer
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

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_TURN = 0.010  # seconds from one append to the next, unless a full body waits
_BODY_BYTES = 512 << 10
_CHUNK_BYTES = 256 << 10
_QUEUE_PATIENCE = 1.0  # seconds for which a full queue may delay the subscriber's thread
_PATIENCE = 0.005  # seconds for which batches are kept back; turns of the log are longer
_RESTART_SECONDS = 60.0  # for the pool's snapshot to arrive
_TRIED = 4  # of its snapshots
_RETRY_SECONDS = 1.0  # between two attempts to connect, once a connection was closed for good
_CLOSE_SECONDS = 2.0
_NAME = re.compile(r"[A-Za-z0-9]{1,64}")
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


class RelayOptions(ClientOptions, NatsOptions, total=False):
    """The further options of a relay: those of a client, and of a connection to NATS."""


class Relay(ReplicaServer):
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
        secured = {k: v for k, v in options.items() if k in NatsOptions.__annotations__}
        rest: dict[str, Any] = {k: v for k, v in options.items() if k not in secured}
        self.pool = parse_pool(url, pool, NatsOptions(**secured))  # type: ignore[typeddict-item]
        self._settings = StreamSettings(replicas, store, max_bytes)
        # A quarter: while the next one is made, the log has to hold all that follows the last.
        self._every = max_bytes // 4 if snapshot_every is None else snapshot_every
        if self._every <= 0:
            raise ConfigurationError(f"snapshot_every must be above 0, not {snapshot_every!r}")
        if store == "file":
            logger.warning(
                "%s: the stream stores prompts' tokens in files (store=file): let nats-server "
                "encrypt its files",
                self.pool,
            )
        if name is not None and not _NAME.fullmatch(name):
            raise ConfigurationError(f"name must be 1 to 64 letters and digits, not {name!r:.100}")
        # Two writers of one name would take each other's epochs for their own.
        self._name = f"{name or 'relay'}{os.urandom(6).hex()}"
        self._trouble = ""  # with the connection
        self._refused: Counter[str] = Counter()  # snapshots that could not be continued from
        self._writer = LogWriter(self._name)
        self._queue = LogQueue(self._wake)
        self._tap = StreamTap(self._queue, self._ended.set, patience=_PATIENCE)
        self._log: Log | None = None
        self._driver: LogDriver | None = None
        self._keeper: SnapshotKeeper | None = None
        self._opened: Future[Snapshot | None] = Future()
        self._client_made = asyncio.Event()
        self._thread = NatsThread(
            "kvindex-relay", partial(self._main, "resume" in rest), self._fail
        )
        try:
            # The client can begin only with the pool's snapshot, which the thread fetches.
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
        writer, driver, keeper = self._writer, self._driver, self._keeper
        return {
            "relay": {
                "pool": self.pool.name,
                "state": str(writer.state),
                "epoch": writer.epoch,
                "position": writer.position,
                "head": max(writer.position, 0 if driver is None else driver.head.seq),
                "reason": writer.reason,
                "connection": self._trouble,
                "moves": 0 if self._log is None else self._log.moves,
                **{name: writer.counters[name] for name in _COUNTED},
                "appended_bytes": 0 if driver is None else driver.bytes,
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
        """Connect and write until this is cancelled, anew if a server closes the connection."""
        name = f"kvindex relay {self._name}"
        try:
            while True:
                try:
                    connection = await open_connection(
                        self.pool, name, on_change=self._note_trouble
                    )
                except NatsError as error:
                    # A relay that cannot begin says so at once; one that runs tries for ever.
                    if not self._opened.done():
                        raise
                    self._note_trouble(str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                try:
                    log, store = Log(connection, self.pool), PoolSnapshots(connection, self.pool)
                    if not self._opened.done():
                        await ask_again(partial(log.make, self._settings))
                        self._opened.set_result(None if resumes else await self._newest(store))
                        await self._client_made.wait()
                    else:
                        self._note_trouble("")
                    await self._write(log, store)
                finally:
                    try:
                        await asyncio.wait_for(connection.close(), _CLOSE_SECONDS)
                    except Exception as error:
                        logger.info("the connection was not closed in order: %r", error)
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            raise

    async def _newest(self, store: PoolSnapshots) -> Snapshot | None:
        """Return the pool's newest snapshot that can be continued from, if there is any."""
        try:
            return await run_apart(self._first_usable(store), _RESTART_SECONDS)
        except (NatsError, asyncio.TimeoutError) as error:
            # To begin with nothing is better than not to begin: engines replay what they have.
            self._refused[type(error).__name__] += 1
            logger.warning("%s: its snapshots cannot be fetched: %r", self.pool, error)
        return None

    async def _first_usable(self, store: PoolSnapshots) -> Snapshot | None:
        for name in (await ask_again(store.newest))[:_TRIED]:
            try:
                data = await ask_again(partial(store.get, name))
                return await asyncio.to_thread(_read, data, name)
            except (NatsError, DecodeError, SnapshotError) as error:
                self._refused[getattr(error, "reason", type(error).__name__)] += 1
                logger.warning("%s: not continued from %s: %s", self.pool, name, error)
        return None

    async def _write(self, log: Log, store: PoolSnapshots) -> None:
        """Write until the server closes the connection for good."""
        self._log = log
        snapshots = Snapshots(self.client, self._tap)
        self._keeper = SnapshotKeeper(
            log, self._settings, self._writer, store, snapshots, self.client.index, self._every
        )
        self._driver = LogDriver(
            log,
            self._settings,
            self._writer,
            self._queue,
            on_begin=self._begin_epoch,
            on_end=self._end_epoch,
            on_append=self._keeper.note_append,
        )
        await self._driver.run()
        self._writer.abandon("the server closed the connection for good")

    async def _begin_epoch(self) -> None:
        assert self._keeper is not None
        await asyncio.to_thread(self.client.subscriber.call, self._attach)
        self._keeper.begin()

    async def _end_epoch(self) -> None:
        assert self._keeper is not None
        await self._keeper.end()  # before the tap: a snapshot would attend it again
        self._queue.detach()
        if self._closing:  # as the process ends, no thread can be started
            return
        try:
            await asyncio.to_thread(self.client.subscriber.call, self._tap.recount)
        except (BusyError, ClosedError):  # it goes on to pack messages, which are dropped
            pass

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble and not self._closing:
            self._trouble = trouble
            if self._driver is None:  # the constructor raises the reason
                return
            logger.warning("%s: %s", self.pool, trouble or "connected again")

    # On the subscriber's thread ---------------------------------------------------------------

    def _attach(self) -> None:
        # Between two batches: every message from the next one on is of the new epoch.
        self._tap.flush()  # of an older epoch: it is dropped
        self._queue.attach()
        self._tap.attend()

    # On any thread ----------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._driver is not None:
            self._thread.call_soon(self._driver.wake)

    def _fail(self, error: BaseException) -> None:
        if self._opened.done() and self._opened.exception() is error:
            return  # the constructor raises it
        self._failure = f"the relay failed: {error!r}"
        logger.error("%s: the relay failed and ends", self.pool, exc_info=error)
        # Or the subscriber's thread would wait for a queue that nobody empties.
        self._queue.detach()
        self._ended.set()

    def __repr__(self) -> str:
        return f"<Relay to {self.pool}, {self._writer.state}, of {self.client!r}>"


def _read(data: bytes, name: str) -> Snapshot:
    contents = SnapshotContents(data, name)
    return Snapshot(
        contents.seed,
        tuple(SnapshotRecord(part.rank, part.section, part.cursor) for part in contents),
    )


class LogDriver:
    """Carries out what a `LogWriter` decides: what waits in a queue is appended to the log.

    `on_begin` is awaited when an epoch has begun, and attaches the queue; `on_end` when it has
    ended, and detaches it. `on_append` is called with the bytes of each body that was appended.
    Owner: the event loop of the connection.
    """

    def __init__(
        self,
        log: Log,
        settings: StreamSettings,
        writer: LogWriter,
        queue: LogQueue,
        *,
        on_begin: Callable[[], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
        on_append: Callable[[int], None],
    ) -> None:
        self.head = Head(0, 0, None)  # the end of the log when it was last looked at
        self.bytes = 0  # of the bodies that were appended
        self._log = log
        self._settings = settings
        self._writer = writer
        self._queue = queue
        self._on_begin, self._on_end, self._on_append = on_begin, on_end, on_append
        self._bell = asyncio.Event()
        self._epoch = ""  # that the queue is attached for
        self._state = ""  # that was logged
        self._next_turn = 0.0

    def wake(self) -> None:
        """Look at the queue now."""
        self._bell.set()

    async def run(self) -> None:
        """Go on until it is cancelled, or the connection is closed for good."""
        try:
            while not self._log.is_closed:
                # Only of an attached queue: the trouble stays until then, and would end each
                # epoch that tries to begin.
                if self._epoch and self._queue.trouble:
                    self._writer.abandon(self._queue.trouble)
                await self._follow_state()
                step = self._writer.step(time.monotonic())
                if isinstance(step, Ready):
                    await self._take_turn()
                elif isinstance(step, Rest):
                    await asyncio.sleep(step.until - time.monotonic())
                else:
                    await self._ask(step)
        finally:
            # Also when it is cancelled: the tap must not go on packing for a queue nobody empties.
            await self._end()

    async def _follow_state(self) -> None:
        """Attach the queue if an epoch has begun, and detach it if it has ended."""
        writer = self._writer
        # It may go on: what waits stays until that is known.
        if writer.state is WriterState.UNSURE:
            return
        epoch = writer.epoch if writer.state is WriterState.WRITING else ""
        state = f"{writer.state} epoch {epoch}" if epoch else f"{writer.state}: {writer.reason}"
        if state != self._state:
            self._state = state
            logger.info("%s: %s", self._log.pool, state)
        if epoch == self._epoch:
            return
        await self._end()
        if epoch:
            self._epoch = epoch
            try:
                await self._on_begin()
            except BusyError as error:  # the subscriber's thread is blocked: another epoch, later
                writer.abandon(str(error))

    async def _end(self) -> None:
        if self._epoch:
            self._epoch = ""
            await self._on_end()

    async def _take_turn(self) -> None:
        """Write what waits in the queue, or wait until there is something."""
        limit = min(_BODY_BYTES, self._log.max_body_bytes)
        wait = self._next_turn - time.monotonic()
        if wait > 0 and self._queue.waiting_bytes < limit:
            # An append costs NATS and each replica about the same whatever is in it.
            await asyncio.sleep(wait)
        self._bell.clear()  # before the look: what comes after it rings again
        body = self._queue.take(limit)
        if body:
            self._next_turn = time.monotonic() + _TURN
            self._writer.write(body)
        else:
            await self._bell.wait()

    async def _ask(self, step: Look | Make | Append) -> None:
        """Ask NATS for what a step needs, and report what came of it."""
        log, writer = self._log, self._writer
        if isinstance(step, Append) and len(step.body) > log.max_body_bytes:
            # The connection has moved on to a server that accepts less than the one before.
            writer.abandon(f"max_payload of the server is below {len(step.body)} bytes")
            return
        try:
            if isinstance(step, Append):
                seq = await log.append(*step)
                writer.acked(seq)
                self.bytes += len(step.body)
                self._on_append(len(step.body))
            elif isinstance(step, Look):
                self.head = await log.head()
                writer.saw(self.head, time.monotonic())
            else:
                await log.make(self._settings)
                writer.made()
        except AppendRefusedError:
            writer.refused()
        except (NatsError, ConfigurationError) as error:
            if isinstance(error, NoStreamError) and isinstance(step, Look):
                writer.saw_no_stream()
            else:
                writer.failed(str(error), time.monotonic())


class LogQueue:
    """Stands where the fan-out's `Outflow` stands, and keeps messages until they are taken.

    While it is not attached, messages are dropped: another relay writes. If it is attached and
    full, it delays the subscriber's thread as long as messages are taken, for at most a second
    that grows back slowly. Then it *overflows*: it drops all, and is not attached any more.

    `on_message` is called by `send` if `take` found nothing before. `most`: bytes that may wait.
    Thread safety: `send`, `attach`, `admit` and `close` by the subscriber's thread, the others by
    any.
    """

    def __init__(
        self,
        on_message: Callable[[], None],
        *,
        most: int = MAX_MESSAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chunk_bytes = _CHUNK_BYTES
        self.trouble = ""  # why it overflowed, until it is attached again
        self.is_attached = False  # whether messages are kept
        self.waiting_bytes = 0  # of the messages that wait
        self._on_message = on_message
        self._most = most
        self._clock = clock
        self._patience = Patience(_QUEUE_PATIENCE, clock)
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._pieces: deque[bytes] = deque()  # bodies of a message that was too long for one
        self._taken_at = clock()
        self._is_awaited = False
        self._blocked = 0.0
        self._counters: Counter[str] = Counter()

    def attach(self) -> None:
        """Keep every message from the next one on."""
        with self._changed:
            self._empty()
            self.trouble = ""
            self.is_attached = True
            self._taken_at = self._clock()

    def detach(self) -> None:
        """Drop all messages, and every one from now on."""
        with self._changed:
            self._empty()
            self.is_attached = False
            self._changed.notify_all()

    close = detach  # nobody waits any more

    def send(self, body: bytes) -> None:
        """Keep a message, if this is attached."""
        with self._changed:
            if self.is_attached and self.waiting_bytes + len(body) > self._most:
                self._wait_for_room(len(body))
            if not self.is_attached:
                return
            self._messages.append(body)
            self.waiting_bytes += len(body)
            self._counters["messages"] += 1
            self._counters["bytes"] += len(body)
            is_awaited, self._is_awaited = self._is_awaited, False
        # Only for who found nothing: a call on another thread's loop costs more than a message.
        if is_awaited:
            self._on_message()

    def take(self, limit: int) -> bytes:
        """Return the messages that wait, as one body of at most `limit` bytes; b"" if none does."""
        with self._changed:
            self._taken_at = self._clock()
            if not self._pieces and self._messages:
                messages: list[bytes] = []
                size = 0
                while self._messages:
                    size += len(self._messages[0]) + AROUND_BYTES
                    if size > limit:
                        break
                    messages.append(self._messages.popleft())
                if messages:
                    self._pieces.append(join_bodies(messages))
                else:
                    # One alone is too long. Its pieces go out first, in bodies of their own.
                    messages.append(self._messages.popleft())
                    self._pieces.extend(cut_message(messages[0], limit))
                self.waiting_bytes -= sum(map(len, messages))
            body = self._pieces.popleft() if self._pieces else b""
            self._is_awaited = not body
            self._changed.notify_all()
        return body

    def admit(self) -> None:
        """Do nothing: the readers of the log need no admission."""

    def count_readers(self) -> int:
        """Return 1 if messages are kept, else 0."""
        return int(self.is_attached)

    def statistics(self) -> dict[str, float]:
        """Return what was kept, how often it overflowed, and for how long the thread waited."""
        return {
            "messages": self._counters["messages"],
            "bytes": self._counters["bytes"],
            "waiting_bytes": self.waiting_bytes,
            "overflows": self._counters["overflows"],
            "blocked_seconds": self._blocked,
        }

    def _wait_for_room(self, size: int) -> None:
        """Wait until a message has room; overflow if that is too long, or impossible."""
        began = self._clock()
        left = self._patience.left()
        while self.is_attached and self.waiting_bytes + size > self._most:
            now = self._clock()
            # Less long if nothing is taken at all: then NATS is away, and waiting does not help.
            until = min(began + left, self._taken_at + _QUEUE_PATIENCE)
            if size > self._most:
                self.trouble = f"a message of {size} bytes is too long: at most {self._most} can be"
            elif now >= until:
                self.trouble = f"{self.waiting_bytes} bytes wait, and NATS accepts them too slowly"
            else:
                self._changed.wait(until - now)
                continue
            self._counters["overflows"] += 1
            self._empty()
            self.is_attached = False
            self._is_awaited = False
            self._on_message()
        self._patience.spend()
        self._blocked += self._clock() - began

    def _empty(self) -> None:
        self._messages.clear()
        self._pieces.clear()
        self.waiting_bytes = 0
