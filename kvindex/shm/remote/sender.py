"""The writer's side of a queue over TCP."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence

import zmq

from kvindex.curve import Curve
from kvindex.errors import ClosedError, ConfigurationError, QueueTimeoutError
from kvindex.ring import Buffer, Patience, Waiting
from kvindex.shm.remote.address import endpoint_host
from kvindex.shm.remote.connections import Callers
from kvindex.shm.remote.credits import SendWindow
from kvindex.shm.remote.frames import (
    MAX_FRAMES,
    PACKED_BYTES,
    TOKEN_BYTES,
    Ready,
    message_header,
    packed_message,
)
from kvindex.shm.remote.readers import Readers
from kvindex.shm.remote.sockets import MAX_WINDOW, RemoteLink, WatchedSocket

__all__ = ["RemoteSender"]

logger = logging.getLogger(__name__)

_FLUSH = 0.1  # seconds for what the farewell left in ZeroMQ's hands


class RemoteSender:
    """Sends each message to every reader on other machines, and loses none silently.

    A reader is sent a message only while it has credit: fewer than `window` messages, and no more
    than `max_window_bytes`, that it has not acknowledged. Otherwise `send` waits. Readers that die
    are removed, and their ranks returned; who comes in place of one that died or left begins with
    the message that is sent next. What readers say is taken, and a new one let in, when `send`,
    `serve` or one of the waits is called: there is no thread inside but ZeroMQ's.

    Args:
        n_remote: how many readers are expected; `send` waits until each has joined once.
        connect_ip: the address to bind to, and that readers connect to; see `endpoint_host`.
        window: messages that each reader may have unacknowledged, 1 to 4096.
        max_window_bytes: the same in bytes; a larger message goes when all else is acknowledged.
        max_message_bytes: a larger message is refused by `send`.
        curve: the writer's keys; without them the token and all messages travel in the clear.
        link: heartbeats, and how long `close` waits.
        waiting: how often a wait looks at `cancel`, and when it warns.

    Raises:
        ConfigurationError: a value cannot work, or the address cannot be bound to.

    Attributes:
        address: where readers connect; the system chose the port.
        token: what readers must show: 32 random bytes. Give it only to readers.

    Thread safety: one thread at a time; `statistics` and `connected` may be asked by any.
    """

    def __init__(
        self,
        n_remote: int,
        connect_ip: str,
        *,
        window: int = 256,
        max_window_bytes: int = 64 * 1024 * 1024,
        max_message_bytes: int,
        curve: Curve | None = None,
        link: RemoteLink | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        if not 1 <= window <= MAX_WINDOW:
            raise ConfigurationError(f"window must be 1 to {MAX_WINDOW} messages, not {window!r}")
        if max_window_bytes < 1 or max_message_bytes < 1:
            raise ConfigurationError("max_window_bytes and max_message_bytes must be positive")
        host = endpoint_host(connect_ip)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._link = link or RemoteLink()
        self._waiting = waiting or Waiting()
        self._max_message_bytes = max_message_bytes
        self._serve_every = max(1, window // 4)
        self._unserved = 0  # messages sent since `_serve`
        self._waits = 0
        self._closed = False
        self._interrupted = False
        self._window = SendWindow(messages=window, size=max_window_bytes)
        self._watched = WatchedSocket.bind(host, self._link, curve)
        self._callers = Callers(self._watched)
        self._readers = Readers(self._callers, self._window, n_remote=n_remote, token=self.token)
        self.address = f"tcp://{host}:{self._watched.port}"

    # -- for the writer

    @property
    def connected(self) -> frozenset[int]:
        """The ranks of the readers that have joined and are still here, as far as is known."""
        return frozenset(self._readers.ranks.values())

    @property
    def next_seq(self) -> int:
        """The seq of the next message."""
        return self._window.next_seq

    def wait_connected(
        self, timeout: float | None = None, cancel: threading.Event | None = None
    ) -> frozenset[int]:
        """Wait until all readers are here; return the ranks that died meanwhile.

        Raises: as `send`.
        """
        self._check_usable()
        self._wait_until(lambda: not self._readers.absent, timeout, cancel, self._absent)
        return self._readers.take_dead()

    def send_ready(self) -> None:
        """Tell all readers, present and future, that all had joined: `wait_ready` ends."""
        self._check_usable()
        self._readers.ready = True
        self._readers.tell(Ready())

    def send(
        self,
        frames: Sequence[Buffer],
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> frozenset[int]:
        """Send a message to every reader; return the ranks that were found dead.

        The frames are copied: their memory may be used again at once. Either every reader that is
        still there is sent the message, or (when an error is raised) none is.

        Raises:
            QueueTimeoutError: a reader had no credit, or had never joined, for `timeout` seconds.
            WaitCancelledError: `cancel` was set while waiting for that.
            ConfigurationError: the message has no frames, too many, or too many bytes.
            ClosedError: the sender was closed, or an exception (such as KeyboardInterrupt) broke
                into an earlier call while some readers had been sent a message and others not.
        """
        self._check_usable()
        size = self._checked_size(frames)
        if self._readers.absent or self._unserved >= self._serve_every:
            self._serve()
        if not self._admits(size):
            self._waits += 1
            self._wait_until(lambda: self._admits(size), timeout, cancel, self._owing)
        parts = self._parts(frames, size)
        self._interrupted = True  # an exception in between leaves readers that differ
        self._send_to_all(parts, size)
        self._interrupted = False
        if self._readers.lost:
            self._serve()
        return self._readers.take_dead()

    def serve(self) -> frozenset[int]:
        """Take what readers have said, without waiting; return the ranks that were found dead."""
        self._check_usable()
        self._serve()
        return self._readers.take_dead()

    def evict(self, rank: int) -> bool:
        """Take a reader off the queue, which is told; return whether it was on it."""
        self._check_usable()
        return self._readers.evict(rank)

    def statistics(self) -> dict[str, int]:
        """Return the counters since the start, and how things are now.

        Messages `sent` and `sent_bytes` (once, however many readers); `waits` for credit or for
        readers to join; readers that `joined`, `left`, `died`, were `evicted`;
        `refused_*`: what was ignored, and why (`refused_cut_off`: connections that ended without
        joining; `refused_not_joined`: frames of who has not joined, or not any more). Now:
        `connected` readers, `unread` messages and `unread_bytes` of the reader that has most.
        """
        window = self._window
        sent = {"sent": window.next_seq, "sent_bytes": window.sent_bytes, "waits": self._waits}
        now = {
            "connected": len(self._readers.ranks),
            "unread": window.unread,
            "unread_bytes": window.unread_bytes,
        }
        return sent | self._readers.statistics() | now

    def __enter__(self) -> RemoteSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell the readers that this was all, and wait until they have read it. Idempotent.

        It waits at most `link.linger` seconds for who has not. A reader that is slower still reads
        the rest, if all of it has reached its machine by then; it is told otherwise.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not (self._interrupted or self._callers.half_said):
                self._farewell()
        finally:
            self._watched.close(_FLUSH)

    # -- sending

    def _checked_size(self, frames: Sequence[Buffer]) -> int:
        if not 0 < len(frames) <= MAX_FRAMES:
            raise ConfigurationError(
                f"a message has 1 to {MAX_FRAMES} frames, this one {len(frames)}"
            )
        size = 0
        for frame in frames:
            size += len(frame) if type(frame) is bytes else _bytes_in(frame)
        if size > self._max_message_bytes:
            raise ConfigurationError(
                f"a message of {size} bytes; max_message_bytes is {self._max_message_bytes}"
            )
        return size

    def _admits(self, size: int) -> bool:
        return not self._readers.awaited and self._window.admits(size)

    def _parts(self, frames: Sequence[Buffer], size: int) -> list[bytes | zmq.Frame]:
        if size + 4 * len(frames) <= PACKED_BYTES:
            return [packed_message(self.next_seq, frames)]
        # One copy, which all readers' connections share.
        copies = [zmq.Frame(frame, copy=True) for frame in frames]
        return [message_header(self.next_seq, len(frames)), *copies]

    def _send_to_all(self, parts: list[bytes | zmq.Frame], size: int) -> None:
        for name in self._readers.ranks:
            self._readers.say(name, parts)
        self._window.record(size)
        self._unserved += 1

    # -- waiting

    def _wait_until(
        self,
        reached: Callable[[], bool],
        timeout: float | None,
        cancel: threading.Event | None,
        awaited: Callable[[], str],
    ) -> None:
        patience = Patience(self._waiting, timeout)
        while True:
            self._serve()
            if reached():
                return
            patience.check_cancel(cancel, awaited())
            if patience.exhausted:
                raise QueueTimeoutError(
                    f"waited {patience.timeout:g} s for {awaited()}", timeout=patience.timeout
                )
            patience.warn(awaited())
            self._watched.wait(math.ceil(1000 * patience.slice()))

    def _serve(self) -> None:
        self._unserved = 0
        self._readers.serve()

    def _absent(self) -> str:
        present = sorted(self.connected)
        return f"{self._readers.absent} remote readers to join; joined: ranks {present}"

    def _owing(self) -> str:
        if self._readers.awaited:
            return f"{self._readers.awaited} remote readers that never joined"
        window = self._window
        return (
            f"remote reader {window.slowest} to read: {window.unread} messages of"
            f" {window.unread_bytes} bytes are unread"
        )

    # -- the end

    def _farewell(self) -> None:
        self._readers.take_leave()
        try:
            self._wait_until(lambda: not self._window.unread, self._link.linger, None, self._owing)
        except QueueTimeoutError:
            for rank in self._readers.ranks.values():
                if unread := self._window.unread_by(rank):
                    logger.warning(
                        "closed while remote reader %d had not read %d messages", rank, unread
                    )

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the sender was closed")
        if self._interrupted or self._callers.half_said:
            raise ClosedError(
                f"message {self.next_seq} was interrupted while some readers had it and others"
                " not: close the queue"
            )


def _bytes_in(frame: Buffer) -> int:
    try:
        view = memoryview(frame)
    except TypeError as error:
        raise ConfigurationError(f"a frame must be a buffer of bytes: {error}") from error
    if not view.c_contiguous:
        raise ConfigurationError("a frame must be contiguous in memory; copy it first")
    return view.nbytes
