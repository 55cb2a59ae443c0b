"""Collectives over a star of TCP connections: rank 0 is the hub, every other rank a spoke.

A broadcast goes from its source to the hub and from there to all others; a gather goes to the hub
and, one part after the other, on to its destination. Each part names its call, so that ranks that
call different things find out. The hub watches all ranks while it waits for some, and is the one
that judges who is missing: a spoke whose time is up tells it, and waits a second for its verdict.
After a failure the ranks are out of step, so the group is at its end everywhere.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

import msgspec

from kvindex.shm.groups.tcp_frames import Connection, ConnectionEnded, FrameTooLarge
from kvindex.shm.groups.tcp_messages import Call, Failure, GroupFailure, Part, listed, read_word

__all__ = ["Hub", "Spoke", "Star"]

VERDICT_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)
_encode: Final = msgspec.msgpack.encode


class Star(Protocol):
    """One rank's place in the star. One thread at a time.

    After a `GroupFailure`, which every method may raise, only `tell` and `close` may be called.
    """

    def broadcast(self, call: Call, data: bytes) -> bytes:
        """Return the data of the call's root."""
        ...

    def gather(self, call: Call, data: bytes) -> list[bytes] | None:
        """Return every rank's data at the call's root, None elsewhere."""
        ...

    def tell(self, failure: Failure) -> None:
        """Tell the others, as far as they can be told at once."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class Hub:
    """Rank 0.

    Args:
        connections: one for each other rank; owned from now on.
    """

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self._connections = dict(connections)
        self._early: dict[int, Part] = {}

    def broadcast(self, call: Call, data: bytes) -> bytes:
        """Return the data of the call's root, sent to all."""
        if call.root == 0:
            self._collect(call, [])
        else:
            data = self._collect(call, [call.root])[call.root]
        body = _part(call, call.root, data)
        for rank in self._connections:
            if rank != call.root:
                self._send(call, rank, body)
        return data

    def gather(self, call: Call, data: bytes) -> list[bytes] | None:
        """Return every rank's data if this is the call's root, else send it there."""
        parts = {0: data, **self._collect(call, self._connections)}
        in_order = [parts[rank] for rank in sorted(parts)]
        if call.root == 0:
            return in_order
        for origin, part in enumerate(in_order):
            if origin != call.root:
                self._send(call, call.root, _part(call, origin, part))
        return None

    def tell(self, failure: Failure) -> None:
        """Tell all ranks that still listen."""
        for rank, connection in self._connections.items():
            _tell(connection, failure, rank)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()

    def _collect(self, call: Call, wanted: Iterable[int]) -> dict[int, bytes]:
        """Return the parts of these ranks, having looked at all ranks at least once."""
        collection = _Collection(call, wanted)
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
                self._hear(collection, rank, selector)
            collection.check_patience()
            while collection.waiting:
                events = selector.select(max(0.0, call.deadline - time.monotonic()))
                if not events:
                    raise _timeout(call, collection.waiting)
                for key, _ in events:
                    self._hear(collection, key.data, selector)
                collection.check_patience()
        return collection.parts

    def _hear(self, collection: _Collection, rank: int, selector: selectors.BaseSelector) -> None:
        """Take all that a rank has said, up to a part of a later call."""
        connection = self._connections[rank]
        try:
            while (word := self._early.pop(rank, None) or _read(connection, rank)) is not None:
                if isinstance(word, Part) and rank not in collection.waiting:
                    self._early[rank] = word
                    selector.unregister(connection)
                    return
                collection.take(rank, word)
        except ConnectionEnded as error:
            if rank not in collection.parts:
                raise _died(collection.call, rank, error) from error
            selector.unregister(connection)  # perhaps its part was the last that it had to do

    def _send(self, call: Call, rank: int, body: bytes) -> None:
        try:
            self._connections[rank].send(body, call.deadline)
        except ConnectionEnded as error:
            raise _died(call, rank, error) from error
        except TimeoutError:
            raise _timeout(call, {rank}) from None


class _Collection:
    """The parts of one call that have come to the hub, and the ranks whose part has not."""

    def __init__(self, call: Call, wanted: Iterable[int]) -> None:
        self.call = call
        self.waiting = set(wanted)
        self.parts: dict[int, bytes] = {}
        self._gave_up: set[int] = set()

    def take(self, rank: int, word: Part | Failure) -> None:
        """Take the part of a rank that is waited for, or the failure of any."""
        if isinstance(word, Part):
            self.parts[rank] = _data_of(self.call, word, rank, here=0)
            self.waiting.discard(rank)
        elif word.kind == "timeout":
            self._gave_up.add(rank)
        else:
            raise GroupFailure(word)

    def check_patience(self) -> None:
        """Judge who is missing, if a rank gave up waiting."""
        if self._gave_up:
            raise _timeout(self.call, self.waiting - self._gave_up, self._gave_up)


