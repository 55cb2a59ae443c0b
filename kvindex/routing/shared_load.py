"""`SharedLoad`: several gateways before the same engines share their load over NATS.

Each sends what it has booked itself, in messages of bounded size: changed rows every 10 ms, all
rows each second. `SharedBoard` is that without I/O: what one publishes, and what a message changes.

A message is a msgpack array: version, gateway, number, rows. A row is an array: worker, dp_rank,
queued tokens, open requests, decode blocks, and tokens given lately as of the sending. The first
three numbers are sums of the gateway's own open bookings, not changes, so a lost message is made
good by the next one that has the row.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, cast

import msgspec
from msgspec import Meta

from kvindex.routing.load import HALF_LIFE, LoadColumns, LocalLoadBoard
from kvindex.wire.errors import UNREADABLE, DecodeError, NatsError
from kvindex.wire.forks import FORKED, disown_in_children
from kvindex.wire.log_rate import LogRate
from kvindex.wire.nats import (
    NatsPool,
    NatsThread,
    check_files,
    open_connection,
    parse_pool,
    run_apart,
)
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg
    from typing_extensions import Unpack

    from kvindex.wire.nats import NatsOptions

logger = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 0.010  # changed rows are sent this often
WHOLE_SECONDS: Final = 1.0  # and all rows this often
ROW_LIFE: Final = 3.0  # seconds after its receipt for which another gateway's row counts
VERSION: Final = 1
MAX_ROWS: Final = 1_000  # of one message
MAX_BYTES: Final = 1 << 20  # of one message; a server's own limit may be lower
MAX_NAME: Final = 256  # characters of a worker's name
MAX_LOAD: Final = 1 << 40  # in a row: doubles add 4,096 of these without an error
MAX_GATEWAYS: Final = 1_024
MAX_GATEWAY_ROWS: Final = 16_384
MAX_ALL_ROWS: Final = 65_536
_ZERO_LIFE: Final = 4.0  # seconds for which a row that became zero is sent
_HELD_ROWS: Final = 64  # rows for which the router's lock is held at once
_EXPIRY_SECONDS: Final = 0.25  # between looks for rows that were not renewed
_RETRY_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 2.0  # for a server that no longer answers
_PENDING_MESSAGES: Final = 16_384  # that wait to be read
_PENDING_BYTES: Final = 16 << 20

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOAD)]
LoadRow: TypeAlias = tuple[
    Annotated[str, Meta(max_length=MAX_NAME)],
    Annotated[int, Meta(ge=0, lt=1 << 32)],
    _Count,
    _Count,
    _Count,
    Annotated[float, Meta(ge=0.0, le=float(MAX_LOAD))],
]


class LoadMessage(msgspec.Struct, array_like=True, frozen=True):
    """A gateway's load on some ranks."""

    version: int
    gateway: Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")]  # drawn at random by the sender
    number: Annotated[int, Meta(ge=1, le=1 << 53)]  # counts the sender's messages, from 1
    rows: Annotated[list[LoadRow], Meta(max_length=MAX_ROWS)]


class _Head(msgspec.Struct, array_like=True):
    version: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LoadMessage).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


def encode_load(
    gateway: str, number: int, rows: Sequence[LoadRow], max_bytes: int = MAX_BYTES
) -> Iterator[bytes]:
    """Yield the messages with these rows, numbered from `number`; one at least.

    A row that is larger than `max_bytes` is left out.
    """
    parts = [rows[first : first + MAX_ROWS] for first in range(0, len(rows), MAX_ROWS)] or [rows]
    parts.reverse()
    while parts:
        part = parts.pop()
        data = _encode(LoadMessage(VERSION, gateway, number, list(part)))
        if len(data) <= max_bytes:
            number += 1
            yield data
        elif len(part) > 1:
            half = len(part) // 2
            parts += [part[half:], part[:half]]


def decode_load(data: bytes) -> LoadMessage:
    """Return a received message, every number of which is within its bounds.

    DecodeError: it is none; its text is the reason: "size", "version" or "malformed".
    """
    if len(data) > MAX_BYTES:
        raise DecodeError("size")
    try:
        message = _decode(data)
    except UNREADABLE:
        reason = "malformed"
        with suppress(*UNREADABLE):  # another version may have other rows: its head says so
            if _decode_head(data).version != VERSION:
                reason = "version"
        raise DecodeError(reason) from None
    if message.version != VERSION:
        raise DecodeError("version")
    return message


# The board, without I/O -------------------------------------------------------------------------

