"""What tests over real sockets share: clients, and waiting for a state without sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvindex import Client, Match, Rank, RankStatus, ReplayPolicy, State, Worker
from kvindex.subscribe import Subscriber
from kvindex.testing import FakeEngine, FaultyLink, Workload

PATIENCE = 120.0  # seconds: far more than anything takes, so that a slow machine is no failure
# A reply that comes late on a slow machine is no loss: a minute passes before one is declared.
REPLAYS = ReplayPolicy(timeout=5.0, attempts=12, backoff=0.02, max_backoff=0.1)
QUICK = msgspec.structs.replace(REPLAYS, timeout=0.3, attempts=3)  # where no reply will come

# Of warm restarts: before the save, until the next process, and under it.
BEFORE = Workload(40, seed=1)
MEANWHILE = Workload(10, seed=2)
LATER = Workload(10, seed=3)
PROMPTS = [request.token_ids for workload in (BEFORE, MEANWHILE) for request in workload][::4]

_T = TypeVar("_T")


def until(
    look: Callable[[], _T], done: Callable[[_T], object] = bool, timeout: float = PATIENCE
) -> _T:
    """Look until something is as it should be, where nothing announces it; return it."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()  # never set
    while not done(seen := look()):
        assert time.monotonic() < deadline, seen
        pause.wait(0.005)
    return seen


def within(timeout: float, look: Callable[[], _T], done: Callable[[_T], object] = bool) -> bool:
    """Look until something is as it should be; return whether it was in time."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()  # never set
    while not (is_so := done(look())) and time.monotonic() < deadline:
        pause.wait(0.005)
    return bool(is_so)


@contextmanager
def meanwhile(change: Callable[[], object], pause: float = 0.0) -> Iterator[None]:
    """Have another thread call a function again and again, at least once; raise what it raises.

    Between two calls it pauses for so many seconds.
    """
    begun, done = threading.Event(), threading.Event()

    def repeat() -> None:
        try:
            while not done.is_set():
                change()
                begun.set()
                done.wait(pause)
        finally:
            begun.set()

    with ThreadPoolExecutor(1) as thread:
        repeating = thread.submit(repeat)
        try:
            assert begun.wait(PATIENCE)
            yield
        finally:
            done.set()
        repeating.result(PATIENCE)


def worker_of(engine: FakeEngine, via: FaultyLink | None = None, **options: Any) -> Worker:
    source = via or engine
    return Worker(
        options.pop("worker", engine.worker),
        {engine.rank.dp_rank: source.endpoint},
        **{
            "replay": None
            if source.replay_endpoint is None
            else {engine.rank.dp_rank: source.replay_endpoint},
            **options,
        },
    )


def link_to(engine: FakeEngine, **options: Any) -> FaultyLink:
    return FaultyLink(engine.endpoint, engine.replay_endpoint, **options)


def client_of(*workers: Worker, **options: Any) -> Client:
    return Client(workers, **{"replay_policy": REPLAYS, "probe_interval": 0.3, **options})


def caught_up(client: Client | Subscriber, *engines: FakeEngine, timeout: float = PATIENCE) -> None:
    """Wait until every engine's last batch is applied and its rank is live."""
    last = {engine.rank: engine.published - 1 for engine in engines}

    def reached(statuses: Mapping[Rank, RankStatus]) -> bool:
        return all(
            rank in statuses
            and statuses[rank].state is State.LIVE
            and (seq < 0 or statuses[rank].seq == seq)
            for rank, seq in last.items()
        )

    def look() -> Mapping[Rank, RankStatus]:
        # Statuses show up to 0.1 s later what lanes take, but at once what a call finds.
        if isinstance(client, Client):  # not a replica
            client.subscriber.call(lambda: None)
        return client.statuses()

    assert within(timeout, look, reached), explain(client, last)


@contextmanager
def followed(
    *engines: FakeEngine, via: FaultyLink | None = None, **options: Any
) -> Iterator[Client]:
    """A client that has caught up with engines, or with one behind a link."""
    with client_of(*(worker_of(engine, via) for engine in engines), **options) as client:
        caught_up(client, *engines)
        yield client


def save_of(*engines: FakeEngine, path: Path, **options: Any) -> None:
    """Have a first process catch up with the engines, save, and end."""
    with followed(*engines, **options) as client:
        assert client.save(path) == client.ranks


def wait_status(client: Client, rank: Rank, timeout: float = PATIENCE, **fields: Any) -> RankStatus:
    """Wait until a rank's status has these values and return it."""

    def reached(statuses: Mapping[Rank, RankStatus]) -> bool:
        status = statuses.get(rank)
        return status is not None and all(getattr(status, k) == v for k, v in fields.items())

    assert within(timeout, client.statuses, reached), explain(client, fields)
    return client.status(rank)


def wait_counter(
    client: Client, rank: Rank, name: str, at_least: int = 1, timeout: float = PATIENCE
) -> None:
    """Wait until a rank's counter has reached a value."""
    until(client.statuses, lambda now: now[rank].counters.get(name, 0) >= at_least, timeout)


def explain(client: Client | Subscriber, wanted: object) -> str:
    lines = [f"not reached: {wanted}"]
    lines += [str(client.status(rank)) for rank in client.ranks]
    return "\n".join(lines)


def resident(client: Client, rank: Rank) -> dict[tuple[Any, str, int], int]:
    """What the index holds of a rank, in the form of `FakeEngine.truth`."""
    return {
        (block.block_hash, block.medium, block.group_idx): block.copies
        for block in client.index.tree(rank).walk()
    }


def truth(engine: FakeEngine) -> dict[tuple[Any, str, int], int]:
    """What an engine holds, its int hashes modulo 2**64 as in the index."""
    return {
        (h % 2**64 if isinstance(h, int) else h, medium, group or 0): copies
        for (h, medium, group), copies in engine.truth().items()
    }


def assert_true(client: Client, *engines: FakeEngine, prompts: Iterable[Any] = ()) -> None:
    """Assert that the index holds exactly what the engines hold."""
    client.index.check()
    for engine in engines:
        assert resident(client, engine.rank) == truth(engine), explain(client, engine.rank)
        for prompt in prompts:
            match: Match = client.match(prompt)
            assert match[engine.rank].tokens == engine.lookup(prompt).tokens
