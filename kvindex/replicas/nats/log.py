"""The log of a pool, in JetStream: its stream, its head, appends and a reader; and its bodies.

The stream promises nothing that kvindex relies on but this: it gives each message a number, one
higher than the message before. An append names the number that it expects to follow.

A body has messages of the fan-out, one after the other, each after its length. A message that is
too long for one body is cut, and its pieces are in bodies that follow each other directly. So a
piece is

```
 bit 31      it continues the message of the piece before it
 bit 30      the next piece, the first of the next body, continues this one
 bits 29..0  its length, above 0; all of it big-endian
 then        the piece
```

The first message of an epoch has an empty body.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvindex.wire.errors import ConfigurationError, DecodeError, NatsError
from kvindex.wire.nats import NatsPool, run_apart

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg

SHORTEST_PAYLOAD = 64 << 10  # bytes: a server that allows less is refused
_API_SECONDS = 2.0  # for each request to JetStream
# Longer than three servers need for another leader (5 to 9 s), during which none answers.
_SILENT_SECONDS = 10.0
_TRIES = int(_SILENT_SECONDS / _API_SECONDS)  # of what a start cannot do without
_WRONG_HEAD, _NO_STREAM, _OTHER_STREAM = 10071, 10059, 10058
_OF_A_SERVER, _OF_A_LEADER, _OF_A_MAJORITY = range(3)  # whose answer a call needs
_UNAVAILABLE = {None, 10008}  # of errors: no server, or no leader, is there to answer
_NO_JETSTREAM = {None, 10039, 10076}  # of errors 503: none at all, not for this account
_ADVICE = {
    10002: "raise the limits of the account",
    10023: "raise max_mem or max_file of the servers",
    10027: "raise max_streams of the account: a pool needs two",
    10028: "raise max_mem of the server or the account, or lower max_bytes",
    10047: "raise max_file of the server or the account, or lower max_bytes",
    10074: "start a cluster, or set replicas to 1",
}
_EXPECTED = "Nats-Expected-Last-Sequence"
_EXPECTED_OF_EPOCH = "Nats-Expected-Last-Subject-Sequence"
_READ_BYTES = 64 << 20  # that wait in this process; the reader asks again for what is dropped
MAX_MESSAGE_BYTES = 64 << 20  # of all pieces of a message
AROUND_BYTES = 4  # of a piece
_HEAD = struct.Struct(">I")
_CONTINUES, _IS_CONTINUED, _LENGTH = 1 << 31, 1 << 30, (1 << 30) - 1

_Result = TypeVar("_Result")


class StreamSettings(msgspec.Struct, frozen=True):
    """How a pool's stream and bucket are made if they are missing; raises ConfigurationError."""

    replicas: int = 1  # servers that store them: 1, 3 or 5
    store: str = "memory"  # or "file": bodies contain prompts' tokens, and are then stored at rest
    max_bytes: int = 1 << 30  # of the log; the oldest messages go when it is full

    def __post_init__(self) -> None:
        if self.replicas not in (1, 3, 5):
            raise ConfigurationError(f"replicas must be 1, 3 or 5, not {self.replicas!r}")
        if self.store not in ("memory", "file"):
            raise ConfigurationError(f'store must be "memory" or "file", not {self.store!r}')
        if self.max_bytes < 8 << 20:
            raise ConfigurationError(f"max_bytes must be at least 8 MiB, not {self.max_bytes!r}")


class Head(NamedTuple):
    """The end of the log."""

    seq: int  # number of the last message; 0 if there was none
    first_seq: int  # number of the first message that is still there
    epoch: str | None  # of the last message; None if it is gone
    body: bytes = b""  # of the last message


class AppendRefusedError(NatsError):
    """Another message has the number that an append expected to get."""


class NoStreamError(NatsError):
    """There is no such stream."""


class UnansweredError(NatsError):
    """NATS did not answer in time."""