_Key: TypeAlias = tuple[str, int]  # equal to a `Rank`, and made faster
# Another gateway's row as it counts here: queued, open, decode, given in this board's unit, that
# unit's origin, and when it was received.
_TheirRow: TypeAlias = tuple[int, int, int, float, float, float]

_NO_ROW: Final[_TheirRow] = (0, 0, 0, 0.0, 0.0, 0.0)


class _Gateway:
    """Another gateway: its last message, and its rows."""

    def __init__(self) -> None:
        self.number = 0  # of its last message; 0: none yet
        self.heard_at = 0.0
        self.rows: dict[_Key, _TheirRow] = {}  # the longest not renewed first


class SharedBoard(LocalLoadBoard):
    """A board that counts what other gateways report, and yields what they need.

    The columns have the bookings of all gateways; only own ones are published. A row that its
    gateway did not renew for `ROW_LIFE` counts no more: that covers gateways that died, ranks that
    were removed, and zeros that were lost.

    Thread safety: the router calls `add`, `give` and so on under its lock; one other thread calls
    `changed_rows`, `all_rows`, `receive` and `expire`, which hold that lock for 64 rows at a time.
    `wake` is called under the lock when there are rows to publish: it must not wait.
    """

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._booked, self._booked_absent = LoadColumns(*(c[:] for c in self._own)), {}
        self._shown = self._booked
        self.gateway = os.urandom(6).hex()
        self.is_sharing = True
        self._wake = wake
        self._is_awake = False  # whether what changes now will be published without a wake
        self._changed: dict[Rank, None] = {}  # what has changed since the last rows
        self._published: dict[Rank, float] = {}  # ranks, and when their rows were last not zero
        self._number = 0  # of the last message
        self._others: dict[str, _Gateway] = {}
        self._counts = dict.fromkeys(("received", "missed", "late", "unknown_ranks", "unsent"), 0)
        self._refused: dict[str, int] = {}

    # The router's calls

    def arrange(self, ranks: Sequence[Rank]) -> None:
        # First, since an interrupted call is made again: a rank without a row has nothing given.
        for rank in self._rows.keys() - set(ranks):
            for other in self._others.values():
                if rank in other.rows:
                    queued, opened, decode, _, origin, received_at = other.rows[rank]
                    other.rows[rank] = (queued, opened, decode, 0.0, origin, received_at)
        super().arrange(ranks)

    def add(
        self, rank: Rank, queued_tokens: int, open_requests: int, decode_blocks: int, now: float
    ) -> None:
        self._note(rank)
        super().add(rank, queued_tokens, open_requests, decode_blocks, now)

    def give(self, rank: Rank, new_tokens: int, now: float) -> None:
        self._note(rank)
        super().give(rank, new_tokens, now)

    def _note(self, rank: Rank) -> None:
        if self.is_sharing:
            self._changed[rank] = None
            if not self._is_awake:
                self._wake()
                self._is_awake = True  # last: interrupted, it wakes twice

    def statistics(self) -> dict[str, Any]:
        """Return what was received; see `SharedLoad.statistics`."""
        with self._lock:
            now = self._clock()
            firsts = [next(iter(other.rows.values()), None) for other in self._others.values()]
            ages = [now - row[-1] for row in firsts if row is not None]
            return {
                "gateways": len(self._others),
                "rows": self._row_count(),
                "age": max(0.0, *ages) if ages else None,
                **self._counts,
                "refused": dict(self._refused),
            }

    # What is published

    def changed_rows(self) -> list[LoadRow]:
        """Return own rows that have changed since they were last returned."""
        with self._lock:
            changed, self._changed = self._changed, {}
            self._is_awake = False
        return self._own_rows(list(changed))

    def all_rows(self) -> list[LoadRow]:
        """Return own rows that are not zero, and those that became zero lately."""
        with self._lock:
            changed, self._changed = self._changed, {}
            self._is_awake = False
        return self._own_rows(list(self._published | changed))

    def encode(self, rows: Sequence[LoadRow], max_bytes: int = MAX_BYTES) -> Iterable[bytes]:
        """Yield the messages with these rows: one at least, which is a sign of life."""
        for data in encode_load(self.gateway, self._number + 1, rows, max_bytes):
            self._number += 1
            yield data

    def _own_rows(self, ranks: Sequence[Rank]) -> list[LoadRow]:
        rows = []
        sent = [rank for rank in ranks if len(rank.worker) <= MAX_NAME]  # others refuse the message
        self._counts["unsent"] += len(ranks) - len(sent)
        for first in range(0, len(sent), _HELD_ROWS):
            with self._lock:
                now = self._clock()
                # What is given counts half after each half-life; an origin of infinity: nothing is.
                halvings = max(0.0, now - self._origin) / HALF_LIFE
                decay = 2.0**-halvings
                for rank in sent[first : first + _HELD_ROWS]:
                    place, given = self._rows.get(rank), 0.0
                    if place is None:
                        load = self._absent.get(rank, (0.0, 0.0, 0.0))
                    else:
                        own = self._own
                        load = own.queued[place], own.open[place], own.decode[place]
                        given = min(own.given[place] * decay, MAX_LOAD)
                    if min(load) < 0.0 or max(load) > MAX_LOAD:
                        # Who adds by hand may do so wrongly, and others refuse such a message.
                        queued, opened, decode = (int(min(max(0.0, n), MAX_LOAD)) for n in load)
                    else:
                        queued, opened, decode = map(int, load)
                    if queued or opened or decode or given >= 1.0:
                        self._published[rank] = now
                    elif not 0.0 <= now - self._published.setdefault(rank, now) < _ZERO_LIFE:
                        # A zero is sent several times, since the first may be lost.
                        del self._published[rank]
                        continue
                    rows.append((*rank, queued, opened, decode, given))
        return rows

    # What is received

    def receive(self, data: bytes) -> str:
        """Count a message of another gateway; return why it was refused, or ""."""
        try:
            message = decode_load(data)
        except DecodeError as error:
            return self._refuse(str(error))
        if message.gateway == self.gateway:
            return self._refuse("own id")
        # Ranks that this router does not have are none of its memory. Those that it gets later
        # count from their gateway's next whole message on. Without the lock: the router does not
        # wait for this look.
        known, sender = cast("dict[_Key, int]", self._rows), self._others.get(message.gateway)
        theirs = {} if sender is None else sender.rows
        rows = [row for row in message.rows if (key := row[:2]) in known or key in theirs]
        with self._lock:
            if not self.is_sharing:
                return ""
            other = self._others.get(message.gateway)
            if other is None:
                if len(self._others) >= MAX_GATEWAYS:
                    return self._refuse("too many gateways")
                other = _Gateway()
            free = min(MAX_GATEWAY_ROWS - len(other.rows), MAX_ALL_ROWS - self._row_count())
            if len(rows) > free and sum(row[:2] not in other.rows for row in rows) > free:
                return self._refuse("too many rows")
            if other.number and message.number <= other.number:
                self._counts["late"] += 1
                return ""
            self._counts["received"] += 1
            self._counts["missed"] += message.number - other.number - 1 if other.number else 0
            self._counts["unknown_ranks"] += len(message.rows) - len(rows)
            other.number, other.heard_at = message.number, self._clock()
            self._others[message.gateway] = other
        for first in range(0, len(rows), _HELD_ROWS):
            with self._lock:
                if self.is_sharing:
                    self._replace(other, rows[first : first + _HELD_ROWS])
        return ""

    def expire(self) -> None:
        """Drop rows that were not renewed, and gateways that are silent and have no rows."""
        with self._lock:
            others = list(self._others.items())
        for gateway, other in others:
            stale: list[_Key] | None = None
            while stale is None or len(stale) == _HELD_ROWS:  # else the rest is younger
                with self._lock:
                    now = self._clock()
                    stale = []
                    for rank, row in islice(other.rows.items(), _HELD_ROWS):
                        if not _is_old(row[-1], now):  # nor are those after it
                            break
                        stale.append(rank)
                    self._replace(other, [(*rank, 0, 0, 0, 0.0) for rank in stale])
                    if not other.rows and _is_old(other.heard_at, now):
                        self._others.pop(gateway, None)

    def _replace(self, other: _Gateway, rows: Iterable[LoadRow]) -> None:
        """Let another gateway's rows count instead of those before; under the lock."""
        now = self._clock()
        weight, origin = self._weight(now), self._origin
        queued_column, open_column, decode_column, given_column, *_ = booked = self._booked
        own_given, places = self._own.given, cast("dict[_Key, int]", self._rows)
        for worker, dp_rank, queued, opened, decode, tokens in rows:
            rank = (worker, dp_rank)
            place = places.get(rank)
            given = 0.0 if place is None else tokens * weight
            # Out, and in again at the end: the rows that were not renewed for longest stay first.
            was_queued, was_open, was_decode, was_given, unit, _ = other.rows.pop(rank, _NO_ROW)
            if queued or opened or decode or given:
                other.rows[rank] = (queued, opened, decode, given, origin, now)
            more = queued - was_queued, opened - was_open, decode - was_decode
            if place is None:
                load = self._booked_absent.pop(Rank(*rank), (0.0, 0.0, 0.0))
                load = load[0] + more[0], load[1] + more[1], load[2] + more[2]
                if any(load):  # else the rank takes no memory
                    self._booked_absent[Rank(*rank)] = load
                continue
            queued_column[place] += more[0]
            open_column[place] += more[1]
            decode_column[place] += more[2]
            # Under another origin the sums began anew since: they have nothing of that row.
            given += given_column[place] - (was_given if unit == origin else 0.0)
            # Sums of fractions may fall below what they should be.
            given_column[place] = given if given > own_given[place] else own_given[place]
            if self._shown is not booked:
                self._show_row(Rank(*rank), place)

    def end_sharing(self) -> None:
        """Count own load only, from now on."""
        with self._lock:
            self.is_sharing = False
            self._others = {}
            self._booked, self._booked_absent = self._own, self._absent
            self._shown = self._booked
            if self._corrections:
                self._show()

    @property
    def has_others(self) -> bool:
        """Whether another gateway counts."""
        return bool(self._others)

    def _row_count(self) -> int:
        return sum(len(other.rows) for other in self._others.values())

    def _refuse(self, reason: str) -> str:
        self._refused[reason] = self._refused.get(reason, 0) + 1
        return reason


