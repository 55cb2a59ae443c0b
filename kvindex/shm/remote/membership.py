"""Who has joined a queue over TCP: the writer's list of readers, its socket, what is said on it."""

from __future__ import annotations

import errno
import hmac
import logging
import time
from collections import Counter, deque

import zmq

from kvindex.errors import ConfigurationError
from kvindex.shm.remote.credits import SendWindow
from kvindex.shm.remote.frames import (
    MAX_CONTROL_BYTES,
    VERSION,
    Bye,
    Closed,
    Hello,
    Malformed,
    Probe,
    Refusal,
    Refused,
    Welcome,
    encode,
    parse_reader,
)
from kvindex.shm.remote.refusals import Refusals, descriptor_of
from kvindex.shm.remote.sockets import WatchedSocket, is_handshake_failure

__all__ = ["Member", "Membership", "Roster"]

logger = logging.getLogger(__name__)

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_MAX_TURN = 1000  # frames taken from readers (and strangers) before the writer goes on
_PROBES = 50  # tries at a connection that was seen closed
_PROBE_EVERY = 0.05  # seconds from one such try to the next
_NOBODY: frozenset[int] = frozenset()


class Member:
    """A reader that has joined.

    Attributes:
        identity: how ZeroMQ names its connection.
        rank: its rank.
        window: what it was sent, and what it has consumed.
        descriptor: of its connection's file.
        gone: whether its connection was found gone.
        probes, probe_at: how often it is still to be tried whether it is there, and when next.
    """

    __slots__ = ("descriptor", "gone", "identity", "probe_at", "probes", "rank", "window")

    def __init__(self, identity: bytes, rank: int, window: SendWindow, descriptor: int) -> None:
        self.identity = identity
        self.rank = rank
        self.window = window
        self.descriptor = descriptor
        self.gone = False
        self.probes = 0
        self.probe_at = 0.0


