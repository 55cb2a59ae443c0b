"""Which readers have joined a queue over TCP. Pure bookkeeping of the writer's."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from kvindex.errors import ConfigurationError
from kvindex.shm.remote.credits import SendWindow
from kvindex.shm.remote.frames import Hello, Refusal

__all__ = ["Member", "Roster"]

MAX_RANK = 2**32 - 1


class Member:
    """A reader that has joined.

    Attributes:
        identity: how ZeroMQ names its connection.
        rank: its rank.
        window: what it was sent, and what it has consumed.
        descriptor: of its connection's file; -1 once that was seen closed.
        gone: whether its connection was found gone.
        probes: how often it is still to be tried whether its connection is there.
        probe_at: when it is to be tried next.
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
    """The readers that are expected, and those that are here.

    Args:
        n_remote: how many are expected.
        ranks: which, or None: any, as long as there are no more than `n_remote`.
        token: what a reader must show.

    Raises:
        ConfigurationError: `n_remote` is no positive number, or `ranks` are not as many.

    Attributes:
        members: those who are here; a new tuple whenever one joins or leaves.
    """

    def __init__(self, n_remote: int, ranks: Collection[int] | None, token: bytes) -> None:
        if n_remote < 1:
            raise ConfigurationError(f"n_remote must be 1 or more, not {n_remote!r}")
        if ranks is not None and len(set(ranks)) != n_remote:
            raise ConfigurationError(f"{n_remote} remote readers, but ranks {sorted(ranks)}")
        self._n_remote = n_remote
        self._ranks = None if ranks is None else frozenset(ranks)
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
        if rank in self._seen:
            return None
        if self._ranks is not None:
            return None if rank in self._ranks else Refusal.UNKNOWN_RANK
        return None if len(self._seen) < self._n_remote else Refusal.UNKNOWN_RANK

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