def _is_old(received_at: float, now: float) -> bool:
    # A clock that goes back drops rows, too; they are soon sent again.
    return not 0.0 <= now - received_at < ROW_LIFE


# Over NATS ---------------------------------------------------------------------------------------


class SharedLoad(SharedBoard):
    """A board of loads that gateways share, each with a router of its own, over core NATS.

    ```
    with SharedLoad("nats://n1,n2", pool="llama") as loads:
        router = Router(client, loads=loads)
    ```

    Each gateway sends what it has booked itself: changed rows every 10 ms, all rows each second. So
    the columns have every gateway's bookings, some 10 ms late. Nothing waits for the network. A
    lost message is made good within a second; the load of a gateway that ends counts for about 3 s
    more.

    Without a server, a gateway goes on with its own bookings, and connects when there is one;
    `statistics` says so. A forked child makes a router and a board of its own.

    Messages have names of ranks and numbers, no prompts. Whoever may publish on the pool's load
    subject can feign load: give that right to gateways only.

    Args:
        url: the pool's servers, as "nats://HOST[:PORT][,HOST…][/POOL]"; tls:// for TLS.
        pool: the pool's name, if the URL does not have it.
        options: see `NatsOptions`.

    Raises:
        ConfigurationError: the URL, an option or a file cannot be used, or nats-py is missing.

    Thread safety: as `LoadBoard`. `statistics` and `close` may be called from any thread.

    Complexity: `add` and `columns` are O(1). Memory and CPU grow with the rows that change at all
    gateways: some 2 µs for each row received.
    """

    def __init__(self, url: str, pool: str | None = None, **options: Unpack[NatsOptions]) -> None:
        nats_pool = parse_pool(url, pool, options)
        check_files(nats_pool)
        courier = _Courier(self, nats_pool)
        super().__init__(courier.wake)
        self._courier = courier
        courier.start()
        # The thread has no reference that lasts, so a board that is dropped ends it.
        self._finalizer = weakref.finalize(self, courier.thread.request_stop)
        self._finalizer.atexit = False
        disown_in_children(self, SharedLoad._disown)

    def statistics(self) -> dict[str, Any]:
        """Return the state of sharing as JSON-ready values.

        `connected`; `trouble`: what is wrong, or ""; `sent`: messages; `gateways`: others of which
        load was received; `rows`: theirs that count now; `age`: seconds since the receipt of the
        oldest of these, or None; `received`: messages; `missed`: numbers that were skipped, such as
        of lost messages; `late`: messages that came after a later one; `unknown_ranks`: rows that
        were left out, of ranks that the router does not have; `unsent`: own rows that were left
        out, since others refuse a worker's name of over 256 characters; `refused`: by reason.
        """
        return {**self._courier.statistics(), **super().statistics()}

    def close(self) -> None:
        """Stop sharing: others' load counts no more, own load stays. Idempotent."""
        self._finalizer.detach()
        self._courier.thread.close()
        self.end_sharing()
        self._courier.end("closed")

    def __enter__(self) -> SharedLoad:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _disown(self) -> None:
        """In a forked child, which lacks the thread."""
        self._finalizer.detach()
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._courier.end(FORKED)