class LogMessage(NamedTuple):
    """A message that was read."""

    seq: int  # its number
    epoch: str
    pending: int  # messages that follow it in the log, at least
    body: bytes  # as it was appended


class Log:
    """The log of a pool. Owner: the event loop of its connection.

    All methods raise NatsError if NATS does not answer in time or refuses; the message says why.
    """

    def __init__(self, client: NatsClient, pool: NatsPool) -> None:
        self.pool = pool
        self.moves = 0  # to another server, since JetStream did not answer
        self._client = client
        self._silent_since: float | None = None
        self._unanswered = _OF_A_SERVER  # the most that a call needed that was not answered since
        self._stream = client.jetstream(timeout=_API_SECONDS)

    @property
    def is_connected(self) -> bool:
        """Whether there is a server at present; errors alone do not end a connection."""
        return bool(self._client.is_connected)

    @property
    def is_closed(self) -> bool:
        """Whether the server has ended the connection for good, e.g. as credentials expired."""
        return self._client.is_closed

    @property
    def max_body_bytes(self) -> int:
        """Most bytes of a body that the server accepts, headers not counted."""
        return self._client.max_payload - 1024

    async def make(self, settings: StreamSettings) -> None:
        """Make stream and bucket if they are missing, and use them as they are if not.

        ConfigurationError: the stream that exists cannot be used; it says what to change.
        """
        from nats.js import api

        store = api.StorageType(settings.store)
        if self._client.max_payload < SHORTEST_PAYLOAD:
            raise ConfigurationError(
                f"{self.pool}: max_payload of the server is {self._client.max_payload} bytes: "
                f"set it to 1MB, at least to {SHORTEST_PAYLOAD}"
            )
        try:
            await self._asked(
                self._stream.add_stream(
                    api.StreamConfig(
                        name=self.pool.stream,
                        subjects=[self.pool.log_subjects],
                        num_replicas=settings.replicas,
                        storage=store,
                        max_bytes=settings.max_bytes,
                        discard=api.DiscardPolicy.OLD,
                        allow_direct=True,
                    )
                )
            )
        except NatsError as error:
            # It exists, with other settings: an operator's, which may be right all the same.
            if _code(error) != _OTHER_STREAM:
                raise
        config = (await self._asked(self._stream.stream_info(self.pool.stream))).config
        trouble = ""
        if list(config.subjects or ()) != [self.pool.log_subjects]:
            trouble = f"its subjects are {config.subjects}, not {self.pool.log_subjects!r}"
        elif config.discard != api.DiscardPolicy.OLD:
            trouble = "it refuses messages when it is full (discard=new) instead of old ones"
        elif config.sealed or config.retention != api.RetentionPolicy.LIMITS:
            trouble = "it is sealed, or does not retain messages by limits"
        if trouble:
            raise ConfigurationError(
                f"the stream {self.pool.stream} exists, but {trouble}: delete it, and the relay "
                "makes another, or choose another pool"
            )
        try:
            await self._asked(self._stream.stream_info(f"OBJ_{self.pool.bucket}"))
        except NoStreamError:
            bucket = api.ObjectStoreConfig(storage=store, replicas=settings.replicas)
            await self._asked(self._stream.create_object_store(self.pool.bucket, bucket))

    async def head(self) -> Head:
        """Return the end of the log; raises NoStreamError if there is no stream."""
        info = await self._asked(self._stream.stream_info(self.pool.stream))
        state = info.state
        if not state.messages:
            return Head(state.last_seq, state.first_seq, None)
        try:
            # Its body, too: whoever may write to the log can write in our epoch.
            call = self._stream.get_msg(self.pool.stream, seq=state.last_seq)
            message = await self._asked(call, needs=_OF_A_LEADER)
        except NoStreamError:  # the message is gone, or the stream: the next look shows it
            return Head(state.last_seq, state.first_seq, None)
        epoch = (message.subject or "").removeprefix(self.pool.log_prefix)
        return Head(state.last_seq, state.first_seq, epoch, message.data or b"")

    async def append(self, epoch: str, expected: int, body: bytes) -> int:
        """Append a body if the log's last number is `expected`; return the body's number.

        AppendRefusedError: it is another number, or of another epoch. Any other NatsError: whether
        it was appended is unknown.
        """
        headers = {_EXPECTED: str(expected)}
        if body:
            # That last message has to be of this epoch and still there, too: otherwise the log
            # forgot messages, and others stand in their place. An empty one begins an epoch.
            headers[_EXPECTED_OF_EPOCH] = str(expected)
        ack = await self._asked(
            self._stream.publish(
                self.pool.log_prefix + epoch,
                body,
                timeout=_API_SECONDS,
                headers=headers,
            ),
            needs=_OF_A_MAJORITY,
        )
        return int(ack.seq)

    async def read(self, seq: int) -> LogReader:
        """Return a reader of the messages from this number on."""
        from nats.js import api

        subscription = await self._asked(
            self._stream.subscribe(
                self.pool.log_subjects,
                stream=self.pool.stream,
                ordered_consumer=True,
                config=api.ConsumerConfig(
                    deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=seq
                ),
                pending_msgs_limit=1 << 20,
                pending_bytes_limit=_READ_BYTES,
            ),
            needs=_OF_A_MAJORITY,
        )
        return LogReader(subscription, self.pool.log_prefix)

    async def _asked(self, call: Any, *, needs: int = _OF_A_SERVER) -> Any:
        try:
            answer = await ask(self.pool, call)
        except NatsError as error:
            is_answer = isinstance(error, (AppendRefusedError, NoStreamError))
            if not is_answer and _code(error) in _UNAVAILABLE:
                self._unanswered = max(self._unanswered, needs)
                now = asyncio.get_running_loop().time()
                if not self._client.is_connected:
                    self._silent_since = None
                elif self._silent_since is None:
                    self._silent_since = now
                elif now - self._silent_since >= _SILENT_SECONDS:
                    # This server may be cut off from the others: another one may answer.
                    self._silent_since = None
                    self.moves += 1
                    await self._client.force_reconnect()
            raise
        # A server that is cut off goes on to describe the stream, and its leader to show the end of
        # the log: neither says that what needs more will be answered.
        if needs >= self._unanswered:
            self._silent_since, self._unanswered = None, _OF_A_SERVER
        return answer


