"""A reader's side of a queue over TCP."""

from __future__ import annotations

import logging
import threading
import time

import zmq

from kvindex.curve import Curve
from kvindex.errors import (
    ClosedError,
    ConfigurationError,
    KVIndexError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    WriterDiedError,
)
from kvindex.ring import Patience, Waiting
from kvindex.shm.remote.connections import Connection
from kvindex.shm.remote.credits import ReadLedger
from kvindex.shm.remote.frames import (
    MAX_RANK,
    MESSAGE_HEADER_BYTES,
    PACKED_BYTES,
    TOKEN_BYTES,
    VERSION,
    Acknowledgement,
    Bye,
    Closed,
    Evicted,
    Hello,
    Malformed,
    ReadersWord,
    Ready,
    Refusal,
    Refused,
    Welcome,
    WritersWord,
    encode,
    parse_header,
    parse_writer,
    unpack_message,
)
from kvindex.shm.remote.sockets import RemoteLink, WatchedSocket

__all__ = ["RemoteReader"]

logger = logging.getLogger(__name__)

_NOBLOCK = int(zmq.NOBLOCK)
_MESSAGES = (b"P", b"M")  # how a message begins, and nothing else that a writer says
_NOT_TAKEN: list[memoryview] = []
_FLUSH = 1.0  # seconds at most until a farewell is with the system
_ASK_AGAIN = 0.2  # seconds until a reader asks again whose rank was taken
_HANDOVER = 2.0  # seconds that a rank may be taken still while who had it is leaving


