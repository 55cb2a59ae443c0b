"""A replica, or a server, in a process of its own, driven through a pipe; and what equals what."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Pipe
from typing import Any

from kvindex import Client, Rank, RankStatus, Worker
from kvindex.replicas import FanOut, Replica, join
from kvindex.subscribe import State
from kvindex.testing import FakeEngine, Workload
from tests.live import PATIENCE, REPLAYS, until, within
from tests.replicas.hand_server import held
from tests.shm.queue_peers import Nursery, Peer, ProcessPeer

Answers = list[dict[Rank, tuple[Any, ...]]]
Mark = dict[Rank, tuple[Any, ...]]


BEFORE, MEANWHILE, LATER = (Workload(30, seed=seed) for seed in (1, 2, 3))
PROMPTS = [list(r.token_ids) for w in (BEFORE, MEANWHILE, LATER) for r in w][::3]


def fan_out(path: str, *workers: Worker, **options: Any) -> FanOut:
    return FanOut(workers, path, **{"replay_policy": REPLAYS, "probe_interval": 0.3, **options})


def mark(statuses: Mapping[Rank, RankStatus]) -> Mark:
    """How far every rank is, and how far to be trusted."""
    return {r: (s.epoch, s.seq, s.trust, s.losses, s.restarts) for r, s in statuses.items()}


def answers(asked: Client | Replica, prompts: Iterable[Any]) -> Answers:
    """What is answered to each prompt, trust included."""
    return [
        {
            hit.rank: (
                hit.blocks,
                hit.tokens,
                dict(hit.by_medium),
                hit.state,
                hit.complete,
                hit.lag,
            )
            for hit in match
        }
        for match in asked.match_many(prompts)
    ]


class FanOutEnd:
    """A replica or a server; runs in the peer's process."""

    replica: Replica
    fanout: FanOut

    def join(self, path: str, timeout: float = PATIENCE, **options: Any) -> None:
        self.replica = join(path, timeout, **options)

    def leave(self) -> None:
        self.replica.close()

    def reached(self, wanted: Mark, timeout: float = PATIENCE) -> Any:
        """Wait until every rank is as marked."""
        if not within(timeout, self.replica.statuses, lambda now: mark(now) == wanted):
            return wanted, self.replica.statistics()
        return None

    def stale(self, reason: str, timeout: float = PATIENCE) -> dict[Rank, str]:
        """Wait until every rank is stale for this reason; the reasons."""

        def reached(statuses: Mapping[Rank, RankStatus]) -> bool:
            return bool(statuses) and all(
                s.state is State.STALE and reason in s.reason for s in statuses.values()
            )

        within(timeout, self.replica.statuses, reached)
        return {rank: self.replica.status(rank).reason for rank in self.replica.ranks}

    def rejoined(self, joins: int, timeout: float = PATIENCE) -> bool:
        """Wait until it has joined so many times and follows."""

        return within(
            timeout,
            lambda: self.replica.statistics()["replica"],
            lambda now: now["joins"] >= joins and now["following"],
        )

    def held(self) -> Any:
        return held(self.replica.index)

    def answers(self, prompts: list[Any]) -> Answers:
        return answers(self.replica, prompts)

    def statistics(self) -> dict[str, Any]:
        return self.replica.statistics()

    def fork(self) -> int:
        """Have a child that does nothing and outlives this process; its id."""
        ours, theirs = Pipe()
        with ours, theirs:
            pid = os.fork()
            if pid == 0:
                theirs.send("it has run what runs after a fork")
                signal.pause()
            ours.recv()
        return pid

    def serve(self, path: str, workers: list[Worker], **options: Any) -> None:
        self.fanout = fan_out(path, *workers, **options)
        if workers:
            self.fanout.client.wait_live(PATIENCE)

    def server_mark(self, last: dict[Rank, int]) -> Mark:
        """Wait until these batches are applied; how far the server is then."""
        client = self.fanout.client
        until(
            client.statuses,
            lambda s: all(s[r].seq == q and s[r].state is State.LIVE for r, q in last.items()),
        )
        return mark(client.subscriber.statuses())

    def server_held(self) -> Any:
        return held(self.fanout.client.index)


class Site:
    """One path, and who meets there: engines, servers, and replicas here and in processes."""

    def __init__(self, path: str, nursery: Nursery, stack: ExitStack) -> None:
        self.path = path
        self._nursery = nursery
        self._stack = stack

    def engine(self, name: str = "a", **options: Any) -> FakeEngine:
        return self._stack.enter_context(FakeEngine(name, **options))

    def serve(self, *workers: Worker, **options: Any) -> FanOut:
        return self._stack.enter_context(fan_out(self.path, *workers, **options))

    def join(self, **options: Any) -> Replica:
        return self._stack.enter_context(join(self.path, PATIENCE, **options))

    def peer(self) -> ProcessPeer:
        peer = self._nursery.fork()
        self._stack.callback(peer.end)
        return peer

    def peers(self, count: int, **options: Any) -> list[ProcessPeer]:
        """So many processes that have joined."""
        peers = [self.peer() for _ in range(count)]
        for peer in peers:
            peer.start("join", self.path, **options)
        for peer in peers:
            peer.result()
        return peers


def counted(fanout: FanOut, **counts: Any) -> None:
    """Wait until the server's statistics have these values."""
    until(fanout.statistics, lambda statistics: counts.items() <= statistics.items())


def assert_same(client: Client, replica: Replica) -> None:
    """Wait until a replica here is as far as the server; it holds and answers the same."""
    wanted = mark(client.subscriber.statuses())
    until(replica.statuses, lambda statuses: mark(statuses) == wanted)
    assert replica.ranks == client.ranks
    assert held(replica.index) == held(client.index)
    assert answers(replica, PROMPTS) == answers(client, PROMPTS)


def assert_equal(client: Client, *peers: Peer, prompts: list[Any] = PROMPTS) -> None:
    """Assert that each replica is, holds and answers what the server's own client does."""
    wanted = mark(client.subscriber.statuses())
    for peer in peers:
        peer.start("reached", wanted)
    for peer in peers:
        assert peer.result() is None
    for peer in peers:
        peer.start("held")
    own = held(client.index)
    assert all(peer.result() == own for peer in peers)
    for peer in peers:
        peer.start("answers", prompts)
    expected = answers(client, prompts)
    assert all(peer.result() == expected for peer in peers)
