"""Carries out what a `LogWriter` decides: what waits in a queue is appended to the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kvindex.replicas.nats.log import (
    AppendRefusedError,
    Head,
    Log,
    NoStreamError,
    StreamSettings,
)
from kvindex.replicas.nats.log_queue import LogQueue
from kvindex.replicas.nats.log_writer import (
    Append,
    LogWriter,
    Look,
    Make,
    Ready,
    Rest,
    Step,
    WriterState,
)
from kvindex.wire.errors import BusyError, ConfigurationError, NatsError

logger = logging.getLogger(__name__)

_TURN = 0.010  # seconds from one append to the next, unless a full body waits
_BODY_BYTES = 512 << 10


class Writing:
    """Drives a writer. Owner: the event loop of the connection.

    Args:
        log: to append to.
        settings: of its stream, if it is to be made.
        writer: decides.
        queue: what to append.
        on_begin: awaited when an epoch has begun: it attaches the queue.
        on_end: awaited when it has ended: it detaches the queue.
        on_append: called with the bytes of each body that was appended.

    Attributes:
        head: the end of the log when it was last looked at.
        bytes: of the bodies that were appended.
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
        self.head = Head(0, 0, None)
        self.bytes = 0
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
                if self._epoch and self._queue.trouble:
                    self._writer.abandon(self._queue.trouble)
                await self._follow_state()
                await self._carry_out(self._writer.step(time.monotonic()))
        finally:
            await self._end()

    async def _follow_state(self) -> None:
        """Attach the queue if an epoch has begun, and detach it if it has ended."""
        writer = self._writer
        if writer.state is WriterState.UNSURE:  # it may go on
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

    async def _carry_out(self, step: Step) -> None:
        if isinstance(step, Ready):
            await self._take_turn()
        elif isinstance(step, Append):
            await self._append(step)
        elif isinstance(step, Rest):
            await asyncio.sleep(step.until - time.monotonic())
        elif isinstance(step, Look):
            await self._look()
        elif isinstance(step, Make):
            await self._make()

    async def _take_turn(self) -> None:
        """Write what waits in the queue, or wait until there is something."""
        limit = min(_BODY_BYTES, self._log.max_body_bytes)
        wait = self._next_turn - time.monotonic()
        if wait > 0 and self._queue.waiting_bytes < limit:
            await asyncio.sleep(wait)
        self._bell.clear()
        body = self._queue.take(limit)
        if body:
            self._next_turn = time.monotonic() + _TURN
            self._writer.write(body)
        else:
            await self._bell.wait()

    async def _append(self, append: Append) -> None:
        epoch, expected, body = append
        if len(body) > self._log.max_body_bytes:  # this server accepts less
            self._writer.abandon(f"max_payload of the server is below {len(body)} bytes")
            return
        try:
            seq = await self._log.append(epoch, expected, body)
        except AppendRefusedError:
            self._writer.refused()
        except NatsError as error:
            self._writer.failed(str(error), time.monotonic())
        else:
            self._writer.acked(seq)
            self.bytes += len(body)
            self._on_append(len(body))

    async def _look(self) -> None:
        try:
            self.head = await self._log.head()
        except NoStreamError:
            self._writer.saw_no_stream()
        except NatsError as error:
            self._writer.failed(str(error), time.monotonic())
        else:
            self._writer.saw(self.head, time.monotonic())

    async def _make(self) -> None:
        try:
            await self._log.make(self._settings)
        except (NatsError, ConfigurationError) as error:
            self._writer.failed(str(error), time.monotonic())
        else:
            self._writer.made()
