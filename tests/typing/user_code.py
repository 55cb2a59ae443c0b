"""What a user's program says to kvindex. It is type-checked, not run: by mypy and by pyright, both
strict, against an installed kvindex (`.ci/whole`).

`assert_type` fails where a type got lost, also where it became `Any`. A `type: ignore` fails where
the mistake in its line is not seen.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import array
import time
from collections import deque
from collections.abc import Sequence

from typing_extensions import Unpack, assert_type

import kvindex
from kvindex import (
    BlockStored,
    Client,
    ClosedError,
    EventBatch,
    EventPublisher,
    EventPublisherFactory,
    EventStream,
    Index,
    KVEventsConfig,
    KVIndexError,
    Match,
    MatchOptions,
    NotLiveError,
    Rank,
    RankBatch,
    RankExplanation,
    RankLost,
    RankMatch,
    RankRestarted,
    RankRows,
    RankStatus,
    ReplayPolicy,
    ResidentBlock,
    SocketOptions,
    State,
    StreamItem,
    TokenError,
    TokenIds,
    Trust,
    UnknownRankError,
    Worker,
    ZmqEventPublisher,
    connect,
)
from kvindex.testing import FakeEngine

WORKERS = [
    Worker("vllm-0", "tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5657", dp_size=2),
    Worker("vllm-1", ["tcp://10.0.0.2:5557"], topic="kv-events"),
    Worker("sglang", {3: "tcp://10.0.0.3:5557"}),
]


# A router ----------------------------------------------------------------------------------------


def route(client: Client, token_ids: Sequence[int]) -> Rank | None:
    """Choose among the ranks that are live; prefer those that lack nothing."""
    match = client.match(token_ids, lora="adapter", salt=None, media="GPU", ranks=["vllm-0/0"])
    assert_type(match, Match)
    assert_type(match.best, RankMatch | None)
    for found in match:
        assert_type(found, RankMatch)
        assert_type(found.by_medium, dict[str, int])
        if found.state == State.LIVE and found.complete:
            return found.rank
    assert_type(match[Rank("vllm-0", 0)].tokens, int)
    assert_type(match.top(3), list[RankMatch])
    assert_type(match["vllm-0"] in match, bool)
    assert_type(match.hits(RankRows(client.index.ranks)).tokens, array.array[int])
    assert_type(client.live_ranks(), frozenset[Rank])
    return match.best.rank if match and match.best is not None else None


def tokens_held(client: Client, token_ids: TokenIds, **options: Unpack[MatchOptions]) -> int:
    """Pass the options of `match` on."""
    best = client.match(token_ids, **options).best
    return 0 if best is None else best.tokens


def any_tokens(client: Client, index: Index) -> None:
    """Pass prompts as whatever holds integers."""
    data = array.array("i", [1, 2, 3])
    sequence: Sequence[int] = (1, 2)
    for answer in (client.match([1, 2]), client.match(range(9)), client.match(data)):
        assert_type(answer, Match)
    for answer in (client.match(sequence), client.match((1, 2)), client.match(deque([1, 2]))):
        assert_type(answer, Match)
    assert_type(index.match(memoryview(data)), Match)
    assert_type(client.match_many([[1, 2], [3]]), list[Match])
    trust = {Rank("a"): Trust(State.LIVE, True, 0)}
    assert_type(index.match([1, 2], trust=trust), Match)
    for ending in client.explain([1, 2, 3]):
        assert_type(ending, RankExplanation)
    print(tokens_held(client, data, lora=3, block_size=16))


def mistakes(client: Client) -> None:
    connect(WORKERS, on_loss="forget")  # type: ignore[arg-type]
    connect(WORKERS, prob_interval=1.0)  # type: ignore[call-arg]
    client.match(5)  # type: ignore[arg-type]
    client.match("text")  # type: ignore[arg-type]
    client.match([1.0])  # type: ignore[arg-type]
    client.match([[1]])  # type: ignore[arg-type]
    client.match([1], model="a")  # type: ignore[call-arg]
    client.match_many([[1]], medium="GPU")  # type: ignore[call-arg]
    EventStream(WORKERS, prob_interval=1.0)  # type: ignore[call-arg]
    tokens_held(client, [1], block_sise=16)  # type: ignore[call-arg]


def run() -> int:
    policy = ReplayPolicy(timeout=0.5, attempts=3)
    with connect(
        WORKERS,
        resume="state.kvindex",
        on_loss="keep",
        replay_policy=policy,
        socket_options=SocketOptions(hwm=10_000),
    ) as client:
        assert_type(client, Client)
        try:
            client.wait_live(timeout=5.0)
        except NotLiveError as error:
            print(error)
            return 1
        assert_type(client.ranks, tuple[Rank, ...])
        client.add(Worker("vllm-2", "tcp://10.0.0.4:5557"))
        client.remove("vllm-2")
        client.wait_live(timeout=None, ranks="vllm-0", complete=True)
        try:
            status = client.status("vllm-0/1")
        except UnknownRankError:
            return 2
        assert_type(status, RankStatus)
        assert_type(status.state, State)
        assert_type(status.counters, dict[str, int])
        assert_type(client.save("state.kvindex"), tuple[Rank, ...])
        chosen = route(client, list(range(100)))
        return 0 if chosen is None else chosen.dp_rank


async def run_in_a_task() -> None:
    async with connect(WORKERS) as client, EventStream(WORKERS) as stream:
        assert_type(client, Client)
        await client.wait_live_async(timeout=5.0)
        async for status in client.watch():
            assert_type(status, RankStatus)
            if status.state is State.LIVE:
                break
        async for item in stream:
            assert_type(item, StreamItem)


# An index of one's own ---------------------------------------------------------------------------


def mirror(stream: EventStream, index: Index) -> None:
    """Apply the ordered events, and drop what a loss or a restart makes untrue."""
    for item in stream:
        if isinstance(item, RankBatch):
            assert_type(item.batch, EventBatch)
            index.apply(item.rank, item.batch)
        elif isinstance(item, (RankLost, RankRestarted)):
            assert_type(item.reason, str)
            index.tree(item.rank).clear()
    for rank in index.ranks:
        for block in index.tree(rank).walk():
            assert_type(block, ResidentBlock)


def next_item(stream: EventStream) -> StreamItem | None:
    try:
        return stream.get(timeout=0.5)
    except TimeoutError:
        return None
    except ClosedError:
        raise SystemExit(1) from None


def explain_refusal(index: Index, data: bytes) -> str:
    try:
        index.apply(Rank("a"), data)
        index.match([2**64])
    except TokenError as error:
        return f"not tokens: {error}"
    except KVIndexError as error:
        return str(error)
    assert_type(len(index), int)
    backend: str = kvindex.BACKEND
    print(backend)
    return ""


# An engine ---------------------------------------------------------------------------------------


class Logged(EventPublisher):
    """A publisher of one's own."""

    def publish(self, events: EventBatch) -> None:
        print(events.ts, len(events.events))

    def shutdown(self) -> None:
        print("done")


def publish() -> None:
    EventPublisherFactory.register_publisher("logged", Logged)
    stored = BlockStored(block_hashes=[1, b"2"], token_ids=[1, 2], block_size=2, medium="GPU")
    batch = EventBatch(ts=time.time(), events=[stored])
    with ZmqEventPublisher(0, endpoint="tcp://*:0", dialect="sglang-0.5.18") as publisher:
        assert_type(publisher, ZmqEventPublisher)
        publisher.publish(batch)
    config = KVEventsConfig.from_cli('{"publisher": "logged"}')
    with EventPublisherFactory.create(config, data_parallel_rank=0) as other:
        assert_type(other, EventPublisher)
        other.publish(batch)


def try_the_router() -> None:
    with FakeEngine("vllm-0") as engine:
        with connect(Worker("vllm-0", engine.endpoint, replay=engine.replay_endpoint)) as client:
            engine.serve(range(100))
            client.wait_live(5.0)
            assert route(client, range(100)) == Rank("vllm-0", 0)