class Roster:
    """The readers that are expected, and `members`, who are here: a new tuple at each change.

    Args:
        n_remote: how many are expected, whatever their ranks are.
        token: what a reader must show.
    """

    def __init__(self, n_remote: int, token: bytes) -> None:
        if n_remote < 1:
            raise ConfigurationError(f"n_remote must be 1 or more, not {n_remote!r}")
        self._n_remote = n_remote
        self._token = token
        self._seen: set[int] = set()
        self._by_identity: dict[bytes, Member] = {}
        self._by_rank: dict[int, Member] = {}
        self.members: tuple[Member, ...] = ()

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that are here."""
        return frozenset(member.rank for member in self.members)

    @property
    def awaited(self) -> int:
        """How many have never joined."""
        return self._n_remote - len(self._seen)

    @property
    def absent(self) -> int:
        """How many are not here: have never joined, have left, or died."""
        return self._n_remote - len(self._by_rank)

    def find(self, identity: bytes) -> Member | None:
        """Return who has this connection."""
        return self._by_identity.get(identity)

    def holder(self, rank: int) -> Member | None:
        """Return who has this rank."""
        return self._by_rank.get(rank)

    def knows(self, said: Hello) -> bool:
        """Return whether the token is ours, in a time that tells nothing about it."""
        return hmac.compare_digest(said.token, self._token)

    def refuses(self, rank: int) -> Refusal | None:
        """Return why a reader of this rank cannot join now, or None if it can."""
        if rank in self._by_rank:
            return Refusal.RANK_TAKEN
        return None if rank in self._seen or self.awaited > 0 else Refusal.UNKNOWN_RANK

    def join(self, member: Member) -> None:
        """Add a reader whom nothing refuses."""
        self._seen.add(member.rank)
        self._by_rank[member.rank] = member
        self._by_identity[member.identity] = member
        self.members = tuple(self._by_rank.values())

    def leave(self, member: Member) -> None:
        """Remove a reader; its rank may be taken by another."""
        del self._by_rank[member.rank]
        del self._by_identity[member.identity]
        self.members = tuple(self._by_rank.values())


class Membership:
    """Lets readers in, takes what they acknowledge, and finds out who is gone.

    Args:
        watched: the writer's socket; this is the only one to use it.
        roster: who is expected and who is here.
        window, max_window_bytes: what a reader may have unacknowledged.

    Attributes:
        next_seq: seq of the next message, with which a reader begins that joins now.
        ready: whether a reader that joins now is told at once that all have joined.
        counters: readers that `joined`, `left`, `died`, were `evicted`, and `probes`.
        refusals: what was ignored.
        any_gone: whether a connection was found gone since the last `settle`.
        half_said: whether an exception broke in while a frame was handed to ZeroMQ: whatever is
            sent next would be taken for the rest of it.

    Thread safety: owned by the thread that sends.
    """

    def __init__(
        self, watched: WatchedSocket, roster: Roster, *, window: int, max_window_bytes: int
    ) -> None:
        self.roster = roster
        self.next_seq = 0
        self.ready = False
        self.counters: Counter[str] = Counter()
        self.refusals = Refusals()
        self.any_gone = False
        self.half_said = False
        self._closing = False
        self._watched = watched
        self._socket = watched.socket
        self._window = window
        self._max_window_bytes = max_window_bytes
        self._dead = _NOBODY
        self._hellos: deque[tuple[bytes, Hello, int, zmq.Frame]] = deque()
        self._former: set[int] = set()  # descriptors of readers who left

    def say(self, member: Member, *parts: bytes | zmq.Frame) -> None:
        """Send to one reader, or mark it as gone. Never waits: the windows bound what is queued."""
        if not self.reply(member.identity, *parts):
            member.gone = self.any_gone = True

    def reply(self, identity: bytes, *parts: bytes | zmq.Frame) -> bool:
        """Send to one connection; return whether it is there."""
        send = self._socket.send
        self.half_said = True
        try:
            send(identity, _MORE)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.half_said = False
            return False
        last = len(parts) - 1
        for i, part in enumerate(parts):
            send(part, _MORE if i < last else _NOBLOCK, copy=type(part) is bytes)
        self.half_said = False
        return True

    def serve(self) -> None:
        """Take what readers and strangers have said, without waiting, and remove who is gone."""
        self._take_events()
        for member in self.roster.members:
            if member.probes:
                self._probe(member)
        self._take_frames()
        if self.any_gone:
            self.settle()
        while self._hellos:  # after who was there before them has gone
            self._answer(*self._hellos.popleft())
        if self.any_gone:
            self.settle()

    def _take_events(self) -> None:
        for event, value in self._watched.events():
            if is_handshake_failure(event):
                self.refusals.note("handshake")
            elif value in self._former:
                self._former.discard(value)
            else:
                self._note_closed(value)

    def _note_closed(self, descriptor: int) -> None:
        """Suspect the reader whose connection had this descriptor.

        Its number may have been given to a new connection by now, so it is only a hint; and
        ZeroMQ announces the end before it carries it out. Sending tells.
        """
        for member in self.roster.members:
            if member.descriptor == descriptor:
                member.probes = _PROBES
                member.probe_at = 0.0
                return
        self.refusals.note("cut_off")

    def _probe(self, member: Member) -> None:
        now = time.monotonic()
        if now >= member.probe_at:
            member.probes -= 1
            member.probe_at = now + _PROBE_EVERY
            self.counters["probes"] += 1
            self.say(member, encode(Probe()))

    def _take_frames(self) -> None:
        receive = self._socket.recv
        try:
            for _ in range(_MAX_TURN):
                identity = receive(_NOBLOCK, copy=False)
                if not identity.more:  # the rest of what an exception broke into
                    continue
                first = frame = receive(_NOBLOCK, copy=False)
                parts = 1
                while frame.more:
                    frame = receive(_NOBLOCK, copy=False)
                    parts += 1
                self._take(identity.bytes, first, parts)
        except zmq.Again:
            pass

    def _take(self, identity: bytes, frame: zmq.Frame, parts: int) -> None:
        if parts > 1 or len(frame) > MAX_CONTROL_BYTES:
            self.refusals.note("oversized", frame)
            return
        try:
            said = parse_reader(frame.bytes)
        except Malformed:
            self.refusals.note("malformed", frame)
            return
        if isinstance(said, Hello):
            # Answered after all that was said before it, such as its predecessor's farewell.
            descriptor = descriptor_of(frame)
            if descriptor is None:
                self.refusals.note("malformed", frame)
            else:
                self._hellos.append((identity, said, descriptor, frame))
            return
        member = self.roster.find(identity)
        if member is None:
            if not (isinstance(said, Bye) and self._withdraw(identity)):
                self.refusals.note("not_joined", frame)
        elif isinstance(said, Bye):
            self.remove(member, "left")
        elif not member.window.acknowledge(said.next_seq, said.consumed_bytes):
            self.refusals.note("bad_acknowledgement", frame)

    def _withdraw(self, identity: bytes) -> bool:
        """Forget the hello of who left before it was answered; return whether there was one."""
        waiting = len(self._hellos)
        self._hellos = deque(hello for hello in self._hellos if hello[0] != identity)
        return len(self._hellos) < waiting

    def _answer(self, identity: bytes, said: Hello, descriptor: int, frame: zmq.Frame) -> None:
        """Let a reader in, or say why not."""
        reason: Refusal | None
        if said.version != VERSION:
            reason = Refusal.VERSION
        elif not self.roster.knows(said):
            reason = Refusal.WRONG_TOKEN
        elif self.roster.find(identity) is not None:
            self.refusals.note("repeated_hello", frame)
            return
        elif self._closing:
            self.reply(identity, encode(Closed(self.next_seq)))
            return
        else:
            reason = self.roster.refuses(said.rank)
        if reason is None:
            self._let_in(identity, said.rank, descriptor)
        else:
            self.refusals.note(reason.name.lower(), frame)
            self.reply(identity, encode(Refused(reason)))

    def _let_in(self, identity: bytes, rank: int, descriptor: int) -> None:
        messages, size = self._window, self._max_window_bytes
        window = SendWindow(self.next_seq, messages=messages, size=size)
        member = Member(identity, rank, window, descriptor)
        self._former.discard(descriptor)
        self.roster.join(member)
        self.counters["joined"] += 1
        logger.debug("remote reader %d joined at message %d", rank, self.next_seq)
        self.say(member, encode(Welcome(self.next_seq, messages, size, self.ready)))

    def take_leave(self) -> None:
        """Tell who is here, and who comes from now on, that the queue is closed."""
        self._closing = True
        for member in self.roster.members:
            self.say(member, encode(Closed(self.next_seq)))

    def all_read(self) -> bool:
        """Whether who is here has acknowledged all that was sent."""
        return not any(member.window.unread for member in self.roster.members)

    def settle(self) -> None:
        """Remove the readers that were found gone, as dead unless they had said farewell."""
        self.any_gone = False
        self._take_frames()
        for member in self.roster.members:
            if member.gone:
                self._dead |= {member.rank}
                self.remove(member, "died")
                unread = member.window.unread
                if unread:
                    logger.warning("remote reader %d died, %d messages unread", member.rank, unread)
                else:  # no loss; that it is gone is said by who applies the policy
                    logger.info("remote reader %d died; it had read everything", member.rank)

    def remove(self, member: Member, how: str) -> None:
        """Take a reader off, and count `how` it went."""
        self.counters[how] += 1
        self.roster.leave(member)
        if not member.probes:  # its end was not seen yet
            self._former.add(member.descriptor)

    def take_dead(self) -> frozenset[int]:
        """Return the ranks that were found dead since the last call."""
        dead, self._dead = self._dead, _NOBODY
        return dead