class _Courier:
    """The thread that connects a board with NATS; it ends when the board is dropped."""

    thread: NatsThread

    def __init__(self, board: SharedLoad, pool: NatsPool) -> None:
        self._board = weakref.ref(board)
        self._pool = pool
        self._bell = asyncio.Event()
        self._is_connected = False
        self._trouble = "not connected yet"
        self._sent = 0
        self._send_all = True
        self._is_ending = False
        self._log_rate = LogRate()

    def start(self) -> None:
        """Start the thread, once the board is whole."""
        self.thread = NatsThread("kvindex-load", self._run, self._fail)

    def wake(self) -> None:
        """Have changed rows sent soon."""
        self.thread.call_soon(self._bell.set)

    def end(self, trouble: str) -> None:
        """Note that the thread has ended."""
        self._is_connected, self._trouble = False, trouble

    def statistics(self) -> dict[str, Any]:
        """Return the state of the connection."""
        return {"connected": self._is_connected, "trouble": self._trouble, "sent": self._sent}

    async def _run(self) -> None:
        """Connect and share until the board is dropped, anew if a server closes the connection."""
        name = f"kvindex load {self._pool.name}"
        while not self._is_ending:
            try:
                client = await open_connection(
                    self._pool, name, no_echo=True, on_change=self._change
                )
            except NatsError as error:
                self._change(str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                await run_apart(
                    client.subscribe(
                        self._pool.load_subject,
                        cb=self._receive,
                        pending_msgs_limit=_PENDING_MESSAGES,
                        pending_bytes_limit=_PENDING_BYTES,
                    )
                )
                self._change("")
                await self._exchange(client)
            except Exception:
                if not client.is_closed:  # for good, by the server, such as at expired credentials
                    raise
            finally:
                self._is_ending = not client.is_closed  # else another one is opened
                with suppress(Exception):
                    await asyncio.wait_for(client.close(), _CLOSE_SECONDS)

    async def _exchange(self, client: NatsClient) -> None:
        """Send changed rows when there are some, all rows each second; drop what is old."""
        loop = asyncio.get_running_loop()
        now = loop.time
        whole_at = expire_at = now()
        while not client.is_closed:
            self._bell.clear()
            is_whole = self._send_all or now() >= whole_at
            if (board := self._board()) is None:
                return
            self._is_connected = client.is_connected
            if self._is_connected:
                rows = board.all_rows() if is_whole else board.changed_rows()
                if rows or is_whole:  # each second also without any: a sign of life
                    for data in board.encode(rows, min(client.max_payload, MAX_BYTES)):
                        await run_apart(client.publish(self._pool.load_subject, data))
                        self._sent += 1
                if is_whole and client.is_connected:
                    self._trouble = ""  # such as messages that were dropped since the last time
            # Without a connection nobody got these rows: all go again as soon as there is one.
            if is_whole:
                whole_at, self._send_all = now() + WHOLE_SECONDS, not self._is_connected
            if now() >= expire_at:
                board.expire()
                expire_at = now() + _EXPIRY_SECONDS
            others = board.has_others
            del board  # while this waits, the board may be dropped
            flush_at = now() + FLUSH_SECONDS
            timer = loop.call_at(min(whole_at, expire_at) if others else whole_at, self._bell.set)
            await self._bell.wait()
            timer.cancel()
            # What changes meanwhile goes along: a busy router would send a message per request.
            await asyncio.sleep(flush_at - now())

    async def _receive(self, message: Msg) -> None:
        board = self._board()
        if board is not None and (reason := board.receive(message.data)):
            self._log(reason, "a message on %s was refused: %s", self._pool.load_subject, reason)

    def _change(self, trouble: str) -> None:
        if self._is_ending:
            return
        self._trouble = trouble
        if not trouble:
            # What was sent meanwhile is lost: others get all rows as soon as they can.
            self._send_all = True
            self._bell.set()
        else:
            self._log("connection", "load is not shared with %s: %s", self._pool, trouble)

    def _fail(self, error: BaseException) -> None:
        """The thread has ended with an error: others' load must not count for ever."""
        self.end(f"{type(error).__name__}: {error}")
        logger.error("sharing of load has ended", exc_info=error)
        if (board := self._board()) is not None:
            board.end_sharing()

    def _log(self, kind: str, text: str, *details: object) -> None:
        if self._log_rate.allows(kind):
            logger.warning(text, *details)
