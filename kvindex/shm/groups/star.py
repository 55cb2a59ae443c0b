"""Collectives over a star of ZeroMQ connections: rank 0 is the hub, every other rank a spoke.

The hub is a ROUTER, each spoke a DEALER. In each collective every spoke sends its value and waits
for an answer. The hub answers when it has every value, or tells all ranks what went wrong: it alone
judges who is missing. A spoke whose time is up tells the hub, and waits a second for its judgement.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import zmq

from kvindex.curve import Curve
from kvindex.errors import ConfigurationError, DecodeError, PeerDiedError, QueueTimeoutError
from kvindex.shm.groups.words import (
    FRAME_BYTES,
    Call,
    Failure,
    Hello,
    Seats,
    Settings,
    Word,
    cut,
    listed,
    parse,
)
from kvindex.shm.remote.connections import Callers, Connection
from kvindex.shm.remote.sockets import RemoteLink, WatchedSocket

__all__ = ["ConnectionLost", "Hub", "Spoke"]

LINK: Final = RemoteLink()
VERDICT_SECONDS: Final = 1.0
_LONGEST_WAIT: Final = 3600.0
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBODY_THERE: Final = "rank 0's port, where nobody listens,"
_NO_ANSWER: Final = "rank 0's answer (or is it not a kvindex process group?)"

logger = logging.getLogger(__name__)


class Hub:
    """Rank 0, which listens from the start; `turned_away` counts who got no seat, by reason."""

    def __init__(self, host: str, port: int, curve: Curve, settings: Settings) -> None:
        self.turned_away: Counter[str] = Counter()
        self._settings = settings
        self._seats: dict[bytes, int] = {}  # ZeroMQ's name of a connection -> rank
        self._told: set[bytes] = set()  # who was there when the seats were last told
        self._complete = False
        self._watched = WatchedSocket.bind(host, LINK, curve, port=port, max_part_bytes=FRAME_BYTES)
        self._callers = Callers(self._watched)
        self.address = f"{host}:{self._watched.port}"

    @property
    def missing(self) -> set[int]:
        """The ranks that have no connection."""
        return set(range(1, self._settings.world_size)).difference(self._seats.values())

    def meet(self, timeout: float) -> None:
        """Return once every rank has a seat, or raise QueueTimeoutError; may be called again."""
        deadline = time.monotonic() + timeout
        while not self._complete:
            for rank, _ in self._hear():
                self._turn_away("malformed", f"rank {rank} spoke before all had come")
            self._complete = not self.missing
            if self._told != self._seats.keys():
                self._told = set(self._seats)
                self.tell(Seats(listed(self.missing) if self.missing else ""))
            if not self._complete and not _wait(self._watched, deadline):
                raise QueueTimeoutError(
                    f"{listed(self.missing)} did not come to {self.address} within {timeout:g} s "
                    f"(turned away meanwhile: {dict(self.turned_away)})",
                    timeout=timeout,
                )

    def exchange(self, call: Call, value: bytes, timeout: float) -> list[bytes]:
        """Take part in a collective; return the values that rank 0 is owed."""
        values = self._collect(call, value, timeout)
        everyone = range(self._settings.world_size)
        owed = {rank: call.owed(rank, len(everyone)) for rank in everyone}
        frames = {  # made once, as ZeroMQ shares them between all whom they are sent to
            origin: [zmq.Frame(frame, copy=True) for frame in cut(call, [values[origin]])[1:]]
            for origin in {origin for rank in everyone[1:] for origin in owed[rank]}
        }
        for name, rank in self._seats.items():
            self._send(name, call, [frame for origin in owed[rank] for frame in frames[origin]])
        return [values[origin] for origin in owed[0]]

    def tell(self, word: Word) -> None:
        """Tell all ranks."""
        for name in self._seats:
            self._send(name, word)

    def close(self, linger: float = LINK.linger) -> None:
        """Close all connections; wait at most `linger` seconds for what is to be sent still."""
        self._watched.close(linger)

    def _collect(self, call: Call, value: bytes, timeout: float) -> dict[int, bytes]:
        deadline = time.monotonic() + timeout
        values, gave_up = {0: value}, set[int]()
        while True:
            for rank, frames in self._hear():
                word, sent = parse(frames, f"rank {rank}", self._settings.max_object_bytes)
                if isinstance(word, Failure) and word.kind == "QueueTimeoutError":
                    gave_up.add(rank)
                else:
                    (values[rank],) = _checked(call, word, sent, 1, here=0, there=rank)
            if self.missing:
                are = "is" if len(self.missing) == 1 else "are"
                raise PeerDiedError(f"{listed(self.missing)} {are} gone during {call}")
            awaited = set(self._seats.values()) - values.keys()
            if not awaited and not gave_up:
                return values
            if gave_up or not _wait(self._watched, deadline):
                who = listed(awaited) if awaited else "rank 0, which came late,"
                why = f"; {listed(gave_up)} gave up" if gave_up else ""
                raise _late(who, call, timeout, why)

    def _hear(self) -> Iterator[tuple[int, list[zmq.Frame]]]:
        """Yield what ranks have said; seat, or turn away, who says hello."""
        self._note_ends()
        while heard := self._callers.hear():
            self._note_ends()
            name, frames = heard
            rank = self._seats.get(name)
            if rank is None:
                self._admit(name, frames)
            else:
                yield rank, frames

    def _admit(self, name: bytes, frames: list[zmq.Frame]) -> None:
        try:
            hello, _ = parse(frames, "who has no seat", 0)
        except DecodeError as error:
            self._turn_away("malformed", str(error))
            return
        if not isinstance(hello, Hello):
            return  # said before its connection ended
        if not self._callers.introduce(name, frames[0]):
            return  # gone already, as was counted
        reason, why = self._refusal(hello)
        if reason:
            self._turn_away(reason, why)
            text = f"rank 0 refused rank {hello.rank}: {why}"
            self._send(name, Failure("ConfigurationError", text))
        else:
            self._seats[name] = hello.rank

    def _refusal(self, hello: Hello) -> tuple[str, str]:
        """Why this rank gets no seat, in a word and in more; empty if it gets one."""
        if hello.settings != self._settings:
            return "settings", f"it has {hello.settings}, rank 0 has {self._settings}"
        if not 0 < hello.rank < self._settings.world_size:
            return "rank", f"rank {hello.rank} is not in [1, {self._settings.world_size})"
        if hello.rank in self._seats.values():
            why = f"rank {hello.rank} is connected already; give each process its own"
            return "duplicate", why
        return ("late", "all ranks had come before") if self._complete else ("", "")

    def _note_ends(self) -> None:
        """Take the seats of ranks whose connection has ended."""
        for name, _ in self._callers.ended():
            if not name:
                self._turn_away("stranger", "who connected does not know the token")
            elif name in self._seats:
                self._turn_away("ended", f"rank {self._seats.pop(name)} is gone")

    def _turn_away(self, reason: str, why: str) -> None:
        self.turned_away[reason] += 1
        count = self.turned_away[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: a flood fills no log
            logger.warning("turned away (%s, %d so far): %s", reason, count, why)

    def _send(self, name: bytes, word: Word, frames: Sequence[zmq.Frame] = ()) -> None:
        self._callers.send(name, [*cut(word), *frames])  # who is gone is noticed by its end


class ConnectionLost(Exception):  # noqa: N818 -- an event; the message says what was awaited
    """A connection to rank 0 broke, or never came to be."""


class Spoke:
    """Any other rank: one connection to the hub, which does not come back once it is lost."""

    def __init__(self, endpoint: str, curve: Curve | None, rank: int, settings: Settings) -> None:
        self._missing = ""  # whom the hub said that it lacks
        self._rank = rank
        self._settings = settings
        self._watched = WatchedSocket.connect(endpoint, LINK, curve, max_part_bytes=FRAME_BYTES)
        self.connection = Connection(self._watched)

    def meet(self, deadline: float) -> None:
        """Ask for a seat, and return once every rank has one; raise why not by the deadline."""
        self.tell(Hello(self._rank, self._settings))
        while frames := self.hear(deadline):
            word, _ = self._parse(frames)
            if isinstance(word, Failure):
                raise word.error()
            if isinstance(word, Seats) and not word.missing:
                return
            self._missing = word.missing if isinstance(word, Seats) else str(word)
        raise self._lost()

    def exchange(self, call: Call, value: bytes, timeout: float) -> list[bytes]:
        """Take part in a collective; return the values that this rank is owed."""
        self.tell(call, value)
        try:
            word, values = self._answer(call, timeout)
        except ConnectionLost as error:
            raise PeerDiedError(f"rank 0 is gone during {call}") from error
        count = len(call.owed(self._rank, self._settings.world_size))
        return _checked(call, word, values, count, here=self._rank, there=0)

    def tell(self, word: Word, *values: bytes) -> None:
        """Tell the hub, without waiting; if the connection is lost, `hear` says so."""
        with suppress(zmq.Again):
            self._watched.socket.send_multipart(cut(word, values), _NOBLOCK)

    def hear(self, deadline: float) -> list[zmq.Frame]:
        """Return what the hub says next; nothing if that has not come by the deadline."""
        while True:
            lost = self.connection.is_lost()  # what had come before is still to be read
            with suppress(zmq.Again):
                return self._watched.socket.recv_multipart(_NOBLOCK, copy=False)
            if lost:
                raise self._lost()
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            self.connection.wait(min(left, _LONGEST_WAIT))

    def close(self, linger: float = LINK.linger) -> None:
        """Close the connection; wait at most `linger` seconds for what is to be sent still."""
        self.connection.close(linger)

    def _answer(self, call: Call, timeout: float) -> tuple[Word, list[bytes]]:
        """What the hub says; if time is up, why the collective failed."""
        if frames := self.hear(time.monotonic() + timeout):
            return self._parse(frames)
        failure = Failure.of(_late("rank 0", call, timeout))
        self.tell(failure)
        frames = self.hear(time.monotonic() + VERDICT_SECONDS)
        word = self._parse(frames)[0] if frames else failure
        return (word if isinstance(word, Failure) else failure), []

    def _parse(self, frames: list[zmq.Frame]) -> tuple[Word, list[bytes]]:
        return parse(frames, "rank 0", self._settings.max_object_bytes)

    def _lost(self) -> ConnectionLost:
        awaited = self._missing or (_NO_ANSWER if self.connection.made else _NOBODY_THERE)
        return ConnectionLost(f"{awaited} was awaited")


def _wait(watched: WatchedSocket, deadline: float) -> bool:
    """Wait for the socket or its monitor, unless the time is up; return whether it was not."""
    left = min(deadline - time.monotonic(), _LONGEST_WAIT)
    if left > 0:
        watched.wait(math.ceil(left * 1000))
    return left > 0


def _checked(
    call: Call, word: Word, values: list[bytes], count: int, *, here: int, there: int
) -> list[bytes]:
    """Return the values that came from a rank, if they are what is due in a call."""
    if isinstance(word, Failure):
        raise word.error()
    if isinstance(word, Call) and word != call:
        raise ConfigurationError(
            f"rank {here} calls {call}, but rank {there} is at {word}: every rank must make the "
            "same calls in the same order"
        )
    if word != call or len(values) != count:
        raise DecodeError(f"rank {there} sent {word} with {len(values)} values for {call}")
    return values


def _late(who: str, call: Call, timeout: float, why: str = "") -> QueueTimeoutError:
    text = f"{who} did not take part within {timeout:g} s in {call}{why}"
    return QueueTimeoutError(text, timeout=timeout)
