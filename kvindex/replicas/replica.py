"""A replica: an index in this process that follows the one of a subscriber in another.

A `Replica` answers. Its `Follower` is the thread that joins, follows, and joins anew when that is
over, for whatever reason; `Origin` and `Membership` are what it needs of any place to join. Those
of a fan-out on this machine get a snapshot over the socket, and messages from the ring meanwhile.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import queue
import random
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import msgspec

from kvindex.client.answering import Answering
from kvindex.index import Index
from kvindex.replicas.copy import Copy
from kvindex.replicas.meeting_point import check_platform, connect_to
from kvindex.replicas.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_SECTION_BYTES,
    PROTOCOL,
    Admission,
    Attached,
    Begin,
    End,
    Frame,
    JoinersFrame,
    JoinRefusal,
    JoinRequest,
    Leave,
    RankSection,
    ReceivedMessage,
    ReportRequest,
    ServerReport,
    decode_frame,
    decode_message,
    encode_frame,
    frame_bytes,
)
from kvindex.shm.ring import RingReceiver, ShmRingBuffer, Waiting, check_native
from kvindex.subscribe import State
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import (
    UNREADABLE,
    ClosedError,
    ConfigurationError,
    DecodeError,
    KVIndexError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    SegmentError,
    SnapshotError,
    WriterDiedError,
)
from kvindex.wire.forks import FORKED, disown_in_children
from kvindex.wire.log_rate import LogRate

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 256 << 20
_LOOK = 0.05  # seconds between checks whether to stop: of a closing, and of a joining
_STEP = 1 << 20  # bytes that are received at once
_MAX_MESSAGE_BYTES = 1 << 30
_MAX_REPORT_BYTES = 1 << 28
_CONNECT_TIMEOUT = 1.0  # seconds; the kernel connects, however busy the server is
_SILENCE = 30.0  # seconds without a byte of the snapshot; others may be served first
_BACKOFF, _MAX_BACKOFF = 0.05, 1.0  # seconds between two attempts to join


def join(
    path: str | os.PathLike[str],
    timeout: float = 5.0,
    *,
    stale_after: float = 3.0,
    buffer_bytes: int = _BUFFER_BYTES,
) -> Replica:
    """Return a replica of the index of the `FanOut` that listens at `path`.

    It returns when the replica has all that the server had, ranks that are not live included:
    `Replica.wait_live` waits for those. It waits for a server that is not there yet.

    Args:
        path: as for `FanOut`.
        timeout: longest wait, in seconds.
        stale_after: seconds without a message of the server after which ranks are shown as stale;
            the server sends one every second.
        buffer_bytes: most bytes kept of the messages that arrive during the snapshot.

    Raises:
        QueueTimeoutError: the replica was not complete in time (a TimeoutError); it says why.
        ConfigurationError: joining is impossible: the server's index is of another kind, or a
            value cannot work.
        SegmentError: there is no native module, which the ring needs; whichever index runs.
    """
    check_platform()
    check_native()
    check_seconds(timeout=timeout, stale_after=stale_after)
    if buffer_bytes < 1:
        raise ConfigurationError(f"buffer_bytes must be at least 1, not {buffer_bytes!r}")
    return joined(Follower(FanOutOrigin(path, buffer_bytes), stale_after), timeout)


def check_seconds(**values: float) -> None:
    """Raise ConfigurationError unless each value is finite and above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} must be above 0 s, not {value!r}")


def joined(follower: Follower, timeout: float) -> Replica:
    """Return the replica of a follower once that has a copy; if not, close it and raise why."""
    try:
        if not follower.joined.wait(timeout):
            raise QueueTimeoutError(
                f"no copy from {follower.origin.name} in {timeout:g} s: {follower.trouble}",
                timeout=timeout,
            )
        if isinstance(follower.failed, RefusedError):
            raise ConfigurationError(str(follower.failed))
        if follower.failed is not None:
            raise follower.failed
    except BaseException:
        follower.close()
        raise
    return Replica(follower)


