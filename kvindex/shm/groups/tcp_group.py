"""A process group over TCP that needs nothing but a network and a shared secret."""

from __future__ import annotations

import math
from typing import Any, Final

import zmq

from kvindex.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    PeerDiedError,
    QueueTimeoutError,
)
from kvindex.shm.groups.joining import join, keys_from, listen, parse_address
from kvindex.shm.groups.objects import MAX_OBJECT_BYTES, check_rank, pack_object, unpack_object
from kvindex.shm.groups.same_node import ranks_that_share_memory
from kvindex.shm.groups.star import Hub, Spoke
from kvindex.shm.groups.words import Call, Failure, Settings

__all__ = ["TcpProcessGroup"]

_MIN_TOKEN_BYTES: Final = 16  # who can connect could guess a shorter one
_MOST_OBJECT_BYTES: Final = 1 << 30
_MOST_RANKS: Final = 1 << 16


class TcpProcessGroup:
    """Processes that meet at rank 0's address and exchange small values through it.

    Rank 0 listens at the given address only, from the start until it is closed: close a group that
    has made its queues. The others connect when `wait_until_ready` or the first collective is
    called, and try again while nobody listens yet. ZeroMQ's CURVE encrypts the connections with
    keys made from `token`, which itself is never sent. Who does not know it can neither join nor
    read: the handshake turns them away, and they are counted.

    A collective raises what `ProcessGroup` says, and ClosedError once this rank has called `close`.
    The first failure of a collective (a rank gone, late, or calling something else) is raised at
    every rank that takes part and ends the group, since its ranks are out of step: make a new one.
    A rank is gone when its process ends, or when its machine has given no sign for 15 s.

    Complexity: in a collective every rank sends its value to rank 0 and waits for its share, which
    takes O(world_size × bytes) at rank 0 and at a gather's destination.

    Args:
        rank: this process's number, from 0.
        world_size: how many processes there are.
        address: where rank 0 listens: "host:port", or "[::1]:port". At rank 0 port 0 lets the
            system choose; `address` tells which.
        token: a secret of 16 bytes or more that all ranks know, as `secrets.token_bytes(32)` gives.
        timeout: seconds for all ranks to come, and for each collective.
        max_object_bytes: the largest packed value, in bytes; the same at every rank. A gather
            holds `world_size` of them at rank 0 and at its destination.

    Raises:
        ConfigurationError: a value that cannot work, rank 0 cannot listen there, or ZeroMQ was
            built without CURVE.

    Thread safety: one thread at a time.

    Examples:
        >>> import secrets
        >>> secret = secrets.token_bytes(32)
        >>> with TcpProcessGroup(0, 1, "127.0.0.1:0", token=secret) as group:
        ...     group.gather_object({"pid": 7}, 0)
        [{'pid': 7}]
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        token: bytes,
        timeout: float = 300.0,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        _check(rank, world_size, token, timeout, max_object_bytes)
        self._rank = rank
        self._settings = Settings(world_size, max_object_bytes)
        self._timeout = float(timeout)
        self._address = address
        self._keys = keys_from(token)
        self._star: Hub | Spoke | None = None
        self._ready = self._closed = False
        self._failure: Failure | None = None
        self._calls = 0
        if rank == 0:
            self._star = listen(address, self._keys, self._settings)
            self._address = self._star.address
        elif parse_address(address)[1] == 0:
            raise ConfigurationError(f"rank {rank} needs rank 0's port, not 0: see its `address`")

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._settings.world_size

    @property
    def address(self) -> str:
        """Where rank 0 listens: at rank 0 with the port that it was given."""
        return self._address

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Return when all ranks have come. Collective; the first other collective calls it.

        Args:
            timeout: seconds to wait; None for the group's own.

        Raises:
            QueueTimeoutError: ranks are missing, which the message names; may be called again.
            ConfigurationError: rank 0 refuses this rank: another token, `world_size` or
                `max_object_bytes`, or a rank that has come already.
            ClosedError: the group was closed.
        """
        if self._closed:
            raise ClosedError("the process group was closed")
        if self._ready:
            return
        limit = self._timeout if timeout is None else timeout
        if isinstance(self._star, Hub):
            self._star.meet(limit)
        else:
            self._star = join(self._address, self._keys, self._rank, self._settings, limit)
        self._ready = True

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """Return at every rank the `obj` of rank `source`. Collective."""
        check_rank("source", source, self.world_size)
        data = self._pack(obj if self._rank == source else None)
        values = self._exchange("broadcast_object", source, data)
        return unpack_object(values[0] if values else data)

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        """Return at `destination` every rank's `obj`, by rank; None elsewhere. Collective."""
        check_rank("destination", destination, self.world_size)
        data = self._pack(obj)
        values = self._exchange("gather_object", destination, data)
        if self._rank != destination:
            return None
        values.insert(self._rank, data)
        return [unpack_object(value) for value in values]

    def same_node(self, source: int) -> list[bool]:
        """Return at every rank, for each, whether it shares /dev/shm with `source`. Collective."""
        check_rank("source", source, self.world_size)
        return ranks_that_share_memory(self, source)

    def barrier(self) -> None:
        """Return when every rank has called it. Collective."""
        self._exchange("barrier", 0, b"")

    def statistics(self) -> dict[str, int]:
        """Return how many connections rank 0 turned away, by reason; empty elsewhere.

        Reasons: stranger (no token), settings, rank, duplicate, late, malformed, ended.
        """
        return dict(self._star.turned_away) if isinstance(self._star, Hub) else {}

    def close(self) -> None:
        """Leave the group; other ranks that call a collective with this one see it gone.

        May take 5 s, if a rank does not take what was sent to it.
        """
        self._closed = True
        if self._star is not None:
            self._star.close()

    def __enter__(self) -> TcpProcessGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TcpProcessGroup({self._rank} of {self.world_size} at {self._address})"

    def _pack(self, obj: Any) -> bytes:
        return pack_object(obj, self._settings.max_object_bytes)

    def _exchange(self, operation: str, root: int, data: bytes) -> list[bytes]:
        """The values of one collective; whatever breaks it ends the group, here and elsewhere."""
        self.wait_until_ready()
        assert self._star is not None
        if self._failure is not None:
            raise self._failure.error()
        call = Call(self._calls, operation, root)
        self._calls += 1
        try:
            return self._star.exchange(call, data, self._timeout)
        except (ConfigurationError, DecodeError, PeerDiedError, QueueTimeoutError) as error:
            self._failure = Failure.of(error)
            self._star.tell(self._failure)
            raise
        except BaseException as error:  # an interrupt: nobody knows what was sent
            self._failure = Failure("PeerDiedError", f"rank {self._rank} left {call}: {error!r}")
            self._star.close(0.0)
            raise


def _check(rank: int, world_size: int, token: bytes, timeout: float, max_object_bytes: int) -> None:
    if not 1 <= world_size <= _MOST_RANKS:
        raise ConfigurationError(f"world_size={world_size} is not in [1, {_MOST_RANKS}]")
    check_rank("rank", rank, world_size)
    if not isinstance(token, bytes) or len(token) < _MIN_TOKEN_BYTES:
        raise ConfigurationError(
            f"token must be {_MIN_TOKEN_BYTES} bytes or more, known to all ranks and to nobody "
            "else; secrets.token_bytes(32) makes one"
        )
    if not zmq.has("curve"):
        raise ConfigurationError(
            "ZeroMQ was built without CURVE here, which encrypts a TcpProcessGroup: install pyzmq "
            "from a wheel, or use a TorchProcessGroup"
        )
    if not (math.isfinite(timeout) and timeout > 0):
        raise ConfigurationError(f"timeout={timeout} is not a number of seconds above 0")
    if not 1 <= max_object_bytes <= _MOST_OBJECT_BYTES:
        raise ConfigurationError(
            f"max_object_bytes={max_object_bytes} is not in [1, {_MOST_OBJECT_BYTES}]"
        )
