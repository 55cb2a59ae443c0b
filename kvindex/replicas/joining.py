"""How a process joins: it gets a snapshot over the socket, and messages from the ring meanwhile.

And how a process only asks for the server's report. `Membership` and `Origin` are what a follower
needs of any place to join; `FanOutMembership` and `FanOutOrigin` are those of a fan-out on this
machine.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

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
    JoinRequest,
    Leave,
    RankSection,
    ReceivedMessage,
    Refused,
    ReportRequest,
    ServerReport,
    decode_frame,
    decode_message,
    encode_frame,
    frame_bytes,
)
from kvindex.shm.ring import Buffer, RingReceiver, ShmRingBuffer, Waiting
from kvindex.wire.errors import (
    UNREADABLE,
    ClosedError,
    DecodeError,
    KVIndexError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    WriterDiedError,
)

_LOOK = 0.05  # seconds between checks whether to stop: of a closing, and of a joining
_STEP = 1 << 20  # bytes that are received at once
_MAX_MESSAGE_BYTES = 1 << 30
_MAX_REPORT_BYTES = 1 << 28
_CONNECT_TIMEOUT = 1.0  # seconds; the kernel connects, however busy the server is
_SILENCE = 30.0  # seconds without a byte of the snapshot; others may be served first


class RefusedError(KVIndexError):
    """The server refuses this process; `final`: trying again is useless."""

    def __init__(self, reason: str, *, final: bool) -> None:
        self.final = final
        super().__init__(reason)


class Membership(Protocol):
    """A place among the replicas of an index elsewhere, which feeds a copy. Owner: one thread."""

    copy: Copy
    """Complete once `join` has returned."""

    messages: int
    """How many messages `join` has applied."""

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

    @property
    def address(self) -> str:
        """Where it is, for statistics."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def reasons(self) -> tuple[tuple[type[Exception], str], ...]:
        """By which word errors are counted; the first type that fits decides."""

    def open(self, note: Callable[[str], None]) -> Membership:
        """Return a new place, not joined yet; raises an Exception.

        Args:
            note: called, on the follower's thread, with why it has not joined yet.
        """

    def statistics(self) -> dict[str, Any]:
        """Return further counters of the follower; from any thread."""


class Link:
    """The joiner's connection to the server, which counts as gone after so long a silence.

    Thread safety: one thread; `interrupt` from any.
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
        if isinstance(frame, Refused):
            raise RefusedError(frame.reason, final=frame.final)
        return frame

    def read(self, size: int) -> bytearray:
        """Return the next bytes; memory grows with the bytes received. Raises OSError."""
        data = bytearray()
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

    Its thread uses the receiver until `stop`; when `max_bytes` are kept, it reads no more.
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
                body = self._receiver.receive(_copy, None, self._cancel, quiet=True)
                self._bodies.append(body)
                size += len(body)
        except Exception as error:
            if not self._cancel.is_set():
                self._failure = error


def _copy(_: int, body: Buffer) -> bytes:
    return bytes(body)


class FanOutMembership:
    """A place among the replicas of a fan-out: connection, end of the ring, and the copy.

    Args:
        path: where the server listens.
        buffer_bytes: most bytes kept of the messages that arrive during the snapshot.

    Raises:
        OSError: there is no server, or it cannot be reached.
    """

    def __init__(self, path: str, buffer_bytes: int) -> None:
        self.copy = Copy()
        self.messages = 0
        self._buffer_bytes = buffer_bytes
        self._receiver: RingReceiver | None = None
        self._has_joined = False
        self._link = Link(path)

    def join(self) -> None:
        """Fill the copy.

        Raises:
            RefusedError: the server refuses.
            KVIndexError, OSError: joining failed; try again.
        """
        link = self._link
        link.send(JoinRequest(PROTOCOL, Index.backend, os.getpid()))
        admission = link.receive()
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
        link.send(Attached())
        self.copy.sent_at = time.monotonic()
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
        begun = False
        while not isinstance(frame := self._link.receive(), End):
            if isinstance(frame, Begin):
                begun = True
                self.copy.begin(frame.number)
            elif isinstance(frame, RankSection) and begun:
                if frame.section_bytes > MAX_SECTION_BYTES:
                    raise DecodeError(f"{frame.rank} with {frame.section_bytes} bytes")
                section = self._link.read(frame.section_bytes)
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
            message: ReceivedMessage = self._receiver.receive(_decode, timeout, stop, quiet=True)
        except QueueTimeoutError:
            raise QueueTimeoutError("it is stopped or stuck", timeout=timeout) from None
        return message

    def interrupt(self) -> None:
        """Make `join` fail; once that has returned, the `stop` of `receive` is enough."""
        if not self._has_joined:
            self._link.interrupt()

    def close(self) -> None:
        """Give the place up. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        self._link.close()


def _decode(_: int, body: Buffer) -> ReceivedMessage:
    return decode_message(bytes(body))  # the ring's memory is written anew


class FanOutOrigin:
    """The fan-out server that listens at a path, as the origin of a copy.

    Args: as `FanOutMembership`.
    """

    reasons = (
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
        link = Link(path, timeout)
        try:
            link.send(ReportRequest())
            report = link.receive()
            if not isinstance(report, ServerReport) or report.json_bytes > _MAX_REPORT_BYTES:
                raise DecodeError(f"the server at {path} answers with {report!r:.100}")
            encoded = link.read(report.json_bytes)
            try:
                counters: dict[str, Any] = json.loads(encoded)
            except UNREADABLE as error:
                raise DecodeError(f"the server at {path} answers with no JSON: {error}") from error
        finally:
            link.close()
    except OSError as error:
        trouble = error.strerror or str(error)
        raise OSError(f"no fan-out server answers at {path}: {trouble}") from error
    return counters