class Replica(Answering):
    """Answers as the server's client does, from an index in this process.

    `kvindex.replicas.join` and `kvindex.replicas.nats.join` make one.

    When the server is gone, silent or has evicted this replica, every rank is shown as stale with
    the reason, queries are answered from the last state, and the replica joins anew by itself. A
    new server's index replaces the old one when it is complete.

    A forked child of a process with a replica must join by itself: in its inherited copy every rank
    is closed, with the reason, and queries raise ClosedError.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._board = follower.board
        # It waits for nothing: the collector may run inside a lock that the thread is to take.
        weakref.finalize(self, follower.request_stop).atexit = False
        # A process that ends without `Leave` is counted and logged as dead. Not by a finalizer:
        # those run the latest first, and after a rejoining the ring's would take its memory before
        # the thread has left. Their common hook is there since the line above, so this one, which
        # is younger, runs before it.
        atexit.register(follower.close)
        disown_in_children(self, Replica._disown)

    @property
    def index(self) -> Index:
        """The present copy of the server's index; another one after each joining."""
        return self._follower.copy.index

    @property
    def trouble(self) -> str:
        """Why it does not follow at present; "" while it does."""
        return self._follower.trouble

    def _own_statistics(self) -> dict[str, Any]:
        return {"replica": self._follower.statistics()}

    def close(self) -> None:
        """Leave the server, and refuse further questions. Idempotent.

        `index` stays as it is and still answers questions. A replica closes by itself when it is
        dropped, or the process ends.
        """
        self._closed = True
        self._follower.close()

    def _disown(self) -> None:
        """In a forked child, which lacks the thread that follows."""
        self._follower.trouble = FORKED
        self._board.disown(FORKED)


# How any copy is kept -------------------------------------------------------------------------


Reasons: TypeAlias = tuple[tuple[type[Exception], str], ...]


class RefusedError(KVIndexError):
    """The server refuses this process; `final`: trying again is useless."""

    def __init__(self, reason: str, *, final: bool) -> None:
        self.final = final
        super().__init__(reason)


class Membership(Protocol):
    """A place among the replicas of an index elsewhere, which feeds a copy. Owner: one thread."""

    copy: Copy  # complete once `join` has returned
    messages: int  # that `join` has applied

    @property
    def backlog(self) -> int:
        """How much waits to be received; from any thread."""

    def join(self) -> None:
        """Fill the copy; raises an Exception if that fails, or at `interrupt`."""

    def receive(self, timeout: float, stop: threading.Event) -> ReceivedMessage:
        """Return the next message to apply to the copy.

        Its `sent_at` is a time of this machine's monotonic clock, as of which the copy is current.

        Raises:
            QueueTimeoutError: the origin is silent; the message says why. It may be called again.
            Exception: it is over, or `stop` is set.
        """

    def interrupt(self) -> None:
        """Make `join` end soon, and `receive` once `stop` is set; any thread, without locks."""

    def close(self) -> None:
        """Give the place up. Idempotent."""


class Origin(Protocol):
    """Where a follower's copies come from."""

    address: str  # for statistics
    name: str  # what messages call it
    # By which word errors are counted; the first type that fits decides.
    reasons: Reasons

    def open(self, note: Callable[[str], None]) -> Membership:
        """Return a new place, which calls `note` with why it has not joined yet."""

    def statistics(self) -> dict[str, Any]:
        """Return further counters of the follower; from any thread."""


_REASONS: Reasons = (  # after those of the origin
    (RefusedError, "refused"),
    (SegmentError, "ring"),
    (SnapshotError, "bad_snapshot"),
    (DecodeError, "bad_message"),
    (OSError, "connection"),
)


