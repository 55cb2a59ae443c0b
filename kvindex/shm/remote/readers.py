"""Who reads a queue over TCP: the writer lets readers in, hears them, and notices who is gone."""

from __future__ import annotations

import hmac
import logging
from collections import Counter
from collections.abc import Sequence

import zmq

from kvindex.errors import ConfigurationError
from kvindex.log_rate import LogRate
from kvindex.shm.remote.connections import Callers
from kvindex.shm.remote.credits import SendWindow
from kvindex.shm.remote.frames import (
    MAX_CONTROL_BYTES,
    VERSION,
    Bye,
    Closed,
    Evicted,
    Hello,
    Malformed,
    Refusal,
    Refused,
    Welcome,
    WritersWord,
    encode,
    parse_reader,
)

__all__ = ["Readers"]

logger = logging.getLogger(__name__)

_MAX_TURN = 1000  # messages taken from readers (and strangers) before the writer goes on
_FATES = ("joined", "left", "died", "evicted")
_REASONS = (
    "bad_acknowledgement",
    "cut_off",
    "handshake",
    "malformed",
    "not_joined",
    "oversized",
    "rank_taken",
    "repeated_hello",
    "unknown_rank",
    "version",
    "wrong_token",
)


class Readers:
    """The readers that are expected, and those who are here. Owned by the thread that sends.

    Args:
        callers: the writer's connections.
        window: what the readers may have unread.
        n_remote: how many readers are expected, whatever their ranks are.
        token: what a reader must show.

    Attributes:
        ranks: of the readers that are here, by the names of their connections; a new dict at each
            change, so that any thread may look.
        lost: the names of connections that were found gone, until `serve` looks into it.
        ready: whether a reader that joins now is told at once that all have joined.
    """

    def __init__(
        self, callers: Callers, window: SendWindow, *, n_remote: int, token: bytes
    ) -> None:
        if n_remote < 1:
            raise ConfigurationError(f"n_remote must be 1 or more, not {n_remote!r}")
        self.ranks: dict[bytes, int] = {}
        self.lost: list[bytes] = []
        self.ready = False
        self._callers = callers
        self._window = window
        self._n_remote = n_remote
        self._token = token
        self._seen: set[int] = set()  # ranks that have ever joined
        self._dead: set[int] = set()  # ranks for `take_dead`
        self._hellos: dict[bytes, tuple[Hello, zmq.Frame]] = {}  # not answered yet
        self._closing = False
        self._fates: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._log_rate = LogRate()
        self._unlogged = 0

    @property
    def awaited(self) -> int:
        """How many have never joined."""
        return self._n_remote - len(self._seen)

    @property
    def absent(self) -> int:
        """How many are not here: have never joined, have left, or died."""
        return self._n_remote - len(self.ranks)

    def tell(self, word: WritersWord) -> None:
        """Say something to every reader."""
        part = [encode(word)]
        for name in self.ranks:
            self.say(name, part)

    def say(self, name: bytes, parts: Sequence[bytes | zmq.Frame]) -> None:
        """Send to one reader; the window bounds what is queued."""
        if not self._callers.send(name, parts):
            self.lost.append(name)

    def serve(self) -> None:
        """Take what readers and strangers have said, without waiting, and remove who is gone."""
        self._take_messages()
        self._take_ends()
        while self.lost:
            self._take_messages()  # their last words may be a farewell
            lost, self.lost = self.lost, []
            for name in lost:
                if name in self.ranks:
                    self._bury(name)
            self._take_ends()
        # Now that whose places they may take have gone.
        hellos, self._hellos = self._hellos, {}
        for name, (said, frame) in hellos.items():
            self._answer(name, said, frame)

    def evict(self, rank: int) -> bool:
        """Remove the reader of this rank; return whether there was one."""
        for name in [name for name, theirs in self.ranks.items() if theirs == rank]:
            self.say(name, [encode(Evicted())])
            self._remove(name, "evicted")
            return True
        return False

    def take_leave(self) -> None:
        """Tell who is here, and who comes from now on, that the queue is closed."""
        self._closing = True
        self.tell(Closed(self._window.next_seq))

    def take_dead(self) -> frozenset[int]:
        """Return the ranks that were found dead since the last call."""
        dead, self._dead = self._dead, set()
        return frozenset(dead)

    def statistics(self) -> dict[str, int]:
        """Return what became of readers, and what was refused as `refused_<reason>`. Any thread."""
        fates = {fate: self._fates[fate] for fate in _FATES}
        return fates | {f"refused_{reason}": self._refused[reason] for reason in _REASONS}

    # -- what they say

    def _take_messages(self) -> None:
        for _ in range(_MAX_TURN):
            heard = self._callers.hear()
            if heard is None:
                return
            self._take(*heard)

    def _take(self, name: bytes, frames: list[zmq.Frame]) -> None:
        frame = frames[0]
        if len(frames) > 1 or len(frame) > MAX_CONTROL_BYTES:
            self._refuse("oversized", frame)
            return
        try:
            said = parse_reader(frame.bytes)
        except Malformed:
            self._refuse("malformed", frame)
            return
        if isinstance(said, Hello):
            if name in self._hellos:
                self._refuse("repeated_hello", frame)
            self._hellos[name] = said, frame
        elif isinstance(said, Bye):
            asked = self._hellos.pop(name, None)
            if name in self.ranks:
                self._remove(name, "left")
            elif asked is None:
                self._refuse("not_joined", frame)
        elif name not in self.ranks:
            self._refuse("not_joined", frame)
        elif not self._window.acknowledge(self.ranks[name], said.next_seq):
            self._refuse("bad_acknowledgement", frame)

    def _answer(self, name: bytes, said: Hello, frame: zmq.Frame) -> None:
        """Let a reader in, or say why not."""
        reason: Refusal | None = None
        if said.version != VERSION:
            reason = Refusal.VERSION
        elif not hmac.compare_digest(said.token, self._token):
            reason = Refusal.WRONG_TOKEN
        elif name in self.ranks:
            self._refuse("repeated_hello", frame)
            return
        elif self._closing:
            self._callers.send(name, [encode(Closed(self._window.next_seq))])
            return
        elif said.rank in self.ranks.values():
            reason = Refusal.RANK_TAKEN
        elif said.rank not in self._seen and not self.awaited:
            reason = Refusal.UNKNOWN_RANK
        if reason is not None:
            self._refuse(reason.name.lower(), frame)
            self._callers.send(name, [encode(Refused(reason))])
        elif self._callers.introduce(name, frame):
            self._let_in(name, said.rank)
        else:
            self._refuse("cut_off", frame)

    def _let_in(self, name: bytes, rank: int) -> None:
        window = self._window
        self._seen.add(rank)
        self.ranks = {**self.ranks, name: rank}
        window.join(rank)
        self._fates["joined"] += 1
        logger.debug("remote reader %d joined at message %d", rank, window.next_seq)
        welcome = Welcome(window.next_seq, window.messages, window.size, self.ready)
        self.say(name, [encode(welcome)])

    # -- how they end

    def _take_ends(self) -> None:
        for name, failed in self._callers.ended():
            if name in self.ranks:
                self.lost.append(name)
            elif not name:
                self._refuse("handshake" if failed else "cut_off")

    def _bury(self, name: bytes) -> None:
        rank = self.ranks[name]
        unread = self._window.unread_by(rank)
        self._dead.add(rank)
        self._remove(name, "died")
        if unread:
            logger.warning("remote reader %d died, %d messages unread", rank, unread)
        else:  # no loss; whoever applies the policy reports that it is gone
            logger.info("remote reader %d died; it had read everything", rank)

    def _remove(self, name: bytes, fate: str) -> None:
        self._fates[fate] += 1
        self._window.leave(self.ranks[name])
        self.ranks = {other: rank for other, rank in self.ranks.items() if other != name}

    def _refuse(self, reason: str, frame: zmq.Frame | None = None) -> None:
        """Count a message that is ignored, or a whole connection."""
        self._refused[reason] += 1
        self._unlogged += 1
        if self._log_rate.allows():
            logger.warning(
                "refused from remote readers or strangers: %d since the last such line, now for"
                " %s, from %s",
                self._unlogged,
                reason,
                _peer(frame),
            )
            self._unlogged = 0


def _peer(frame: zmq.Frame | None) -> str:
    if frame is None:
        return "an unknown address"
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
