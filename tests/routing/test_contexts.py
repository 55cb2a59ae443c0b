"""Contexts: which prompts go on with which, and what ranks should keep of them."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvindex import BlockRemoved, BlockStored, EventBatch, Index, Rank, TokenError
from kvindex.routing import LocalLoadBoard, Router, contexts
from kvindex.routing.contexts import CONTEXT_LIFE
from kvindex.routing.shared_load import SharedBoard
from tests.examples import examples
from tests.routing.fleet import A, B, C, Clock, fleet

pytestmark = pytest.mark.property

RANKS = [A, B, C]
STEP, BACK = 40, 8


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_STEP", STEP)
    monkeypatch.setattr(contexts, "_BACK", BACK)


def kept(router: Router) -> dict[str, int]:
    """Return the tokens that each rank should keep, of those that should keep any."""
    ranks = router.statistics()["ranks"]
    tokens = {rank: values["context_tokens"] for rank, values in ranks.items()}
    return {rank: count for rank, count in tokens.items() if count}


@dataclass
class Chat:
    """The model of a session: all that it has said, and where it was served last."""

    tokens: list[int]
    rank: Rank
    kept: int
    at: float


class Histories(RuleBasedStateMachine):
    """Chats with prompts of their own go on, pause and end; the model knows each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.router = Router(fleet("abc"), clock=self.clock)
        self.chats: list[Chat] = []

    @rule(rank=st.sampled_from(RANKS), length=st.integers(1, 150))
    def begin(self, rank: Rank, length: int) -> None:
        self.chats.append(Chat([len(self.chats)] * length, rank, 0, 0.0))
        self.ask(self.chats[-1], rank)

    @rule(which=st.integers(0, 100), rank=st.sampled_from(RANKS), more=st.integers(0, 200))
    def go_on(self, which: int, rank: Rank, more: int) -> None:
        if self.chats:
            chat = self.chats[which % len(self.chats)]
            chat.tokens += chat.tokens[:1] * more
            self.ask(chat, rank)

    def ask(self, chat: Chat, rank: Rank) -> None:
        self.router.reserve(chat.tokens, ranks=[rank]).finish()
        if len(chat.tokens) >= STEP + BACK:
            chat.rank, chat.kept, chat.at = rank, len(chat.tokens), self.clock.now

    @rule(seconds=st.sampled_from([1.0, 100.0, CONTEXT_LIFE / 2, CONTEXT_LIFE]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def each_rank_should_keep_the_last_prompts_of_the_sessions_it_served_lately(self) -> None:
        expected: Counter[str] = Counter()
        for chat in self.chats:
            if self.clock.now - chat.at < CONTEXT_LIFE and chat.kept:
                expected[str(chat.rank)] += chat.kept
        assert kept(self.router) == expected


TestHistories = Histories.TestCase
TestHistories.settings = examples(50)


def test_a_prompt_goes_on_though_its_end_has_changed() -> None:
    router = Router(fleet("a"))
    router.reserve(range(100)).finish()  # its last mark ends at 80
    router.reserve([*range(80), *[7] * 50]).finish()
    assert kept(router) == {"a/0": 130}
    router.reserve([*range(110), *[9] * 50]).finish()  # not at 120, but at 80
    assert kept(router) == {"a/0": 130 + 160}


def test_a_prompt_goes_on_whatever_form_its_tokens_have() -> None:
    router = Router(fleet("a"))
    forms: list[Any] = [
        list(range(100)),
        tuple(range(100)),
        range(100),
        array("i", range(100)),
        memoryview(array("Q", range(100))),
        deque(range(100)),
    ]
    for form in forms:
        router.reserve(form).finish()
    assert kept(router) == {"a/0": 100}


def test_the_same_tokens_under_another_adapter_or_salt_are_another_context() -> None:
    router = Router(fleet("a"))
    router.reserve(range(100)).finish()
    router.reserve(range(100), lora="x").finish()
    router.reserve(range(100), salt="y").finish()
    assert kept(router) == {"a/0": 300}


def test_a_prompt_goes_on_within_so_many_marks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_MOST_LOOKS", 2)
    router = Router(fleet("a"))
    router.reserve(range(STEP + BACK)).finish()
    router.reserve(range(2 * STEP + BACK)).finish()
    assert kept(router) == {"a/0": 2 * STEP + BACK}
    router.reserve(range(4 * STEP + BACK)).finish()
    assert kept(router) == {"a/0": 2 * STEP + BACK + 4 * STEP + BACK}


def test_a_short_prompt_is_not_kept() -> None:
    router = Router(fleet("a"))
    router.reserve(range(STEP + BACK - 1)).finish()
    router.reserve([], prompt_tokens=1_000).finish()
    router.book("a", 1_000, 1_000).finish()
    assert kept(router) == {}


def test_contexts_are_bounded_and_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "MOST_CONTEXTS", 3)
    router = Router(fleet("a"))
    for number in range(5):
        router.reserve([number] * 100).finish()
    assert router.statistics()["contexts"] == {"open": 3, "dropped": 2}
    assert kept(router) == {"a/0": 300}


def test_a_token_that_is_none_is_refused_and_nothing_is_booked() -> None:
    router = Router(fleet("a"))
    strange: list[Any] = [*range(70), [1, 2], *range(30)]
    with pytest.raises(TokenError):
        router.reserve(strange)
    assert router.statistics()["bookings"]["open"] == 0


@pytest.mark.parametrize("board", [LocalLoadBoard, SharedBoard])
def test_the_contexts_of_a_rank_end_with_it(board: Callable[[], LocalLoadBoard]) -> None:
    index, clock = fleet("ab"), Clock()
    router = Router(index, clock=clock, loads=board())
    router.reserve(range(100), ranks="a").finish()
    router.reserve([7] * 100, ranks="b").finish()
    index.remove(A)
    assert kept(router) == {"b/0": 100}
    assert router.statistics()["contexts"]["open"] == 1
    index.add(A)
    index.add(C)
    assert kept(router) == {"b/0": 100}
    clock.now += CONTEXT_LIFE
    assert kept(router) == {}


def fill(index: Index, rank: Rank, blocks: int, first: int = 0) -> None:
    """Have a rank hold so many blocks more, of what nobody asks for."""
    hashes = [10**6 * ord(rank.worker[0]) + first + block for block in range(blocks)]
    tokens = [hashes[0]] * 16 * blocks
    stored = BlockStored(block_hashes=[*hashes], token_ids=tokens, block_size=16)
    index.apply(rank, EventBatch(ts=0.0, events=[stored]))


def evict(index: Index, rank: Rank) -> None:
    """Have a rank evict the first of these blocks."""
    removed = BlockRemoved(block_hashes=[10**6 * ord(rank.worker[0])])
    index.apply(rank, EventBatch(ts=0.0, events=[removed]))


def test_the_size_of_a_cache_is_known_once_it_evicts_until_it_is_cleared() -> None:
    index = fleet("a")
    router = Router(index)

    def cache() -> int | None:
        router.reserve(range(100), ranks="a").finish()
        size: int | None = router.statistics()["ranks"]["a/0"]["cache_tokens"]
        return size

    fill(index, A, 60)
    assert cache() is None
    fill(index, A, 40, first=60)
    assert cache() is None
    evict(index, A)
    assert cache() == 1_600
    index.add(B)  # the rows are made anew
    fill(index, A, 10, first=100)
    assert cache() == 109 * 16
    index.tree(A).clear()
    fill(index, A, 10)
    assert cache() is None
    evict(index, A)
    assert cache() == 10 * 16


@pytest.mark.parametrize("board", [LocalLoadBoard, SharedBoard])
def test_an_idle_rank_that_is_full_of_paused_sessions_costs_more(
    board: Callable[[], LocalLoadBoard],
) -> None:
    index = fleet("ab")
    router = Router(index, loads=board())
    for rank in (A, B):
        fill(index, rank, 64)
    for number in range(8):  # 800 tokens of sessions, in a cache of 1,024
        router.reserve([number] * 100, ranks="a").finish()
    router.book("b", 700, 700).finish()  # so that both were given as much
    router.reserve([10] * 100, ranks="b").finish()

    def costs() -> dict[str, float | None]:
        return {str(c.rank): c.cost for c in router.select([50] * 100).candidates}

    # Neither has evicted anything: they may have room for more.
    assert costs() == pytest.approx({"a/0": 300.0, "b/0": 300.0}, abs=0.1)
    for number, rank in enumerate((A, B)):
        evict(index, rank)
        router.reserve([10 * number] * 100, ranks=[rank]).finish()
    assert kept(router) == {"a/0": 800, "b/0": 100}
    over = 100 + 800 - 0.8 * 1_024
    assert costs() == pytest.approx({"a/0": 300.0 + 0.3 * over, "b/0": 300.0}, abs=0.1)
