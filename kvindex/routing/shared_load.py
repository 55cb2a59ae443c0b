"""`SharedLoad`: several gateways before the same engines share their load over NATS."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvindex.routing.load_messages import MAX_BYTES
from kvindex.routing.shared_board import FLUSH_SECONDS, WHOLE_SECONDS, SharedBoard
from kvindex.wire.errors import NatsError
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

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg
    from typing_extensions import Unpack

    from kvindex.wire.nats import NatsOptions

logger = logging.getLogger(__name__)

_EXPIRY_SECONDS: Final = 0.25  # between looks for rows that were not renewed
_RETRY_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 2.0  # for a server that no longer answers
_PENDING_MESSAGES: Final = 16_384  # that wait to be read
_PENDING_BYTES: Final = 16 << 20


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

    Messages have names of ranks and numbers, no prompts. Whoever
    may publish on the pool's load subject can feign load: give that right to gateways only.

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
        link = _Link(self, nats_pool)
        super().__init__(link.wake)
        self._link = link
        link.start()
        # The thread has no reference that lasts, so a board that is dropped ends it.
        self._finalizer = weakref.finalize(self, link.thread.request_stop)
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
        return {**self._link.statistics(), **super().statistics()}

    def close(self) -> None:
        """Stop sharing: others' load counts no more, own load stays. Idempotent."""
        self._finalizer.detach()
        self._link.thread.close()
        self.end_sharing()
        self._link.end("closed")

    def __enter__(self) -> SharedLoad:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _disown(self) -> None:
        """In a forked child, which lacks the thread."""
        self._finalizer.detach()
        self._lock = threading.RLock()  # another thread of the parent may hold the old one
        self._link.end(FORKED)


class _Link:
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
        while not self._is_ending:
            await self._share()

    async def _share(self) -> None:
        """Share until the board is dropped, or the server closes the connection for good."""
        client = await self._connect()
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
            if not client.is_closed:
                raise
        finally:
            self._is_ending = not client.is_closed  # else another one is opened
            with suppress(Exception):
                await asyncio.wait_for(client.close(), _CLOSE_SECONDS)

    async def _connect(self) -> NatsClient:
        name = f"kvindex load {self._pool.name}"
        while True:
            try:
                return await open_connection(self._pool, name, no_echo=True, on_change=self._change)
            except NatsError as error:
                self._change(str(error))
                await asyncio.sleep(_RETRY_SECONDS)

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
                await self._publish(client, board, is_whole=is_whole)
            if is_whole:
                whole_at, self._send_all = now() + WHOLE_SECONDS, not self._is_connected
            if now() >= expire_at:
                board.expire()
                expire_at = now() + _EXPIRY_SECONDS
            others = board.has_others
            del board
            flush_at = now() + FLUSH_SECONDS
            timer = loop.call_at(min(whole_at, expire_at) if others else whole_at, self._bell.set)
            await self._bell.wait()
            timer.cancel()
            await asyncio.sleep(flush_at - now())

    async def _publish(self, client: NatsClient, board: SharedLoad, *, is_whole: bool) -> None:
        rows = board.all_rows() if is_whole else board.changed_rows()
        if not rows and not is_whole:
            return
        for data in board.encode(rows, min(client.max_payload, MAX_BYTES)):
            await run_apart(client.publish(self._pool.load_subject, data))
            self._sent += 1
        if is_whole and client.is_connected:
            self._trouble = ""  # such as messages that were dropped since the last time

    async def _receive(self, message: Msg) -> None:
        board = self._board()
        if board is not None and (reason := board.receive(message.data)):
            self._log(reason, "a message on %s was refused: %s", self._pool.load_subject, reason)

    def _change(self, trouble: str) -> None:
        if self._is_ending:
            return
        self._trouble = trouble
        if not trouble:
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
