"""What proxies of a gateway and its router process send each other over a unix socket.

Each message is msgpack, after its length in four bytes. Both ends are processes of one gateway, in
a folder that only its user can enter; a message that cannot be read closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from kvindex import Rank
from kvindex.gateway.models import Serving
from kvindex.wire.errors import UNREADABLE

logger = logging.getLogger(__name__)

_MOST_BYTES: Final = 64 << 20  # of a message: a prompt of 4 Mi tokens has 16 MiB
_LENGTH: Final = 4


class Reserve(msgspec.Struct, tag="reserve", frozen=True, kw_only=True):
    """A proxy asks for a rank; the fields are the arguments of `Routing.reserve`."""

    number: int
    model: str
    token_ids: bytes | None  # uint32, in this machine's order
    prompt_tokens: int
    salt: str | None
    reads_cache: bool
    exclude: Sequence[tuple[str, int]]
    request_id: str
    within: float  # seconds


class Held(msgspec.Struct, tag="held", frozen=True, kw_only=True):
    """A proxy has a request on a rank that this router process does not know of."""

    number: int
    model: str
    rank: tuple[str, int]
    request_id: str
    prompt_tokens: int
    new_tokens: int
    has_first_token: bool


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """A call of a `Place`: its name, and its argument."""

    number: int
    call: str
    argument: int | None = None


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A call of `Admin`: its name, and its argument."""

    number: int
    call: str
    argument: str = ""


class Counted(msgspec.Struct, tag="counted", frozen=True):
    """A proxy's own counters, `Door.statistics`."""

    statistics: dict[str, Any]


class Table(msgspec.Struct, tag="table", frozen=True):
    """The engines by model, sent whenever they change."""

    models: dict[str, list[Serving]]


class Placed(msgspec.Struct, tag="placed", frozen=True, kw_only=True):
    """The rank that a proxy asked for; the fields are those of a `Place`."""

    number: int
    rank: tuple[str, int]
    serving: Serving
    reason: str
    held: int
    prompt_tokens: int


class Refused(msgspec.Struct, tag="refused", frozen=True, kw_only=True):
    """No rank for a request: the error's kind, its text, and what it has besides."""

    number: int
    kind: str
    text: str
    reasons: Mapping[str, int] = {}
    known: Sequence[str] = ()
    reason: str = ""
    retry_after: float = 1.0


class Answered(msgspec.Struct, tag="answered", frozen=True):
    """The answer to `Ask`: None if the worker is unknown, which `known` names."""

    number: int
    body: bytes | None
    known: Sequence[str] = ()


FromProxy: TypeAlias = Reserve | Held | Progress | Ask | Counted
FromRouter: TypeAlias = Table | Placed | Refused | Answered


class Link(asyncio.Protocol):
    """One end of a connection.

    Args:
        kinds: the messages that it accepts.
        on_message: receives each.
        on_closed: called at its end.
        on_open: called once messages can be sent.

    Attributes:
        is_open: whether messages can be sent.

    Owner: one event loop.
    """

    def __init__(
        self,
        kinds: Any,
        on_message: Callable[[Any], None],
        on_closed: Callable[[], None],
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_open = False
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_open = on_open
        self._transport: Any = None
        self._received = bytearray()

    def send(self, message: FromProxy | FromRouter) -> None:
        """Send a message, unless the connection is closed."""
        if self.is_open:
            body = _encode(message)
            self._transport.write(b"%b%b" % (len(body).to_bytes(_LENGTH, "big"), body))

    def close(self) -> None:
        """Close the connection once all is sent."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that it is open."""
        self._transport, self.is_open = transport, True
        self._on_open()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note its end."""
        self.is_open = False
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        """Read the messages that are whole."""
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH:
            body = begin + _LENGTH
            end = body + int.from_bytes(received[begin:body], "big")
            if end - body > _MOST_BYTES:
                self._fail(f"a message has {end - body} bytes, more than {_MOST_BYTES}")
                return
            if len(received) < end:
                break
            begin = end
            try:
                message = self._decode(memoryview(received)[body:end].tobytes())
            except UNREADABLE as error:
                self._fail(f"a message cannot be read: {error}")
                return
            self._on_message(message)
        del received[:begin]

    def _fail(self, why: str) -> None:
        logger.error("between the gateway's processes: %s; the connection is closed", why)
        self.is_open = False
        self._transport.abort()


_encode = msgspec.msgpack.Encoder().encode


def packed(token_ids: Any) -> bytes | None:
    """Return token ids as bytes. Raises TypeError, ValueError or OverflowError for what is none."""
    return None if token_ids is None else array("I", token_ids).tobytes()


def unpacked(data: bytes | None) -> array[int] | None:
    """Return what `packed` was given."""
    if data is None:
        return None
    token_ids = array("I")
    token_ids.frombytes(data)
    return token_ids


def pair(rank: Rank) -> tuple[str, int]:
    """Return a rank as messages have it."""
    return rank.worker, rank.dp_rank
