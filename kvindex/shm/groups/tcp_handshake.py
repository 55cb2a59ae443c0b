"""How two ranks of a TCP group know each other before anything else is said. Pure, without sockets.

    rank 0                                   rank r
       │ ── Hello(version, nonce) ──────────────▶ │
       │ ◀─ Join(rank, ..., nonce, proof) ─────── │   proof = HMAC(token, "join", all of the above)
       │ ── Welcome(proof) ─────────────────────▶ │   proof = HMAC(token, "welcome", the same)
       │    or Refused(reason)                    │
       │ ── Seats(missing) ─────────────────────▶ │   whenever it changes; none missing: all begin

Both prove that they know the token, over nonces of both sides, and it never crosses the network.
What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Annotated, Final

import msgspec

from kvindex.errors import ConfigurationError

__all__ = [
    "HANDSHAKE_BYTES",
    "MIN_TOKEN_BYTES",
    "Applicant",
    "Doorkeeper",
    "Hello",
    "Join",
    "RefusedError",
    "Seats",
    "StrangerError",
    "Welcome",
    "read_message",
]

HANDSHAKE_BYTES: Final = 1024
"""The largest frame of a handshake."""

MIN_TOKEN_BYTES: Final = 16
"""The shortest token: a listener on the network could guess a shorter one at leisure."""

_VERSION: Final = "kvindex-group-1"
_NAMED_SEATS: Final = 16

_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True, forbid_unknown_fields=True):
    """Rank 0's first word."""

    version: _Text
    nonce: _Bytes32


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True, forbid_unknown_fields=True):
    """A rank's answer: who it is, what it expects, and that it knows the token."""

    rank: _Number
    world_size: _Number
    max_object_bytes: _Number
    nonce: _Bytes32
    proof: _Bytes32


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """Rank 0 has a seat for this rank, and knows the token too."""

    proof: _Bytes32


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """Rank 0 has no seat for this rank."""

    reason: _Text


class Seats(msgspec.Struct, frozen=True, tag="seats", array_like=True):
    """How many ranks have not come yet, and the first of them."""

    missing: _Number
    first: Annotated[list[_Number], msgspec.Meta(max_length=_NAMED_SEATS)]

    @classmethod
    def of(cls, missing: list[int]) -> Seats:
        """Return the word about these missing ranks."""
        return cls(len(missing), missing[:_NAMED_SEATS])

    def __str__(self) -> str:
        more = self.missing - len(self.first)
        named = ", ".join(map(str, self.first)) + (f" and {more} more" if more > 0 else "")
        return f"rank {named}" if self.missing == 1 else f"ranks {named}"


_Message = Hello | Join | Welcome | Refused | Seats
_decoder: Final[msgspec.msgpack.Decoder[_Message]] = msgspec.msgpack.Decoder(_Message)
_encode: Final = msgspec.msgpack.encode


class StrangerError(Exception):
    """What came is no word of a handshake, or not the one that was due."""


class RefusedError(Exception):
    """There is no seat for who asked.

    Attributes:
        reason: "token", "size", "rank" or "duplicate"; what is counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def read_message(body: bytes) -> _Message:
    """Return the word of a handshake in a frame.

    Raises:
        StrangerError: it holds none.
    """
    try:
        return _decoder.decode(body)
    except Exception as error:  # msgspec raises several kinds
        raise StrangerError(f"not a kvindex process group: {error}") from None


class Doorkeeper:
    """Rank 0's side of one handshake.

    Args:
        token: the secret of the group.
        world_size: ranks of the group.
        max_object_bytes: its limit, which must be that of every rank.
    """

    def __init__(self, token: bytes, world_size: int, max_object_bytes: int) -> None:
        self._token = token
        self._world_size = world_size
        self._max_object_bytes = max_object_bytes
        self._nonce = secrets.token_bytes(32)

    def hello(self) -> bytes:
        """Return the frame to begin with."""
        return _encode(Hello(_VERSION, self._nonce))

    def check(self, body: bytes) -> Join:
        """Return what the other side is, once it has proved to know the token.

        Raises:
            StrangerError: the frame is not a `Join`.
            RefusedError: it has another token, another idea of the group, or no rank of it.
        """
        join = read_message(body)
        if not isinstance(join, Join):
            raise StrangerError(f"a {type(join).__name__} where a Join was due")
        if not hmac.compare_digest(join.proof, _proof(self._token, "join", self._nonce, join)):
            raise RefusedError("token", f"its token is not that of rank 0 (rank {join.rank} said)")
        ours = (self._world_size, self._max_object_bytes)
        if (join.world_size, join.max_object_bytes) != ours:
            raise RefusedError(
                "size",
                f"rank {join.rank} has world_size={join.world_size} and max_object_bytes="
                f"{join.max_object_bytes}, rank 0 has {ours[0]} and {ours[1]}",
            )
        if not 0 < join.rank < self._world_size:
            raise RefusedError("rank", f"rank {join.rank} is not in [1, {self._world_size})")
        return join

    def welcome(self, join: Join) -> bytes:
        """Return the frame that gives a seat."""
        return _encode(Welcome(_proof(self._token, "welcome", self._nonce, join)))

    @staticmethod
    def refuse(error: RefusedError) -> bytes:
        """Return the frame that tells why there is no seat."""
        return _encode(Refused(str(error)))


class Applicant:
    """Another rank's side of one handshake.

    Args:
        token: the secret of the group.
        rank: this rank.
        world_size: ranks of the group.
        max_object_bytes: its limit.
    """

    def __init__(self, token: bytes, rank: int, world_size: int, max_object_bytes: int) -> None:
        self._token = token
        self._rank = rank
        self._world_size = world_size
        self._max_object_bytes = max_object_bytes
        self._welcome = b""

    def join(self, hello: bytes) -> bytes:
        """Return the frame that answers rank 0's `Hello`.

        Raises:
            StrangerError: that was none, or of another version.
        """
        message = read_message(hello)
        if not isinstance(message, Hello):
            raise StrangerError(f"a {type(message).__name__} where a Hello was due")
        if message.version != _VERSION:
            raise StrangerError(f"rank 0 speaks {message.version!r}, this rank {_VERSION!r}")
        unproved = Join(
            self._rank,
            self._world_size,
            self._max_object_bytes,
            secrets.token_bytes(32),
            bytes(32),
        )
        self._welcome = _proof(self._token, "welcome", message.nonce, unproved)
        proof = _proof(self._token, "join", message.nonce, unproved)
        return _encode(msgspec.structs.replace(unproved, proof=proof))

    def seated(self, answer: bytes) -> None:
        """Return if the answer gives a seat, by a rank 0 that knows the token.

        Raises:
            ConfigurationError: it refuses, or does not know the token.
            StrangerError: it is none.
        """
        message = read_message(answer)
        if isinstance(message, Refused):
            raise ConfigurationError(f"rank 0 refused rank {self._rank}: {message.reason}")
        if not isinstance(message, Welcome):
            raise StrangerError(f"a {type(message).__name__} where a Welcome was due")
        if not hmac.compare_digest(message.proof, self._welcome):
            raise ConfigurationError(
                "who listens at rank 0's address does not know the token: the address is another "
                "group's, or somebody poses as rank 0"
            )


def _proof(token: bytes, purpose: str, nonce: bytes, join: Join) -> bytes:
    """What only a holder of the token can say in this one handshake."""
    said = _encode(
        (
            *(_VERSION, purpose, nonce, join.nonce),
            *(join.rank, join.world_size, join.max_object_bytes),
        )
    )
    return hmac.digest(token, said, "sha256")
