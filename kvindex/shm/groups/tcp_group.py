"""A process group over TCP that needs nothing but a network and a shared secret."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvindex.errors import ClosedError, ConfigurationError, QueueTimeoutError
from kvindex.shm.groups.objects import MAX_OBJECT_BYTES, check_rank, pack_object, unpack_object
from kvindex.shm.groups.same_node import ranks_that_share_memory
from kvindex.shm.groups.tcp_address import Address, listen, parse_address
from kvindex.shm.groups.tcp_application import apply_for_seat
from kvindex.shm.groups.tcp_handshake import MIN_TOKEN_BYTES, Seats
from kvindex.shm.groups.tcp_messages import Call, Failure, GroupFailure
from kvindex.shm.groups.tcp_reception import Reception
from kvindex.shm.groups.tcp_star import Hub, Spoke, Star

__all__ = ["TcpProcessGroup"]

_Result = TypeVar("_Result")
_NOTHING: Final = pack_object(None)
_MOST_OBJECT_BYTES: Final = 1 << 30
_MOST_RANKS: Final = 1 << 16


class TcpProcessGroup:
    """Processes that meet at rank 0's address and exchange small values through it.

    Rank 0 listens from the start, at the given address only, until all have come. The others
    connect when `wait_until_ready` or the first collective is called, trying again while nobody
    listens yet. Who connects without knowing `token` is turned away and counted; the token itself
    never crosses the network. Connections are neither encrypted nor signed after that: use a
    network that you trust with the values.

    The first failure of a collective (a rank gone, late, or calling something else) is raised at
    every rank that takes part and ends the group, since its ranks are out of step: make a new one.

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
        ConfigurationError: a value that cannot work, or rank 0 cannot listen there.

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
        self._world_size = world_size
        self._token = bytes(token)
        self._timeout = float(timeout)
        self._max_object_bytes = max_object_bytes
        self._address = parse_address(address)
        self._star: Star | None = None
        self._reception: Reception | None = None
        self._failure: Failure | None = None
        self._closed = False
        self._calls = 0
        if rank == 0:
            self._reception, self._address = self._receive_at(self._address)
        elif self._address.port == 0:
            raise ConfigurationError(f"rank {rank} needs rank 0's port, not 0: see its `address`")

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._world_size

    @property
    def address(self) -> str:
        """Where rank 0 listens: at rank 0 with the port that it was given."""
        return str(self._address)

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
        if self._star is None:
            limit = self._timeout if timeout is None else timeout
            self._star = self._spoke(limit) if self._reception is None else self._hub(limit)

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """Return at every rank the `obj` of rank `source`. Collective.

        Raises: see `ProcessGroup`; ClosedError if the group was closed.

        Complexity: O(world_size × bytes) at rank 0.
        """
        check_rank("source", source, self._world_size)
        data = self._pack(obj) if self._rank == source else _NOTHING
        return unpack_object(
            self._run("broadcast_object", source, lambda star, call: star.broadcast(call, data))
        )

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        """Return at `destination` every rank's `obj`, by rank; None elsewhere. Collective.

        Only `destination` waits for the others.

        Raises: see `ProcessGroup`; ClosedError if the group was closed.

        Complexity: O(world_size × bytes) at rank 0 and at `destination`.
        """
        check_rank("destination", destination, self._world_size)
        data = self._pack(obj)
        gathered = self._run(
            "gather_object", destination, lambda star, call: star.gather(call, data)
        )
        return None if gathered is None else [unpack_object(item) for item in gathered]

    def same_node(self, source: int) -> list[bool]:
        """Return at every rank, for each, whether it shares /dev/shm with `source`. Collective.

        Raises: see `ProcessGroup`; ClosedError if the group was closed.
        """
        check_rank("source", source, self._world_size)
        return ranks_that_share_memory(self, source)

    def barrier(self) -> None:
        """Return when every rank has called it. Collective.

        Raises: see `ProcessGroup`; ClosedError if the group was closed.
        """
        self._run("barrier", 0, lambda star, call: star.gather(call, _NOTHING))
        self._run("barrier", 0, lambda star, call: star.broadcast(call, _NOTHING))

    def statistics(self) -> dict[str, int]:
        """Return how many connections rank 0 turned away, by reason; empty elsewhere.

        Reasons: stranger, token, size, rank, duplicate, silent, crowded, late, ended.
        """
        return {} if self._reception is None else dict(self._reception.turned_away)

    def close(self) -> None:
        """Leave the group; other ranks that call a collective with this one see it gone."""
        self._closed = True
        if self._star is not None:
            self._star.close()
        if self._reception is not None:
            self._reception.close()

    def __enter__(self) -> TcpProcessGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TcpProcessGroup({self._rank} of {self._world_size} at {self._address})"

    def _receive_at(self, address: Address) -> tuple[Reception, Address]:
        listener, bound = listen(address)
        reception = Reception(
            listener,
            token=self._token,
            world_size=self._world_size,
            max_object_bytes=self._max_object_bytes,
        )
        return reception, bound

    def _hub(self, timeout: float) -> Hub:
        assert self._reception is not None
        if not self._reception.fill(time.monotonic() + timeout):
            raise QueueTimeoutError(
                f"{Seats.of(self._reception.missing)} did not come to {self._address} within "
                f"{timeout:g} s (turned away meanwhile: {dict(self._reception.turned_away)})",
                timeout=timeout,
            )
        return Hub(self._reception.seated)

    def _spoke(self, timeout: float) -> Spoke:
        connection = apply_for_seat(
            self._address,
            token=self._token,
            rank=self._rank,
            world_size=self._world_size,
            max_object_bytes=self._max_object_bytes,
            timeout=timeout,
        )
        return Spoke(self._rank, self._world_size, connection)

    def _pack(self, obj: Any) -> bytes:
        return pack_object(obj, self._max_object_bytes)

    def _run(self, operation: str, root: int, action: Callable[[Star, Call], _Result]) -> _Result:
        """The result of one collective; whatever breaks it ends the group, here and elsewhere."""
        self.wait_until_ready()
        if self._failure is not None:
            raise self._failure.error()
        assert self._star is not None
        deadline = time.monotonic() + self._timeout
        call = Call(self._calls, operation, root, self._timeout, deadline)
        self._calls += 1
        try:
            return action(self._star, call)
        except GroupFailure as error:
            self._failure = error.failure
            self._star.tell(error.failure)
            raise error.failure.error() from error
        except BaseException as error:  # an interrupt: nobody knows what was sent
            self._failure = Failure("mismatch", f"rank {self._rank} left {call}: {error!r}")
            self._star.tell(self._failure)
            raise


def _check(rank: int, world_size: int, token: bytes, timeout: float, max_object_bytes: int) -> None:
    if not 1 <= world_size <= _MOST_RANKS:
        raise ConfigurationError(f"world_size={world_size} is not in [1, {_MOST_RANKS}]")
    check_rank("rank", rank, world_size)
    if not isinstance(token, bytes) or len(token) < MIN_TOKEN_BYTES:
        raise ConfigurationError(
            f"token must be {MIN_TOKEN_BYTES} bytes or more, known to all ranks and to nobody "
            "else; secrets.token_bytes(32) makes one"
        )
    if not (math.isfinite(timeout) and timeout > 0):
        raise ConfigurationError(f"timeout={timeout} is not a number of seconds above 0")
    if not 1 <= max_object_bytes <= _MOST_OBJECT_BYTES:
        raise ConfigurationError(
            f"max_object_bytes={max_object_bytes} is not in [1, {_MOST_OBJECT_BYTES}]"
        )
