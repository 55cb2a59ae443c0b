"""CURVE keys for a queue's readers on other machines.

The writer is the CURVE server: a reader knows its public key from the queue's handle, and so knows
whom it talks to. ZeroMQ's CURVE without a ZAP handler lets any client key in; that is enough here,
as a reader must then show the queue's token (32 random bytes, also from the handle) inside the
encrypted channel, before it is sent anything. Who holds the handle may read; nobody else can, nor
listen to those who do. A list of allowed client keys would add nothing but upkeep.
"""

from __future__ import annotations

import msgspec
import zmq

from kvindex.errors import ConfigurationError

__all__ = ["CurveReader", "CurveServer"]

_KEY_BYTES = 40  # 32 bytes as Z85 text


class CurveServer(msgspec.Struct, frozen=True, kw_only=True):
    """The writer's key pair (Z85 text of 40 bytes each).

    Attributes:
        public_key: goes into the handle, for readers.
        secret_key: stays with the writer.

    Raises:
        ConfigurationError: a key is not 40 bytes of Z85 text, or they are not a pair.
    """

    public_key: bytes
    secret_key: bytes

    def __post_init__(self) -> None:
        _check_key("public_key", self.public_key)
        _check_pair(self.public_key, self.secret_key)

    @classmethod
    def generate(cls) -> CurveServer:
        """Return a new pair of keys."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(public_key=public_key, secret_key=secret_key)

    def __repr__(self) -> str:
        return f"CurveServer(public_key={self.public_key!r})"


class CurveReader(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's key pair, and the public key of the writer that it means to reach.

    Attributes:
        server_key: the writer's public key.
        public_key: the reader's own.
        secret_key: the reader's own.

    Raises:
        ConfigurationError: a key is not 40 bytes of Z85 text, or the own keys are not a pair.
    """

    server_key: bytes
    public_key: bytes
    secret_key: bytes

    def __post_init__(self) -> None:
        _check_key("server_key", self.server_key)
        _check_key("public_key", self.public_key)
        _check_pair(self.public_key, self.secret_key)

    @classmethod
    def generate(cls, server_key: bytes) -> CurveReader:
        """Return a new pair of keys for talking to the writer with this public key."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(server_key=server_key, public_key=public_key, secret_key=secret_key)

    def __repr__(self) -> str:
        return f"CurveReader(server_key={self.server_key!r}, public_key={self.public_key!r})"


def _check_key(name: str, key: bytes) -> None:
    if len(key) != _KEY_BYTES:
        raise ConfigurationError(f"CURVE {name} must be 40 bytes of Z85 text, not {len(key)}")


def _check_pair(public_key: bytes, secret_key: bytes) -> None:
    _check_key("secret_key", secret_key)
    try:
        belongs = zmq.curve_public(secret_key) == public_key
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigurationError(f"CURVE secret_key is not Z85 text: {error}") from error
    if not belongs:
        raise ConfigurationError("CURVE public_key and secret_key are not a pair")