class Spoke:
    """Any other rank.

    Args:
        rank: this rank.
        world_size: ranks of the group.
        connection: to rank 0; owned from now on.
    """

    def __init__(self, rank: int, world_size: int, connection: Connection) -> None:
        self._rank = rank
        self._world_size = world_size
        self._connection = connection

    def broadcast(self, call: Call, data: bytes) -> bytes:
        """Return the data of the call's root."""
        if call.root == self._rank:
            self._send(call, data)
            return data
        return self._receive(call, call.root)

    def gather(self, call: Call, data: bytes) -> list[bytes] | None:
        """Return every rank's data if this is the call's root, else send it to the hub."""
        self._send(call, data)
        if call.root != self._rank:
            return None
        return [
            data if origin == self._rank else self._receive(call, origin)
            for origin in range(self._world_size)
        ]

    def tell(self, failure: Failure) -> None:
        """Tell the hub, which tells the others."""
        _tell(self._connection, failure, 0)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _send(self, call: Call, data: bytes) -> None:
        try:
            word = _read(self._connection, 0)  # nothing but bad news can have come before
            if word is not None:
                self._accept(call, word, origin=-1)
            self._connection.send(_part(call, self._rank, data), call.deadline)
        except ConnectionEnded as error:
            raise self._verdict(call, _died(call, 0, error)) from error
        except TimeoutError:
            raise self._verdict(call, _timeout(call, {0})) from None

    def _receive(self, call: Call, origin: int) -> bytes:
        try:
            word = self._next_word(call.deadline)
        except ConnectionEnded as error:
            raise _died(call, 0, error) from error
        except TimeoutError:
            raise self._verdict(call, _timeout(call, {0})) from None
        return self._accept(call, word, origin)

    def _accept(self, call: Call, word: Part | Failure, origin: int) -> bytes:
        if isinstance(word, Failure):
            raise GroupFailure(word)
        data = _data_of(call, word, 0, here=self._rank)
        if word.origin != origin:
            text = f"rank 0 sent the part of rank {word.origin} where {origin} was due in {call}"
            raise GroupFailure(Failure("garbage", text))
        return data

    def _verdict(self, call: Call, otherwise: GroupFailure) -> GroupFailure:
        """Why the hub says that we fail; if it does not know, it is what is missing."""
        self.tell(otherwise.failure)
        deadline = time.monotonic() + VERDICT_SECONDS
        try:
            while not isinstance(word := self._next_word(deadline), Failure):
                logger.debug("rank %d had a part of %s after its time", self._rank, call)
        except (ConnectionEnded, TimeoutError, GroupFailure):
            return otherwise
        return GroupFailure(word)

    def _next_word(self, deadline: float) -> Part | Failure:
        try:
            return read_word(self._connection.receive(deadline), 0)
        except FrameTooLarge as error:
            raise _too_large(0, error) from error


def _read(connection: Connection, rank: int) -> Part | Failure | None:
    try:
        body = connection.read_frame()
    except FrameTooLarge as error:
        raise _too_large(rank, error) from error
    return None if body is None else read_word(body, rank)


def _part(call: Call, origin: int, data: bytes) -> bytes:
    return _encode(Part(call.number, call.operation, call.root, origin, data))


def _data_of(call: Call, part: Part, rank: int, *, here: int) -> bytes:
    """The data of a rank's part, if it is of this call."""
    if part.is_of(call):
        return part.data
    text = (
        f"rank {here} calls {call}, but rank {rank} is at {part}: every rank must make the same "
        "calls in the same order"
    )
    raise GroupFailure(Failure("mismatch", text))


def _too_large(rank: int, error: FrameTooLarge) -> GroupFailure:
    return GroupFailure(Failure("garbage", f"rank {rank} sent {error}"))


def _died(call: Call, rank: int, error: ConnectionEnded) -> GroupFailure:
    return GroupFailure(Failure("died", f"rank {rank} is gone ({error}) during {call}"))


def _timeout(call: Call, missing: set[int], gave_up: Iterable[int] = ()) -> GroupFailure:
    who = listed(missing) if missing else "rank 0, which came late,"
    waited = f"; {listed(set(gave_up))} gave up" if gave_up else ""
    text = f"{who} did not take part within {call.timeout:g} s in {call}{waited}"
    return GroupFailure(Failure("timeout", text, call.timeout))


def _tell(connection: Connection, failure: Failure, rank: int) -> None:
    if not connection.in_step:
        return
    try:
        connection.send(failure.encode(), deadline=0.0)
    except (ConnectionEnded, TimeoutError) as error:
        logger.debug("rank %d was not told of a failure: %r", rank, error)
