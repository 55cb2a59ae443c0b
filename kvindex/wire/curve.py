"""CURVE keys, which encrypt a ZeroMQ connection and authenticate its ends."""

from __future__ import annotations

import msgspec
import zmq

from kvindex.wire.errors import ConfigurationError

_KEY_BYTES = 40  # 32 bytes as Z85 text


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one end of an encrypted connection, each 40 bytes of Z85 text.

    Each end has a key pair. The end that connects also knows the public key of the server (an
    engine's publisher, the writer of a queue), and so reaches this server or none.

    Attributes:
        public_key: this end's public key.
        secret_key: this end's secret key.
        server_key: the server's public key; None at the server itself.

    Raises:
        ConfigurationError: a key is not 40 bytes of Z85 text, or the two are not a pair.

    Examples:
        >>> server = Curve.generate()
        >>> client = Curve.generate(server.public_key)
        >>> client.server_key == server.public_key
        True
    """

    public_key: bytes
    secret_key: bytes
    server_key: bytes | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            key = getattr(self, name)
            if key is None and name == "server_key":
                continue
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                raise ConfigurationError(f"CURVE {name} must be {_KEY_BYTES} bytes of Z85 text")
        # Here, where the keys are named: libzmq would only never connect, and not say why.
        try:
            belongs = zmq.curve_public(self.secret_key) == self.public_key
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigurationError(f"CURVE secret_key cannot be used: {error}") from error
        if not belongs:
            raise ConfigurationError("CURVE public_key and secret_key are not a pair")

    @classmethod
    def generate(cls, server_key: bytes | None = None) -> Curve:
        """Return a new key pair: a server's, or a client's of the server with this public key."""
        public_key, secret_key = zmq.curve_keypair()
        return cls(public_key=public_key, secret_key=secret_key, server_key=server_key)

    def configure(self, socket: zmq.Socket[bytes]) -> None:
        """Give a socket these keys, before it binds or connects."""
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self.secret_key
        if self.server_key is None:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.server_key

    def __repr__(self) -> str:
        return f"Curve(public_key={self.public_key!r}, server_key={self.server_key!r})"