async def ask(pool: NatsPool, call: Awaitable[Any]) -> Any:
    """Return the answer of a call of nats-py; its errors become ours, and name the pool."""
    import nats.errors
    from nats.js import errors as js_errors

    try:
        return await run_apart(call)
    except js_errors.APIError as error:
        kind = NatsError
        if error.err_code == _WRONG_HEAD:
            kind = AppendRefusedError
        elif isinstance(error, js_errors.NotFoundError):
            kind = NoStreamError
        advice = _ADVICE.get(error.err_code or 0)
        if error.code in (None, 503) and error.err_code in _NO_JETSTREAM:
            advice = "enable JetStream in the server, and for this account"
        code = error.err_code or error.code or 503
        text = f"{error.description or type(error).__name__} ({code})"
        raise kind(f"{pool}: {text}: {advice}" if advice else f"{pool}: {text}") from error
    except js_errors.NoStreamResponseError as error:
        raise NoStreamError(f"{pool}: no stream has the subject") from error
    except asyncio.TimeoutError as error:
        raise UnansweredError(f"{pool}: {type(error).__name__}: {error}") from error
    except (nats.errors.Error, OSError) as error:
        raise NatsError(f"{pool}: {type(error).__name__}: {error}") from error


async def ask_again(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return what a call returns, which is made up to five times while NATS does not answer."""
    # A process that is stopped for longer than a request may take misses the answer.
    for _ in range(_TRIES - 1):
        with suppress(UnansweredError):
            return await call()
    return await call()


class LogReader:
    """Messages in order, from some number on. Owner: the event loop of its connection."""

    def __init__(self, subscription: Any, prefix: str) -> None:
        self._subscription = subscription
        self._prefix = prefix

    async def next(self, timeout: float) -> LogMessage:
        """Return the next message; raises TimeoutError (asyncio's) if none comes in time."""
        import nats.errors

        try:
            message: Msg = await self._subscription.next_msg(timeout)
        except nats.errors.TimeoutError:
            raise asyncio.TimeoutError from None
        except nats.errors.Error as error:
            raise NatsError(f"reading the log: {type(error).__name__}: {error}") from error
        metadata = message.metadata
        return LogMessage(
            metadata.sequence.stream,
            message.subject.removeprefix(self._prefix),
            # Those that followed when it was sent, or those that wait in this process.
            max(metadata.num_pending or 0, self._subscription.pending_msgs),
            message.data,
        )

    async def close(self) -> None:
        """End the delivery."""
        import nats.errors

        try:
            await self._subscription.unsubscribe()
        except nats.errors.Error:  # the connection is closed, or lost
            pass


def _code(error: NatsError) -> int | None:
    return getattr(error.__cause__, "err_code", None)


# Bodies ----------------------------------------------------------------------------------------


def join_bodies(messages: Iterable[bytes]) -> bytes:
    """Return the body of these messages."""
    return b"".join(part for body in messages for part in (_HEAD.pack(len(body)), body))


def cut_message(message: bytes, room: int) -> list[bytes]:
    """Return a message that is too long for one body as bodies of at most `room` bytes."""
    step = room - AROUND_BYTES
    starts = range(0, len(message), step)
    bodies = []
    for start in starts:
        piece = memoryview(message)[start : start + step]
        flags = _CONTINUES * (start > 0) | _IS_CONTINUED * (start + step < len(message))
        bodies.append(b"".join((_HEAD.pack(flags | len(piece)), piece)))
    return bodies


class BodyReader:
    """Splits bodies that follow each other into their messages. Owner: one thread.

    It may begin at any body: pieces at the start that continue a message from before are left out.
    A message of more than `most` bytes is refused; memory grows with the bytes read, up to there.
    """

    def __init__(self, most: int = MAX_MESSAGE_BYTES) -> None:
        self._most = most
        self._pieces: list[memoryview] = []
        self._bytes = 0
        self._is_open = False  # a piece must follow
        self._is_first = True  # nothing was read but pieces that continue a message from before

    def split(self, body: bytes) -> Iterator[memoryview]:
        """Yield the messages that end in the next body; raises DecodeError if it is none."""
        view, at = memoryview(body), 0
        while at < len(view):
            if len(view) - at < AROUND_BYTES:
                raise DecodeError("a body ends within a length", size=len(view))
            (head,) = _HEAD.unpack_from(view, at)
            at += AROUND_BYTES
            piece = view[at : at + (head & _LENGTH)]
            at += len(piece)
            if not piece or len(piece) < head & _LENGTH:
                raise DecodeError(f"a piece of {head & _LENGTH} bytes: {len(piece)} follow")
            is_continued = bool(head & _IS_CONTINUED)
            if is_continued and at < len(view):
                raise DecodeError("a message goes on in the next body, and others follow it here")
            continues = bool(head & _CONTINUES)
            if self._is_first and continues:
                continue
            self._is_first = False
            if continues != self._is_open:
                raise DecodeError(
                    "a piece continues nothing" if continues else "a piece is missing"
                )
            self._is_open = is_continued
            self._bytes += len(piece)
            if self._bytes > self._most:
                raise DecodeError(f"a message of over {self._most} bytes", size=self._bytes)
            if is_continued:
                self._pieces.append(piece)
                continue
            if continues:
                piece = memoryview(b"".join((*self._pieces, piece)))
                self._pieces.clear()
            self._bytes = 0
            yield piece