class Follower:
    """Keeps a copy of an index elsewhere, as long as its origin can be reached.

    Its thread owns it; `close`, `request_stop` and `statistics` may be called from any.
    """

    def __init__(self, origin: Origin, stale_after: float) -> None:
        self.origin = origin
        self.copy = Copy()  # replaced as a whole when another one is complete
        shown_name = origin.name.replace("{", "{{").replace("}", "}}")  # the board formats it
        self.board = StatusBoard(
            time.monotonic,
            stale_after,
            silent=f"nothing recent was received from {shown_name} for {{:.0f}} s",
        )
        self.joined = threading.Event()  # once the first copy is complete, or it `failed`
        self.failed: Exception | None = None  # why there will never be one
        self.trouble = "joining"  # why it is not following at present
        self._pid = os.getpid()
        self._end_reason = "the replica was closed"
        self._lost = ""  # why it follows no longer; also shown while it cannot join again
        self._stale_after = stale_after
        # Not waited for, which would take its lock: the collector may run in there, and set it.
        self._stop = threading.Event()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._membership: Membership | None = None
        self._is_following = False
        self._counters: Counter[str] = Counter()
        self._rejoins: Counter[str] = Counter()  # by reason, as the failures
        self._failures: Counter[str] = Counter()
        self._log_rate = LogRate()
        self._thread = threading.Thread(target=self._run, name="kvindex-replica", daemon=True)
        self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Return how often it joined and why, and how much it applied."""
        membership = self._membership
        return {
            "server": self.origin.address,
            "following": self._is_following,
            "trouble": self.trouble,
            **{name: self._counters[name] for name in ("joins", "messages", "silences")},
            "batches": self.copy.applied,
            "entries_passed": self.copy.catchup.passed,
            "backlog": 0 if membership is None else membership.backlog,
            "rejoins": dict(self._rejoins),
            "join_failures": dict(self._failures),
            "thread_failures": self._counters["thread_failures"],
            **self.origin.statistics(),
        }

    def close(self) -> None:
        """End the thread and give the place up. Idempotent."""
        self.request_stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def request_stop(self) -> None:
        """Ask the thread to end; this waits for no lock, so finalizers may call it."""
        if os.getpid() != self._pid:
            return  # a forked child has the parent's
        self._stop.set()
        self._woken.put(None)
        membership = self._membership
        if membership is not None:
            membership.interrupt()

    def _run(self) -> None:
        attempts = 0
        try:
            while not self._stop.is_set():
                joins = self._counters["joins"]
                self._live_once()
                attempts = 0 if self._counters["joins"] > joins else attempts + 1
                pause = min(_MAX_BACKOFF, _BACKOFF * 2 ** min(attempts, 10))
                with suppress(queue.Empty):
                    # At random, or all replicas of a server that is back would join it at once.
                    self._woken.get(timeout=pause * random.uniform(0.5, 1.0))
        except BaseException as error:
            logger.exception("the replica's thread failed; it is closed")
            self._counters["thread_failures"] += 1
            self._end_reason = f"the replica's thread failed: {error!r}"
            self.failed = ClosedError(self._end_reason)
        finally:
            self.trouble = self._end_reason
            self.board.end(self._end_reason)
            # After `failed`: who waits for it looks at that next.
            self.joined.set()
            atexit.unregister(self.close)

    def _live_once(self) -> None:
        """Join and follow until that ends; note why."""
        followed = False
        try:
            self._membership = membership = self.origin.open(self._note_joining)
            try:
                if self._stop.is_set():  # set before there was a membership to interrupt
                    return
                membership.join()
                followed = True
                self._follow(membership)
            finally:
                self._is_following = False
                self._membership = None
                membership.close()
        except Exception as error:
            if not self._stop.is_set():
                self._note_end(error, followed=followed)

    def _note_joining(self, trouble: str) -> None:
        if trouble not in self.trouble:  # else the last attempt failed with it, and said more
            self.trouble = trouble

    def _follow(self, membership: Membership) -> None:
        """Answer from the new copy from now on, and apply messages until there are no more."""
        self.copy = membership.copy
        self._is_following = True
        self._counters["joins"] += 1
        self._counters["messages"] += membership.messages
        self.trouble = self._lost = ""
        self.copy.changed.update(self.copy.statuses)
        self._show()
        self.joined.set()
        logger.info("joined %s: %d ranks", self.origin.name, len(self.copy.statuses))
        receive = membership.receive
        while not self._stop.is_set():
            try:
                message = receive(self._stale_after, self._stop)
            except QueueTimeoutError as error:
                self._counters["silences"] += not self.trouble
                self._show_stale(f"{self.origin.name} is silent: {error}")
                continue
            self.copy.apply(message)
            self._counters["messages"] += 1
            if self.trouble:
                # It was silent, so the board has every rank as stale, whatever the message says.
                self.trouble = ""
                self.copy.changed.update(self.copy.statuses)
            self._show()

    def _show(self) -> None:
        copy, board = self.copy, self.board
        # Before the statuses: they would be shown with the age of the message before.
        board.sign(copy.sent_at)
        if copy.renewed:
            copy.renewed = False
            board.keep(copy.statuses, copy.names, copy.take_changes())
        else:
            board.show(copy.take_changes())

    def _note_end(self, error: Exception, *, followed: bool) -> None:
        reasons = (*self.origin.reasons, *_REASONS)
        reason = next((word for type_, word in reasons if isinstance(error, type_)), "error")
        (self._rejoins if followed else self._failures)[reason] += 1
        is_final = isinstance(error, ConfigurationError) or (
            isinstance(error, RefusedError) and error.final
        )
        # Once it has joined, even such a refusal may end: another server may take the place.
        if is_final and not self._counters["joins"]:
            self.failed = error
            self._end_reason = str(error)
            self._stop.set()
        if reason == "error":
            logger.error("the replica of %s joins anew", self.origin.name, exc_info=error)
        # Each loss, but not each attempt to join: there is one a second, perhaps for days.
        if followed or self._log_rate.allows(reason):
            logger.warning("%s: %s", self.origin.name, error)
        cause = f"({reason}): {error}"
        if followed:
            what = self._lost = f"lost {cause}"
        elif self._lost:
            what = f"{self._lost}; cannot be joined again {cause}"
        else:
            what = f"cannot be joined {cause}"
        self._show_stale(f"{self.origin.name} {what}")

    def _show_stale(self, reason: str) -> None:
        self.trouble = reason
        stale = [
            msgspec.structs.replace(status, state=State.STALE, reason=reason)
            for status in self.copy.statuses.values()
        ]
        self.board.show(stale)


# The copy of a fan-out on this machine --------------------------------------------------------


class JoinerConnection:
    """The joiner's end of the socket, at which the server is gone after so long a silence.

    Owner: one thread; `interrupt` from any.
    """

    def __init__(self, path: str | os.PathLike[str], silence: float = _SILENCE) -> None:
        self._socket = connect_to(path, _CONNECT_TIMEOUT)
        self._socket.settimeout(silence)

    def send(self, frame: JoinersFrame) -> None:
        """Send a frame; raises OSError."""
        self._socket.sendall(encode_frame(frame))

    def receive(self) -> Frame:
        """Return the server's next frame. DecodeError, RefusedError, OSError."""
        head = self.read(LENGTH.size)
        frame = decode_frame(bytes(self.read(frame_bytes(head, MAX_FRAME_BYTES))))
        if isinstance(frame, JoinRefusal):
            raise RefusedError(frame.reason, final=frame.final)
        return frame

    def read(self, size: int) -> bytearray:
        """Return the next bytes; raises OSError."""
        data = bytearray()  # grows with what is received: the size is only what the server claims
        while len(data) < size:
            piece = self._socket.recv(min(_STEP, size - len(data)))
            if not piece:
                raise ConnectionResetError("the server closed the connection")
            data += piece
        return data

    def interrupt(self) -> None:
        """Make a `read` of another thread fail."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Notify the server that this process leaves, and close. Idempotent."""
        with suppress(OSError):
            self.send(Leave())
        self._socket.close()