class RemoteReader:
    """Receives each message of a queue's writer on another machine once, in order.

    It says hello when it is made; its first message is the one that the writer sends next after
    it has let the reader in.

    Args:
        address, token: the queue's, from its handle.
        rank: this reader's; a rank has one reader at a time.
        max_message_bytes: a larger message ends the connection; as the writer's.
        curve: keys, if the writer has them.
        link: heartbeats.
        waiting: how often a wait looks at `cancel`, and when it warns.

    Raises:
        ConfigurationError: a value cannot work.

    Thread safety: one thread at a time; end a wait by `cancel` before another thread calls `close`.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        rank: int,
        *,
        max_message_bytes: int,
        curve: Curve | None = None,
        link: RemoteLink | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        if not address.startswith("tcp://"):
            raise ConfigurationError(f"a writer's address is tcp://host:port, not {address!r}")
        if len(token) != TOKEN_BYTES:
            raise ConfigurationError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
        if not 0 <= rank <= MAX_RANK:
            raise ConfigurationError(f"rank must be 0 to {MAX_RANK}, not {rank!r}")
        if max_message_bytes < 1:
            raise ConfigurationError("max_message_bytes must be positive")
        self.address = address
        self.rank = rank
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._ledger: ReadLedger | None = None  # from the welcome on
        self._ready = False
        self._ahead: bytes | None = None  # a part that was looked at, and not read yet
        self._ask_at: float | None = None
        self._taken_since: float | None = None  # when it was first said that the rank is taken
        self._link = link or RemoteLink()
        self._waiting = waiting or Waiting()
        self._trouble: str | None = None  # why there is no welcome yet
        self._end: KVIndexError | None = None
        self._closed = False
        self._watched = WatchedSocket.connect(
            address,
            self._link,
            curve,
            max_part_bytes=max(max_message_bytes, PACKED_BYTES) + MESSAGE_HEADER_BYTES,
        )
        self._socket = self._watched.socket
        self._connection = Connection(self._watched)
        self._say_hello()

    @property
    def next_seq(self) -> int | None:
        """The seq of the message that comes next; None before the writer has let us in."""
        return None if self._ledger is None else self._ledger.next_seq

    @property
    def _awaited(self) -> str:
        """What would come next: a message, or to be let in by whom."""
        return "a message" if self._ready else f"the writer at {self.address}: {self._obstacle}"

    def wait_ready(
        self, timeout: float | None = None, cancel: threading.Event | None = None
    ) -> None:
        """Wait until the writer says that all readers have joined, or sends a message.

        Raises: as `receive`.
        """
        patience = Patience(self._waiting, timeout)
        while not self._ready:
            if self._look(take=False) is None and not self._ready:
                self._pause(patience, cancel, "the queue was not ready")

    def receive(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> list[memoryview]:
        """Return the frames of the next message; `quiet`: warn of no long wait.

        The memory is the caller's: it stays as it is for as long as the frames are held. If
        nothing more waits to be read, the writer is told that this was: it may close meanwhile.

        Raises:
            QueueTimeoutError: none came in time.
            WaitCancelledError: `cancel` was set, and none was there.
            WriterDiedError: the writer is gone, or a message is missing, after all that came
                before was returned; or what is at the address is no queue's writer.
            QueueClosedError: the writer closed the queue, and all was returned.
            ReaderEvictedError: the writer took this reader off the queue.
            ConfigurationError: the writer refuses this reader for good: its token is not the
                queue's, its rank is none of the queue's or another reader's who stays, or it is
                of another version.
            ClosedError: this reader was closed.
        """
        message = self._read()
        if message is not None:
            self._look_ahead()
            return message
        patience = Patience(self._waiting, timeout, quiet=quiet)
        while (message := self._look()) is None:
            self._pause(patience, cancel, "no message came")
        self._acknowledge_pending()  # it came just now: hardly is another behind it
        return message

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell the writer that this reader leaves, and close (idempotent)."""
        if self._closed:
            return
        self._closed = True
        try:
            lost = self._connection.is_lost()
            if self._end is None and not lost:
                self._say(Bye())
        finally:
            self._connection.close(_FLUSH)

    # -- reading

    def _look(self, *, take: bool = True) -> list[memoryview] | None:
        """Return a message if one is there; raise how it ended if none can come."""
        # Before reading: what had come before is still to be read.
        lost = not self._closed and self._connection.is_lost()
        message = self._read(take=take)
        if message is None and lost:
            self._end = self._end or WriterDiedError(self._how_lost())
            raise _again(self._end)
        return message

    def _read(self, *, take: bool = True) -> list[memoryview] | None:
        """Do what the writer says, up to a message; return that if one is there.

        Without `take` it is left there, and nothing in it is returned.
        """
        if self._closed:
            raise ClosedError("this reader was closed")
        if self._end is not None:
            raise _again(self._end)
        try:
            while True:
                part, self._ahead = self._ahead, None
                if part is None:
                    part = self._socket.recv(_NOBLOCK)
                if part[:1] not in _MESSAGES:
                    self._obey(parse_writer(part))
                elif take:
                    return self._take(part)
                elif self._ledger is None:
                    raise Malformed("a message before the welcome")
                else:
                    self._ahead, self._ready = part, True
                    return _NOT_TAKEN
        except zmq.Again:
            return None
        except (Malformed, WriterDiedError) as error:
            raise self._finish(WriterDiedError(f"{self.address}: {error}")) from None

    def _look_ahead(self) -> None:
        """Acknowledge if no message waits, having all: who is at work does not come to do it.

        In a flood this costs nothing, as what is received here the next call need not receive.
        """
        try:
            if self._ahead is None:
                self._ahead = self._socket.recv(_NOBLOCK)
            if self._ahead[:1] in _MESSAGES:
                return
        except zmq.Again:
            pass
        self._acknowledge_pending()

    def _take(self, part: bytes) -> list[memoryview]:
        """Return the frames of the message that begins with this part."""
        ledger = self._ledger
        if ledger is None:
            raise Malformed("a message before the welcome")
        seq, frames = unpack_message(part) if part[:1] == b"P" else self._receive_frames(part)
        size = frames[0].nbytes if len(frames) == 1 else sum(frame.nbytes for frame in frames)
        if size > self._max_message_bytes:
            raise Malformed(
                f"a message of {size} bytes; max_message_bytes is {self._max_message_bytes}"
            )
        ledger.take(seq, size)
        self._ready = True
        if ledger.due:
            self._acknowledge(ledger)
        return frames

    def _receive_frames(self, part: bytes) -> tuple[int, list[memoryview]]:
        """Return the seq of a long message, and the frames that follow its header."""
        seq, count = parse_header(part)
        frames: list[memoryview] = []
        for left in reversed(range(count)):
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames.append(frame.buffer)
            if frame.more != (left > 0):
                raise Malformed(f"{len(frames)} frames of a message of {count}")
        return seq, frames

    def _obey(self, said: WritersWord) -> None:
        if isinstance(said, Welcome):
            if self._ledger is not None:
                raise Malformed("a second welcome")
            self._ledger = ReadLedger(said.next_seq, messages=said.window, size=said.window_bytes)
            self._ready = said.ready
            self._trouble = "other readers to join"
        elif isinstance(said, Ready):
            self._ready = True
        elif isinstance(said, Refused):
            self._take_refusal(said.reason)
        elif isinstance(said, Evicted):
            raise self._finish(
                ReaderEvictedError(f"the writer took reader {self.rank} off the queue: join anew")
            )
        elif isinstance(said, Closed):
            self._take_closed(said.next_seq)

    def _take_refusal(self, reason: Refusal) -> None:
        if reason is Refusal.RANK_TAKEN and self._may_be_handed_over():
            self._ask_at = time.monotonic() + _ASK_AGAIN
            return
        raise self._finish(
            ConfigurationError(f"the writer at {self.address} refused: {self._why(reason)}")
        )

    def _may_be_handed_over(self) -> bool:
        """Return whether who has our rank may be about to leave, or to be found dead."""
        now = time.monotonic()
        if self._taken_since is None:
            self._taken_since = now
            self._trouble = f"rank {self.rank}, which another reader has"
            logger.warning("waiting for %s", self._awaited)
        return now < self._taken_since + _HANDOVER

    def _why(self, reason: Refusal) -> str:
        if reason is Refusal.VERSION:
            return f"it does not speak this reader's version ({VERSION}) of the protocol"
        if reason is Refusal.WRONG_TOKEN:
            return "the token is another queue's: is this the queue's own handle?"
        if reason is Refusal.UNKNOWN_RANK:
            return f"rank {self.rank} is none of its remote readers': all places are other ranks'"
        return (
            f"rank {self.rank} has another reader (attach anew when that has left; one whose "
            f"machine vanished is found dead after {self._link.heartbeat_timeout:g} s)"
        )

    def _take_closed(self, next_seq: int) -> None:
        if self._ledger is not None and self._ledger.next_seq != next_seq:
            expected = self._ledger.next_seq
            raise WriterDiedError(
                f"the queue ended before message {next_seq}, but message {expected} never came"
            )
        self._say(Bye())
        raise self._finish(QueueClosedError(f"the writer closed the queue at message {next_seq}"))

    # -- what is owed to the writer

    def _pause(self, patience: Patience, cancel: threading.Event | None, failure: str) -> None:
        """Say what is owed, then wait a little for the writer."""
        self._acknowledge_pending()
        if self._ask_at is not None and time.monotonic() >= self._ask_at:
            self._ask_at = None
            self._say_hello()
        patience.check_cancel(cancel, self._awaited)
        if patience.exhausted:
            why = "" if self._ready else f": waited for {self._awaited}"
            raise QueueTimeoutError(
                f"{failure} in {patience.timeout:g} s{why}", timeout=patience.timeout
            )
        patience.warn(self._awaited)
        self._connection.wait(patience.slice())

    def _acknowledge_pending(self) -> None:
        if self._ledger is not None and self._ledger.pending:
            self._acknowledge(self._ledger)

    def _acknowledge(self, ledger: ReadLedger) -> None:
        self._say(Acknowledgement(ledger.acknowledge()))

    def _say_hello(self) -> None:
        self._say(Hello(VERSION, self.rank, self._token))

    def _say(self, word: ReadersWord) -> None:
        try:
            self._socket.send(encode(word), _NOBLOCK)
        except zmq.Again:
            pass  # there is no connection any more, as is noticed presently

    # -- how it ends

    @property
    def _obstacle(self) -> str:
        """Why there is no welcome yet."""
        if self._connection.handshake_failure is not None:
            return "a handshake, which failed: do both sides have the right CURVE keys?"
        if self._trouble is not None:
            return self._trouble
        if not self._connection.made:
            return "its connection"
        return (
            "connected, and not accepted yet: it lets readers in only inside its own calls "
            "(enqueue, wait_until_ready)"
        )

    def _how_lost(self) -> str:
        if self._ledger is None:
            return f"no connection to {self.address} while waiting for {self._obstacle}"
        return (
            f"the connection to {self.address} broke before message {self._ledger.next_seq}: the"
            " writer died, cannot be reached, or sent a message of more than max_message_bytes"
            f" ({self._max_message_bytes})"
        )

    def _finish(self, error: KVIndexError) -> KVIndexError:
        self._end = error
        return error


def _again(error: KVIndexError) -> KVIndexError:
    """Return the same error, to be raised from another place."""
    return type(error)(*error.args)