class Drain:
    """Reads messages from the ring during a snapshot, so that they delay no other reader.

    Its thread owns the receiver until `stop`; when `max_bytes` are kept, it reads no more.
    """

    def __init__(self, receiver: RingReceiver, max_bytes: int) -> None:
        self._receiver = receiver
        self._max_bytes = max_bytes
        self._bodies: list[bytes] = []
        self._cancel = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvindex-drain", daemon=True)
        self._thread.start()

    def stop(self) -> list[bytes]:
        """Return the messages so far; raises the error that ended reading."""
        self._cancel.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._bodies

    def _run(self) -> None:
        size = 0
        try:
            while size < self._max_bytes and not self._cancel.is_set():
                body: bytes = self._receiver.receive(
                    lambda _, body: bytes(body), None, self._cancel, quiet=True
                )
                self._bodies.append(body)
                size += len(body)
        except Exception as error:
            if not self._cancel.is_set():
                self._failure = error


class FanOutMembership:
    """A place among the replicas of a fan-out: connection, end of the ring, and the copy.

    `buffer_bytes` are kept at most of the messages that arrive during the snapshot. OSError: there
    is no server, or it cannot be reached.
    """

    def __init__(self, path: str, buffer_bytes: int) -> None:
        self.copy = Copy()
        self.messages = 0
        self._buffer_bytes = buffer_bytes
        self._receiver: RingReceiver | None = None
        self._has_joined = False
        self._connection = JoinerConnection(path)

    def join(self) -> None:
        """Fill the copy. RefusedError: the server refuses. KVIndexError, OSError: try again."""
        connection = self._connection
        connection.send(JoinRequest(PROTOCOL, Index.backend, os.getpid()))
        admission = connection.receive()
        if not isinstance(admission, Admission):
            raise DecodeError(f"a server that answers with {type(admission).__name__}")
        self.copy = Copy(int.from_bytes(admission.seed, "little"), admission.max_blocks_per_rank)
        ring = ShmRingBuffer(*admission.ring)
        try:
            receiver = RingReceiver(
                ring,
                admission.place,
                waiting=Waiting(spin=0.0, look=_LOOK),
                max_message_bytes=_MAX_MESSAGE_BYTES,
            )
        except BaseException:
            ring.close()
            raise
        self._receiver = receiver
        # Only now: from `Attached` on, the server waits for this reader of its ring.
        connection.send(Attached())
        # The server has just answered: without a message since, ranks are stale some time later.
        self.copy.sent_at = time.monotonic()
        # It takes what is sent meanwhile, or the server would wait for this process's snapshot.
        drain = Drain(receiver, self._buffer_bytes)
        try:
            self._restore_all()
        finally:
            bodies = drain.stop()
        self.messages = len(bodies)
        for body in bodies:
            self.copy.apply(decode_message(body))
        self._has_joined = True

    def _restore_all(self) -> None:
        connection, begun = self._connection, False
        while not isinstance(frame := connection.receive(), End):
            if isinstance(frame, Begin):
                begun = True
                self.copy.begin(frame.number)
            elif isinstance(frame, RankSection) and begun:
                if frame.section_bytes > MAX_SECTION_BYTES:
                    raise DecodeError(f"{frame.rank} with {frame.section_bytes} bytes")
                section = connection.read(frame.section_bytes)
                self.copy.restore(frame.rank, frame.number, section, frame.status)
            else:
                raise DecodeError(f"{type(frame).__name__} within a snapshot")
        if not begun:
            raise DecodeError("a snapshot that ends before it begins")
        self.copy.catchup.end(frame.number)
        self.copy.names = dict(frame.names)

    @property
    def backlog(self) -> int:
        """Chunks that wait in the ring; from any thread."""
        try:
            return 0 if self._receiver is None else self._receiver.behind
        except ClosedError:
            return 0

    def receive(self, timeout: float, stop: threading.Event) -> ReceivedMessage:
        """Return the next message, as `Membership.receive`."""
        assert self._receiver is not None
        try:
            message: ReceivedMessage = self._receiver.receive(
                # A copy: the ring's memory is written anew, and `entries` refers to it.
                lambda _, body: decode_message(bytes(body)),
                timeout,
                stop,
                quiet=True,
            )
        except QueueTimeoutError:
            raise QueueTimeoutError("it is stopped or stuck", timeout=timeout) from None
        return message

    def interrupt(self) -> None:
        """Make `join` fail; once that has returned, the `stop` of `receive` is enough."""
        if not self._has_joined:
            self._connection.interrupt()

    def close(self) -> None:
        """Give the place up. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        # After the ring: at `Leave` the server counts the living readers, and this must be none.
        self._connection.close()


class FanOutOrigin:
    """The fan-out server that listens at a path, as the origin of a copy."""

    reasons: Reasons = (
        (ReaderEvictedError, "evicted"),
        (WriterDiedError, "server_died"),
        (QueueClosedError, "server_closed"),
        (FileNotFoundError, "no_server"),
        (ConnectionRefusedError, "no_server"),
        (TimeoutError, "silent"),
    )

    def __init__(self, path: str | os.PathLike[str], buffer_bytes: int) -> None:
        self.address = os.fspath(path)
        self.name = f"the fan-out server at {self.address}"
        self._buffer_bytes = buffer_bytes

    def open(self, note: Callable[[str], None]) -> FanOutMembership:
        """Return a connected place; raises OSError."""
        membership = FanOutMembership(self.address, self._buffer_bytes)
        note("connected, but its snapshot is not complete yet")
        return membership

    def statistics(self) -> dict[str, Any]:
        """Return nothing: the follower counts all."""
        return {}


def ask(path: str | os.PathLike[str], timeout: float = 5.0) -> dict[str, Any]:
    """Return `FanOut.report()` of the process whose server listens at `path`.

    Args:
        path: as for `FanOut`.
        timeout: longest silence of the server, in seconds.

    Raises:
        DecodeError: the answer is not of a server of this version.
        OSError: no server answers; the message says where.
    """
    check_platform()
    path = os.fspath(path)
    try:
        connection = JoinerConnection(path, timeout)
        try:
            connection.send(ReportRequest())
            report = connection.receive()
            if not isinstance(report, ServerReport) or report.json_bytes > _MAX_REPORT_BYTES:
                raise DecodeError(f"the server at {path} answers with {report!r:.100}")
            encoded = connection.read(report.json_bytes)
        finally:
            connection.close()
    except OSError as error:
        trouble = error.strerror or str(error)
        raise OSError(f"no fan-out server answers at {path}: {trouble}") from error
    try:
        counters: dict[str, Any] = json.loads(encoded)
    except UNREADABLE as error:
        raise DecodeError(f"the server at {path} answers with no JSON: {error}") from error
    return counters
